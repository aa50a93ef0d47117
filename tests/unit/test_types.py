import json

import pytest

from heedful.errors import BadInputError
from heedful.types import (
    Candidate,
    Device,
    Override,
    Reason,
    ReasonCode,
    Selection,
    SelectionRequest,
    check_request,
)


def test_a_device_is_named_by_its_generation():
    assert str(Device("cuda", capability=(9, 0))) == "cuda 9.0"
    assert str(Device("rocm", arch="gfx942")) == "rocm gfx942"
    assert str(Device("cpu")) == "cpu"


def test_cuda_goes_by_capability_even_where_an_arch_is_told():
    assert Device("cuda", capability=(9, 0), arch="sm_90").generation == "9.0"


def test_rocm_goes_by_arch_without_its_feature_flags():
    assert Device("rocm", capability=(9, 4), arch="gfx942:sramecc+:xnack-").generation == "gfx942"


def test_an_unknown_platform_names_the_nearest_one():
    with pytest.raises(BadInputError, match=r"'cudda'.*did you mean 'cuda'"):
        Device("cudda")


@pytest.mark.parametrize("capability", [(9,), (9, 0, 0), ("9", "0"), (9.0, 0)])
def test_a_capability_is_two_ints(capability):
    with pytest.raises(BadInputError, match=r"\(major, minor\)"):
        Device("cuda", capability=capability)


def test_a_capability_list_becomes_a_tuple_so_that_devices_can_be_keys():
    assert hash(Device("cuda", capability=[9, 0])) == hash(Device("cuda", capability=(9, 0)))


def test_a_torch_dtype_becomes_its_name():
    import torch

    assert SelectionRequest(64, dtype=torch.float16).dtype == "float16"
    assert SelectionRequest(64, dtype=torch.float16) == SelectionRequest(64, dtype="float16")


def test_a_request_records_only_what_was_said():
    request = SelectionRequest(64, sliding_window=8, alibi=True, block_size=16)
    assert request.to_dict() == {"head_size": 64, "sliding_window": 8, "alibi": True}


def test_features_are_in_the_words_of_capability_data():
    asked = SelectionRequest(64, sliding_window=1, alibi=True, logits_soft_cap=1.0, sinks=True, is_blocksparse=True)
    assert asked.features == {"window", "alibi", "soft_cap", "sinks", "blocksparse"}
    assert SelectionRequest(64).features == frozenset()


BROKEN = {
    "head_size 0": {"head_size": 0},
    "head_size -8": {"head_size": -8},
    "num_heads 0": {"num_heads": 0},
    "num_kv_heads 0": {"num_kv_heads": 0},
    "block_size 0": {"block_size": 0},
    "head_size_v 0": {"head_size_v": 0},
    "sliding_window 0": {"sliding_window": 0},
    "sliding_window -1": {"sliding_window": -1},
    "is not a multiple of num_kv_heads 3": {"num_heads": 8, "num_kv_heads": 3},
    "logits_soft_cap nan": {"logits_soft_cap": float("nan")},
    "logits_soft_cap inf": {"logits_soft_cap": float("inf")},
    "logits_soft_cap 0": {"logits_soft_cap": 0.0},
    "unknown dtype 'bf16'": {"dtype": "bf16"},
    "did you mean 'bfloat16'": {"dtype": "BFloat16"},
    "unknown kv_cache_dtype ''": {"kv_cache_dtype": ""},
    "did you mean 'fp8_e4m3'": {"kv_cache_dtype": "fp8-e4m3"},
    "unknown attn_type 'encode'": {"attn_type": "encode"},
    "exclude each other": {"is_attention_free": True, "is_blocksparse": True},
    "head_size 64.0 is of type float": {"head_size": 64.0},
    "head_size True is of type bool": {"head_size": True},
    "head_size '64' is of type str": {"head_size": "64"},
    "block_size None is of type NoneType": {"block_size": None},
    "sliding_window '8' is of type str": {"sliding_window": "8"},
    "is_attention_free 1 is of type int": {"is_attention_free": 1},
    "alibi None": {"alibi": None},
    "dtype None": {"dtype": None},
    "logits_soft_cap '30'": {"logits_soft_cap": "30"},
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_request_that_means_nothing_is_one_clear_error(message):
    with pytest.raises(BadInputError) as caught:
        check_request(SelectionRequest(**{"head_size": 64} | BROKEN[message]))
    assert message in str(caught.value)


def test_a_torch_dtype_as_cache_dtype_is_an_error_that_lists_the_words():
    import torch

    with pytest.raises(BadInputError, match=r"torch.float16 is of type dtype; give a str: auto, fp8"):
        check_request(SelectionRequest(64, kv_cache_dtype=torch.float16))


@pytest.mark.parametrize("kv_cache_dtype", [None, "auto", "fp8", "fp8_e4m3", "fp8_e5m2", "u8"])
def test_every_cache_word_and_none_are_legal(kv_cache_dtype):
    check_request(SelectionRequest(64, kv_cache_dtype=kv_cache_dtype))


def test_an_attention_free_request_needs_no_heads():
    check_request(SelectionRequest(0, is_attention_free=True, num_heads=0, num_kv_heads=0, block_size=0))


def selection(backend="B"):
    reason = Reason(ReasonCode.DTYPE, "takes float16", "float32", "float16", "cast", "v")
    candidates = (Candidate("A", (reason,)), Candidate("B", (), "v1", "torch 1"))
    return Selection(backend, "preference", candidates, SelectionRequest(64), Device("cpu"), "strict", ("beware",))


def test_a_selection_prints_as_a_table():
    lines = str(selection()).splitlines()
    assert lines == [
        "B on cpu, chosen by preference (policy strict)",
        "  A",
        "      DTYPE: takes float16 (cast)",
        "* B                       v1              torch 1",
    ]


def test_a_selection_without_winner_marks_nothing():
    assert "*" not in str(selection(None))
    assert selection(None).chosen is None


def test_a_selection_record_is_plain_json_and_whole():
    record = json.loads(json.dumps(selection().to_dict()))
    assert record == {
        "backend": "B",
        "chosen_by": "preference",
        "policy": "strict",
        "device": "cpu",
        "simulated": True,
        "request": {"head_size": 64},
        "candidates": [
            {
                "backend": "A",
                "variant": "",
                "facts": "",
                "reasons": [
                    {
                        "code": "DTYPE",
                        "text": "takes float16",
                        "asked": "float32",
                        "accepted": "float16",
                        "hint": "cast",
                        "variant": "v",
                    }
                ],
            },
            {"backend": "B", "variant": "v1", "facts": "torch 1", "reasons": []},
        ],
        "warnings": ["beware"],
    }


def test_an_override_is_told_the_way_it_was_given():
    assert str(Override("X", "environment", "HEEDFUL_ATTENTION_BACKEND")) == "HEEDFUL_ATTENTION_BACKEND='X'"
    assert str(Override("X", "argument")) == "backend 'X'"


def test_reason_codes_are_the_closed_list():
    assert " ".join(ReasonCode) == (
        "PLATFORM CAPABILITY DTYPE KV_CACHE_DTYPE HEAD_SIZE HEAD_SIZE_V HEADS BLOCK_SIZE WINDOW ATTN_TYPE ALIBI "
        "SOFT_CAP SINKS BLOCKSPARSE ATTENTION_FREE FEATURE_PAIR NOT_INSTALLED IMPORT_FAILED NOT_BUILT POLICY"
    )
