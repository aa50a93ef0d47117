"""FLASHINFER: kernels made on first use for the device at hand, on CUDA; any page size."""

from __future__ import annotations

from heedful.backends.capabilities import FP8_CACHES, HALF, Capability, Sizes, listed
from heedful.backends.claimed import ClaimedBackend

_FEATURES = frozenset({"window", "soft_cap", "lse"})


class FlashInferBackend(ClaimedBackend):
    """ALiBi is not claimed: the library computes its own slopes and takes none from the model."""

    name = "FLASHINFER"
    LIBRARIES = ("torch", "flashinfer")
    CAPABILITIES = (
        Capability(
            "jit",
            "cuda",
            HALF,
            listed(64, 128, 256),
            Sizes(),
            generations=frozenset({"8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"}),
            kv_cache_dtypes=FP8_CACHES | {"auto"},
            features=_FEATURES,
        ),
        # Turing has no bfloat16 arithmetic
        Capability(
            "jit-turing",
            "cuda",
            frozenset({"float16"}),
            listed(64, 128),
            Sizes(),
            generations=frozenset({"7.5"}),
            features=_FEATURES,
        ),
    )
