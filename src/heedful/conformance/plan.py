"""What is expected to run, as data: rows of the matrix in, a Plan with a hash out. Pure; no torch, no YAML."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heedful.conformance.results import Fidelity, Outcome
from heedful.types import Device, SelectionRequest


@dataclass(frozen=True)
class Lane:
    """One fidelity at which a row can be proven, and what runs there."""

    fidelity: Fidelity
    backends: tuple[str, ...]
    profile: str


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


def plan(rows: Sequence[Row]) -> Plan:
    """Expected cells of every lane: its backends x checks x cases of its profile, then the row's selections."""
    raise NotImplementedError  # replaced by the conformance work of this same change set
