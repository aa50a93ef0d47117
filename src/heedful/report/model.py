"""A report: what was expected, what came of it, each selection with its reasons, and where it was made.

The JSON form is the only thing kept (``report.schema.json`` beside this file; docs/reports.md explains it); JUnit and
Markdown are rendered from a Report that was loaded. A file is written whole or not at all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from heedful.conformance.plan import ExpectedCell, Plan
from heedful.conformance.results import CheckResult, Outcome, matches
from heedful.errors import ReportError
from heedful.report import plain, store
from heedful.report.provenance import Provenance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

AS_EXPECTED: Final = 0
NOT_AS_EXPECTED: Final = 1
NOTHING_REACHED: Final = 3

Cell = tuple[str, str]
"""(lane, id): what no two results of a report share."""


@dataclass(frozen=True)
class Deviation:
    """A cell that did not end as planned. expected is None where nothing was planned, result where nothing came."""

    lane: str
    id: str
    expected: Outcome | None
    result: CheckResult | None

    @property
    def text(self) -> str:
        """``FAIL, planned PASS``, in one line."""
        if self.result is None:
            return f"no result, planned {self.expected}"
        return f"{self.result.outcome}, {'not planned' if self.expected is None else f'planned {self.expected}'}"


@dataclass(frozen=True)
class Report:
    """One run against its plan. Make one with ``create``, read one with ``load``.

    only: the patterns of a run that was narrowed; such a report is partial and proves only the cells that they name.
    profiles: lane to profile. selections: each decision's record with its lane and id. reproducing: the one line that
    reruns a cell, by (lane, id).
    """

    expected: tuple[ExpectedCell, ...]
    results: tuple[CheckResult, ...]
    selections: tuple[Mapping[str, Any], ...]
    provenance: Provenance
    profiles: Mapping[str, str]
    only: tuple[str, ...]
    reproducing: Mapping[Cell, str]

    @classmethod
    def create(
        cls,
        plan: Plan,
        results: Iterable[CheckResult],
        *,
        provenance: Provenance,
        profiles: Mapping[str, str],
        reproduce: Callable[[CheckResult], str],
        only: Sequence[str] = (),
    ) -> Report:
        """A report of results against the whole plan. A result's fact ``selection`` becomes a record of selections.

        Raises ReportError for two results of one cell.
        """
        kept = [(result, plain.normal(result)) for result in results]
        _refuse_twice(row for _, row in kept)
        return cls(
            expected=plan.cells,
            results=tuple(row for _, row in kept),
            selections=tuple(plain.selection(result) for result, _ in kept if "selection" in result.facts),
            provenance=provenance,
            profiles=dict(profiles),
            only=tuple(only),
            reproducing={(row.lane, row.id): reproduce(row) for _, row in kept},
        )

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read .json or .json.gz. Raises ReportError, in one line, for whatever is not a whole report of ours."""
        document = store.read(path)
        report = cls.from_dict(document)
        _refuse_twice(report.results, f"{path}: ")
        for what, told, found in (
            ("plan_hash", document["plan_hash"], report.plan_hash),
            ("summary", document["summary"], report.summary),
        ):
            if told != found:
                raise ReportError(
                    f"{path}: its {what} does not follow from its cells, so it was changed after it was written; "
                    "run the suite again, or fetch the file as it was written"
                )
        return report

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Report:
        """Inverse of to_dict, for a document that the schema allows."""
        rows = document["results"]
        return cls(
            expected=tuple(ExpectedCell.from_dict(row) for row in document["expected"]),
            results=tuple(plain.from_row(row) for row in rows),
            selections=tuple(document["selections"]),
            provenance=Provenance.from_dict(document["provenance"]),
            profiles=document["profiles"],
            only=tuple(document["only"]),
            reproducing={(row["lane"], row["id"]): row["reproduce"] for row in rows},
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, plain values only."""
        return {
            "kind": store.KIND,
            "version": store.VERSION,
            "partial": self.partial,
            "only": list(self.only),
            "summary": self.summary,
            "plan_hash": self.plan_hash,
            "profiles": dict(self.profiles),
            "provenance": self.provenance.to_dict(),
            "selections": [dict(record) for record in self.selections],
            "expected": [cell.to_dict() for cell in self.expected],
            "results": [plain.to_row(r, self.reproducing[r.lane, r.id]) for r in self.results],
        }

    def write(self, path: str | Path) -> None:
        """Write .json or .json.gz, whole or not at all. Raises BadInputError for another name, else ReportError."""
        store.write(self.to_dict(), path)

    @property
    def partial(self) -> bool:
        """Whether the run was narrowed with --only."""
        return bool(self.only)

    @cached_property
    def plan_hash(self) -> str:
        """Two reports with one hash answer the same questions."""
        return Plan(self.expected).hash

    @cached_property
    def counts(self) -> dict[Outcome, int]:
        """How many cells ended with each of the ten outcomes; those that nothing ended with are 0."""
        found = Counter(result.outcome for result in self.results)
        return {outcome: found[outcome] for outcome in Outcome}

    @property
    def reached(self) -> int:
        """Cells that something ran for: every result but NOT_RUN."""
        return len(self.results) - self.counts[Outcome.NOT_RUN]

    @cached_property
    def selected(self) -> tuple[ExpectedCell, ...]:
        """The planned cells that this run was asked for: all, or those that a pattern of ``only`` names."""
        if not self.only:
            return self.expected
        return tuple(cell for cell in self.expected if any(matches(pattern, cell.id) for pattern in self.only))

    @cached_property
    def lost(self) -> tuple[ExpectedCell, ...]:
        """Cells that were asked for and have no result at all, not even NOT_RUN."""
        return tuple(cell for cell in self.selected if (cell.lane, cell.id) not in self.reproducing)

    @cached_property
    def unexpected(self) -> tuple[Deviation, ...]:
        """Every reached cell that did not end as planned, in running order, then every lost one."""
        planned = {(cell.lane, cell.id): cell.outcome for cell in self.expected}
        judged = (Deviation(r.lane, r.id, planned.get((r.lane, r.id)), r) for r in self.results)
        lost = (Deviation(cell.lane, cell.id, cell.outcome, None) for cell in self.lost)
        return (*(d for d in judged if not _as_planned(d)), *lost)

    @property
    def exit_code(self) -> int:
        """0: every reached cell ended as planned; 1: one did not, or one is lost; 3: nothing was reached."""
        if self.unexpected:
            return NOT_AS_EXPECTED
        return AS_EXPECTED if self.reached else NOTHING_REACHED

    @property
    def summary(self) -> dict[str, Any]:
        """The counts that a dashboard wants without reading the cells."""
        return {
            "exit_code": self.exit_code,
            "planned": len(self.expected),
            "selected": len(self.selected),
            "reached": self.reached,
            "unexpected": len(self.unexpected),
            "lost": len(self.lost),
            "counts": {str(outcome): count for outcome, count in self.counts.items()},
        }


def _as_planned(deviation: Deviation) -> bool:
    outcome = deviation.result.outcome if deviation.result else None
    if outcome is Outcome.NOT_RUN:
        return True
    # a waiver answers for a failure where a pass was planned, never for a refusal
    waived = outcome is Outcome.WAIVED and deviation.expected is Outcome.PASS
    return deviation.expected is not None and (waived or outcome is deviation.expected)


def _refuse_twice(results: Iterable[CheckResult], source: str = "") -> None:
    twice = [cell for cell, count in Counter((r.lane, r.id) for r in results).items() if count > 1]
    if twice:
        lane, cell_id = twice[0]
        raise ReportError(f"{source}cell {cell_id} of {lane} has two results; a report holds one a cell")
