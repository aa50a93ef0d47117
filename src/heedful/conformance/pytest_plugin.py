"""The pytest door to the suite: options, cells as test items, results as JSON lines. Loads no torch in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the --heedful-* options."""
    group = parser.getgroup("heedful", "conformance of attention backends")
    group.addoption("--heedful-backend", metavar="NAME", help="test this backend: a registered name or module:Class")
    group.addoption("--heedful-profile", choices=("smoke", "ci", "full"), help="run this profile")
    group.addoption("--heedful-only", action="append", default=[], metavar="GLOB", help="run only these cells")
    group.addoption("--heedful-report", metavar="PATH", help="write one JSON line for each cell to this file")
