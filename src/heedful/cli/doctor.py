"""``heedful doctor``: this machine, its device, its libraries, and how to get what is missing."""

from __future__ import annotations

import platform as machine
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from heedful.cli import options
from heedful.cli.libraries import Availability, availabilities, needs
from heedful.cli.output import show, write, write_json
from heedful.errors import BackendUnavailableError
from heedful.types import Device, Missing, PackageFacts

PACKAGES = ("heedful", "torch", "numpy", "typer", "rich", "pebble", "covertable", "ruamel.yaml")
"""What heedful itself runs on, beside the libraries of backends."""


def command(platform: options.Platform = None, as_json: options.AsJson = False) -> None:
    """Examine this machine: device, libraries and versions, what is missing and how to get it.

    Fails with its own exit code when no attention backend can be loaded here.
    """
    from heedful import registry

    device = options.device_from(platform)
    found = availabilities(device, facts := registry.package_facts(device))
    record = examine(device, facts, found)
    if as_json:
        write_json(record)
    else:
        _print(record)
    if not any(one.available for one in found if one.name != "NO_ATTENTION"):
        raise BackendUnavailableError(
            f"no attention backend can be loaded on {device}; the list above says why, and how to get what can be had"
        )


def examine(device: Device, facts: PackageFacts, found: list[Availability]) -> dict[str, Any]:
    """Everything that doctor tells, as plain data."""
    from heedful.platforms import observations

    here = [one for one in found if device.platform in one.platforms]
    return {
        "device": {"platform": device.platform, "generation": device.generation, "name": device.name},
        "simulated": device.simulated,
        "probes": observations(),
        "machine": _machine(),
        "packages": {name: _installed(name) for name in PACKAGES},
        "libraries": _libraries(device, facts, here),
        "backends": [
            {"name": o.name, "available": o.available, "versions": o.versions, "cause": o.cause, "get": o.hint}
            for o in here
        ],
    }


def _machine() -> dict[str, str]:
    import os

    return {
        "system": machine.platform(),
        "python": machine.python_version(),
        "processor": machine.machine(),
        "cores": str(os.cpu_count()),
    }


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _libraries(device: Device, facts: PackageFacts, here: list[Availability]) -> dict[str, str]:
    from heedful import registry

    wanted = [lib for one in here for libs in needs(registry.load(one.name), device) for lib in libs]
    others = [library for library in dict.fromkeys(wanted) if library in facts and library not in PACKAGES]
    told = {library: facts[library] for library in others}
    return {library: f"{f.code}: {f.cause}" if isinstance(f, Missing) else f for library, f in told.items()}


def _print(record: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    device, simulated = record["device"], " (simulated)" if record["simulated"] else ""
    grid = Table(box=None, pad_edge=False, show_header=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    told = " ".join(filter(None, (device["platform"], device["generation"], device["name"])))
    grid.add_row("device", Text(told + simulated))
    for section in ("machine", "probes", "packages", "libraries"):
        for name, value in record[section].items():
            grid.add_row(f"{section[:-1]} {name}" if section == "probes" else name, Text(value or "not installed"))
    show(grid)
    write("\nattention backends of this platform")
    for one in record["backends"]:
        _print_backend(one)


def _print_backend(one: dict[str, Any]) -> None:
    if one["available"]:
        write(f"  ok       {one['name']}  {one['versions']}".rstrip())
        return
    write(f"  missing  {one['name']}  {one['cause']}")
    if one["get"]:
        write(f"           get it: {one['get']}")
