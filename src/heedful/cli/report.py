"""``heedful report``: read a kept report, say what it came to, render it for others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heedful.cli import summary
from heedful.cli.output import note, write, write_file

if TYPE_CHECKING:
    from heedful.report.model import Report

MarkdownPath = Annotated[Path | None, typer.Option("--markdown", metavar="PATH", help="As Markdown; - is stdout.")]
JunitPath = Annotated[Path | None, typer.Option("--junit", metavar="PATH", help="As JUnit XML; - is stdout.")]


def command(
    path: Annotated[Path, typer.Argument(metavar="REPORT", help="A report that conform wrote (.json or .json.gz).")],
    markdown: MarkdownPath = None,
    junit: JunitPath = None,
) -> None:
    """Render a kept report; without options, say what it came to. A report of failures that can be read exits 0."""
    from heedful.report.model import Report

    report = Report.load(path)
    if markdown is None and junit is None:
        write("\n".join(summary.lines(report)))
    render(report, markdown, junit)


def render(report: Report, markdown: Path | None, junit: Path | None) -> None:
    """Write a report in the forms asked for."""
    from heedful.report import junit as as_junit
    from heedful.report import markdown as as_markdown

    for path, renderer in ((markdown, as_markdown.render), (junit, as_junit.render)):
        if path is not None:
            write_file(path, renderer(report))
            if str(path) != "-":
                note(f"wrote {path}")
