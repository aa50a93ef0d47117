"""``heedful conform``: run the conformance suite on this machine and keep a report."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heedful.cli import options, summary
from heedful.cli.output import write
from heedful.cli.progress import watched
from heedful.cli.report import JunitPath, MarkdownPath, render
from heedful.conformance.plan import Lane, Plan, Row, lane_name
from heedful.conformance.results import CheckResult, Fidelity, reproduce, select_ids
from heedful.errors import BadInputError

if TYPE_CHECKING:
    from heedful.report.model import Report


@dataclass(frozen=True)
class Asked:
    """What to run: the options of the command line that choose and run cells."""

    backend: str | None
    platform: str | None
    profile: str | None
    only: tuple[str, ...]
    matrix: Path | None
    workers: int
    seed: int
    timeout: float


def command(
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Only this backend: a registered name, or module:Class for one that lives elsewhere.",
            autocompletion=options.complete_backend,
        ),
    ] = None,
    platform: options.Platform = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE",
            help=f"One of {', '.join(options.PROFILES)}; default: what the matrix says.",
            autocompletion=options.complete_profile,
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only these cells; * and ? are wild. May be repeated.")
    ] = None,
    matrix: Annotated[Path | None, typer.Option(metavar="PATH", help="Another matrix.yaml.")] = None,
    list_cells: Annotated[bool, typer.Option("--list", help="Print the planned cells, run none.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Added to the seed of every case.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that one cell may take.")] = 60.0,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Where the report goes; default: reports/.")
    ] = None,
    markdown: MarkdownPath = None,
    junit: JunitPath = None,
) -> None:
    """Run the conformance suite: every planned cell of this machine's platform, or those asked for.

    Exit code 0: every cell that was reached is as expected; 1: one is not; 3: none was reached.
    """
    asked = Asked(backend, platform, profile, tuple(only or ()), matrix, workers, seed, timeout)
    row = row_for(asked)
    planned = plan_for(row, asked)
    if list_cells:
        chosen = chosen_ids(planned, asked)
        write("\n".join(dict.fromkeys(cell.id for cell in planned.cells if cell.id in chosen)))
        return
    report = execute(row, planned, asked)
    path = json_path or default_path(row.platform, asked)
    report.write(path)
    render(report, markdown, junit)
    write("\n".join((*summary.lines(report), f"report: {path}")))
    raise typer.Exit(report.exit_code)


def row_for(asked: Asked) -> Row:
    """What the matrix says of the platform, narrowed to one backend or turned to another profile where asked."""
    from heedful.harness.matrix import load_matrix
    from heedful.registry import resolve

    row = load_matrix(asked.matrix).row(options.device_from(asked.platform).platform)
    if asked.backend is not None:
        # as `python -m` does: a kernel author's module lies in the folder at hand
        sys.path.insert(0, str(Path.cwd()))
        row = _narrowed(row, asked.backend, resolve(asked.backend).name)
    lanes = tuple(replace(lane, profile=asked.profile or lane.profile) for lane in row.lanes)
    return replace(row, lanes=lanes)


def _narrowed(row: Row, spec: str, name: str) -> Row:
    """The row with one backend only; one that the row does not know gets a lane of its own."""
    lanes = tuple(replace(lane, backends=(spec,)) for lane in row.lanes if name in lane.backends)
    return replace(row, lanes=lanes or (Lane(Fidelity.HARDWARE, (spec,), "ci"),), selections=())


def plan_for(row: Row, asked: Asked) -> Plan:
    """Every expected cell of the row; patterns of --only that match none are an error."""
    from heedful.conformance.plan import plan

    check_numbers(asked)
    planned = plan((row,))
    chosen_ids(planned, asked)
    return planned


def check_numbers(asked: Asked) -> None:
    """Refuse what the option types cannot: a time limit that is no time."""
    if not 0 < asked.timeout < float("inf"):
        raise BadInputError(f"--timeout {asked.timeout} must be a positive number of seconds")


def chosen_ids(planned: Plan, asked: Asked) -> frozenset[str]:
    """The ids that the run is asked for: all, or those that some pattern names."""
    ids = [cell.id for cell in planned.cells]
    patterns = asked.only or ("*",)
    return frozenset(cell_id for pattern in patterns for cell_id in select_ids(pattern, ids))


def execute(row: Row, planned: Plan, asked: Asked) -> Report:
    """Run the cells, telling a person how it goes, and make the report."""
    from heedful.conformance.run import run_plan
    from heedful.report.model import Report
    from heedful.report.provenance import collect

    started, device = datetime.now(UTC), options.device_from(asked.platform)
    chosen = chosen_ids(planned, asked)
    running = run_plan(planned, (row,), only=asked.only, seed=asked.seed, timeout=asked.timeout, workers=asked.workers)
    results = list(watched(running, sum(cell.id in chosen for cell in planned.cells)))
    return Report.create(
        planned,
        results,
        provenance=collect(device, command=("heedful", *sys.argv[1:]), seeds=(asked.seed,), started=started),
        profiles={lane_name(row.platform, lane): lane.profile for lane in row.lanes},
        reproduce=lambda result: again(result, row, asked),
        only=asked.only,
    )


def again(result: CheckResult, row: Row, asked: Asked) -> str:
    """The line that reruns one cell as it ran: its profile, and the options that made it what it was."""
    profile = next((lane.profile for lane in row.lanes if lane_name(row.platform, lane) == result.lane), "ci")
    said = {"--platform": row.platform, "--backend": asked.backend, "--matrix": asked.matrix, "--seed": asked.seed}
    extra = [f" {option} {shlex.quote(str(value))}" for option, value in said.items() if value]
    return reproduce(result.id, profile) + "".join(extra)


def default_path(platform: str, asked: Asked) -> Path:
    """reports/<platform>.json; a narrowed run has a name of its own, so that it never replaces a whole report."""
    backend = "" if asked.backend is None else f"-{asked.backend.replace(':', '.')}"
    return Path("reports") / f"{platform}{backend}{'-partial' if asked.only else ''}.json"
