"""What a report says of a run: counts, what is not as planned, the exit code, selections."""

import pytest

from heedful.conformance.plan import Plan
from heedful.conformance.results import Outcome
from heedful.errors import ReportError
from heedful.report import Report

from .conftest import (
    FAIL,
    HARDWARE,
    NOT_RUN,
    NOT_SUPPORTED,
    PASS,
    SELECT,
    SELECTION,
    SINKS,
    WAIVED,
    cell_id,
    expected,
    report_of,
    result,
)


def test_every_outcome_is_counted_also_at_zero(report):
    assert list(report.counts) == list(Outcome)
    assert {str(k): v for k, v in report.counts.items() if v} == {
        "PASS": 2,
        "FAIL": 1,
        "NOT_SUPPORTED": 1,
        "WAIVED": 1,
        "CRASH": 1,
        "NOT_RUN": 1,
    }


def test_deviations_come_in_running_order_and_lost_cells_last(report):
    assert [(d.id, d.text) for d in report.unexpected] == [
        (cell_id("decode[bf16-d64]"), "FAIL, planned PASS"),
        (cell_id("decode[f32-d64]"), "CRASH, planned PASS"),
        (cell_id("late[bf16-d64]"), "no result, planned PASS"),
    ]
    assert report.summary == {
        "exit_code": 1,
        "planned": 8,
        "selected": 8,
        "reached": 6,
        "unexpected": 3,
        "lost": 1,
        "counts": {str(outcome): count for outcome, count in report.counts.items()},
    }


@pytest.mark.parametrize("planned", [PASS, NOT_SUPPORTED])
@pytest.mark.parametrize("outcome", list(Outcome))
def test_exit_code_of_one_cell_for_every_planned_and_real_outcome(planned, outcome):
    one = report_of([expected("a[x]", planned)], [result("a[x]", outcome)])
    as_planned = outcome is planned or (outcome is WAIVED and planned is PASS)
    assert one.exit_code == (3 if outcome is NOT_RUN else 0 if as_planned else 1)


def test_nothing_at_all_is_not_a_pass():
    assert report_of([], []).exit_code == 3
    assert report_of([expected("a[x]")], []).exit_code == 1


def test_cells_out_of_reach_do_not_hide_a_pass_nor_a_failure():
    cells = [expected("a[x]"), expected("b[x]")]
    assert report_of(cells, [result("a[x]"), result("b[x]", NOT_RUN)]).exit_code == 0
    assert report_of(cells, [result("a[x]", FAIL), result("b[x]", NOT_RUN)]).exit_code == 1


def test_a_result_that_nobody_planned_is_not_as_planned():
    report = report_of([expected("a[x]")], [result("a[x]"), result("b[x]")])
    assert [(d.id, d.text) for d in report.unexpected] == [(cell_id("b[x]"), "PASS, not planned")]


def test_one_id_in_two_lanes_is_two_cells():
    cells = [expected("a[x]"), expected("a[x]", lane="cpu.emulated")]
    report = report_of(cells, [result("a[x]")])
    assert [(d.lane, d.text) for d in report.unexpected] == [("cpu.emulated", "no result, planned PASS")]


def test_a_narrowed_run_is_partial_and_owes_only_the_cells_it_names():
    cells = [expected("decode[x]"), expected("decode[y]"), expected("prefill[x]")]
    report = report_of(cells, [result("decode[x]")], only=("*decode*",))
    assert (report.partial, len(report.expected), len(report.selected)) == (True, 3, 2)
    assert [cell.id for cell in report.lost] == [cell_id("decode[y]")]
    assert report_of(cells, [result("decode[x]")], only=(cell_id("decode[x]"),)).exit_code == 0


def test_the_selection_of_a_result_moves_to_the_selections(report):
    assert report.selections == ({"lane": SELECT, "id": cell_id("bf16", "SELECT"), **SELECTION},)
    assert all("selection" not in row.facts for row in report.results)


def test_two_results_of_one_cell_are_refused():
    with pytest.raises(ReportError, match=r"cell cpu/TORCH_SDPA/a\[x\] of cpu.hardware has two results"):
        report_of([expected("a[x]")], [result("a[x]"), result("a[x]", FAIL)])


def test_the_plan_hash_is_that_of_the_plan_and_follows_every_cell(report):
    assert report.plan_hash == Plan(report.expected).hash
    assert report.plan_hash != report_of(report.expected[1:], report.results).plan_hash


def test_each_result_has_the_line_that_reruns_it(report):
    assert report.reproducing[HARDWARE, cell_id("decode[bf16-d64]")] == (
        "heedful conform --only 'cpu/TORCH_SDPA/decode[bf16-d64]'"
    )
    assert len(report.reproducing) == len(report.results)


def test_foreign_values_in_facts_become_plain_ones():
    class Odd:
        def __str__(self):
            return "odd"

    facts = {"a": (1, 2.5), "b": {3: Odd()}, "c": {"y", "x"}, "d": float("inf"), "e": True, "f": None}
    kept = report_of([expected("a[x]")], [result("a[x]", facts=facts)]).results[0].facts
    assert kept == {"a": [1, 2.5], "b": {"3": "odd"}, "c": ["x", "y"], "d": "Infinity", "e": True, "f": None}


def test_the_public_name_is_the_model():
    assert Report.__module__ == "heedful.report.model"
    assert report_of([expected("a[x]", NOT_SUPPORTED, SINKS)], []).expected[0].reason == SINKS
