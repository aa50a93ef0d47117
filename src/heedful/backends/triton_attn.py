"""TRITON_ATTN: heedful's own kernels, one source for CUDA, ROCm and XPU; the last resort on all three."""

from __future__ import annotations

from heedful.backends.capabilities import (
    EVERY_ATTN_TYPE,
    FP8_CACHES,
    HALF_AND_SINGLE,
    TRITON_ON_CUDA,
    TRITON_ON_ROCM,
    Capability,
    Sizes,
)
from heedful.backends.claimed import ClaimedBackend

_CUDA_FP8 = frozenset({"8.9", "9.0", "10.0", "10.3", "12.0", "12.1"})
_ROCM_FP8 = frozenset({"gfx950", "gfx1200", "gfx1201"})


def _row(
    variant: str, platform: str, generations: frozenset[str] | None, caches: frozenset[str] = frozenset()
) -> Capability:
    return Capability(
        variant,
        platform,
        HALF_AND_SINGLE,
        Sizes(low=16, high=256, row_bytes=16),
        Sizes(multiple_of=16, low=16),
        generations=generations,
        kv_cache_dtypes=caches | {"auto"},
        attn_types=EVERY_ATTN_TYPE,
        features=frozenset({"window", "alibi", "soft_cap", "sinks", "lse"}),
    )


class TritonAttentionBackend(ClaimedBackend):
    """An fp8 cache is claimed where the device converts e4m3fn itself (gfx942 knows the fnuz kind only)."""

    name = "TRITON_ATTN"
    LIBRARIES = ("torch", "triton")
    CAPABILITIES = (
        _row("triton", "cuda", TRITON_ON_CUDA),
        _row("triton-fp8", "cuda", _CUDA_FP8, FP8_CACHES),
        _row("triton", "rocm", TRITON_ON_ROCM),
        _row("triton-fp8", "rocm", _ROCM_FP8, FP8_CACHES),
        _row("triton", "xpu", None),
    )
