"""The other tests of this folder are skipped without the library; that must not happen by an accident of the build."""

from __future__ import annotations

import os
import shutil
from importlib import import_module

import pytest


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here, so the library need not be there")
def test_the_library_was_built_where_a_compiler_is():
    assert import_module("heedful.kernels.cpu").isas()["portable"]


def test_this_run_was_not_pointed_at_an_instruction_set():
    assert "HEEDFUL_CPU_ISA" not in os.environ, "unset it: the tests choose instruction sets themselves"
