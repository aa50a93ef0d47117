"""Runs planned cells without pytest: every one of them ends with exactly one result, whatever the cell does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from heedful.conformance.cases import Case
from heedful.conformance.plan import (
    Lane,
    Plan,
    Row,
    backend_cells,
    kernel_cells,
    lane_name,
    selection_id,
    selection_lane,
)
from heedful.conformance.pool import Workers
from heedful.conformance.results import CheckResult, Fidelity, Outcome, select_ids, waive
from heedful.conformance.selections import judge_selection
from heedful.conformance.worker import Ended, Order
from heedful.errors import BadInputError, NothingToRunError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from heedful.backends.base import AttentionBackend
    from heedful.conformance.plan import ExpectedCell, ExpectedSelection, PlannedCell
    from heedful.conformance.probe import Probe
    from heedful.conformance.results import Waiver
    from heedful.types import Device


def run_conformance(
    backend: str | type[AttentionBackend],
    device: Device | None = None,
    profile: str = "ci",
    *,
    only: Sequence[str] = (),
    seed: int = 0,
    timeout: float = 60.0,
    workers: int = 1,
    waivers: Sequence[Waiver] = (),
) -> Iterator[CheckResult]:
    """One result for every cell of the profile, as they end.

    backend: a registered name, ``module:Class`` or a class that can be imported. device: this machine's if None. only:
    ids or globs. seed: added to every case's. timeout: seconds a cell may take. workers: processes at a time.
    Raises BadInputError and NothingToRunError before anything runs.
    """
    runner, cells = runner_for(backend, device, profile, Terms(seed, timeout, workers), waivers)
    return runner.results(choose(cells, only))


def run_plan(
    plan: Plan,
    rows: Sequence[Row],
    *,
    only: Sequence[str] = (),
    seed: int = 0,
    timeout: float = 60.0,
    workers: int = 1,
) -> Iterator[CheckResult]:
    """One result for every selected cell of a plan; cells of lanes out of reach are NOT_RUN with the reason.

    rows: those the plan was made of; their waivers apply. The rest is as for run_conformance.
    """
    known = {_key(cell.expected): cell for row in rows for cell in kernel_cells(row)}
    selections = {(selection_lane(r.platform), selection_id(r.platform, s)): s for r in rows for s in r.selections}
    cells = choose(plan.cells, only)
    strangers = [cell.id for cell in cells if _key(cell) not in known and _key(cell) not in selections]
    if strangers:
        raise BadInputError(f"the plan has cells that these rows do not: {', '.join(strangers[:3])}; plan them again")
    return Runner(known, selections, rows, Terms(seed, timeout, workers)).results(cells)


def runner_for(
    backend: str | type[AttentionBackend],
    device: Device | None,
    profile: str,
    terms: Terms,
    waivers: Sequence[Waiver] = (),
) -> tuple[Runner, list[ExpectedCell]]:
    """What runs the cells of one backend in the hardware lane of a device (this machine's if None), and those cells."""
    from heedful.platforms import detect
    from heedful.registry import resolve

    spec = spec_of(backend)
    here = device or detect()
    lane = Lane(Fidelity.HARDWARE, (spec,), profile, here)
    row = Row(here.platform, (lane,), waivers=tuple(waivers))
    planned = list(backend_cells(resolve(spec), spec, here.platform, lane))
    known = {_key(cell.expected): cell for cell in planned}
    return Runner(known, {}, (row,), terms), [cell.expected for cell in planned]


def spec_of(backend: str | type[AttentionBackend]) -> str:
    """The name by which a worker process finds the backend; BadInputError for a class that cannot be imported."""
    if isinstance(backend, str):
        return backend
    import sys

    module = sys.modules.get(backend.__module__)
    names = [name for name, value in vars(module).items() if value is backend] if module else []
    if not names:
        raise BadInputError(
            f"{backend.__qualname__} cannot be imported from {backend.__module__}, so no worker process can load it; "
            "define it at the top level of a module, or give 'module:Class'"
        )
    return f"{backend.__module__}:{names[0]}"


@dataclass(frozen=True)
class Terms:
    """How to run: seed added to every case's, seconds a cell may take, processes at a time."""

    seed: int = 0
    timeout: float = 60.0
    workers: int = 1

    def __post_init__(self) -> None:
        if not __debug__:
            raise BadInputError("python -O takes the assertions out of the checks; run without -O")
        if self.workers < 1 or not 0 < self.timeout < float("inf"):
            raise BadInputError(f"workers {self.workers} must be 1 or more, timeout {self.timeout} positive seconds")


Key = tuple[str, str]


def _key(cell: ExpectedCell) -> Key:
    return cell.lane, cell.id


def choose(cells: Sequence[ExpectedCell], only: Sequence[str]) -> list[ExpectedCell]:
    """The cells that any pattern means, in running order; a pattern that means none is an error."""
    if not cells:
        raise NothingToRunError("the plan has no cells; a run of nothing proves nothing")
    if not only:
        return list(cells)
    ids = {cell_id for pattern in only for cell_id in select_ids(pattern, [cell.id for cell in cells])}
    return [cell for cell in cells if cell.id in ids]


@dataclass
class Runner:
    """Runs expected cells whose planned cells or selections it knows. making: what makes the worker processes."""

    known: Mapping[Key, PlannedCell]
    selections: Mapping[Key, ExpectedSelection]
    rows: Sequence[Row]
    terms: Terms
    making: Callable[[int, float], Workers] = Workers

    def results(self, cells: Sequence[ExpectedCell]) -> Iterator[CheckResult]:
        """One result a cell, lane by lane in the plan's order."""
        with self.making(self.terms.workers, self.terms.timeout) as workers:
            for lane in dict.fromkeys(cell.lane for cell in cells):
                yield from self.lane([cell for cell in cells if cell.lane == lane], workers)

    def lane(self, cells: Sequence[ExpectedCell], workers: Workers) -> Iterator[CheckResult]:
        """One result for each of some cells of one lane, under the rows' waivers."""
        waivers, today = [w for row in self.rows for w in row.waivers], datetime.now(UTC).date()
        return (waive(result, waivers, today) for result in self._lane(cells[0].lane, cells, workers))

    def _lane(self, lane: str, cells: Sequence[ExpectedCell], workers: Workers) -> Iterator[CheckResult]:
        lanes = {
            lane_name(row.platform, lane): (row.platform, lane.fidelity) for row in self.rows for lane in row.lanes
        }
        if lane not in lanes:
            yield from (judge_selection(cell, self.selections[_key(cell)]) for cell in cells)
            return
        platform, fidelity = lanes[lane]
        found = workers.probe(platform, fidelity)
        if found.fidelity != fidelity:
            text = found.text or f"this machine proves {platform} as {found.fidelity}, the lane asks for {fidelity}"
            outcome = Outcome.INFRA_ERROR if found.broken else Outcome.NOT_RUN
            yield from (CheckResult(lane, cell.id, outcome, text) for cell in cells)
            return
        yield from self._cells(cells, workers, found, lambda: workers.probe(platform, fidelity))

    def _cells(
        self, cells: Sequence[ExpectedCell], workers: Workers, found: Probe, probe: Callable[[], Probe]
    ) -> Iterator[CheckResult]:
        """Run them; after a crash the lane's probe must still answer, or the rest of the lane is not run."""
        orders = [self._order(cell, found.device) for cell in cells]
        running = workers.run(orders)
        for index, (cell, (_, ended)) in enumerate(zip(cells, running, strict=False)):
            if ended.outcome == Outcome.CRASH and (again := probe()).fidelity != found.fidelity:
                lost = replace(ended, outcome=Outcome.DEVICE_LOST, detail=f"{ended.detail}; then: {again.text}")
                yield self._result(cell, lost)
                text = f"the device was lost in {cell.id}"
                yield from (CheckResult(c.lane, c.id, Outcome.NOT_RUN, text) for c in cells[index + 1 :])
                return
            yield self._result(cell, ended)

    def _order(self, cell: ExpectedCell, device: str) -> Order:
        planned = self.known[_key(cell)]
        case = planned.case
        if isinstance(case, Case):
            case = replace(case, seed=case.seed + self.terms.seed)
        return Order(planned.backend, planned.check, planned.module, case, device, cell.reason)

    def _result(self, cell: ExpectedCell, ended: Ended) -> CheckResult:
        case = self.known[_key(cell)].case
        return CheckResult(
            lane=cell.lane,
            id=cell.id,
            outcome=ended.outcome,
            detail=ended.detail,
            reason=cell.reason if ended.outcome == Outcome.NOT_SUPPORTED else None,
            margins=ended.margins,
            seconds=ended.seconds,
            seed=case.seed + self.terms.seed if isinstance(case, Case) else 0,
            facts=ended.facts,
        )
