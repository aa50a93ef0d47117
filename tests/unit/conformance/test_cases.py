"""Cases, the covering arrays and the list of checks: plain data that covers what it says it covers."""

import subprocess
import sys
from dataclasses import fields, replace
from importlib import import_module
from itertools import combinations, product
from pathlib import Path

import pytest

from heedful.backends.capabilities import Capability, Sizes, listed, pairs, unsupported_reasons
from heedful.conformance.cases import BATCHES, CACHED_ONLY, FAMILIES, Case, cells
from heedful.conformance.checklist import CHECKS, FREE_MODULE, PLAIN, PROFILES, array_cases, but, checks_for
from heedful.conformance.covering import AXES, common_array, legal, supplement, to_case, to_row, tuples_of, uncovered
from heedful.conformance.results import Fidelity, Outcome
from heedful.errors import BadInputError
from heedful.registry import load
from heedful.types import Device


def legal_pairs():
    """Every pair of axis values that a legal case has; found by trying, not by the rules that made the array."""
    for a, b in combinations(AXES, 2):
        for x, y in product(AXES[a], AXES[b]):
            if legal(to_case({"batch": "prefill", a: x, b: y})):
                yield (a, x), (b, y)


def test_every_legal_pair_of_values_meets_in_the_common_array():
    covered = {frozenset(pair) for case in common_array() for pair in tuples_of(case)}
    missing = [pair for pair in legal_pairs() if frozenset(pair) not in covered]
    assert missing == []


def test_every_case_of_the_common_array_is_legal():
    assert [case.id for case in common_array() if not legal(case)] == []


@pytest.mark.nightly
def test_every_legal_triple_of_values_meets_in_the_full_array():
    covered = {frozenset(triple) for case in common_array(3) for triple in tuples_of(case, 3)}
    axes = [(axis, value) for axis, values in AXES.items() for value in values]
    triples = (t for t in combinations(axes, 3) if len({axis for axis, _ in t}) == 3)
    assert [t for t in triples if legal(to_case({"batch": "prefill"} | dict(t))) and frozenset(t) not in covered] == []


PICKY = Capability(
    variant="picky",
    platform="cuda",
    dtypes=frozenset({"bfloat16"}),
    head_sizes=listed(64, 128, 160),
    block_sizes=Sizes(multiple_of=256),
    features=frozenset({"window", "soft_cap"}),
    excluded_pairs=pairs(("window", "soft_cap")),
)


def claims_of(*rows):
    def claims(case):
        return not unsupported_reasons("X", rows, case.request(), Device(rows[0].platform))

    return claims


@pytest.mark.parametrize("rows", [(PICKY,), load("TORCH_SDPA").CAPABILITIES, load("PALLAS").CAPABILITIES])
def test_every_pair_that_a_backend_claims_meets_in_a_case_that_it_claims(rows):
    claims = claims_of(*rows)
    added = supplement(claims, common_array())
    assert uncovered(claims, common_array() + added) == {}
    assert all(legal(case) and claims(case) for case in added)


def test_what_a_backend_never_claims_is_not_supplemented():
    added = supplement(claims_of(PICKY), common_array())
    assert {case.block_size for case in added} == {256}
    assert not any(case.sliding_window and case.logits_soft_cap for case in added)
    assert {case.head_size for case in added} == {64, 128, 160}


def test_a_row_of_the_array_and_its_case_are_the_same():
    assert all(to_case(to_row(case)) == case for case in common_array())


def test_ids_are_short_plain_words_and_name_every_field():
    plain = Case()
    other = {
        "dtype": "bfloat16",
        "kv_cache_dtype": "fp8_e5m2",
        "num_heads": 8,
        "num_kv_heads": 1,
        "head_size": 80,
        "head_size_v": 48,
        "block_size": 32,
        "attn_type": "encoder",
        "sliding_window": 7,
        "alibi": True,
        "logits_soft_cap": 0.5,
        "sinks": True,
        "batch": "ragged",
        "family": "coded",
        "seed": 3,
        "attention_free": True,
    }
    assert set(other) == {field.name for field in fields(Case)}
    assert plain.id == "f32-h4k2-d64-b16-mixed-normal"
    for name, value in other.items():
        assert replace(plain, **{name: value}).id != plain.id, name
    everything = replace(plain, **{**other, "attention_free": False}).id
    assert everything == "bf16-fp8_e5m2-h8k1-d80v48-b32-encoder-w7-alibi-cap0.5-sinks-ragged-coded-s3"


@pytest.mark.parametrize("profile", ["smoke", "ci"])
def test_a_profile_asks_no_cell_twice(profile):
    ids = [f"{name}[{case.id}]" for name, case in cells(profile)]
    assert len(ids) == len(set(ids))


def test_every_profile_asks_what_the_smaller_one_asks():
    smoke, ci = (set(cells(profile)) for profile in PROFILES[:2])
    assert smoke < ci


def test_smoke_asks_each_feature_and_each_batch_kind():
    asked = [case for name, case in cells("smoke") if name == "output_agrees_with_reference"]
    assert {case.batch for case in asked} == set(BATCHES)
    assert {case.attn_type for case in asked} == set(AXES["attn_type"])
    for feature in ("sliding_window", "alibi", "logits_soft_cap", "sinks", "head_size_v"):
        assert any(getattr(case, feature) for case in asked), feature
    assert {case.kv_cache_dtype for case in asked} == {"auto", "fp8", "fp8_e4m3", "fp8_e5m2", "u8"}


def test_an_unknown_profile_is_an_error_that_names_the_profiles():
    with pytest.raises(BadInputError, match="give one of smoke, ci, full"):
        cells("nightly")


def test_every_listed_check_has_its_function_and_every_function_is_listed():
    modules = {check.module: import_module(f"heedful.conformance.{check.module}") for check in CHECKS}
    written = {name for m in modules.values() for name in vars(m) if name.startswith("check_")}
    here = {f"check_{check.name}" for check in CHECKS if hasattr(modules[check.module], f"check_{check.name}")}
    assert here == {f"check_{check.name}" for check in CHECKS}
    assert written == here
    assert all(vars(modules[check.module])[f"check_{check.name}"].__doc__ for check in CHECKS)


def test_only_a_backend_without_attention_is_asked_the_attention_free_checks():
    free = checks_for(load("NO_ATTENTION").CAPABILITIES)
    attends = checks_for(load("TORCH_SDPA").CAPABILITIES)
    assert {check.module for check in free} == {FREE_MODULE}
    assert set(free) | set(attends) == set(CHECKS)
    assert not set(free) & set(attends)


@pytest.mark.nightly
def test_full_adds_seeds_and_triples():
    assert {case.seed for case in array_cases("full")} == {0, 1, 2}


def test_cross_attention_says_how_many_encoder_keys_each_sequence_has():
    spans = but(attn_type="encoder_decoder").spans
    assert [span.encoder for span in spans] == [19, 0, 2, 19]
    assert all(span.encoder == 0 for span in PLAIN.spans)


def test_no_encoder_batch_has_a_context():
    for batch in set(BATCHES) - CACHED_ONLY:
        assert all(span.context == 0 for span in but(attn_type="encoder_only", batch=batch).spans), batch


def test_the_page_on_conformance_names_every_outcome_profile_batch_kind_and_family():
    page = Path(__file__).parents[3].joinpath("docs", "conformance.md").read_text(encoding="utf-8")
    words = [*Outcome, *Fidelity, *PROFILES, *BATCHES, *FAMILIES]
    assert [str(word) for word in words if f"`{word}`" not in page] == []


@pytest.mark.parametrize(
    "module", ["cases", "checklist", "covering", "plan", "results", "run", "pytest_plugin", "pool"]
)
def test_the_data_column_loads_no_torch(module):
    code = f"import sys, heedful.conformance.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
