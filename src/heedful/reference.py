"""What attention means here: ``reference_attention`` in float64, and the same-precision yardsticks it is judged by.

Written to be read by whoever wants to know the contract; it imports no backend code and shares no mask, head map or
page reading with any. Everything is computed on the CPU, one sequence at a time, all heads at once.

Names of sizes: H query heads, KV key/value heads, D head size, Dv head size of V. Keys and values come flat and
un-paged: ``key [keys, KV, D]`` holds sequence s in rows ``key_start_loc[s] : key_start_loc[s + 1]``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch
from torch import Tensor

from heedful.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TILE = 64
"""Keys that the tiled yardstick takes at a time."""

CACHE_FLOATS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""kv_cache_dtype word -> the dtype that an fp8 cache tensor carries."""


class Rules(TypedDict, total=False):
    """The keyword arguments that the reference and both yardsticks share; only ``scale`` must be given."""

    scale: float
    causal: bool
    sliding_window: int | None
    alibi_slopes: Tensor | None
    logits_soft_cap: float | None
    sinks: Tensor | None


@dataclass(frozen=True)
class _Rules:
    scale: float
    causal: bool = True
    sliding_window: int | None = None
    alibi_slopes: Tensor | None = None
    logits_soft_cap: float | None = None
    sinks: Tensor | None = None


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    alibi_slopes: Tensor | None = None,
    logits_soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Exact attention over flat sequences: (output float64 [tokens, H, Dv], natural-log LSE float64 [tokens, H]).

    query [tokens, H, D], key [keys, KV, D], value [keys, KV, Dv] of any float dtype; query_start_loc, key_start_loc
    [seqs + 1]; alibi_slopes, sinks [H]. Rows past query_start_loc[-1] are padding: output 0, LSE -inf.
    Raises BadInputError for shapes, lengths or rules that mean nothing.
    """
    rules = _Rules(scale, causal, sliding_window, alibi_slopes, logits_soft_cap, sinks)
    return _each_sequence(_attend, (query, key, value), (query_start_loc, key_start_loc), rules, torch.float64)


def yardstick_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    **rules: Unpack[Rules],
) -> Tensor:
    """What a good kernel of query's precision computes: tiled online softmax, fp32 sums, P in query's dtype.

    Arguments of reference_attention. Its distance from the reference is the unit in which errors are measured.
    """
    return tiled_yardstick(query, key, value, query_start_loc, key_start_loc, **rules)[0]


def tiled_yardstick(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    **rules: Unpack[Rules],
) -> tuple[Tensor, Tensor]:
    """yardstick_attention with its LSE: (output in query's dtype, LSE fp32)."""
    starts = (query_start_loc, key_start_loc)
    return _each_sequence(_attend_tiled, (query, key, value), starts, _Rules(**rules), _same_precision(query))


def eager_yardstick(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    **rules: Unpack[Rules],
) -> tuple[Tensor, Tensor]:
    """The plain form at query's precision, all keys in one softmax: the second yardstick in fp32."""
    starts = (query_start_loc, key_start_loc)
    return _each_sequence(_attend_eager, (query, key, value), starts, _Rules(**rules), _same_precision(query))


def merge_states(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Join the results of parts of one row's keys, of which at most one holds the sink.

    outputs: one [..., Dv] a part; lses: one [...] a part, natural log. A part with LSE -inf is empty, and so is one
    with +inf, which some kernels report for zero keys. One part left: it comes back bit for bit. None: (0, -inf).
    """
    _check_parts(outputs, lses)
    output, lse = torch.stack(list(outputs)), torch.stack(list(lses))  # [parts, ..., Dv], [parts, ...]
    empty = lse.isinf()
    logs = lse.double().masked_fill(empty, -math.inf)
    total = torch.logsumexp(logs, 0)
    share = torch.exp(logs - _finite(total))[..., None]
    merged = torch.where(empty[..., None], 0.0, share * output.double()).sum(0)
    alone = (~empty).sum(0) == 1
    only = (~empty).int().argmax(0, keepdim=True)  # the part that is not empty, where there is one such
    only_output = output.gather(0, only[..., None].expand(1, *output.shape[1:]))[0]
    merged_output = torch.where(alone[..., None], only_output, merged.to(output.dtype))
    return merged_output, torch.where(alone, lse.gather(0, only)[0], total.to(lse.dtype))


def alibi_slopes(num_heads: int) -> Tensor:
    """The published slopes, fp32 [num_heads]: 2^(-8k/n), k = 1…n, for n a power of two.

    Otherwise those of the next lower power of two, then every second one of its double.
    """
    if num_heads < 1:
        raise BadInputError(f"alibi_slopes({num_heads}): give the number of query heads, 1 or more")
    lower = 1 << (num_heads.bit_length() - 1)
    exponents = [-8.0 * k / lower for k in range(1, lower + 1)]
    exponents += [-4.0 * k / lower for k in range(1, 2 * lower, 2)][: num_heads - lower]
    return torch.exp2(torch.tensor(exponents, dtype=torch.float64)).float()


def store_rounded(x: Tensor, scale: float | Tensor, kv_cache_dtype: str) -> Tensor:
    """What a cache holds after x was written: x itself for "auto", else round_even(clamp(x / scale)) in float8.

    The quotient is formed in fp32. NaN stays NaN, ±inf clamps to the largest finite value. "u8": rows of bytes
    [..., 8 + size], each its scale, (max - min) / 255 or 1e-4 where that is 0, and its zero point, -min / scale, in
    fp32, then round(x / scale + zero) an element; an element at a tie may be rounded either way.
    """
    factor = _scale(scale)
    if kv_cache_dtype in ("auto", "u8"):
        if factor != 1.0:
            raise BadInputError(f"scale {factor} was given for a cache that is not fp8; give 1.0 or an fp8 cache dtype")
        return x if kv_cache_dtype == "auto" else _rows_of_bytes(x)
    if kv_cache_dtype not in CACHE_FLOATS:
        known = ", ".join(["auto", "u8", *CACHE_FLOATS])
        raise BadInputError(f"kv_cache_dtype {kv_cache_dtype!r} has no rounding rule in the contract; give {known}")
    dtype = CACHE_FLOATS[kv_cache_dtype]
    largest = torch.finfo(dtype).max
    return (x.float() / factor).clamp(-largest, largest).to(dtype)


def dequantise(stored: Tensor, scale: float | Tensor) -> Tensor:
    """What attention reads from a cache: stored · scale, exact, float64; (byte - zero) · its row's scale for u8."""
    if stored.dtype == torch.uint8:
        own, zero = (x[..., None].double() for x in stored[..., :8].contiguous().view(torch.float32).unbind(-1))
        return (stored[..., 8:].double() - zero) * own
    return stored.double() * _scale(scale)


def _rows_of_bytes(x: Tensor) -> Tensor:
    own, zero = u8_grid(x)
    codes = (x.float() / own + zero).round().clamp(0, 255).to(torch.uint8)
    return torch.cat([own.view(torch.uint8), zero.view(torch.uint8), codes], -1)


def u8_grid(x: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, zero point) fp32 [..., 1] of each row [..., size] in a u8 cache."""
    low, high = x.float().aminmax(dim=-1, keepdim=True)
    own = (high - low) / 255
    own = torch.where(own == 0, 1e-4, own)
    return own, -low / own


def read_pages(view: Tensor, block_table: Tensor, length: int) -> Tensor:
    """The first ``length`` tokens of one sequence: [length, KV, size] out of view [num_blocks, block_size, KV, size].

    Token t lies in block ``block_table[t // block_size]`` at offset ``t % block_size``.
    """
    num_blocks, block_size = view.shape[:2]
    needed = -(-length // block_size)
    if needed > len(block_table):
        raise BadInputError(f"{length} tokens need {needed} pages of {block_size}; the table has {len(block_table)}")
    tokens = torch.arange(length)
    blocks = block_table.cpu().long()[tokens // block_size]
    if length and not 0 <= int(blocks.min()) <= int(blocks.max()) < num_blocks:
        raise BadInputError(
            f"block table {sorted(set(blocks.tolist()))} points outside the cache's {num_blocks} blocks"
        )
    held = view.view(torch.uint8) if view.element_size() == 1 else view  # torch 2.8 indexes no one-byte floats
    return held[blocks, tokens % block_size].view(view.dtype)


# ---- one sequence: query [q_len, H, D], key [kv_len, KV, D], value [kv_len, KV, Dv] -> [q_len, H, Dv], [q_len, H]


def _attend(query: Tensor, key: Tensor, value: Tensor, rules: _Rules) -> tuple[Tensor, Tensor]:
    heads = _kv_head_of(query.shape[1], key.shape[1])
    seen = _visible(len(query), len(key), rules)
    logits = _logits(query.double(), key.double()[:, heads], _distance(len(query), len(key)), seen, rules)
    lse = torch.logsumexp(torch.cat([logits, _sink_column(logits, rules)], -1), -1)  # [H, q_len]
    weights = torch.exp(logits - _finite(lse)[..., None])
    output = _weighted_sum(weights, value.double()[:, heads].transpose(0, 1), seen)
    return output.transpose(0, 1), lse.transpose(0, 1)


def _attend_tiled(query: Tensor, key: Tensor, value: Tensor, rules: _Rules) -> tuple[Tensor, Tensor]:
    dtype, heads = query.dtype, _kv_head_of(query.shape[1], key.shape[1])
    key, value = key.to(dtype).float()[:, heads], value.to(dtype).float()[:, heads].transpose(0, 1)
    seen, distance = _visible(len(query), len(key), rules), _distance(len(query), len(key))
    summed = torch.zeros(query.shape[1], len(query), value.shape[-1])  # [H, q_len, Dv]
    top = _sink_column(summed, rules)  # [H, q_len, 1]
    total = top.isfinite().float()
    for start in range(0, len(key), TILE):
        tile = slice(start, start + TILE)
        logits = _logits(query.float(), key[tile], distance[:, tile], seen[:, tile], rules)
        highest = torch.maximum(top, logits.amax(-1, keepdim=True))
        fade, weights = torch.exp(top - _finite(highest)), torch.exp(logits - _finite(highest))
        total = total * fade + weights.sum(-1, keepdim=True)
        summed = summed * fade + weights.to(dtype).float() @ value[:, tile]
        top = highest
    output = torch.where(total > 0, summed / total, 0.0).to(dtype)
    return output.transpose(0, 1), (top + total.log())[..., 0].transpose(0, 1)


def _attend_eager(query: Tensor, key: Tensor, value: Tensor, rules: _Rules) -> tuple[Tensor, Tensor]:
    dtype, heads = query.dtype, _kv_head_of(query.shape[1], key.shape[1])
    seen, distance = _visible(len(query), len(key), rules), _distance(len(query), len(key))
    logits = _logits(query.float(), key.to(dtype).float()[:, heads], distance, seen, rules)
    with_sink = torch.cat([logits, _sink_column(logits, rules)], -1)
    lse = torch.logsumexp(with_sink, -1)
    weights = torch.where(lse[..., None].isinf(), 0.0, torch.softmax(with_sink, -1))[..., :-1].to(dtype)
    output = (weights.float() @ value.to(dtype).float()[:, heads].transpose(0, 1)).to(dtype)
    return output.transpose(0, 1), lse.transpose(0, 1)


# ---- the rules, each in one place


def _kv_head_of(num_heads: int, num_kv_heads: int) -> Tensor:
    """[H]: neighbouring query heads share a KV head."""
    return torch.arange(num_heads) // (num_heads // num_kv_heads)


def _distance(q_len: int, kv_len: int) -> Tensor:
    """p - j, int64 [q_len, kv_len]: how far key j lies behind query i, whose position is p = kv_len - q_len + i."""
    positions = torch.arange(kv_len - q_len, kv_len)
    return positions[:, None] - torch.arange(kv_len)[None, :]


def _visible(q_len: int, kv_len: int, rules: _Rules) -> Tensor:
    """bool [q_len, kv_len]: causal hides later keys; a window of W shows W keys, the token's own among them."""
    distance = _distance(q_len, kv_len)
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    if rules.causal:
        seen &= distance >= 0
    if rules.sliding_window is not None:
        seen &= distance.abs() < rules.sliding_window
    return seen


def _logits(query: Tensor, key: Tensor, distance: Tensor, seen: Tensor, rules: _Rules) -> Tensor:
    """Scale, soft cap, ALiBi, mask, in this order: [H, q_len, kv_len] in query's dtype, -inf where hidden."""
    logits = query.transpose(0, 1) @ key.permute(1, 2, 0) * rules.scale
    if rules.logits_soft_cap is not None:
        logits = rules.logits_soft_cap * torch.tanh(logits / rules.logits_soft_cap)
    if rules.alibi_slopes is not None:
        logits = logits - rules.alibi_slopes.to(logits.dtype)[:, None, None] * distance.abs()
    return logits.masked_fill(~seen, -math.inf)


def _sink_column(logits: Tensor, rules: _Rules) -> Tensor:
    """One more logit a row, neither scaled nor capped: [H, q_len, 1]; no sink is a sink of -inf."""
    if rules.sinks is None:
        return logits.new_full((*logits.shape[:2], 1), -math.inf)
    return rules.sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:2], 1)


def _weighted_sum(weights: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """[H, q_len, kv_len] x [H, kv_len, Dv]; a hidden key adds nothing even where its value is NaN or inf."""
    if value.isfinite().all():
        return weights @ value
    rows = [weights[:, i : i + 1, row] @ value[:, row] for i, row in enumerate(seen)]
    return torch.cat(rows, 1) if rows else weights @ value


def _finite(x: Tensor) -> Tensor:
    """-inf becomes the lowest number, so that -inf - x is -inf and not NaN; NaN and +inf pass."""
    return x.clamp(min=torch.finfo(x.dtype).min)


# ---- the batch around the sequences


def _each_sequence(
    attend: Callable[[Tensor, Tensor, Tensor, _Rules], tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, Tensor, Tensor],
    starts: tuple[Tensor, Tensor],
    rules: _Rules,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    query, key, value = (t.detach().cpu() for t in tensors)
    _check_tensors(query, key, value)
    rules = _checked_rules(rules, query.shape[1])
    output = torch.zeros(len(query), query.shape[1], value.shape[2], dtype=dtype)
    lse = torch.full(query.shape[:2], -math.inf, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for q, k in _slices(starts, len(query), len(key), rules):
        output[q], lse[q] = attend(query[q], key[k], value[k], rules)
    return output, lse


def _slices(starts: tuple[Tensor, Tensor], tokens: int, keys: int, rules: _Rules) -> Iterator[tuple[slice, slice]]:
    q = _check_starts("query_start_loc", starts[0], tokens)
    k = _check_starts("key_start_loc", starts[1], keys)
    if len(q) != len(k):
        raise BadInputError(f"query_start_loc names {len(q) - 1} sequences and key_start_loc {len(k) - 1}")
    for index in range(len(q) - 1):
        lengths = (q[index + 1] - q[index], k[index + 1] - k[index])
        positioned = rules.sliding_window is not None or rules.alibi_slopes is not None
        if positioned and not rules.causal and lengths[0] != lengths[1]:
            raise BadInputError(
                f"sequence {index} has {lengths[0]} queries on {lengths[1]} keys and is not causal: a window or ALiBi "
                "needs positions in common, so cross attention takes neither"
            )
        yield slice(q[index], q[index + 1]), slice(k[index], k[index + 1])


# ---- bad input


def _check_starts(name: str, starts: Tensor, rows: int) -> list[int]:
    if starts.dim() != 1 or len(starts) < 1 or starts.is_floating_point():
        raise BadInputError(f"{name} must be a vector of whole numbers [seqs + 1], got {tuple(starts.shape)}")
    listed: list[int] = starts.tolist()
    if listed[0] != 0 or listed != sorted(listed) or listed[-1] > rows:
        raise BadInputError(f"{name} {listed} must start at 0, never fall and end at {rows} or before")
    return listed


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3 or not tensor.is_floating_point():
            raise BadInputError(f"{name} must be float [rows, heads, size], got {tensor.dtype} {tuple(tensor.shape)}")
    if key.shape[:2] != value.shape[:2] or query.shape[2] != key.shape[2]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise BadInputError(
            f"query, key, value of shapes {shapes} do not fit: [tokens, H, D], [keys, KV, D], [keys, KV, Dv]"
        )
    if query.shape[1] < 1 or key.shape[1] < 1 or query.shape[1] % key.shape[1]:
        raise BadInputError(
            f"{query.shape[1]} query heads cannot share {key.shape[1]} KV heads evenly; give a multiple"
        )


def _checked_rules(rules: _Rules, num_heads: int) -> _Rules:
    window, cap = rules.sliding_window, rules.logits_soft_cap
    if not math.isfinite(rules.scale):
        raise BadInputError(f"scale {rules.scale} is not a finite number")
    if window is not None and window < 1:
        raise BadInputError(f"sliding_window {window} shows no key; give 1 or more, or None for off")
    if cap is not None and not 0 < cap < math.inf:
        raise BadInputError(f"logits_soft_cap {cap} must be positive and finite, or None")
    slopes = _per_head("alibi_slopes", rules.alibi_slopes, num_heads)
    sinks = _per_head("sinks", rules.sinks, num_heads)
    return _Rules(rules.scale, rules.causal, window, slopes, cap, sinks)


def _per_head(name: str, given: Tensor | None, num_heads: int) -> Tensor | None:
    if given is None:
        return None
    if given.shape != (num_heads,) or given.isnan().any() or given.isposinf().any():
        raise BadInputError(f"{name} must hold one number a query head [{num_heads}], got {given}")
    return given.detach().cpu()


def _same_precision(query: Tensor) -> torch.dtype:
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise BadInputError(f"no yardstick at {query.dtype}; give a query in float32, bfloat16 or float16")
    return query.dtype


def _scale(scale: float | Tensor) -> float:
    if isinstance(scale, Tensor) and scale.numel() != 1:
        raise BadInputError(f"a cache scale is one number, got a tensor of shape {tuple(scale.shape)}")
    factor = float(scale)
    if not 0 < factor < math.inf:
        raise BadInputError(f"cache scale {factor} must be positive and finite")
    return factor


def _check_parts(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    if not outputs or len(outputs) != len(lses):
        raise BadInputError(
            f"merge_states was given {len(outputs)} outputs and {len(lses)} LSEs; give one LSE an output"
        )
    shape = outputs[0].shape
    for index, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        if output.shape != shape or lse.shape != shape[:-1]:
            raise BadInputError(
                f"part {index} has output {tuple(output.shape)} and LSE {tuple(lse.shape)}; "
                f"every part needs {tuple(shape)} and {tuple(shape[:-1])}"
            )
