"""What came of one cell: outcomes, fidelities, ids and the one matcher. Plain data, no torch."""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from heedful.errors import BadInputError, NothingToRunError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


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


FIGURES: Final = "figures"
"""The fact of a result that holds measured numbers by name, the unit at its end: ``{"temp_bytes": 4096}``."""


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


WAIVABLE: Final = (Outcome.FAIL, Outcome.CRASH, Outcome.TIMEOUT)
"""Wrong answers and deaths can be waived; a lost claim, a lost device or a missing result cannot."""


@dataclass(frozen=True)
class Waiver:
    """A known fault that someone owns: which cells (pattern), what they end with, why, who, where, until when (ISO)."""

    pattern: str
    outcome: Outcome
    reason: str
    owner: str
    issue: str
    expires: str

    def __post_init__(self) -> None:
        empty = [f.name for f in fields(self) if not str(getattr(self, f.name)).strip()]
        if empty:
            raise BadInputError(f"waiver {self.pattern!r} says nothing for {', '.join(empty)}; every field is needed")
        if self.outcome not in WAIVABLE:
            words = ", ".join(WAIVABLE)
            raise BadInputError(f"waiver {self.pattern!r} is for {self.outcome}; only {words} can be waived")
        try:
            date.fromisoformat(self.expires)
        except ValueError:
            raise BadInputError(f"waiver {self.pattern!r} expires {self.expires!r}; give a date YYYY-MM-DD") from None

    def expired(self, today: date) -> bool:
        """A waiver holds up to and on its last day."""
        return today > date.fromisoformat(self.expires)

    def to_dict(self) -> dict[str, str]:
        """The record kept in a result."""
        return {name: str(value) for name, value in asdict(self).items()}


def waive(result: CheckResult, waivers: Sequence[Waiver], today: date) -> CheckResult:
    """The result under its waiver: the waived outcome is WAIVED, a pass is XPASS, anything else stands as it is."""
    waiver = next((w for w in waivers if matches(w.pattern, result.id)), None)
    if waiver is None or result.outcome not in (waiver.outcome, Outcome.PASS):
        return result
    facts = {**result.facts, "waiver": waiver.to_dict()}
    if result.outcome == Outcome.PASS:
        text = f"passes, but {waiver.owner} waives {waiver.outcome} here ({waiver.issue}); remove the waiver"
        return replace(result, outcome=Outcome.XPASS, detail=text, facts=facts)
    if waiver.expired(today):
        text = f"{result.detail}\nits waiver ({waiver.issue}, {waiver.owner}) expired on {waiver.expires}"
        return replace(result, detail=text, facts=facts)
    return replace(result, outcome=Outcome.WAIVED, facts=facts)


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
