"""Text for a reader: what a report quotes may come from anywhere, so what cannot be seen is spelled out."""

from __future__ import annotations


def printable(text: str, keep: str = "\n\t") -> str:
    r"""The text with every character that cannot be seen written as its escape: ``\x1b``, ``\u202e``, ``\ud800``.

    Spaces, printable characters and those in ``keep`` stand as they are; a Windows line end counts as one.
    """
    if text.isprintable():
        return text
    text = text.replace("\r\n", "\n")
    return "".join(char if char.isprintable() or char in keep else _escape(char) for char in text)


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def clip(text: str, length: int) -> str:
    """At most ``length`` characters; what was cut is said."""
    return text if len(text) <= length else f"{text[:length]}… ({len(text) - length} more characters)"


def one_line(text: str, length: int = 200) -> str:
    """The first line, printable and cut."""
    return clip(printable(text.strip().partition("\n")[0].strip(), keep=""), length)


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
