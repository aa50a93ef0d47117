"""Copies of whole blocks for TORCH_SDPA: heedful's own on the CPU, torch's where it was not built or a GPU takes part.

Both move the same bytes to the same places.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch

from heedful.backends import paged_blocks
from heedful.errors import BadInputError

try:
    from heedful.kernels import cpu as kernels
except ImportError:  # not built: the decision record says so, see heedful.libraries
    kernels = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from heedful.backends.base import KVCache
    from heedful.backends.paged_blocks import Route


def swap_blocks(src: KVCache, dst: KVCache, pairs: Tensor) -> None:
    """See AttentionBackend."""
    _check_form(src)
    _check_form(dst)
    paged_blocks.swap_blocks(src, dst, pairs, move)


def copy_blocks(caches: Sequence[KVCache], pairs: Tensor) -> None:
    """See AttentionBackend."""
    for cache in caches:
        _check_form(cache)
    paged_blocks.copy_blocks(caches, pairs, move)


def _check_form(kv_cache: KVCache) -> None:
    """One tensor has five dimensions, each of a pair four; whatever else may be wrong is found later."""
    whole = isinstance(kv_cache, torch.Tensor)
    what, dims, parts = ("a KV cache", 5, [kv_cache]) if whole else ("a part of a KV cache", 4, kv_cache)
    for part in parts if isinstance(parts, (tuple, list)) else ():
        if isinstance(part, torch.Tensor) and part.numel() and part.dim() != dims:
            form = f"a tensor {list(part.shape)}"
            raise BadInputError(f"{what} came as {form}; give one of {dims} dimensions, see get_kv_cache_shape")


def move(routes: Sequence[Route], pairs: Tensor) -> None:
    """See paged_blocks.Move."""
    if kernels is None or not _on_cpu(routes):
        return paged_blocks.move_by_index(routes, pairs)
    pairs = pairs.cpu().contiguous()
    words = array("q", [word for route in routes for word in _words(*route)])
    caches, _ = words.buffer_info()
    call = kernels.Copy(caches, pairs.data_ptr(), len(routes), pairs.shape[0], torch.get_num_threads())
    return kernels.copy_blocks(call)


def _on_cpu(routes: Sequence[Route]) -> bool:
    return all(source.is_cpu and target.is_cpu for source, target, _ in routes)


def _words(source: Tensor, target: Tensor, dim: int) -> tuple[int, ...]:
    """The words of a kernels.Cache: several times faster to put together than the structure, once a layer."""
    strides, others, shape = source.stride(), target.stride(), source.shape
    if dim:
        blocks = (strides[1], strides[0], *strides[2:], others[1], others[0], *others[2:], shape[1], 2, *shape[2:])
    else:  # a side of its own
        blocks = (strides[0], 0, *strides[1:], others[0], 0, *others[1:], shape[0], 1, *shape[1:])
    return source.data_ptr(), target.data_ptr(), *blocks, source.element_size()
