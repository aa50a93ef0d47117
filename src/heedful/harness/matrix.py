"""Reads matrix.yaml: one entry a platform, as rows that the planner takes. Knows each key's line; loads no torch.

The file is plain data: no anchors, aliases or tags, no key twice, and versions are strings. Whatever breaks the schema
(``matrix.schema.json`` beside this file) is one MatrixError that lists every breach with file and line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from heedful.conformance.plan import ExpectedSelection, Lane, Row, plan
from heedful.conformance.results import Fidelity, Outcome, Waiver, select_ids
from heedful.errors import BadInputError, MatrixError, NothingToRunError
from heedful.report.schema import Check, Path, Violation, compile_schema, hint_for, load_schema
from heedful.types import Device, SelectionRequest, check_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

NAME: Final = "matrix.yaml"
_HERE: Final = FilePath(__file__).parent
_SHIPPED: Final = (_HERE / NAME, _HERE.parents[2] / NAME)
"""The copy inside a wheel, and the file itself where heedful runs from a checkout."""

_DEEPEST: Final = 20
_READ_AS: Final = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "null")}
_TEXT: Final = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "timestamp")}


@dataclass(frozen=True)
class Matrix:
    """All rows of one matrix.yaml, and the file that they were read from."""

    source: str
    rows: tuple[Row, ...]

    def row(self, platform: str) -> Row:
        """The row of a platform; a platform without one is an error that names those that have."""
        found = next((row for row in self.rows if row.platform == platform), None)
        if found is None:
            hint = hint_for(platform, [row.platform for row in self.rows])
            raise BadInputError(f"{self.source} has no row for platform {platform!r}; {hint}")
        return found


def load_matrix(path: str | FilePath | None = None) -> Matrix:
    """The matrix at ``path``; without one ./matrix.yaml, else the copy that ships with heedful.

    Raises MatrixError with file, line and the nearest legal word for everything that the schema does not allow.
    """
    source = _find() if path is None else FilePath(path)
    document = _read(source)
    document.refuse(_schema()(document.value))
    document.refuse(list(_breaches(document.value)))
    rows = tuple(_row(*entry) for entry in document.value["platforms"].items())
    document.refuse([violation for row in rows for violation in _unmatched_waivers(row)])
    return Matrix(str(source), rows)


def _find() -> FilePath:
    candidates = (FilePath(NAME), *_SHIPPED)
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise MatrixError(f"there is no {NAME} here and this installation carries none; give the path of one")
    return found


@cache
def _schema() -> Check:
    return compile_schema(load_schema("heedful.harness", "matrix.schema.json"))


# -- YAML with lines ---------------------------------------------------------------------------------------------------


@dataclass
class _Document:
    """A file as plain values, and the line of every key and list entry."""

    source: FilePath
    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)

    def refuse(self, violations: Sequence[Violation]) -> None:
        """Raise MatrixError with every violation, a line each, if there are any."""
        if violations:
            raise MatrixError("\n".join(self._at(violation) for violation in violations))

    def _at(self, violation: Violation) -> str:
        """The violation with its file and line: that of the nearest enclosing key where it has none itself."""
        path = violation.path
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.source}:{self.lines.get(path, 1)}: {violation}"


def _read(source: FilePath) -> _Document:
    document = _Document(source)
    try:
        text = source.read_text(encoding="utf-8")
        _refuse_traps(text)
        document.value = _value(YAML(typ="safe", pure=True).compose(text), (), document)
    except OSError as error:
        raise MatrixError(f"cannot read {source}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise MatrixError(f"{source} is not a text file in UTF-8: {error.reason} at byte {error.start}") from error
    except (YAMLError, _UnreadableError) as error:
        raise MatrixError(_located(source, error)) from error
    return document


class _UnreadableError(Exception):
    """YAML that is well-formed but not plain data."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


def _located(source: FilePath, error: Exception) -> str:
    if isinstance(error, _UnreadableError):
        return f"{source}:{error.line}: {error}"
    mark = error.problem_mark or error.context_mark if isinstance(error, MarkedYAMLError) else None
    what = (getattr(error, "problem", None) or str(error)).partition("\n")[0]
    return f"{source}:{mark.line + 1 if mark else 1}: not readable as YAML: {what}"


def _refuse_traps(text: str) -> None:
    # before composing: nested aliases unfold to gigabytes, nesting without end takes minutes
    depth = 0
    for event in YAML(typ="safe", pure=True).parse(text):
        line = event.start_mark.line + 1
        if isinstance(event, AliasEvent):
            raise _UnreadableError(line, f"aliases are not read; write out what *{event.anchor} means")
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > _DEEPEST:
            raise _UnreadableError(line, f"nested deeper than {_DEEPEST} levels, which no matrix is")


def _value(node: Node | None, path: Path, document: _Document) -> Any:
    """The plain value of a node; notes the line of everything below it."""
    if node is None:
        return None
    document.lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, MappingNode):
        return dict(_entries(node, path, document))
    if isinstance(node, SequenceNode):
        return [_value(item, (*path, index), document) for index, item in enumerate(node.value)]
    return _scalar(node)


def _entries(node: MappingNode, path: Path, document: _Document) -> Iterator[tuple[str, Any]]:
    first: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = _key(key_node), key_node.start_mark.line + 1
        if key in first:
            raise _UnreadableError(line, f"key {key!r} stands here twice; the first is on line {first[key]}")
        first[key] = document.lines[(*path, key)] = line
        yield key, _value(value_node, (*path, key), document)


def _key(node: Node) -> str:
    if not isinstance(node, ScalarNode) or node.tag not in _TEXT:
        shown = node.value if isinstance(node, ScalarNode) else "a list or mapping"
        raise _UnreadableError(node.start_mark.line + 1, f"key {shown} is not a string; put it in quotes")
    return str(node.value)


def _scalar(node: Node) -> Any:
    if node.tag in _TEXT:
        return str(node.value)
    if node.tag in _READ_AS:
        try:
            return YAML(typ="safe", pure=True).constructor.construct_object(node)
        except ValueError as error:
            raise _UnreadableError(node.start_mark.line + 1, f"{node.value[:40]} is not a number: {error}") from error
    raise _UnreadableError(node.start_mark.line + 1, f"tag {node.tag} is not read; the matrix is plain data")


# -- values to rows ----------------------------------------------------------------------------------------------------


def _breaches(value: Mapping[str, Any]) -> Iterator[Violation]:
    """What the schema's language cannot say: one of two keys, a capability's form, a request that means nothing."""
    for platform, row in value["platforms"].items():
        for index, waiver in enumerate(row.get("waivers", ())):
            yield from _raised(partial(_waiver, waiver), ("platforms", platform, "waivers", index))
        for name, selection in row.get("selections", {}).items():
            path: Path = ("platforms", platform, "selections", name)
            request = SelectionRequest(**selection["request"])
            yield from _raised(partial(check_request, request), (*path, "request"))
            for index, entry in enumerate(selection["expect"]):
                yield from _expectation_breaches(platform, entry, (*path, "expect", index))
            yield from _repeated(selection["expect"], (*path, "expect"))


def _raised(check: Callable[[], object], path: Path) -> Iterator[Violation]:
    try:
        check()
    except (BadInputError, NothingToRunError) as error:
        yield Violation(path, str(error))


def _unmatched_waivers(row: Row) -> Iterator[Violation]:
    # a plan takes a moment to make: only for a row that has waivers
    ids = [cell.id for cell in plan([row]).cells] if row.waivers else []
    for index, waiver in enumerate(row.waivers):
        path: Path = ("platforms", row.platform, "waivers", index, "pattern")
        yield from _raised(partial(select_ids, waiver.pattern, ids), path)


def _expectation_breaches(platform: str, entry: Mapping[str, Any], path: Path) -> Iterator[Violation]:
    if ("backend" in entry) == ("refused" in entry):
        yield Violation(path, "give either backend or refused", "a decision is one of the two")
    for index, generation in enumerate(entry.get("generations", ())):
        if platform == "cuda" and _capability(generation) is None:
            text = f"{generation!r} is not a CUDA capability"
            yield Violation((*path, "generations", index), text, 'write it as "9.0"')


def _repeated(entries: Sequence[Mapping[str, Any]], path: Path) -> Iterator[Violation]:
    seen: set[str] = set()
    for index, entry in enumerate(entries):
        for generation in entry.get("generations", ("",)):
            if generation in seen:
                what = f"generation {generation!r}" if generation else "the device of no stated generation"
                yield Violation((*path, index), f"{what} has two expectations", "keep one")
            seen.add(generation)


def _row(platform: str, value: Mapping[str, Any]) -> Row:
    lanes = (Lane(Fidelity(name), tuple(v["backends"]), v["profile"]) for name, v in value["lanes"].items())
    named = value.get("selections", {}).items()
    selections = (expected for name, entry in named for expected in _expected(platform, name, entry))
    return Row(platform, tuple(lanes), tuple(selections), tuple(map(_waiver, value.get("waivers", ()))))


def _waiver(value: Mapping[str, Any]) -> Waiver:
    return Waiver(**{**value, "outcome": Outcome(value["outcome"])})


def _expected(platform: str, name: str, value: Mapping[str, Any]) -> Iterator[ExpectedSelection]:
    """One expectation a generation, named ``name[generation]`` as checks name their cases."""
    request = SelectionRequest(**value["request"])
    for entry in value["expect"]:
        for generation in entry.get("generations", (None,)):
            case = name if generation is None else f"{name}[{generation}]"
            codes = tuple(entry.get("refused", ()))
            yield ExpectedSelection(case, request, _device(platform, generation), entry.get("backend"), codes)


def _device(platform: str, generation: str | None) -> Device:
    if platform == "cuda" and generation is not None:
        return Device(platform, capability=_capability(generation))
    return Device(platform, arch=generation)


def _capability(text: str) -> tuple[int, int] | None:
    major, dot, minor = text.partition(".")
    return (int(major), int(minor)) if dot and major.isdecimal() and minor.isdecimal() else None
