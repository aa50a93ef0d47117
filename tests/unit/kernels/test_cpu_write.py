"""The cache write against reference.store_rounded, byte for byte."""

from __future__ import annotations

import pytest
import torch
from cpu_problem import BEST_FIRST, BF16, CODES, E4M3, E5M2, EVERY, F16, F32, bits, kernels, using

from heedful.reference import store_rounded

WORDS = {E4M3: "fp8_e4m3", E5M2: "fp8_e5m2"}


def write(isa, source, cache, slots, scale=1.0):
    """source [tokens, heads, size] into cache [pages, heads, block, size]."""
    slots = torch.tensor(slots, dtype=torch.int64)
    call = kernels.Write(
        source=source.data_ptr(),
        s_token=source.stride(0),
        s_head=source.stride(1),
        cache=cache.data_ptr(),
        c_block=cache.stride(0),
        c_head=cache.stride(1),
        c_token=cache.stride(2),
        slots=slots.data_ptr(),
        tokens=len(slots),
        heads=source.shape[1],
        size=source.shape[2],
        block_size=cache.shape[2],
        dtype=CODES[source.dtype],
        cache_dtype=CODES[cache.dtype],
        scale=scale,
    )
    with using(isa):
        kernels.write_cache(call)


def edges(cache):
    """Every value of the fp8 type, every midpoint between two (the ties), and their fp32 neighbours; then the rest."""
    known = torch.arange(256, dtype=torch.uint8).view(cache).float()
    finite = known[known.isfinite()].unique()
    ties = (finite[1:] + finite[:-1]) / 2
    most = finite.max()
    over = most * torch.tensor([1.03, 1.0625, 1.07, 2.0, 1e30])
    tiny = finite[finite > 0].min() * torch.tensor([1e-30, 1e-3, 0.25, 0.499, 0.501, 0.75])
    special = torch.tensor([0.0, torch.inf, torch.nan, 1.4e-45])
    around = torch.cat([finite, ties, over, tiny, special])
    up, down = (torch.nextafter(around, torch.tensor(x)) for x in (torch.inf, -torch.inf))
    every = torch.cat([around, up, down])
    return torch.cat([every, -every])


def sources(dtype, cache):
    """Rows [n, 1, 37] of edge values; of a 16-bit type every value there is."""
    if dtype == F32:
        values = torch.cat(
            [edges(cache), edges(cache) * 3.7, torch.randn(3000, generator=torch.Generator().manual_seed(0))]
        )
    else:
        values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    short = -len(values) % 37
    return torch.cat([values, values[:short]]).view(-1, 1, 37)


@pytest.mark.parametrize("isa", EVERY)
@pytest.mark.parametrize("cache", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.5, 0.037, 3.3])
def test_fp8_bytes_are_those_of_the_reference(isa, cache, dtype, scale):
    rows = sources(dtype, cache)
    pages = torch.zeros(-(-len(rows) // 16), 1, 16, 37, dtype=torch.uint8).view(cache)
    write(isa, rows, pages, range(len(rows)), scale)
    found = bits(pages).view(-1, 37)[: len(rows)]
    wanted = bits(store_rounded(rows, scale, WORDS[cache])).view(-1, 37)
    nans = rows.isnan().view(-1, 37)
    assert torch.equal(found[~nans], wanted[~nans])
    assert pages.float().transpose(1, 2).reshape(-1, 37)[: len(rows)][nans].isnan().all()
    assert torch.equal(found[nans], wanted[nans]), "a NaN has other bits than torch's"


@pytest.mark.parametrize("isa", EVERY)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_a_cache_of_the_models_dtype_gets_every_bit(isa, dtype):
    word = torch.int32 if dtype == F32 else torch.int16
    whole = torch.randint(-(2**15), 2**15, (40, 3, 24), generator=torch.Generator().manual_seed(1)).to(word)
    rows = (whole * 65537 if dtype == F32 else whole).view(dtype)
    pages = torch.zeros(5, 3, 8, 24, dtype=dtype)
    write(isa, rows, pages, range(40))
    assert torch.equal(bits(pages.transpose(1, 2).reshape(40, 3, 24)), bits(rows))


@pytest.mark.parametrize("isa", EVERY)
@pytest.mark.parametrize("cache", [F32, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("block", [1, 3, 16])
@pytest.mark.parametrize("size", [1, 7, 16, 72])
def test_only_the_written_slots_change(isa, cache, block, size):
    random = torch.Generator().manual_seed(2)
    rows = torch.randn(20, 3, size + 5, generator=random)[..., 3 : 3 + size]  # strided, unaligned
    blank = torch.randint(0, 256, (40, 3, block, size * cache.itemsize), generator=random).to(torch.uint8)
    pages = blank.clone().view(cache)
    slots = torch.randperm(40 * block, generator=random)[:20].tolist()
    slots[4] = slots[11] = -1
    write(isa, rows, pages, slots)
    wanted = blank.clone()
    stored = bits(rows if cache == F32 else store_rounded(rows, 1.0, WORDS[cache])).view(20, 3, -1)
    for token, slot in enumerate(slots):
        if slot >= 0:
            wanted[slot // block, :, slot % block] = stored[token]
    assert torch.equal(bits(pages).view_as(wanted), wanted)


@pytest.mark.parametrize("isa", BEST_FIRST)
def test_a_slot_far_into_the_cache_does_not_overflow(isa):
    """Slot 2**33 of a cache whose pages all lie at one address: only 64-bit arithmetic finds it."""
    rows = torch.full((1, 1, 16), 2.0)
    page = torch.zeros(1, 1, 4, 16)
    write(isa, rows, page.expand(2**31, 1, 4, 16), [2**33 - 2])
    assert (page[0, 0, 2] == 2).all()
    assert page.sum() == 32
