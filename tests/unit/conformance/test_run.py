"""The runner: every cell ends with one result, whatever it does to its process; all ten outcomes can be reached."""

from dataclasses import replace
from pathlib import Path

import pytest

from heedful.conformance.plan import ExpectedSelection, Lane, Row, kernel_cells, plan
from heedful.conformance.pool import Workers
from heedful.conformance.probe import Probe
from heedful.conformance.results import Fidelity, Outcome, Waiver
from heedful.conformance.run import Runner, Terms, choose, run_conformance, run_plan, runner_for, spec_of
from heedful.errors import BadInputError, NothingToRunError
from heedful.types import Device, SelectionRequest

CPU = Device("cpu")
UNRULY = "unruly:Unruly"
PADS = "*pad_rows_are_zero[*"
"""Three cells: decoder passes, encoder-only dies, cross attention hangs."""

FLAT = "*the_flat_form*"
"""Four cells: two of decoder pass, encoder-only dies, encoder is wrong."""


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Workers find the backend of unruly.py."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def results(backend=UNRULY, **options):
    return list(run_conformance(backend, CPU, "smoke", **options))


def outcomes(found):
    return [str(result.outcome) for result in found]


def waiver(pattern, outcome):
    return Waiver(pattern, outcome, "known", "ada", "tracker#1", "2999-01-01")


def test_a_crash_and_a_hang_cost_one_cell_each():
    found = results(only=(PADS, FLAT), timeout=8.0, workers=2)
    assert outcomes(found) == ["PASS", "CRASH", "TIMEOUT", "PASS", "CRASH", "FAIL", "PASS"]
    assert "SIGSEGV" in found[1].detail
    assert "no end after 8 s" in found[2].detail
    assert "rms error" in found[5].detail
    assert found[5].margins["rms"] > 1


@pytest.mark.parametrize(
    ("death", "told"),
    [("exit", "exit code 3"), ("exit0", "exit code 0"), ("system_exit", "SystemExit(7)")],
)
def test_every_way_to_leave_is_a_crash(tmp_path, death, told):
    (tmp_path / "leaving.py").write_text(f"import unruly\nclass Unruly(unruly.Unruly):\n    death = {death!r}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        found = list(run_conformance("leaving:Unruly", CPU, "smoke", only=(FLAT,)))
    assert outcomes(found) == ["PASS", "CRASH", "FAIL", "PASS"]
    assert told in found[1].detail


def test_waived_faults_and_waived_passes_show_as_such():
    waivers = [waiver("*the_flat_form*encoder-ragged*", Outcome.FAIL), waiver("*the_flat_form*mixed*", Outcome.FAIL)]
    found = results(only=(FLAT,), waivers=waivers)
    assert outcomes(found) == ["XPASS", "CRASH", "WAIVED", "PASS"]


def test_what_is_not_claimed_is_not_supported_and_proven():
    found = results("TORCH_SDPA", only=("*-u8-*",))
    assert set(outcomes(found)) == {"NOT_SUPPORTED"}
    assert all(result.reason["code"] == "KV_CACHE_DTYPE" for result in found)


def test_a_claim_that_is_refused_and_a_refusal_that_computes_both_fail(tmp_path):
    (tmp_path / "claims.py").write_text(
        "from dataclasses import replace\n"
        "from heedful.backends.torch_sdpa import TorchSdpaBackend as B\n"
        "class More(B):\n"
        "    name = 'MORE'\n"
        "    CAPABILITIES = tuple(replace(r, kv_cache_dtypes=r.kv_cache_dtypes | {'u8'}) for r in B.CAPABILITIES)\n"
        "class Less(B):\n"
        "    name = 'LESS'\n"
        "    CAPABILITIES = tuple(replace(r, features=r.features - {'sinks'}) for r in B.CAPABILITIES)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        more = list(run_conformance("claims:More", CPU, "smoke", only=("*output_agrees*bf16-u8*normal]",)))
        less = list(run_conformance("claims:Less", CPU, "smoke", only=("*output_agrees*bf16*d128-b16-sinks*normal]",)))
    assert outcomes(more) == ["FAIL"]
    assert outcomes(less) == ["FAIL"]
    assert "computed without a word" in less[0].detail


def no_device(platform, fidelity):
    return Probe(None, text=f"{platform} does not answer any more")


class Probing:
    """A probe that can be sent to a worker: the first call answers, later ones find the file and do not."""

    def __init__(self, path):
        self.path = path

    def __call__(self, platform, fidelity):
        if self.path.exists():
            return no_device(platform, fidelity)
        self.path.touch()
        return Probe(Fidelity.HARDWARE)


def test_a_device_that_a_crash_took_away_is_lost_and_the_rest_is_not_run(tmp_path):
    runner, cells = runner_for(UNRULY, CPU, "smoke", Terms())
    runner.making = lambda count, timeout: Workers(count, timeout, probing=Probing(tmp_path / "seen"))
    found = list(runner.results(choose(cells, (FLAT,))))
    assert outcomes(found) == ["PASS", "DEVICE_LOST", "NOT_RUN", "NOT_RUN"]
    assert "does not answer any more" in found[1].detail
    assert found[1].id in found[2].detail


def cannot_import():
    raise ImportError("libtorch is gone")


def test_workers_that_cannot_start_are_an_infrastructure_error():
    runner, cells = runner_for("TORCH_SDPA", CPU, "smoke", Terms())
    runner.making = lambda count, timeout: Workers(count, timeout, starting=cannot_import)
    found = list(runner.results(choose(cells, (FLAT,))))
    assert outcomes(found) == ["INFRA_ERROR"] * 4
    assert "worker processes cannot start" in found[0].detail


def test_a_pool_that_breaks_between_cells_is_made_again():
    with Workers() as workers:
        runner, cells = runner_for("TORCH_SDPA", CPU, "smoke", Terms())
        flat = choose(cells, (FLAT,))
        assert outcomes(runner.lane(flat, workers)) == ["PASS"] * 4
        workers.stop()
        assert outcomes(runner.lane(flat, workers)) == ["PASS"] * 4


def test_a_lane_out_of_reach_is_not_run_and_its_selections_are_judged():
    wanted = ExpectedSelection(
        "bf16", SelectionRequest(128, block_size=256), Device("cuda", capability=(9, 0)), "FLASH_ATTN"
    )
    wrong = replace(wanted, name="wrong", backend="XFORMERS")
    refused = ExpectedSelection(
        "u8", SelectionRequest(128, kv_cache_dtype="u8"), Device("cpu"), None, ("KV_CACHE_DTYPE",)
    )
    unrefused = replace(refused, name="unrefused", reasons=("SINKS",))
    row = Row("cuda", (Lane(Fidelity.HARDWARE, ("NO_ATTENTION",), "smoke"),), (wanted, wrong, refused, unrefused))
    found = list(run_plan(plan([row]), [row]))
    kernels = [result for result in found if result.lane == "cuda.hardware"]
    decisions = {result.id: result for result in found if result.lane == "cuda.select"}
    assert set(outcomes(kernels)) == {"NOT_RUN"}
    assert all("cuda" in result.detail for result in kernels)
    assert {key.split("/")[-1]: str(result.outcome) for key, result in decisions.items()} == {
        "bf16": "PASS",
        "wrong": "FAIL",
        "u8": "PASS",
        "unrefused": "FAIL",
    }
    assert decisions["cuda/SELECT/bf16"].facts["selection"]["backend"] == "FLASH_ATTN"
    assert "FLASH_ATTN was chosen on cuda 9.0, the row expects XFORMERS" in decisions["cuda/SELECT/wrong"].detail


def test_a_lane_of_another_fidelity_is_not_run():
    row = Row("cpu", (Lane(Fidelity.EMULATED, ("NO_ATTENTION",), "smoke"),))
    found = list(run_plan(plan([row]), [row]))
    assert set(outcomes(found)) == {"NOT_RUN"}
    assert "proves nothing of cpu at fidelity emulated" in found[0].detail


def test_a_plan_gets_exactly_one_result_for_every_cell():
    row = Row("cpu", (Lane(Fidelity.HARDWARE, ("NO_ATTENTION",), "ci"),))
    expected = plan([row])
    found = list(run_plan(expected, [row]))
    assert [(result.lane, result.id) for result in found] == [(cell.lane, cell.id) for cell in expected.cells]
    assert outcomes(found) == [str(cell.outcome) for cell in expected.cells]


def test_the_seed_is_added_to_the_cases():
    plain, other = (results("TORCH_SDPA", only=("*lse_agrees*sinks*normal]",), seed=seed)[0] for seed in (0, 5))
    assert (plain.seed, other.seed) == (0, 5)
    assert plain.margins != other.margins


def test_a_pattern_that_matches_nothing_is_an_error_before_anything_runs():
    with pytest.raises(NothingToRunError, match="matches none of the"):
        run_conformance("TORCH_SDPA", CPU, "smoke", only=("*no_such_check*",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile": "smok"}, "unknown profile"),
        ({"workers": 0}, "workers 0 must be 1 or more"),
        ({"timeout": 0.0}, "timeout 0.0"),
        ({"backend": "TORCH_SDPAA"}, "names no attention backend"),
    ],
)
def test_bad_input_is_one_clear_error_before_anything_runs(options, message):
    with pytest.raises(BadInputError, match=message):
        run_conformance(**{"backend": "TORCH_SDPA", "device": CPU, "profile": "smoke", **options})


def test_a_class_that_no_worker_could_import_is_refused():
    class Local:
        pass

    with pytest.raises(BadInputError, match="define it at the top level of a module"):
        spec_of(Local)


def test_an_importable_class_is_found_by_name():
    import unruly

    assert spec_of(unruly.Unruly) == UNRULY


def test_a_plan_of_other_rows_is_refused():
    here = Row("cpu", (Lane(Fidelity.HARDWARE, ("NO_ATTENTION",), "smoke"),))
    with pytest.raises(BadInputError, match="the plan has cells that these rows do not"):
        run_plan(plan([here]), [Row("cuda", ())])


def test_all_ten_outcomes_are_spoken_for():
    """Each outcome stands in some test above; a new one needs a test as well."""
    text = Path(__file__).read_text(encoding="utf-8")
    assert [word for word in Outcome if f'"{word}"' not in text] == []


def test_a_runner_can_be_made_for_a_class():
    import unruly

    runner, cells = runner_for(unruly.Unruly, CPU, "smoke", Terms())
    assert isinstance(runner, Runner)
    assert cells[0].id.startswith("cpu/UNRULY/")


@pytest.mark.parametrize("words", [("avx2", None, "portable"), (None, "avx2")])
def test_workers_see_what_steers_heedful_now(monkeypatch, words):
    """The fork server keeps the environment of its own start; a report would tell another one than what ran."""
    import unruly

    for word in words:
        if word is None:
            monkeypatch.delenv("HEEDFUL_CPU_ISA", raising=False)
        else:
            monkeypatch.setenv("HEEDFUL_CPU_ISA", word)
        with Workers(probing=unruly.steered) as workers:
            assert workers.probe("cpu", Fidelity.HARDWARE).text == (word or "unset")


def compiled_here(platform, fidelity):
    return Probe(Fidelity.COMPILED)


def built(probing=compiled_here, profile="smoke"):
    """Each build's result, run in workers on a lane that probing says is there."""
    row = Row("cpu", (Lane(Fidelity.COMPILED, ("unruly:Builder",), profile),))
    known = {(cell.expected.lane, cell.expected.id): cell for cell in kernel_cells(row)}
    runner = Runner(known, {}, (row,), Terms(), lambda count, timeout: Workers(count, timeout, probing=probing))
    return {result.id: result for result in runner.results(plan([row]).cells)}


def test_a_build_is_a_cell_whose_figures_are_kept():
    found = built()["cpu/BUILDER/compiles[attention-x1-plain]"]
    assert (found.lane, found.outcome, found.facts) == (
        "cpu.compiled",
        Outcome.PASS,
        {"figures": {"code_bytes": 4096}},
    )


def test_every_build_ends_as_its_compiler_says():
    told = {cell_id.partition("x1-")[2].rstrip("]"): result for cell_id, result in built().items()}
    assert {name: str(result.outcome) for name, result in told.items()} == {
        "plain": "PASS",
        "huge": "NOT_SUPPORTED",
        "lie": "FAIL",
        "mute": "FAIL",
        "broken": "FAIL",
    }
    assert told["huge"].reason["text"] == "more than the memory of an x1"
    assert "but it compiled" in told["lie"].detail
    assert "no figure" in told["mute"].detail
    assert "fell over" in told["broken"].detail


def test_a_build_that_is_not_of_the_smoke_profile_is_asked_later():
    assert "cpu/BUILDER/compiles[attention-x1-late]" in built(profile="ci")


def test_builds_are_not_run_where_nothing_compiles():
    found = built(probing=no_device).values()
    assert {str(result.outcome) for result in found} == {"NOT_RUN"}


def test_a_backend_without_builds_has_no_place_in_a_compiled_lane():
    with pytest.raises(BadInputError, match="NO_ATTENTION declares no BUILDS"):
        plan([Row("cpu", (Lane(Fidelity.COMPILED, ("NO_ATTENTION",), "ci"),))])
