"""How the command line writes: results to stdout, progress and complaints to stderr, files whole or not at all."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import typer

if TYPE_CHECKING:
    from rich.console import Console

PIPE_CLOSED: Final = 141
"""128 + SIGPIPE: what a shell reports for a program whose reader went away."""
PIPED_WIDTH: Final = 160
"""Columns of a table that no terminal shows: wide enough that a reason stays on one line."""


def console(stream: IO[str] | None = None) -> Console:
    """A rich console on stdout (or the stream given); colourless and of a fixed width where no terminal listens."""
    from rich.console import Console

    stream = sys.stdout if stream is None else stream
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def show(renderable: object) -> None:
    """Render a rich object to stdout."""
    target = console()
    with target.capture() as captured:
        target.print(renderable)
    write("\n".join(line.rstrip() for line in captured.get().splitlines()))


def write(text: str) -> None:
    """Write text to stdout as it is; a reader that has gone ends the command quietly."""
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
        raise typer.Exit(PIPE_CLOSED) from None


def stream_piece(text: str) -> None:
    """Write a piece of a line to stdout at once, as it is made."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
        raise typer.Exit(PIPE_CLOSED) from None


def note(text: str) -> None:
    """One line for the person at the keyboard, on stderr, so that stdout stays clean for pipes."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def write_json(data: Any) -> None:
    """JSON to stdout, indented, keys in the order given."""
    write(json.dumps(data, indent=2, default=str))


def write_file(path: Path, text: str) -> None:
    """Write a whole file or none, making its folder; ``-`` is stdout. Raises ReportError for a path it cannot write."""
    if str(path) == "-":
        write(text)
        return
    from heedful.report.store import replace_file

    replace_file(path, text.encode())


def _discard_stdout() -> None:
    # Python flushes stdout once more at exit: give that flush somewhere to go
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
