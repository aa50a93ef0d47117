"""Reports of conformance runs: JSON is kept, JUnit and Markdown are rendered from it. Loads no torch."""

from __future__ import annotations

from heedful.report.model import Report

__all__ = ["Report"]
