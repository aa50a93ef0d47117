"""The base of a backend whose claims stand already and whose code is not part of this release."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from heedful.backends.base import HndBackend
from heedful.errors import BackendUnavailableError

if TYPE_CHECKING:
    from heedful.backends.base import AttentionImpl


class ClaimedBackend(HndBackend):
    """Static facts without an Impl: selection is judged on simulated devices, building is refused with the reason."""

    not_built: ClassVar[str] = "its claims are part of this release of heedful, its code is not"
    """Why get_impl_cls refuses; the registry reports it as the fact ``heedful:<NAME>``."""

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """Refused: there is nothing to build."""
        raise BackendUnavailableError(f"{cls.name} cannot be built: {cls.not_built}; choose another backend")
