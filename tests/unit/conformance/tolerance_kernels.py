"""Kernels that prove the tolerance: legitimate ways to compute attention, and the same with one defect each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from heedful.conformance.batch import Batch
    from heedful.conformance.cases import Case


@dataclass(frozen=True)
class Problem:
    """One sequence: query [q, H, D], key [k, KV, D], value [k, KV, Dv], which keys are hidden, and how to compute."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    causal: bool = True
    window: int | None = None
    slopes: Tensor | None = None
    cap: float | None = None
    sinks: Tensor | None = None
    tile: int = 64
    backwards: bool = False
    splits: int = 1
    weights_dtype: torch.dtype | None = None
    sum_dtype: torch.dtype = torch.float32
    score_dtype: torch.dtype = torch.float32
    distance_dtype: torch.dtype = torch.float32
    shift: int = 0
    heads_tiled: bool = False


def scores_of(p: Problem) -> Tensor:
    """fp32 [H, q, k], -inf where hidden."""
    heads, kv = p.query.shape[1], p.key.shape[1]
    index = torch.arange(heads) % kv if p.heads_tiled else torch.arange(heads) // (heads // kv)
    distance = torch.arange(len(p.key) - len(p.query), len(p.key))[:, None] - torch.arange(len(p.key))
    s = torch.einsum("qhd,khd->hqk", p.query.float(), p.key[:, index].float()) * p.scale
    s = s.to(p.score_dtype).float()
    if p.cap is not None:
        s = p.cap * torch.tanh(s / p.cap)
    if p.slopes is not None:
        positions = torch.arange(len(p.key)).to(p.distance_dtype).float()
        bias = positions[len(p.key) - len(p.query) :, None] - positions if len(p.query) <= len(p.key) else distance
        s = s - p.slopes[:, None, None] * bias.abs()
    distance = distance + p.shift
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if p.causal:
        hidden |= distance < 0
    if p.window is not None:
        hidden |= distance.abs() >= p.window
    return s.masked_fill(hidden, -math.inf)


def part(p: Problem, scores: Tensor, value: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Online softmax over one range of keys: (top, total, sum), starting from the logit ``top`` (a sink or -inf)."""
    low, total = torch.finfo(torch.float32).min, top.isfinite().float()
    summed = torch.zeros(*top.shape[:2], value.shape[-1])
    starts = list(range(0, scores.shape[-1], p.tile))
    for start in reversed(starts) if p.backwards else starts:
        tile = slice(start, start + p.tile)
        new = torch.maximum(top, scores[..., tile].amax(-1, keepdim=True))
        fade, w = (torch.exp(x - new.clamp(min=low)) for x in (top, scores[..., tile]))
        total = total * fade + w.sum(-1, keepdim=True)
        w = w.to(p.weights_dtype or p.query.dtype).float()
        summed = (summed * fade + w @ value[:, tile]).to(p.sum_dtype).float()
        top = new
    return top, total, summed


def tiled(p: Problem) -> Tensor:
    """[q, H, Dv] in query's dtype."""
    heads, kv = p.query.shape[1], p.key.shape[1]
    index = torch.arange(heads) % kv if p.heads_tiled else torch.arange(heads) // (heads // kv)
    value, scores = p.value[:, index].float().transpose(0, 1), scores_of(p)
    nothing = torch.full((*scores.shape[:2], 1), -math.inf)
    sink = nothing if p.sinks is None else p.sinks[:, None, None].expand_as(nothing)
    size = max(1, -(-len(p.key) // p.splits))
    cuts = [slice(a, a + size) for a in range(0, len(p.key), size)] or [slice(0, 0)]
    parts = [part(p, scores[..., c], value[:, c], nothing if i else sink) for i, c in enumerate(cuts)]
    top = torch.stack([t for t, _, _ in parts]).amax(0)
    fades = [torch.exp(t - top.clamp(min=torch.finfo(torch.float32).min)) for t, _, _ in parts]
    total = sum(f * n for f, (_, n, _) in zip(fades, parts, strict=True))
    summed = sum(f * s for f, (_, _, s) in zip(fades, parts, strict=True))
    return torch.where(total > 0, summed / total, 0.0).to(p.query.dtype).transpose(0, 1)


def normalised_first(p: Problem) -> Tensor:
    """Softmax first, then the weights rounded to query's dtype: what a plain 16-bit kernel with fp32 scores does."""
    heads, kv = p.query.shape[1], p.key.shape[1]
    s = scores_of(p)
    sink = s.new_full((*s.shape[:2], 1), -math.inf)
    sink = sink if p.sinks is None else p.sinks[:, None, None].expand_as(sink)
    w = torch.softmax(torch.cat([s, sink], -1), -1).nan_to_num(0.0)[..., :-1].to(p.query.dtype).float()
    value = p.value.repeat_interleave(heads // kv, 1).float().transpose(0, 1)
    return (w @ value).to(p.query.dtype).transpose(0, 1)


def torch_sdpa(p: Problem) -> Tensor:
    """torch's own kernel with a float mask that holds window and ALiBi; sinks come in by one zero key more."""
    heads, kv = p.query.shape[1], p.key.shape[1]
    k, v = (x.repeat_interleave(heads // kv, 1).transpose(0, 1) for x in (p.key, p.value))
    zero = replace(p, query=torch.zeros_like(p.query), cap=None)
    mask = scores_of(zero)
    if p.sinks is not None:
        k, v = (torch.cat([x, x.new_zeros(heads, 1, x.shape[-1])], 1) for x in (k, v))
        mask = torch.cat([mask, p.sinks[:, None, None].expand(heads, len(p.query), 1)], -1)
    empty = mask.isneginf().all(-1, keepdim=True)
    out = torch.nn.functional.scaled_dot_product_attention(
        p.query.transpose(0, 1)[None], k[None], v[None], attn_mask=mask[None], scale=p.scale
    )[0]
    return torch.where(empty, 0.0, out).to(p.query.dtype).transpose(0, 1)


def run(batch: Batch, kernel: Callable[[Problem], Tensor]) -> Tensor:
    """The batch through a kernel, sequence by sequence; pad rows 0."""
    key, value = (x.to(batch.query.dtype) for x in batch.keys_and_values())
    q, k = (starts.tolist() for starts in batch.starts())
    output = batch.query.new_zeros(*batch.query.shape[:2], value.shape[-1])
    rules = batch.rules()
    for i in range(len(q) - 1):
        rows, keys = slice(q[i], q[i + 1]), slice(k[i], k[i + 1])
        p = Problem(
            batch.query[rows],
            key[keys],
            value[keys],
            scale=rules["scale"],
            causal=rules["causal"],
            window=rules["sliding_window"],
            slopes=rules["alibi_slopes"],
            cap=rules["logits_soft_cap"],
            sinks=rules["sinks"],
        )
        if len(p.query):
            output[rows] = kernel(p)
    return output


LEGITIMATE: dict[str, Callable[[Problem], Tensor]] = {
    "tiles of 32": lambda p: tiled(replace(p, tile=32)),
    "tiles of 128, last first": lambda p: tiled(replace(p, tile=128, backwards=True)),
    "weights in fp32": lambda p: tiled(replace(p, weights_dtype=torch.float32)),
    "keys split in four": lambda p: tiled(replace(p, splits=4, tile=16)),
    "weights normalised, then rounded": normalised_first,
    "torch SDPA": torch_sdpa,
}


def legitimate(case: Case) -> list[str]:
    """torch's SDPA takes no soft cap."""
    return [name for name in LEGITIMATE if case.logits_soft_cap is None or name != "torch SDPA"]


def without_newest_key(p: Problem) -> Problem:
    """The keys but the last; every query keeps its position."""
    return replace(p, key=p.key[:-1], value=p.value[:-1], shift=p.shift - 1) if len(p.key) > 1 else p


def through_fp8(p: Problem) -> Problem:
    """An fp8 cache that nobody asked for."""
    key, value = (x.float().to(torch.float8_e4m3fn).to(x.dtype) for x in (p.key, p.value))
    return replace(p, key=key, value=value)


def with_a_wrong_page(p: Problem) -> Problem:
    """The newest page of 16 keys read in place of the one before it."""
    if len(p.key) < 32:
        return p
    key, value = p.key.clone(), p.value.clone()
    key[-32:-16], value[-32:-16] = p.key[-16:], p.value[-16:]
    return replace(p, key=key, value=value)


def with_a_page_of_zeros(p: Problem) -> Problem:
    """The page before the newest never loaded."""
    if len(p.key) < 32:
        return p
    key, value = p.key.clone(), p.value.clone()
    key[-32:-16], value[-32:-16] = 0, 0
    return replace(p, key=key, value=value)


def in_bf16(p: Problem) -> Tensor:
    """A kernel that computes in bf16 whatever it is given."""
    query, key, value = (x.bfloat16() for x in (p.query, p.key, p.value))
    return tiled(replace(p, query=query, key=key, value=value)).to(p.query.dtype)


def with_one_wrong_row(p: Problem) -> Tensor:
    """The last row of head 0 is that of the last head."""
    output = tiled(p).clone()
    output[-1, 0] = output[-1, -1]
    return output


def with_a_head_of_zeros(p: Problem) -> Tensor:
    """The last head was never written."""
    output = tiled(p).clone()
    output[:, -1] = 0
    return output


DEFECTS: dict[str, Callable[[Problem], Problem]] = {
    "newest key dropped": without_newest_key,
    "scale +1 %": lambda p: replace(p, scale=p.scale * 1.01),
    "scale of a padded head size": lambda p: replace(p, scale=(p.query.shape[-1] + 8) ** -0.5),
    "KV heads tiled": lambda p: replace(p, heads_tiled=True),
    "a wrong page": with_a_wrong_page,
    "a page of zeros": with_a_page_of_zeros,
    "causal one early": lambda p: replace(p, shift=1),
    "causal one late": lambda p: replace(p, shift=-1),
    "KV through fp8": through_fp8,
    "sums in 16 bits": lambda p: replace(
        p, sum_dtype=torch.bfloat16 if p.query.dtype == torch.float32 else p.query.dtype
    ),
}
"""One defect each, for every case."""

OWN_DEFECTS: dict[str, dict[str, Callable[[Problem], Problem]]] = {
    "sliding_window": {
        "window + 1": lambda p: replace(p, window=p.window + 1),
        "window - 1": lambda p: replace(p, window=p.window - 1),
        "window ignored": lambda p: replace(p, window=None),
    },
    "logits_soft_cap": {"soft cap ignored": lambda p: replace(p, cap=None)},
    "sinks": {
        "sinks ignored": lambda p: replace(p, sinks=None),
        "sinks scaled": lambda p: replace(p, sinks=p.sinks * p.scale),
    },
    "alibi": {
        "ALiBi ignored": lambda p: replace(p, slopes=None),
        "ALiBi positions in bf16": lambda p: replace(p, distance_dtype=torch.bfloat16),
    },
}
"""Defects of one feature, by the case's field."""

WRONG_OUTPUTS: dict[str, Callable[[Problem], Tensor]] = {
    "one wrong row": with_one_wrong_row,
    "a head of zeros": with_a_head_of_zeros,
    "all zeros": lambda p: torch.zeros_like(tiled(p)),
}


def defective(case: Case) -> dict[str, Callable[[Problem], Tensor]]:
    """Every defect that can show in the case, as a kernel."""
    changes = dict(DEFECTS)
    for field, own in OWN_DEFECTS.items():
        changes |= own if getattr(case, field) else {}
    kernels = {name: lambda p, change=change: tiled(change(p)) for name, change in changes.items()}
    return kernels | WRONG_OUTPUTS | ({"bf16 inside": in_bf16} if case.dtype == "float32" else {})
