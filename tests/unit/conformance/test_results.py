"""Outcomes, ids, waivers: plain data and the one matcher."""

from datetime import date

import pytest

from heedful.conformance.results import CheckResult, Outcome, Waiver, matches, reproduce, select_ids, waive
from heedful.errors import BadInputError, NothingToRunError

ID = "cpu/TORCH_SDPA/lse_agrees[f32-h4k2-d64-b16-mixed-normal]"
TODAY = date(2026, 12, 1)


def waiver(**changes):
    plain = {
        "pattern": "cpu/TORCH_SDPA/lse*",
        "outcome": Outcome.FAIL,
        "reason": "kernel bug",
        "owner": "ada",
        "issue": "tracker#7",
        "expires": "2026-12-31",
    }
    return Waiver(**{**plain, **changes})


def result(outcome, **changes):
    return CheckResult(lane="cpu.hardware", id=ID, outcome=outcome, **changes)


def test_brackets_are_literal_and_stars_are_wild():
    assert matches(ID, ID)
    assert matches("cpu/*/lse_agrees[*]", ID)
    assert not matches("cpu/TORCH_SDPA/lse_agree?[f]", ID)
    assert not matches("lse_agrees", ID)


def test_a_glob_that_matches_nothing_is_an_error_with_near_misses():
    with pytest.raises(NothingToRunError, match="matches none of the 1 planned cells") as error:
        select_ids(ID.replace("lse", "lsse"), [ID])
    assert f"nearest: {ID}" in str(error.value)


def test_selected_ids_keep_running_order():
    assert select_ids("a*", ["a2", "b", "a1"]) == ["a2", "a1"]


def test_the_reproducing_line_survives_a_shell():
    assert reproduce(ID, "ci") == f"heedful conform --profile ci --only '{ID}'"


def test_a_result_survives_its_record():
    kept = result(Outcome.FAIL, detail="off", margins={"max": 2.5}, seconds=0.5, seed=3, facts={"a": [1]})
    assert CheckResult.from_dict(kept.to_dict()) == kept


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Outcome.FAIL, Outcome.WAIVED),
        (Outcome.PASS, Outcome.XPASS),
        (Outcome.CRASH, Outcome.CRASH),
        (Outcome.NOT_SUPPORTED, Outcome.NOT_SUPPORTED),
        (Outcome.NOT_RUN, Outcome.NOT_RUN),
    ],
)
def test_a_waiver_covers_its_outcome_and_nothing_else(before, after):
    assert waive(result(before), [waiver()], TODAY).outcome == after


def test_a_waiver_of_other_cells_changes_nothing():
    kept = result(Outcome.FAIL)
    assert waive(kept, [waiver(pattern="cpu/TORCH_SDPA/other*")], TODAY) is kept


def test_an_expired_waiver_no_longer_covers_and_says_so():
    last_day = waive(result(Outcome.FAIL), [waiver(expires="2026-12-01")], TODAY)
    day_after = waive(result(Outcome.FAIL, detail="off"), [waiver(expires="2026-11-30")], TODAY)
    assert last_day.outcome == Outcome.WAIVED
    assert day_after.outcome == Outcome.FAIL
    assert "expired on 2026-11-30" in day_after.detail


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outcome": Outcome.NOT_RUN}, "only FAIL, CRASH, TIMEOUT can be waived"),
        ({"owner": " "}, "says nothing for owner"),
        ({"expires": "soon"}, "give a date YYYY-MM-DD"),
    ],
)
def test_a_waiver_that_means_nothing_is_refused(changes, message):
    with pytest.raises(BadInputError, match=message):
        waiver(**changes)
