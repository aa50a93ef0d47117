"""Deliberately wrong backends, one defect each. VARIANTS holds them by name, each as `module:Class` can load it."""

from __future__ import annotations

from meta.broken import cache, calls, masks, numbers, rows, steps
from meta.plain import Plain

_MODULES = (numbers, masks, rows, cache, calls, steps)
VARIANTS: dict[str, type[Plain]] = {
    name: found
    for module in _MODULES
    for name, found in vars(module).items()
    if isinstance(found, type) and issubclass(found, Plain) and found.__module__ == module.__name__
    if not name.startswith("_")
}


def spec(variant: type[Plain]) -> str:
    """The `module:Class` by which a worker process loads a variant."""
    return f"{variant.__module__}:{variant.__qualname__}"
