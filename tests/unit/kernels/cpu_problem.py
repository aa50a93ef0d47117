"""A batch on a paged cache for heedful's CPU kernels, called without any backend, and what must come out of it."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch

kernels = pytest.importorskip("heedful.kernels.cpu", exc_type=ImportError)

from heedful.kernels.cpu.library import DTYPE_CODES  # noqa: E402 (only where the kernels are)
from heedful.reference import dequantise, reference_attention  # noqa: E402

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CODES = {getattr(torch, name): code for name, code in DTYPE_CODES.items()}
BEST_FIRST = [name for name, here in kernels.isas().items() if here]
EVERY = [*BEST_FIRST, "naive"]
NAN_BYTE = 0x7F
GARBAGE = -7
"""What stands in block-table entries that no key lies behind."""

MIXED = ((17, 0), (1, 33), (70, 0), (1, 100), (5, 517), (1, 1100), (2, 0))
"""(query_len, context_len): prefills, a chunk, decodes, one of them in three parts."""
SMALL = ((3, 0), (1, 33), (2, 9), (1, 0))


def using(isa: str):
    """The kernels run on this instruction set inside the context."""
    return mock.patch.dict(os.environ, HEEDFUL_CPU_ISA=isa)


def raw(x: torch.Tensor) -> torch.Tensor:
    """One-byte floats as bytes, which torch can index; all else as it is."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, for comparisons that tell NaN from NaN and 0 from -0."""
    return x.contiguous().view(torch.uint8)


@dataclass
class Problem:
    """lens: (query_len, context_len). Slots behind no key are NaN. rules: as reference_attention takes them."""

    lens: tuple[tuple[int, int], ...] = MIXED
    dtype: torch.dtype = F32
    cache: torch.dtype | None = None
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    size_v: int | None = None
    block: int = 16
    k_scale: float = 1.0
    v_scale: float = 1.0
    loud: float = 1.0
    seed: int = 0
    rules: dict = field(default_factory=dict)

    def __post_init__(self):
        self.cache = self.cache or self.dtype
        self.size_v = self.size_v or self.size
        self.random = torch.Generator().manual_seed(self.seed)
        self.scale = self.size**-0.5
        q_lens = [q for q, _ in self.lens]
        self.kv_lens = [q + past for q, past in self.lens]
        self.starts = torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32)
        self.tokens = sum(q_lens)
        self.query = (self._normal(self.tokens, self.heads, self.size) * self.loud).to(self.dtype)
        self._lay_out()

    def _normal(self, *shape):
        return torch.randn(shape, generator=self.random)

    def _lay_out(self):
        counts = [-(-n // self.block) for n in self.kv_lens]
        pages = torch.randperm(sum(counts) + 3, generator=self.random).int()
        self.tables = torch.full((len(counts), max(counts) + 2), GARBAGE, dtype=torch.int32)
        for table, own in zip(self.tables, pages[: sum(counts)].split(counts), strict=True):
            table[: len(own)] = own
        self.key_pages = self._pages(len(pages), self.size, self.k_scale)
        self.value_pages = self._pages(len(pages), self.size_v, self.v_scale)
        self.keys, self.values = (self._flat(side) for side in (self.key_pages, self.value_pages))
        for side in (self.key_pages, self.value_pages):
            self._poison(side)

    def _pages(self, count, size, scale):
        return (self._normal(count, self.kv_heads, self.block, size) / scale).to(self.cache)

    def slots(self, sequence):
        """(page, offset) of every key of a sequence."""
        at = torch.arange(self.kv_lens[sequence])
        return self.tables[sequence, at // self.block].long(), at % self.block

    def _flat(self, pages):
        return [raw(pages)[p, :, o].view(self.cache) for p, o in map(self.slots, range(len(self.lens)))]

    def _poison(self, pages):
        holds = torch.zeros(len(pages), self.block, dtype=torch.bool)
        for sequence in range(len(self.lens)):
            holds[self.slots(sequence)] = True
        raw(pages).transpose(1, 2)[~holds] = NAN_BYTE if self.cache.itemsize == 1 else torch.nan

    def call(self, *, threads=1, only=None, query=None, sides=None):
        """(the kernels' argument, output, lse). only: a sequence that is left by itself."""
        query = self.query if query is None else query
        key, value = (self.key_pages, self.value_pages) if sides is None else sides
        output = torch.full((self.tokens, self.heads, self.size_v), torch.nan, dtype=self.dtype)
        lse = torch.full((self.tokens, self.heads), torch.nan)
        first = 0 if only is None else only
        lens = torch.tensor(self.kv_lens, dtype=torch.int32)
        kept = [query, key, value, output, lse, lens]
        call = kernels.Attention(
            query=query.data_ptr(),
            q_token=query.stride(0),
            q_head=query.stride(1),
            key=key.data_ptr(),
            k_block=key.stride(0),
            k_head=key.stride(1),
            k_token=key.stride(2),
            value=value.data_ptr(),
            v_block=value.stride(0),
            v_head=value.stride(1),
            v_token=value.stride(2),
            output=output.data_ptr(),
            o_token=output.stride(0),
            o_head=output.stride(1),
            lse=lse.data_ptr(),
            lse_token=lse.stride(0),
            lse_head=lse.stride(1),
            query_start=self.starts[first:].data_ptr(),
            kv_lens=lens[first:].data_ptr(),
            block_tables=self.tables[first:].data_ptr(),
            table_stride=self.tables.stride(0),
            num_seqs=len(self.lens) if only is None else 1,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_size=self.size,
            head_size_v=self.size_v,
            block_size=self.block,
            dtype=CODES[self.dtype],
            cache_dtype=CODES[self.cache],
            causal=self.rules.get("causal", True),
            window=self.rules.get("sliding_window") or 0,
            scale=self.scale,
            soft_cap=self.rules.get("logits_soft_cap") or 0.0,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            threads=threads,
        )
        for rule, name in (("alibi_slopes", "alibi_slopes"), ("sinks", "sinks")):
            if self.rules.get(rule) is not None:
                kept.append(self.rules[rule].float())
                setattr(call, name, kept[-1].data_ptr())
        call.kept = kept  # ctypes holds addresses only
        return call, output, lse

    def flatten(self, call, keys, values):
        """Make a call read flat keys [keys, kv_heads, size] and values in place of pages."""
        ends = torch.tensor([0, *itertools.accumulate(self.kv_lens)], dtype=torch.int32)
        call.key, call.k_token, call.k_head = keys.data_ptr(), keys.stride(0), keys.stride(1)
        call.value, call.v_token, call.v_head = values.data_ptr(), values.stride(0), values.stride(1)
        call.block_tables, call.key_start = None, ends.data_ptr()
        call.kept += [keys, values, ends]

    def run(self, isa, **how):
        """(output, lse) on one instruction set."""
        call, output, lse = self.call(**how)
        with using(isa):
            kernels.attend(call)
        return output, lse

    def expected(self):
        """float64 (output, lse)."""
        keys = torch.cat([dequantise(x, self.k_scale) for x in self.keys])
        values = torch.cat([dequantise(x, self.v_scale) for x in self.values])
        ends = torch.tensor([0, *itertools.accumulate(self.kv_lens)])
        return reference_attention(self.query, keys, values, self.starts, ends, scale=self.scale, **self.rules)

    def check(self, found, right, floors=2):
        """Within rounding of the float64 answer: fp32 by its own digits, halves by what rounding the output costs.

        floors: how many times that. Where a bf16 weight may exceed 1 (AMX tiles), the largest one is rounded too: 3.
        """
        (output, lse), (wanted, wanted_lse) = found, right
        floor = (wanted.to(self.dtype).double() - wanted).abs().max().item()
        limit = 4e-6 * max(1.0, self.loud) if self.dtype == F32 else max(floors * floor, 1e-3)
        error = (output.double() - wanted).abs().max().item()
        assert error <= limit, f"output is {error:.2e} off, rounding alone {floor:.2e}"
        none = wanted_lse == -torch.inf
        assert torch.equal(lse == -torch.inf, none)
        lse_limit = (4e-6 if self.dtype == F32 else 2e-5) * max(1.0, 3 * self.loud)
        lse_error = (lse.double() - wanted_lse)[~none].abs().max().item() if (~none).any() else 0.0
        assert lse_error <= lse_limit, f"LSE is {lse_error:.2e} off"


def same(one, other):
    """Both (output, lse), bit for bit."""
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))
