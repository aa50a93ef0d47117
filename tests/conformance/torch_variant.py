"""TORCH_SDPA without heedful's own kernels, as where they were not built. Worker processes import it from here."""

from __future__ import annotations

from heedful.backends.torch_sdpa import TorchSdpaBackend
from heedful.backends.torch_sdpa_impl import TorchSdpaImpl


class TorchVariantBackend(TorchSdpaBackend):
    """Only the row of the variant ``torch``."""

    CAPABILITIES = tuple(row for row in TorchSdpaBackend.CAPABILITIES if row.variant == "torch")

    @staticmethod
    def get_impl_cls():
        """See AttentionBackend."""
        return TorchVariantImpl


class TorchVariantImpl(TorchSdpaImpl):
    """See AttentionImpl."""

    backend = TorchVariantBackend
