"""The light validator: it agrees with the full one on our schemas, says where and what, and never half-checks."""

import copy
import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from heedful.report.schema import Violation, compile_schema, load_schema

SCHEMA = load_schema("heedful.report", "report.schema.json")
CHECK, FULL = compile_schema(SCHEMA), Draft202012Validator(SCHEMA)


def told(schema, value):
    return [str(violation) for violation in compile_schema(schema)(value)]


@pytest.mark.parametrize(
    ("schema", "value", "message"),
    [
        ({"type": "string"}, 3.1, "the whole document: 3.1 is not a string (put it in quotes)"),
        ({"type": "string"}, True, "the whole document: true is not a string"),
        ({"type": "integer"}, True, "the whole document: true is not a whole number"),
        ({"type": ["number", "null"]}, "x", 'the whole document: "x" is not a number or null'),
        ({"enum": ["PASS", 1]}, "PAS", "the whole document: \"PAS\" is not legal here (did you mean 'PASS'?)"),
        ({"enum": [1]}, True, "the whole document: true is not legal here (legal are 1)"),
        ({"pattern": "^a$"}, "a\n", 'the whole document: "a\\n" does not have the form ^a$'),
        ({"minimum": 0}, -1, "the whole document: -1 is less than 0"),
        ({"minItems": 1}, [], "the whole document: has 0 entries, needs 1 or more"),
        ({"minProperties": 1}, {}, "the whole document: has 0 entries, needs 1 or more"),
        ({"uniqueItems": True}, [1, 2, 1], "2: 1 stands in the list twice"),
        ({"items": {"type": "null"}}, [None, 0], "1: 0 is not null"),
        ({"required": ["a"]}, {}, "the whole document: 'a' is missing"),
        (
            {"properties": {"name": {}}, "additionalProperties": False},
            {"nme": 1},
            "nme: unknown key 'nme' (did you mean 'name'?)",
        ),
        (
            {"properties": {"a": {"items": {"properties": {"b": {"type": "null"}}}}}},
            {"a": [{}, {"b": "x" * 99}]},
            f'a.1.b: "{"x" * 56}... is not null',
        ),
        ({"additionalProperties": {"type": "null"}}, {"x": 1}, "x: 1 is not null"),
    ],
)
def test_a_breach_says_where_and_what(schema, value, message):
    assert told(schema, value) == [message]


def test_every_breach_is_listed_and_rules_for_other_types_are_silent():
    assert told({"items": {"type": "null"}}, [1, None, 2]) == ["0: 1 is not null", "2: 2 is not null"]
    every = {"pattern": "^a$", "minimum": 1, "minItems": 1, "minProperties": 1, "uniqueItems": True, "items": {}}
    assert told(every | {"required": ["a"]}, None) == []


def test_a_definition_may_name_itself():
    schema = {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": {"type": "object", "additionalProperties": {"$ref": "#/$defs/tree"}}},
    }
    assert told(schema, {"a": {"b": {}}}) == []
    assert told(schema, {"a": {"b": 1}}) == ["a.b: 1 is not an object"]


def test_a_keyword_that_is_not_understood_is_an_error_and_not_half_a_check():
    with pytest.raises(ValueError, match=r"schema keywords \['oneOf'\] are not understood"):
        compile_schema({"items": {"oneOf": []}})


def test_a_violation_without_a_hint_has_no_brackets():
    assert str(Violation(("a", 0), "is odd")) == "a.0: is odd"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["PASS", "cpu", "NaN", 0.5]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


def places(value, path=()):
    """Every path of a document, the root left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_agrees_with_the_full_validator_on_reports_with_one_change(report, data):
    document = json.loads(json.dumps(report.to_dict()))
    *parents, last = data.draw(st.sampled_from(list(places(document))))
    changed = copy.deepcopy(document)
    holder = changed
    for key in parents:
        holder = holder[key]
    if data.draw(st.booleans()):
        del holder[last]
    else:
        holder[last] = data.draw(JSON)
    assert (not CHECK(changed)) == FULL.is_valid(changed)


def test_ten_thousand_rows_are_checked_in_a_moment(report):
    document = report.to_dict()
    document["results"] = document["results"] * 1500
    began = time.process_time()
    assert not CHECK(document)
    assert time.process_time() - began < 2
