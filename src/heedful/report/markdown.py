"""Markdown for people: the verdict first, then what is not as planned, then what the claims rest on."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from heedful.conformance.results import FIGURES, Outcome
from heedful.report.sections import Section, code, fenced, table
from heedful.report.text import backend_of, check_of, explanation, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from heedful.conformance.results import CheckResult
    from heedful.report.model import Deviation, Report

LIMIT: Final = 1_000_000
"""Bytes. A GitHub step summary is dropped whole when it passes 1 MiB (1,048,576 bytes)."""
_UNEXPECTED: Final = "Not as planned"
_FAILURES_SHARE: Final = 0.6
"""Of the room: however many cells failed, the selections and margins are still shown."""


def render(report: Report, limit: int = LIMIT) -> str:
    """The report as one Markdown document. Rows past ``limit`` bytes are cut, and counted where they were cut.

    Headings and counts always stand, so the text may pass the limit by a few thousand bytes, never by more.
    """
    head = _verdict(report)
    # in the order in which they are read, and the rank by which they get their room
    ranked = (
        (0, _counts(report)),
        (2, _lanes(report)),
        (3, _unexpected(report)),
        (4, _waived(report)),
        (5, _selections(report)),
        (6, _margins(report)),
        (7, _grouped(report, Outcome.NOT_SUPPORTED, "Not supported")),
        (8, _grouped(report, Outcome.NOT_RUN, "Not run")),
        (9, _figures(report)),
        (1, _provenance(report)),
    )
    room = limit - len(head.encode())
    fitted: dict[int, str] = {}
    for rank, section in sorted(((r, s) for r, s in ranked if s is not None), key=lambda entry: entry[0]):
        share = _FAILURES_SHARE if section.title == _UNEXPECTED else 1.0
        fitted[rank] = section.fit(int(room * share))
        room -= len(fitted[rank].encode()) + 1
    return "\n".join([head, *(fitted[rank] for rank, _ in ranked if rank in fitted)])


def _verdict(report: Report) -> str:
    lines = ["# heedful conformance report", "", f"**{_sentence(report)}**"]
    if report.partial:
        asked = ", ".join(code(pattern) for pattern in report.only[:20])
        more = f" and {len(report.only) - 20} more patterns" if len(report.only) > 20 else ""
        part = f"{len(report.selected)} of {len(report.expected)} planned cells"
        lines += ["", f"Partial: narrowed to {asked}{more}. It proves only {part}."]
    return "\n".join([*lines, ""])


def _sentence(report: Report) -> str:
    if not report.reached and not report.unexpected:
        return f"NOTHING REACHED: none of {len(report.selected)} cells could run."
    ran = f"{report.reached} of {len(report.selected)} cells ran"
    wrong = len(report.unexpected)
    if report.unexpected:
        lost = f", {len(report.lost)} of them without a result" if report.lost else ""
        return f"NOT AS PLANNED: {wrong} cell{'' if wrong == 1 else 's'}{lost}; {ran}."
    return f"AS PLANNED: {ran}, and each ended as planned."


def _counts(report: Report) -> Section:
    rows = [(str(outcome), str(count)) for outcome, count in report.counts.items()]
    if report.lost:
        rows.append(("no result", str(len(report.lost))))
    return table("Outcomes", ("outcome", "#cells"), rows)


def _lanes(report: Report) -> Section:
    planned = Counter((cell.lane, backend_of(cell.id)) for cell in report.expected)
    asked = Counter((cell.lane, backend_of(cell.id)) for cell in report.selected)
    ran = Counter((r.lane, backend_of(r.id)) for r in report.results if r.outcome is not Outcome.NOT_RUN)
    wrong = Counter((d.lane, backend_of(d.id)) for d in report.unexpected)

    def cells(group: tuple[str, str]) -> tuple[str, ...]:
        lane, backend = group
        counts = (str(count[group]) for count in (planned, asked, ran, wrong))
        return (code(lane), code(backend), code(report.profiles.get(lane, "")), *counts)

    columns = ("lane", "backend", "profile", "#planned", "#asked for", "#ran", "#not as planned")
    return table("Planned and run", columns, list(dict.fromkeys([*planned, *ran, *wrong])), cells)


def _unexpected(report: Report) -> Section | None:
    if not report.unexpected:
        return None
    return Section(_UNEXPECTED, (), report.unexpected, partial(_deviation, report))


def _deviation(report: Report, deviation: Deviation) -> str:
    blocks = [f"### {code(deviation.id, 300)}", "", f"{deviation.text}, in {code(deviation.lane)}.", ""]
    blocks += [fenced(_detail(deviation)), ""]
    if again := report.reproducing.get((deviation.lane, deviation.id)):
        blocks += [fenced(again, "sh"), ""]
    return "\n".join(blocks)


def _detail(deviation: Deviation) -> str:
    result = deviation.result
    if result is None:
        return "the run ended before this cell"
    return result.detail if result.detail.strip() else explanation(result.reason, "")


def _waived(report: Report) -> Section | None:
    results = [result for result in report.results if result.outcome is Outcome.WAIVED]
    if not results:
        return None
    terms = ("reason", "owner", "issue", "expires")

    def cells(result: CheckResult) -> tuple[str, ...]:
        return (code(result.id), *(code(str(_waiver(result).get(term, ""))) for term in terms))

    return table("Waived", ("cell", *terms), results, cells)


def _waiver(result: CheckResult) -> Mapping[str, Any]:
    waiver = result.facts.get("waiver")
    return waiver if isinstance(waiver, dict) else {}


def _selections(report: Report) -> Section | None:
    if not report.selections:
        return None
    columns = ("selection", "device", "chosen", "by", "refused, and why")
    return table("Selections", columns, report.selections, _selection)


def _selection(record: Mapping[str, Any]) -> tuple[str, ...]:
    chosen = code(record["backend"] or "none")
    by = code(f"{record['chosen_by']} ({record['policy']})")
    return (code(check_of(record["id"])), code(record["device"]), chosen, by, _refused(record["candidates"]))


def _refused(candidates: Iterable[Mapping[str, Any]]) -> str:
    told = []
    for candidate in candidates:
        codes = dict.fromkeys(str(reason.get("code", "?")) for reason in candidate["reasons"])
        if codes:
            told.append(code(f"{candidate['backend']}: {', '.join(codes)}"))
    return " ".join(told[:20]) or "–"


def _margins(report: Report) -> Section | None:
    worst: dict[tuple[str, str], tuple[float, float, str, str]] = {}
    for result in report.results:
        group = (backend_of(result.id), _dtype(result.id))
        for measure, value in result.margins.items():
            rank = math.inf if math.isnan(value) else value
            if group not in worst or rank > worst[group][0]:
                worst[group] = (rank, value, measure, check_of(result.id))
    if not worst:
        return None

    def cells(group: tuple[str, str]) -> tuple[str, ...]:
        _, value, measure, check = worst[group]
        return (code(group[0]), code(group[1]), f"{value:.3g}", code(measure), code(check))

    intro = ("The largest error of each backend and dtype, as a share of what is allowed. 1 is the limit.",)
    return table("Margins", ("backend", "dtype", "#worst", "of", "in"), sorted(worst), cells, intro)


def _dtype(cell_id: str) -> str:
    """A case's id starts with the word for its dtype."""
    return cell_id.partition("[")[2].partition("-")[0].rstrip("]")


def _figures(report: Report) -> Section | None:
    """A row a kernel build, a column a figure."""
    results = [result for result in report.results if isinstance(result.facts.get(FIGURES), dict)]
    if not results:
        return None
    names = list(dict.fromkeys(name for result in results for name in result.facts[FIGURES]))

    def cells(result: CheckResult) -> tuple[str, ...]:
        figures = result.facts[FIGURES]
        told = (f"{figures[name]:,.10g}" if isinstance(figures.get(name), int | float) else "–" for name in names)
        return (code(result.id), *told, f"{result.seconds:.2f}")

    columns = ("build", *(f"#{printable(name)}" for name in names), "#seconds")
    return table("Builds", columns, results, cells)


def _grouped(report: Report, outcome: Outcome, title: str) -> Section | None:
    results = [result for result in report.results if result.outcome is outcome]
    if not results:
        return None
    counts = Counter((r.lane, backend_of(r.id), explanation(r.reason, r.detail)) for r in results)

    def cells(group: tuple[str, str, str]) -> tuple[str, ...]:
        return (*map(code, group), str(counts[group]))

    groups = [group for group, _ in counts.most_common()]
    return table(title, ("lane", "backend", "reason", "#cells"), groups, cells)


def _provenance(report: Report) -> Section:
    facts = [(name, code(value, 500)) for name, value in _facts(report) if value]
    return table("Provenance", ("fact", "value"), facts)


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    made = report.provenance
    simulated = " (simulated)" if made.simulated else ""
    yield "heedful", made.heedful
    yield "commit", f"{made.commit}{', with changes' if made.dirty else ''}" if made.commit else "not from a checkout"
    yield "device", f"{made.device} {made.device_name}".strip() + simulated
    yield "processor", f"{made.cpu}, {made.cores} cores, {made.machine}"
    yield "system", f"{made.os}, {made.kernel}"
    yield "ran on", made.place
    yield "Python", made.python
    yield "torch", made.torch
    yield "packages", f"{len(made.packages)}, listed in the JSON report"
    yield "command", shlex.join(made.command)
    yield "seeds", ", ".join(map(str, made.seeds))
    yield "environment", " ".join(f"{name}={value}" for name, value in made.environment.items())
    yield "time", f"{made.started} to {made.finished}"
    yield "seconds in cells", f"{sum(result.seconds for result in report.results):.1f}"
    yield "plan", report.plan_hash
