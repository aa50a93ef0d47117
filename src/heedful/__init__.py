"""heedful: careful attention. Chooses an attention backend and says why, runs it, and proves it.

Importing this package loads no torch and no backend library, touches no device: public names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heedful.backends.base import AttentionBackend, AttentionImpl, AttentionMetadata
    from heedful.reference import reference_attention
    from heedful.runner import ModelRunner
    from heedful.selector import explain, forced_backend, get_attn_backend
    from heedful.types import AttentionType, Device, Selection, SelectionRequest

__all__ = [
    "AttentionBackend",
    "AttentionImpl",
    "AttentionMetadata",
    "AttentionType",
    "Device",
    "ModelRunner",
    "Selection",
    "SelectionRequest",
    "explain",
    "forced_backend",
    "get_attn_backend",
    "reference_attention",
]

_HOME = {
    "AttentionBackend": "backends.base",
    "AttentionImpl": "backends.base",
    "AttentionMetadata": "backends.base",
    "AttentionType": "types",
    "Device": "types",
    "ModelRunner": "runner",
    "Selection": "types",
    "SelectionRequest": "types",
    "explain": "selector",
    "forced_backend": "selector",
    "get_attn_backend": "selector",
    "reference_attention": "reference",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("heedful")
    if name not in _HOME:
        raise AttributeError(f"module 'heedful' has no attribute {name!r}; it has {', '.join(__all__)}")
    found = getattr(import_module(f"heedful.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
