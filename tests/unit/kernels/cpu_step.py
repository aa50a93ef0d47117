"""One step of a layer on TORCH_SDPA: arguments of its calls, what a call leaves behind, what a checked call would."""

from __future__ import annotations

import types
from dataclasses import replace

import torch
from cpu_problem import bits

from heedful.backends.paged import CommonMetadataBuilder
from heedful.backends.torch_sdpa import TorchSdpaBackend

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 32, 8
SEQS = ((5, 11, (6, 1)), (1, 20, (2, 7, 4)), (1, 3, (5,)))
"""(tokens, past, pages): a chunk and two decodes."""


class Step:
    """One step's metadata and the arguments of a call; rows: two of them are padding."""

    def __init__(self, dtype=torch.float32, word="auto"):
        builder = CommonMetadataBuilder(BLOCK)
        for tokens, past, pages in SEQS:
            builder.add(tokens, past, list(pages), decode=tokens == 1)
        self.rows = sum(tokens for tokens, _, _ in SEQS) + 2
        self.metadata = builder.build(pad_tokens=self.rows)
        self.random, self.dtype, self.word = torch.Generator().manual_seed(0), dtype, word

    def normal(self, *shape, dtype=None):
        return torch.randn(shape, generator=self.random).to(dtype or self.dtype)

    def impl(self, **rules):
        return TorchSdpaBackend.get_impl_cls()(
            HEADS, SIZE, **({"scale": SIZE**-0.5, "num_kv_heads": KV_HEADS, "kv_cache_dtype": self.word} | rules)
        )

    def cache(self, blocks=9):
        stored = torch.float8_e4m3fn if self.word == "fp8" else self.dtype
        shape = TorchSdpaBackend.get_kv_cache_shape(blocks, BLOCK, KV_HEADS, SIZE)
        return self.normal(*shape).to(stored)

    def arguments(self, **changes):
        """New tensors in every call, so that no address comes twice."""
        usual = {
            "query": self.normal(self.rows, HEADS, SIZE),
            "key": self.normal(self.rows, KV_HEADS, SIZE),
            "value": self.normal(self.rows, KV_HEADS, SIZE),
            "kv_cache": self.cache(),
            "attn_metadata": self.metadata,
            "output": torch.full((self.rows, HEADS, SIZE), torch.nan, dtype=self.dtype),
        }
        return usual | changes


def copied(x):
    """A deep copy that keeps strides; all else but tensors as it is."""
    if isinstance(x, (tuple, list)):
        return type(x)(map(copied, x))
    if not isinstance(x, torch.Tensor) or x.dim() == 0:
        return x
    span = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    return x.detach().as_strided((span,), (1,)).clone().as_strided(x.shape, x.stride())


def outcome(impl, arguments):
    """All that a call leaves behind, as bytes; or its error."""
    try:
        answer = impl.forward(**arguments)
    except Exception as error:
        return type(error), str(error)
    cache = arguments["kv_cache"]
    left = [answer, *(cache if isinstance(cache, (tuple, list)) else [cache])]
    if arguments.get("output_lse") is not None:
        left.append(arguments["output_lse"])
    return [(tuple(x.shape), bits(x).clone()) for x in left]


def same(one, other):
    if isinstance(one, tuple) or isinstance(other, tuple):
        return one == other
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(one, other, strict=True))


def checked(impl, arguments):
    """The outcome on copies of everything and metadata that no call has met."""
    metadata = arguments["attn_metadata"]
    if hasattr(metadata, "step"):
        metadata = replace(metadata, step={})
    return outcome(impl, {name: copied(x) for name, x in arguments.items()} | {"attn_metadata": metadata})


def wide(x, extra=8):
    """The same numbers in rows that have room behind them."""
    rows = x.new_zeros(*x.shape[:-1], x.shape[-1] + extra)
    rows[..., : x.shape[-1]] = x
    return rows[..., : x.shape[-1]]


def by_heads(x):
    """The same numbers, one head after another."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def strided(x):
    """The same numbers, elements of a row apart."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def disguised(x):
    """All that a call would use of a tensor."""
    names = ("shape", "stride", "dtype", "is_cpu", "data_ptr")
    return types.SimpleNamespace(**{name: getattr(x, name) for name in names}, owner=x)


def one_less(x):
    """Of the same strides."""
    return x[:-1] if x.dim() == 3 else x[:, :, :, :-1]
