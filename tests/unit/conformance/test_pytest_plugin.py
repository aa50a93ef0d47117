"""The pytest door, run as a third party runs it: pytest in a process of its own, also under xdist."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
THREE_LINES = """
from heedful.conformance import parametrize_with_checks
@parametrize_with_checks({backend!r})
def test_conformance(heedful_cell): {body}
"""
EDITABLE = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"
"""The finder of an editable install is imported before pytest starts."""
FLAT = ("--heedful-only", "*the_flat_form*")


@pytest.fixture
def suite(tmp_path):
    """Run pytest on the three lines; returns the finished process."""

    def run(*options, backend="unruly:Unruly", body="heedful_cell()", **env):
        (tmp_path / "test_mine.py").write_text(THREE_LINES.format(backend=backend, body=body))
        strict = ("-p", "no:cacheprovider", "-W", "error", "-W", EDITABLE)
        command = [sys.executable, "-m", "pytest", *strict, *options, "test_mine.py"]
        environment = {**os.environ, "PYTHONPATH": str(HERE), "COLUMNS": "300", **env}
        environment.pop("PYTEST_ADDOPTS", None)
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run


def records(path):
    return {row["id"]: row["outcome"] for row in map(json.loads, path.read_text().splitlines())}


def by_kind(found):
    """Outcome by the cell's attention type."""
    return {key.split("d128")[1].split("-ragged")[0]: outcome for key, outcome in found.items()}


EXPECTED = {
    "-b16-mixed-normal]": "PASS",
    "v48-b16-decode-normal]": "PASS",
    "-b16-encoder": "FAIL",
    "-b16-encoder_only": "CRASH",
}


def test_a_crash_is_one_failed_item_and_the_report_has_every_cell(suite, tmp_path):
    done = suite(*FLAT, "--heedful-report", "cells.jsonl")
    assert done.returncode == 1, done.stdout
    assert by_kind(records(tmp_path / "cells.jsonl")) == EXPECTED
    assert "heedful: 2 PASS · 1 FAIL · 1 CRASH" in done.stdout
    assert "the process was killed by SIGSEGV" in done.stdout
    assert "again: heedful conform --profile smoke --only 'cpu/UNRULY/the_flat_form_is_answered_flat[" in done.stdout
    assert "-ragged-normal]' --backend unruly:Unruly" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("dist", ["load", "worksteal"])
def test_under_xdist_a_crash_and_a_hang_cost_one_item_each(suite, tmp_path, dist):
    pads = ("--heedful-only", "*pad_rows*", "--heedful-timeout", "8")
    done = suite("-n", "2", "--dist", dist, *FLAT, *pads, "--heedful-report", "cells.jsonl")
    assert done.returncode == 1, done.stdout
    assert sorted(records(tmp_path / "cells.jsonl").values()) == [
        "CRASH",
        "CRASH",
        "FAIL",
        "PASS",
        "PASS",
        "PASS",
        "TIMEOUT",
    ]
    assert "4 failed, 3 passed" in done.stdout


@pytest.mark.parametrize("dist", ["loadscope", "loadfile", "loadgroup"])
def test_distributions_that_lose_cells_are_refused(suite, dist):
    asked = suite("-n", "2", "--dist", dist, *FLAT)
    assert asked.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"--dist {dist} loses cells" in asked.stderr
    found = suite("-n", "1", "--dist", dist)
    assert found.returncode != 0
    assert f"--dist {dist} loses cells" in found.stdout


def test_a_pass_and_a_proven_refusal_are_told_apart(suite):
    done = suite(
        "-rs",
        "--heedful-only",
        "*output_agrees*u8*normal]",
        "--heedful-only",
        "*needs_no_cache*w7*",
        backend="TORCH_SDPA",
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed, 2 skipped" in done.stdout
    assert "NOT_SUPPORTED" in done.stdout


def test_cells_that_were_all_out_of_reach_are_not_a_pass(suite):
    only = ("--heedful-only", "*attention_free*", "--heedful-backend", "NO_ATTENTION")
    done = suite(*only, HEEDFUL_PLATFORM="cuda")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout
    assert "no cell was executed, and what did not run did not pass" in done.stdout


def test_a_test_that_never_calls_its_cell_has_proven_nothing(suite):
    done = suite(*FLAT, backend="TORCH_SDPA", body="pass")
    assert done.returncode == 1
    assert "the test never called heedful_cell()" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--heedful-only", "*nonsense*"), "matches none of the"),
        (("--heedful-backend", "TORCH_SPDA"), "names no attention backend"),
        (("--heedful-report", "no/such/folder/x"), "cannot write --heedful-report"),
    ],
)
def test_bad_options_are_one_clear_error(suite, options, message):
    done = suite(*options)
    assert done.returncode not in (0, 1), done.stdout
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_session_without_cells_is_left_alone(tmp_path):
    (tmp_path / "test_other.py").write_text("def test_it(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", EDITABLE, "test_other.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "heedful" not in done.stdout
