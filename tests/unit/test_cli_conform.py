"""``heedful conform`` and ``heedful report`` on few cells: what is run, kept, said and returned."""

from __future__ import annotations

import json
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from heedful.cli import main
from heedful.cli.conform import Asked, default_path

EXIT_BAD_INPUT, NOTHING_TO_RUN, MATRIX, UNAVAILABLE = 2, 8, 10, 9
FREE = "cpu/NO_ATTENTION/*"

BROKEN = """
import torch
from heedful.backends.capabilities import Capability, Sizes
from heedful.conformance import from_kernel

def zeros(query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, *, scale):
    return torch.zeros_like(query)

ZEROS = from_kernel(zeros, Capability("zeros", "cpu", frozenset({"float32"}), Sizes(), Sizes()), layout="NHD")
"""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEEDFUL_PLATFORM", "cpu")
    return tmp_path


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real report of a run in which every cell is as planned."""
    path = tmp_path_factory.mktemp("kept") / "free.json"
    assert main(["conform", "--platform", "cpu", "--profile", "smoke", "--only", FREE, "--json", str(path)]) == 0
    return path


def test_a_run_ends_with_a_summary_and_where_the_report_lies(capsys):
    assert main(["conform", "--profile", "smoke", "--only", FREE, "--only", "cpu/SELECT/*"]) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[0].startswith("cpu.hardware: 3 of 3 cells ran: 2 PASS")
    assert lines[-2:] == [
        "every cell that was reached is as planned (partial: only what was asked for)",
        "report: reports/cpu-partial.json",
    ]
    assert Path("reports/cpu-partial.json").is_file()
    assert "cells" in told.err


def test_the_forms_asked_for_are_written_beside_the_json(capsys):
    words = ["conform", "--profile", "smoke", "--only", FREE, "--json", "a/r.json.gz", "--junit", "b/r.xml"]
    assert main([*words, "--markdown", "-"]) == 0
    assert Path("a/r.json.gz").is_file()
    assert ET.parse("b/r.xml").getroot().tag == "testsuites"
    assert capsys.readouterr().out.startswith("#")


def test_list_prints_ids_and_runs_nothing(empty_folder, capsys):
    assert main(["conform", "--profile", "smoke", "--only", FREE, "--list"]) == 0
    ids = capsys.readouterr().out.split()
    assert len(ids) == 3
    assert all(cell_id.startswith("cpu/NO_ATTENTION/") for cell_id in ids)
    assert list(empty_folder.iterdir()) == []


def test_a_bigger_profile_plans_more_cells(capsys):
    counts = {}
    for profile in ("smoke", "ci"):
        assert main(["conform", "--backend", "TORCH_SDPA", "--profile", profile, "--list"]) == 0
        counts[profile] = len(capsys.readouterr().out.splitlines())
    assert 100 < counts["smoke"] < counts["ci"]


def test_a_wrong_backend_from_elsewhere_fails_with_lines_that_rerun_its_cells(empty_folder, capsys):
    (empty_folder / "wrong_kernel.py").write_text(BROKEN)
    words = ["conform", "--backend", "wrong_kernel:ZEROS", "--profile", "smoke"]
    assert main([*words, "--only", "cpu/ZEROS/output_agrees_with_reference[f32-h4k2-d128-b16-decode-*"]) == 1
    told = capsys.readouterr().out
    assert "FAIL, planned PASS: cpu/ZEROS/output_agrees_with_reference[f32-h4k2-d128-b16-decode-normal]" in told
    again = next(line for line in told.splitlines() if line.strip().startswith("again: "))
    assert main(shlex.split(again.partition("heedful ")[2])) == 1
    assert "1 cells are not as planned (partial" in capsys.readouterr().out


def test_a_lane_out_of_reach_is_not_run_and_no_success(capsys):
    assert main(["conform", "--platform", "rocm", "--profile", "smoke", "--only", "rocm/NO_ATTENTION/*"]) == 3
    told = capsys.readouterr().out
    assert "NOT_RUN" in told
    assert "no cell could be reached on this machine" in told


def test_decisions_of_an_absent_platform_are_proven_on_simulated_devices(capsys):
    assert main(["conform", "--platform", "cuda", "--profile", "smoke", "--only", "cuda/SELECT/*"]) == 0
    assert "cuda.select" in capsys.readouterr().out


def test_a_narrowed_run_never_replaces_a_whole_report():
    whole = Asked(None, None, None, (), None, 1, 0, 60.0)
    paths = [
        default_path("cpu", whole),
        default_path("cpu", Asked(None, None, None, ("x",), None, 1, 0, 60.0)),
        default_path("cpu", Asked("m:C", None, None, (), None, 1, 0, 60.0)),
    ]
    assert [str(path) for path in paths] == ["reports/cpu.json", "reports/cpu-partial.json", "reports/cpu-m.C.json"]


BAD_RUNS = {
    "an id that matches nothing": (["--only", "cpu/TORCH_SDPA/output[none]"], NOTHING_TO_RUN, "matches none of the"),
    "a glob that matches nothing": (["--only", "cuda/*"], NOTHING_TO_RUN, "matches none of the"),
    "one of two globs matches nothing": (["--only", FREE, "--only", "cpu/NONE*"], NOTHING_TO_RUN, "cpu/NONE*"),
    "an unknown profile": (["--profile", "nightly"], EXIT_BAD_INPUT, "nightly"),
    "an unknown backend": (["--backend", "TORCH_SDAP"], EXIT_BAD_INPUT, "did you mean 'TORCH_SDPA'"),
    "a module that is not there": (["--backend", "no_such_module:B"], UNAVAILABLE, "no_such_module"),
    "a class that is not there": (["--backend", "heedful.types:B"], UNAVAILABLE, "heedful.types"),
    "a class that is no backend": (["--backend", "heedful.types:Device"], UNAVAILABLE, "not a subclass"),
    "an unknown platform": (["--platform", "gpu"], EXIT_BAD_INPUT, "gpu"),
    "no worker": (["--workers", "0"], EXIT_BAD_INPUT, "--workers"),
    "a time limit that is none": (["--timeout", "nan"], EXIT_BAD_INPUT, "timeout"),
    "a negative seed": (["--seed", "-1"], EXIT_BAD_INPUT, "--seed"),
    "a matrix that is not there": (["--matrix", "none.yaml"], MATRIX, "none.yaml"),
    "an unknown option": (["--profle", "ci"], EXIT_BAD_INPUT, "--profile"),
}


@pytest.mark.parametrize(("words", "code", "told"), BAD_RUNS.values(), ids=BAD_RUNS)
def test_bad_input_is_one_message_before_anything_runs(words, code, told, empty_folder, capsys):
    assert main(["conform", *words]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err
    assert "Traceback" not in captured.err
    assert not (empty_folder / "reports").exists()


def test_an_unknown_key_of_a_matrix_is_named_with_its_line(empty_folder, capsys):
    (empty_folder / "bad.yaml").write_text('version: "1"\nplatforms:\n  cpu:\n    lines: {}\n')
    assert main(["conform", "--matrix", "bad.yaml"]) == MATRIX
    assert "bad.yaml:4" in capsys.readouterr().err


# -- report ------------------------------------------------------------------------------------------------------------


def test_a_kept_report_says_what_it_came_to(kept, capsys):
    assert main(["report", str(kept)]) == 0
    assert "every cell that was reached is as planned" in capsys.readouterr().out


def test_a_kept_report_is_rendered_to_files(kept, capsys):
    assert main(["report", str(kept), "--markdown", "r.md", "--junit", "r.xml"]) == 0
    assert Path("r.md").read_text().startswith("#")
    assert ET.parse("r.xml").getroot().tag == "testsuites"
    assert capsys.readouterr().out == ""


def test_a_report_that_was_cut_is_one_message(kept, empty_folder, capsys):
    cut = empty_folder / "cut.json"
    cut.write_bytes(kept.read_bytes()[:-100])
    assert main(["report", str(cut)]) == 7
    assert "truncated" in capsys.readouterr().err


def test_a_report_holds_the_plan_the_results_and_how_it_was_made(kept):
    record = json.loads(kept.read_text())
    assert record["partial"]
    assert len(record["expected"]) > len(record["results"]) == 3
    assert record["provenance"]["command"][0] == "heedful"
    assert record["profiles"]["cpu.hardware"] == "smoke"
