"""Whole blocks of a paged cache: what may be copied where, checked before anything moves, and the copy in torch.

A backend whose device has a faster way to move bytes passes it as ``move``; checks and errors stay the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from heedful.errors import BadInputError, MetadataError
from heedful.memory import check_addressable, check_no_gradient, check_unshared, span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from heedful.backends.base import KVCache

    Route = tuple[Tensor, Tensor, int]
    """(source, target, the dimension that counts blocks): 1 where a tensor [2, num_blocks, ...] is K and V, else 0.
    Both hold blocks of one shape and dtype."""
    Move = Callable[[Sequence[Route], Tensor], None]
    """Copies block pairs[i, 0] of every source to block pairs[i, 1] of its target; there is one pair at least."""


def cache_parts(kv_cache: KVCache) -> tuple[Tensor, Tensor]:
    """(K, V) of a cache in its own layout; an empty cache (the profiling run) gives two empty tensors."""
    if isinstance(kv_cache, torch.Tensor) and kv_cache.numel() == 0:
        return kv_cache.reshape(0), kv_cache.reshape(0)
    _check_cache(kv_cache)
    return kv_cache[0], kv_cache[1]


def _check_cache(kv_cache: Any) -> None:
    if isinstance(kv_cache, torch.Tensor):
        right = kv_cache.dim() > 1
    else:
        right = isinstance(kv_cache, (tuple, list)) and all(isinstance(p, torch.Tensor) and p.dim() for p in kv_cache)
    if not right:
        what = f"a tensor {list(kv_cache.shape)}" if isinstance(kv_cache, torch.Tensor) else repr(kv_cache)
        raise BadInputError(f"a KV cache came as {what}; give a tensor [2, ...] or a (K, V) pair of tensors")
    parts = kv_cache.shape[0] if isinstance(kv_cache, torch.Tensor) else len(kv_cache)
    if parts != 2:
        raise BadInputError(f"a KV cache holds K and V, but {parts} parts came; give [2, ...] or a (K, V) pair")


def one_byte(x: Tensor) -> Tensor:
    """One-byte floats as bytes, so that every indexing operation takes them; all else as it is."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def move_by_index(routes: Sequence[Route], pairs: Tensor) -> None:
    """The copy in torch, on any device and between two."""
    for source, target, dim in routes:
        chosen = one_byte(source).index_select(dim, pairs[:, 0].to(source.device))
        one_byte(target).index_copy_(dim, pairs[:, 1].to(target.device), chosen.to(target.device))


def swap_blocks(src: KVCache, dst: KVCache, pairs: Tensor, move: Move = move_by_index) -> None:
    """Copy whole blocks from src to dst, which may lie on two devices; pairs int64 [n, 2] of (source, destination)."""
    sources, targets = _tensors(src), _tensors(dst)
    if len(sources) != len(targets):  # one tensor and a pair
        sources, targets = list(cache_parts(src)), list(cache_parts(dst))
    dim = 2 - len(sources)
    routes = [(source, target, dim) for source, target in zip(sources, targets, strict=True)]
    if not all(_alike(*route) for route in routes):
        _explain_unlike(src, dst)
    read, written = _numbers(pairs)
    _check_blocks(routes, read, written)
    if src is dst or any(map(_may_meet, sources, targets)):
        for source, target in zip(cache_parts(src), cache_parts(dst), strict=True):
            _check_apart(source, target, read, written, one=src is dst)
    if read:
        move(routes, pairs)


def copy_blocks(caches: Sequence[KVCache], pairs: Tensor, move: Move = move_by_index) -> None:
    """Copy whole blocks inside each cache; pairs int64 [n, 2]. Every argument is checked before the first write."""
    routes = [(part, part, 2 - len(parts)) for parts in map(_tensors, caches) for part in parts]
    read, written = _numbers(pairs)
    if routes:
        _check_blocks(routes, read, written)
        _check_not_both(read, written)
    if routes and read:
        move(routes, pairs)


def _tensors(kv_cache: KVCache) -> list[Tensor]:
    """The tensors of a cache: one that is both K and V, or two."""
    if isinstance(kv_cache, torch.Tensor) and kv_cache.numel():
        check_addressable("the cache", kv_cache)
        _check_cache(kv_cache)
        return [kv_cache]
    parts = cache_parts(kv_cache)
    for part in parts:
        check_addressable("the cache", part)
    return list(parts)


def _numbers(pairs: Any) -> tuple[list[int], list[int]]:
    """(source blocks, destination blocks) of the pairs."""
    if not isinstance(pairs, torch.Tensor) or pairs.dtype != torch.int64 or pairs.dim() != 2 or pairs.shape[1] != 2:
        got = f"{pairs.dtype} {list(pairs.shape)}" if isinstance(pairs, torch.Tensor) else type(pairs).__name__
        raise BadInputError(f"block pairs came as {got}; give int64 [n, 2] of (source block, destination block)")
    if pairs.is_meta or pairs.layout != torch.strided:
        raise BadInputError(f"block pairs came {pairs.layout} on {pairs.device}; give a dense tensor that holds them")
    sources, targets = pairs.T.tolist()
    return sources, targets


def _check_blocks(routes: Sequence[Route], read: list[int], written: list[int]) -> None:
    """Every block is there, none is written twice, and what is written can be."""
    _check_range("source", read, min(source.shape[dim] for source, _, dim in routes))
    _check_range("destination", written, min(target.shape[dim] for _, target, dim in routes))
    if len(set(written)) < len(written):
        twice = Counter(written).most_common(1)[0][0]
        raise MetadataError(f"block {twice} is the destination of two copies; give each destination once")
    for _, target, _ in routes:
        check_unshared("the destination cache", target)
    check_no_gradient(("the destination cache", target) for _, target, _ in routes)


def _check_range(word: str, blocks: list[int], count: int) -> None:
    if blocks and (min(blocks) < 0 or max(blocks) >= count):
        bad = next(block for block in blocks if not 0 <= block < count)
        raise MetadataError(f"{word} block {bad} is outside the cache of {count} blocks")


def _alike(source: Tensor, target: Tensor, dim: int) -> bool:
    """Whether blocks of the one fit into the other."""
    return source.shape[dim + 1 :] == target.shape[dim + 1 :] and source.dtype == target.dtype


def _explain_unlike(src: KVCache, dst: KVCache) -> None:
    for name, source, target in zip("KV", cache_parts(src), cache_parts(dst), strict=True):
        if not _alike(source, target, 0):
            ours, theirs = (f"{part.dtype} {list(part.shape[1:])}" for part in (source, target))
            why = f"{name} blocks of {ours} cannot be swapped to blocks of {theirs}"
            raise BadInputError(f"{why}; both caches must be alike")


def _may_meet(source: Tensor, target: Tensor) -> bool:
    """Whether the two reach over one stretch of memory."""
    if source.device != target.device or not source.data_ptr():  # a device that tells no addresses
        return False
    (first, last), (begin, end) = span(source), span(target)
    return first < end and begin < last


def _check_apart(source: Tensor, target: Tensor, read: list[int], written: list[int], *, one: bool) -> None:
    """Nothing that is written is read as well. one: both are parts of one and the same cache."""
    if one or (source.data_ptr() == target.data_ptr() and source.stride() == target.stride()):
        _check_not_both(read, written)
    elif _may_meet(source, target):
        _check_spans(source, target, read, written)


def _check_not_both(read: list[int], written: list[int]) -> None:
    both = set(read).intersection(written)
    if both:
        message = f"block {min(both)} is both a source and a destination; the order of copies is not defined"
        raise MetadataError(f"{message}, so split them into two calls")


def _check_spans(source: Tensor, target: Tensor, read: list[int], written: list[int]) -> None:
    """Two views of one memory: no block that is written may reach into one that is read."""
    if not read:
        return
    reach, other = (span(part[0])[1] - span(part[0])[0] for part in (source, target))
    places = sorted((_place(source, block), block) for block in set(read))
    for block in written:
        place = _place(target, block)
        at = bisect_right(places, (place - reach, source.shape[0]))
        if at < len(places) and places[at][0] < place + other:
            why = f"destination block {block} reaches into the memory of source block {places[at][1]}"
            raise MetadataError(f"{why}; the order of copies is not defined, so swap through another cache")


def _place(part: Tensor, block: int) -> int:
    return part.data_ptr() + block * part.stride(0) * part.element_size()
