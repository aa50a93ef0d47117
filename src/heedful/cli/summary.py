"""The closing words of a run: what each lane came to, what is not as planned, and how to see it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from heedful.conformance.results import CheckResult, Outcome

if TYPE_CHECKING:
    from heedful.report.model import Deviation, Report

SHOWN: Final = 20
"""Cells out of plan that are told in full; the rest stand in the report."""
DETAIL_LINES: Final = 6


def lines(report: Report) -> Iterator[str]:
    """A line a lane, why cells did not run, each cell out of plan with the line that reruns it, and the verdict."""
    planned = Counter(cell.lane for cell in report.selected)
    for lane, count in planned.items():
        yield _lane_line(lane, count, [result for result in report.results if result.lane == lane])
    yield from _not_run(report.results)
    for deviation in report.unexpected[:SHOWN]:
        yield from _deviation(report, deviation)
    if (more := len(report.unexpected) - SHOWN) > 0:
        yield f"… and {more} more: the report has them all"
    yield _verdict(report)


def _lane_line(lane: str, planned: int, results: Sequence[CheckResult]) -> str:
    counts = Counter(result.outcome for result in results)
    told = " · ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome if counts[outcome])
    ran = len(results) - counts[Outcome.NOT_RUN]
    return f"{lane}: {ran} of {planned} cells ran: {told or 'no result'}"


def _not_run(results: Sequence[CheckResult]) -> Iterator[str]:
    counts = Counter((r.lane, r.detail or "no reason given") for r in results if r.outcome is Outcome.NOT_RUN)
    for (lane, detail), count in counts.items():
        yield f"{lane}: {count} cells not run: {detail}"


def _deviation(report: Report, deviation: Deviation) -> Iterator[str]:
    yield f"{deviation.text}: {deviation.id}"
    detail = deviation.result.detail if deviation.result is not None else "the run ended before it"
    yield from (f"    {line}" for line in detail.splitlines()[:DETAIL_LINES])
    if again := report.reproducing.get((deviation.lane, deviation.id)):
        yield f"    again: {again}"


def _verdict(report: Report) -> str:
    scope = " (partial: only what was asked for)" if report.partial else ""
    if report.unexpected:
        return f"{len(report.unexpected)} cells are not as planned{scope}"
    if not report.reached:
        return f"no cell could be reached on this machine{scope}"
    return f"every cell that was reached is as planned{scope}"
