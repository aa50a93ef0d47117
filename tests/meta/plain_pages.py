"""The pages of the plain backend, head by head: their shape, their views, copies of whole blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heedful.backends.base import AttentionBackend
from meta import plain_checks as checks

if TYPE_CHECKING:
    import torch


class PlainPages(AttentionBackend):
    """The static half of the plain backend."""

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, kv_cache_dtype="auto", head_size_v=None):
        key = (num_blocks, num_kv_heads, block_size, head_size)
        if head_size_v in (None, head_size):
            return (2, *key)
        return key, (*key[:3], head_size_v)

    @staticmethod
    def kv_views(kv_cache):
        return kv_cache[0].transpose(1, 2), kv_cache[1].transpose(1, 2)

    @classmethod
    def swap_blocks(cls, src, dst, pairs) -> None:
        checks.block_pairs(pairs, src[0].shape[0], dst[0].shape[0])
        for part in (0, 1):
            cls.move(src[part], dst[part], pairs)

    @classmethod
    def copy_blocks(cls, caches, pairs) -> None:
        for cache in caches:
            checks.block_pairs(pairs, cache[0].shape[0], cache[0].shape[0])
        checks.no_block_both_ways(pairs)
        for cache in caches:
            for part in (0, 1):
                cls.move(cache[part], cache[part], pairs)

    @staticmethod
    def move(src: torch.Tensor, dst: torch.Tensor, pairs: torch.Tensor) -> None:
        for source, target in pairs.tolist():
            dst[target].copy_(src[source])
