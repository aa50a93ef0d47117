"""From tokens to a step: ``assemble`` pages them into a shuffled, poisoned cache and describes the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heedful.conformance.batch import Batch, Layer, Tokens
from heedful.conformance.pages import encoder_fields, paging, poisoned, slots_of, step_metadata, table_of, written
from heedful.reference import CACHE_FLOATS, store_rounded
from heedful.types import PAD_SLOT_ID, AttentionType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from heedful.backends.base import AttentionMetadata
    from heedful.conformance.batch import Pages
    from heedful.conformance.cases import Case, Span

PAD_SEQUENCES, PAD_ROWS = 2, 3
"""What batch kind ``padded`` adds: sequences of length 0, and rows past query_start_loc[-1]."""

SELF_CONTAINED = frozenset({AttentionType.ENCODER, AttentionType.ENCODER_ONLY})
"""Attention types without a cache."""


def assemble(
    case: Case, spans: Sequence[Span], tokens: Tokens, layer: Layer, generator: torch.Generator, *, cached: int = 0
) -> Batch:
    """Page the tokens into a shuffled, poisoned cache and describe the step.

    cached: how many of the first sequence's new tokens are in the cache already, so that their slot is -1.
    """
    kind = AttentionType(case.attn_type)
    if kind in SELF_CONTAINED:
        return _without_cache(case, spans, tokens, layer)
    if kind is AttentionType.ENCODER_DECODER:
        return _cross(case, spans, tokens, layer, generator)
    tables, num_blocks = paging([s.length for s in spans], case.block_size, generator, shared=shared_pages(case))
    held = [s.context + (cached if index == 0 else 0) for index, s in enumerate(spans)]
    slots = [slots_of(row, range(s.context, s.length), case.block_size) for row, s in zip(tables, spans, strict=True)]
    flat = [slot for part in slots for slot in part]
    flat[:cached] = [PAD_SLOT_ID] * cached
    new_keys, new_values = (
        torch.cat([x[s.context :] for x, s in zip(xs, spans, strict=True)]) for xs in (tokens.keys, tokens.values)
    )
    pages = _filled(case, num_blocks, tables, held, tokens, layer, generator)
    metadata = _described(spans, tables, flat)
    return _padded(Batch(case, tokens.query, new_keys, new_values, metadata, layer, pages, tuple(held)))


def shared_pages(case: Case) -> int:
    """In batch kind prefix_hit every sequence has its first page in common."""
    return 1 if case.batch == "prefix_hit" else 0


def _filled(
    case: Case,
    num_blocks: int,
    tables: Sequence[Sequence[int]],
    lengths: Sequence[int],
    tokens: Tokens,
    layer: Layer,
    generator: torch.Generator,
) -> Pages:
    """Poisoned pages with the first lengths[i] tokens of every sequence stored in them."""
    slots = [slots_of(row, range(n), case.block_size) for row, n in zip(tables, lengths, strict=True)]
    flat = torch.tensor([slot for part in slots for slot in part], dtype=torch.int64)
    found = []
    for rows, scale in ((tokens.keys, layer.k_scale), (tokens.values, layer.v_scale)):
        held = torch.cat([x[:n] for x, n in zip(rows, lengths, strict=True)])
        dtype = CACHE_FLOATS.get(case.kv_cache_dtype, held.dtype)
        page = poisoned((num_blocks, case.block_size, *held.shape[1:]), dtype, generator)
        if case.kv_cache_dtype == "u8":
            page = store_rounded(page, 1.0, "u8")
        found.append(written(page, flat, store_rounded(held, scale, case.kv_cache_dtype)))
    return found[0], found[1]


def _without_cache(case: Case, spans: Sequence[Span], tokens: Tokens, layer: Layer) -> Batch:
    """ENCODER_ONLY: one prefill a sequence. ENCODER: the same tokens, while query_start_loc speaks of the decoder."""
    keys, values = torch.cat(tokens.keys), torch.cat(tokens.values)
    lengths, none = [s.length for s in spans], [0] * len(spans)
    metadata = step_metadata(lengths, none, [[] for _ in spans], [PAD_SLOT_ID] * sum(lengths), decodes=0)
    if case.attn_type == AttentionType.ENCODER:
        decoder = [min(1, length) for length in lengths]
        metadata = step_metadata(decoder, none, [[] for _ in spans], [PAD_SLOT_ID] * sum(decoder), decodes=0)
        metadata = replace(metadata, **encoder_fields(lengths))
    return _padded(Batch(case, tokens.query, keys, values, metadata, layer, None))


def _cross(case: Case, spans: Sequence[Span], tokens: Tokens, layer: Layer, generator: torch.Generator) -> Batch:
    """The encoder's keys lie in the cache; the decoder's own pages are there too, poisoned, and must not be read."""
    lengths = [s.encoder for s in spans]
    both, num_blocks = paging([*lengths, *(s.length for s in spans)], case.block_size, generator)
    tables, own = both[: len(spans)], both[len(spans) :]
    pages = _filled(case, num_blocks, tables, lengths, tokens, layer, generator)
    slots = [slots_of(row, range(s.context, s.length), case.block_size) for row, s in zip(own, spans, strict=True)]
    metadata = _described(spans, own, [slot for part in slots for slot in part])
    cross_slots = [
        slot for row, n in zip(tables, lengths, strict=True) for slot in slots_of(row, range(n), case.block_size)
    ]
    metadata = replace(
        metadata,
        **encoder_fields(lengths),
        cross_slot_mapping=torch.tensor(cross_slots, dtype=torch.int64),
        cross_block_tables=table_of(tables),
    )
    return _padded(Batch(case, tokens.query, None, None, metadata, layer, pages, tuple(lengths)))


def _padded(batch: Batch) -> Batch:
    """Batch kind padded: sequences of length 0 at the end, and rows of every tensor that belong to nobody."""
    if batch.case.batch != "padded":
        return batch
    m = batch.metadata
    last, zeros = m.query_start_loc[-1:].expand(PAD_SEQUENCES), torch.zeros(PAD_SEQUENCES, dtype=torch.int32)
    fields: dict[str, Any] = {
        "query_start_loc": torch.cat([m.query_start_loc, last]),
        "slot_mapping": torch.cat([m.slot_mapping, torch.full((PAD_ROWS,), PAD_SLOT_ID)]),
    }
    for name in ("seq_lens", "context_lens", "encoder_seq_lens", "block_tables", "cross_block_tables"):
        if (held := getattr(m, name)) is not None:
            fields[name] = torch.cat([held, zeros if held.dim() == 1 else zeros[:, None].expand(-1, held.shape[1])])
    metadata = replace(m, **fields, step={})
    key, value = (None if x is None else _with_pad_rows(x) for x in (batch.key, batch.value))
    return replace(batch, query=_with_pad_rows(batch.query), key=key, value=value, metadata=metadata)


def _with_pad_rows(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_full((PAD_ROWS, *x.shape[1:]), 7.0)])


def _described(spans: Sequence[Span], tables: Sequence[Sequence[int]], slots: Sequence[int]) -> AttentionMetadata:
    decodes = sum(s.decode for s in spans)
    return step_metadata([s.query for s in spans], [s.context for s in spans], tables, slots, decodes)
