"""``heedful backends``: what every registered backend claims, and whether it can be loaded here."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.backends.capabilities import Capability
from heedful.cli import options
from heedful.cli.libraries import Availability, availabilities
from heedful.cli.output import show, write, write_json
from heedful.types import Device

if TYPE_CHECKING:
    from rich.table import Table


def command(
    name: Annotated[
        str | None,
        typer.Argument(help="Show this backend's capabilities only.", autocompletion=options.complete_backend),
    ] = None,
    platform: options.Platform = None,
    capability: options.Capability = None,
    arch: options.Arch = None,
    as_json: options.AsJson = False,
) -> None:
    """List the backends: what each claims, whether it can be loaded here, and the first cause where it cannot."""
    from heedful import registry

    device = options.device_from(platform, capability, arch)
    if name is not None:
        registry.load(name)
    found = [one for one in availabilities(device, registry.package_facts(device)) if name in (None, one.name)]
    if as_json:
        write_json({"device": str(device), "simulated": device.simulated, "backends": [_record(one) for one in found]})
    else:
        _print(found, device, detailed=name is not None)


def _print(found: list[Availability], device: Device, *, detailed: bool) -> None:
    write(f"backends on {device}" + (" (simulated: libraries are assumed to be there)" if device.simulated else ""))
    show(_overview(found))
    if not detailed:
        write("`heedful backends NAME` shows what a backend claims, variant by variant.")
        return
    for one in found:
        show(_claims(rows_of(one.name)))


def rows_of(name: str) -> tuple[Capability, ...]:
    """A backend's capability rows."""
    from heedful import registry

    return registry.load(name).CAPABILITIES


def _record(one: Availability) -> dict[str, Any]:
    return asdict(one) | {"available": one.available, "capabilities": [row_dict(row) for row in rows_of(one.name)]}


def row_dict(row: Capability) -> dict[str, Any]:
    """One capability row as plain, sorted JSON values."""
    return {
        "variant": row.variant,
        "platform": row.platform,
        "generations": None if row.generations is None else sorted(row.generations),
        "dtypes": sorted(row.dtypes),
        "kv_cache_dtypes": sorted(row.kv_cache_dtypes),
        "head_sizes": str(row.head_sizes),
        "mixed_head_sizes": row.mixed_head_sizes,
        "block_sizes": str(row.block_sizes),
        "max_group": row.max_group,
        "attn_types": sorted(map(str, row.attn_types)),
        "features": sorted(row.features),
        "excluded_pairs": sorted(sorted(pair) for pair in row.excluded_pairs),
        "libraries": list(row.libraries),
    }


def _overview(found: list[Availability]) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False)
    for title in ("backend", "platforms", "here", "versions, or the first cause and how to get it"):
        grid.add_column(title, overflow="fold")
    for one in found:
        told = one.versions if one.available else "\n".join(filter(None, (one.cause, one.hint)))
        cells = (one.name, " ".join(one.platforms), "yes" if one.available else "no", told)
        grid.add_row(*map(Text, cells))
    return grid


def _claims(rows: tuple[Capability, ...]) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, title="claims", title_justify="left")
    grid.add_column("", overflow="fold")
    for row in rows:
        grid.add_column(f"{row.platform} {row.variant}", overflow="fold")
    records = [row_dict(row) for row in rows]
    for field in [key for key in records[0] if key not in ("variant", "platform")] if records else []:
        grid.add_row(field, *(Text(_told(record[field])) for record in records))
    return grid


def _told(value: object) -> str:
    if isinstance(value, list):
        return ", ".join("+".join(item) if isinstance(item, list) else str(item) for item in value) or "none"
    return (
        {None: "any", True: "yes", False: "no"}.get(value, str(value)) if value in (None, True, False) else str(value)
    )
