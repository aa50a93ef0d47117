"""Provenance: facts of this machine and process, read and never guessed."""

import os
import platform
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from importlib.metadata import version
from pathlib import Path

import pytest

from heedful.errors import BadInputError
from heedful.report import provenance
from heedful.report.provenance import Provenance, collect
from heedful.types import Device

START = datetime(2026, 12, 1, 5, 0, 0, tzinfo=UTC)


def collected(**changes):
    plain = {"command": ["heedful", "conform"], "seeds": [0, 1], "started": START, "finished": START}
    return collect(Device("cuda", capability=(9, 0), name="H200"), **(plain | changes))


def test_it_tells_of_this_process_and_its_device(monkeypatch):
    monkeypatch.setenv("HEEDFUL_PLATFORM", "cpu")
    made = collected()
    assert (made.platform, made.device, made.device_name, made.simulated) == ("cuda", "cuda 9.0", "H200", True)
    assert made.heedful == version("heedful")
    assert made.python == f"CPython {platform.python_version()}"
    assert made.packages["pytest"] == version("pytest")
    assert made.environment["HEEDFUL_PLATFORM"] == "cpu"
    assert all(name.startswith("HEEDFUL_") for name in made.environment)
    assert (made.command, made.seeds) == (("heedful", "conform"), (0, 1))
    assert made.cores == len(os.sched_getaffinity(0))
    assert made.machine == platform.machine()
    assert made.cpu
    assert made.os


def test_its_record_comes_back_as_it_was():
    made = collected()
    assert Provenance.from_dict(made.to_dict()) == made


def test_times_are_utc_whatever_zone_they_came_in():
    east = timezone(timedelta(hours=2))
    made = collected(started=datetime(2026, 12, 1, 7, 0, 0, 999, tzinfo=east))
    assert (made.started, made.finished) == ("2026-12-01T05:00:00Z", "2026-12-01T05:00:00Z")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", collected(finished=None).finished)


def test_a_time_without_a_zone_is_refused():
    with pytest.raises(BadInputError, match=r"time 2026-12-01T05:00:00 has no zone"):
        collected(started=datetime(2026, 12, 1, 5, 0, 0))


def test_a_run_is_on_the_host_unless_a_digest_is_stated():
    digest = f"sha256:{'0' * 64}"
    assert collected().place == "host"
    assert collected(image_digest=digest).place == f"{digest} (stated)"
    with pytest.raises(BadInputError, match=r"image digest 'latest' is not of the form sha256"):
        collected(image_digest="latest")


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout of a package that stands where heedful would."""
    for name in provenance._FOREIGN_GIT:
        monkeypatch.delenv(name, raising=False)
    package = tmp_path / "src" / "heedful"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    return package


def test_the_commit_is_that_of_the_checkout_and_changes_make_it_dirty(checkout):
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "first")
    commit, dirty = provenance._commit(checkout)
    assert re.fullmatch(r"[0-9a-f]{40}", commit)
    assert dirty is False
    (checkout / "new.py").write_text("")
    assert provenance._commit(checkout) == (commit, True)


def test_a_hook_of_another_repository_does_not_lend_its_commit(checkout, tmp_path, monkeypatch):
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "first")
    commit = provenance._commit(checkout)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert provenance._commit(checkout) == commit


def test_a_package_that_git_does_not_know_has_no_commit(checkout):
    # an environment inside somebody's checkout: the commit would be theirs
    assert provenance._commit(checkout) == (None, None)


def test_a_machine_without_git_has_no_commit(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert shutil.which("git") is None
    assert provenance._commit(checkout) == (None, None)


def test_a_machine_that_hides_its_processor_gets_a_word_and_no_crash(monkeypatch):
    def hidden(_self, **_kw):
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", hidden)
    assert provenance._cpu_model() in {platform.processor(), "unknown"}


def test_a_report_is_made_and_read_without_torch():
    program = (
        "import sys, heedful.report, heedful.report.junit, heedful.report.markdown, heedful.harness.matrix;"
        "loaded = {'torch', 'numpy', 'jsonschema'} & set(sys.modules); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
