"""XFORMERS: memory-efficient attention for prefill and its Triton split-K kernel for paged decode, on CUDA."""

from __future__ import annotations

from heedful.backends.capabilities import CACHELESS, HALF, Capability, Sizes, listed
from heedful.backends.claimed import ClaimedBackend


class XFormersBackend(ClaimedBackend):
    """Decode is the tighter half: split-K walks pages in tiles of 64 keys and knows powers of two as head sizes."""

    name = "XFORMERS"
    LIBRARIES = ("torch", "xformers")
    CAPABILITIES = (
        Capability(
            "split-k",
            "cuda",
            HALF,
            listed(16, 32, 64, 128, 256),
            Sizes(multiple_of=64, low=64),
            generations=frozenset({"8.0", "8.6", "8.7", "8.9", "9.0", "10.0"}),
            attn_types=CACHELESS | {"decoder"},
            features=frozenset({"lse"}),
        ),
    )
