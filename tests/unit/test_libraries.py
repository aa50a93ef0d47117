"""An optional library's import: what it prints, and how it fails, in a library that does both."""

from __future__ import annotations

import sys

import pytest

from heedful import libraries
from heedful.types import Missing, ReasonCode


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Write a module of that source and put it where imports look."""
    monkeypatch.syspath_prepend(tmp_path)
    libraries.forget()

    def write(source):
        (tmp_path / "a_library_that_talks.py").write_text(source)
        return libraries.import_once("a_library_that_talks")

    yield write
    sys.modules.pop("a_library_that_talks", None)
    libraries.forget()


def test_what_a_library_prints_when_it_is_imported_stays_out_of_our_output(installed, capsys):
    assert installed("print('hello')").__name__ == "a_library_that_talks"
    assert capsys.readouterr() == ("", "hello\n")


def test_a_library_that_wants_another_torch_is_a_failed_import_with_its_cause(installed, capsys):
    """As intel-extension-for-pytorch 2.8.0 does under another torch."""
    found = installed("import os\nprint('ERROR! this needs PyTorch 2.8')\nos.exit(127)")
    assert isinstance(found, Missing)
    assert found.code is ReasonCode.IMPORT_FAILED
    assert "has no attribute 'exit'" in found.cause
    assert capsys.readouterr() == ("", "ERROR! this needs PyTorch 2.8\n")
