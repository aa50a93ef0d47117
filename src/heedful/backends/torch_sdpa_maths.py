"""Attention of a block of queries on a block of keys, with its LSE, and how such parts are joined.

B sequences, N KV heads, R rows (the query heads of a group times their tokens), n keys. bias is fp32, broadcastable
to [B, N, R, n]; blind marks the rows to which the bias shows no key, broadcastable to [B, N, R].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from heedful.backends.torch_sdpa_mask import Mask

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """(output [B, N, R, Dv] in the query's dtype, natural-log LSE fp32 [B, N, R]); blind rows give 0 and -inf."""
    bias, blind = mask
    output, lse = (
        _uncapped(query, key, value, bias, scale) if cap is None else _capped(query, key, value, bias, scale, cap)
    )
    if blind is None:
        return output, lse
    return output.masked_fill(blind[..., None], 0), lse.masked_fill(blind, -torch.inf)


def _uncapped(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """torch's flash kernel for the CPU. It wants one head size, so the smaller one is padded with zeros."""
    size, size_v = query.shape[-1], value.shape[-1]
    if size < size_v:
        query, key = pad(query, (0, size_v - size)), pad(key, (0, size_v - size))
    elif size_v < size:
        value = pad(value, (0, size - size_v))
    if bias is not None:
        bias = bias.expand(-1, -1, query.shape[2], -1)
    output, lse = _flash(query, key, value, 0.0, False, attn_mask=bias, scale=scale)
    return output[..., :size_v], lse


def _capped(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    """torch's kernels know no soft cap: fp32 scores, spelt out."""
    scores = torch.matmul(query, key.transpose(-1, -2)).mul_(scale / cap).tanh_().mul_(cap)
    if bias is not None:
        scores += bias
    lse = torch.logsumexp(scores, -1)
    weights = scores.sub_(_finite(lse)[..., None]).exp_()
    return torch.matmul(weights, value), lse


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Join parts of the keys of the same rows; a part with LSE -inf adds nothing."""
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts])
    top = lses.amax(0)
    weights = (lses - _finite(top)).exp()
    total = weights.sum(0)
    shares = weights / total.clamp_min(torch.finfo(torch.float32).tiny)
    output = sum(output * share[..., None] for (output, _), share in zip(parts, shares, strict=True))
    assert isinstance(output, Tensor)
    return output, top + total.log()


def add_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """One more logit a row, in the denominator only; sinks broadcastable to lse."""
    whole = torch.logaddexp(lse, sinks)
    return output * (lse - _finite(whole)).exp()[..., None], whole


def _finite(lse: Tensor) -> Tensor:
    """-inf (no key) becomes 0, so that the difference to it is never NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)
