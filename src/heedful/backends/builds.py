"""Builds of kernels, as data: what a lane ``compiled`` proves without a device. Each is one cell of the plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from heedful.types import Reason

CHECK: Final = "compiles"
"""The check of every build: ``<platform>/<BACKEND>/compiles[<kernel>-<arch>-<variant>]``."""


@dataclass(frozen=True)
class Build:
    """One kernel for one device generation. arch: as in ``Device.generation``.

    variant: what tells this build from others of the kernel, ``bf16-d128-b16``. options: what the backend's compile
    needs to know. profile: the smallest that asks for it. refused: the compiler's own limit that this build breaks,
    None where it compiles; the suite proves both.
    """

    kernel: str
    arch: str
    variant: str
    options: Mapping[str, object] = field(default_factory=dict, hash=False)
    profile: str = "ci"
    refused: Reason | None = None

    @property
    def id(self) -> str:
        """``attention-v5e-bf16-d128-b16``."""
        return f"{self.kernel}-{self.arch}-{self.variant}"
