"""The conformance suite: what a backend claims, proven cell by cell against one reference. Loads no torch by itself."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "Case": "cases",
    "CheckResult": "results",
    "from_kernel": "kernel_backend",  # a module of the same name would stand in its place once imported
    "parametrize_with_checks": "pytest_plugin",
    "run_conformance": "run",
}
__all__ = ["Case", "CheckResult", "from_kernel", "parametrize_with_checks", "run_conformance"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that plans and reports stay free of torch and pytest."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
