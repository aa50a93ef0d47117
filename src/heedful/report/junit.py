"""JUnit XML, as CI servers read it: a suite a lane, a class a lane and backend, a test a cell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree

from heedful.conformance.results import CheckResult, Outcome
from heedful.report.text import backend_of, check_of, explanation, one_line, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from xml.etree.ElementTree import Element

    from heedful.report.model import Deviation, Report

_ERRORS: Final = (Outcome.CRASH, Outcome.TIMEOUT, Outcome.DEVICE_LOST, Outcome.INFRA_ERROR)
"""JUnit's word for a test that did not come to a verdict; every other deviation is a failure."""


def render(report: Report) -> str:
    """The report as one JUnit document. Cells that --only left out are not in it; lost cells are errors."""
    root = ElementTree.Element("testsuites", name="heedful")
    deviations = {(d.lane, d.id): d for d in report.unexpected}
    for lane in dict.fromkeys([cell.lane for cell in report.selected] + [r.lane for r in report.results]):
        root.append(_suite(report, lane, deviations))
    _count(root, list(root))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _suite(report: Report, lane: str, deviations: Mapping[tuple[str, str], Deviation]) -> Element:
    suite = ElementTree.Element("testsuite", name=printable(lane), timestamp=report.provenance.started.rstrip("Z"))
    suite.append(_properties(_facts(report, lane)))
    for result in report.results:
        if result.lane == lane:
            again = report.reproducing[result.lane, result.id]
            suite.append(_case(result, deviations.get((lane, result.id)), again))
    for cell in report.lost:
        if cell.lane == lane:
            suite.append(_lost(deviations[lane, cell.id]))
    _count(suite, suite.findall("testcase"))
    return suite


def _facts(report: Report, lane: str) -> dict[str, str]:
    made = report.provenance
    return {
        "heedful.version": made.heedful,
        "heedful.commit": f"{made.commit or 'none'}{' (dirty)' if made.dirty else ''}",
        "heedful.plan_hash": report.plan_hash,
        "heedful.profile": report.profiles.get(lane, ""),
        "heedful.partial": " ".join(report.only) if report.partial else "no",
        "device": f"{made.device} {made.device_name}".strip(),
        "cpu": made.cpu,
        "torch": made.torch,
        "image": made.place,
    }


def _properties(facts: Mapping[str, str]) -> Element:
    element = ElementTree.Element("properties")
    for name, value in facts.items():
        ElementTree.SubElement(element, "property", name=printable(name), value=printable(value))
    return element


def _case(result: CheckResult, deviation: Deviation | None, again: str) -> Element:
    case = _testcase(result.lane, result.id, result.seconds)
    facts = {f"margin.{measure}": f"{value:.4g}" for measure, value in result.margins.items()}
    case.append(_properties({"outcome": result.outcome, **facts, "reproduce": again}))
    if deviation is not None:
        case.append(_wrong(deviation, result, again))
    elif result.outcome is not Outcome.PASS:
        ElementTree.SubElement(case, "skipped", type=result.outcome, message=_why(result))
    return case


def _testcase(lane: str, cell_id: str, seconds: float) -> Element:
    classname = f"{lane}.{backend_of(cell_id)}"
    name = printable(check_of(cell_id))
    return ElementTree.Element("testcase", classname=printable(classname), name=name, time=f"{seconds:.3f}")


def _wrong(deviation: Deviation, result: CheckResult, again: str) -> Element:
    tag = "error" if result.outcome in _ERRORS else "failure"
    message = f"{deviation.text}: {explanation(result.reason, result.detail)}"
    element = ElementTree.Element(tag, type=result.outcome, message=message)
    element.text = printable(f"{result.detail}\n\nreproduce: {again}".lstrip())
    return element


def _why(result: CheckResult) -> str:
    return f"{result.outcome}: {explanation(result.reason, result.detail)}"


def _lost(deviation: Deviation) -> Element:
    case = _testcase(deviation.lane, deviation.id, 0.0)
    message = one_line(f"{deviation.text}: the run ended before this cell")
    ElementTree.SubElement(case, "error", type="LOST", message=message)
    return case


def _count(element: Element, children: Iterable[Element]) -> None:
    """The totals of a suite from its cases, or of the document from its suites."""
    children = list(children)
    cases = [case for child in children for case in child.iter("testcase")]
    totals = {"tests": len(cases)}
    for word, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        totals[word] = sum(case.find(tag) is not None for case in cases)
    for word, total in totals.items():
        element.set(word, str(total))
    element.set("time", f"{sum(float(case.get('time', '0')) for case in cases):.3f}")
