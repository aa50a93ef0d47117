"""A paged KV cache in torch: its parts, its views, writes. A step's host values stand in paged_step.py, copies of whole
blocks in paged_blocks.py.

K and V lie in pages of block_size tokens. Every function takes the strided views [num_blocks, block_size,
num_kv_heads, size] of ``AttentionBackend.kv_views`` or whole caches, so that it serves any layout and any device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from heedful.backends.paged_blocks import cache_parts, copy_blocks, one_byte, swap_blocks
from heedful.backends.paged_builder import CommonMetadataBuilder
from heedful.backends.paged_step import Step, validate_metadata
from heedful.errors import BadInputError

if TYPE_CHECKING:
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
    """The dtype of a cache's tensors: the model's for ``auto``, a torch.float8_* for the fp8 words, bytes for u8."""
    if kv_cache_dtype == "auto":
        return model_dtype
    if kv_cache_dtype == "u8":
        return torch.uint8
    if kv_cache_dtype not in FP8_DTYPES:
        raise BadInputError(
            f"no torch cache holds kv_cache_dtype {kv_cache_dtype!r}; give auto, u8, {', '.join(FP8_DTYPES)}"
        )
    return FP8_DTYPES[kv_cache_dtype]


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
        one_byte(view).index_put_(where, one_byte(store(chosen, scale, view.dtype)))
