"""What a step's sequences become: few, large calls. Worked out once a step and kept on it for every layer.

Sequences with few new tokens (decodes, short chunks) are folded: those alike in tokens share a call while their keys
fit in a tile, and one that does not fit is read tile by tile. A tile is sized for the cache of a core, because what
is slow here is not arithmetic but memory that torch allocates, fills and leaves. All others go one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from heedful.backends.paged_mask import Rules, Tile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from heedful.backends.paged import Step

FOLDED_TOKENS = 16
"""A sequence with at most so many new tokens is folded."""
TILE_BYTES = 4 * 2**20
"""fp32 K and V that one thread's tile holds."""


@dataclass(frozen=True)
class Read:
    """One call's keys in the cache. index int64 [seqs * num_kv_heads * pages]: rows of one head's page. skip, stop:
    the keys of those pages that exist and may be seen, per sequence."""

    seqs: int
    index: torch.Tensor
    pages: torch.Tensor
    skip: tuple[int, ...]
    stop: tuple[int, ...]
    tile: Tile


@dataclass(frozen=True)
class Folded:
    """Sequences alike in new tokens. rows int64 [seqs * tokens] of the query; reads: one for each tile of keys."""

    rows: torch.Tensor
    seqs: int
    tokens: int
    reads: tuple[Read, ...]


@dataclass(frozen=True)
class Single:
    """A sequence that goes alone. Its keys: read, or the rows of key and value that this step brings."""

    sequence: int
    rows: slice
    read: Read | None


@dataclass(frozen=True)
class Plan:
    """unseeing int64: query rows that have no key at all."""

    folded: tuple[Folded, ...]
    single: tuple[Single, ...]
    unseeing: torch.Tensor


def plan(step: Step, rules: Rules, num_kv_heads: int, row_bytes: int, *, exact: bool) -> Plan:
    """The step's calls. row_bytes: fp32 bytes of K and V of one key in one head. exact: the cache holds what came."""
    keys = max(1, TILE_BYTES * torch.get_num_threads() // (num_kv_heads * row_bytes))
    asked = ("torch_sdpa", rules.window, num_kv_heads, keys, exact)
    if asked not in step.derived:
        step.derived[asked] = _Planner(step, rules, num_kv_heads, keys, exact).plan()
    found: Plan = step.derived[asked]
    return found


class _Planner:
    def __init__(self, step: Step, rules: Rules, num_kv_heads: int, tile_keys: int, exact: bool) -> None:
        self.step, self.rules, self.num_kv_heads, self.exact = step, rules, num_kv_heads, exact
        self.tile_pages = max(1, tile_keys // step.block_size) if step.block_size else 0

    def plan(self) -> Plan:
        """Sort every sequence into one of the three kinds."""
        step = self.step
        short: list[int] = []
        single: list[int] = []
        unseeing: list[int] = []
        for i, (tokens, keys) in enumerate(zip(step.query_lens, step.key_lens, strict=True)):
            if tokens and not keys:
                unseeing += range(*step.query_starts[i : i + 2])
            elif tokens:
                (short if step.tables is not None and tokens <= FOLDED_TOKENS else single).append(i)
        folded = tuple(self._folded(alike) for alike in self._alike(short))
        return Plan(folded, tuple(map(self._single, single)), torch.tensor(unseeing, dtype=torch.int64))

    def _single(self, i: int) -> Single:
        step = self.step
        first = (step.key_starts if step.tables is None else step.query_starts)[i]
        own = step.tables is None or (self.exact and step.fresh[i])
        return Single(i, slice(first, first + step.key_lens[i]), None if own else self._read([i], 0, self._pages(i)))

    def _first_page(self, i: int) -> int:
        return self.rules.first_key(self.step.key_lens[i] - self.step.query_lens[i]) // self.step.block_size

    def _pages(self, i: int) -> int:
        return -(-self.step.key_lens[i] // self.step.block_size) - self._first_page(i)

    def _alike(self, short: list[int]) -> Iterator[list[int]]:
        """Runs of sequences with the same number of tokens whose padded pages fit in a tile together."""
        ordered = sorted(short, key=lambda i: (self.step.query_lens[i], self._pages(i)))
        run: list[int] = []
        for i in ordered:
            alike = run and self.step.query_lens[run[0]] == self.step.query_lens[i]
            if run and not (alike and (len(run) + 1) * self._pages(i) <= self.tile_pages):
                yield run
                run = []
            run.append(i)
        if run:
            yield run

    def _folded(self, sequences: list[int]) -> Folded:
        step, tokens = self.step, self.step.query_lens[sequences[0]]
        starts = torch.tensor([step.query_starts[i] for i in sequences])
        rows = (starts[:, None] + torch.arange(tokens)).reshape(-1)
        most = self._pages(sequences[-1])
        cuts = [*range(0, most, self.tile_pages if len(sequences) == 1 else most), most]
        reads = tuple(self._read(sequences, a, b) for a, b in pairwise(cuts))
        return Folded(rows, len(sequences), tokens, reads)

    def _read(self, sequences: list[int], begin: int, end: int) -> Read:
        """Pages begin … end of each sequence, counted from its first visible page; a short one is padded."""
        step, size = self.step, self.step.block_size
        assert step.tables is not None
        firsts = [self._first_page(i) + begin for i in sequences]
        width = step.tables.shape[1]
        at = torch.tensor(firsts)[:, None] + torch.arange(end - begin)
        pages = step.tables[torch.tensor(sequences)[:, None], at.clamp_max(width - 1)]
        tokens = step.query_lens[sequences[0]]
        lens = tuple(step.key_lens[i] for i in sequences)
        seen_from = [self.rules.first_key(length - tokens) for length in lens]
        skip = tuple(max(0, seen - first * size) for seen, first in zip(seen_from, firsts, strict=True))
        stop = tuple(
            min(length - first * size, (end - begin) * size) for length, first in zip(lens, firsts, strict=True)
        )
        low, high = (skip[0], stop[0]) if len(sequences) == 1 else (0, max(stop))
        first_key = tuple(first * size + low for first in firsts)
        tile = Tile(tuple(length - tokens for length in lens), tokens, first_key, high - low, lens)
        heads = torch.arange(self.num_kv_heads)[None, :, None]
        index = (pages[:, None, :] * self.num_kv_heads + heads).reshape(-1)
        return Read(len(sequences), index, pages.reshape(-1), skip, stop, tile)
