"""FLASH_ATTN: the flash-attn libraries on CUDA, one row for each major version."""

from __future__ import annotations

from heedful.backends.capabilities import EVERY_ATTN_TYPE, HALF, Capability, Sizes, listed
from heedful.backends.claimed import ClaimedBackend

_EIGHTS_TO_256 = Sizes(multiple_of=8, low=8, high=256)


class FlashAttentionBackend(ClaimedBackend):
    """The order of rows is the order of trust: FA3 where it was built, else FA2; FA4 is a pre-release."""

    name = "FLASH_ATTN"
    LIBRARIES = ("torch",)
    CAPABILITIES = (
        Capability(
            "fa3",
            "cuda",
            HALF,
            _EIGHTS_TO_256,
            Sizes(multiple_of=16, low=16),
            generations=frozenset({"9.0"}),
            attn_types=EVERY_ATTN_TYPE,
            features=frozenset({"window", "soft_cap", "lse"}),
            libraries=("flash_attn_interface",),
        ),
        # The library's pages are multiples of 256 and nothing else is claimed: other multiples of 16 need our own
        # decode kernel over the same cache, and a claim comes with its code, as a row of its own.
        # Binaries are built for 8.0, 9.0, 10.0 and 12.0; each also runs on the later minors of its major.
        Capability(
            "fa2",
            "cuda",
            HALF,
            _EIGHTS_TO_256,
            Sizes(multiple_of=256, low=256),
            generations=frozenset({"8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"}),
            attn_types=EVERY_ATTN_TYPE,
            features=frozenset({"window", "alibi", "soft_cap", "lse"}),
            libraries=("flash_attn",),
        ),
        # FA4 pages on 9.0 and 10.0 only; on 8.0 and 12.0 it refuses them itself. Sizes are those seen to compile.
        Capability(
            "fa4",
            "cuda",
            HALF,
            listed(64, 128),
            listed(16, 128),
            generations=frozenset({"9.0", "10.0"}),
            features=frozenset({"window", "soft_cap", "lse"}),
            libraries=("flash_attn.cute",),
        ),
    )
