"""Results as plain JSON rows and back: what JSON cannot say (NaN, tuples, foreign objects) gets one fixed form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from heedful.conformance.results import CheckResult


def normal(result: CheckResult) -> CheckResult:
    """The result as a report keeps it: what ``from_row(to_row(...))`` gives back is equal to it.

    The record of a selection is left out of the facts: it has a place of its own in a report.
    """
    facts = {key: value for key, value in result.facts.items() if key != "selection"}
    return replace(
        result,
        detail=str(result.detail),
        reason={str(k): str(v) for k, v in result.reason.items()} if result.reason else None,
        margins={str(name): float(value) for name, value in result.margins.items()},
        seconds=round(float(result.seconds), 4),
        facts=value_of(facts),
    )


def selection(result: CheckResult) -> dict[str, Any]:
    """The record of a selection with the cell that it belongs to."""
    return {"lane": result.lane, "id": result.id, **value_of(result.facts["selection"])}


def to_row(result: CheckResult, reproduce: str) -> dict[str, Any]:
    """The JSON row of a normal result. A margin that is no finite number becomes the word for it."""
    row = result.to_dict() | {"reproduce": reproduce}
    if result.margins:
        row["margins"] = {name: _word_or_number(value) for name, value in result.margins.items()}
    return row


def from_row(row: Mapping[str, Any]) -> CheckResult:
    """Inverse of to_row, less the reproducing line."""
    fields = {key: value for key, value in row.items() if key != "reproduce"}
    if "margins" in fields:
        fields["margins"] = {name: float(value) for name, value in fields["margins"].items()}
    return CheckResult.from_dict(fields)


def value_of(value: Any) -> Any:
    """A value as JSON can say it: containers copied, floats that JSON lacks as words, anything else by its text."""
    if isinstance(value, Mapping):
        return {str(key): value_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [value_of(item) for item in items]
    if isinstance(value, float):
        return _word_or_number(float(value))
    if value is None or isinstance(value, bool):
        return value
    return int(value) if isinstance(value, int) else str(value)


def _word_or_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
