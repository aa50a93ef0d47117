"""Checks of kernel builds: a kernel compiles for its target, and what its compiler is said to refuse is refused."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from heedful.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from heedful.backends.base import AttentionBackend
    from heedful.backends.builds import Build


def check_compiles(backend: type[AttentionBackend], build: Build) -> Mapping[str, float]:
    """The compiler takes the kernel; its figures go into the result, and none of them is missing or absurd."""
    figures = backend.compile_build(build)
    assert figures, f"{build.id} compiled, but compile_build told no figure of it"
    wrong = {name: value for name, value in figures.items() if not 0 <= value < math.inf}
    assert not wrong, f"{build.id} compiled to impossible figures: {wrong}"
    return figures


def prove_build_refused(backend: type[AttentionBackend], build: Build) -> None:
    """The compiler must refuse what BUILDS say that it does, with UnsupportedError."""
    try:
        backend.compile_build(build)
    except UnsupportedError:
        return
    raise AssertionError(f"BUILDS say that the compiler refuses {build.id} ({build.refused}), but it compiled")
