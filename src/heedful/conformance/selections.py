"""Selection is judged too: one cell for each decision that a row expects, on the device that the row states."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from heedful.conformance.results import CheckResult, Outcome

if TYPE_CHECKING:
    from heedful.conformance.plan import ExpectedCell, ExpectedSelection
    from heedful.types import Selection


def judge_selection(cell: ExpectedCell, expected: ExpectedSelection) -> CheckResult:
    """Decide, blind to this machine's environment, and compare; the result carries the decision's whole record."""
    from heedful.selector import STRICT, decide

    began = time.perf_counter()
    selection = decide(expected.request, expected.device, STRICT)
    wrong = _difference(selection, expected)
    return CheckResult(
        lane=cell.lane,
        id=cell.id,
        outcome=Outcome.FAIL if wrong else Outcome.PASS,
        detail=wrong,
        seconds=time.perf_counter() - began,
        facts={"selection": selection.to_dict()},
    )


def _difference(selection: Selection, expected: ExpectedSelection) -> str:
    if selection.backend != expected.backend:
        found, wanted = selection.backend or "no backend", expected.backend or "no backend"
        return f"{found} was chosen on {expected.device}, the row expects {wanted}\n{selection}"
    codes = {str(reason.code) for candidate in selection.candidates for reason in candidate.reasons}
    missing = [code for code in expected.reasons if code not in codes]
    if missing:
        return f"nothing was refused for {', '.join(missing)} on {expected.device}, as the row expects\n{selection}"
    return ""
