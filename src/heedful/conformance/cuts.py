"""Parts of a step as steps of their own: single sequences, another order, smaller chunks. Decoder batches only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from heedful.conformance.batch import Expected
from heedful.conformance.pages import step_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from heedful.conformance.batch import Batch


@dataclass(frozen=True)
class Piece:
    """Tokens start … stop of one sequence's share of the step; earlier ones count as context."""

    sequence: int
    start: int
    stop: int
    decode: bool = False


def whole(batch: Batch) -> list[Piece]:
    """Every sequence's full share, in the batch's own order."""
    lengths = [b - a for a, b in pairwise(batch.metadata.query_start_loc.tolist())]
    first = batch.metadata.num_prefills
    return [Piece(i, 0, length, decode=i >= first) for i, length in enumerate(lengths)]


def rows_of(batch: Batch, pieces: Sequence[Piece]) -> torch.Tensor:
    """int64: the rows of the whole step that the pieces stand for."""
    starts = batch.metadata.query_start_loc.tolist()
    rows = [row for p in pieces for row in range(starts[p.sequence] + p.start, starts[p.sequence] + p.stop)]
    return torch.tensor(rows, dtype=torch.int64)


def cut(batch: Batch, pieces: Sequence[Piece]) -> Batch:
    """The step of those pieces alone, on the same pages; prefills come first in ``pieces``."""
    m, rows = batch.metadata, rows_of(batch, pieces)
    metadata = step_metadata(
        [p.stop - p.start for p in pieces],
        [int(m.context_lens[p.sequence]) + p.start for p in pieces],
        [m.block_tables[p.sequence].tolist() for p in pieces],
        m.slot_mapping[rows].tolist(),
        sum(p.decode for p in pieces),
    )
    key, value = (None if x is None else x[rows] for x in (batch.key, batch.value))
    return replace(batch, query=batch.query[rows], key=key, value=value, metadata=metadata)


def chunks(batch: Batch, size: int) -> Iterator[list[Piece]]:
    """Steps of at most ``size`` tokens a sequence. Steps of one token after the first are decodes."""
    lengths = [piece.stop for piece in whole(batch)]
    for start in range(0, max(lengths, default=0), size):
        stops = [(i, min(start + size, n)) for i, n in enumerate(lengths) if n > start]
        yield [Piece(i, start, stop, decode=size == 1 and start > 0) for i, stop in stops]


def expected_of(expected: Expected, rows: torch.Tensor) -> Expected:
    """The answer of some rows."""
    return Expected(
        expected.output[rows],
        expected.lse[rows],
        tuple(x[rows] for x in expected.yardsticks),
        tuple(x[rows] for x in expected.yardstick_lses),
    )
