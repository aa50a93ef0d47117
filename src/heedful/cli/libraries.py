"""What is known of the libraries behind each backend on one device: version or first cause, and how to get it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from heedful.types import Device, Missing, PackageFacts, ReasonCode

if TYPE_CHECKING:
    from heedful.backends.base import AttentionBackend


@dataclass(frozen=True)
class Availability:
    """One backend on one device. cause is empty where it can run; hint says how to get what is missing."""

    name: str
    platforms: tuple[str, ...]
    cause: str = ""
    hint: str = ""
    versions: str = ""

    @property
    def available(self) -> bool:
        """Whether some variant can be loaded on the device."""
        return not self.cause


def availabilities(device: Device, facts: PackageFacts) -> list[Availability]:
    """Every registered backend, in the registry's order."""
    from heedful import registry

    return [_availability(name, registry.load(name), device, facts) for name in registry.names()]


def _availability(name: str, backend: type[AttentionBackend], device: Device, facts: PackageFacts) -> Availability:
    from heedful import registry

    platforms = tuple(dict.fromkeys(row.platform for row in backend.CAPABILITIES))
    if device.platform not in platforms:
        return Availability(
            name, platforms, f"runs on {', '.join(platforms) or 'no platform'}, not on {device.platform}"
        )
    if not_built := getattr(backend, "not_built", ""):
        # told for simulated devices too: they assume libraries, but our own code is here or is not
        return Availability(name, platforms, f"{ReasonCode.NOT_BUILT}: {not_built}")
    tried = [_versions(libraries, facts) for libraries in needs(backend, device)]
    found = next((versions for versions in tried if isinstance(versions, str)), None)
    if found is not None:
        return Availability(name, platforms, versions=found)
    missing = next(answer for answer in tried if isinstance(answer, Missing))
    return Availability(name, platforms, f"{missing.code}: {missing.cause}", registry.install_hint(name))


def needs(backend: type[AttentionBackend], device: Device) -> Iterator[tuple[str, ...]]:
    """The libraries that each variant of a backend needs on the device's platform."""
    for row in backend.CAPABILITIES:
        if row.platform == device.platform:
            yield tuple(dict.fromkeys((*backend.LIBRARIES, *row.libraries)))


def _versions(libraries: tuple[str, ...], facts: PackageFacts) -> str | Missing:
    known = {library: facts[library] for library in libraries if library in facts}
    missing = next((fact for fact in known.values() if isinstance(fact, Missing)), None)
    if missing is not None:
        return missing
    return ", ".join(f"{library} {fact}" for library, fact in known.items())
