"""Known answers: the reference gives every one, in every dtype and phase, and no defect's value is taken for it."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from heedful.conformance.bench import layer_arguments
from heedful.conformance.closed_form_runs import asked, judge_known, judge_known_lse, numbers, through_reference
from heedful.conformance.closed_forms import (
    ALIBI_SLOPES,
    FORMS,
    FP8_WRITES,
    LAST_BYTE_OF_32_BITS,
    LAST_PAGES,
    PHASES,
    TOLERANCE,
)
from heedful.conformance.pages import paging, slots_of
from heedful.conformance.tolerance import OutOfToleranceError
from heedful.errors import BadInputError
from heedful.reference import alibi_slopes, store_rounded

BY_NAME = {form.name: form for form in FORMS}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE)
EVERY = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)


def in_dtype(rows, form, dtype):
    return numbers(rows, form.heads[0])[..., None].to(getattr(torch, dtype))


@EVERY
@DTYPES
def test_the_reference_gives_the_known_answer(form, dtype):
    output, lse = through_reference(form, dtype)
    right = numbers(form.right, form.heads[0])
    assert judge_known(form, output.to(getattr(torch, dtype)), right)["known"] <= 1
    if form.lse is not None:
        judge_known_lse(form, lse, numbers(form.lse, form.heads[0]))


@EVERY
@DTYPES
def test_no_defect_is_taken_for_the_answer(form, dtype):
    right = numbers(form.right, form.heads[0])
    assert form.defects or form.exact
    for name, rows in form.defects.items():
        with pytest.raises(OutOfToleranceError):
            print(name, judge_known(form, in_dtype(rows, form, dtype), right))


@pytest.mark.parametrize(("form", "phase"), [(form, phase) for form in FORMS for phase in form.phases])
@DTYPES
def test_a_step_of_any_phase_asks_the_same_question(form, phase, dtype):
    step = asked(form, dtype, phase)
    expected = step.batch.expected()
    output = expected.output.to(getattr(torch, dtype))
    lse = torch.full(output.shape[:2], math.nan)
    lse[: len(expected.lse)] = expected.lse.float()
    assert max(step.judge(output, lse).values()) <= 1
    assert len(step.rows) == len(step.right) >= 1


def test_phases_are_what_they_say():
    form = BY_NAME["window 4, every row"]
    prefill, decode, chunked = (asked(form, "float32", phase).batch.metadata for phase in PHASES)
    assert (prefill.num_prefills, prefill.context_lens.tolist()) == (1, [0])
    assert (decode.num_decodes, decode.context_lens.tolist()) == (8, list(range(8)))
    assert (chunked.num_prefills, chunked.num_decodes, chunked.context_lens.tolist()) == (1, 0, [2])


def test_every_decoder_form_but_empty_rows_is_asked_in_every_phase():
    assert [form.name for form in FORMS if not form.phases] == ["rows without keys"]
    with pytest.raises(BadInputError, match="cannot be asked as 'decode'; give one of encoder"):
        asked(BY_NAME["encoder"], "float32", "decode")


def test_a_wrong_answer_is_told_with_the_defect_it_looks_like():
    form = BY_NAME["soft cap"]
    with pytest.raises(OutOfToleranceError) as caught:
        judge_known(form, torch.full((1, 1, 64), 0.880797), numbers(form.right, 1))
    assert "soft cap" in str(caught.value)
    assert "expected 0.536656, got 0.880797029; that is the value of the defect 'ignored'" in str(caught.value)
    lse = BY_NAME["merge of parts"]
    with pytest.raises(OutOfToleranceError, match="LSE"):
        judge_known_lse(lse, torch.full((1, 1), 3.4401897 / math.log(2)), numbers(lse.lse, 1))


def test_one_key_is_bit_for_bit():
    form = BY_NAME["one key"]
    for dtype in TOLERANCE:
        right = in_dtype(form.right, form, dtype)
        assert judge_known(form, right, numbers(form.right, 1)) == {"known": 0.0}
        off = torch.nextafter(right.float(), torch.tensor(9.0)).to(right.dtype)
        if not torch.equal(off, right):
            with pytest.raises(OutOfToleranceError, match="bit for bit"):
                judge_known(form, off, numbers(form.right, 1))


def test_nan_and_a_wrong_infinity_are_never_right():
    form = BY_NAME["rows without keys"]
    right = numbers(form.lse, 1)
    judge_known_lse(form, right.float(), right)
    for wrong in (math.nan, math.inf, 0.0):
        with pytest.raises(OutOfToleranceError):
            judge_known_lse(form, torch.where(right.isinf(), wrong, right), right)


@pytest.mark.parametrize("num_heads", ALIBI_SLOPES)
def test_alibi_slopes_follow_the_published_rule(num_heads):
    assert alibi_slopes(num_heads).tolist() == list(ALIBI_SLOPES[num_heads])


@pytest.mark.parametrize("word", FP8_WRITES)
def test_fp8_writes_clamp_and_round_to_even(word):
    for written, held in FP8_WRITES[word]:
        assert store_rounded(torch.tensor([written]), 1.0, word).float().item() == held


@pytest.mark.parametrize(("length", "in_last", "pages"), LAST_PAGES)
def test_pages_are_counted_to_the_last_token(length, in_last, pages):
    tables, num_blocks = paging([length], 16, torch.Generator().manual_seed(0))
    owned = [slot // 16 for slot in slots_of(tables[0], range(length), 16)]
    assert len(set(owned)) == pages
    assert owned.count(owned[-1]) == in_last
    assert len(set(tables[0])) == pages + 1 == num_blocks - 1  # one spare in the table, one block nobody knows


def test_the_slot_of_block_65536_is_past_32_bits():
    assert LAST_BYTE_OF_32_BITS == 2147483648 == 2**31


def test_forms_become_layers_of_their_case():
    form = BY_NAME["head map"]
    step = asked(form, "bfloat16", "decode", block_size=32)
    arguments = layer_arguments(step.batch.case, step.batch)
    assert (arguments["num_heads"], arguments["num_kv_heads"], arguments["scale"]) == (4, 2, 1.0)
    assert step.batch.pages[0].shape[1] == 32


def test_the_forms_load_no_torch():
    code = "import sys, heedful.conformance.closed_forms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
