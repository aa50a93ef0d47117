"""The suite's verdict on one backend, in this process: cells cheapest first, one check after the other in turn."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from heedful.conformance.batch import Batch
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

    @property
    def id(self) -> str:
        """``check[case]``."""
        return self.cell.expected.id.split("/", 2)[2]

    def __str__(self) -> str:
        return f"{self.cell.expected.id}: {self.ended.outcome}, {self.ended.detail}"


def planned(backend: type[AttentionBackend], profile: str, name: str | None = None) -> list[PlannedCell]:
    """The cells of a profile; name: a registered name where the backend has one."""
    lane = Lane(Fidelity.HARDWARE, (name or spec(backend),), profile, CPU)
    return list(backend_cells(backend, name or spec(backend), "cpu", lane))


def in_turn(cells: list[PlannedCell]) -> Iterator[PlannedCell]:
    """The first case of every check, then the second, and so on; refusals to prove are queues of their own.

    A check's first cases are its cheapest.
    """
    queues: dict[tuple[str, Outcome], list[PlannedCell]] = defaultdict(list)
    for cell in cells:
        queues[cell.check, cell.expected.outcome].append(cell)
    return (cell for cell in chain.from_iterable(zip_longest(*queues.values())) if cell is not None)


def judged(cell: PlannedCell, seed: int = 0) -> Verdict:
    """Run one cell here."""
    case = replace(cell.case, seed=cell.case.seed + seed)
    return Verdict(cell, run_cell(Order(cell.backend, cell.check, cell.module, case, reason=cell.expected.reason)))


def first_failure(backend: type[AttentionBackend], hint: str = "") -> Verdict | None:
    """The first cell of ``ci`` that kills a backend, or None for a survivor. hint: the cell to begin with."""
    cells = planned(backend, "ci")
    hinted = [cell for cell in cells if hint and cell.expected.id.endswith(f"/{hint}")]
    verdicts = (judged(cell) for cell in chain(hinted, in_turn(cells)))
    return next((verdict for verdict in verdicts if verdict.is_failure), None)


def failures(backend: type[AttentionBackend], profile: str, seed: int = 0, name: str | None = None) -> list[str]:
    """Every cell of a profile that is not as planned, in words; NOT_RUN counts too."""
    found = [judged(cell, seed) for cell in planned(backend, profile, name)]
    assert found, f"{backend.name} has no cell in {profile}"
    return [str(verdict) for verdict in found if verdict.ended.outcome != verdict.cell.expected.outcome]


def kills(backend: type[AttentionBackend]) -> dict[str, Any]:
    """What the whole of ``ci`` makes of a backend: cells and failing cells by check, in smoke alone, the cheapest kill.

    Cells without a verdict (NOT_RUN) are counted as run and not as failing.
    """
    asked, failing, in_smoke, cheapest = Counter(), Counter(), 0, ("", float("inf"))
    smoke = {cell.expected.id for cell in planned(backend, "smoke")}
    for verdict in map(judged, planned(backend, "ci")):
        asked[verdict.cell.check] += 1
        if verdict.is_failure:
            failing[verdict.cell.check] += 1
            in_smoke += verdict.cell.expected.id in smoke
            cheapest = min(cheapest, (verdict.id, verdict.ended.seconds), key=lambda found: found[1])
    checks = {check: [count, asked[check]] for check, count in sorted(failing.items())}
    return {"cells": asked.total(), "smoke": in_smoke, "checks": checks, "cheapest": cheapest[0]}


@contextmanager
def shared_answers() -> Iterator[None]:
    """Inside, the reference answers each different batch once: what a backend is does not change what is right."""
    answers: dict[bytes, Any] = {}
    compute = Batch.expected

    def expected(batch: Batch) -> Any:
        key = _fingerprint(batch)
        if key not in answers:
            answers[key] = compute(batch)
        return answers[key]

    with mock.patch.object(Batch, "expected", expected):
        yield


def _fingerprint(batch: Batch) -> bytes:
    """Over every number that the answer depends on."""
    found = hashlib.blake2b(repr(asdict(batch.case)).encode())
    layer = vars(batch.layer).values()
    for x in (batch.query, batch.key, batch.value, *(batch.pages or ()), *vars(batch.metadata).values(), *layer):
        if isinstance(x, torch.Tensor):
            found.update(str(x.shape).encode() + x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif not isinstance(x, dict):
            found.update(repr(x).encode())
    return found.digest()
