"""ROCM_FLASH: aiter's unified attention, flash-attn's AMD builds, else heedful's own Triton kernel, on ROCm."""

from __future__ import annotations

from heedful.backends.capabilities import CACHELESS, EVERY_ATTN_TYPE, HALF, TRITON_ON_ROCM, Capability, Sizes
from heedful.backends.claimed import ClaimedBackend

_EIGHTS_TO_256 = Sizes(multiple_of=8, low=8, high=256)
_SIXTEENS = Sizes(multiple_of=16, low=16)
_CDNA = frozenset({"gfx90a", "gfx942", "gfx950"})


class RocmFlashBackend(ClaimedBackend):
    """Four ways to one answer; the record names the one that a request gets."""

    name = "ROCM_FLASH"
    LIBRARIES = ("torch",)
    CAPABILITIES = (
        Capability(
            "aiter",
            "rocm",
            HALF,
            _EIGHTS_TO_256,
            _SIXTEENS,
            generations=frozenset({"gfx942", "gfx950", "gfx1100"}),
            features=frozenset({"window", "alibi", "soft_cap", "sinks"}),
            libraries=("aiter", "triton"),
        ),
        # The composable-kernel build pages at multiples of 128 and has no soft cap
        Capability(
            "fa2-ck",
            "rocm",
            HALF,
            _EIGHTS_TO_256,
            Sizes(multiple_of=128, low=128),
            generations=_CDNA,
            attn_types=EVERY_ATTN_TYPE,
            features=frozenset({"window", "alibi", "lse"}),
            libraries=("flash_attn", "flash_attn_2_cuda"),
        ),
        # The Triton build ignores window, soft cap and block tables without a word: no cache, no such feature
        Capability(
            "fa2-triton",
            "rocm",
            HALF,
            _EIGHTS_TO_256,
            Sizes(),
            generations=_CDNA | {"gfx1100"},
            attn_types=CACHELESS,
            features=frozenset({"lse"}),
            libraries=("flash_attn", "triton"),
        ),
        Capability(
            "triton",
            "rocm",
            HALF,
            Sizes(low=16, high=256, row_bytes=16),
            _SIXTEENS,
            generations=TRITON_ON_ROCM,
            attn_types=EVERY_ATTN_TYPE,
            features=frozenset({"window", "alibi", "soft_cap", "sinks", "lse"}),
            libraries=("triton",),
        ),
    )
