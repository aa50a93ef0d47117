"""The tolerance is proven: legitimate kernels always pass, defects are caught, and the message says where."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from tolerance_kernels import LEGITIMATE, defective, legitimate, run, tiled

from heedful.conformance.cases import FAMILIES, Case
from heedful.conformance.covering import common_array
from heedful.conformance.inputs import build
from heedful.conformance.tolerance import Allowance, OutOfToleranceError, judge, judge_lse
from heedful.errors import BadInputError


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Small tensors on busy cores: threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


DTYPES = ("float32", "bfloat16", "float16")
PLAIN = Case(num_heads=4, num_kv_heads=2, head_size=64)
QUICK = (
    replace(PLAIN, batch="chunked"),
    replace(PLAIN, batch="prefill", sliding_window=7),
    replace(PLAIN, batch="decode", sliding_window=7),
    replace(PLAIN, batch="mixed", logits_soft_cap=30.0),
    replace(PLAIN, batch="mixed", sinks=True),
    replace(PLAIN, batch="decode", alibi=True),
)
LONG = (replace(PLAIN, batch="long"), replace(PLAIN, batch="long", alibi=True))
STUDY = (
    *QUICK,
    *LONG,
    *(
        replace(PLAIN, batch=batch, num_heads=8)
        for batch in ("prefill", "decode", "mixed", "speculative", "prefix_hit")
    ),
    *(
        replace(PLAIN, batch=batch, sliding_window=5, head_size=128)
        for batch in ("prefill", "decode", "chunked", "long")
    ),
    *(replace(PLAIN, batch=batch, logits_soft_cap=cap) for batch in ("prefill", "decode") for cap in (2.0, 50.0)),
    *(replace(PLAIN, batch=batch, sinks=True, head_size=80) for batch in ("prefill", "decode", "chunked")),
)


def refused(batch, output, expected) -> bool:
    try:
        expected.judge(output)
    except OutOfToleranceError:
        return True
    return False


def survivors(case: Case) -> tuple[set[str], set[str]]:
    """(defects that show in some family, those of them that no family catches)."""
    shown, caught = set(), set()
    for family in FAMILIES:
        batch = build(replace(case, family=family))
        expected, right = batch.expected(), run(batch, tiled)
        for name, kernel in defective(case).items():
            output = run(batch, kernel)
            if not torch.equal(output, right):
                shown.add(name)
                caught |= {name} if refused(batch, output, expected) else set()
    return shown, shown - caught


def false_alarms(case: Case) -> list[str]:
    """Legitimate kernels that the tolerance refuses, with the family."""
    found = []
    for family in FAMILIES:
        batch = build(replace(case, family=family))
        expected = batch.expected()
        found += [f"{k} {family}" for k in legitimate(case) if refused(batch, run(batch, LEGITIMATE[k]), expected)]
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.id)
def test_every_defect_that_shows_is_caught_in_some_family(case, dtype):
    shown, missed = survivors(replace(case, dtype=dtype))
    assert len(shown) >= 9
    # fewer keys than a tile: sums in the output's own dtype are no more than its rounding
    assert missed <= ({"sums in 16 bits"} if dtype != "float32" else set())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_in_16_bits_show_in_long_sequences(dtype):
    shown, missed = survivors(replace(LONG[0], dtype=dtype))
    assert "sums in 16 bits" in shown
    assert missed == set()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_alibi_positions_in_bf16_show_in_long_sequences(dtype):
    shown, missed = survivors(replace(LONG[1], dtype=dtype))
    assert "ALiBi positions in bf16" in shown
    assert missed <= {"sums in 16 bits"}  # the bias leaves few keys with any weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.id)
def test_legitimate_kernels_pass(case, dtype):
    assert false_alarms(replace(case, dtype=dtype)) == []


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES)
def test_study_no_false_alarm_and_99_percent_caught(dtype):
    shown = missed = 0
    for case, seed in itertools.product(STUDY, range(4)):
        case = replace(case, dtype=dtype, seed=seed)
        assert false_alarms(case) == []
        seen, left = survivors(case)
        left -= set() if case.batch == "long" and not case.alibi else {"sums in 16 bits"}
        shown, missed = shown + len(seen), missed + len(left)
    print(f"{dtype}: {shown - missed} of {shown} defects caught")
    assert missed <= 0.01 * shown


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES)
def test_legitimate_kernels_pass_on_the_whole_covering_array(dtype):
    alarms = [found for case in common_array() for found in false_alarms(replace(case, dtype=dtype))]
    assert alarms == []


def answer(rows=3, heads=2, size=4):
    reference = torch.linspace(-1.0, 1.0, rows * heads * size, dtype=torch.float64).reshape(rows, heads, size)
    return reference, reference.bfloat16()


def test_margins_are_shares_of_the_allowance():
    reference = torch.ones(4, 1, 1, dtype=torch.float64)
    yardstick = torch.tensor([1.01, 0.99, 1.01, 0.99]).reshape(4, 1, 1)
    margins = judge((reference + 0.01).float(), reference, yardstick, "float32")
    assert margins == pytest.approx({"max": 1 / 8, "rms": 1 / 6, "row": 1 / 32}, rel=1e-4)


def test_a_perfect_answer_uses_nothing_even_of_nothing():
    zero = torch.zeros(2, 1, 3, dtype=torch.float64)
    assert judge(zero.float(), zero, zero.float(), "float32") == {"max": 0.0, "rms": 0.0, "row": 0.0}


def test_rounding_alone_is_always_allowed():
    reference, rounded = answer()
    assert max(judge(rounded, reference, reference.bfloat16(), torch.bfloat16).values()) < 1


def test_the_larger_of_two_yardsticks_counts():
    reference = torch.ones(1, 1, 1, dtype=torch.float64)
    output, near, far = (torch.full((1, 1, 1), 1 + e) for e in (0.02, 1e-6, 0.02))
    with pytest.raises(OutOfToleranceError):
        judge(output, reference, near, "float32")
    assert judge(output, reference, (near, far), "float32")["rms"] == pytest.approx(1 / 6)


def test_a_row_in_which_the_yardstick_is_right_by_luck_is_measured_by_the_whole_batch():
    reference = torch.ones(4, 1, 1, dtype=torch.float64)
    lucky = torch.tensor([1.01, 0.99, 1.01, 1.0]).reshape(4, 1, 1)
    tight, spread = (Allowance(max=4.0, rms=4.0, row=4.0, spread=share) for share in (0.0, 1.0))
    with pytest.raises(OutOfToleranceError, match="row error"):
        judge((reference + 0.01).float(), reference, lucky, "float32", tight)
    assert judge((reference + 0.01).float(), reference, lucky, "float32", spread)["row"] < 0.5


def test_a_zero_row_must_be_exactly_zero():
    reference, output = answer()
    reference[1], output[1] = 0.0, 0.0
    judge(output, reference, output, "bfloat16")
    output[1, 0, 2] = 1e-6
    with pytest.raises(OutOfToleranceError, match="row error is inf times"):
        judge(output, reference, reference.bfloat16(), "bfloat16")


def test_the_message_names_measure_place_values_and_allowance():
    reference, output = answer()
    output[2, 1, 3] += 0.5
    with pytest.raises(OutOfToleranceError) as caught:
        judge(output, reference, reference.bfloat16(), "bfloat16")
    message = str(caught.value)
    assert "row 2, head 1, element 3: expected 1, got 1.5" in message
    assert "times what is allowed" in message
    assert set(caught.value.margins) == {"max", "rms", "row"}


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_judged_by_place(wrong):
    reference, output = answer()
    output[0, 1, 2] = wrong
    with pytest.raises(OutOfToleranceError, match=r"in the wrong places: 1 of 24, first at row 0, head 1, element 2"):
        judge(output, reference, reference.bfloat16(), "bfloat16")
    reference[0, 1, 2] = wrong
    assert max(judge(output, reference, reference.bfloat16(), "bfloat16").values()) < 1


def test_a_value_that_overflows_the_dtype_must_be_inf():
    reference = torch.full((1, 1, 1), 1e5, dtype=torch.float64)
    judge(reference.half(), reference, reference.half(), "float16")
    with pytest.raises(OutOfToleranceError, match=r"\+inf in the wrong places"):
        judge(torch.full((1, 1, 1), 65504.0).half(), reference, reference.half(), "float16")


def test_shape_and_dtype_are_exact():
    reference, output = answer()
    with pytest.raises(OutOfToleranceError, match=r"must be torch\.bfloat16 \[3, 2, 4\]"):
        judge(output.float(), reference, output, "bfloat16")
    with pytest.raises(OutOfToleranceError, match=r"is torch\.bfloat16 \[2, 2, 4\]"):
        judge(output[:2], reference, output, "bfloat16")


def test_no_rows_use_no_allowance():
    empty = torch.zeros(0, 2, 4, dtype=torch.float64)
    assert judge(empty.half(), empty, empty.half(), "float16") == {"max": 0.0, "rms": 0.0, "row": 0.0}
    assert judge_lse(empty[..., 0].float(), empty[..., 0], empty[..., 0].float()) == {"lse": 0.0}


def test_another_allowance_can_be_given_and_an_unknown_dtype_is_refused():
    reference = torch.ones(1, 1, 1, dtype=torch.float64)
    wide = Allowance(max=1e6, rms=1e6, row=1e6)
    assert max(judge(reference.float() + 0.001, reference, reference.float(), "float32", wide).values()) < 1
    with pytest.raises(BadInputError, match="no tolerance for dtype float64"):
        judge(reference, reference, reference, "float64")


@pytest.mark.parametrize("sinks", [False, True])
def test_the_lse_is_judged_in_natural_log_with_the_sink_and_minus_inf_by_place(sinks):
    batch = build(replace(PLAIN, attn_type="encoder_decoder", sinks=sinks, dtype="bfloat16"))
    expected = batch.expected()
    right = expected.lse.float()
    assert expected.judge(expected.yardsticks[0], right)["lse"] <= 1
    wrong = {
        "base 2": right / math.log(2),
        "one key less": right + 1e-4,
        "0 for a row without keys": torch.where(right.isinf(), 0.0, right),
    }
    if sinks:
        wrong["without the sink"] = torch.log((right.exp() - batch.sinks.exp()).clamp(min=0))
    for name, lse in wrong.items():
        if not torch.equal(lse, right):
            with pytest.raises(OutOfToleranceError):
                print(name, judge_lse(lse, expected.lse, expected.yardstick_lses))
    with pytest.raises(OutOfToleranceError, match=r"LSE is torch\.float64"):
        judge_lse(expected.lse, expected.lse, expected.yardstick_lses)
