"""Copies of whole blocks by the kernels: plain loops and memory copies move the same bytes, in every layout."""

from __future__ import annotations

import ctypes

import pytest
import torch
from cpu_problem import BEST_FIRST, bits, kernels, raw, using

WAYS = [BEST_FIRST[0], "naive"]


def noise(*shape, dtype=torch.float32):
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype)[..., 0]


def copy(isa, routes, pairs, threads=1):
    """routes: (source, target), five dimensions, the block first."""
    pairs = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    caches = (kernels.Cache * len(routes))()
    for cache, (source, target) in zip(caches, routes, strict=True):
        cache.source, cache.target, cache.item = source.data_ptr(), target.data_ptr(), source.element_size()
        cache.source_strides[:], cache.target_strides[:] = source.stride(), target.stride()
        cache.shape[:] = source.shape
    call = kernels.Copy(ctypes.addressof(caches), pairs.data_ptr(), len(caches), len(pairs), threads)
    with using(isa):
        kernels.copy_blocks(call)


def orders(rows):
    """One shape [6, 2, 3, 4, 5] in memory orders and with gaps."""
    sizes = (6, 2, 3, 4, 5)
    found = {}
    for name, order in (("plain", "01234"), ("tokens first", "01324"), ("sizes outside", "04123"), ("all", "42310")):
        order = [int(i) for i in order]
        memory = rows(*[sizes[i] for i in order])
        found[name] = memory.permute([order.index(i) for i in range(5)])
    found["row gaps"] = rows(6, 2, 3, 4, 9)[..., 2:7]
    found["token gaps"] = rows(6, 2, 3, 8, 5)[..., 1::2, :]
    found["block gaps"] = rows(12, 2, 3, 4, 5)[::2]
    found["every other"] = rows(6, 2, 3, 4, 10)[..., ::2]
    return found


@pytest.mark.parametrize("isa", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64], ids=str)
def test_every_layout_gets_its_blocks_and_keeps_the_rest(isa, dtype):
    torch.manual_seed(0)
    pairs = [(1, 0), (1, 4), (3, 5)]
    for target_name, target in orders(lambda *shape: noise(*shape, dtype=dtype)).items():
        for source_name, source in orders(lambda *shape: noise(*shape, dtype=dtype)).items():
            memory = torch.empty(0, dtype=torch.uint8).set_(target.untyped_storage())
            wanted = memory.clone()
            view = torch.empty(0, dtype=dtype).set_(wanted.untyped_storage())
            view = view.as_strided(target.shape, target.stride(), target.storage_offset())
            for s, d in pairs:
                raw(view)[d] = raw(source)[s]
            copy(isa, [(source, target)], pairs)
            assert torch.equal(memory, wanted), (source_name, target_name)


@pytest.mark.parametrize("threads", [1, 2, 3, 64])
def test_many_blocks_of_many_caches_are_shared_among_threads(threads):
    torch.manual_seed(1)
    routes = [(noise(40, 2, 3, 16, size), noise(50, 2, 3, 16, size)) for size in (1, 24, 64, 100)]
    blocks = torch.randperm(40)[:30], torch.randperm(50)[:30]
    wanted = []
    for source, target in routes:
        wanted.append(raw(target).clone())
        wanted[-1][blocks[1]] = raw(source)[blocks[0]]
    copy(WAYS[0], routes, torch.stack(blocks, 1).tolist(), threads)
    assert all(torch.equal(bits(target), bits(right)) for (_, target), right in zip(routes, wanted, strict=True))


@pytest.mark.parametrize("shift", [0, 1, 4])
@pytest.mark.parametrize("size", [128, 72, 18])
@pytest.mark.parametrize("threads", [1, 2])
def test_copies_past_the_caches_arrive_whole(shift, size, threads):
    """Twenty megabytes are written another way, where rows are aligned and whole lines, and otherwise as always."""
    torch.manual_seed(2)
    block = 2 * 3 * 5 * size
    count = (20 << 20) // (4 * block) + 1
    source = noise(count * block).view(count, 2, 3, 5, size)
    target = torch.zeros(source.numel() + 8)[shift : shift + source.numel()].view(source.shape)
    order = torch.randperm(count)
    copy(WAYS[0], [(source, target)], [(i, int(order[i])) for i in range(count)], threads)
    assert torch.equal(target.view(torch.int32)[order], source.view(torch.int32))


@pytest.mark.parametrize("isa", WAYS)
def test_nothing_to_copy_touches_nothing(isa):
    cache = torch.zeros(4, 2, 3, 4, 5)
    copy(isa, [], [(0, 1)])
    copy(isa, [(cache, cache)], [])
    copy(isa, [(cache[..., :0], cache[..., :0]), (cache[:, :, :0], cache[:, :, :0])], [(0, 1)])
    assert cache.sum() == 0


@pytest.mark.parametrize("isa", WAYS)
def test_a_block_beyond_32_bits_is_found(isa):
    """Six gigabytes of address space, of which four pages are touched."""
    cache = torch.empty(3 * 2**16 + 1, 2, 1, 16, 1024, dtype=torch.uint8)
    assert cache.stride(0) * (len(cache) - 1) > 2**32
    cache[-1], cache[2**16] = 7, 9
    copy(isa, [(cache, cache)], [(len(cache) - 1, 0), (2**16, len(cache) - 2)])
    assert (cache[0] == 7).all()
    assert (cache[-2] == 9).all()
