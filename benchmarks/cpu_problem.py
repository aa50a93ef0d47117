"""One case as tensors: a paged cache in heedful's layout, shuffled tables, queries; and what the right answer is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from heedful.backends.paged import cache_dtype
from heedful.backends.torch_sdpa import TorchSdpaBackend
from heedful.reference import reference_attention

if TYPE_CHECKING:
    from cpu_cases import Case

ROWS = 32  # checked at the front and at the back of a sequence
# Of the largest number of the right answer. OpenVINO's bf16 prefill sets the first.
TOLERANCE = {"bfloat16": 2**-6, "float32": 2e-5}


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lengths) -> torch.Tensor:
    """[0, then the running sum]."""
    return torch.nn.functional.pad(int32(lengths).cumsum(0, dtype=torch.int32), (1, 0))


def random(shape, dtype, seed=0) -> torch.Tensor:
    """Normal numbers; a million of them repeat, which is quick to make and all the same to a kernel."""
    filled = torch.empty(shape, dtype=dtype)
    flat = filled.view(-1)
    some = torch.randn(1_000_003, generator=torch.Generator().manual_seed(seed)).to(dtype)
    for at in range(0, flat.numel(), some.numel()):
        piece = flat[at : at + some.numel()]
        piece.copy_(some[: piece.numel()])
    return filled


@dataclass
class Truth:
    """Exact rows of the answer and where they stand; floor: the error of merely rounding them to the output's dtype."""

    rows: torch.Tensor
    exact: torch.Tensor
    lse: torch.Tensor
    floor: float

    def error(self, output: torch.Tensor, lse: torch.Tensor | None) -> float:
        """The largest distance of an output [tokens, heads, size] from the exact rows; NaN where any is NaN.

        inf where an LSE came that is wrong by more than a thousandth.
        """
        if lse is not None and not (lse[self.rows].double() - self.lse).abs().max() < 1e-3:
            return math.inf
        return float((output[self.rows].double() - self.exact).abs().max())

    @property
    def largest(self) -> float:
        """What errors are told against."""
        return float(self.exact.abs().max())


class Problem:
    """A case as tensors: cache [2, blocks, kv_heads, block, size]; query, new keys and values [tokens, heads, size]."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.dtype = getattr(torch, case.dtype)
        self.scale = case.size**-0.5
        pages = [-(-length // case.block) for length in case.kv_lens]
        self.tables = self._tables(pages)
        shape = TorchSdpaBackend.get_kv_cache_shape(sum(pages), case.block, case.kv_heads, case.size)
        self.cache = random(shape, cache_dtype(case.cache, self.dtype))
        self.tokens = sum(case.q_lens)
        self.query = random((self.tokens, case.heads, case.size), self.dtype, seed=1)
        self.query_start, self.kv_lens = starts(case.q_lens), int32(case.kv_lens)
        self.alibi = 2.0 ** -torch.arange(1, case.heads + 1).mul(8 / case.heads) if case.alibi else None
        self.sinks = torch.linspace(-1, 2, case.heads) if case.sinks else None
        self.slots = torch.cat(
            [self._slots(s, past, length) for s, (past, length) in enumerate(zip(case.past, case.kv_lens, strict=True))]
        )
        self.new = [self.at(part, self.slots) for part in self.cache]

    @staticmethod
    def _tables(pages) -> torch.Tensor:
        order, first = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(2)).int(), 0
        tables = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        for s, count in enumerate(pages):
            tables[s, :count] = order[first : first + count]
            first += count
        return tables

    def _slots(self, s: int, begin: int, end: int) -> torch.Tensor:
        position, block = torch.arange(begin, end), self.case.block
        return self.tables[s].long()[position // block] * block + position % block

    def at(self, part: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """What K or V holds at slots: [slots, kv_heads, size] in the dtype of queries."""
        block = self.case.block
        return part.transpose(1, 2)[slots // block, slots % block].to(self.dtype)

    def keys(self, s: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of sequence s, [keys, kv_heads, size]."""
        slots = self._slots(s, 0, self.case.kv_lens[s])
        return self.at(self.cache[0], slots), self.at(self.cache[1], slots)

    def truth(self) -> Truth:
        """The first and the last rows of four sequences, worked out in float64."""
        count = len(self.case.q_lens)
        pieces = [piece for s in sorted({0, min(1, count - 1), count // 2, count - 1}) for piece in self._exact(s)]
        rows, exact, lse = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        return Truth(rows, exact, lse, float((exact.to(self.dtype).double() - exact).abs().max()))

    def _exact(self, s: int):
        case, first, length = self.case, int(self.query_start[s]), self.case.q_lens[s]
        key, value = self.keys(s)
        some = min(ROWS, length)
        for begin in sorted({0, length - some}):
            seen = case.past[s] + begin + some
            query = self.query[first + begin : first + begin + some]
            flat = (query, key[:seen], value[:seen], starts([some]), starts([seen]))
            yield torch.arange(first + begin, first + begin + some), *reference_attention(*flat, **self._rules())

    def _rules(self):
        case = self.case
        return {
            "scale": self.scale,
            "sliding_window": case.window or None,
            "alibi_slopes": self.alibi,
            "logits_soft_cap": case.soft_cap or None,
            "sinks": self.sinks,
        }

    def output(self) -> torch.Tensor:
        """A fresh output of NaN, so that a row nobody wrote is seen."""
        return torch.full_like(self.query, math.nan)
