"""Checks of the cache, bit for bit: what a write stores, what nothing may touch, what is never read, whole blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from heedful.conformance.bench import Bench, OutOfReachError, agree, device, must_refuse, same_bits
from heedful.conformance.pages import POISON, as_bytes, rows_of, slots_of
from heedful.errors import HeedfulError
from heedful.reference import CACHE_FLOATS, store_rounded

if TYPE_CHECKING:
    from heedful.backends.base import AttentionBackend, KVCache
    from heedful.conformance.batch import Batch
    from heedful.conformance.bench import Margins
    from heedful.conformance.cases import Case

    Pages = tuple[torch.Tensor, torch.Tensor]


def pages_of(bench: Bench, cache: KVCache | None = None) -> Pages:
    """K and V as they lie in pages; an opaque layout cannot be compared byte by byte."""
    pages = bench.pages(cache)
    if pages is None:
        raise OutOfReachError("the cache's layout is opaque (kv_views gives None), so its bytes cannot be compared")
    return pages


def check_a_write_stores_exact_bytes(backend: type[AttentionBackend], case: Case) -> None:
    """The written slots hold round_even(clamp(x / scale)) or x itself; every other slot is as it was, bit for bit."""
    bench = Bench(backend, case)
    bench.forward()
    same_pages(pages_of(bench), bench.on_host.pages_after(), "after the write")


def same_pages(found: Pages, right: Pages | None, when: str) -> None:
    """Compare two caches bit for bit; the message names the first slot that differs."""
    assert right is not None, "this case has no cache"
    for name, one, other in zip("KV", found, right, strict=True):
        differs = (as_bytes(one) != as_bytes(other)) if one.element_size() == 1 else _unequal(one, other)
        if differs.any():
            block, offset, head, element = differs.nonzero()[0].tolist()
            where = f"block {block}, offset {offset}, KV head {head}, element {element}"
            values = f"{one[block, offset, head, element].item()}, not {other[block, offset, head, element].item()}"
            raise AssertionError(f"{when}, {int(differs.sum())} elements of {name} differ; first {where}: {values}")


def _unequal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    words = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return one.contiguous().view(words) != other.contiguous().view(words)


def check_fp8_rounds_to_even_and_clamps(backend: type[AttentionBackend], case: Case) -> None:
    """Every halfway point of the format, large values, infinities and NaN, in one write."""
    bench = Bench(backend, case)
    batch = _with_awkward_values(bench.on_host)
    bench = Bench(backend, case, batch)
    bench.forward()
    after, right = pages_of(bench), batch.pages_after()
    assert right is not None
    for name, one, other in zip("KV", after, right, strict=True):
        nan = other.float().isnan()
        assert torch.equal(one.float().isnan(), nan), f"NaN does not stay NaN, or something else becomes NaN, in {name}"
        differs = (as_bytes(one) != as_bytes(other)) & ~nan
        pairs = list(zip(*(x.float()[differs][:4].tolist() for x in (one, other)), strict=True))
        assert not pairs, f"{int(differs.sum())} elements of {name} are stored wrongly; (found, right): {pairs}"


def _with_awkward_values(batch: Batch) -> Batch:
    assert batch.key is not None
    assert batch.value is not None
    dtype, model = CACHE_FLOATS[batch.case.kv_cache_dtype], batch.query.dtype
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = sorted(set(codes[codes.isfinite()].tolist()))
    top = finite[-1]
    ties = [(a + b) / 2 for a, b in pairwise(finite)]
    special = [1000.0, -1000.0, 2 * top, -2 * top, torch.inf, -torch.inf, torch.nan, 0.0, -0.0]
    values = torch.tensor([*special, *ties, *finite])

    def filled(x: torch.Tensor, scale: float) -> torch.Tensor:
        repeated = values.repeat(-(-x.numel() // len(values)))[: x.numel()]
        return (repeated * scale).reshape(x.shape).to(model)

    return replace(batch, key=filled(batch.key, batch.k_scale), value=filled(batch.value, batch.v_scale))


def check_reading_changes_no_cache(backend: type[AttentionBackend], case: Case) -> None:
    """Cross attention over cached keys only reads; attention without a cache leaves one that it is handed alone."""
    bench = Bench(backend, case)
    metadata, cache = bench.batch.metadata, bench.cache
    if bench.batch.pages is None:
        cache = Bench(backend, replace(case, attn_type="decoder", batch="mixed")).cache
        slots = torch.arange(len(metadata.slot_mapping), dtype=torch.int64, device=device())
        metadata = replace(metadata, slot_mapping=slots, step={})
    before = pages_of(bench, cache)
    bench.forward(kv_cache=cache, attn_metadata=metadata)
    same_pages(pages_of(bench, cache), before, "after a call that writes nothing")


def check_encoder_keys_have_slots_of_their_own(backend: type[AttentionBackend], case: Case) -> Margins:
    """key and value of a cross layer are the encoder's: they go to cross_slot_mapping, and the answer is the same."""
    bench = Bench(backend, case)
    keys = bench.on_host.context_step().on(device())
    views = backend.kv_views(bench.cache)
    if views is None:
        raise OutOfReachError("the cache's layout is opaque (kv_views gives None), so it cannot be emptied")
    for view in views:
        view.fill_(0)
    output = bench.forward(key=keys.key, value=keys.value)
    slots, pages = bench.on_host.metadata.cross_slot_mapping, bench.on_host.pages
    assert slots is not None
    assert pages is not None
    for name, found, right in zip("KV", pages_of(bench), pages, strict=True):
        holds = torch.zeros(found.shape[0] * found.shape[1], dtype=torch.bool)
        holds[slots] = True
        assert torch.equal(found.flatten(0, 1)[holds], right.flatten(0, 1)[holds]), f"{name} is not in its cross slots"
        assert not found.flatten(0, 1)[~holds].any(), f"{name} was written outside cross_slot_mapping"
    return agree(bench.on_host.expected(), output)


def check_page_tails_never_reach_the_output(backend: type[AttentionBackend], case: Case) -> Margins:
    """Slots past seq_len and spare table entries: 1e4, 0 or 1e3 in them, the answer is the same bits."""
    bench = Bench(backend, case)
    free, answers = ~_held_slots(bench.on_host), []
    for filling in (POISON, 0.0, 1e3):
        bench.cache = bench.fill()
        views = backend.kv_views(bench.cache)
        if views is None:
            raise OutOfReachError("the cache's layout is opaque (kv_views gives None), so its free slots cannot be set")
        for view in views:
            as_bytes(view)[free.to(view.device)] = as_bytes(_filled_row(view, filling))
        answers.append(bench.forward())
    assert same_bits(answers[0], answers[1]), "what lies in unused slots reaches the output (1e4 against 0)"
    assert same_bits(answers[0], answers[2]), "what lies in unused slots reaches the output (1e4 against 1e3)"
    return agree(bench.on_host.expected(), answers[0])


def _filled_row(view: torch.Tensor, filling: float) -> torch.Tensor:
    """One row of a cache that holds the number everywhere, or the largest that its dtype has."""
    if view.dtype == torch.uint8:
        return store_rounded(torch.full((view.shape[3] - 8,), filling), 1.0, "u8").to(view.device)
    largest = min(filling, torch.finfo(view.dtype).max)
    return torch.full((view.shape[3],), largest).to(view.dtype).to(view.device)


def _held_slots(batch: Batch) -> torch.Tensor:
    """bool [num_blocks, block_size]: slots that hold a token after the step."""
    assert batch.pages is not None
    m = batch.metadata
    lengths = m.seq_lens if batch.key is not None else m.encoder_seq_lens
    tables = m.block_tables if batch.key is not None else m.cross_block_tables
    assert lengths is not None
    held = torch.zeros(batch.pages[0].shape[:2], dtype=torch.bool)
    for row, length in zip(rows_of(tables, len(lengths)), lengths.tolist(), strict=True):
        held.flatten()[slots_of(row.tolist(), range(length), batch.case.block_size)] = True
    return held


FAR = 2**16
"""From this block on, 16 heads x 16 tokens x 128 elements a block pass element 2^31."""


def check_slots_past_32_bits_are_exact(backend: type[AttentionBackend], case: Case) -> Margins:
    """The case's pages lie on both sides of element 2^31 of a cache that is mostly never touched."""
    bench = Bench(backend, case)
    assert bench.on_host.pages is not None
    blocks = len(bench.on_host.pages[0])
    shift = FAR - blocks // 2
    cache = _untouched_cache(bench, FAR + blocks)
    views = backend.kv_views(cache)
    if views is None:
        raise OutOfReachError("the cache's layout is opaque (kv_views gives None), so its pages cannot be placed")
    for view, page in zip(views, bench.on_host.pages, strict=True):
        view[shift : shift + blocks] = page.to(view.device)
    m = bench.batch.metadata
    slots = torch.where(m.slot_mapping < 0, m.slot_mapping, m.slot_mapping + shift * case.block_size)
    metadata = replace(m, block_tables=m.block_tables + shift, slot_mapping=slots, step={})
    output = bench.forward(kv_cache=cache, attn_metadata=metadata)
    found = tuple(view[shift : shift + blocks].cpu() for view in views)
    same_pages((found[0], found[1]), bench.on_host.pages_after(), "past element 2^31")
    return agree(bench.on_host.expected(), output)


def _untouched_cache(bench: Bench, blocks: int) -> KVCache:
    case = bench.case
    sizes = (case.block_size, case.num_kv_heads, case.head_size, case.kv_cache_dtype)
    shape = bench.backend.get_kv_cache_shape(blocks, *sizes)
    try:  # pages of an empty tensor cost nothing until they are touched, where memory may be promised at all
        return torch.empty(shape, dtype=bench.batch.query.dtype, device=device())  # type: ignore[arg-type]
    except (RuntimeError, MemoryError) as error:
        raise OutOfReachError(f"a cache of {blocks} blocks cannot be allocated here: {error}") from error


def check_copy_blocks_copies_whole_blocks(backend: type[AttentionBackend], case: Case) -> None:
    """K and V of every layer's cache; blocks that are no destination stay as they were."""
    benches = [Bench(backend, replace(case, seed=case.seed + layer)) for layer in (0, 1)]
    caches = [bench.cache for bench in benches]
    before = [pages_of(bench) for bench in benches]
    pairs = [[0, 3], [1, 2], [0, 4]]
    backend.copy_blocks(caches, torch.tensor(pairs, dtype=torch.int64, device=device()))
    for bench, pages in zip(benches, before, strict=True):
        right = pages[0].clone(), pages[1].clone()
        _copied(pages, right, pairs)
        same_pages(pages_of(bench), right, "after copy_blocks")


def _copied(source: Pages, target: Pages, pairs: list[list[int]]) -> None:
    for one, other in zip(source, target, strict=True):
        for a, b in pairs:
            as_bytes(other)[b] = as_bytes(one)[a]


def check_copy_blocks_refuses_chains(backend: type[AttentionBackend], case: Case) -> None:
    """A block both source and destination: the result would depend on the order, so nothing is copied."""
    bench = Bench(backend, case)
    before = pages_of(bench)
    pairs = torch.tensor([[0, 1], [1, 2]], dtype=torch.int64, device=device())
    must_refuse(lambda: backend.copy_blocks([bench.cache], pairs), "copy_blocks with a chain of blocks", HeedfulError)
    same_pages(pages_of(bench), before, "after a refused copy_blocks")


def check_swap_blocks_copies_whole_blocks(backend: type[AttentionBackend], case: Case) -> None:
    """From one cache to another, K and V; the source and every other block stay as they were."""
    source, target = Bench(backend, case), Bench(backend, replace(case, seed=case.seed + 1))
    first, second = pages_of(source), pages_of(target)
    pairs = [[0, 2], [3, 0], [1, 1]]
    backend.swap_blocks(source.cache, target.cache, torch.tensor(pairs, dtype=torch.int64, device=device()))
    right = second[0].clone(), second[1].clone()
    _copied(first, right, pairs)
    same_pages(pages_of(target), right, "after swap_blocks, in the destination")
    same_pages(pages_of(source), first, "after swap_blocks, in the source")
