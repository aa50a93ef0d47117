"""What came of one cell: outcomes, fidelities, ids and the one matcher. Plain data, no torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from heedful.errors import NothingToRunError


class Outcome(StrEnum):
    """The ten words that a cell can end with."""

    PASS = "PASS"
    FAIL = "FAIL"
    NOT_SUPPORTED = "NOT_SUPPORTED"
    WAIVED = "WAIVED"
    XPASS = "XPASS"
    CRASH = "CRASH"
    TIMEOUT = "TIMEOUT"
    DEVICE_LOST = "DEVICE_LOST"
    INFRA_ERROR = "INFRA_ERROR"
    NOT_RUN = "NOT_RUN"


class Fidelity(StrEnum):
    """How a result was obtained; measured by the lane's probe, never taken from a flag."""

    HARDWARE = "hardware"
    EMULATED = "emulated"
    COMPILED = "compiled"


@dataclass(frozen=True)
class CheckResult:
    """One executed (or not executed) cell.

    lane: ``cpu.hardware``. id: ``<platform>/<BACKEND>/<check>[<case>]``. margins: share of the allowance that was used
    (1.0 is the limit), by measure. reason: a Reason's dict for NOT_SUPPORTED. detail: what a person reads first.
    """

    lane: str
    id: str
    outcome: Outcome
    detail: str = ""
    reason: Mapping[str, str] | None = None
    margins: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    seed: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The row kept in a report: empty fields are left out."""
        row = {"lane": self.lane, "id": self.id, "outcome": str(self.outcome), "seconds": round(self.seconds, 4)}
        extra = {"detail": self.detail, "reason": self.reason, "margins": self.margins, "seed": self.seed}
        return row | {k: v for k, v in (extra | {"facts": self.facts}).items() if v}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> CheckResult:
        """Inverse of to_dict."""
        return cls(**{**row, "outcome": Outcome(row["outcome"])})


def matches(pattern: str, cell_id: str) -> bool:
    """The one matcher of --only, waivers and matrix run: ``*`` and ``?`` are wild, everything else is literal."""
    wild = {"*": ".*", "?": "."}
    expression = "".join(wild.get(char, re.escape(char)) for char in pattern)
    return re.fullmatch(expression, cell_id, re.DOTALL) is not None


def select_ids(pattern: str, ids: Iterable[str]) -> list[str]:
    """The ids that a pattern means; one that matches nothing is an error, with the nearest ids."""
    ids = list(ids)
    chosen = [cell_id for cell_id in ids if matches(pattern, cell_id)]
    if chosen:
        return chosen
    from difflib import get_close_matches

    near = get_close_matches(pattern, ids, n=3, cutoff=0.3)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise NothingToRunError(
        f"{pattern!r} matches none of the {len(ids)} planned cells{hint}. "
        "`*` and `?` are wild, all else is literal; `heedful conform --list` prints the ids"
    )


def reproduce(cell_id: str, profile: str) -> str:
    """The one line that reruns one cell."""
    return f"heedful conform --profile {profile} --only {shlex.quote(cell_id)}"
