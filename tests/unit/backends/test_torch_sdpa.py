"""TORCH_SDPA computes the contract: every row of its table, against the float64 reference and known answers."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from heedful.backends import torch_sdpa_plan
from heedful.backends.paged import CommonMetadataBuilder
from heedful.backends.torch_sdpa import TorchSdpaBackend
from heedful.errors import BadInputError, MetadataError, UnsupportedError
from heedful.reference import alibi_slopes, reference_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIXED = [(6, 0, False), (20, 0, False), (3, 6, False), (21, 9, False), (1, 12, True), (1, 2, True), (3, 5, True)]
RULES = {
    "plain": {},
    "window": {"sliding_window": 5},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.3])},
    "soft_cap": {"logits_soft_cap": 2.0},
    "sinks": {"sinks": torch.tensor([0.3, -2.0, 5.0, -torch.inf])},
    "all": {
        "sliding_window": 5,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.3]),
        "logits_soft_cap": 2.0,
        "sinks": torch.tensor([0.3, -2.0, 5.0, -torch.inf]),
    },
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_a_mixed_batch_agrees_with_the_reference(scene, dtype, rules):
    scene(MIXED, dtype=dtype, pad_rows=2).check(**rules)


@pytest.mark.parametrize("word", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_an_fp8_cache_is_read_as_stored(scene, word, rules):
    scene(MIXED, dtype=torch.bfloat16, word=word, scales=(0.3, 0.7)).check(**rules)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
def test_each_query_head_reads_its_own_kv_head(scene, heads):
    scene(MIXED, num_heads=heads[0], num_kv_heads=heads[1]).check()


@pytest.mark.parametrize("size_v", [8, 24])
@pytest.mark.parametrize("rules", [{}, {"logits_soft_cap": 2.0}])
def test_values_may_have_their_own_size(scene, size_v, rules):
    scene(MIXED, size_v=size_v).check(**rules)


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_any_block_size_gives_the_same_answer(scene, block_size):
    scene(MIXED, block_size=block_size).check(sliding_window=7)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_a_long_decode_is_the_same_tile_by_tile(scene, rules, monkeypatch):
    monkeypatch.setattr(torch_sdpa_plan, "TILE_BYTES", 4096)
    seqs = [(1, 200, True), (4, 130, True), (1, 200, True), (1, 3, True)]
    scene(seqs).check(**rules)


@pytest.mark.parametrize("seed", range(4))
def test_a_prefill_longer_than_a_query_tile_is_right(scene, seed):
    rules = list(RULES.values())[seed]
    scene([(300, 0, False), (280, 40, False)], dtype=torch.bfloat16, seed=seed).check(**rules)


def test_chunks_and_single_tokens_give_what_one_prefill_gives(scene):
    whole = scene([(24, 0, False)], word="fp8", scales=(0.5, 0.5))
    once, _ = whole.run(sliding_window=6)
    for cuts in ([3, 3, 2, 16], [1] * 24):
        impl, done, parts = whole.impl(sliding_window=6), 0, []
        cache = torch.zeros(whole.cache.shape).to(whole.cache.dtype)
        for n in cuts:
            builder = CommonMetadataBuilder(whole.block_size)
            builder.add(n, done, whole.tables[0], decode=n == 1)
            rows = slice(done, done + n)
            q, k, v = whole.query[rows], whole.key[rows], whole.value[rows]
            parts.append(impl.forward(q, k, v, cache, builder.build(), *whole.scales))
            done += n
        assert torch.allclose(torch.cat(parts), once, atol=2e-6)


def test_a_token_whose_slot_is_negative_is_read_from_the_cache(scene):
    one = scene([(20, 0, False)])
    right, _ = one.run()
    one.metadata.slot_mapping[:8] = -1  # tokens 0-7 are there already
    one.key[:8] = 99
    assert torch.allclose(one.run()[0], right, atol=2e-6)


def test_alibi_positions_are_exact_far_out_in_bf16(scene):
    far = scene([(1, 4095, True)], dtype=torch.bfloat16, block_size=16, num_heads=2, num_kv_heads=2)
    far.check(alibi_slopes=torch.tensor([0.5, 0.01]))


@pytest.mark.parametrize("tail", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_what_lies_past_the_last_key_never_reaches_the_output(scene, tail, tokens):
    seqs = [(tokens, 6, False), (tokens, 14, False)]
    clean, dirty = scene(seqs), scene(seqs)
    for one, fill in ((clean, 0.0), (dirty, tail)):
        one.cache[one.cache.isnan()] = fill
    assert torch.equal(clean.run()[0], dirty.run()[0])


def test_output_does_not_depend_on_strides(scene):
    one = scene(MIXED)
    right, _ = one.run()
    one.query = one.query.transpose(0, 1).contiguous().transpose(0, 1)
    one.key = torch.stack([one.key, one.key], -1)[..., 0]
    one.value = one.value.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.zeros(2, *one.cache.shape[1:-1], 40)
    wide[..., :16] = one.cache
    one.cache = wide[..., :16]
    assert torch.allclose(one.run()[0], right, atol=1e-6)


@pytest.mark.parametrize("keys", [33, 65, 97])
def test_heads_of_stride_zero_are_read_right(scene, keys):
    one = scene([(keys, 0, False)], num_heads=4, num_kv_heads=4)
    one.key, one.value = (x[:, :1].expand(-1, 4, -1) for x in (one.key, one.value))
    one.keys, one.values = [one.key], [one.value]
    one.check()


def test_the_flat_form_is_answered_flat(scene):
    one = scene(MIXED)
    right, _ = one.run()
    flat = [x.flatten(1) for x in (one.query, one.key, one.value)]
    found = one.impl().forward(*flat, one.cache, one.metadata)
    assert found.shape == (len(one.query), 64)
    assert torch.equal(found.view_as(right), right)
    output = torch.empty(len(one.query), 64)
    assert one.impl().forward(*flat, one.cache, one.metadata, output=output) is output
    assert torch.equal(output, found)


def test_nothing_is_a_batch_too(scene):
    assert scene([]).run()[0].shape == (0, 4, 16)
    scene([(0, 0, False), (4, 0, False), (0, 5, True), (1, 3, True)]).check()


def test_the_profiling_run_attends_without_a_cache(scene):
    one = scene([(20, 0, False), (3, 0, False)], word="fp8")
    plain = scene([(20, 0, False), (3, 0, False)])
    one.cache = torch.empty(0)
    assert torch.allclose(one.run()[0], plain.run()[0], atol=2e-6)
    context = scene([(3, 4, False)])
    context.cache = (torch.empty(0), torch.empty(0))
    with pytest.raises(MetadataError, match="sequence 0: context_len 4"):
        context.run()


def test_layers_with_their_own_window_share_one_step(scene):
    one = scene(MIXED)
    found = [one.run(**rules)[0] for rules in (RULES["window"], {}, RULES["alibi"], {"sliding_window": 2}, {})]
    assert torch.equal(found[1], found[4])
    for output, rules in zip(found, (RULES["window"], {}, RULES["alibi"], {"sliding_window": 2}), strict=False):
        assert (output.double() - one.expected(**rules)[0]).abs().max() < 5e-6


def test_forward_is_safe_from_several_threads(scene):
    one, impls = scene(MIXED), []
    right, _ = one.run()
    impl = one.impl()

    def work():
        impls.extend(torch.equal(one.run(impl)[0], right) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert impls == [True] * 15


# Encoders -------------------------------------------------------------------------------------------------------------


def encoder_metadata(lengths, queries=None, tables=None, block_size=4):
    builder = CommonMetadataBuilder(block_size)
    for i, length in enumerate(lengths):
        blocks = () if tables is None else tables[i]
        builder.add(queries[i] if queries else length, encoder_len=length, cross_blocks=blocks)
    return builder.build()


@pytest.mark.parametrize("kind", ["encoder", "encoder_only"])
@pytest.mark.parametrize("rules", [RULES[name] for name in ("plain", "window", "alibi", "sinks", "all")])
def test_encoders_see_both_ways(kind, rules):
    torch.manual_seed(0)
    lengths = [30, 0, 5]
    q, k, v = torch.randn(3, 37, 4, 16).unbind(0)
    impl = TorchSdpaBackend.get_impl_cls()(4, 16, 0.25, **rules)
    found = impl.forward(q, k, v, torch.empty(0), encoder_metadata(lengths), attn_type=kind)
    starts = torch.tensor([0, 30, 30, 35])
    right, _ = reference_attention(q[:35], k[:35], v[:35], starts, starts, scale=0.25, causal=False, **rules)
    assert (found[:35].double() - right).abs().max() < 5e-6
    assert (found[35:] == 0).all()


@pytest.mark.parametrize("with_keys", [True, False])
def test_cross_attention_reads_the_encoders_keys(with_keys):
    torch.manual_seed(0)
    lengths, queries = [7, 0, 2], [2, 3, 20]
    k, v = torch.randn(2, 9, 2, 16).unbind(0)
    q = torch.randn(25, 4, 16)
    metadata = encoder_metadata(lengths, queries, [[3, 1], [], [2]])
    cache = torch.full((2, 5, 2, 4, 16), torch.nan)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    impl = TorchSdpaBackend.get_impl_cls()(4, 16, 0.25, 2, sinks=sinks)
    lse = torch.empty(25, 4)
    impl.forward(q, k, v, cache, metadata, attn_type="encoder_decoder")
    given = (k, v) if with_keys else (None, None)
    found = impl.forward(q, *given, cache, metadata, attn_type="encoder_decoder", output_lse=lse)
    starts = torch.tensor([0, 2, 5, 25]), torch.tensor([0, 7, 7, 9])
    right, right_lse = reference_attention(q, k, v, *starts, scale=0.25, causal=False, sinks=sinks)
    assert (found.double() - right).abs().max() < 5e-6
    assert (found[2:5] == 0).all()
    assert torch.allclose(lse.double(), right_lse, atol=1e-5)
    assert torch.equal(lse[2:5], sinks.expand(3, 4))


def test_a_row_without_a_key_has_lse_minus_infinity():
    metadata = encoder_metadata([0], [2], [[]])
    impl, lse = TorchSdpaBackend.get_impl_cls()(2, 8, 1.0), torch.empty(2, 2)
    q = torch.ones(2, 2, 8)
    found = impl.forward(
        q, None, None, torch.zeros(2, 2, 2, 4, 8), metadata, attn_type="encoder_decoder", output_lse=lse
    )
    assert (found == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("rules", [{"sliding_window": 3}, {"alibi_slopes": [0.5, 0.25]}], ids=["window", "alibi"])
def test_window_and_alibi_are_refused_for_cross_attention(rules):
    impl = TorchSdpaBackend.get_impl_cls()(2, 8, 1.0, **rules)
    q = torch.ones(2, 2, 8)
    with pytest.raises(UnsupportedError, match="encoder_decoder") as caught:
        impl.forward(q, None, None, torch.zeros(2, 2, 2, 4, 8), encoder_metadata([0], [2]), attn_type="encoder_decoder")
    assert {str(reason.code) for reason in caught.value.reasons} == {"FEATURE_PAIR"}


# Known answers (one head of size 64, the scalar in coordinate 0) ------------------------------------------------------


def known(values, keys, queries=1, q=0.0, dtype=torch.float32, decode=True, scale=1.0, word="auto", scales=(), **rules):
    """The last ``queries`` rows of a sequence, by paged decode or chunk, as scalars; and as one prefill."""
    n = len(values)
    key, value = torch.zeros(n, 1, 64), torch.tensor(values)[:, None, None].expand(-1, 1, 64)
    key[:, 0, 0] = torch.tensor(keys)
    query = torch.zeros(n, 1, 64)
    query[:, 0, 0] = q
    query, key, value = (x.to(dtype) for x in (query, key, value))
    impl = TorchSdpaBackend.get_impl_cls()(1, 64, scale, kv_cache_dtype=word, **rules)
    cache = torch.zeros(2, 8, 1, 16, 64).to(dtype if word == "auto" else torch.float8_e4m3fn)
    for count, context in ((n - queries, 0), (queries, n - queries)):
        builder = CommonMetadataBuilder(16)
        builder.add(count, context, list(range(8)), decode=decode and context > 0)
        rows = slice(context, context + count)
        found = impl.forward(query[rows], key[rows], value[rows], cache, builder.build(), *scales)
    return found[:, 0, 0].tolist()


POSITIONS = [float(j) for j in range(8)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("right", "arguments"),
    [
        ([0.536656], {"values": [0.0, 1.0], "keys": [98.0, 100.0], "q": 1.0, "logits_soft_cap": 50.0}),
        ([0.605017], {"values": [0.0, 1.0], "keys": [98.0, 100.0], "q": 1.0, "scale": 0.5, "logits_soft_cap": 50.0}),
        ([3.0], {"values": [4.0] * 3, "keys": [0.0] * 3, "sinks": torch.tensor([0.0])}),
        ([4.0], {"values": [4.0] * 3, "keys": [0.0] * 3, "sinks": torch.tensor([-torch.inf])}),
        ([5.5], {"values": POSITIONS, "keys": [0.0] * 8, "sliding_window": 4}),
        ([4.5, 5.5], {"values": POSITIONS, "keys": [0.0] * 8, "sliding_window": 4, "queries": 2}),
        ([3.0, 3.5], {"values": POSITIONS, "keys": [0.0] * 8, "queries": 2}),
        ([2.084576], {"values": POSITIONS[:4], "keys": [0.0] * 4, "alibi_slopes": [0.5]}),
        ([1.807095], {"values": POSITIONS[:4], "keys": [0.0] * 4, "alibi_slopes": [0.25]}),
        ([3.4926527], {"values": [1.0, 2.0, 3.0, 4.0], "keys": [0.0, 1.0, 2.0, 3.0], "q": 1.0}),
        (
            [2.761594],
            {"values": [1.0, 3.0], "keys": [2.0, 4.0], "q": 1.0, "word": "fp8", "scales": (0.25, 0.5)},
        ),
    ],
)
def test_known_answers(dtype, right, arguments):
    allowed = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    found = known(dtype=dtype, **arguments)
    if "word" in arguments:  # scores 2 and 4 once scaled: k = 2/.25 and 4/.25 are exact in e4m3
        allowed = max(allowed, 2e-6)
    for a, b in zip(found, right, strict=True):
        assert abs(a - b) <= allowed * max(1.0, abs(b))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_key_gives_its_value_bit_for_bit(scene, dtype):
    one = scene([(1, 0, False)], dtype=dtype, num_kv_heads=4)
    assert torch.equal(one.run()[0], one.value)


def test_scores_beyond_half_precision_stay_finite():
    q = torch.full((1, 1, 128), 256.0, dtype=torch.float16)
    k = torch.stack([torch.full((1, 128), 256.0), torch.full((1, 128), 128.0)]).half()
    v = torch.tensor([1.0, 0.0])[:, None, None].expand(2, 1, 128).half()
    impl = TorchSdpaBackend.get_impl_cls()(1, 128, 128**-0.5)
    metadata = encoder_metadata([2], [1])
    assert (impl.forward(q, k, v, torch.empty(0), metadata, attn_type="encoder_decoder") == 1).all()


def test_slopes_of_six_heads_are_taken_as_given(scene):
    scene(MIXED, num_heads=6, num_kv_heads=3).check(alibi_slopes=alibi_slopes(6))


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"scale": float("nan")}, BadInputError, "scale is nan"),
        ({"scale": 0.0}, BadInputError, "scale is 0.0"),
        ({"num_kv_heads": 3}, BadInputError, "not a multiple"),
        ({"sliding_window": 0}, BadInputError, "sliding_window 0"),
        ({"logits_soft_cap": -1.0}, BadInputError, "logits_soft_cap"),
        ({"kv_cache_dtype": "int4"}, BadInputError, "kv_cache_dtype"),
        ({"kv_cache_dtype": "u8"}, UnsupportedError, "kv_cache_dtype"),
        ({"blocksparse_params": {}}, UnsupportedError, "blocksparse"),
        ({"alibi_slopes": [0.5]}, BadInputError, r"alibi_slopes has shape \[1\]"),
        ({"alibi_slopes": [0.5, float("nan"), 1, 1]}, BadInputError, r"alibi_slopes\[1\] is nan"),
        ({"sinks": torch.tensor([0, 0, 0, torch.inf])}, BadInputError, r"sinks\[3\] is inf"),
        ({"num_heads": 4.0}, BadInputError, "num_heads is 4.0"),
        ({"sliding_windw": 4}, BadInputError, "did you mean 'sliding_window'"),
    ],
)
def test_a_wrong_layer_is_refused_when_it_is_built(change, error, text):
    arguments = {"num_heads": 4, "head_size": 16, "scale": 0.25} | change
    with pytest.raises(error, match=text):
        TorchSdpaBackend.get_impl_cls()(**arguments)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"query": torch.zeros(9, 4, 15)}, "query has shape"),
        ({"query": torch.zeros(9, 4, 16).double()}, "query is float64"),
        ({"key": torch.zeros(9, 4, 16)}, "key has shape"),
        ({"key": torch.zeros(9, 2, 16).half()}, "key is float16"),
        ({"value": None}, "one of key and value is None"),
        ({"key": None, "value": None}, "key and value are None"),
        ({"key": torch.zeros(8, 2, 16), "value": torch.zeros(8, 2, 16)}, "key has 8 rows"),
        ({"kv_cache": torch.zeros(2, 5, 3, 4, 16)}, "the K cache has 3 heads"),
        ({"kv_cache": torch.zeros(2, 5, 2, 4, 16).half()}, "the K cache is float16"),
        ({"kv_cache": torch.zeros(3, 5, 2, 4, 16)}, "3 parts"),
        ({"kv_cache": None}, "kv_cache is NoneType"),
        ({"attn_metadata": None}, "attn_metadata is NoneType"),
        ({"attn_type": "decodr"}, "unknown attn_type 'decodr'"),
        ({"k_scale": 2.0}, "has no scale"),
        ({"k_scale": float("nan")}, "k_scale is nan"),
        ({"v_scale": torch.ones(2)}, r"v_scale is a tensor of shape \[2\]"),
        ({"output": torch.zeros(8, 4, 16)}, r"output is \[8, 4, 16\]"),
        ({"output": torch.zeros(1, 4, 16).expand(9, 4, 16)}, "stride 0"),
        ({"output_lse": torch.zeros(9, 3)}, r"output_lse is \[9, 3\]"),
        ({"outptu": None}, "did you mean 'output'"),
    ],
)
def test_a_wrong_call_is_one_clear_error(scene, change, text):
    one = scene([(8, 0, False), (1, 3, True)])
    arguments = {
        "query": one.query,
        "key": one.key,
        "value": one.value,
        "kv_cache": one.cache,
        "attn_metadata": one.metadata,
    }
    before = one.cache.clone()
    with pytest.raises(BadInputError, match=text):
        one.impl().forward(**arguments | change)
    assert torch.equal(one.cache.nan_to_num(7), before.nan_to_num(7))


def test_bad_metadata_is_refused_before_anything_is_written(scene):
    one = scene([(8, 0, False), (1, 3, True)])
    one.metadata = replace(one.metadata, block_tables=one.metadata.block_tables + 100)
    before = one.cache.clone()
    with pytest.raises(MetadataError, match=r"sequence 0: block_tables\[0\]"):
        one.run()
    assert torch.equal(one.cache.nan_to_num(7), before.nan_to_num(7))


def test_the_class_is_known_without_torch():
    code = (
        "import sys; from heedful.backends.torch_sdpa import TorchSdpaBackend as B; "
        "assert B.CAPABILITIES and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
