"""The ``heedful`` command: its subcommands, its global options, and how an error becomes an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from heedful.cli import backends, conform, doctor, generate, report, select
from heedful.cli.output import note, write
from heedful.errors import HeedfulError

INTERRUPTED = 130
"""128 + SIGINT."""

app = typer.Typer(
    name="heedful",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: docs/exit-codes.md. Each subcommand has its own --help.",
)
for _module in (select, backends, doctor, conform, report, generate):
    app.command(_module.__name__.rpartition(".")[2])(_module.command)


@dataclass
class Session:
    """What the global options say, for main() to read after the subcommand has failed."""

    debug: bool = False


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        write(f"heedful {version('heedful')}")
        raise typer.Exit


@app.callback()
def _global_options(
    context: typer.Context,
    _asked_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error as well.")] = False,
) -> None:
    """Choose an attention backend for an LLM server and say why, run it, and prove it."""
    context.obj.debug = debug


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; a HeedfulError is one message on stderr."""
    session = Session()
    try:
        return _run(sys.argv[1:] if argv is None else argv, session)
    except typer.TyperException as error:
        return _complain(f"{error.format_message()} (`{_command_of(error)} --help` lists the options)", 2)
    except HeedfulError as error:
        if session.debug:
            traceback.print_exc()
        return _complain(str(error), error.exit_code)


def _run(argv: Sequence[str], session: Session) -> int:
    code: Any = app(args=list(argv), prog_name="heedful", standalone_mode=False, obj=session)
    if code == INTERRUPTED:
        note("heedful: interrupted")
    return code if isinstance(code, int) else 0


def _complain(message: str, code: int) -> int:
    note(f"heedful: {message}")
    return code


def _command_of(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    return getattr(context, "command_path", "heedful")
