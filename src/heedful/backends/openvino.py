"""OPENVINO: the PagedAttention operator at its own block size, the SDPA operator on gathered pages elsewhere."""

from __future__ import annotations

from heedful.backends.capabilities import EVERY_ATTN_TYPE, HALF_AND_SINGLE, Capability, Sizes, listed
from heedful.backends.claimed import ClaimedBackend

_HEADS = Sizes(low=1, high=512)


class OpenVinoBackend(ClaimedBackend):
    """Neither operator has a soft cap or returns a log-sum-exp."""

    name = "OPENVINO"
    LIBRARIES = ("torch", "openvino")
    CAPABILITIES = (
        Capability(
            "paged",
            "openvino",
            HALF_AND_SINGLE,
            _HEADS,
            listed(32),
            kv_cache_dtypes=frozenset({"auto", "u8"}),
            features=frozenset({"window", "alibi", "sinks"}),
            mixed_head_sizes=True,
        ),
        Capability(
            "sdpa",
            "openvino",
            HALF_AND_SINGLE,
            _HEADS,
            Sizes(),
            attn_types=EVERY_ATTN_TYPE,
            features=frozenset({"window", "alibi"}),
            mixed_head_sizes=True,
        ),
    )
