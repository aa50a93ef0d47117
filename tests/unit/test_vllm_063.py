import gzip
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful import get_attn_backend, platforms, registry, vllm_063
from heedful.errors import BackendUnavailableError, BadInputError, HeedfulWarning, SelectionError
from heedful.selector import decide, explain, forced_backend
from heedful.types import Device, Missing, Override, ReasonCode, SelectionRequest

POLICY = vllm_063.POLICY
GONE = {"flash_attn": Missing(ReasonCode.NOT_INSTALLED, "gone")}
GOLDEN = Path(__file__).parents[1] / "data" / "selector-vllm-0.6.3.jsonl.gz"
FIELDS = (
    "head_size",
    "sliding_window",
    "dtype",
    "kv_cache_dtype",
    "block_size",
    "is_attention_free",
    "is_blocksparse",
)


def sm(capability):
    return Device("cuda", capability=capability)


def ask(device, override=None, packages=None, **request):
    return explain(SelectionRequest(**{"head_size": 128} | request), device, POLICY, override, packages)


def answer(row):
    """The row's answer, or the class of error that the release raised."""
    capability = None if row["capability"] is None else divmod(row["capability"], 10)
    device = Device(row["platform"], capability=capability)
    override = None
    if row["forced"] is not None:
        override = Override(row["forced"], "context")
    elif row["env"] is not None:
        override = Override(row["env"], "environment", "HEEDFUL_ATTENTION_BACKEND")
    packages = None if row["flash_attn_installed"] else GONE
    request = SelectionRequest(*(row[field] for field in FIELDS))
    try:
        return decide(request, device, POLICY, override, packages).backend
    except AssertionError:
        return "AssertionError"
    except ValueError:
        return "ValueError"


def test_every_recorded_answer_agrees():
    with gzip.open(GOLDEN, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    assert len(rows) == 14_777
    wrong = [(row, found) for row in rows if (found := answer(row)) != (row.get("backend") or row["error"])]
    assert wrong == []


# Rows that were not recorded


@pytest.mark.parametrize("head_size", [8, 17, 40, 48, 72, 80, 112, 120, 168, 288, 512, 0, -1])
def test_head_sizes_outside_the_list_fall_to_xformers(head_size):
    assert ask(sm((8, 0)), head_size=head_size).backend == "XFORMERS"


@pytest.mark.parametrize("head_size", sorted(vllm_063.FLASH_HEAD_SIZES))
@pytest.mark.parametrize("block_size", [0, 16, 48, 64, 256, 1024])
def test_listed_head_sizes_at_multiples_of_sixteen_are_flash_and_zero_is_one(head_size, block_size):
    assert ask(sm((8, 7)), head_size=head_size, block_size=block_size).backend == "FLASH_ATTN"


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_anything", "fp8 "])
def test_any_fp8_suffix_is_fp8(kv_cache_dtype):
    selection = ask(sm((9, 0)), kv_cache_dtype=kv_cache_dtype)
    assert selection.backend == "XFORMERS"
    assert selection.candidates[0].reasons[0].code == "KV_CACHE_DTYPE"


@pytest.mark.parametrize(
    "kv_cache_dtype", [None, "auto", "half", "bfloat16", "float", "int8", "", "nonsense", "FP8", "u8"]
)
def test_no_other_cache_word_is_validated(kv_cache_dtype):
    assert ask(sm((9, 0)), kv_cache_dtype=kv_cache_dtype).backend == "FLASH_ATTN"


def test_a_torch_dtype_as_cache_dtype_is_the_recorded_attribute_error():
    import torch

    with pytest.raises(SelectionError, match="has no startswith") as caught:
        ask(sm((9, 0)), kv_cache_dtype=torch.float8_e4m3fn)
    assert isinstance(caught.value, AttributeError)


def test_a_torch_dtype_as_cache_dtype_passes_where_the_release_did_not_get_to_it():
    import torch

    odd = {"kv_cache_dtype": torch.float16}
    assert ask(sm((7, 5)), **odd).backend == "XFORMERS"
    assert ask(sm((9, 0)), dtype="float32", **odd).backend == "XFORMERS"
    assert ask(Device("cpu"), **odd).backend == "TORCH_SDPA"
    assert ask(sm((9, 0)), "FLASHINFER", **odd).backend == "FLASHINFER"
    assert ask(sm((9, 0)), is_attention_free=True, **odd).backend == "NO_ATTENTION"
    assert ask(sm((9, 0)), is_blocksparse=True, **odd).backend == "BLOCKSPARSE_FLASH_ATTN"
    assert json.dumps(ask(Device("cpu"), **odd).to_dict())


@pytest.mark.parametrize("dtype", ["float32", "float64", "float8_e4m3fn", "int8", "nonsense"])
def test_only_half_precision_is_flash(dtype):
    assert ask(sm((9, 0)), dtype=dtype).backend == "XFORMERS"


@pytest.mark.parametrize("window", [0, 1, 4096, -1])
def test_any_window_is_a_window_also_zero(window):
    assert ask(sm((9, 0)), sliding_window=window).backend == "XFORMERS"


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        (None, "XFORMERS"),
        ((7, 9), "XFORMERS"),
        ((8, 0), "FLASH_ATTN"),
        ((10, 3), "FLASH_ATTN"),
        ((12, 1), "FLASH_ATTN"),
        ((13, 0), "FLASH_ATTN"),
    ],
)
def test_capability_is_a_threshold_and_no_platform_counts_as_less(capability, name):
    assert ask(sm(capability)).backend == name


def test_a_missing_flash_library_falls_to_xformers_and_is_looked_up_last():
    assert ask(sm((9, 0)), packages=GONE).backend == "XFORMERS"
    asked = []
    for request in ({"head_size": 80}, {"dtype": "float32"}, {"block_size": 8}, {"sliding_window": 0}):
        vllm_063.decide(SelectionRequest(**{"head_size": 128} | request), sm((9, 0)), None, asked.append)
    assert asked == []


@pytest.mark.parametrize("name", vllm_063.NAMES)
@pytest.mark.parametrize(("platform", "only"), vllm_063.ONLY_ANSWER.items())
def test_other_platforms_have_one_answer_and_say_that_a_choice_was_replaced(platform, only, name):
    selection = ask(Device(platform), name)
    assert selection.backend == only
    assert selection.chosen_by == ("argument" if name == only else "preference")
    replaced = f"the explicit choice was replaced by {only}, as vLLM 0.6.3 did"
    assert (replaced in selection.warnings) == (name != only)


@pytest.mark.parametrize("name", ["XFORMERS", "FLASHINFER", "ROCM_FLASH", "OPENVINO", "PALLAS", "NO_ATTENTION"])
def test_cuda_takes_these_choices_without_any_check(name):
    odd = {"head_size": 17, "dtype": "float32", "block_size": 7, "sliding_window": 0, "kv_cache_dtype": "fp8"}
    assert ask(sm((7, 0)), name, **odd).backend == name


@pytest.mark.parametrize(("name", "home"), [("TORCH_SDPA", "cpu"), ("IPEX", "xpu")])
def test_cuda_refuses_these_choices_as_the_release_asserted(name, home):
    with pytest.raises(SelectionError, match=f"{name}, chosen by argument, is for {home} only") as caught:
        ask(sm((9, 0)), name)
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, ValueError)
    assert caught.value.selection.candidates[0].reasons[0].code == "PLATFORM"


ILLEGAL = ["", "flash_attn", "FLASH_ATTN ", "TORCH_SPDA", "BLOCKSPARSE_FLASH_ATTN", "TRITON_ATTN"]


@pytest.mark.parametrize("name", ILLEGAL)
@pytest.mark.parametrize("device", [sm((9, 0)), Device("cpu"), Device("tpu")], ids=str)
def test_only_the_nine_names_of_the_release_are_known(device, name):
    with pytest.raises(BadInputError, match=r"of policy vllm-0.6.3; the names are FLASH_ATTN, XFORMERS"):
        ask(device, name)


@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_name_is_tolerated_where_the_release_did_not_read_it(fresh, monkeypatch, name):
    monkeypatch.setenv("HEEDFUL_ATTENTION_BACKEND", name)
    assert ask(sm((9, 0)), is_attention_free=True).backend == "NO_ATTENTION"
    assert ask(sm((9, 0)), is_blocksparse=True).backend == "BLOCKSPARSE_FLASH_ATTN"
    with forced_backend("FLASHINFER"):
        assert ask(sm((9, 0))).backend == "FLASHINFER"
    with pytest.raises(ValueError, match="HEEDFUL_ATTENTION_BACKEND="):
        ask(sm((9, 0)))


def test_block_sparse_goes_before_attention_free_and_everything_else():
    for device in (Device("cpu"), Device("tpu"), sm((7, 0)), sm(None)):
        both = ask(device, is_blocksparse=True, is_attention_free=True, head_size=0, block_size=0)
        assert (both.backend, both.chosen_by) == ("BLOCKSPARSE_FLASH_ATTN", "argument")


SIZES = st.integers(-8, 600)
REQUESTS = st.builds(
    SelectionRequest,
    head_size=SIZES,
    sliding_window=st.none() | SIZES,
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    kv_cache_dtype=st.none() | st.sampled_from(["auto", "fp8", "fp8_x", "int8"]),
    block_size=SIZES,
)


@settings(max_examples=300, deadline=None)
@given(REQUESTS, st.none() | st.tuples(st.integers(5, 13), st.integers(0, 9)))
def test_the_cuda_default_is_flash_exactly_when_all_seven_conditions_hold(request_, capability):
    expected = (
        capability is not None
        and capability >= (8, 0)
        and request_.dtype in ("float16", "bfloat16")
        and not (request_.kv_cache_dtype or "").startswith("fp8")
        and request_.block_size % 16 == 0
        and request_.sliding_window is None
        and request_.head_size in (32, 64, 96, 128, 160, 192, 224, 256)
    )
    found = decide(request_, sm(capability), POLICY)
    assert found.backend == ("FLASH_ATTN" if expected else "XFORMERS")
    assert [c.backend for c in found.candidates][-1] == found.backend
    assert decide(request_, sm(capability), POLICY, packages=GONE).backend == "XFORMERS"


@settings(max_examples=100, deadline=None)
@given(REQUESTS, st.sampled_from(vllm_063.NAMES), st.booleans(), st.booleans())
def test_flags_and_platforms_decide_whatever_the_sizes(request_, name, free, sparse):
    from dataclasses import replace

    flagged = replace(request_, is_attention_free=free, is_blocksparse=sparse)
    for platform, only in vllm_063.ONLY_ANSWER.items():
        found = decide(flagged, Device(platform), POLICY, Override(name, "context"))
        assert found.backend == ("BLOCKSPARSE_FLASH_ATTN" if sparse else "NO_ATTENTION" if free else only)


def test_the_retired_variable_counts_here_and_ours_goes_before_it(fresh, monkeypatch):
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHINFER")
    assert ask(sm((9, 0))).backend == "FLASHINFER"
    monkeypatch.setenv("HEEDFUL_ATTENTION_BACKEND", "XFORMERS")
    assert ask(sm((9, 0))).backend == "XFORMERS"
    assert ask(sm((9, 0))).warnings == ()


def test_sizes_that_are_no_numbers_are_one_clear_error():
    for odd in ({"block_size": "16"}, {"head_size": None}, {"block_size": 16.0}):
        with pytest.raises(BadInputError, match="is of type"):
            ask(sm((9, 0)), **odd)


def test_what_the_release_could_not_see_is_said():
    found = ask(sm((9, 0)), alibi=True, logits_soft_cap=30.0, head_size_v=64, attn_type="encoder")
    told = "policy vllm-0.6.3 does not look at alibi, soft_cap, head_size_v, attn_type: FLASH_ATTN may not support it"
    assert found.warnings == (told,)


def test_a_name_is_answered_whether_or_not_it_can_be_built(fresh, monkeypatch):
    monkeypatch.setattr(platforms, "detect", lambda: Device("cuda", capability=(9, 0), simulated=False))
    monkeypatch.setenv("HEEDFUL_POLICY", POLICY)
    found = get_attn_backend(80, None, "bfloat16", "auto", 16, False)
    assert found.name == "XFORMERS"
    if isinstance(registry.package_facts(platforms.detect())["heedful:XFORMERS"], Missing):
        with pytest.raises(BackendUnavailableError, match="XFORMERS cannot be built"):
            found.get_impl_cls()


def test_the_seven_argument_call_warns_of_a_replaced_choice_and_raises_the_recorded_classes(fresh, monkeypatch):
    monkeypatch.setenv("HEEDFUL_POLICY", POLICY)
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TORCH_SDPA")
    seven = (128, None, "bfloat16", "auto", 16, False)
    monkeypatch.setattr(platforms, "detect", lambda: Device("tpu"))
    with pytest.warns(HeedfulWarning, match="replaced by PALLAS"):
        assert get_attn_backend(*seven).name == "PALLAS"
    cuda = sm((9, 0))
    monkeypatch.setattr(platforms, "detect", lambda: cuda)
    with pytest.raises(AssertionError):
        get_attn_backend(*seven)
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "torch_sdpa")
    with pytest.raises(ValueError, match=r"VLLM_ATTENTION_BACKEND='torch_sdpa'.*did you mean 'TORCH_SDPA'"):
        get_attn_backend(*seven)


def test_strict_never_says_flash_attn_on_the_recorded_grid():
    # flash-attn's own pages are multiples of 256, which the grid does not hold
    grid = itertools.product(((8, 0), (8, 9), (9, 0)), (64, 128, 256), ("bfloat16", "float16"), (8, 16, 32, 128))
    for capability, head_size, dtype, block_size in grid:
        request = SelectionRequest(head_size, dtype=dtype, block_size=block_size)
        assert decide(request, sm(capability)).backend != "FLASH_ATTN"
