"""Which check asks what: every check's name, the file it stands in, and the cases it is asked in each profile.

Data only, no torch: a plan is made from it on any machine. The functions are ``check_<name>`` in the module named here;
a test holds the two lists together. How to add a check: docs/conformance.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from heedful.conformance.cases import BATCHES, FAMILIES, Case
from heedful.conformance.closed_forms import FORMS
from heedful.conformance.covering import common_array, supplement
from heedful.errors import BadInputError
from heedful.types import AttentionType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from heedful.backends.capabilities import Capability
    from heedful.conformance.closed_forms import Form
    from heedful.conformance.covering import Claims

PROFILES: Final = ("smoke", "ci", "full")
PLAIN: Final = Case(dtype="bfloat16", num_heads=4, num_kv_heads=2, head_size=128, block_size=16, batch="mixed")
"""The layer that most kernels take; each feature is asked as one change to it."""

FREE: Final = Case(attention_free=True)


def but(**changes: Any) -> Case:
    """PLAIN with some fields changed."""
    return replace(PLAIN, **changes)


FEATURES: Final = (
    *(but(batch=batch) for batch in BATCHES),
    but(dtype="float16"),
    but(dtype="float32"),
    *(but(kv_cache_dtype=word) for word in ("fp8", "fp8_e4m3", "fp8_e5m2", "u8")),
    *(but(sliding_window=7, batch=batch) for batch in ("prefill", "chunked", "decode")),
    but(alibi=True),
    but(logits_soft_cap=2.0),
    but(sinks=True),
    *(but(attn_type=kind, batch="ragged") for kind in ("encoder", "encoder_only", "encoder_decoder")),
    but(attn_type="encoder_only", sliding_window=7, batch="ragged"),
    but(attn_type="encoder_only", alibi=True, batch="ragged"),
    but(attn_type="encoder_decoder", sinks=True, batch="mixed"),
    but(head_size_v=48),
    but(head_size=64, head_size_v=80),
    *(but(head_size=size) for size in (64, 72, 80, 96, 112, 120, 256)),
    but(num_heads=8, num_kv_heads=1),
    but(num_heads=16, num_kv_heads=16, head_size=64),
    but(num_heads=6, num_kv_heads=3, alibi=True),
    but(block_size=32),
)
"""Each feature once: what a backend refuses here is what it does not claim."""

CONTRACT_REFUSES: Final = (
    but(attn_type="encoder_decoder", sliding_window=7, batch="prefill"),
    but(attn_type="encoder_decoder", alibi=True, batch="prefill"),
)
"""Cross attention has no positions in common, so every backend must refuse these."""

U8: Final = but(kv_cache_dtype="u8", block_size=32)
"""OpenVINO's cache in OpenVINO's own pages, which the array may not happen to bring together."""
U8_FEATURES: Final[tuple[dict[str, Any], ...]] = (
    *({"batch": batch} for batch in ("mixed", "chunked", "decode", "prefix_hit", "speculative", "padded")),
    {"sliding_window": 7},
    {"sinks": True, "head_size_v": 48},
    {"alibi": True, "head_size": 80},
)
FP8: Final = ("fp8", "fp8_e4m3", "fp8_e5m2")
PHASES: Final = ("prefill", "decode", "chunked")
CROSS: Final = but(attn_type="encoder_decoder", batch="mixed")
KINDS: Final = (PLAIN, but(attn_type="encoder_only", batch="ragged"), but(attn_type="encoder", batch="ragged"))


def with_families(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Each case in every input family."""
    return tuple(replace(case, family=family) for case in cases for family in FAMILIES)


def in_dtypes(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Each case in every model dtype."""
    return tuple(replace(case, dtype=dtype) for case in cases for dtype in ("float32", "bfloat16", "float16"))


def has_cache(case: Case) -> bool:
    """Whether this step writes keys into pages."""
    return case.attn_type == AttentionType.DECODER


def always(_case: Case) -> bool:
    """Every case of the array."""
    return True


@dataclass(frozen=True)
class Check:
    """One check: ``check_<name>`` in ``heedful.conformance.<module>``.

    smoke: its cheapest cases, asked in every profile. more: asked from profile ``ci`` on. array: which cases of the
    covering array it is asked beside them, None for none. needs: feature words that a row must claim, ``lse``.
    """

    name: str
    module: str
    smoke: tuple[Case, ...]
    more: tuple[Case, ...] = ()
    array: Callable[[Case], bool] | None = None
    needs: frozenset[str] = frozenset()

    def cases(self, profile: str, claims: Claims | None = None) -> tuple[Case, ...]:
        """The check's cases in running order, without repeats."""
        found = self.smoke if profile == "smoke" else self.smoke + self.more
        if profile != "smoke" and self.array is not None:
            found += tuple(case for case in array_cases(profile, claims) if self.array(case))
        return tuple(dict.fromkeys(found))


@lru_cache(maxsize=4)  # several checks of one backend ask for the same array
def array_cases(profile: str, claims: Claims | None = None) -> tuple[Case, ...]:
    """The common array of the profile, then what it leaves open of the pairs that the backend claims."""
    if profile == "ci":
        common = common_array()
    else:
        common = tuple(replace(case, seed=seed) for seed in range(3) for case in common_array(3))
    return common if claims is None else common + supplement(claims, common)


FREE_MODULE: Final = "checks_free"

_FREE: Final = (
    Check("attention_free_layers_need_no_memory", FREE_MODULE, smoke=(FREE,)),
    Check("attention_free_layers_refuse_to_attend", FREE_MODULE, smoke=(FREE,)),
    Check("attention_layers_are_refused", FREE_MODULE, smoke=(PLAIN,)),
)

_NUMERIC: Final = (
    Check(
        "output_agrees_with_reference",
        "checks_numeric",
        smoke=(*with_families(FEATURES), *(replace(case, dtype="float32") for case in FEATURES), *CONTRACT_REFUSES),
        more=(
            *in_dtypes(
                but(sliding_window=window, alibi=alibi, batch="long", head_size=64)
                for window, alibi in ((None, False), (None, True), (100, False))
            ),
            *in_dtypes(replace(U8, **feature) for feature in U8_FEATURES),
        ),
        array=always,
    ),
    Check(
        "lse_agrees_with_reference",
        "checks_numeric",
        smoke=with_families((PLAIN, but(sinks=True), but(batch="decode", logits_soft_cap=2.0), but(alibi=True))),
        array=always,
        needs=frozenset({"lse"}),
    ),
    Check(
        "a_row_without_keys_is_zero",
        "checks_numeric",
        smoke=tuple(but(attn_type="encoder_decoder", batch=batch) for batch in ("prefill", "mixed")),
        more=in_dtypes((but(attn_type="encoder_decoder", batch="prefill", sinks=True),)),
    ),
    Check(
        "a_row_without_keys_has_the_lse_of_nothing",
        "checks_numeric",
        smoke=tuple(but(attn_type="encoder_decoder", batch="mixed", sinks=sinks) for sinks in (False, True)),
        needs=frozenset({"lse"}),
    ),
    Check(
        "chunking_never_changes_the_result",
        "checks_numeric",
        smoke=(
            but(batch="prefill"),
            but(batch="prefill", sliding_window=7),
            but(batch="prefill", kv_cache_dtype="fp8"),
        ),
        more=in_dtypes(
            (
                but(batch="prefill", alibi=True, logits_soft_cap=2.0),
                but(batch="prefill", sinks=True),
                replace(U8, batch="prefill"),
            )
        ),
    ),
    Check(
        "a_profiling_run_needs_no_cache",
        "checks_numeric",
        smoke=tuple(
            but(batch="ragged", **feature) for feature in ({}, {"logits_soft_cap": 2.0}, {"sliding_window": 7})
        ),
        more=(but(batch="ragged", alibi=True), but(batch="ragged", sinks=True), but(batch="ragged", head_size_v=48)),
    ),
)


def forms_of(case: Case) -> tuple[Form, ...]:
    """The closed forms that a case asks, in the phase that its batch names."""
    return tuple(form for form in FORMS if case in _form_cases(form, case.dtype))


def phase_of(case: Case) -> str:
    """How the forms of a case are asked: its batch where there is a cache, else its attention type."""
    return case.batch if has_cache(case) else str(case.attn_type)


def _form_cases(form: Form, dtype: str) -> tuple[Case, ...]:
    plain = form.case(dtype)
    return tuple(replace(plain, batch=phase) if has_cache(plain) else plain for phase in form.phases)


def known(*dtypes: str, lse: bool = False) -> tuple[Case, ...]:
    """Every case that stands for a closed form, or for one with a known LSE."""
    forms = [form for form in FORMS if form.lse is not None or not lse]
    return tuple(dict.fromkeys(case for dtype in dtypes for form in forms for case in _form_cases(form, dtype)))


_CLOSED: Final = (
    Check("known_answers_come_out", "checks_closed", smoke=known("float32", "bfloat16"), more=known("float16")),
    Check(
        "known_lses_come_out",
        "checks_closed",
        smoke=known("float32", lse=True),
        more=known("bfloat16", "float16", lse=True),
        needs=frozenset({"lse"}),
    ),
)

_FORM: Final = (
    Check(
        "pad_rows_are_zero", "checks_form", smoke=tuple(replace(case, batch="padded") for case in (*KINDS[:2], CROSS))
    ),
    Check("output_is_filled_in_place_and_returned", "checks_form", smoke=(*KINDS, but(head_size_v=48))),
    Check("the_flat_form_is_answered_flat", "checks_form", smoke=(*KINDS, but(head_size_v=48, batch="decode"))),
    Check(
        "strides_never_change_the_result",
        "checks_form",
        smoke=(*KINDS, CROSS, *(but(batch=batch) for batch in PHASES)),
        more=in_dtypes((but(head_size_v=48), but(head_size=80, batch="decode"))),
    ),
    Check(
        "inputs_are_left_as_they_were", "checks_form", smoke=(*KINDS, but(batch="decode", alibi=True), but(sinks=True))
    ),
    Check("a_step_without_tokens_is_legal", "checks_form", smoke=(PLAIN,)),
    Check("a_scale_may_be_a_tensor", "checks_form", smoke=(PLAIN, but(kv_cache_dtype="fp8", batch="chunked"))),
)

_CACHE: Final = (
    Check(
        "a_write_stores_exact_bytes",
        "checks_cache",
        smoke=(PLAIN, but(batch="prefix_hit"), but(batch="padded"), *(but(kv_cache_dtype=word) for word in FP8)),
        more=in_dtypes(
            (
                but(head_size_v=48),
                but(num_heads=16, num_kv_heads=16, head_size=64, batch="prefill"),
                *(replace(U8, **feature) for feature in U8_FEATURES),
            )
        ),
        array=has_cache,
    ),
    Check("fp8_rounds_to_even_and_clamps", "checks_cache", smoke=in_dtypes(but(kv_cache_dtype=word) for word in FP8)),
    Check("reading_changes_no_cache", "checks_cache", smoke=(CROSS, *KINDS[1:])),
    Check("encoder_keys_have_slots_of_their_own", "checks_cache", smoke=(CROSS,)),
    Check(
        "page_tails_never_reach_the_output",
        "checks_cache",
        smoke=(*(but(batch=batch) for batch in PHASES), but(batch="exact_page"), CROSS),
        more=in_dtypes(
            (
                but(batch="decode", block_size=32),
                but(batch="decode", kv_cache_dtype="fp8"),
                replace(U8, batch="decode"),
                replace(U8, batch="chunked"),
            )
        ),
    ),
    Check("slots_past_32_bits_are_exact", "checks_cache", smoke=(but(batch="decode", num_heads=16, num_kv_heads=16),)),
    Check(
        "copy_blocks_copies_whole_blocks",
        "checks_cache",
        smoke=(PLAIN, but(kv_cache_dtype="fp8"), but(head_size_v=48)),
        more=(U8,),
    ),
    Check("copy_blocks_refuses_chains", "checks_cache", smoke=(PLAIN,)),
    Check(
        "swap_blocks_copies_whole_blocks",
        "checks_cache",
        smoke=(PLAIN, but(kv_cache_dtype="fp8"), but(head_size_v=48)),
        more=(U8,),
    ),
)

_STEPS: Final = (
    Check("batch_mates_never_matter", "checks_steps", smoke=(PLAIN, but(batch="ragged"), but(batch="decode"))),
    Check("layers_share_a_steps_metadata", "checks_steps", smoke=(but(sliding_window=7), but(alibi=True), PLAIN)),
    Check(
        "a_layer_keeps_nothing_of_a_step", "checks_steps", smoke=(PLAIN, but(batch="decode"), but(kv_cache_dtype="fp8"))
    ),
    Check("forward_is_reentrant", "checks_steps", smoke=(PLAIN, but(batch="prefill"), but(batch="decode"))),
)

_REFUSAL: Final = tuple(
    Check(name, "checks_refusal", smoke=cases)
    for name, cases in {
        "an_unknown_argument_is_refused": (PLAIN,),
        "a_layer_that_means_nothing_is_refused": (PLAIN,),
        "blocksparse_is_refused_unless_claimed": (PLAIN,),
        "per_head_numbers_must_fit_the_heads": (but(alibi=True), but(sinks=True)),
        "a_bad_cache_scale_is_refused": (PLAIN, but(kv_cache_dtype="fp8"), U8),
        "tensors_that_do_not_fit_are_refused": (PLAIN, but(attn_type="encoder_only", batch="ragged")),
        "a_block_outside_the_cache_is_refused": (PLAIN, but(batch="decode"), CROSS),
        "a_block_named_twice_is_refused": (but(batch="decode"), but(batch="chunked")),
        "a_slot_outside_the_cache_is_refused": (PLAIN, but(batch="decode")),
        "a_slot_written_twice_is_refused": (PLAIN, but(batch="decode")),
        "lengths_that_disagree_are_refused": (PLAIN, but(batch="decode")),
        "counts_that_disagree_are_refused": (PLAIN, but(batch="decode")),
        "a_profiling_run_with_context_is_refused": (but(batch="chunked"), but(batch="decode")),
        "graphs_are_refused_unless_claimed": (PLAIN,),
    }.items()
)

CHECKS: Final = (*_CLOSED, *_NUMERIC, *_FORM, *_CACHE, *_STEPS, *_REFUSAL, *_FREE)


def checks_for(rows: Sequence[Capability]) -> tuple[Check, ...]:
    """The checks that mean something to a backend with these CAPABILITIES; all of them for one that attends."""
    only_free = all(row.features == {"attention_free"} for row in rows)
    return tuple(check for check in CHECKS if (check.module == FREE_MODULE) == only_free)


def cells(profile: str) -> list[tuple[str, Case]]:
    """Every (check name, case) of a profile for a backend that claims everything: what a check author looks at."""
    check_profile(profile)
    return [(check.name, case) for check in CHECKS for case in check.cases(profile)]


def check_profile(profile: str) -> None:
    """Raise BadInputError for a word that is no profile."""
    if profile not in PROFILES:
        raise BadInputError(f"unknown profile {profile!r}; give one of {', '.join(PROFILES)}")
