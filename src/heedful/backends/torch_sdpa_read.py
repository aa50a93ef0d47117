"""Keys and values out of the pages: gathered in one copy, made fp32, cleared where no key is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from heedful.backends.torch_sdpa_plan import Read

_BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
_TABLES = {dtype: _BYTES.view(dtype).float() for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
"""The fp32 value of each byte: torch's own conversion of e4m3 is 20 times slower than looking it up."""


def read(view: torch.Tensor, wanted: Read, dtype: torch.dtype) -> torch.Tensor:
    """[seqs, num_kv_heads, keys, size] of a cache view [num_blocks, block_size, num_kv_heads, size], in dtype.

    One sequence comes cut to its keys; of several, what lies outside a sequence's keys is 0, so that neither NaN nor
    huge numbers of foreign or unwritten slots meet a weight of 0.
    """
    found = _floats(_gather(view, wanted), view.dtype).to(dtype)
    if wanted.seqs == 1:
        return found[:, :, wanted.skip[0] : wanted.stop[0]]
    found = found[:, :, : wanted.tile.keys]
    if wanted.skip != (0,) * wanted.seqs or wanted.stop != (wanted.tile.keys,) * wanted.seqs:
        for keys, skip, stop in zip(found, wanted.skip, wanted.stop, strict=True):
            keys[:, :skip] = 0
            keys[:, stop:] = 0
    return found


def _gather(view: torch.Tensor, wanted: Read) -> torch.Tensor:
    """The pages' bits; one row of a head's page at a time where the pages lie head after head."""
    plane = view.transpose(1, 2)  # [num_blocks, num_kv_heads, block_size, size]
    if view.element_size() == 1:
        plane = plane.view(torch.uint8)
    _, heads, block_size, size = plane.shape
    if plane.is_contiguous():
        rows = plane.view(-1, block_size * size).index_select(0, wanted.index)
        return rows.view(wanted.seqs, heads, -1, size)
    pages = plane.index_select(0, wanted.pages).view(wanted.seqs, -1, heads, block_size, size)
    return pages.transpose(1, 2).reshape(wanted.seqs, heads, -1, size)


def _floats(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Stored values without their scale, which is applied to scores and output."""
    if dtype not in _TABLES:
        return bits
    return _TABLES[dtype].index_select(0, bits.reshape(-1).int()).view(bits.shape)
