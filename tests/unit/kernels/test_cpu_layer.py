"""How TORCH_SDPA's layer calls the kernels: what they cannot take is turned into what they can, or left to torch."""

from __future__ import annotations

import pytest
import torch
from cpu_problem import BEST_FIRST, using

from heedful.backends.paged import CommonMetadataBuilder
from heedful.backends.torch_sdpa import TorchSdpaBackend

HEADS, SIZE, BLOCK = 2, 24, 8


class Layer:
    """Ten cached tokens and three new ones of one sequence, a decode of another."""

    def __init__(self):
        random = torch.Generator().manual_seed(0)
        builder = CommonMetadataBuilder(BLOCK)
        builder.add(3, 10, [4, 1])
        builder.add(1, 5, [2], decode=True)
        self.metadata = builder.build()
        shape = TorchSdpaBackend.get_kv_cache_shape(5, BLOCK, HEADS, SIZE)
        self.cache = torch.randn(shape, generator=random)
        self.query, self.key, self.value = (torch.randn(4, HEADS, SIZE, generator=random) for _ in range(3))

    def run(self, cache=None, query=None, output=None, **rules):
        impl = TorchSdpaBackend.get_impl_cls()(HEADS, SIZE, SIZE**-0.5, **rules)
        assert impl.kernels is not None
        cache = self.cache if cache is None else cache
        query = self.query if query is None else query
        return impl.forward(query, self.key, self.value, cache, self.metadata, output=output)


@pytest.fixture
def layer():
    return Layer()


@pytest.mark.parametrize("isa", BEST_FIRST)
def test_a_cache_whose_rows_are_not_contiguous_is_left_to_torch(layer, isa):
    with using(isa):
        dense = layer.run()
        apart = torch.empty(*layer.cache.shape[:-2], SIZE, BLOCK).transpose(-1, -2)
        apart.copy_(Layer().cache)
        assert (layer.run(cache=apart) - dense).abs().max() < 2e-6
        assert torch.equal(apart, layer.cache), "what was written differs"


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**40])
def test_a_window_beyond_32_bits_is_no_window(layer, window):
    assert torch.equal(layer.run(sliding_window=window), layer.run())


def test_a_query_of_strided_elements_is_read_right(layer):
    apart = torch.empty(4, SIZE, HEADS).transpose(1, 2)
    apart.copy_(layer.query)
    assert torch.equal(layer.run(query=apart), layer.run())


def test_an_output_of_strided_elements_is_filled(layer):
    apart = torch.full((4, SIZE, HEADS), torch.nan).transpose(1, 2)
    assert layer.run(output=apart) is apart
    assert torch.equal(apart, layer.run())


@pytest.mark.parametrize("sizes", [(513, 16), (16, 513), (1024, 1024)], ids=str)
def test_heads_beyond_512_are_left_to_torch(sizes):
    assert TorchSdpaBackend.get_impl_cls()(1, sizes[0], 1.0, head_size_v=sizes[1]).kernels is None


def test_a_layer_of_512_runs_on_the_kernels():
    assert TorchSdpaBackend.get_impl_cls()(1, 512, 1.0).kernels is not None
