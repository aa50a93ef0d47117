"""How a person sees a run go on: a bar where a terminal listens, a plain line now and then where none does."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator

from heedful.cli.output import console, note
from heedful.conformance.results import CheckResult, Outcome

SECONDS_A_LINE = 10.0
"""A plain log says that it is alive about this often."""
LOUD = frozenset(Outcome) - {Outcome.PASS, Outcome.NOT_SUPPORTED, Outcome.WAIVED, Outcome.NOT_RUN}


LOUD_LINES = 20
"""After so many failures told at once the rest are only counted."""


def watched(results: Iterable[CheckResult], total: int) -> Iterator[CheckResult]:
    """Pass results on, telling of them on stderr; the first failures are told at once."""
    return _bar(results, total) if sys.stderr.isatty() else _plain(results, total)


def _bar(results: Iterable[CheckResult], total: int) -> Iterator[CheckResult]:
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console(sys.stderr), transient=True) as progress:
        task = progress.add_task("", total=total)
        loud = 0
        for result in results:
            loud += result.outcome in LOUD
            if result.outcome in LOUD and loud <= LOUD_LINES:
                progress.console.print(escape(f"{result.outcome}  {result.id}"), highlight=False)
            progress.update(task, advance=1, description=_doing(result, loud))
            yield result


def _doing(result: CheckResult, loud: int) -> str:
    check = result.id.partition("[")[0]
    return f"{loud} failed  {check}" if loud else check


def _plain(results: Iterable[CheckResult], total: int) -> Iterator[CheckResult]:
    last, loud = time.monotonic(), 0
    for done, result in enumerate(results, start=1):
        loud += result.outcome in LOUD
        if result.outcome in LOUD and loud <= LOUD_LINES:
            note(f"{result.outcome}  {result.id}")
        if time.monotonic() - last >= SECONDS_A_LINE or done == total:
            last = time.monotonic()
            note(f"{done} of {total} cells" + (f", {loud} failed" if loud else ""))
        yield result
