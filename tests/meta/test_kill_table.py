"""docs/kill-table.md lists exactly today's variants and says what the kept results say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_table.py"


def run(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_page_is_current():
    found = run("--check")
    assert (found.returncode, found.stderr) == (0, "")


def test_unknown_variant_is_bad_input():
    found = run("--only", "NoSuchVariant")
    assert found.returncode == 2
    assert "no variant is called NoSuchVariant" in found.stderr
