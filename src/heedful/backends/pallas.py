"""PALLAS: heedful's own ragged paged kernel in JAX Pallas, on TPU and, where there is none, in Pallas' interpreter.

The facts; the layer is pallas_impl.py, what is compiled for which TPU pallas_builds.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from heedful.backends.base import AttentionImpl, HndBackend
from heedful.backends.capabilities import EVERY_ATTN_TYPE, Capability, Sizes, listed
from heedful.backends.pallas_builds import BLOCK_SIZES, BUILDS, GENERATIONS
from heedful.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import ClassVar

    from heedful.backends.builds import Build


class PallasBackend(HndBackend):
    """A TPU has no float16, and an fp8 cache is not claimed in this release."""

    name = "PALLAS"
    LIBRARIES = ("torch", "jax", "libtpu")
    CAPABILITIES: ClassVar[tuple[Capability, ...]] = (
        Capability(
            "ragged",
            "tpu",
            frozenset({"bfloat16", "float32"}),
            Sizes(multiple_of=8, low=8, high=256),
            listed(*BLOCK_SIZES),
            generations=frozenset(GENERATIONS),
            attn_types=EVERY_ATTN_TYPE,
            features=frozenset({"window", "alibi", "soft_cap", "sinks", "lse"}),
            mixed_head_sizes=True,
        ),
    )
    BUILDS: ClassVar[tuple[Build, ...]] = BUILDS
    EMULATES = True

    @classmethod
    def compile_build(cls, build: Build) -> Mapping[str, float]:
        """See AttentionBackend: by libtpu, ahead of time."""
        from heedful.kernels import pallas as _settled  # noqa: F401  before jax

        try:
            from heedful.backends.pallas_compile import compile_build
        except ImportError as cause:
            raise BackendUnavailableError(_told(cause)) from cause
        return compile_build(build)

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """See AttentionBackend."""
        from heedful.kernels import pallas as _settled  # noqa: F401  before jax

        try:
            from heedful.backends.pallas_impl import PallasImpl
        except ImportError as cause:
            raise BackendUnavailableError(_told(cause)) from cause
        return PallasImpl


def _told(cause: ImportError) -> str:
    return f"PALLAS cannot be built: {cause}; pip install 'heedful[tpu]'"
