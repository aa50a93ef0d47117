"""IPEX: Intel's paged operators on XPU, from intel-extension-for-pytorch or, where that is gone, vllm-xpu-kernels."""

from __future__ import annotations

from heedful.backends.capabilities import HALF, Capability, Sizes, listed
from heedful.backends.claimed import ClaimedBackend

_BLOCKS = listed(8, 16, 32, 64, 128)
_HEADS = Sizes(multiple_of=8, low=16, high=256)


class IpexBackend(ClaimedBackend):
    """ALiBi is not claimed: IPEX adds it in decode and leaves it out in prefill."""

    name = "IPEX"
    LIBRARIES = ("torch",)
    CAPABILITIES = (
        Capability(
            "ipex",
            "xpu",
            HALF,
            _HEADS,
            _BLOCKS,
            features=frozenset({"window", "soft_cap"}),
            libraries=("intel_extension_for_pytorch",),
        ),
        Capability(
            "xpu-kernels",
            "xpu",
            HALF,
            _HEADS,
            _BLOCKS,
            features=frozenset({"window", "soft_cap"}),
            libraries=("vllm_xpu_kernels",),
        ),
    )
