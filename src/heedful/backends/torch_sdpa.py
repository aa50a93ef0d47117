"""TORCH_SDPA: attention on the CPU with what torch offers. The facts; the layer is torch_sdpa_impl.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heedful.backends.base import AttentionImpl, HndBackend
from heedful.backends.capabilities import Capability, Sizes
from heedful.types import DTYPES, AttentionType

if TYPE_CHECKING:
    from typing import ClassVar


class TorchSdpaBackend(HndBackend):
    """Every feature of the contract, on any CPU that runs torch."""

    name = "TORCH_SDPA"
    LIBRARIES = ("torch",)
    CAPABILITIES: ClassVar[tuple[Capability, ...]] = (
        Capability(
            variant="torch",
            platform="cpu",
            dtypes=frozenset(DTYPES),
            head_sizes=Sizes(),
            block_sizes=Sizes(),
            kv_cache_dtypes=frozenset({"auto", "fp8", "fp8_e4m3", "fp8_e5m2"}),
            attn_types=frozenset(map(str, AttentionType)),
            features=frozenset({"window", "alibi", "soft_cap", "sinks", "lse"}),
            mixed_head_sizes=True,
        ),
    )

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """See AttentionBackend."""
        from heedful.backends.torch_sdpa_impl import TorchSdpaImpl

        return TorchSdpaImpl
