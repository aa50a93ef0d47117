"""Pages, slots and step metadata out of plain lengths: the suite's own, shared with no backend and no builder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heedful.backends.base import AttentionMetadata
from heedful.types import PAD_SLOT_ID

if TYPE_CHECKING:
    from collections.abc import Sequence

POISON = 1e4
"""Size of what lies in unused slots; NaN would fail correct kernels that mask by adding."""


def starts_of(lengths: Sequence[int]) -> Tensor:
    """int32 [seqs + 1]: where each sequence begins, and one past the last row."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def written(page: Tensor, slots: Tensor, stored: Tensor) -> Tensor:
    """A copy of page [num_blocks, block_size, KV, size] with stored[i] at slot slots[i]; a negative slot is skipped."""
    after = page.clone()
    chosen = slots >= 0
    as_bytes(after).flatten(0, 1)[slots[chosen]] = as_bytes(stored[: len(slots)])[chosen]
    return after


def without_repeats(slots: Sequence[int]) -> list[int]:
    """Slots with every later mention of one replaced by PAD_SLOT_ID: shared pages are written once."""
    first = {slot: index for index, slot in reversed(list(enumerate(slots)))}
    return [slot if first[slot] == index else PAD_SLOT_ID for index, slot in enumerate(slots)]


def paging(
    lengths: Sequence[int], block_size: int, generator: torch.Generator, shared: int = 0
) -> tuple[list[list[int]], int]:
    """(block table of each sequence, number of blocks): shuffled, each with one spare entry to a block nobody owns.

    shared: how many first pages all sequences have in common.
    """
    needed = [max(0, -(-length // block_size) - shared) for length in lengths]
    num_blocks = shared + sum(needed) + 2
    order = torch.randperm(num_blocks, generator=generator).tolist()
    spare, common, free = order[0], order[1 : 1 + shared], iter(order[1 + shared :])
    tables = [[*common, *(next(free) for _ in range(count)), spare] for count in needed]
    return tables, num_blocks


def poisoned(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Large finite numbers of both signs, as large as the dtype holds up to POISON."""
    size = min(POISON, torch.finfo(dtype).max)
    signs = torch.randint(0, 2, tuple(shape), generator=generator) * 2 - 1
    return (signs * size).float().to(dtype)


def step_metadata(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    tables: Sequence[Sequence[int]],
    slots: Sequence[int],
    decodes: int,
) -> AttentionMetadata:
    """AttentionMetadata of a batch whose last ``decodes`` sequences are decodes; slots int64, one a token row."""
    prefills = len(query_lens) - decodes
    seq_lens = [q + c for q, c in zip(query_lens, context_lens, strict=True)]
    return AttentionMetadata(
        num_prefills=prefills,
        num_decodes=decodes,
        num_prefill_tokens=sum(query_lens[:prefills]),
        num_decode_tokens=sum(query_lens[prefills:]),
        query_start_loc=starts_of(query_lens),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=table_of(tables),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
    )


def encoder_fields(lengths: Sequence[int]) -> dict[str, Any]:
    """The metadata fields that say how many tokens each sequence's encoder has."""
    return {
        "encoder_seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "max_encoder_seq_len": max(lengths, default=0),
        "num_encoder_tokens": sum(lengths),
    }


def table_of(rows: Sequence[Sequence[int]]) -> Tensor:
    """int32 [seqs, most entries]; a shorter row goes on with its last entry, the spare block."""
    width = max((len(row) for row in rows), default=0)
    filled = [[*row, *list(row[-1:]) * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.int32).reshape(len(rows), width)


def slots_of(row: Sequence[int], positions: range, block_size: int) -> list[int]:
    """The slots of positions of a sequence whose block table is row."""
    return [row[p // block_size] * block_size + p % block_size for p in positions]


def rows_of(tables: Tensor | None, count: int) -> list[Tensor]:
    """One block table a sequence; without tables, count empty ones."""
    return [torch.empty(0, dtype=torch.int32)] * count if tables is None else list(tables.cpu())


def as_bytes(x: Tensor) -> Tensor:
    """One-byte floats as bytes: indexing takes them on every build of torch."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
