"""What is expected to run, as data: rows of the matrix in, a Plan with a hash out. Pure; no torch, no YAML."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from heedful.backends.builds import CHECK as BUILD_CHECK
from heedful.backends.capabilities import row_reasons
from heedful.conformance.checklist import PROFILES, check_profile, checks_for
from heedful.conformance.results import Fidelity, Outcome, Waiver
from heedful.errors import BadInputError
from heedful.types import Device, Reason, ReasonCode, SelectionRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from heedful.backends.base import AttentionBackend
    from heedful.backends.builds import Build
    from heedful.conformance.cases import Case
    from heedful.conformance.checklist import Check

SELECT: Final = "select"


@dataclass(frozen=True)
class Lane:
    """One fidelity at which a row can be proven, and what runs there.

    device: the generation that the lane's runner has; without one, a cell is expected to pass if any generation passes.
    """

    fidelity: Fidelity
    backends: tuple[str, ...]
    profile: str
    device: Device | None = None


@dataclass(frozen=True)
class ExpectedSelection:
    """A decision that the row promises: the backend, or None and the reason codes that must be among the record's."""

    name: str
    request: SelectionRequest
    device: Device
    backend: str | None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One platform's entry of the matrix."""

    platform: str
    lanes: tuple[Lane, ...]
    selections: tuple[ExpectedSelection, ...] = ()
    waivers: tuple[Waiver, ...] = ()


@dataclass(frozen=True)
class ExpectedCell:
    """One cell and the outcome that CAPABILITIES predict: PASS, or NOT_SUPPORTED with its reason."""

    lane: str
    id: str
    outcome: Outcome
    reason: Mapping[str, str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The row kept in a report."""
        row = {"lane": self.lane, "id": self.id, "outcome": str(self.outcome)}
        return row | ({"reason": dict(self.reason)} if self.reason else {})

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> ExpectedCell:
        """Inverse of to_dict."""
        return cls(**{**row, "outcome": Outcome(row["outcome"])})


@dataclass(frozen=True)
class Plan:
    """Every expected cell, in running order."""

    cells: tuple[ExpectedCell, ...]

    @property
    def hash(self) -> str:
        """sha256 over the cells: two reports with one hash answer the same questions."""
        text = json.dumps([cell.to_dict() for cell in self.cells], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def lane_name(platform: str, lane: Lane) -> str:
    """``cpu.hardware``: the name by which results, waivers and gates know a lane."""
    return f"{platform}.{lane.fidelity}"


def selection_lane(platform: str) -> str:
    """``cpu.select``: decisions on a stated device need no lane of a fidelity; any machine can prove them."""
    return f"{platform}.{SELECT}"


def plan(rows: Sequence[Row]) -> Plan:
    """Expected cells of every lane: its backends x checks x cases of its profile, then the row's selections."""
    return Plan(tuple(cell for row in rows for cell in _row_cells(row)))


def _row_cells(row: Row) -> Iterator[ExpectedCell]:
    for planned in kernel_cells(row):
        yield planned.expected
    for selection in row.selections:
        yield ExpectedCell(selection_lane(row.platform), selection_id(row.platform, selection), Outcome.PASS)


def selection_id(platform: str, selection: ExpectedSelection) -> str:
    """``cuda/SELECT/<name>``."""
    return f"{platform}/SELECT/{selection.name}"


@dataclass(frozen=True)
class PlannedCell:
    """An expected cell together with what it takes to run it; backend is a registered name or ``module:Class``.

    case: a Build in a lane ``compiled``, else a Case.
    """

    expected: ExpectedCell
    backend: str
    check: str
    module: str
    case: Case | Build


def kernel_cells(row: Row) -> Iterator[PlannedCell]:
    """The cells of a row's lanes that run a backend."""
    from heedful.registry import resolve  # here, so that a reader of a matrix or a report needs no backend

    for lane in row.lanes:
        for name in lane.backends:
            cells = build_cells if lane.fidelity is Fidelity.COMPILED else backend_cells
            yield from cells(resolve(name), name, row.platform, lane)


def build_cells(backend: type[AttentionBackend], spec: str, platform: str, lane: Lane) -> Iterator[PlannedCell]:
    """One backend's kernel builds; a backend that declares none has nothing to prove in a lane ``compiled``."""
    check_profile(lane.profile)
    if not backend.BUILDS:
        raise BadInputError(f"{backend.name} declares no BUILDS; take it off the lane {lane_name(platform, lane)}")
    for build in backend.BUILDS:
        if PROFILES.index(build.profile) > PROFILES.index(lane.profile):
            continue
        cell_id = f"{platform}/{backend.name}/{BUILD_CHECK}[{build.id}]"
        outcome = Outcome.PASS if build.refused is None else Outcome.NOT_SUPPORTED
        record = None if build.refused is None else build.refused.to_dict()
        expected = ExpectedCell(lane_name(platform, lane), cell_id, outcome, record)
        yield PlannedCell(expected, spec, BUILD_CHECK, "checks_builds", build)


def backend_cells(backend: type[AttentionBackend], spec: str, platform: str, lane: Lane) -> Iterator[PlannedCell]:
    """One backend's cells in one lane: every check's cases, and what CAPABILITIES predict for each."""
    check_profile(lane.profile)
    devices = [lane.device] if lane.device is not None else _devices(backend, platform)

    @cache  # the search for pairs that are left open asks for the same cases again and again
    def claims(case: Case) -> bool:
        return any(not backend.unsupported_reasons(case.request(), device) for device in devices)

    for check in checks_for(backend.CAPABILITIES):
        for case in check.cases(lane.profile, claims):
            reason = refusal(backend, check, case, devices)
            outcome = Outcome.PASS if reason is None else Outcome.NOT_SUPPORTED
            cell_id = f"{platform}/{backend.name}/{check.name}[{case.id}]"
            record = None if reason is None else reason.to_dict()
            expected = ExpectedCell(lane_name(platform, lane), cell_id, outcome, record)
            yield PlannedCell(expected, spec, check.name, check.module, case)


def _devices(backend: type[AttentionBackend], platform: str) -> list[Device]:
    """A device of every generation that the backend names on the platform; the plain device if it names none."""
    named = {g for row in backend.CAPABILITIES if row.platform == platform for g in row.generations or ()}
    return [Device(platform, arch=generation) for generation in sorted(named)] or [Device(platform)]


def refusal(backend: type[AttentionBackend], check: Check, case: Case, devices: Sequence[Device]) -> Reason | None:
    """Why no device runs the case: the backend's first reason, or the feature that the check needs of it."""
    found = [_refusal_on(backend, check, case, device) for device in devices]
    return None if None in found else found[0]


def _refusal_on(backend: type[AttentionBackend], check: Check, case: Case, device: Device) -> Reason | None:
    request = case.request()
    reasons = backend.unsupported_reasons(request, device)
    if reasons:
        return reasons[0]
    rows = [row for row in backend.CAPABILITIES if row.platform == device.platform]
    fitting = [row for row in rows if not row_reasons(row, request, device)]
    if not check.needs or any(check.needs <= row.features for row in fitting):
        return None
    words = ", ".join(sorted(check.needs))
    return Reason(ReasonCode.CAPABILITY, f"{backend.name} has no {words} here", words, "what CAPABILITIES list")
