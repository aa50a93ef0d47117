"""Text for a reader: what a report quotes may come from anywhere, so what cannot be seen is spelled out."""

from __future__ import annotations

import re
from typing import Final

_UNUSUAL: Final = re.compile("[^ -~]")
"""Whatever is not plain ASCII is looked at; most text has little of it."""


def printable(text: str, keep: str = "\n\t") -> str:
    r"""The text with every character that cannot be seen written as its escape: ``\x1b``, ``\u202e``, ``\ud800``.

    Spaces, printable characters and those in ``keep`` stand as they are; a Windows line end counts as one.
    """
    if text.isprintable():
        return text

    def shown(match: re.Match[str]) -> str:
        char = match[0]
        return char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii")

    return _UNUSUAL.sub(shown, text.replace("\r\n", "\n"))


def clip(text: str, length: int) -> str:
    """At most ``length`` characters; what was cut is said."""
    return text if len(text) <= length else f"{text[:length]}… ({len(text) - length} more characters)"


def one_line(text: str, length: int = 200) -> str:
    """The first line, printable and cut."""
    return printable(clip(text.strip().partition("\n")[0].strip(), length), keep="")


def explanation(reason: object, detail: str) -> str:
    """Why a cell did not run, in one line: the reason's code and text, else the detail's first line."""
    if isinstance(reason, dict) and reason:
        return one_line(f"{reason.get('code', '')}: {reason.get('text', '')}".strip(": "))
    return one_line(detail) or "no reason given"


def backend_of(cell_id: str) -> str:
    """The second part of ``<platform>/<BACKEND>/<check>[<case>]``."""
    parts = cell_id.split("/", 2)
    return parts[1] if len(parts) == 3 else "?"


def check_of(cell_id: str) -> str:
    """Everything behind the backend: ``<check>[<case>]``."""
    return cell_id.split("/", 2)[-1]
