"""The suite fails every broken backend in profile `ci`, and for no other reason than that it is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heedful.conformance.results import Outcome
from meta.broken import VARIANTS
from meta.judge import first_failure, in_turn, planned
from meta.plain import Plain

KILLS = json.loads((Path(__file__).parent / "kills.json").read_text())
"""The kill table; its cheapest kills are only where a run begins, so a stale one costs time and nothing else."""


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_suite_fails_the_variant(variant):
    hint = KILLS.get(variant.name, {}).get("cheapest", "")
    verdict = first_failure(variant, hint)
    assert verdict is not None, f"{variant.name} survives: {variant.__doc__} Which check is missing?"
    assert verdict.ended.outcome == Outcome.FAIL, str(verdict)
    assert verdict.ended.detail, "a failure must say what is wrong"


def test_cells_in_turn_are_all_cells_and_every_check_comes_early():
    cells = planned(Plain, "ci")
    turned = list(in_turn(cells))
    assert sorted(c.expected.id for c in turned) == sorted(c.expected.id for c in cells)
    checks = {cell.check for cell in cells}
    assert {cell.check for cell in turned[: 2 * len(checks)]} == checks


def test_kill_table_leaves_no_variant_alive():
    assert [name for name in VARIANTS if not KILLS[name]["checks"]] == []
