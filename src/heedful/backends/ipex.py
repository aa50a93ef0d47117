"""IPEX: Intel's paged operators on XPU, from intel-extension-for-pytorch or, where that is gone, vllm-xpu-kernels.

The facts; the layer is ipex_impl.py, the libraries are ipex_libraries.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from heedful.backends.base import AttentionImpl, HndBackend
from heedful.backends.capabilities import EVERY_ATTN_TYPE, HALF, Capability, Sizes, listed

if TYPE_CHECKING:
    from typing import ClassVar

IPEX = Capability(
    "ipex",
    "xpu",
    HALF,
    Sizes(multiple_of=8, low=16, high=256),
    listed(8, 16, 32, 64, 128),
    attn_types=EVERY_ATTN_TYPE,
    features=frozenset({"window", "soft_cap"}),
    libraries=("intel_extension_for_pytorch",),
)
"""What its operators have in common on XPU and on the CPU; ALiBi they add in decode alone."""
XPU_KERNELS = Capability(
    "xpu-kernels",
    "xpu",
    HALF,
    listed(64, 96, 128, 192, 256),  # others have no kernel in the wheel and would be computed in plain torch
    listed(16, 32, 64, 128),
    features=frozenset({"window"}),  # it takes a soft cap and slopes, and no kernel in it has either
    libraries=("vllm_xpu_kernels._vllm_fa2_C",),
)
"""What vllm-xpu-kernels 0.1.16.2 says of itself. No machine of ours could run it: docs/findings.md."""


class IpexBackend(HndBackend):
    """Neither library has sinks for every kind, or returns a log-sum-exp that could be held against the contract."""

    name = "IPEX"
    LIBRARIES = ("torch",)
    CAPABILITIES: ClassVar[tuple[Capability, ...]] = (IPEX, XPU_KERNELS)

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """See AttentionBackend."""
        from heedful.backends.ipex_impl import IpexImpl
        from heedful.backends.ipex_libraries import require_one

        require_one()
        return IpexImpl
