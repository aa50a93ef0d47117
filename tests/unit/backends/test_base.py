"""The contract's data: cache shapes, refusals that every backend shares, the state of a device without graphs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from heedful.backends.base import (
    AttentionImpl,
    CommonAttentionState,
    HndBackend,
    refuse_unknown,
    refuse_unsupported,
)
from heedful.backends.capabilities import Capability, Sizes, listed, pairs
from heedful.errors import BadInputError, UnknownArgumentError, UnsupportedError
from heedful.types import SelectionRequest

ROW = Capability("v1", "cuda", frozenset({"bfloat16"}), listed(64, 128), listed(16), generations=frozenset({"9.0"}))


def claiming(*rows):
    return type("Claims", (HndBackend,), {"name": "CLAIMS", "CAPABILITIES": rows})


def test_importing_the_contract_loads_no_torch():
    code = "import sys, heedful.backends.base; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_cache_is_one_tensor_or_a_pair_where_the_sizes_differ():
    assert HndBackend.get_kv_cache_shape(7, 16, 3, 64) == (2, 7, 3, 16, 64)
    assert HndBackend.get_kv_cache_shape(7, 16, 3, 64, "fp8", 64) == (2, 7, 3, 16, 64)
    assert HndBackend.get_kv_cache_shape(7, 16, 3, 64, head_size_v=32) == ((7, 3, 16, 64), (7, 3, 16, 32))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 16, 3, 64), "num_blocks 0"),
        ((7, -1, 3, 64), "block_size -1"),
        ((7, 16, 0, 64), "num_kv_heads 0"),
        ((7, 16, 3, 0), "head_size 0"),
        ((7, 16, 3, 64, "auto", 0), "head_size_v 0"),
        ((7, 16, 3, 64, "int4"), "unknown kv_cache_dtype 'int4'"),
    ],
)
def test_a_cache_that_no_one_could_allocate_is_an_error(arguments, text):
    with pytest.raises(BadInputError, match=text):
        HndBackend.get_kv_cache_shape(*arguments)


def test_a_claim_is_not_refused_for_what_a_layer_does_not_know_yet():
    backend = claiming(ROW)
    refuse_unsupported(backend, SelectionRequest(head_size=64, dtype="float32", block_size=8, attn_type="encoder"))


@pytest.mark.parametrize("known", ["dtype", "block_size", "attn_type"])
def test_what_the_caller_knows_is_judged(known):
    request = SelectionRequest(head_size=64, dtype="float32", block_size=8, attn_type="encoder")
    with pytest.raises(UnsupportedError) as caught:
        refuse_unsupported(claiming(ROW), request, frozenset({known}))
    codes = {"dtype": "DTYPE", "block_size": "BLOCK_SIZE", "attn_type": "ATTN_TYPE"}
    assert [str(reason.code) for reason in caught.value.reasons] == [codes[known]]


def test_a_refusal_carries_the_reasons_of_every_row_and_says_what_to_do():
    other = replace(ROW, variant="v2", head_sizes=Sizes(multiple_of=8), features=frozenset({"window"}))
    with pytest.raises(
        UnsupportedError, match=r"CLAIMS cannot serve .*v1 takes head sizes 64, 128.*heedful select"
    ) as caught:
        refuse_unsupported(claiming(ROW, other), SelectionRequest(head_size=44, sliding_window=4))
    assert {(reason.variant, str(reason.code)) for reason in caught.value.reasons} == {
        ("v1", "HEAD_SIZE"),
        ("v1", "WINDOW"),
        ("v2", "HEAD_SIZE"),
    }


def test_one_row_that_takes_the_layer_is_enough():
    wide = replace(ROW, head_sizes=Sizes())
    refuse_unsupported(claiming(ROW, wide), SelectionRequest(head_size=44))


def test_a_pair_is_refused_only_where_no_dtype_lets_it_through():
    row = replace(ROW, dtypes=frozenset({"bfloat16", "float16"}), features=frozenset({"window"}))
    half = replace(row, excluded_pairs=pairs(("window", "bfloat16")))
    request = SelectionRequest(head_size=64, sliding_window=4)
    refuse_unsupported(claiming(half), request)
    none = replace(row, excluded_pairs=pairs(("window", "bfloat16"), ("window", "float16")))
    with pytest.raises(UnsupportedError, match="cannot combine"):
        refuse_unsupported(claiming(none), request)


def test_an_unknown_keyword_names_the_nearest_one():
    with pytest.raises(UnknownArgumentError, match=r"Layer\(\) got an unknown argument 'sink'; did you mean 'sinks'"):
        refuse_unknown("Layer()", {"sink": 1}, AttentionImpl.__init__)
    with pytest.raises(TypeError, match="it takes num_heads, head_size"):
        refuse_unknown("Layer()", {"zzz": 1}, AttentionImpl.__init__)
    refuse_unknown("Layer()", {}, AttentionImpl.__init__)


def test_a_device_without_graphs_refuses_to_capture_them():
    state = CommonAttentionState(runner=None)
    state.begin_forward(None)
    with pytest.raises(UnsupportedError, match="graph_capture"):
        state.graph_capture(8)
