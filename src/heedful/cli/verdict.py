"""What a run came to: cells that were reached, cells that are not as expected, and the exit code that follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from heedful.conformance.plan import ExpectedCell
from heedful.conformance.results import CheckResult, Outcome

AS_EXPECTED: Final = 0
NOT_AS_EXPECTED: Final = 1
NOTHING_REACHED: Final = 3
SHOWN: Final = 20
"""Unexpected cells that are told in full; the rest stand in the report."""


@dataclass(frozen=True)
class Verdict:
    """A run against its plan. unexpected: (result, the outcome that was expected), in running order."""

    results: Sequence[CheckResult]
    planned: Mapping[str, int]
    unexpected: Sequence[tuple[CheckResult, Outcome]]

    @property
    def exit_code(self) -> int:
        """0 every reached cell as expected, 1 one is not, 3 nothing was reached."""
        if self.unexpected:
            return NOT_AS_EXPECTED
        reached = any(result.outcome != Outcome.NOT_RUN for result in self.results)
        return AS_EXPECTED if reached else NOTHING_REACHED


def judge(expected: Sequence[ExpectedCell], results: Sequence[CheckResult]) -> Verdict:
    """Compare each result with its planned outcome. NOT_RUN is not judged: that cell was not reached."""
    wanted = {(cell.lane, cell.id): cell.outcome for cell in expected}
    judged = ((result, wanted.get((result.lane, result.id), Outcome.PASS)) for result in results)
    return Verdict(
        results=results,
        planned=Counter(cell.lane for cell in expected),
        unexpected=[(result, want) for result, want in judged if not _as_expected(result.outcome, want)],
    )


def _as_expected(outcome: Outcome, wanted: Outcome) -> bool:
    return outcome in (wanted, Outcome.WAIVED, Outcome.NOT_RUN)


def lines(verdict: Verdict, reproducing: Mapping[str, str]) -> Iterator[str]:
    """The closing words of a run: each lane's count, each unexpected cell with the line that reruns it."""
    for lane, planned in verdict.planned.items():
        yield _lane_line(lane, planned, [result for result in verdict.results if result.lane == lane])
    for reason in _not_run_reasons(verdict.results):
        yield f"not run: {reason}"
    for result, wanted in verdict.unexpected[:SHOWN]:
        yield f"{result.outcome} (expected {wanted})  {result.id}"
        yield from (f"    {line}" for line in result.detail.splitlines()[:6])
        yield f"    again: {reproducing[result.id]}"
    if (more := len(verdict.unexpected) - SHOWN) > 0:
        yield f"… and {more} more cells that are not as expected: see the report"


def _lane_line(lane: str, planned: int, results: Sequence[CheckResult]) -> str:
    counts = Counter(result.outcome for result in results)
    told = " · ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome if counts[outcome])
    ran = len(results) - counts[Outcome.NOT_RUN]
    seconds = sum(result.seconds for result in results)
    return f"{lane}: {ran} of {planned} planned cells ran, {seconds:.1f} s in cells: {told or 'nothing'}"


def _not_run_reasons(results: Sequence[CheckResult]) -> list[str]:
    counts = Counter((r.lane, r.detail or "no reason given") for r in results if r.outcome == Outcome.NOT_RUN)
    return [f"{count} cells of {lane}: {detail}" for (lane, detail), count in counts.items()]
