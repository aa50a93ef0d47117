"""No variant is a no-op: each shows something else than the plain backend on some witness."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from meta.broken import VARIANTS
from meta.plain import Plain
from meta.scenes import witnesses
from meta.witness import Seen, differs

WITNESSES = witnesses()
MUST_RAISE = {
    "block past cache": "MetadataError",
    "block twice": "MetadataError",
    "negative block": "MetadataError",
    "slot past cache": "MetadataError",
    "slot twice": "MetadataError",
    "seq_len": "MetadataError",
    "counts": "MetadataError",
    "profiling context": "MetadataError",
    "key dtype": "BadInputError",
    "query size": "BadInputError",
    "cross window": "UnsupportedError",
    "cross alibi": "UnsupportedError",
    "scale without fp8": "BadInputError",
    "NaN scale": "BadInputError",
    "window of zero": "BadInputError",
    "odd heads": "BadInputError",
    "one sink": "BadInputError",
    "one slope": "BadInputError",
    "block-sparse": "UnsupportedError",
    "unknown argument": "TypeError",
    "unknown_forward_argument": "TypeError",
    "copies_in_a_chain": "BadInputError",
}
CRASHES = {
    "ProfilingRunWrites": "IndexError",
    "BlockTablesAssumedContiguous": "MetadataError",
    "MixedBatchRefused": "AssertionError",
    "EmptyBatchCrashes": "ZeroDivisionError",
}
"""The variants whose defect is an error; any other that raises one would be caught for the wrong reason."""


@cache
def plain_sees(name: str) -> Seen:
    return WITNESSES[name](Plain)


@pytest.mark.parametrize("name", WITNESSES)
def test_plain_answers_a_witness_or_refuses_it_with_the_right_error(name):
    assert plain_sees(name).get("error") == MUST_RAISE.get(name)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_variant_shows_something_else_than_the_plain_backend(variant):
    seen = ((name, WITNESSES[name](variant)) for name in WITNESSES)
    shown = next(((name, found) for name, found in seen if differs(plain_sees(name), found)), None)
    assert shown, f"{variant.name} is a no-op on all {len(WITNESSES)} witnesses"
    name, found = shown
    if "error" in found and "error" not in plain_sees(name):
        assert CRASHES.get(variant.name) == found["error"], f"{variant.name} falls over on {name!r}: {found['error']}"


def test_every_variant_names_its_defect():
    unnamed = [name for name, variant in VARIANTS.items() if not (variant.__doc__ or "").strip().endswith(".")]
    assert not unnamed


def test_there_are_at_least_forty_and_no_two_of_one_docstring():
    docs = sorted(variant.__doc__ for variant in VARIANTS.values())
    assert len(docs) >= 40
    assert not [a for a, b in pairwise(docs) if a == b]
