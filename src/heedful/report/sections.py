"""Pieces of Markdown that stay in their place: quoted text cannot break out, a section cannot outgrow its room."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from heedful.report.text import clip, one_line, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_DETAIL = 2000
"""Characters of a failure's detail that are shown; the JSON report has all of it."""


@dataclass(frozen=True)
class Section:
    """A heading, what always stands below it, and items that may be cut from the end; only those kept are shown."""

    title: str
    intro: tuple[str, ...]
    items: Sequence[Any]
    show: Callable[[Any], str]

    def fit(self, room: int) -> str:
        """The section in at most about ``room`` bytes; items that had to go are counted."""
        kept: list[str] = [f"## {self.title}", "", *self.intro]
        left = room - sum(len(line.encode()) + 1 for line in kept)
        for index, item in enumerate(self.items):
            shown = self.show(item)
            left -= len(shown.encode()) + 1
            if left < 0:
                return "\n".join([*kept, "", f"… and {len(self.items) - index} more, in the JSON report.", ""])
            kept.append(shown)
        return "\n".join([*kept, ""])


def table(
    title: str,
    columns: Sequence[str],
    items: Sequence[Any],
    cells: Callable[[Any], Sequence[str]] = tuple,
    intro: tuple[str, ...] = (),
) -> Section:
    """A section that holds one table, a row an item. A column whose name starts with # is a number and stands right."""
    names = [column.removeprefix("#") for column in columns]
    rules = ["---:" if column.startswith("#") else "---" for column in columns]
    head = (*intro, *([""] if intro else []), _row(names), _row(rules))
    return Section(title, head, items, lambda item: _row(cells(item)))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def code(text: str, length: int = 200) -> str:
    """One line of foreign text as a code span, in which nothing is markup; also inside a table."""
    shown = one_line(text, length)
    if not shown:
        return "–"
    # a pipe ends a table's cell even in a code span, unless escaped; a backslash before it would undo that
    shown = re.sub(r"\\(?=\|)", r"\\ ", shown).replace("|", r"\|")
    ticks = "`" * (_longest_run(shown) + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{ticks}{pad}{shown}{pad}{ticks}"


def fenced(text: str, language: str = "text") -> str:
    """Foreign text of several lines as a code block that it cannot close."""
    shown = printable(clip(text.strip("\n"), _DETAIL))
    ticks = "`" * max(3, _longest_run(shown) + 1)
    return f"{ticks}{language}\n{shown}\n{ticks}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
