"""Whole blocks of a cache move bit for bit, or nothing moves: in torch, and as TORCH_SDPA does it."""

from __future__ import annotations

import pytest
import torch

from heedful.backends import paged, torch_sdpa_blocks
from heedful.backends.torch_sdpa import TorchSdpaBackend
from heedful.errors import BadInputError, MetadataError

PAIR = torch.tensor([[0, 1]])


@pytest.fixture(params=[paged, TorchSdpaBackend], ids=["torch", "TORCH_SDPA"])
def mover(request):
    """What has copy_blocks and swap_blocks."""
    return request.param


def raw(x):
    """The elements of a tensor as integers: bit patterns, which torch can compare and index."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def noise(*shape, dtype=torch.float32):
    """Every bit pattern there is, NaN among them."""
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype)[..., 0]


def transposed(*shape, dtype=torch.float32):
    """Heads inside of tokens, as another library may lay them out."""
    return noise(*shape[:-3], shape[-2], shape[-3], shape[-1], dtype=dtype).transpose(-2, -3)


def interleaved(n):
    """K and V of a block side by side, blocks outermost."""
    return noise(n, 2, 2, 4, 8).transpose(0, 1)


CACHES = {
    "one tensor": lambda n: noise(2, n, 2, 4, 8),
    "a pair": lambda n: (noise(n, 2, 4, 8), noise(n, 2, 4, 5)),
    "a list": lambda n: [noise(n, 2, 4, 8), noise(n, 2, 4, 8)],
    "bf16": lambda n: noise(2, n, 3, 4, 7, dtype=torch.bfloat16),
    "f16": lambda n: noise(2, n, 1, 1, 1, dtype=torch.float16),
    "e4m3": lambda n: noise(2, n, 2, 4, 8, dtype=torch.float8_e4m3fn),
    "e5m2": lambda n: (noise(n, 2, 4, 8, dtype=torch.float8_e5m2), noise(n, 2, 4, 3, dtype=torch.float8_e5m2)),
    "rows with gaps": lambda n: noise(2, n, 2, 4, 16)[..., 3:11],
    "elements with gaps": lambda n: noise(2, n, 2, 4, 16)[..., ::2],
    "bytes with gaps": lambda n: noise(2, n, 2, 4, 16, dtype=torch.float8_e4m3fn)[..., ::2],
    "halves with gaps": lambda n: noise(2, n, 2, 4, 16, dtype=torch.bfloat16)[..., ::3],
    "another order": lambda n: transposed(2, n, 2, 4, 8),
    "sizes outermost": lambda n: noise(2, n, 8, 2, 4).permute(0, 1, 3, 4, 2),
    "heads outermost": lambda n: noise(2, 2, n, 4, 8).transpose(1, 2),
    "interleaved": interleaved,
    "unlike sides": lambda n: (noise(n, 2, 4, 8), transposed(n, 2, 4, 5)),
}


def moved(before, source, pairs):
    """What a cache must hold afterwards: block after block, in plain Python."""
    after = raw(before).clone()
    for s, d in pairs.tolist():
        after[d] = raw(source)[s]
    return after


def sides(cache):
    return cache[0], cache[1]


def same(cache, wanted):
    return all(torch.equal(raw(part), right) for part, right in zip(sides(cache), wanted, strict=True))


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_swapped_blocks_arrive_bit_for_bit_and_nothing_else_changes(mover, make):
    torch.manual_seed(0)
    src, dst = make(4), make(6)
    pairs = torch.tensor([[0, 5], [3, 0], [0, 1]])
    kept = [raw(part).clone() for part in sides(src)]
    wanted = [moved(b, a, pairs) for a, b in zip(sides(src), sides(dst), strict=True)]
    mover.swap_blocks(src, dst, pairs)
    assert same(dst, wanted)
    assert same(src, kept)


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_copied_blocks_arrive_in_every_cache_and_nothing_else_changes(mover, make):
    torch.manual_seed(1)
    caches = [make(5), make(7), make(9)]
    pairs = torch.tensor([[0, 3], [0, 4], [1, 2]])
    wanted = [[moved(part, part, pairs) for part in sides(cache)] for cache in caches]
    mover.copy_blocks(caches, pairs)
    assert all(map(same, caches, wanted))


@pytest.mark.parametrize("name", ["rows with gaps", "elements with gaps", "another order", "interleaved"])
def test_what_lies_between_the_rows_of_a_cache_stays(mover, name):
    """The gaps of a strided cache belong to somebody else."""
    torch.manual_seed(2)
    cache = CACHES[name](5)
    memory = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    cells = torch.empty(0, dtype=torch.bool).set_(torch.zeros(len(memory), dtype=torch.bool).untyped_storage())
    mask = cells.view(-1, 4)[:, 0].as_strided(cache.shape, [4 * s for s in cache.stride()], 4 * cache.storage_offset())
    mask[:, 2] = True
    before = memory.clone()
    mover.copy_blocks([cache], torch.tensor([[0, 2]]))
    changed = (memory != before).view(-1, 4).any(1)
    assert changed.any()
    assert not (changed & ~cells.view(-1, 4)[:, 0]).any()


@pytest.mark.parametrize("names", [("one tensor", "another order"), ("heads outermost", "rows with gaps")], ids=str)
def test_blocks_move_between_caches_of_unlike_strides(mover, names):
    torch.manual_seed(3)
    src, dst = CACHES[names[0]](4), CACHES[names[1]](6)
    for source, target in ((src, dst), (dst, src)):
        pairs = torch.tensor([[1, 3], [2, 0]])
        wanted = [moved(b, a, pairs) for a, b in zip(sides(source), sides(target), strict=True)]
        mover.swap_blocks(source, target, pairs)
        assert same(target, wanted)


def test_blocks_move_between_one_tensor_and_a_pair(mover):
    torch.manual_seed(4)
    src, dst = noise(2, 4, 2, 4, 8), (noise(6, 2, 4, 8), noise(6, 2, 4, 8))
    pairs = torch.tensor([[1, 3], [2, 0]])
    wanted = [moved(b, a, pairs) for a, b in zip(sides(src), sides(dst), strict=True)]
    mover.swap_blocks(src, dst, pairs)
    assert same(dst, wanted)


def test_pairs_may_have_any_strides(mover):
    torch.manual_seed(5)
    cache = noise(2, 6, 2, 4, 8)
    pairs = torch.tensor([[0, 1, 0], [3, 5, 4]]).T
    assert not pairs.is_contiguous()
    wanted = [moved(part, part, pairs) for part in cache]
    mover.copy_blocks([cache], pairs)
    assert same(cache, wanted)
    wanted = [moved(part, part, torch.tensor([[1, 2]])) for part in cache]
    mover.copy_blocks([cache], torch.tensor([1, 2]).expand(1, 2))
    assert same(cache, wanted)


# Nothing --------------------------------------------------------------------------------------------------------------

NONE = torch.empty(0, 2, dtype=torch.int64)


def test_no_pairs_copy_nothing(mover):
    cache = torch.randn(2, 4, 2, 4, 8)
    before = cache.clone()
    mover.copy_blocks([cache], NONE)
    mover.swap_blocks(cache, torch.randn(2, 3, 2, 4, 8), NONE)
    mover.swap_blocks(cache, cache, NONE)
    mover.copy_blocks([], PAIR)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("empty", [torch.empty(0), torch.empty(2, 0, 2, 4, 8), (torch.empty(0), torch.empty(0))])
def test_a_cache_without_blocks_has_none_to_copy(mover, empty):
    mover.copy_blocks([empty], NONE)
    mover.swap_blocks(empty, empty, NONE)
    with pytest.raises(MetadataError, match="source block 0 is outside the cache of 0 blocks"):
        mover.copy_blocks([empty], PAIR)
    with pytest.raises(MetadataError, match="outside the cache of 0 blocks"):
        mover.swap_blocks(empty, empty, PAIR)


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "error", "text"),
    [
        ([[0, 4]], MetadataError, "destination block 4 is outside the cache of 4 blocks"),
        ([[-1, 2]], MetadataError, "source block -1"),
        ([[0, -1]], MetadataError, "destination block -1"),
        ([[2**62, 2]], MetadataError, f"source block {2**62}"),
        ([[0, -(2**63)]], MetadataError, f"destination block {-(2**63)}"),
        ([[0, 2], [1, 2]], MetadataError, "block 2 is the destination of two copies"),
        ([[0, 1], [1, 2]], MetadataError, "block 1 is both a source and a destination"),
        ([[2, 2]], MetadataError, "block 2 is both"),
        (torch.tensor([[0, 1]], dtype=torch.int32), BadInputError, r"torch.int32 \[1, 2\]"),
        (torch.tensor([[0.0, 1.0]]), BadInputError, r"torch.float32 \[1, 2\]"),
        (torch.tensor([0, 1]), BadInputError, r"int64 \[2\]; give int64 \[n, 2\]"),
        (torch.tensor([[0, 1, 2]]), BadInputError, r"int64 \[1, 3\]"),
        (torch.empty(0, dtype=torch.int64), BadInputError, r"int64 \[0\]"),
        (torch.tensor([[0, 1]], device="meta"), BadInputError, "torch.strided on meta"),
        (torch.tensor([[0, 1]]).to_sparse(), BadInputError, "torch.sparse_coo on cpu"),
        ([(0, 1)].copy, BadInputError, "block pairs came as builtin_function_or_method"),
        (None, BadInputError, "block pairs came as NoneType"),
    ],
)
def test_bad_pairs_are_an_error_before_anything_moves(mover, pairs, error, text):
    pairs = torch.tensor(pairs) if isinstance(pairs, list) else pairs
    caches = [torch.randn(2, 9, 2, 4, 8), torch.randn(2, 4, 2, 4, 8)]
    before = [cache.clone() for cache in caches]
    with pytest.raises(error, match=text):
        mover.copy_blocks(caches, pairs)
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


@pytest.mark.parametrize(("blocks", "pair"), [((3, 5), [2, 3]), ((5, 3), [3, 2]), ((5, 3), [2, 4])], ids=str)
def test_the_smaller_side_of_a_cache_sets_the_range(mover, blocks, pair):
    """K and V need not have as many blocks: the larger one's numbers would lie outside of the other."""
    src = tuple(torch.randn(n, 2, 4, 8) for n in blocks)
    dst = tuple(torch.randn(n, 2, 4, 8) for n in (5, 3))
    before = [part.clone() for part in (*src, *dst)]
    with pytest.raises(MetadataError, match="outside the cache of 3 blocks"):
        mover.swap_blocks(src, dst, torch.tensor([pair]))
    with pytest.raises(MetadataError, match="outside the cache of 3 blocks"):
        mover.copy_blocks([src], torch.tensor([[0, 4]]))
    assert all(map(torch.equal, (*src, *dst), before))


@pytest.mark.parametrize(
    ("cache", "text"),
    [
        (None, "came as None; give a tensor"),
        ((None, None), r"came as \(None, None\)"),
        (torch.tensor(1.0), r"came as a tensor \[\]"),
        (torch.zeros(2), r"came as a tensor \[2\]"),
        ((torch.tensor(1.0), torch.tensor(1.0)), "KV cache came as"),
        (torch.zeros(3, 4, 2, 4, 8), "3 parts came"),
        ((torch.zeros(4, 2, 4, 8),) * 3, "3 parts came"),
        ((), "0 parts came"),
    ],
)
def test_what_is_no_cache_is_an_error(mover, cache, text):
    with pytest.raises(BadInputError, match=text):
        mover.copy_blocks([cache], PAIR)
    with pytest.raises(BadInputError, match=text):
        mover.swap_blocks(cache, torch.zeros(2, 4, 2, 4, 8), PAIR)


@pytest.mark.parametrize("other", [torch.zeros(2, 4, 2, 4, 9), torch.zeros(2, 4, 2, 4, 8, dtype=torch.float16)])
def test_blocks_are_swapped_only_between_caches_alike(mover, other):
    with pytest.raises(BadInputError, match="K blocks of"):
        mover.swap_blocks(torch.zeros(2, 4, 2, 4, 8), other, PAIR)
    with pytest.raises(BadInputError, match="V blocks of"):
        mover.swap_blocks((torch.zeros(4, 2, 4, 8),) * 2, (torch.zeros(4, 2, 4, 8), other[1]), PAIR)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, 1, 2, 4, 8).expand(2, 4, 2, 4, 8),
        lambda: torch.zeros(1, 4, 2, 4, 8).expand(2, 4, 2, 4, 8),
        lambda: torch.zeros(2, 4, 2, 4, 1).expand(2, 4, 2, 4, 8),
        lambda: torch.zeros(600).as_strided((2, 4, 2, 4, 8), (256, 32, 32, 8, 1)),
    ],
    ids=["blocks", "sides", "elements", "as_strided"],
)
def test_a_cache_that_holds_an_element_twice_cannot_be_written(mover, make):
    with pytest.raises(BadInputError, match=r"the destination cache has shape .* several elements lie in one place"):
        mover.copy_blocks([make()], PAIR)
    with pytest.raises(BadInputError, match="several elements lie in one place"):
        mover.swap_blocks(torch.zeros(2, 4, 2, 4, 8), make(), PAIR)


def test_a_source_may_hold_an_element_twice(mover):
    src, dst = torch.randn(2, 1, 2, 4, 8).expand(2, 4, 2, 4, 8), torch.zeros(2, 4, 2, 4, 8)
    mover.swap_blocks(src, dst, torch.tensor([[3, 1]]))
    assert torch.equal(dst[:, 1], src[:, 0])


def test_a_gradient_is_not_lost_in_silence(mover):
    cache = torch.zeros(2, 4, 2, 4, 8, requires_grad=True)
    with pytest.raises(BadInputError, match="the destination cache requires grad"):
        mover.copy_blocks([cache], PAIR)
    with torch.no_grad():
        mover.copy_blocks([cache], PAIR)


# One memory -----------------------------------------------------------------------------------------------------------


def test_a_swap_inside_one_memory_obeys_the_rule_of_copies(mover):
    cache = torch.randn(2, 4, 2, 4, 8)
    for other in (cache, cache[:], (cache[0], cache[1])):
        with pytest.raises(MetadataError, match="both a source and a destination"):
            mover.swap_blocks(cache, other, torch.tensor([[0, 1], [1, 2]]))
    mover.swap_blocks(cache, torch.randn(2, 4, 2, 4, 8), torch.tensor([[0, 1], [1, 2]]))
    wanted = [moved(part, part, PAIR) for part in cache]
    mover.swap_blocks(cache, cache, PAIR)
    assert same(cache, wanted)


def test_two_stretches_of_one_cache_are_told_apart_by_where_they_lie(mover):
    """Block numbers of two views are not of one count: block 2 of the first is block 0 of the second."""
    torch.manual_seed(6)
    pool = noise(2, 8, 2, 4, 8)
    first, second = pool[:, :4], pool[:, 2:6]
    with pytest.raises(MetadataError, match="destination block 0 reaches into the memory of source block 2"):
        mover.swap_blocks(first, second, torch.tensor([[2, 3], [1, 0]]))
    wanted = [moved(b, a, torch.tensor([[1, 1], [2, 2]])) for a, b in zip(first, second, strict=True)]
    mover.swap_blocks(first, second, torch.tensor([[1, 1], [2, 2]]))
    assert same(second, wanted)


@pytest.mark.parametrize("shape", [(3, 2, 5, 2, 4, 8), (5, 3, 2, 2, 4, 8)], ids=["layers outside", "blocks outside"])
def test_the_layers_of_one_allocation_are_caches_of_their_own(mover, shape):
    torch.manual_seed(7)
    pool = noise(*shape)
    layers = list(pool) if shape[0] == 3 else [pool[:, i].transpose(0, 1) for i in range(3)]
    pairs = torch.tensor([[0, 1], [1, 2], [3, 3]])  # within one cache this would be an error
    wanted = [moved(b, a, pairs) for a, b in zip(layers[0], layers[2], strict=True)]
    mover.swap_blocks(layers[0], layers[2], pairs)
    assert same(layers[2], wanted)
    copies = torch.tensor([[0, 4]])
    wanted = [[moved(part, part, copies) for part in layer] for layer in layers]
    mover.copy_blocks(layers, copies)
    assert all(map(same, layers, wanted))


# What only TORCH_SDPA, which reads addresses, must refuse -------------------------------------------------------------


def freed():
    cache = torch.zeros(2, 4, 2, 4, 8)
    cache.untyped_storage().resize_(0)
    return cache


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (freed, "the cache is of layout strided without memory behind it"),
        (lambda: torch.zeros(2, 4, 2, 4, 8, device="meta"), "the cache is on meta"),
        (lambda: torch._neg_view(torch.zeros(2, 4, 2, 4, 8)), "negates what lies in memory"),
        (lambda: torch.zeros(2, 4, 8), r"a KV cache came as a tensor \[2, 4, 8\]; give one of 5"),
        (lambda: torch.zeros(2, 2, 4, 8), r"a KV cache came as a tensor \[2, 2, 4, 8\]"),
        (lambda: torch.zeros(2, 4, 1, 2, 4, 8), r"came as a tensor \[2, 4, 1, 2, 4, 8\]"),
        (lambda: (torch.zeros(4, 2, 4, 8), torch.zeros(4, 2, 8)), r"a part of a KV cache came as a tensor \[4, 2, 8\]"),
        (lambda: torch.zeros(2, 4, 2, 4, 8).to_sparse(), "give a dense tensor"),
    ],
    ids=["freed", "meta", "negated", "three dimensions", "half a cache", "six dimensions", "half a pair", "sparse"],
)
def test_a_cache_that_no_address_leads_to_is_an_error(make, text):
    with pytest.raises(BadInputError, match=text):
        TorchSdpaBackend.copy_blocks([make()], PAIR)
    with pytest.raises(BadInputError):
        TorchSdpaBackend.swap_blocks(torch.zeros(2, 4, 2, 4, 8), make(), PAIR)


def test_another_device_is_left_to_torch(monkeypatch):
    """No GPU is here: a tensor that says it is not on the CPU stands for one."""
    kernels = pytest.importorskip("heedful.kernels.cpu", exc_type=ImportError)
    monkeypatch.setattr(kernels, "copy_blocks", lambda call: pytest.fail("the kernels were called"))
    monkeypatch.setattr(torch_sdpa_blocks, "_on_cpu", lambda routes: False)
    cache = torch.randn(2, 4, 2, 4, 8)
    wanted = [moved(part, part, PAIR) for part in cache]
    TorchSdpaBackend.copy_blocks([cache], PAIR)
    assert same(cache, wanted)
