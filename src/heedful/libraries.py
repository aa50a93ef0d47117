"""The optional libraries behind backends: what the pinned stacks hold, and whether one can be imported here.

A library is there when its import worked. The first cause of a failure is kept and repeated on every query: a second
import of a half-imported package tells a different story ("circular import"), so what it left behind is removed.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, Final

from heedful.types import Missing, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType


@dataclass(frozen=True)
class Library:
    """distribution: its name on a package index. pins: platform -> version in that platform's pinned stack.

    unpinned: why no stack holds it. shares_files: another distribution brings a module of this name too, so that only
    the distribution's own record tells whether it is there. install: how to get it where pip install does not.
    """

    distribution: str
    pins: Mapping[str, str] = field(default_factory=dict)
    unpinned: str = ""
    shares_files: bool = False
    install: str = ""


_EVERYWHERE = dict.fromkeys(("cuda", "rocm", "tpu", "cpu", "openvino"), "2.13.0")

LIBRARIES: Final[Mapping[str, Library]] = {
    "aiter": Library("amd-aiter", {"rocm": "0.1.7.post2.dev18"}),
    "flash_attn": Library("flash-attn", {"cuda": "2.8.3.post2", "rocm": "2.8.3.post2"}),
    "flash_attn.cute": Library("flash-attn-4", unpinned="it shares files with flash-attn", shares_files=True),
    "flash_attn_2_cuda": Library("flash-attn", {"cuda": "2.8.3.post2", "rocm": "2.8.3.post2"}),
    "flash_attn_interface": Library(
        "flash_attn_3",
        unpinned="no package index holds it",
        install="build it from the hopper folder of flash-attention",
    ),
    "flashinfer": Library("flashinfer-python", {"cuda": "0.7.2"}),
    "heedful.kernels.cpu": Library(
        "heedful",
        {"cpu": "of this release"},
        install="install a C++ compiler (g++ 12 or newer) and install heedful again",
    ),
    "intel_extension_for_pytorch": Library("intel-extension-for-pytorch", {"xpu": "2.8.0"}),
    "jax": Library("jax", {"tpu": "0.10.2"}),
    "libtpu": Library("libtpu", {"tpu": "0.0.42.1"}),
    "openvino": Library("openvino", {"openvino": "2026.4.1"}),
    "torch": Library("torch", _EVERYWHERE | {"xpu": "2.8.0"}),
    "triton": Library("triton", {"cuda": "3.7.1", "rocm": "3.7.1", "xpu": "3.7.1"}),
    "vllm_xpu_kernels": Library("vllm-xpu-kernels", unpinned="it needs another torch than IPEX"),
    "vllm_xpu_kernels._vllm_fa2_C": Library("vllm-xpu-kernels", unpinned="it needs another torch than IPEX"),
    "xformers": Library("xformers", {"cuda": "0.0.35"}),
}
"""Import name -> what is known of it. Keep it sorted."""

ASSUMED: Final = "assumed"
_LOCK = RLock()
_IMPORTED: dict[str, ModuleType | Missing] = {}
_INSTALLED: dict[str, str | Missing] = {}


def pinned(name: str, platform: str) -> str | Missing:
    """The version that a simulated device of the platform is assumed to have; a library of no stack is missing."""
    library = LIBRARIES.get(name)
    if library is None:
        return ASSUMED
    if platform in library.pins:
        return library.pins[platform]
    why = f": {library.unpinned}" if library.unpinned else ""
    return Missing(ReasonCode.NOT_INSTALLED, f"{library.distribution} is not in the pinned stack of {platform}{why}")


def installed(name: str) -> str | Missing:
    """The version of a library whose import works here, or the first cause of its failure."""
    with _LOCK:
        if name not in _INSTALLED:
            _INSTALLED[name] = _installed(name)
        return _INSTALLED[name]


def _installed(name: str) -> str | Missing:
    library = LIBRARIES.get(name)
    if library is not None and library.shares_files and _version(library.distribution) is None:
        return Missing(ReasonCode.NOT_INSTALLED, f"the distribution {library.distribution} is not installed")
    module = import_once(name)
    if isinstance(module, Missing):
        return module
    found = _version(library.distribution if library else name.partition(".")[0])
    return found or str(getattr(module, "__version__", "of unknown version"))


def how_to_get(name: str) -> str:
    """What to do about a missing library; empty for one that is not in the table."""
    library = LIBRARIES.get(name)
    return "" if library is None else library.install or f"pip install {library.distribution}"


def import_once(name: str) -> ModuleType | Missing:
    """Import a module; a failure costs only itself, is remembered with its first cause and leaves nothing behind."""
    with _LOCK:
        if name not in _IMPORTED:
            _IMPORTED[name] = _import(name)
        return _IMPORTED[name]


def forget() -> None:
    """Drop what was learnt by importing; for tests that put another library in the way."""
    with _LOCK:
        _IMPORTED.clear()
        _INSTALLED.clear()


def _import(name: str) -> ModuleType | Missing:
    before = frozenset(sys.modules)
    try:
        with redirect_stdout(sys.stderr):  # what a library prints is no part of our own output
            return import_module(name)
    except Exception as cause:  # a broken library may raise anything: ImportError, OSError, RuntimeError, ValueError
        _discard(name.partition(".")[0], before)
        return Missing(_code(name, cause), told(cause))


def _discard(root: str, before: frozenset[str]) -> None:
    for name in [n for n in sys.modules if n not in before and (n == root or n.startswith(f"{root}."))]:
        parent, _, child = name.rpartition(".")
        del sys.modules[name]
        if parent in before:
            vars(sys.modules[parent]).pop(child, None)


def _code(name: str, cause: Exception) -> ReasonCode:
    absent = isinstance(cause, ModuleNotFoundError) and f"{name}.".startswith(f"{cause.name}.")
    return ReasonCode.NOT_INSTALLED if absent else ReasonCode.IMPORT_FAILED


def told(cause: BaseException) -> str:
    """One line for an exception and what it came from, the deepest cause last."""
    text = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
    deeper = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return text if deeper is None else f"{text} (from {told(deeper)})"


def _version(distribution: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
