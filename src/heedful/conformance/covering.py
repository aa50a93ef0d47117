"""Covering arrays over the axes: every legal pair of values meets in some case. Pure data, no torch.

The common array is the same for every backend, so its ids are stable between releases. What a backend's own refusals
hide from it, ``supplement`` covers with cases that the backend claims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import combinations, product
from typing import Any, Final

from covertable import make

from heedful.conformance.cases import CACHED_ONLY, FAMILIES, Case
from heedful.types import AttentionType

Claims = Callable[[Case], bool]
Row = dict[str, Any]

AXES: Final[Row] = {
    "batch": (
        *("prefill", "decode", "mixed", "chunked", "prefix_hit", "ragged"),
        *("length_one", "exact_page", "padded", "empty", "speculative"),
    ),
    "head_size": (32, 64, 72, 80, 96, 112, 120, 128, 192, 256),
    "heads": ((4, 2), (4, 4), (1, 1), (8, 1), (9, 3)),
    "attn_type": ("decoder", "encoder", "encoder_only", "encoder_decoder"),
    "block_size": (16, 32, 64, 128),
    "kv_cache_dtype": ("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
    "sliding_window": (None, 7, 1, 20),
    "dtype": ("float32", "bfloat16", "float16"),
    "logits_soft_cap": (None, 2.0, 30.0),
    "family": FAMILIES,
    "alibi": (False, True),
    "sinks": (False, True),
    "head_size_v": (None, 48),
}
"""The legal values of profile ``ci``. A window of 1 shows the token alone; a cap of 2 bends ordinary logits."""

RARE: Final[Row] = {"kv_cache_dtype": ("u8",), "block_size": (8, 256), "head_size": (160, 224)}
"""Values that few kernels take: they join a backend's supplement, and only where it claims them."""

NO_CACHE: Final = frozenset({AttentionType.ENCODER, AttentionType.ENCODER_ONLY})
CROSS_BATCHES: Final = frozenset({"prefill", "decode", "mixed", "ragged", "length_one", "padded", "empty"})


def legal(case: Case) -> bool:
    """Whether the contract gives the case a meaning: no cached batch without a cache, no positions across sequences."""
    if case.attn_type in NO_CACHE:
        return case.batch not in CACHED_ONLY and case.kv_cache_dtype == "auto"
    if case.attn_type == AttentionType.ENCODER_DECODER:
        return case.batch in CROSS_BATCHES and case.sliding_window is None and not case.alibi
    return True


def to_case(row: Row) -> Case:
    """A row of the array as a Case; an axis that the row leaves out stands at its plain value."""
    fields = dict(row)
    if "heads" in fields:
        fields["num_heads"], fields["num_kv_heads"] = fields.pop("heads")
    return Case(**fields)


def to_row(case: Case) -> Row:
    """Inverse of to_case, over the axes."""
    heads = (case.num_heads, case.num_kv_heads)
    return {axis: heads if axis == "heads" else getattr(case, axis) for axis in AXES}


@lru_cache
def common_array(strength: int = 2) -> tuple[Case, ...]:
    """The array that every backend is asked: each legal tuple of ``strength`` values of AXES meets in some case."""
    factors = {axis: list(values) for axis, values in AXES.items()}
    rows = make(factors, strength=strength, constraints=[_rule(axis) for axis in AXES if axis != "attn_type"])
    return tuple(to_case(row) for row in rows)


def _rule(axis: str) -> Row:
    """What ``legal`` says about one axis beside attn_type, in the form that covertable can look ahead with."""

    def allows(row: Row) -> bool:
        return legal(to_case({"batch": "prefill", "attn_type": row["attn_type"], axis: row[axis]}))

    return {"operator": "fn", "requires": ["attn_type", axis], "evaluate": allows}


def tuples_of(case: Case, strength: int = 2) -> Iterator[tuple[tuple[str, Any], ...]]:
    """The tuples of (axis, value) that a case covers."""
    return combinations(to_row(case).items(), strength)


def uncovered(claims: Claims, cases: Iterable[Case]) -> dict[tuple[tuple[str, Any], ...], Case]:
    """Pairs that some legal and claimed case has and that no claimed one of ``cases`` covers, each with such a case."""
    covered = {pair for case in cases if claims(case) for pair in tuples_of(case)}
    bases = _bases(claims)
    values = [(axis, value) for axis, value in _values() if _claimed_with(((axis, value),), bases, claims)]
    wanted = (pair for pair in combinations(values, 2) if pair[0][0] != pair[1][0] and pair not in covered)
    found = ((pair, _claimed_with(pair, bases, claims)) for pair in wanted)
    return {pair: case for pair, case in found if case is not None}


def supplement(claims: Claims, cases: Iterable[Case]) -> tuple[Case, ...]:
    """Claimed cases that together with ``cases`` cover every pair the backend claims."""
    missing, added = uncovered(claims, cases), []
    while missing:
        case = _widen(next(iter(missing.values())), claims, missing)
        added.append(case)
        for pair in tuples_of(case):
            missing.pop(pair, None)
    return tuple(added)


def _values() -> Iterator[tuple[str, Any]]:
    for axis, values in AXES.items():
        yield from ((axis, value) for value in (*values, *RARE.get(axis, ())))


def _bases(claims: Claims) -> list[Case]:
    """Plain claimed cases, one for each choice of sizes and dtypes: where the search for a pair starts."""
    sizes = ("dtype", "kv_cache_dtype", "head_size", "block_size")
    choices = product(*([value for a, value in _values() if a == axis] for axis in sizes))
    cases = (to_case({"batch": "prefill", **dict(zip(sizes, choice, strict=True))}) for choice in choices)
    return [case for case in cases if claims(case)]


def _claimed_with(pair: Iterable[tuple[str, Any]], bases: list[Case], claims: Claims) -> Case | None:
    """The first base that is still legal and claimed when it takes the values of the pair."""
    changes = dict(pair)
    candidates = (to_case(to_row(base) | changes) for base in bases)
    return next((case for case in candidates if legal(case) and claims(case)), None)


def _widen(case: Case, claims: Claims, missing: Mapping[Any, Case]) -> Case:
    """Move each axis that the first missing pair leaves free to the value that covers most of what is missing."""
    fixed = {axis for axis, _ in next(iter(missing))}
    for axis in (axis for axis in AXES if axis not in fixed):
        options = (to_case(to_row(case) | {axis: value}) for a, value in _values() if a == axis)
        allowed = [case, *(option for option in options if legal(option) and claims(option))]
        case = max(allowed, key=lambda option: sum(pair in missing for pair in tuples_of(option)))
    return case
