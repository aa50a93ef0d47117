"""One step on a paged cache, laid out at random, with what must come out of it."""

from __future__ import annotations

import itertools
import random
import threading
from dataclasses import dataclass, field

import pytest
import torch

from heedful.backends.paged import CommonMetadataBuilder, cache_dtype, hnd_views
from heedful.backends.torch_sdpa import TorchSdpaBackend
from heedful.reference import dequantise, reference_attention, store_rounded

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass
class Scene:
    """seqs: (query_len, context_len, is_decode). Every slot that holds no key is NaN (fp8: NaN too)."""

    seqs: list[tuple[int, int, bool]]
    dtype: torch.dtype = torch.float32
    word: str = "auto"
    num_heads: int = 4
    num_kv_heads: int = 2
    size: int = 16
    size_v: int | None = None
    block_size: int = 4
    scales: tuple[float, float] = (1.0, 1.0)
    seed: int = 0
    pad_rows: int = 0
    keys: list = field(default_factory=list)
    values: list = field(default_factory=list)

    def __post_init__(self):
        torch.manual_seed(self.seed)
        self.size_v = self.size if self.size_v is None else self.size_v
        builder = CommonMetadataBuilder(self.block_size)
        counts = [-(-(q + c) // self.block_size) for q, c, _ in self.seqs]
        blocks = list(range(sum(counts) + 3))
        random.Random(self.seed).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(n)] for n in counts]
        for (q, c, decode), table in zip(self.seqs, self.tables, strict=True):
            builder.add(q, c, table, decode=decode)
        self.tokens = sum(q for q, _, _ in self.seqs)
        self.metadata = builder.build(pad_tokens=self.tokens + self.pad_rows)
        self._fill(sum(counts) + 3)

    def _fill(self, num_blocks):
        shape = TorchSdpaBackend.get_kv_cache_shape(
            num_blocks, self.block_size, self.num_kv_heads, self.size, self.word, self.size_v
        )
        shapes = [shape[1:]] * 2 if isinstance(shape[0], int) else shape
        stored = cache_dtype(self.word, self.dtype)
        self.cache = tuple(torch.full(s, torch.nan).to(stored) for s in shapes)
        if isinstance(shape[0], int):
            self.cache = (
                torch.stack([part.view(torch.uint8) for part in self.cache]).view(stored)
                if (stored.itemsize == 1)
                else torch.stack(self.cache)
            )
        views = hnd_views(self.cache)
        news = []
        for (q, c, _), table in zip(self.seqs, self.tables, strict=True):
            sides = [torch.randn(q + c, self.num_kv_heads, n).to(self.dtype) for n in (self.size, self.size_v)]
            kept = [self._stored(x, s) for x, s in zip(sides, self.scales, strict=True)]
            for view, x in zip(views, kept, strict=True):
                for p in range(c):
                    view[table[p // self.block_size], p % self.block_size] = x[p]
            seen = [self._read(x, s) for x, s in zip(kept, self.scales, strict=True)]
            self.keys.append(seen[0])
            self.values.append(seen[1])
            news.append([x[c:] for x in sides])
        pads = [torch.full((self.pad_rows, self.num_kv_heads, n), torch.nan).to(self.dtype) for n in self._sizes()]
        self.key, self.value = (torch.cat([*(n[i] for n in news), pads[i]]) for i in (0, 1))
        self.query = torch.randn(self.tokens + self.pad_rows, self.num_heads, self.size).to(self.dtype)

    def _sizes(self):
        return self.size, self.size_v

    def _stored(self, x, scale):
        return x if self.word == "auto" else store_rounded(x, scale, self.word)

    def _read(self, x, scale):
        return x if self.word == "auto" else dequantise(x, scale)

    def impl(self, **rules):
        return TorchSdpaBackend.get_impl_cls()(
            self.num_heads,
            self.size,
            self.size**-0.5,
            self.num_kv_heads,
            kv_cache_dtype=self.word,
            head_size_v=self.size_v,
            **rules,
        )

    def run(self, impl=None, **rules):
        """(output, LSE) of one forward into NaN-filled tensors."""
        impl = self.impl(**rules) if impl is None else impl
        rows = len(self.query)
        output = torch.full((rows, self.num_heads, self.size_v), torch.nan, dtype=self.dtype)
        lse = torch.full((rows, self.num_heads), torch.nan)
        found = impl.forward(
            self.query, self.key, self.value, self.cache, self.metadata, *self.scales, output=output, output_lse=lse
        )
        assert found is output
        return output, lse

    def expected(self, **rules):
        """float64 (output, LSE) of the rows that belong to sequences."""
        ends = [
            torch.tensor([0, *itertools.accumulate(n)])
            for n in zip(*((q, q + c) for q, c, _ in self.seqs), strict=True)
        ]
        tokens = self.query[: self.tokens]
        keys, values = torch.cat(self.keys), torch.cat(self.values)
        return reference_attention(tokens, keys, values, *ends, scale=self.size**-0.5, **rules)

    def check(self, **rules):
        output, lse = self.run(**rules)
        right, right_lse = self.expected(**rules)
        limit = TOLERANCE[self.dtype]
        assert (output[: self.tokens].double() - right).abs().max() < limit
        assert torch.allclose(lse[: self.tokens].double(), right_lse, atol=limit, rtol=0)
        assert (output[self.tokens :] == 0).all()
        assert (lse[self.tokens :] == -torch.inf).all()

    def encoder_error(self, kind, **rules):
        """The largest error of a layer with these rules where the sequences see both sides and no cache."""
        lengths = [q for q, _, _ in self.seqs]
        self.metadata.encoder_seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self.metadata.num_encoder_tokens = sum(lengths)
        given = (self.query, self.key, self.value, torch.empty(0), self.metadata)
        found = self.impl(**rules).forward(*given, attn_type=kind)
        ends = torch.tensor([0, *itertools.accumulate(lengths)])
        inputs = (self.query, self.key, self.value, ends, ends)
        right, _ = reference_attention(*inputs, scale=self.size**-0.5, causal=False, **rules)
        return (found.double() - right).abs().max()


class BareScene(Scene):
    """The same for a backend that returns no LSE."""

    def run(self, impl=None, **rules):
        """The output of one forward into a NaN-filled tensor."""
        impl = self.impl(**rules) if impl is None else impl
        output = torch.full((len(self.query), self.num_heads, self.size_v), torch.nan, dtype=self.dtype)
        given = (self.query, self.key, self.value, self.cache, self.metadata)
        assert impl.forward(*given, output=output) is output
        return output

    def check(self, **rules):
        output, (right, _) = self.run(**rules), self.expected(**rules)
        assert (output[: self.tokens].double() - right).abs().max() < TOLERANCE[self.dtype]
        assert (output[self.tokens :] == 0).all()


def _share(scenes, times):
    layer, right = scenes[0].impl(), [one.run() for one in scenes]
    wrong = []

    def same(one, two):
        return torch.equal(one, two) if isinstance(one, torch.Tensor) else all(map(torch.equal, one, two))

    def work(one, answer):
        wrong.extend(one for _ in range(times) if not same(one.run(layer), answer))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(scenes, right, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.fixture
def scene():
    torch.set_num_threads(1)
    return Scene


@pytest.fixture
def bare_scene():
    torch.set_num_threads(1)
    return BareScene


@pytest.fixture
def share_a_layer():
    """share_a_layer(scenes, times): each in a thread of its own, all on the first one's layer, bit for bit as alone."""
    return _share
