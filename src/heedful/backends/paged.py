"""A paged KV cache in torch: views, writes, whole-block copies. What a step's host values are stands in paged_step.py.

K and V lie in pages of block_size tokens. Every function takes the strided views [num_blocks, block_size,
num_kv_heads, size] of ``AttentionBackend.kv_views`` or whole caches, so that it serves any layout and any device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from heedful.backends.paged_builder import CommonMetadataBuilder
from heedful.backends.paged_step import Step, validate_metadata
from heedful.errors import BadInputError, MetadataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from heedful.backends.base import KVCache

__all__ = [
    "CommonMetadataBuilder",
    "Step",
    "cache_dtype",
    "cache_parts",
    "copy_blocks",
    "hnd_views",
    "nhd_views",
    "store",
    "swap_blocks",
    "validate_metadata",
    "write_cache",
]

FP8_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def cache_dtype(kv_cache_dtype: str, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype of a cache's tensors: the model's for ``auto``, a torch.float8_* for the fp8 words."""
    if kv_cache_dtype == "auto":
        return model_dtype
    if kv_cache_dtype not in FP8_DTYPES:
        raise BadInputError(
            f"no torch cache holds kv_cache_dtype {kv_cache_dtype!r}; give auto, {', '.join(FP8_DTYPES)}"
        )
    return FP8_DTYPES[kv_cache_dtype]


def cache_parts(kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """(K, V) of a cache in its own layout; an empty cache (the profiling run) gives two empty tensors."""
    if isinstance(kv_cache, torch.Tensor) and kv_cache.numel() == 0:
        return kv_cache.reshape(0), kv_cache.reshape(0)
    if len(kv_cache) != 2:
        raise BadInputError(f"a KV cache holds K and V, but {len(kv_cache)} parts came; give [2, ...] or a (K, V) pair")
    return kv_cache[0], kv_cache[1]


def hnd_views(kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Views [num_blocks, block_size, num_kv_heads, size] of pages laid out [num_kv_heads, block_size, size]."""
    key, value = _four_dims(kv_cache)
    return key.transpose(1, 2), value.transpose(1, 2)


def nhd_views(kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Views [num_blocks, block_size, num_kv_heads, size] of pages laid out [block_size, num_kv_heads, size]."""
    return _four_dims(kv_cache)


def _four_dims(kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    parts = cache_parts(kv_cache)
    for name, part in zip("KV", parts, strict=True):
        if part.dim() != 4:
            shape = list(part.shape)
            raise BadInputError(
                f"the {name} cache has shape {shape}; it must have 4 dimensions, see get_kv_cache_shape"
            )
    return parts


def store(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """What a cache of that dtype holds for x: x itself, or round_even(clamp(x / scale)) for fp8. NaN stays NaN."""
    if dtype not in FP8_DTYPES.values():
        return x
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    views: tuple[torch.Tensor, torch.Tensor],
    step: Step,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Store this step's K and V [tokens, num_kv_heads, size] at the slots of the step; nothing else changes.

    views: [num_blocks, block_size, num_kv_heads, size]. A negative slot is not written.
    """
    if step.write_blocks.numel() == 0:
        return
    where = (step.write_blocks.to(key.device), step.write_offsets.to(key.device))
    rows = None if step.write_rows is None else step.write_rows.to(key.device)
    for x, view, scale in ((key, views[0], k_scale), (value, views[1], v_scale)):
        chosen = x[: step.write_blocks.numel()] if rows is None else x.index_select(0, rows)
        _bits(view).index_put_(where, _bits(store(chosen, scale, view.dtype)))


def _bits(x: torch.Tensor) -> torch.Tensor:
    """One-byte floats as bytes, so that every indexing operation takes them; all else as it is."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def swap_blocks(src: KVCache, dst: KVCache, pairs: torch.Tensor) -> None:
    """Copy whole blocks from src to dst, which may lie on two devices; pairs int64 [n, 2] of (source, destination)."""
    sources, targets = cache_parts(src), cache_parts(dst)
    _check_pairs(pairs, len(sources[0]), len(targets[0]), same=_share_memory(sources, targets))
    for name, source, target in zip("KV", sources, targets, strict=True):
        _check_blocks_alike(name, source, target)
    for source, target in zip(sources, targets, strict=True):
        _copy(source, target, pairs)


def copy_blocks(caches: Sequence[KVCache], pairs: torch.Tensor) -> None:
    """Copy whole blocks inside each cache; pairs int64 [n, 2]. Every argument is checked before the first write."""
    parts = [cache_parts(cache) for cache in caches]
    for key, value in parts:
        _check_pairs(pairs, len(key), len(value), same=True)
    for part in (part for both in parts for part in both):
        _copy(part, part, pairs)


def _copy(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    chosen = _bits(source).index_select(0, pairs[:, 0].to(source.device))
    _bits(target).index_copy_(0, pairs[:, 1].to(target.device), chosen.to(target.device))


def _share_memory(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> bool:
    pointers = {part.untyped_storage().data_ptr() for part in sources if part.numel()}
    return any(part.untyped_storage().data_ptr() in pointers for part in targets if part.numel())


def _check_blocks_alike(name: str, source: torch.Tensor, target: torch.Tensor) -> None:
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        ours, theirs = (f"{part.dtype} {list(part.shape[1:])}" for part in (source, target))
        raise BadInputError(
            f"{name} blocks of {ours} cannot be swapped to blocks of {theirs}; both caches must be alike"
        )


def _check_pairs(pairs: torch.Tensor, num_sources: int, num_targets: int, same: bool) -> None:
    if pairs.dtype != torch.int64 or pairs.dim() != 2 or pairs.shape[1] != 2:
        form = f"{pairs.dtype} {list(pairs.shape)}"
        raise BadInputError(f"block pairs came as {form}; give int64 [n, 2] of (source block, destination block)")
    sources, targets = pairs.cpu().unbind(1)
    for word, blocks, count in (("source", sources, num_sources), ("destination", targets, num_targets)):
        bad = blocks[(blocks < 0) | (blocks >= count)]
        if bad.numel():
            raise MetadataError(f"{word} block {int(bad[0])} is outside the cache of {count} blocks")
    _check_targets(sources, targets, same)


def _check_targets(sources: torch.Tensor, targets: torch.Tensor, same: bool) -> None:
    ordered = targets.sort().values
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.numel():
        raise MetadataError(f"block {int(twice[0])} is the destination of two copies; give each destination once")
    both = targets[torch.isin(targets, sources)] if same else targets[:0]
    if both.numel():
        message = f"block {int(both[0])} is both a source and a destination; the order of copies is not defined"
        raise MetadataError(f"{message}, so split them into two calls")
