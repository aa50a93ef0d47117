"""The set-up scripts: what they refuse, what they skip the second time, how CI's last line is counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

JUNIT = """<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1"/><testsuite tests="2"/></testsuites>"""


def bash(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEEDFUL_")}
    return subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=kept | environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("script", ["scripts/test", "scripts/conform"])
def test_a_machine_without_a_fitting_python_is_told_what_to_do(script, tmp_path):
    done = bash(script, PYTHON="false", HEEDFUL_VENV=str(tmp_path / "venv"))
    assert done.returncode == 2
    assert "no Python of 3.11 or newer" in done.stderr
    assert "PYTHON=/path/to/python" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_name_on_the_path_without_an_interpreter_behind_it_is_passed_over(tmp_path):
    shim = tmp_path / "python3"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    done = bash(f". scripts/environment; PYTHON='{shim} {sys.executable}' find_python")
    assert done.stdout.strip() == sys.executable


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder that looks like a made environment and notes every call of pip."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *pip*) echo "$*" >>{tmp_path}/pip.log;; *) exec {sys.executable} "$@";; esac\n'
    )
    python.chmod(0o755)
    return tmp_path


def test_the_second_time_nothing_is_installed(made):
    script = ". scripts/environment; use_environment test"
    settings = {"HEEDFUL_VENV": str(made), "HEEDFUL_PLATFORM": "cpu"}
    first = bash(script, **settings)
    assert "installing what 'test' needs on cpu" in first.stdout
    calls = (made / "pip.log").read_text()
    assert "scripts/pip-cpu -qq -r scripts/cpu-requirements.txt" in calls
    assert "--editable .[cpu]" in calls
    assert "--group test" in calls
    (made / "pip.log").unlink()
    second = bash(script, **settings)
    assert second.returncode == 0
    assert "installing" not in second.stdout
    assert not (made / "pip.log").exists()


def test_another_platform_gets_its_own_extra_and_no_cpu_build(made):
    bash(". scripts/environment; use_environment", HEEDFUL_VENV=str(made), HEEDFUL_PLATFORM="cuda")
    calls = (made / "pip.log").read_text()
    assert "--editable .[cuda]" in calls
    assert "pip-cpu" not in calls


def test_a_failed_installation_is_tried_again(made):
    python = made / "bin" / "python"
    python.write_text(python.read_text().replace("pip.log;;", "pip.log; exit 1;;"))
    script = ". scripts/environment; use_environment"
    for _ in range(2):
        done = bash(script, HEEDFUL_VENV=str(made), HEEDFUL_PLATFORM="cpu")
        assert done.returncode == 1
        assert "environment:" not in done.stdout


@pytest.mark.parametrize(
    ("content", "line", "code"),
    [
        (JUNIT, "4 passed, 2 failed, 1 skipped", 0),
        ('<testsuites><testsuite tests="0"/></testsuites>', "0 passed, 0 failed, 0 skipped", 1),
        (None, "0 passed, 1 failed", 1),
    ],
)
def test_ci_counts_the_tests_that_ran(content, line, code, tmp_path):
    path = tmp_path / "tests.xml"
    if content is not None:
        path.write_text(content)
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/count-tests", path], capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.returncode) == (line, code)
