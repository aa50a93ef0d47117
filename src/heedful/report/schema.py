"""A light validator for our own JSON schemas (standard library only).

A schema is compiled once into plain functions, so that a report of 100,000 rows is checked in about a second. Only the
keywords in ``KEYWORDS`` are understood; a schema that uses another is an error, never half-checked. Two deliberate
differences from the full standard: 1.0 is not an integer, and a pattern must match the whole text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Final

from heedful.errors import did_you_mean

Path = tuple[str | int, ...]
"""Keys and indices from the root to a value."""

_TYPES: Final[Mapping[str, tuple[frozenset[type], str]]] = {
    "object": (frozenset({dict}), "an object"),
    "array": (frozenset({list}), "a list"),
    "string": (frozenset({str}), "a string"),
    "integer": (frozenset({int}), "a whole number"),
    "number": (frozenset({int, float}), "a number"),
    "boolean": (frozenset({bool}), "true or false"),
    "null": (frozenset({type(None)}), "null"),
}
_NOTES: Final = frozenset({"$schema", "$id", "$defs", "title", "description"})
KEYWORDS: Final = frozenset(
    {"$ref", "type", "enum", "pattern", "minimum", "minItems", "minProperties", "uniqueItems", "items"}
    | {"properties", "required", "additionalProperties"}
)


@dataclass(frozen=True)
class Violation:
    """One way in which a value breaks its schema: where, what, and what to do about it."""

    path: Path
    text: str
    hint: str = ""

    def __str__(self) -> str:
        where = ".".join(map(str, self.path)) or "the whole document"
        return f"{where}: {self.text}" + (f" ({self.hint})" if self.hint else "")


Found = Sequence[Violation]
Check = Callable[[Any], Found]


def load_schema(package: str, name: str) -> Mapping[str, Any]:
    """A schema that ships inside a package of ours."""
    schema: Mapping[str, Any] = json.loads(files(package).joinpath(name).read_text(encoding="utf-8"))
    return schema


def hint_for(word: str, legal: Sequence[str]) -> str:
    """The nearest legal word, or all of them when none is near."""
    return did_you_mean(word, legal).removeprefix("; ") or f"legal are {', '.join(legal)}"


def compile_schema(schema: Mapping[str, Any]) -> Check:
    """The function that lists a value's violations; an empty answer means that the value is legal."""
    return _Compiler(schema.get("$defs", {})).compile(schema)


class _Compiler:
    """Turns schema nodes into checks; named definitions are compiled once."""

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self.checks: dict[str, Check] = {}
        for name, node in definitions.items():
            self.checks[name] = self.compile(node)

    def compile(self, node: Mapping[str, Any]) -> Check:
        """One check for all keywords of a node."""
        if unknown := node.keys() - KEYWORDS - _NOTES:
            raise ValueError(f"schema keywords {sorted(unknown)} are not understood; legal are {sorted(KEYWORDS)}")
        rules = [rule for rule in self._rules(node) if rule is not None]
        return rules[0] if len(rules) == 1 else _all(rules)

    def _rules(self, node: Mapping[str, Any]) -> list[Check | None]:
        return [
            self._reference(node["$ref"]) if "$ref" in node else None,
            _typed(node["type"]) if "type" in node else None,
            _one_of(node["enum"]) if "enum" in node else None,
            _patterned(node["pattern"]) if "pattern" in node else None,
            _at_least(node["minimum"]) if "minimum" in node else None,
            _sized(dict, node["minProperties"]) if "minProperties" in node else None,
            _sized(list, node["minItems"]) if "minItems" in node else None,
            _unique if node.get("uniqueItems") else None,
            _items(self.compile(node["items"])) if "items" in node else None,
            self._object(node) if node.keys() & {"properties", "required", "additionalProperties"} else None,
        ]

    def _reference(self, target: str) -> Check:
        name = target.removeprefix("#/$defs/")
        # looked up when it runs: a definition may name one that is compiled after it
        return lambda value: self.checks[name](value)

    def _object(self, node: Mapping[str, Any]) -> Check:
        children = {name: self.compile(child) for name, child in node.get("properties", {}).items()}
        extra = node.get("additionalProperties", True)
        other = self.compile(extra) if isinstance(extra, Mapping) else (_anything if extra else None)
        return _fields(children, tuple(node.get("required", ())), other)


def _anything(_value: Any) -> Found:
    return ()


def _all(rules: Sequence[Check]) -> Check:
    def check(value: Any) -> Found:
        for rule in rules:
            if found := rule(value):
                return found  # the first broken rule says it best: a wrong type breaks the others too
        return ()

    return check


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _typed(wanted: str | list[str]) -> Check:
    names = [wanted] if isinstance(wanted, str) else wanted
    classes = frozenset().union(*(_TYPES[name][0] for name in names))
    words = " or ".join(_TYPES[name][1] for name in names)

    def check(value: Any) -> Found:
        if type(value) in classes:
            return ()
        quote = str in classes and isinstance(value, int | float) and not isinstance(value, bool)
        return (Violation((), f"{_shown(value)} is not {words}", "put it in quotes" if quote else ""),)

    return check


def _one_of(legal: Sequence[Any]) -> Check:
    def check(value: Any) -> Found:
        if any(value == word and type(value) is type(word) for word in legal):
            return ()
        words = [word if isinstance(word, str) else json.dumps(word) for word in legal]
        return (Violation((), f"{_shown(value)} is not legal here", hint_for(str(value), words)),)

    return check


def _patterned(pattern: str) -> Check:
    match = re.compile(pattern).fullmatch

    def check(value: Any) -> Found:
        if type(value) is not str or match(value):
            return ()
        return (Violation((), f"{_shown(value)} does not have the form {pattern}"),)

    return check


def _at_least(least: float) -> Check:
    def check(value: Any) -> Found:
        if type(value) not in (int, float) or value >= least:
            return ()
        return (Violation((), f"{_shown(value)} is less than {least}"),)

    return check


def _sized(kind: type[dict[Any, Any]] | type[list[Any]], least: int) -> Check:
    def check(value: Any) -> Found:
        if type(value) is not kind or len(value) >= least:
            return ()
        return (Violation((), f"has {len(value)} entries, needs {least} or more"),)

    return check


def _unique(value: Any) -> Found:
    if type(value) is not list:
        return ()
    seen: list[Any] = []
    for index, item in enumerate(value):
        if item in seen:
            return (Violation((index,), f"{_shown(item)} stands in the list twice"),)
        seen.append(item)
    return ()


def _under(key: str | int, found: Found) -> list[Violation]:
    # paths grow on the way up, so that a legal document pays nothing for them
    return [replace(violation, path=(key, *violation.path)) for violation in found]


def _items(child: Check) -> Check:
    def check(value: Any) -> Found:
        if type(value) is not list:
            return ()
        return [v for index, item in enumerate(value) if (found := child(item)) for v in _under(index, found)]

    return check


def _fields(children: Mapping[str, Check], required: tuple[str, ...], other: Check | None) -> Check:
    needed = frozenset(required)

    def check(value: Any) -> Found:
        if type(value) is not dict:
            return ()
        broken: list[Violation] = []
        if not needed <= value.keys():
            broken += (Violation((), f"{name!r} is missing") for name in required if name not in value)
        for key, item in value.items():
            child = children.get(key, other)
            if child is None:
                broken.append(Violation((key,), f"unknown key {key!r}", hint_for(key, list(children))))
            elif found := child(item):
                broken += _under(key, found)
        return broken

    return check
