"""A backend made of one function keeps the contract, and says what the function lacks."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from heedful.backends.capabilities import Capability, Sizes, listed
from heedful.backends.paged import CommonMetadataBuilder
from heedful.conformance import from_kernel
from heedful.errors import BadInputError, UnsupportedError
from heedful.reference import read_pages, reference_attention

PLAIN = Capability("plain", "cpu", frozenset({"float32"}), Sizes(), listed(4))
RICH = Capability(
    "rich",
    "cpu",
    frozenset({"float32"}),
    Sizes(),
    listed(4),
    kv_cache_dtypes=frozenset({"auto", "fp8"}),
    attn_types=frozenset({"decoder", "encoder", "encoder_only", "encoder_decoder"}),
    features=frozenset({"window", "alibi", "soft_cap", "sinks", "lse"}),
    mixed_head_sizes=True,
)


def attend(query, views, block_tables, query_start_loc, seq_lens, scales=(1.0, 1.0), **rules):
    parts = [
        [read_pages(view.float() * scale, table, int(n)) for table, n in zip(block_tables, seq_lens, strict=True)]
        for view, scale in zip(views, scales, strict=True)
    ]
    assert (seq_lens > 0).all()
    assert (query_start_loc.diff() > 0).all()
    starts = torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0))
    return reference_attention(query, *(torch.cat(x) for x in parts), query_start_loc, starts, **rules)


def ten_lines(query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, *, scale):
    return attend(query, (key_cache, value_cache), block_tables, query_start_loc, seq_lens, scale=scale)[0]


def everything(
    query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, *, k_scale, v_scale, **rules
):  # fmt: skip
    views = [cache.transpose(1, 2) for cache in (key_cache, value_cache)]
    return attend(query, views, block_tables, query_start_loc, seq_lens, (k_scale, v_scale), **rules)


TEN_LINES = from_kernel(ten_lines, PLAIN)
EVERYTHING = from_kernel(everything, [RICH], layout="HND")


def forward(backend, layer=None, pad=2, **call):
    """A prefill of 6, one of 3 after 2, a decode after 4, on two KV heads; (what came, what is right)."""
    torch.manual_seed(0)
    builder = CommonMetadataBuilder(4)
    builder.add(6, 0, [4, 1])
    builder.add(0, 0, [])
    builder.add(1, 0, [0], decode=True)
    metadata = builder.build(pad_tokens=7 + pad)
    query, key, value = torch.randn(7 + pad, 4, 8), *torch.randn(2, 7 + pad, 2, 8).unbind(0)
    layer = backend.get_impl_cls()(4, 8, 0.5, 2) if layer is None else layer
    cache = torch.full(backend.get_kv_cache_shape(6, 4, 2, 8), 100.0)
    output = torch.full((7 + pad, 4, 8), torch.nan)
    found = layer.forward(query, key, value, cache, metadata, output=output, **call)
    starts = torch.tensor([0, 6, 6, 7])
    rules = {"alibi_slopes": layer.alibi_slopes, "sinks": layer.sinks, "sliding_window": layer.sliding_window}
    right = reference_attention(
        query[:7], key[:7], value[:7], starts, starts, scale=0.5, logits_soft_cap=layer.logits_soft_cap, **rules
    )
    return found, right, cache


@pytest.mark.parametrize("backend", [TEN_LINES, EVERYTHING])
def test_the_frame_writes_the_cache_and_clears_the_padding(backend):
    found, (right, _), cache = forward(backend)
    assert torch.allclose(found[:7].double(), right, atol=1e-5)
    assert (found[7:] == 0).all()
    written = (backend.kv_views(cache)[0] != 100).any(-1).any(-1)
    assert written.sum() == 7
    assert written[4].all()
    assert written[1].tolist() == [True, True, False, False]


def test_every_claimed_feature_reaches_the_function():
    layer = EVERYTHING.get_impl_cls()(
        4, 8, 0.5, 2, [0.5, 0.25, 0.1, 0.2], 3, logits_soft_cap=2.0, sinks=torch.tensor([0.0, 1.0, -1.0, 3.0])
    )
    lse = torch.empty(9, 4)
    found, (right, right_lse), _ = forward(EVERYTHING, layer, output_lse=lse)
    assert torch.allclose(found[:7].double(), right, atol=1e-5)
    assert torch.allclose(lse[:7].double(), right_lse, atol=1e-5)
    assert (lse[7:] == -torch.inf).all()


@pytest.mark.parametrize("kind", ["decoder", "encoder_only", "encoder"])
def test_attention_without_a_cache_reaches_the_function_as_pages(kind):
    torch.manual_seed(0)
    builder = CommonMetadataBuilder(4)
    for n in (6, 0, 3):
        builder.add(n, encoder_len=n)
    q, k, v = torch.randn(10, 4, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 5)
    layer = EVERYTHING.get_impl_cls()(4, 8, 0.5, 2, head_size_v=5)
    found = layer.forward(q, k, v, torch.empty(0), builder.build(pad_tokens=10), attn_type=kind)
    starts = torch.tensor([0, 6, 6, 9])
    right, _ = reference_attention(q[:9], k[:9], v[:9], starts, starts, scale=0.5, causal=kind == "decoder")
    assert torch.allclose(found[:9].double(), right, atol=1e-5)
    assert (found[9:] == 0).all()


def test_rows_without_a_key_never_reach_the_function():
    builder = CommonMetadataBuilder(4)
    for blocks, n in (([2], 3), ([], 0)):
        builder.add(2, encoder_len=n, cross_blocks=blocks)
    sinks, lse = torch.tensor([1.0, 2.0]), torch.empty(4, 2)
    layer = EVERYTHING.get_impl_cls()(2, 8, 0.5, sinks=sinks)
    cache = torch.ones(EVERYTHING.get_kv_cache_shape(4, 4, 2, 8))
    q = torch.ones(4, 2, 8)
    found = layer.forward(q, None, None, cache, builder.build(), attn_type="encoder_decoder", output_lse=lse)
    assert (found[2:] == 0).all()
    assert torch.equal(lse[2:], sinks.expand(2, 2))
    assert (found[:2] != 0).all()


@pytest.mark.parametrize(
    ("backend", "arguments"),
    [
        (TEN_LINES, {"sliding_window": 3}),
        (TEN_LINES, {"sinks": torch.zeros(4)}),
        (TEN_LINES, {"kv_cache_dtype": "fp8"}),
        (TEN_LINES, {"head_size_v": 4}),
        (EVERYTHING, {"kv_cache_dtype": "fp8_e5m2"}),
    ],
)
def test_what_is_not_claimed_is_refused(backend, arguments):
    with pytest.raises(UnsupportedError, match=f"{backend.name} cannot serve"):
        backend.get_impl_cls()(4, 8, 0.5, 2, **arguments)


def test_an_lse_that_is_not_claimed_is_refused():
    with pytest.raises(UnsupportedError, match="returns no LSE"):
        forward(TEN_LINES, output_lse=torch.empty(9, 4))


def test_the_layout_decides_the_shape_of_a_page():
    assert TEN_LINES.get_kv_cache_shape(6, 4, 2, 8) == (2, 6, 4, 2, 8)
    assert TEN_LINES.get_kv_cache_shape(6, 4, 2, 8, head_size_v=5) == ((6, 4, 2, 8), (6, 4, 2, 5))
    assert EVERYTHING.get_kv_cache_shape(6, 4, 2, 8) == (2, 6, 2, 4, 8)


def test_the_class_is_found_again_by_name():
    assert TEN_LINES.name == "TEN_LINES"
    assert pickle.loads(pickle.dumps(TEN_LINES)) is TEN_LINES


def test_a_fresh_process_loads_the_class(tmp_path):
    module = tmp_path / "vendor_kernel.py"
    module.write_text(
        "from heedful.backends.capabilities import Capability, Sizes\n"
        "from heedful.conformance import from_kernel\n"
        "def mine(query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, *, scale):\n"
        "    return query\n"
        "CLAIMS = Capability('v', 'cpu', frozenset({'float32'}), Sizes(), Sizes())\n"
        "MINE = from_kernel(mine, CLAIMS)\n"
    )
    code = (
        "from heedful.registry import resolve; b = resolve('vendor_kernel:MINE');"
        "assert f'{b.__module__}:{b.__qualname__}' == 'vendor_kernel:MINE'; b.get_impl_cls()(2, 8, 1.0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(tmp_path))


@pytest.mark.parametrize(
    ("fn", "claims", "options", "text"),
    [
        (ten_lines, PLAIN, {"layout": "HDN"}, "unknown layout 'HDN'"),
        (ten_lines, [], {}, "claims nothing"),
        (ten_lines, RICH, {}, "cannot be called as its claims ask .*claim less for TEN_LINES"),
        (lambda *a, scale: a[0], PLAIN, {}, "give name="),
        (lambda q, *, scale: q, PLAIN, {"name": "SHORT"}, "query, key_cache"),
    ],
)
def test_a_function_that_cannot_keep_its_claims_is_an_error_at_once(fn, claims, options, text):
    with pytest.raises(BadInputError, match=text):
        from_kernel(fn, claims, **options)


@pytest.mark.parametrize("wrong", [lambda q: q[:-1], lambda q: None, lambda q: (q, q)])
def test_an_answer_of_the_wrong_form_is_an_error(wrong):
    backend = from_kernel(lambda query, *_, scale: wrong(query), PLAIN, name="WRONG")
    with pytest.raises(BadInputError, match=r"WRONG returned .*; its claims promise \[\(7, 4, 8\)\]"):
        forward(backend)
