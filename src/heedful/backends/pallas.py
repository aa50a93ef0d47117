"""PALLAS: heedful's own ragged paged kernel in JAX Pallas, on TPU."""

from __future__ import annotations

from heedful.backends.capabilities import Capability, listed
from heedful.backends.claimed import ClaimedBackend


class PallasBackend(ClaimedBackend):
    """Claims the kernel x head size x block size combinations that the TPU compiler was seen to take."""

    name = "PALLAS"
    LIBRARIES = ("torch", "jax", "libtpu")
    CAPABILITIES = (
        Capability(
            "ragged",
            "tpu",
            frozenset({"bfloat16", "float32"}),
            listed(64, 80, 128, 256),
            listed(8, 16, 32),
            generations=frozenset({"v4", "v5e", "v5p", "v6e", "7x"}),
            features=frozenset({"window"}),
        ),
    )
