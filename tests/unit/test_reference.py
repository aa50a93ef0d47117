"""The reference against answers it did not make: plain Python loops, torch's SDPA, cuts and merges, every fp8 byte."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.errors import BadInputError
from heedful.reference import (
    TILE,
    alibi_slopes,
    dequantise,
    eager_yardstick,
    merge_states,
    read_pages,
    reference_attention,
    store_rounded,
    tiled_yardstick,
    yardstick_attention,
)


def starts(*lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_hand(query, key, value, *, scale, causal=True, window=None, slopes=None, cap=None, sinks=None):
    """One sequence in plain Python numbers, straight from the contract's table: (output, LSE) as nested lists."""
    outputs, lses = [], []
    for i, row in enumerate(query.tolist()):
        p = len(key) - len(query) + i
        out_row, lse_row = [], []
        for h, q in enumerate(row):
            kv = h // (query.shape[1] // key.shape[1])
            terms = []
            for j in range(len(key)):
                if (causal and j > p) or (window is not None and abs(p - j) >= window):
                    continue
                x = scale * sum(a * b for a, b in zip(q, key[j, kv].tolist(), strict=True))
                x = cap * math.tanh(x / cap) if cap else x
                x -= slopes[h].item() * abs(p - j) if slopes is not None else 0.0
                terms.append((x, value[j, kv].tolist()))
            sink = sinks[h].item() if sinks is not None else -math.inf
            top = max([x for x, _ in terms] + [sink])
            if top == -math.inf:
                out_row.append([0.0] * value.shape[2])
                lse_row.append(-math.inf)
                continue
            total = sum(math.exp(x - top) for x, _ in terms) + math.exp(sink - top)
            out_row.append([sum(math.exp(x - top) * v[d] for x, v in terms) / total for d in range(value.shape[2])])
            lse_row.append(top + math.log(total))
        outputs.append(out_row)
        lses.append(lse_row)
    return outputs, lses


rules_drawn = st.fixed_dictionaries(
    {
        "scale": st.sampled_from([1.0, 0.125, 0.3, -0.5]),
        "causal": st.booleans(),
        "window": st.sampled_from([None, 1, 2, 3, 5]),
        "alibi": st.booleans(),
        "cap": st.sampled_from([None, 0.5, 30.0]),
        "sinks": st.booleans(),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    sizes=st.sampled_from([(2, 2), (3, 1), (1, 4)]),
    rules=rules_drawn,
    seed=st.integers(0, 2**16),
)
def test_equals_plain_loops(lengths, heads, sizes, rules, seed):
    causal, window, alibi = rules["causal"], rules["window"], rules["alibi"]
    if not causal and (window is not None or alibi):
        lengths = [(k, k) for _, k in lengths]
    h, kv = heads
    q_lens, k_lens = zip(*lengths, strict=True)
    query, key = random(sum(q_lens), h, sizes[0], seed=seed), random(sum(k_lens), kv, sizes[0], seed=seed + 1)
    value = random(sum(k_lens), kv, sizes[1], seed=seed + 2)
    slopes = random(h, seed=seed + 3).abs().float() if alibi else None
    sinks = random(h, seed=seed + 4).float() if rules["sinks"] else None
    output, lse = reference_attention(
        query,
        key,
        value,
        starts(*q_lens),
        starts(*k_lens),
        scale=rules["scale"],
        causal=causal,
        sliding_window=window,
        alibi_slopes=slopes,
        logits_soft_cap=rules["cap"],
        sinks=sinks,
    )
    q, k = starts(*q_lens).tolist(), starts(*k_lens).tolist()
    for s in range(len(lengths)):
        rows, keys = slice(q[s], q[s + 1]), slice(k[s], k[s + 1])
        numbers = {"scale": rules["scale"], "causal": causal, "window": window, "cap": rules["cap"]}
        right, right_lse = by_hand(query[rows], key[keys], value[keys], slopes=slopes, sinks=sinks, **numbers)
        shape = output[rows].shape
        torch.testing.assert_close(
            output[rows], torch.tensor(right, dtype=torch.float64).reshape(shape), rtol=1e-12, atol=1e-12
        )
        torch.testing.assert_close(
            lse[rows], torch.tensor(right_lse, dtype=torch.float64).reshape(shape[:2]), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 4])
def test_equals_torch_sdpa_in_float64(causal, group):
    query, key, value = random(33, 4, 16), random(33, 4 // group, 16, seed=1), random(33, 4 // group, 24, seed=2)
    output, _ = reference_attention(query, key, value, starts(33), starts(33), scale=0.25, causal=causal)
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (key, value))
    right = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), k, v, is_causal=causal, scale=0.25
    ).transpose(0, 1)
    torch.testing.assert_close(output, right, rtol=1e-12, atol=1e-12)


EVERYTHING = {
    "scale": 0.3,
    "sliding_window": 9,
    "alibi_slopes": alibi_slopes(4),
    "logits_soft_cap": 5.0,
    "sinks": torch.tensor([0.5, -1.0, 2.0, -math.inf]),
}


@pytest.mark.parametrize("cuts", [(3, 3, 2), (1,) * 8, (7, 1), (2, 6)])
@pytest.mark.parametrize("rules", [{"scale": 0.5}, EVERYTHING], ids=["plain", "everything"])
def test_chunks_give_what_one_prefill_gives(cuts, rules):
    query, key, value = random(8, 4, 8), random(8, 2, 8, seed=1), random(8, 2, 8, seed=2)
    whole, whole_lse = reference_attention(query, key, value, starts(8), starts(8), **rules)
    ends = list(itertools.accumulate(cuts))
    for n, end in zip(cuts, ends, strict=True):
        rows = slice(end - n, end)
        part, part_lse = reference_attention(query[rows], key[:end], value[:end], starts(n), starts(end), **rules)
        torch.testing.assert_close(part, whole[rows], rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(part_lse, whole_lse[rows], rtol=1e-13, atol=1e-13)


def test_sequences_never_see_each_other():
    query, key, value = random(9, 4, 8), random(20, 2, 8, seed=1), random(20, 2, 8, seed=2)
    output, lse = reference_attention(query, key, value, starts(2, 0, 7), starts(5, 4, 11), **EVERYTHING)
    alone, alone_lse = reference_attention(query[2:], key[9:], value[9:], starts(7), starts(11), **EVERYTHING)
    assert torch.equal(output[2:], alone)
    assert torch.equal(lse[2:], alone_lse)


def test_pad_rows_are_zero_and_spare_keys_unseen():
    query, key, value = random(5, 2, 4), random(9, 1, 4, seed=1), random(9, 1, 4, seed=2)
    output, lse = reference_attention(query, key, value, starts(3), starts(6), scale=1.0)
    key[6:], value[6:] = math.nan, math.nan
    again, _ = reference_attention(query, key, value, starts(3), starts(6), scale=1.0)
    assert torch.equal(output, again)
    assert output[3:].abs().sum() == 0
    assert lse[3:].isneginf().all()


def test_rows_without_keys_are_zero_and_their_lse_is_the_sink():
    query, key, value = random(5, 2, 4), random(2, 1, 4, seed=1), random(2, 1, 4, seed=2)
    sinks = torch.tensor([1.5, -math.inf])
    output, lse = reference_attention(query, key, value, starts(5), starts(2), scale=1.0, sinks=sinks)
    assert output[:3].abs().sum() == 0
    assert lse[:3].tolist() == [[1.5, -math.inf]] * 3
    nothing, lse = reference_attention(query, key[:0], value[:0], starts(5), starts(0), scale=1.0, causal=False)
    assert nothing.abs().sum() == 0
    assert lse.isneginf().all()


def test_a_hidden_nan_or_inf_adds_nothing_and_a_seen_one_stays():
    query, key, value = random(3, 2, 4), random(3, 1, 4, seed=1), random(3, 1, 4, seed=2)
    clean, _ = reference_attention(query, key, value, starts(3), starts(3), scale=1.0)
    value[2, 0, 1], key[2] = math.inf, math.nan
    output, lse = reference_attention(query, key, value, starts(3), starts(3), scale=1.0)
    assert torch.equal(output[:2], clean[:2])
    assert output[2].isnan().all()
    assert lse[2].isnan().all()
    key[2] = 0.0
    output, _ = reference_attention(query, key, value, starts(3), starts(3), scale=1.0)
    assert output[2, 0].isposinf().tolist() == [False, True, False, False]


def test_layout_never_matters():
    query, key, value = random(7, 4, 8), random(33, 2, 8, seed=1), random(33, 2, 8, seed=2)
    right, _ = reference_attention(query, key, value, starts(7), starts(33), scale=0.3)
    strided = random(33, 2, 16)[..., ::2].copy_(key)
    across = value.transpose(0, 1).contiguous().transpose(0, 1)
    output, _ = reference_attention(query, strided, across, starts(7), starts(33), scale=0.3)
    assert torch.equal(output, right)
    one_head = key[:, :1].expand(33, 2, 8)
    output, _ = reference_attention(query, one_head, value, starts(7), starts(33), scale=0.3)
    right, _ = reference_attention(query, one_head.contiguous(), value, starts(7), starts(33), scale=0.3)
    assert torch.equal(output, right)


# ---- merging


@pytest.mark.parametrize("cuts", [(5,), (1, 4), (2, 0, 3), (1, 1, 1, 1, 1), (0, 5, 0)])
@pytest.mark.parametrize("holder", [0, -1])
def test_parts_merge_to_the_whole_where_one_holds_the_sink(cuts, holder):
    query, key, value = random(3, 2, 4), random(5, 1, 4, seed=1), random(5, 1, 4, seed=2)
    sinks = torch.tensor([0.5, 2.0])
    rules = {"scale": 0.7, "causal": False}
    whole, whole_lse = reference_attention(query, key, value, starts(3), starts(5), sinks=sinks, **rules)
    parts, end = [], 0
    for index, n in enumerate(cuts):
        held = sinks if index == holder % len(cuts) else None
        keys = slice(end, end + n)
        parts.append(reference_attention(query, key[keys], value[keys], starts(3), starts(n), sinks=held, **rules))
        end += n
    output, lse = merge_states([o for o, _ in parts], [x for _, x in parts])
    torch.testing.assert_close(output, whole, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("cut", range(5))
def test_the_known_merge_comes_out_at_any_cut(cut):
    scores, value = torch.arange(4.0, dtype=torch.float64), torch.arange(1.0, 5.0, dtype=torch.float64)
    outputs, lses = [], []
    for part in (slice(0, cut), slice(cut, 4)):
        outputs.append((torch.softmax(scores[part], 0) * value[part]).sum()[None])
        lses.append(torch.logsumexp(scores[part], 0))
    output, lse = merge_states(outputs, lses)
    assert output.item() == pytest.approx(3.4926527, abs=1e-7)
    assert lse.item() == pytest.approx(3.4401897, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("empty", [-math.inf, math.inf])
@pytest.mark.parametrize("garbage", [0.0, 7.0, math.nan])
def test_merging_with_empty_is_the_other_bit_for_bit(dtype, empty, garbage):
    output = torch.tensor([[1.1, -0.0, 3e-5, math.nan]]).to(dtype)
    lse, nothing = torch.tensor([0.1], dtype=torch.float32), torch.tensor([empty], dtype=torch.float32)
    for order in ((0, 1), (1, 0)):
        parts = [(output, lse), (torch.full_like(output, garbage), nothing)]
        merged, merged_lse = merge_states(*zip(*(parts[i] for i in order), strict=True))
        words = {8: torch.int64, 4: torch.int32, 2: torch.int16}[output.element_size()]
        assert merged.dtype == dtype
        assert torch.equal(merged.view(words), output.view(words))
        assert torch.equal(merged_lse, lse)


def test_nothing_merged_with_nothing_is_nothing():
    output, lse = merge_states([torch.full((2, 3), 9.0)] * 2, [torch.tensor([math.inf, -math.inf])] * 2)
    assert output.abs().sum() == 0
    assert lse.isneginf().all()


def test_a_nan_lse_is_not_hidden():
    output, lse = merge_states([torch.ones(1, 2)] * 2, [torch.tensor([math.nan]), torch.tensor([1.0])])
    assert output.isnan().all()
    assert lse.isnan().all()


# ---- yardsticks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [tiled_yardstick, eager_yardstick])
@pytest.mark.parametrize("rules", [{"scale": 0.2}, {"scale": 0.2, "causal": False}, EVERYTHING])
def test_yardsticks_differ_from_the_reference_by_rounding_alone(kernel, dtype, rules):
    lengths = (2 * TILE + 5, TILE, 0) if rules.get("causal", True) else (2 * TILE + 5, TILE, 4)
    query, key, value = (
        random(*s, seed=i, dtype=dtype) for i, s in enumerate([(9, 4, 16), (sum(lengths), 2, 16), (sum(lengths), 2, 8)])
    )
    arguments = (query, key, value, starts(3, 4, 2), starts(*lengths))
    right, right_lse = reference_attention(*arguments, **rules)
    output, lse = kernel(*arguments, **rules)
    assert output.dtype == dtype
    assert torch.equal(output[:7].isnan(), right[:7].isnan())
    torch.testing.assert_close(output.double(), right, rtol=0, atol=8 * torch.finfo(dtype).eps)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-6, atol=2e-6)


def test_the_yardstick_rounds_the_weights_and_the_output_to_its_dtype():
    query, key = torch.ones(1, 1, 1).bfloat16(), torch.tensor([0.0, 0.7]).reshape(2, 1, 1).bfloat16()
    value = torch.tensor([1.0, 0.0]).reshape(2, 1, 1).bfloat16()
    output = yardstick_attention(query, key, value, starts(1), starts(2), scale=1.0)
    top = key[1].float()
    weight = torch.exp(-top).bfloat16().float()
    assert output.item() == (weight / (1 + torch.exp(-top))).bfloat16().item()


def test_there_is_no_yardstick_in_float64():
    x = random(1, 1, 1)
    with pytest.raises(BadInputError, match=r"no yardstick at torch\.float64"):
        yardstick_attention(x, x, x, starts(1), starts(1), scale=1.0)


# ---- the fp8 cache and pages


def all_bytes(dtype):
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)


WORDS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def nearest_even(x, steps):
    """The nearest of the ascending (value, byte) steps; of two as near, the one with the even byte."""
    distance = min(abs(x - value) for value, _ in steps)
    return min((byte & 1, byte) for value, byte in steps if abs(x - value) == distance)[1]


@pytest.mark.parametrize("word", ["fp8_e4m3", "fp8_e5m2"])
def test_stored_bytes_are_the_nearest_ties_to_even_clamped(word):
    finite = [(v, b) for b, v in enumerate(all_bytes(WORDS[word]).double().tolist()) if math.isfinite(v) and b < 128]
    middles = [(a + b) / 2 for (a, _), (b, _) in itertools.pairwise(sorted(finite))]
    near = [m * (1 + e) for m in middles for e in (-1e-6, 0.0, 1e-6)]
    x = torch.tensor([*near, *(v for v, _ in finite), 1e9], dtype=torch.float64).float()
    stored = store_rounded(x, 1.0, word).view(torch.uint8).tolist()
    assert stored == [nearest_even(value, finite) for value in x.double().tolist()]
    negative = store_rounded(-x, 1.0, word).view(torch.uint8).tolist()
    assert [b & 127 for b in negative] == stored


@pytest.mark.parametrize("word", WORDS)
def test_nan_stays_nan_and_inf_clamps(word):
    x = torch.tensor([math.nan, math.inf, -math.inf, 1e30])
    stored = store_rounded(x, 0.5, word)
    assert stored.dtype == WORDS[word]
    largest = torch.finfo(WORDS[word]).max
    assert stored[0].isnan()
    assert stored[1:].float().tolist() == [largest, -largest, largest]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("scale", [1.0, 0.25, 0.34375, torch.tensor(0.34375)])
def test_every_byte_survives_reading_and_writing_again(word, scale):
    stored = all_bytes(WORDS[word])
    finite = stored.view(torch.uint8)[stored.float().isfinite()].view(stored.dtype)
    again = store_rounded(dequantise(finite, scale), scale, word)
    assert torch.equal(again.view(torch.uint8), finite.view(torch.uint8))
    assert torch.equal(dequantise(finite, scale), finite.double() * float(scale))


def test_a_cache_of_the_models_dtype_holds_what_was_written():
    x = random(3, dtype=torch.bfloat16)
    assert store_rounded(x, 1.0, "auto") is x
    with pytest.raises(BadInputError, match=r"scale 0\.5 was given for a cache that is not fp8"):
        store_rounded(x, 0.5, "auto")


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 32, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_pages_read_as_the_tokens_that_were_paged(length, dtype):
    tokens = random(length, 2, 3, dtype=torch.float32).to(dtype)
    view, table = torch.full((5, 16, 2, 3), 100.0).to(dtype), torch.tensor([3, 1, 4], dtype=torch.int32)
    for t in range(length):
        view[int(table[t // 16]), t % 16] = tokens[t]
    assert torch.equal(read_pages(view, table, length).float(), tokens.float())


def test_page_tails_never_reach_the_output():
    key, value, table = random(17, 1, 4), random(17, 1, 4, seed=1), torch.tensor([3, 1, 0, 0])
    query, found = random(2, 1, 4, seed=2), []
    for poison in (1e4, 0.0, 1e3, math.nan):
        views = [torch.full((4, 16, 1, 4), poison, dtype=torch.float64) for _ in range(2)]
        for view, rows in zip(views, (key, value), strict=True):
            view[3], view[1, 0] = rows[:16], rows[16]
        k, v = (read_pages(view, table, 17) for view in views)
        found.append(reference_attention(query, k, v, starts(2), starts(17), scale=0.5)[0])
    flat, _ = reference_attention(query, key, value, starts(2), starts(17), scale=0.5)
    assert all(torch.equal(output, flat) for output in found)


@pytest.mark.parametrize("num_heads", [3, 5, 6, 7, 12, 20, 40, 71, 112])
def test_slopes_of_odd_numbers_take_from_the_double_of_the_lower_power(num_heads):
    lower = 2 ** int(math.log2(num_heads))
    slopes = alibi_slopes(num_heads)
    assert slopes.dtype == torch.float32
    assert torch.equal(slopes[:lower], alibi_slopes(lower))
    assert torch.equal(slopes[lower:], alibi_slopes(2 * lower)[::2][: num_heads - lower])


# ---- bad input


def good():
    x = torch.ones(2, 2, 4)
    return {
        "query": x,
        "key": x[:, :1],
        "value": x[:, :1],
        "query_start_loc": starts(2),
        "key_start_loc": starts(2),
        "scale": 1.0,
    }


BAD = {
    "H not a multiple of KV": (
        {"query": torch.ones(2, 3, 4), "key": torch.ones(2, 2, 4), "value": torch.ones(2, 2, 4)},
        "3 query heads cannot share 2 KV heads",
    ),
    "no KV heads": ({"key": torch.ones(2, 0, 4), "value": torch.ones(2, 0, 4)}, "cannot share 0 KV heads"),
    "two dimensions": ({"query": torch.ones(2, 8)}, "query must be float"),
    "whole numbers": ({"value": torch.ones(2, 1, 4, dtype=torch.int64)}, "value must be float"),
    "head sizes differ": ({"key": torch.ones(2, 1, 5)}, "do not fit"),
    "K and V rows differ": ({"value": torch.ones(3, 1, 4)}, "do not fit"),
    "starts fall": ({"query_start_loc": torch.tensor([0, 2, 1])}, "never fall"),
    "starts past the rows": ({"key_start_loc": starts(3)}, "end at 2 or before"),
    "starts not at 0": ({"query_start_loc": torch.tensor([1, 2])}, "must start at 0"),
    "starts of floats": ({"query_start_loc": torch.tensor([0.0, 2.0])}, "whole numbers"),
    "no starts": ({"query_start_loc": torch.tensor([], dtype=torch.int32)}, "whole numbers"),
    "sequences differ": ({"query_start_loc": starts(1, 1)}, "query_start_loc names 2 sequences and key_start_loc 1"),
    "window 0": ({"sliding_window": 0}, "sliding_window 0 shows no key"),
    "cap 0": ({"logits_soft_cap": 0.0}, "logits_soft_cap 0.0 must be positive"),
    "cap inf": ({"logits_soft_cap": math.inf}, "must be positive and finite"),
    "scale NaN": ({"scale": math.nan}, "scale nan is not a finite number"),
    "slopes of another number of heads": (
        {"alibi_slopes": torch.ones(3)},
        "alibi_slopes must hold one number a query head",
    ),
    "NaN sinks": ({"sinks": torch.tensor([0.0, math.nan])}, "sinks must hold one number a query head"),
    "window across sequences": (
        {"sliding_window": 2, "causal": False, "query_start_loc": starts(1)},
        "cross attention takes neither",
    ),
    "ALiBi across sequences": (
        {"alibi_slopes": torch.ones(2), "causal": False, "query_start_loc": starts(1)},
        "cross attention takes neither",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_means_nothing_is_refused(name):
    changes, message = BAD[name]
    with pytest.raises(BadInputError, match=message):
        reference_attention(**(good() | changes))


def test_an_unknown_rule_is_an_error():
    with pytest.raises(TypeError, match="dropout"):
        yardstick_attention(**good(), dropout=0.1)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, torch.ones(2)])
def test_a_bad_cache_scale_is_refused(scale):
    with pytest.raises(BadInputError, match="cache scale"):
        store_rounded(torch.ones(2), scale, "fp8")
    with pytest.raises(BadInputError, match="cache scale"):
        dequantise(torch.ones(2).to(torch.float8_e4m3fn), scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_u8_cache_holds_each_row_on_a_grid_of_its_own(dtype):
    x = torch.tensor([[-1.0, 0.0, 4.1, 1.5], [2.5, 2.5, 2.5, 2.5], [0.0, 0.0, 0.0, 0.0]]).to(dtype)
    stored = store_rounded(x, 1.0, "u8")
    assert stored.dtype == torch.uint8
    assert stored.shape == (3, 12)
    assert stored[0, 8:].tolist() == [0, 50, 255, 125]
    read = dequantise(stored, 1.0)
    assert ((read - x.double()).abs().amax(1) <= torch.tensor([5.2 / 255 / 2, 1e-6, 0])).all()
    with pytest.raises(BadInputError, match="not fp8"):
        store_rounded(x, 0.5, "u8")


@pytest.mark.parametrize("word", ["u4", "fp4", "FP8"])
def test_a_cache_word_without_a_rule_is_refused(word):
    with pytest.raises(
        BadInputError, match=r"no rounding rule in the contract; give auto, u8, fp8, fp8_e4m3, fp8_e5m2"
    ):
        store_rounded(torch.ones(2), 1.0, word)


@pytest.mark.parametrize(
    ("table", "length", "message"),
    [([0], 17, "need 2 pages"), ([0, 9], 17, "outside the cache"), ([-1], 1, "outside the cache")],
)
def test_bad_pages_are_refused(table, length, message):
    with pytest.raises(BadInputError, match=message):
        read_pages(torch.zeros(2, 16, 1, 1), torch.tensor(table), length)


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(BadInputError, match="1 outputs and 0 LSEs"):
        merge_states([torch.ones(1, 2)], [])
    with pytest.raises(BadInputError, match="0 outputs"):
        merge_states([], [])
    with pytest.raises(BadInputError, match="part 1 has output"):
        merge_states([torch.ones(1, 2), torch.ones(2, 2)], [torch.ones(1)] * 2)


def test_no_slopes_for_no_heads():
    with pytest.raises(BadInputError, match="1 or more"):
        alibi_slopes(0)
