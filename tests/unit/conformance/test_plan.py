"""Planning: a pure function from rows to expected cells, with a hash, for machines that have none of the devices."""

from dataclasses import replace

import pytest

from heedful.conformance.checklist import CHECKS, but
from heedful.conformance.plan import ExpectedCell, ExpectedSelection, Lane, Plan, Row, lane_name, plan, refusal
from heedful.conformance.results import Fidelity, Outcome
from heedful.errors import BadInputError
from heedful.registry import load
from heedful.types import Device, SelectionRequest

HARDWARE = Fidelity.HARDWARE


def row(platform="cpu", backends=("NO_ATTENTION",), profile="smoke", device=None, **rest):
    return Row(platform, (Lane(HARDWARE, backends, profile, device),), **rest)


def test_the_same_rows_give_the_same_plan_and_hash():
    first, second = plan([row(backends=("TORCH_SDPA",))]), plan([row(backends=("TORCH_SDPA",))])
    assert first == second
    assert first.hash == second.hash
    assert len(first.hash) == 64


def test_any_difference_changes_the_hash():
    plans = [plan([row()]), plan([row("cuda")]), plan([row(backends=("TORCH_SDPA",))])]
    assert len({p.hash for p in plans}) == 3


def test_ids_are_platform_backend_check_and_case():
    ids = [cell.id for cell in plan([row()]).cells]
    assert ids[0] == "cpu/NO_ATTENTION/attention_free_layers_need_no_memory[free-mixed]"


def test_one_id_may_stand_in_several_lanes():
    lanes = tuple(Lane(fidelity, ("NO_ATTENTION",), "smoke") for fidelity in (HARDWARE, Fidelity.EMULATED))
    cells = plan([Row("cpu", lanes)]).cells
    assert {cell.lane for cell in cells} == {"cpu.hardware", "cpu.emulated"}
    assert len({cell.id for cell in cells}) == len(cells) // 2


def test_what_capabilities_exclude_is_expected_as_not_supported_with_its_reason():
    cells = {cell.id: cell for cell in plan([row(backends=("TORCH_SDPA",))]).cells}
    case = but(kv_cache_dtype="u8")
    cell = cells[f"cpu/TORCH_SDPA/output_agrees_with_reference[{case.id}]"]
    assert cell.outcome == Outcome.NOT_SUPPORTED
    assert cell.reason["code"] == "KV_CACHE_DTYPE"
    assert cell.reason["asked"] == "u8"


def test_the_contract_refuses_positions_across_sequences_for_every_backend():
    cells = plan([row(backends=("TORCH_SDPA",))]).cells
    refused = [cell for cell in cells if "encoder_decoder-alibi" in cell.id or "encoder_decoder-w7" in cell.id]
    assert len(refused) == 2
    assert all(cell.reason["code"] == "FEATURE_PAIR" for cell in refused)


def test_a_backend_without_lse_is_expected_to_refuse_it():
    class Silent(load("TORCH_SDPA")):
        name = "SILENT"
        CAPABILITIES = tuple(replace(r, features=r.features - {"lse"}) for r in load("TORCH_SDPA").CAPABILITIES)

    check = next(check for check in CHECKS if check.name == "lse_agrees_with_reference")
    reason = refusal(Silent, check, but(), [Device("cpu")])
    assert reason is not None
    assert reason.to_dict()["asked"] == "lse"
    assert refusal(load("TORCH_SDPA"), check, but(), [Device("cpu")]) is None


def test_a_lane_of_a_stated_generation_expects_what_that_generation_can():
    old = plan([row("cuda", ("FLASH_ATTN",), device=Device("cuda", capability=(7, 5)))])
    new = plan([row("cuda", ("FLASH_ATTN",), device=Device("cuda", capability=(9, 0)))])
    assert {cell.outcome for cell in old.cells} == {Outcome.NOT_SUPPORTED}
    assert Outcome.PASS in {cell.outcome for cell in new.cells}


def test_a_lane_of_no_stated_generation_expects_what_any_generation_can():
    cells = plan([row("cuda", ("FLASH_ATTN",))]).cells
    assert Outcome.PASS in {cell.outcome for cell in cells}


def test_selections_follow_in_a_lane_of_their_own():
    wanted = ExpectedSelection("bf16[9.0]", SelectionRequest(128), Device("cuda", capability=(9, 0)), "FLASH_ATTN")
    cells = plan([row("cuda", selections=(wanted,))]).cells
    assert cells[-1] == ExpectedCell("cuda.select", "cuda/SELECT/bf16[9.0]", Outcome.PASS)


def test_a_cell_survives_its_record():
    for cell in plan([row(backends=("TORCH_SDPA",))]).cells:
        assert ExpectedCell.from_dict(cell.to_dict()) == cell


def test_planning_needs_a_legal_profile_and_a_known_backend():
    with pytest.raises(BadInputError, match="unknown profile"):
        plan([row(profile="quick")])
    with pytest.raises(BadInputError, match="names no attention backend"):
        plan([row(backends=("TORCH_SPDA",))])


def test_no_rows_give_an_empty_plan():
    assert plan([]) == Plan(())
    assert lane_name("xpu", Lane(Fidelity.COMPILED, (), "smoke")) == "xpu.compiled"
