"""The suite's verdict on one backend, in this process: cells cheapest first, one check after the other in turn."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from heedful.conformance.plan import Lane, backend_cells
from heedful.conformance.results import Fidelity, Outcome
from heedful.conformance.worker import Order, run_cell
from heedful.types import Device
from meta.broken import spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from heedful.backends.base import AttentionBackend
    from heedful.conformance.plan import PlannedCell
    from heedful.conformance.worker import Ended

CPU = Device("cpu")


@dataclass(frozen=True)
class Verdict:
    """What one planned cell ended with."""

    cell: PlannedCell
    ended: Ended

    @property
    def is_failure(self) -> bool:
        """Anything but what CAPABILITIES promise, a cell that could not run aside."""
        return self.ended.outcome not in (self.cell.expected.outcome, Outcome.NOT_RUN)

    def __str__(self) -> str:
        return f"{self.cell.expected.id}: {self.ended.outcome}, {self.ended.detail}"


def in_turn(cells: list[PlannedCell]) -> Iterator[PlannedCell]:
    """The first case of every check, then the second, and so on; refusals to prove are queues of their own.

    A check's first cases are its cheapest.
    """
    queues: dict[tuple[str, Outcome], list[PlannedCell]] = defaultdict(list)
    for cell in cells:
        queues[cell.check, cell.expected.outcome].append(cell)
    return (cell for cell in chain.from_iterable(zip_longest(*queues.values())) if cell is not None)


def verdicts(backend: type[AttentionBackend], profile: str = "ci", seed: int = 0) -> Iterator[Verdict]:
    """Every cell of the profile, judged in this process."""
    lane = Lane(Fidelity.HARDWARE, (spec(backend),), profile, CPU)
    for cell in in_turn(list(backend_cells(backend, spec(backend), "cpu", lane))):
        case = replace(cell.case, seed=cell.case.seed + seed)
        order = Order(cell.backend, cell.check, cell.module, case, reason=cell.expected.reason)
        yield Verdict(cell, run_cell(order))


def first_failure(backend: type[AttentionBackend], profile: str = "ci") -> Verdict | None:
    """The first cell that kills a backend, or None for a survivor."""
    return next((verdict for verdict in verdicts(backend, profile) if verdict.is_failure), None)
