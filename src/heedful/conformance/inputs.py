"""Seeded inputs of a case: three families of numbers, chosen so that defects show. ``build(case)`` gives the Batch.

normal: unit-normal Q, K, V. peaky: Q four times as large, so that few keys carry the weight. coded: peaky, and V tells
its position by its size. Logits reach the soft cap where there is one, and sinks lie near the rows' own LSE: with
ordinary numbers a tolerance misses an ignored cap or a dropped sink.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heedful.conformance.assemble import assemble, shared_pages
from heedful.conformance.batch import Batch, Layer, Tokens
from heedful.conformance.pages import starts_of
from heedful.errors import BadInputError
from heedful.reference import CACHE_FLOATS, alibi_slopes, reference_attention, u8_grid
from heedful.types import AttentionType

if TYPE_CHECKING:
    from heedful.conformance.cases import Case

LOGIT_SIZE = {"normal": 1.0, "peaky": 4.0, "coded": 4.0}
"""Standard deviation of the scaled logits, by family."""

CAPPED_SIZE = {"normal": 0.5, "peaky": 1.0, "coded": 1.0}
"""The same as a share of the soft cap, where there is one and this is larger."""

NEAR_A_TIE = 2**-8
"""Of the distance between two bytes of a u8 cache: many times what fp32 arithmetic can be off by."""

CACHE_SCALES = ((0.25, 0.5), (0.34375, 0.40625))
"""(k_scale, v_scale) of fp8 caches. Exact in every float format; the second pair is no power of two."""


def build(case: Case) -> Batch:
    """The tensors of one step for the case: the same for the same case and seed, on every machine with this torch."""
    if case.family not in LOGIT_SIZE:
        raise BadInputError(f"unknown input family {case.family!r}; give one of {', '.join(LOGIT_SIZE)}")
    generator = torch.Generator().manual_seed(zlib.crc32(case.id.encode()) + case.seed)
    tokens = _tokens(case, generator)
    layer = _layer(case, tokens, generator)
    return assemble(case, case.spans, tokens, layer, generator, cached=shared_pages(case))


def _tokens(case: Case, generator: torch.Generator) -> Tokens:
    dtype = getattr(torch, case.dtype)
    cross = case.attn_type == AttentionType.ENCODER_DECODER
    lengths = [span.encoder if cross else span.length for span in case.spans]
    num_queries = sum(span.query for span in case.spans)
    query = _normal(generator, num_queries, case.num_heads, case.head_size) * _logit_size(case)
    keys = [_normal(generator, n, case.num_kv_heads, case.head_size).to(dtype) for n in lengths]
    values = [_values(case, n, generator).to(dtype) for n in lengths]
    _share_prefix(case, keys)
    _share_prefix(case, values)
    if case.kv_cache_dtype == "u8":
        keys, values = ([_off_the_ties(x) for x in rows] for rows in (keys, values))
    return Tokens(query.to(dtype), tuple(keys), tuple(values))


def _off_the_ties(x: Tensor) -> Tensor:
    """x [..., size] with its row's largest element for those that lie between two bytes of a u8 cache.

    Which way such an element is rounded depends on how a kernel orders its arithmetic; the contract leaves it open.
    """
    own, zero = u8_grid(x)
    place = x.double() / own.double() + zero.double()
    return torch.where((place - place.floor() - 0.5).abs() < NEAR_A_TIE, x.amax(-1, keepdim=True), x)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _logit_size(case: Case) -> float:
    capped = CAPPED_SIZE[case.family] * (case.logits_soft_cap or 0.0)
    return max(LOGIT_SIZE[case.family], capped)


def _values(case: Case, length: int, generator: torch.Generator) -> Tensor:
    """[length, KV, Dv]; coded: signs at random, sizes 1 … 7 by position."""
    value = _normal(generator, length, case.num_kv_heads, case.size_v)
    if case.family != "coded":
        return value
    return value.sign() * (1.0 + torch.arange(length) % 7)[:, None, None]


def _share_prefix(case: Case, rows: list[Tensor]) -> None:
    """Sequences with pages in common have the same tokens in them."""
    common = shared_pages(case) * case.block_size
    for other in rows[1:]:
        other[:common] = rows[0][: min(common, len(other))]


def _layer(case: Case, tokens: Tokens, generator: torch.Generator) -> Layer:
    scale = case.head_size**-0.5
    slopes = alibi_slopes(case.num_heads) if case.alibi else None
    k_scale, v_scale = 1.0, 1.0
    if case.kv_cache_dtype in CACHE_FLOATS:
        choice = int(torch.randint(0, len(CACHE_SCALES), (1,), generator=generator))
        k_scale, v_scale = CACHE_SCALES[choice]
    sinks = _sinks(case, tokens, Layer(scale, slopes), generator) if case.sinks else None
    return Layer(scale, slopes, sinks, k_scale, v_scale)


def _sinks(case: Case, tokens: Tokens, layer: Layer, generator: torch.Generator) -> Tensor:
    """fp32 [num_heads]: each head's mean LSE, give or take a half, so that a dropped sink halves or doubles a row."""
    lengths = [len(key) for key in tokens.keys]
    _, lse = reference_attention(
        tokens.query,
        torch.cat(tokens.keys),
        torch.cat(tokens.values),
        starts_of([span.query for span in case.spans]),
        starts_of(lengths),
        scale=layer.scale,
        causal=case.attn_type == AttentionType.DECODER,
        sliding_window=case.sliding_window,
        alibi_slopes=layer.alibi_slopes,
        logits_soft_cap=case.logits_soft_cap,
    )
    seen = torch.where(lse.isfinite(), lse, 0.0).sum(0) / lse.isfinite().sum(0).clamp(min=1)
    return (seen + 0.5 * _normal(generator, case.num_heads)).float()
