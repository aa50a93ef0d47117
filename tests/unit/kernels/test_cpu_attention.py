"""Every instruction set and the plain loops against the float64 reference, over a pairwise array of all axes."""

from __future__ import annotations

import covertable
import pytest
import torch
from cpu_problem import BEST_FIRST, BF16, E4M3, E5M2, EVERY, F16, F32, MIXED, SMALL, Problem, kernels, using

SINKS = torch.tensor([0.0, -torch.inf, 2.0, 5.0])
RULES = {
    "plain": {},
    "window1": {"sliding_window": 1},
    "window30": {"sliding_window": 30},
    "window600": {"sliding_window": 600},
    "alibi": {"alibi": True},
    "cap": {"logits_soft_cap": 3.0},
    "sinks": {"sinks": True},
    "full": {"causal": False},
    "full_window": {"causal": False, "sliding_window": 9},
    "alibi_window": {"alibi": True, "sliding_window": 33},
    "everything": {"alibi": True, "logits_soft_cap": 3.0, "sinks": True, "sliding_window": 30},
}
AXES = {
    "dtype": [F32, BF16, F16],
    "cache": [None, E4M3, E5M2],
    "size": [16, 32, 40, 64, 72, 80, 96, 112, 120, 128, 192, 256, 512],
    "heads": [(4, 4), (4, 2), (6, 2), (5, 1), (16, 2), (9, 3), (7, 7)],
    "block": [1, 3, 8, 16, 24, 64, 128],
    "rules": list(RULES),
}
ARRAY = covertable.make(AXES, strength=2)
OTHER_SIZES = [(64, 40), (40, 64), (192, 128), (128, 192), (72, 16), (8, 8), (1, 3), (24, 500), (12, 20), (512, 8)]


def rules_of(word, heads):
    """Rules for a number of heads: slopes and sinks are per head."""
    rules = dict(RULES[word])
    if rules.pop("alibi", False):
        rules["alibi_slopes"] = torch.tensor([0.5, 0.25, 0.1, 0.003]).repeat(heads)[:heads]
    if rules.pop("sinks", False):
        rules["sinks"] = SINKS.repeat(heads)[:heads]
    return rules


def problem(row, lens):
    heads, kv_heads = row["heads"]
    if row["rules"] == "full_window":  # only sequences attending to themselves have positions in common
        lens = tuple((q + past if q + past < 200 else q, 0) for q, past in lens)
    scales = (1.0, 1.0) if row["cache"] is None else (0.5, 0.25)
    return Problem(
        lens=lens,
        dtype=row["dtype"],
        cache=row["cache"],
        heads=heads,
        kv_heads=kv_heads,
        size=row["size"],
        size_v=row.get("size_v"),
        block=row["block"],
        k_scale=scales[0],
        v_scale=scales[1],
        rules=rules_of(row["rules"], heads),
    )


def name_of(row):
    types = "-".join(str(row[x]).removeprefix("torch.") for x in ("dtype", "cache"))
    return f"{types}-d{row['size']}-h{'x'.join(map(str, row['heads']))}-b{row['block']}-{row['rules']}"


@pytest.mark.parametrize("row", ARRAY, ids=name_of)
def test_every_isa_agrees_with_the_reference(row):
    mixed = problem(row, MIXED)
    right = mixed.expected()
    for isa in BEST_FIRST:
        mixed.check(mixed.run(isa), right)


@pytest.mark.parametrize("row", ARRAY[::2], ids=name_of)
def test_the_plain_loops_agree_with_the_reference_and_every_isa_with_them(row):
    small = problem(row, SMALL)
    right = small.expected()
    for isa in EVERY:
        small.check(small.run(isa), right)
    output, lse = small.run("naive")
    # double precision throughout: only the last rounding differs, and only on a tie
    assert (output.double() - right[0].to(small.dtype).double()).abs().max() <= torch.finfo(small.dtype).eps * 8
    floor = (right[0].to(small.dtype).double() - right[0]).abs().max()
    for isa in BEST_FIRST:
        found, found_lse = small.run(isa)
        assert (found.double() - output.double()).abs().max() <= max(3 * floor, 4e-6 if small.dtype == F32 else 1e-3), (
            isa
        )
        assert torch.allclose(found_lse, lse, rtol=1e-6, atol=2e-5), isa


@pytest.mark.parametrize("sizes", OTHER_SIZES, ids=str)
@pytest.mark.parametrize("cache", [None, E4M3])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_keys_and_values_of_unlike_size(dtype, cache, sizes):
    row = {"dtype": dtype, "cache": cache, "heads": (6, 2), "block": 8, "rules": "plain"}
    mixed = problem(row | {"size": sizes[0], "size_v": sizes[1]}, MIXED)
    right = mixed.expected()
    for isa in BEST_FIRST:
        mixed.check(mixed.run(isa), right)


@pytest.mark.parametrize("isa", EVERY)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_peaky_scores(isa, dtype):
    lens = MIXED if isa != "naive" else SMALL
    peaky = Problem(lens=lens, dtype=dtype, loud=10.0)
    output, lse = peaky.run(isa)
    wanted, wanted_lse = peaky.expected()
    # scores reach 40: their own rounding to fp32 (relative 6e-8) shows in the weights
    limit = 2e-5 if dtype == F32 else 4 * (wanted.to(dtype).double() - wanted).abs().max()
    assert (output.double() - wanted).abs().max() <= limit
    assert (lse.double() - wanted_lse).abs().max() <= 1e-4


@pytest.mark.parametrize("isa", EVERY)
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["bare", "sinks"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_rows_that_see_no_key_give_zero_and_the_sink(isa, sinks, dtype):
    rules = {} if sinks is None else {"sinks": sinks}
    empty = Problem(lens=((5, -3), (3, -3), (1, -1), (0, 4), (90, -70)), dtype=dtype, rules=rules)
    found = empty.run(isa)
    empty.check(found, empty.expected())
    unseen = [0, 1, 2, 5, 6, 7, 8, *range(9, 79)]
    assert (found[0][unseen] == 0).all()
    wanted = torch.full((4,), -torch.inf) if sinks is None else sinks
    assert torch.allclose(found[1][unseen], wanted.expand(len(unseen), -1))


@pytest.mark.parametrize("isa", EVERY)
def test_an_empty_batch_writes_nothing(isa):
    nothing = Problem(lens=((0, 0), (0, 7)))
    output, lse = nothing.run(isa)
    assert output.shape[0] == lse.shape[0] == 0


@pytest.mark.parametrize("isa", EVERY)
@pytest.mark.parametrize("cache", [None, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_one_visible_key_gives_its_value_bit_for_bit(isa, cache, dtype, phase):
    lens = ((1, 0),) * 9 if phase == "decode" else ((90, 0),)
    one = Problem(lens=lens, dtype=dtype, cache=cache, size=72, size_v=80, rules={"sliding_window": 1})
    output, lse = one.run(isa)
    values = torch.cat(one.values).repeat_interleave(2, 1)
    assert torch.equal(output, values.to(dtype))
    assert (lse.double() - one.expected()[1]).abs().max() < 1e-5


@pytest.mark.parametrize("isa", EVERY)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("lens", [((1, 40),), ((90, 40),)], ids=["decode", "prefill"])
def test_a_nan_in_a_visible_key_or_value_is_not_swallowed(isa, dtype, lens):
    for side in ("key_pages", "value_pages"):
        sick = Problem(lens=lens, dtype=dtype)
        page, offset = (int(x[3]) for x in sick.slots(0))
        getattr(sick, side)[page, :, offset] = torch.nan
        assert sick.run(isa)[0].isnan().all(), side


@pytest.mark.parametrize("isa", EVERY)
@pytest.mark.parametrize("rules", [{}, {"sliding_window": 40}, {"causal": False}], ids=str)
def test_flat_keys_give_what_pages_give(isa, rules):
    lens = ((17, 0), (1, 0), (90, 0), (40, 33))
    paged = Problem(lens=lens if isa != "naive" else lens[:2], rules=rules)
    call, output, lse = paged.call()
    paged.flatten(call, torch.cat(paged.keys), torch.cat(paged.values))
    with using(isa):
        kernels.attend(call)
    paged.check((output, lse), paged.expected())


@pytest.mark.parametrize("cap", [None, 200.0], ids=["bare", "cap"])
@pytest.mark.parametrize("isa", BEST_FIRST)
def test_steep_alibi_where_the_largest_biased_score_lies_far_below_the_largest_one(isa, cap):
    """Far keys have scores of 100 and more, and 300 less by their distance; what is left are keys near the diagonal."""
    rules = {"alibi_slopes": torch.tensor([30.0, 0.5, 8.0, 0.0]), "logits_soft_cap": cap}
    steep = Problem(lens=((70, 0), (40, 200), (9, 300), (150, 3)), dtype=BF16, loud=40.0, rules=rules)
    output, lse = steep.run(isa)
    wanted, wanted_lse = steep.expected()
    assert (output.double() - wanted).abs().max() <= 4 * (wanted.to(BF16).double() - wanted).abs().max()
    assert (lse.double() - wanted_lse).abs().max() <= 1e-3


@pytest.mark.parametrize("isa", EVERY)
def test_alibi_counts_positions_exactly_beyond_what_a_float_holds(isa):
    """Keys 2**24 and 2**24 + 1 differ by one, which fp32 cannot say. One page repeated stands for the whole context."""
    far = 2**24 + 2
    rules = {"sliding_window": 8, "alibi_slopes": torch.full((2,), 0.7)}
    near = Problem(lens=((1, 7),), heads=2, kv_heads=1, size=16, block=8, rules=rules)
    call, output, lse = near.call()
    seen = torch.arange(far - 8, far)
    cache = [torch.zeros(2, 1, 8, 16) for _ in range(2)]  # the last eight keys straddle two pages
    table = torch.zeros(-(-far // 8), dtype=torch.int32)
    table[-1] = 1
    for side, rows in zip(cache, (near.keys[0], near.values[0]), strict=True):
        side[table[seen // 8].long(), :, seen % 8] = rows
    lens = torch.tensor([far], dtype=torch.int32)
    call.key, call.value, call.kv_lens, call.block_tables = (x.data_ptr() for x in (*cache, lens, table))
    with using(isa):
        kernels.attend(call)
    near.check((output, lse), near.expected())
