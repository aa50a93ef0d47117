"""Report files: written whole or not at all, read with one clear error for whatever is not a whole report of ours."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn
from uuid import uuid4

from heedful.errors import BadInputError, ReportError
from heedful.report.schema import Check, compile_schema, load_schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

KIND: Final = "heedful.report"
VERSION: Final = 1
SUFFIXES: Final = (".json", ".json.gz")
_GZIP: Final = b"\x1f\x8b"
_TOLD: Final = 5
"""Breaches of the schema that are told; a foreign file may have thousands."""


def write(document: Mapping[str, Any], path: str | Path) -> None:
    """Write a report's JSON form to .json or .json.gz through a neighbouring file that is renamed at the end."""
    target = Path(path)
    if not target.name.endswith(SUFFIXES):
        raise BadInputError(f"a report is written to a name that ends in {' or '.join(SUFFIXES)}, not to {target}")
    content = "".join(_lines(document)).encode("ascii")
    if target.name.endswith(".gz"):
        # no time inside: equal reports are equal files
        content = gzip.compress(content, compresslevel=6, mtime=0)
    replace_file(target, content)


def replace_file(target: Path, content: bytes) -> None:
    """Make ``target`` hold ``content``, making its folder too; a reader sees the old file or the new, never a part."""
    beside = target.with_name(f".{target.name}.{uuid4().hex}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except OSError as error:
        raise ReportError(f"cannot write the report to {target}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def read(path: str | Path) -> dict[str, Any]:
    """A report's JSON form, checked against the schema. Raises ReportError with what stands in the way."""
    source = Path(path)
    document = _parse(source, _unpack(source))
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ReportError(f"{source} is JSON but not a report of heedful: its kind is not {KIND!r}")
    if document.get("version") != VERSION:
        _refuse_version(source, document.get("version"))
    if broken := _schema()(document):
        told = "; ".join(str(violation) for violation in broken[:_TOLD])
        more = f"; and {len(broken) - _TOLD} more" if len(broken) > _TOLD else ""
        raise ReportError(f"{source} breaks the report schema: {told}{more}")
    return document


def _refuse_version(source: Path, version: object) -> NoReturn:
    newer = isinstance(version, int) and version > VERSION
    todo = "a newer heedful wrote it: upgrade" if newer else "write it again with this heedful"
    raise ReportError(f"{source} is of report version {version!r:.40}, this heedful reads {VERSION}; {todo}")


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    """JSON with one row a line, so that a report can be searched, paged and compared with ordinary tools."""
    separator = "{\n"
    for key, value in document.items():
        yield f"{separator}{_dump(key)}: "
        yield from _rows(value) if isinstance(value, list) else (_dump(value),)
        separator = ",\n"
    yield "\n}\n"


def _rows(rows: list[Any]) -> Iterator[str]:
    yield "["
    yield ",\n".join(_dump(row) for row in rows)
    yield "]"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False)


def _unpack(source: Path) -> bytes:
    try:
        content = source.read_bytes()
    except OSError as error:
        raise ReportError(f"cannot read report {source}: {error.strerror or error}") from error
    if not content:
        raise ReportError(f"{source} is empty; its writer was stopped, run the suite again")
    try:
        return gzip.decompress(content) if content.startswith(_GZIP) else content
    except (OSError, EOFError, zlib.error) as error:
        raise ReportError(f"{source} is a gzip file that is truncated or damaged: {error}") from error


def _parse(source: Path, content: bytes) -> Any:
    try:
        return json.loads(content, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        what = "truncated" if _is_cut(error) else "damaged, or no JSON at all"
        raise ReportError(f"{source} is {what}: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise ReportError(f"{source} is no text file: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{source} is not JSON that a report can hold: {error}") from error


def _is_cut(error: json.JSONDecodeError) -> bool:
    """Whether JSON was begun and not ended: the usual trace of a writer that was killed or of a half download."""
    text = error.doc.strip()
    ended = text.endswith("}") and error.pos < len(error.doc.rstrip()) and not error.msg.startswith("Unterminated")
    return text.startswith("{") and not ended


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


@cache
def _schema() -> Check:
    return compile_schema(load_schema("heedful.report", "report.schema.json"))
