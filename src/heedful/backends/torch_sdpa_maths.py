"""Attention of a block of queries on a block of keys, and how such parts are joined.

B sequences, N KV heads, R rows (the query heads of a group times their tokens), n keys. query [B, N, R, D], key
[B, N, n, D], value [B, N, n, Dv]; bias fp32, broadcastable to [B, N, R, n].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from heedful.backends.paged_mask import Mask

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class Part:
    """What some keys add to rows: weighted [B, N, R, Dv] = sum of exp(logit - top) * V, total [B, N, R] = sum of
    exp(logit - top). top [B, N, R] is any number near the largest logit, -inf for a row that sees none of the keys."""

    weighted: Tensor
    top: Tensor
    total: Tensor


def spelt_out(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, cap: float | None) -> Part:
    """fp32, step by step: for few rows as fast as torch's kernel and closer to the truth; and the way of the soft cap,
    which torch's kernels do not know."""
    scores = torch.matmul(query, key.transpose(-1, -2)).mul_(scale)
    if cap is not None:
        scores = scores.div_(cap).tanh_().mul_(cap)
    if mask[0] is not None:
        scores += mask[0]
    top = scores.amax(-1)
    weights = scores.sub_(_finite(top)[..., None]).exp_()
    return Part(torch.matmul(weights, value), top, weights.sum(-1))


def flash(query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float) -> Part:
    """torch's SDPA kernel for the CPU. It wants one head size, so that the smaller one is padded with zeros.

    A row that sees no key is 0 in its output, which is right, and 0 in its LSE, which is mended here.
    """
    size, size_v = query.shape[-1], value.shape[-1]
    if size < size_v:
        query, key = pad(query, (0, size_v - size)), pad(key, (0, size_v - size))
    elif size_v < size:
        value = pad(value, (0, size - size_v))
    bias, blind = mask
    if bias is not None:
        bias = bias.expand(-1, -1, query.shape[2], -1)
    output, lse = _flash(query, key, value, 0.0, False, attn_mask=bias, scale=scale)
    total = torch.ones_like(lse)
    if blind is not None:
        lse, total = lse.masked_fill(blind, -torch.inf), total.masked_fill(blind, 0)
    return Part(output[..., :size_v], lse, total)


def join(parts: Sequence[Part], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(output [B, N, R, Dv], natural-log LSE [B, N, R]) of all keys. sinks, broadcastable to the LSE: one more logit a
    row, in the denominator only. Rows without a key: 0, and -inf or the sink."""
    top = torch.stack([part.top for part in parts]).amax(0)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    level = _finite(top)
    shares = [(part.top - level).exp() for part in parts]
    total = _sum([part.total * share for part, share in zip(parts, shares, strict=True)])
    if sinks is not None:
        total = total + (sinks - level).exp()
    weighted = _sum([part.weighted * share[..., None] for part, share in zip(parts, shares, strict=True)])
    return weighted / total.clamp_min(torch.finfo(torch.float32).tiny)[..., None], level + total.log()


def _sum(terms: Sequence[Tensor]) -> Tensor:
    """Their sum, from left to right."""
    found = terms[0]
    for term in terms[1:]:
        found = found + term
    return found


def _finite(top: Tensor) -> Tensor:
    """-inf (no key) becomes 0, so that the difference to it is never NaN."""
    return top.masked_fill(top == -torch.inf, 0)
