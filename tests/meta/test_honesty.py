"""The suite's own honesty: what did not run did not pass, what is claimed must come, what is refused must be proven."""

from __future__ import annotations

from collections import Counter

import pytest

from heedful.conformance import run_conformance
from heedful.conformance.results import Outcome
from heedful.errors import HeedfulError, NothingToRunError
from heedful.types import Device
from meta import liars
from meta.judge import judged, planned
from meta.plain import Plain

CPU = Device("cpu")
FORM = ("*pad_rows_are_zero[*", "*the_flat_form*")


def outcomes(backend, check="output_agrees_with_reference"):
    """(expected, found) of the cells of one check in smoke, counted."""
    cells = [cell for cell in planned(backend, "smoke") if cell.check == check]
    found = [(str(cell.expected.outcome), str(judged(cell).ended.outcome)) for cell in cells]
    assert found
    return Counter(found)


def test_claiming_everything_and_refusing_it_fails_every_promised_cell():
    counted = outcomes(liars.ClaimsEverythingRefusesEverything)
    assert counted["PASS", "FAIL"] > 100
    assert ("PASS", "PASS") not in counted
    assert ("PASS", "NOT_SUPPORTED") not in counted


def test_claiming_nothing_and_computing_fails_as_refusals_without_proof():
    counted = outcomes(liars.ClaimsNothingComputesEverything)
    assert counted["NOT_SUPPORTED", "FAIL"] > 100
    assert not any("PASS" in pair for pair in counted)


def test_claiming_nothing_and_refusing_passes_nothing():
    counted = outcomes(liars.ClaimsNothingRefusesEverything)
    assert set(counted) == {("NOT_SUPPORTED", "NOT_SUPPORTED")}


def test_refusal_for_another_reason_than_predicted_is_no_proof():
    assert outcomes(liars.RefusesForTheWrongReason)["NOT_SUPPORTED", "FAIL"] > 0


def test_falling_over_is_no_refusal():
    assert outcomes(liars.RefusesWithAnyError)["NOT_SUPPORTED", "FAIL"] > 0


def test_answering_nothing_passes_no_numeric_cell():
    for check in ("output_agrees_with_reference", "lse_agrees_with_reference", "known_answers_come_out"):
        assert ("PASS", "PASS") not in outcomes(liars.AnswersNothing, check)


def test_plain_runs_through_worker_processes_as_it_does_here():
    found = list(run_conformance(Plain, CPU, "smoke", only=FORM))
    assert len(found) > 4
    assert {result.outcome for result in found} == {Outcome.PASS}
    assert all(result.id.startswith("cpu/") for result in found)


def test_liar_fails_through_worker_processes_too():
    found = list(run_conformance(liars.ClaimsEverythingRefusesEverything, CPU, "smoke", only=FORM))
    assert {result.outcome for result in found} == {Outcome.FAIL}


def test_platform_out_of_reach_is_not_run_and_no_pass():
    found = list(run_conformance(Plain, Device("tpu"), "smoke", only=FORM))
    assert {result.outcome for result in found} == {Outcome.NOT_RUN}
    assert all(result.detail for result in found)


def test_pattern_that_means_no_cell_is_an_error():
    with pytest.raises(NothingToRunError, match="matches none"):
        list(run_conformance(Plain, CPU, "smoke", only=("*no_such_check*",)))


def test_backend_that_cannot_be_found_is_one_clear_error():
    with pytest.raises(HeedfulError, match=r"meta\.liars"):
        list(run_conformance("meta.liars:Nobody", CPU, "smoke"))
