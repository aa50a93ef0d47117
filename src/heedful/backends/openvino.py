"""OPENVINO: the PagedAttention operator at its own block size, the SDPA operator on gathered pages elsewhere.

The facts; the layer is openvino_impl.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from heedful.backends.base import AttentionImpl, HndBackend
from heedful.backends.capabilities import EVERY_ATTN_TYPE, HALF_AND_SINGLE, Capability, Sizes, listed, pairs
from heedful.errors import BackendUnavailableError

if TYPE_CHECKING:
    from typing import ClassVar

U8_HEADER = 8
"""Bytes of a row of the u8 cache before its elements: scale and zero point, both fp32."""
PAGED = Capability(
    "paged",
    "openvino",
    HALF_AND_SINGLE,
    Sizes(high=512, row_bytes=4),  # an odd bf16 head gives garbage
    listed(32),
    kv_cache_dtypes=frozenset({"auto", "u8"}),
    features=frozenset({"window", "alibi", "sinks"}),
    excluded_pairs=pairs(("window", "alibi")),  # together they give a wrong answer
    mixed_head_sizes=True,
    note=(
        "a step goes by sdpa if its slot_mapping leaves a token unwritten, if its pages do not lie side by side, or if "
        "a chunk ends in a page of another sequence"
    ),
)
"""What the PagedAttention operator gets right; docs/findings.md has what it gets wrong."""
_SDPA = replace(
    PAGED,
    variant="sdpa",
    head_sizes=Sizes(high=512),
    block_sizes=Sizes(),
    attn_types=EVERY_ATTN_TYPE,
    excluded_pairs=frozenset(),
    note="",
)


class OpenVinoBackend(HndBackend):
    """Neither operator has a soft cap or returns a log-sum-exp."""

    name = "OPENVINO"
    LIBRARIES = ("torch", "openvino")
    CAPABILITIES: ClassVar[tuple[Capability, ...]] = (PAGED, _SDPA)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        kv_cache_dtype: str = "auto",
        head_size_v: int | None = None,
    ) -> tuple[int, ...] | tuple[tuple[int, ...], tuple[int, ...]]:
        """See HndBackend; a row of a u8 cache has 8 bytes more, which hold its scale and zero point."""
        sizes = (num_blocks, block_size, num_kv_heads)
        shape = HndBackend.get_kv_cache_shape(*sizes, head_size, kv_cache_dtype, head_size_v)
        if kv_cache_dtype != "u8":
            return shape
        more = None if head_size_v is None else head_size_v + U8_HEADER
        return HndBackend.get_kv_cache_shape(*sizes, head_size + U8_HEADER, kv_cache_dtype, more)

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """See AttentionBackend."""
        try:
            from heedful.backends.openvino_impl import OpenVinoImpl
        except ImportError as cause:
            told = f"OPENVINO cannot be built: {cause}; pip install 'heedful[openvino]'"
            raise BackendUnavailableError(told) from cause
        return OpenVinoImpl
