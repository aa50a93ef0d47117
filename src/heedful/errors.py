"""Every error a user can meet. One class, one exit code (docs/exit-codes.md lists them).

Each message says what was asked, what stands in the way and what to do; the command line prints it and exits with
``exit_code``, without a traceback. Exit codes 0, 1 and 3 are results of a run, not errors: see ``heedful.cli``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable


class HeedfulError(Exception):
    """Base of all errors that heedful raises on purpose."""

    exit_code: ClassVar[int] = 70


class BadInputError(HeedfulError, ValueError):
    """An argument, option, environment variable or file content that is not a legal value."""

    exit_code = 2


class UnknownArgumentError(BadInputError, TypeError):
    """A keyword that the contract does not know; the message names the nearest one that it does."""


class SelectionError(HeedfulError, ValueError):
    """No backend can serve the request; ``selection`` is the record with every reason, where there is one."""

    exit_code = 4

    def __init__(self, message: str, selection: object | None = None) -> None:
        super().__init__(message)
        self.selection = selection


class AssertedSelectionError(SelectionError, AssertionError):
    """A refusal that vLLM 0.6.3 raised as AssertionError (policy ``vllm-0.6.3`` only)."""


class AttributeSelectionError(SelectionError, AttributeError):
    """A refusal that vLLM 0.6.3 raised as AttributeError (policy ``vllm-0.6.3`` only)."""


class UnsupportedError(HeedfulError, ValueError):
    """A backend was asked for something its CAPABILITIES exclude; carries the ``Reason`` list as ``reasons``."""

    exit_code = 5

    def __init__(self, message: str, reasons: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons


class MetadataError(HeedfulError, ValueError):
    """Block tables, slots or lengths that do not describe the batch; the message names the sequence."""

    exit_code = 6


class ReportError(HeedfulError, ValueError):
    """A report that cannot be read: truncated, foreign, or of an unknown schema version."""

    exit_code = 7


class NothingToRunError(HeedfulError, LookupError):
    """An id or glob that matches no planned cell, or a run that would execute nothing."""

    exit_code = 8


class BackendUnavailableError(HeedfulError, ImportError):
    """A backend's library or kernel cannot be loaded; the message repeats the first cause."""

    exit_code = 9


class MatrixError(HeedfulError, ValueError):
    """matrix.yaml breaks its schema; the message names file, line and the nearest legal key."""

    exit_code = 10


class WeightsError(HeedfulError, ValueError):
    """A model's files are missing or of a kind that the runner cannot load."""

    exit_code = 11


class HeedfulWarning(UserWarning):
    """Something that was asked for in a retired or ineffective way; the text says what counts instead."""


def did_you_mean(given: str, words: Iterable[str]) -> str:
    """``"; did you mean 'X'?"`` for the nearest legal word, or nothing. Case, spaces and dashes count as slips."""
    from difflib import get_close_matches

    plain = {_plain(word): word for word in words}
    near = get_close_matches(_plain(given), plain, n=1)
    return f"; did you mean {plain[near[0]]!r}?" if near else ""


def _plain(word: str) -> str:
    return word.strip().casefold().replace("-", "_")
