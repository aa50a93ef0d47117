"""From sequences to a step's metadata: the default builder of every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from heedful.backends.base import AttentionMetadata
from heedful.errors import MetadataError
from heedful.types import PAD_SLOT_ID

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class _Sequence:
    query_len: int
    context_len: int
    blocks: tuple[int, ...]
    first_written: int
    encoder_len: int | None
    cross_blocks: tuple[int, ...]
    encodes: bool


class CommonMetadataBuilder:
    """Collects the sequences of one step, prefills before decodes, and builds one AttentionMetadata.

    block_size: tokens a cache page holds. A chunk with context (chunked prefill, prefix hit) is a prefill.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._prefills: list[_Sequence] = []
        self._decodes: list[_Sequence] = []

    def add(
        self,
        query_len: int,
        context_len: int = 0,
        blocks: Sequence[int] = (),
        *,
        decode: bool = False,
        first_written: int | None = None,
        encoder_len: int | None = None,
        cross_blocks: Sequence[int] = (),
    ) -> None:
        """Add a sequence of query_len new tokens after context_len cached ones, whose pages are blocks.

        first_written: position of the first token whose K and V are not in the cache yet (context_len when None).
        encoder_len, cross_blocks: the encoder's tokens (None: no encoder) and pages, written in the step of the first
        prefill.
        """
        if not decode and self._decodes:
            raise MetadataError("a prefill was added after a decode; a batch is all prefills, then all decodes")
        written = context_len if first_written is None else first_written
        encodes = bool(encoder_len) and not decode and context_len == 0
        one = _Sequence(query_len, context_len, tuple(blocks), written, encoder_len, tuple(cross_blocks), encodes)
        (self._decodes if decode else self._prefills).append(one)

    def build(
        self, *, device: torch.device | str = "cpu", pad_sequences: int = 0, pad_tokens: int = 0
    ) -> AttentionMetadata:
        """The step's metadata, padded to at least pad_sequences sequences and pad_tokens token rows."""
        sequences = self._prefills + self._decodes
        spare = max(0, pad_sequences - len(sequences))
        sequences = sequences + [_Sequence(0, 0, (), 0, None, (), False)] * spare
        query_lens = [s.query_len for s in sequences]
        seq_lens = [s.context_len + s.query_len for s in sequences]
        slots = [slot for s in sequences for slot in self._slots(s)]
        slots += [PAD_SLOT_ID] * max(0, pad_tokens - len(slots))
        prefill_tokens = sum(s.query_len for s in self._prefills)
        return AttentionMetadata(
            num_prefills=len(self._prefills),
            num_decodes=len(self._decodes),
            num_prefill_tokens=prefill_tokens,
            num_decode_tokens=sum(query_lens) - prefill_tokens,
            query_start_loc=_starts(query_lens).to(device),
            seq_lens=_int32(seq_lens).to(device),
            context_lens=_int32([s.context_len for s in sequences]).to(device),
            block_tables=_tables([s.blocks for s in sequences]).to(device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
            **self._encoder(sequences, device),
        )

    def _encoder(self, sequences: list[_Sequence], device: torch.device | str) -> dict[str, Any]:
        if all(s.encoder_len is None for s in sequences):
            return {}
        lengths = [s.encoder_len or 0 for s in sequences]
        slots = [self._slot(s.cross_blocks, j) for s in sequences if s.encodes for j in range(s.encoder_len or 0)]
        return {
            "encoder_seq_lens": _int32(lengths).to(device),
            "max_encoder_seq_len": max(lengths),
            "num_encoder_tokens": len(slots),
            "cross_slot_mapping": torch.tensor(slots, dtype=torch.int64, device=device),
            "cross_block_tables": _tables([s.cross_blocks for s in sequences]).to(device),
        }

    def _slots(self, s: _Sequence) -> list[int]:
        positions = range(s.context_len, s.context_len + s.query_len)
        return [self._slot(s.blocks, p) if p >= s.first_written else PAD_SLOT_ID for p in positions]

    def _slot(self, blocks: tuple[int, ...], position: int) -> int:
        """PAD_SLOT_ID where a sequence has no pages at all: the profiling run."""
        if not blocks:
            return PAD_SLOT_ID
        page = position // self.block_size
        if page >= len(blocks):
            have = f"{len(blocks)} blocks of {self.block_size}"
            raise MetadataError(f"token {position} needs block {page}, but its sequence has {have}; allocate one more")
        return blocks[page] * self.block_size + position % self.block_size


def _int32(values: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _starts(lengths: Sequence[int]) -> torch.Tensor:
    return torch.nn.functional.pad(_int32(lengths).cumsum(0, dtype=torch.int32), (1, 0))


def _tables(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """int32 [seqs, most blocks], spare entries 0."""
    width = max((len(row) for row in rows), default=0)
    return _int32([[*row, *[0] * (width - len(row))] for row in rows]).reshape(len(rows), width)
