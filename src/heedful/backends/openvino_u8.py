"""OpenVINO's u8 cache, quantised by token: a row is its scale and zero point in fp32, then one byte an element."""

from __future__ import annotations

import torch

from heedful.backends.openvino import U8_HEADER

FLAT = 1e-4
"""The scale of a row whose elements are all equal."""


def store(x: torch.Tensor) -> torch.Tensor:
    """[..., size] -> uint8 [..., 8 + size], as the PagedAttention operator writes it, ties aside."""
    x = x.float()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, FLAT, scale)
    zero = -low / scale
    codes = (x / scale + zero).round_().clamp_(0, 255).to(torch.uint8)
    return torch.cat([torch.cat([scale, zero], -1).view(torch.uint8), codes], -1)


def load(rows: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 8 + size] -> fp32 [..., size]."""
    header = rows[..., :U8_HEADER].contiguous().view(torch.float32)
    return (rows[..., U8_HEADER:].float() - header[..., 1:]) * header[..., :1]
