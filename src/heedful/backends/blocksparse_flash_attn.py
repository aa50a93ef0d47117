"""BLOCKSPARSE_FLASH_ATTN: local blocks and a vertical stride, by heedful's own Triton kernel."""

from __future__ import annotations

from heedful.backends.capabilities import HALF, TRITON_ON_CUDA, TRITON_ON_ROCM, Capability, Sizes
from heedful.backends.claimed import ClaimedBackend


def _row(platform: str, generations: frozenset[str]) -> Capability:
    return Capability(
        "triton",
        platform,
        HALF,
        Sizes(low=16, high=256, row_bytes=16),
        Sizes(multiple_of=16, low=16),
        generations=generations,
        features=frozenset({"blocksparse"}),
    )


class BlocksparseFlashAttentionBackend(ClaimedBackend):
    """Serves block-sparse requests only: a dense one has better choices."""

    name = "BLOCKSPARSE_FLASH_ATTN"
    LIBRARIES = ("torch", "triton")
    CAPABILITIES = (
        _row("cuda", TRITON_ON_CUDA),
        _row("rocm", TRITON_ON_ROCM),
    )
