"""Which builds of the Pallas kernel a lane ``compiled`` proves, as data; no jax."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Final

from heedful.backends.builds import Build

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

GENERATIONS: Final = ("v4", "v5e", "v5p", "v6e", "7x")
BLOCK_SIZES: Final = (8, 16, 32, 64, 128, 256)
HEAD_SIZES: Final = (8, 32, 64, 72, 80, 96, 112, 120, 128, 192, 256)
"""Those that are built, each padded to whole vectors of 128 lanes."""

RULES: Final = {"soft_cap": True, "alibi": True, "lse": True}
"""Everything at once; windows and sinks are numbers that every build reads."""


def _build(arch: str, profile: str, *, dtype: str = "bf16", size: int = 128, page: int = 16, **rest: object) -> Build:
    """rest: queries a tile (16), value size, ``rules`` for the build with all of RULES, causal."""
    words = [dtype, f"d{size}", f"b{page}"]
    options: dict[str, object] = {"dtype": dtype, "size": size, "page": page, "queries": 16, **rest}
    words[1] += f"v{rest['size_v']}" if "size_v" in rest else ""
    words += [f"q{rest['queries']}"] if "queries" in rest else []
    words += ["rules"] if "rules" in rest else []
    words += ["encoder"] if rest.get("causal") is False else []
    return Build("attention", arch, "-".join(words), options, profile)


def _builds(arch: str) -> Iterator[Build]:
    yield _build(arch, "smoke")
    yield _build(arch, "smoke", rules=RULES)
    yield _build(arch, "ci", queries=1)
    yield _build(arch, "ci", queries=1, rules=RULES)
    yield _build(arch, "ci", queries=64)
    yield _build(arch, "ci", dtype="f32")
    yield _build(arch, "ci", dtype="f32", queries=1)
    yield _build(arch, "ci", size_v=48)
    yield _build(arch, "ci", causal=False)
    for size in HEAD_SIZES:
        yield _build(arch, "ci" if size in (64, 80, 256) else "full", size=size, page=32)
    for dtype, size, page in product(("bf16", "f32"), HEAD_SIZES, BLOCK_SIZES):
        yield _build(arch, "full", dtype=dtype, size=size, page=page)


def _first_of_each(builds: Iterator[Build]) -> Iterable[Build]:
    """What is asked twice stands where the smaller profile asks for it."""
    found: dict[str, Build] = {}
    for build in builds:
        found.setdefault(build.id, build)
    return found.values()


BUILDS: Final = tuple(build for arch in GENERATIONS for build in _first_of_each(_builds(arch)))
