"""TORCH_SDPA: attention on the CPU, by heedful's own kernels where they were built, else by what torch offers.

The facts; the layer is torch_sdpa_impl.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from heedful.backends.base import AttentionImpl, HndBackend
from heedful.backends.capabilities import Capability, Sizes
from heedful.types import DTYPES, AttentionType

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import ClassVar

    import torch

    from heedful.backends.base import KVCache


_TORCH = Capability(
    variant="torch",
    platform="cpu",
    dtypes=frozenset(DTYPES),
    head_sizes=Sizes(),
    block_sizes=Sizes(),
    kv_cache_dtypes=frozenset({"auto", "fp8", "fp8_e4m3", "fp8_e5m2"}),
    attn_types=frozenset(map(str, AttentionType)),
    features=frozenset({"window", "alibi", "soft_cap", "sinks", "lse"}),
    mixed_head_sizes=True,
)
_CPP = replace(_TORCH, variant="cpp", head_sizes=Sizes(high=512), libraries=("heedful.kernels.cpu",))


class TorchSdpaBackend(HndBackend):
    """Every feature of the contract, on any CPU that runs torch."""

    name = "TORCH_SDPA"
    LIBRARIES = ("torch",)
    CAPABILITIES: ClassVar[tuple[Capability, ...]] = (_CPP, _TORCH)

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """See AttentionBackend."""
        from heedful.backends.torch_sdpa_impl import TorchSdpaImpl

        return TorchSdpaImpl

    @staticmethod
    def swap_blocks(src: KVCache, dst: KVCache, pairs: torch.Tensor) -> None:
        """See AttentionBackend; the caches may lie on two devices."""
        from heedful.backends.torch_sdpa_blocks import swap_blocks

        swap_blocks(src, dst, pairs)

    @staticmethod
    def copy_blocks(caches: Sequence[KVCache], pairs: torch.Tensor) -> None:
        """See AttentionBackend."""
        from heedful.backends.torch_sdpa_blocks import copy_blocks

        copy_blocks(caches, pairs)
