"""The command line: the only part of heedful that prints, reads argv or exits. One file a subcommand."""

from heedful.cli.app import main

__all__ = ["main"]
