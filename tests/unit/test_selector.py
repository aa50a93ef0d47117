import itertools
import logging
import random
import sys
import threading
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful import get_attn_backend, platforms, registry, selector
from heedful.errors import BackendUnavailableError, BadInputError, HeedfulWarning, SelectionError
from heedful.libraries import LIBRARIES
from heedful.platforms import SIMULATED
from heedful.selector import PREFERENCE, decide, explain, forced_backend, require
from heedful.types import Device, Missing, Override, ReasonCode, SelectionRequest

CPU = Device("cpu", simulated=False)
SEVEN = (128, None, "bfloat16", "auto", 16, False)
NAMES = ("head_size", "sliding_window", "dtype", "kv_cache_dtype", "block_size", "is_attention_free", "is_blocksparse")


@pytest.fixture
def on(fresh, monkeypatch):
    """Makes this process's device another one."""

    def device(found):
        monkeypatch.setattr(platforms, "detect", lambda: found)

    device(CPU)
    return device


def codes(selection, backend=None):
    return {str(r.code) for c in selection.candidates if backend in (None, c.backend) for r in c.reasons}


# The call form


def test_seven_arguments_positional_and_keyword_are_one_call(on):
    found = get_attn_backend(*SEVEN)
    assert found.name == "TORCH_SDPA"
    assert (
        get_attn_backend(*SEVEN, False) is get_attn_backend(**dict(zip(NAMES, (*SEVEN, False), strict=True))) is found
    )


def test_the_signature_is_the_seven_argument_form_exactly():
    import inspect

    parameters = inspect.signature(get_attn_backend).parameters
    assert tuple(parameters) == NAMES
    assert [p.default for p in parameters.values() if p.default is not p.empty] == [False]


def test_an_unknown_or_missing_argument_is_an_error(on):
    with pytest.raises(TypeError, match="num_heads"):
        get_attn_backend(*SEVEN, num_heads=8)
    with pytest.raises(TypeError, match="block_size"):
        get_attn_backend(128, None, "bfloat16", "auto", is_attention_free=False)
    with pytest.raises(TypeError, match="head_dim"):
        SelectionRequest(64, head_dim=64)


def test_a_torch_dtype_and_its_name_get_the_same_answer(on):
    import torch

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        assert get_attn_backend(64, None, dtype, "auto", 16, False) is get_attn_backend(
            64, None, name, "auto", 16, False
        )


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, 128.0, "head_size 128.0 is of type float"),
        (0, True, "head_size True is of type bool"),
        (4, 16.0, "block_size 16.0 is of type float"),
        (1, 0, "sliding_window 0 shows no key"),
        (2, "bf16", "unknown dtype 'bf16'"),
        (3, [], "kv_cache_dtype \\[\\] is of type list"),
        (3, "fp9", "unknown kv_cache_dtype 'fp9'.*did you mean 'fp8'"),
        (5, 0, "is_attention_free 0 is of type int"),
        (5, "no", "is_attention_free 'no' is of type str"),
    ],
)
def test_a_wrong_argument_is_told_even_where_an_equal_legal_one_is_kept(on, position, value, message):
    get_attn_backend(*SEVEN)
    wrong = [*SEVEN]
    wrong[position] = value
    for _ in range(2):
        with pytest.raises(BadInputError, match=message):
            get_attn_backend(*wrong)


def test_a_torch_dtype_as_cache_dtype_is_an_error(on):
    import torch

    with pytest.raises(BadInputError, match=r"kv_cache_dtype torch.bfloat16 is of type dtype"):
        get_attn_backend(64, None, torch.bfloat16, torch.bfloat16, 16, False)


def test_no_cache_dtype_is_the_models_own(on):
    assert get_attn_backend(64, None, "float32", None, 16, False) is get_attn_backend(
        64, None, "float32", "auto", 16, False
    )


# First choices


PINNED = {
    # (generation, block size) -> (backend, variant) for head 128, bfloat16
    ("cuda", "7.5", 16): ("TRITON_ATTN", "triton"),
    ("cuda", "8.0", 16): ("FLASHINFER", "jit"),
    ("cuda", "8.6", 16): ("FLASHINFER", "jit"),
    ("cuda", "8.7", 16): ("FLASHINFER", "jit"),
    ("cuda", "8.9", 16): ("FLASHINFER", "jit"),
    ("cuda", "9.0", 16): ("FLASHINFER", "jit"),
    ("cuda", "10.0", 16): ("FLASHINFER", "jit"),
    ("cuda", "10.3", 16): ("FLASHINFER", "jit"),
    ("cuda", "12.0", 16): ("FLASHINFER", "jit"),
    ("cuda", "12.1", 16): ("FLASHINFER", "jit"),
    ("cuda", "7.5", 64): ("TRITON_ATTN", "triton"),
    ("cuda", "8.0", 64): ("XFORMERS", "split-k"),
    ("cuda", "8.7", 64): ("XFORMERS", "split-k"),
    ("cuda", "9.0", 64): ("XFORMERS", "split-k"),
    ("cuda", "10.0", 64): ("XFORMERS", "split-k"),
    ("cuda", "10.3", 64): ("FLASHINFER", "jit"),
    ("cuda", "12.1", 64): ("FLASHINFER", "jit"),
    ("cuda", "7.5", 256): ("TRITON_ATTN", "triton"),
    ("cuda", "8.0", 256): ("FLASH_ATTN", "fa2"),
    ("cuda", "8.6", 256): ("FLASH_ATTN", "fa2"),
    ("cuda", "8.9", 256): ("FLASH_ATTN", "fa2"),
    ("cuda", "9.0", 256): ("FLASH_ATTN", "fa2"),
    ("cuda", "10.3", 256): ("FLASH_ATTN", "fa2"),
    ("cuda", "12.0", 256): ("FLASH_ATTN", "fa2"),
    ("cuda", "12.1", 256): ("FLASH_ATTN", "fa2"),
    ("rocm", "gfx90a", 16): ("ROCM_FLASH", "triton"),
    ("rocm", "gfx942", 16): ("ROCM_FLASH", "aiter"),
    ("rocm", "gfx950", 16): ("ROCM_FLASH", "aiter"),
    ("rocm", "gfx1100", 16): ("ROCM_FLASH", "aiter"),
    ("rocm", "gfx1151", 16): ("ROCM_FLASH", "triton"),
    ("rocm", "gfx90a", 128): ("ROCM_FLASH", "fa2-ck"),
    ("xpu", None, 16): ("IPEX", "ipex"),
    ("tpu", "v4", 16): ("PALLAS", "ragged"),
    ("tpu", "v5e", 16): ("PALLAS", "ragged"),
    ("tpu", "v6e", 16): ("PALLAS", "ragged"),
    ("tpu", "7x", 16): ("PALLAS", "ragged"),
    ("openvino", None, 16): ("OPENVINO", "sdpa"),
    ("openvino", None, 32): ("OPENVINO", "paged"),
}


def device_of(platform, generation):
    if platform == "cuda" and generation:
        return Device("cuda", capability=tuple(map(int, generation.split("."))))
    return Device(platform, arch=generation)


@pytest.mark.parametrize(("platform", "generation", "block_size"), PINNED)
def test_the_first_choice_of_each_generation_is_pinned(fresh, platform, generation, block_size):
    selection = explain(SelectionRequest(128, block_size=block_size), device_of(platform, generation))
    assert (selection.backend, selection.chosen.variant) == PINNED[platform, generation, block_size]
    assert selection.chosen_by == "preference"


def test_cpu_is_served_by_torch(fresh):
    assert explain(SelectionRequest(128), CPU).backend == "TORCH_SDPA"


@pytest.mark.parametrize("generation", ["13.0", "7.0", "11.0", "9.1"])
@pytest.mark.parametrize("block_size", [16, 64, 128, 256])
def test_an_unknown_generation_never_gets_a_kernel_made_for_others(fresh, generation, block_size):
    selection = explain(SelectionRequest(128, block_size=block_size), device_of("cuda", generation))
    assert selection.backend is None
    for candidate in selection.candidates:
        assert "CAPABILITY" in codes(selection, candidate.backend)


def test_a_gpu_of_unknown_capability_gets_no_kernel(fresh):
    assert explain(SelectionRequest(128), Device("cuda")).backend is None


def test_preference_lists_hold_registered_names_once_and_every_platform():
    assert set(PREFERENCE) == set(SIMULATED)
    for names in PREFERENCE.values():
        assert len(names) == len(set(names))
        assert set(names) <= set(registry.BUILT_IN)


def test_every_backend_in_a_preference_list_claims_that_platform():
    for platform, names in PREFERENCE.items():
        for name in names:
            assert platform in {row.platform for row in registry.load(name).CAPABILITIES}


# The record


def test_the_record_holds_every_candidate_in_order_with_all_its_reasons(fresh):
    request = SelectionRequest(120, kv_cache_dtype="fp8", block_size=24, sinks=True, alibi=True)
    selection = explain(request, Device("cuda", capability=(8, 0)))
    assert selection.backend is None
    assert [c.backend for c in selection.candidates] == list(PREFERENCE["cuda"])
    assert codes(selection, "XFORMERS") == {"HEAD_SIZE", "BLOCK_SIZE", "KV_CACHE_DTYPE", "SINKS", "ALIBI"}
    xformers = selection.candidates[1].reasons
    assert {(r.asked, r.accepted) for r in xformers if r.code == "HEAD_SIZE"} == {("120", "16, 32, 64, 128, 256")}


def test_later_candidates_say_who_stands_before_them(fresh):
    selection = explain(SelectionRequest(128), SIMULATED["cuda"])
    assert selection.backend == "FLASHINFER"
    assert "POLICY: FLASHINFER stands before it and serves the request" in map(str, selection.candidates[-1].reasons)


def test_what_is_assumed_of_a_simulated_device_is_marked_and_what_is_told_is_not(fresh):
    told = explain(SelectionRequest(128), SIMULATED["cuda"], packages={"flashinfer": "0.9"}).chosen.facts
    assert told == "torch 2.13.0 (assumed), flashinfer 0.9"


def test_a_missing_library_leads_to_the_next_candidate(fresh):
    missing = Missing(ReasonCode.IMPORT_FAILED, "ImportError: undefined symbol: _ZN3c10")
    selection = explain(SelectionRequest(128), SIMULATED["cuda"], packages={"flashinfer": missing})
    assert selection.backend == "TRITON_ATTN"
    reason = selection.candidates[2].reasons[0]
    assert str(reason) == (
        "IMPORT_FAILED: jit needs flashinfer: ImportError: undefined symbol: _ZN3c10 (pip install flashinfer-python)"
    )


def test_the_record_names_the_variant_whose_library_is_there(fresh):
    request = SelectionRequest(128, block_size=256)
    assert explain(request, SIMULATED["cuda"], packages={"flash_attn_interface": "3.0"}).chosen.variant == "fa3"
    assert explain(request, SIMULATED["cuda"], packages={"flash_attn.cute": "4.0"}).chosen.variant == "fa2"
    both = {"flash_attn.cute": "4.0", "flash_attn": Missing(ReasonCode.NOT_INSTALLED, "clash")}
    request = SelectionRequest(128, block_size=16)
    assert explain(request, SIMULATED["cuda"], packages=both).chosen.variant == "fa4"
    assert explain(request, Device("cuda", capability=(12, 0)), packages=both).backend == "FLASHINFER"


def test_a_kernel_that_is_not_built_is_its_backends_reason_on_a_real_device(fresh):
    real = Device("cuda", capability=(9, 0), simulated=False)
    packages = dict.fromkeys(LIBRARIES, "1")
    selection = explain(SelectionRequest(128), real, packages=packages)
    for candidate in selection.candidates:
        unbuilt = isinstance(registry.package_facts(real)[f"heedful:{candidate.backend}"], Missing)
        assert unbuilt == ("NOT_BUILT" in codes(selection, candidate.backend))


def test_libraries_are_imported_last_and_only_for_a_candidate_without_another_reason(fresh, monkeypatch):
    asked = []

    def installed(name):
        asked.append(name)
        return "1" if name in ("torch", "flashinfer") else Missing(ReasonCode.NOT_INSTALLED, "gone")

    monkeypatch.setattr("heedful.libraries.installed", installed)
    real = Device("cuda", capability=(9, 0), simulated=False)
    built = dict.fromkeys((f"heedful:{name}" for name in registry.BUILT_IN), "built")
    assert explain(SelectionRequest(128), real, packages=built).backend == "FLASHINFER"
    # fa2 and XFORMERS are out by block size, TRITON_ATTN stands behind the winner: their libraries stay unasked
    assert list(dict.fromkeys(asked)) == ["torch", "flash_attn_interface", "flash_attn.cute", "flashinfer"]
    asked.clear()
    explain(
        SelectionRequest(128), real, packages=built | {"heedful:FLASH_ATTN": Missing(ReasonCode.NOT_BUILT, "later")}
    )
    assert "flash_attn.cute" not in asked


# Explicit choices


def test_nothing_set_is_automatic_and_a_name_is_that_backend(on, monkeypatch):
    assert get_attn_backend(*SEVEN).name == "TORCH_SDPA"
    monkeypatch.setenv("HEEDFUL_ATTENTION_BACKEND", "TORCH_SDPA")
    assert get_attn_backend(*SEVEN).name == "TORCH_SDPA"
    assert explain(SelectionRequest(128)).chosen_by == "environment"


@pytest.mark.parametrize(
    ("text", "near"),
    [("TORCH_SPDA", "TORCH_SDPA"), ("flash-attn", "FLASH_ATTN"), ("FLASH_ATTN ", "FLASH_ATTN"), ("", "")],
)
def test_a_wrong_override_is_told_with_the_text_all_names_and_the_near_miss(on, monkeypatch, text, near):
    monkeypatch.setenv("HEEDFUL_ATTENTION_BACKEND", text)
    with pytest.raises(BadInputError) as caught:
        get_attn_backend(*SEVEN)
    hint = f"; did you mean '{near}'?" if near else ""
    names = ", ".join(registry.BUILT_IN)
    told = f"names no attention backend; the names are {names}{hint}"
    assert str(caught.value) == f"HEEDFUL_ATTENTION_BACKEND={text!r} {told}"
    for ask in (lambda: explain(SelectionRequest(64), override=text), lambda: forced_backend(text).__enter__()):
        with pytest.raises(BadInputError) as caught:
            ask()
        assert str(caught.value) == f"backend {text!r} {told}"


@pytest.mark.parametrize(
    ("text", "near"),
    [("", ""), ("Strict", "strict"), ("vllm-0.6.4", "vllm-0.6.3"), ("vllm", ""), (" strict", "strict")],
)
def test_a_wrong_policy_is_told_with_both_policies(on, monkeypatch, text, near):
    monkeypatch.setenv("HEEDFUL_POLICY", text)
    hint = f"; did you mean '{near}'?" if near else ""
    told = f"{text!r} is no policy; the policies are strict, vllm-0.6.3{hint}"
    with pytest.raises(BadInputError) as caught:
        get_attn_backend(*SEVEN)
    assert str(caught.value) == f"HEEDFUL_POLICY={told}"
    with pytest.raises(BadInputError) as caught:
        explain(SelectionRequest(64), policy=text)
    assert str(caught.value) == f"policy {told}"


def test_argument_goes_before_context_and_context_before_environment(on, monkeypatch):
    monkeypatch.setenv("HEEDFUL_ATTENTION_BACKEND", "TORCH_SDPA")
    request, device = SelectionRequest(128, block_size=64), SIMULATED["cuda"]
    with forced_backend("FLASHINFER"):
        assert explain(request, device).chosen_by == "context"
        assert explain(request, device).backend == "FLASHINFER"
        assert explain(request, device, override="TRITON_ATTN").backend == "TRITON_ATTN"
        assert explain(request, device, override="TRITON_ATTN").chosen_by == "argument"
    assert explain(request, device).chosen_by == "environment"


def test_an_unusable_explicit_choice_is_an_error_with_all_reasons_and_never_replaced(on, monkeypatch):
    on(SIMULATED["cuda"])
    monkeypatch.setenv("HEEDFUL_ATTENTION_BACKEND", "XFORMERS")
    with pytest.raises(SelectionError) as caught:
        get_attn_backend(120, 64, "float32", "fp8", 16, False)
    assert caught.value.selection.backend is None
    assert [c.backend for c in caught.value.selection.candidates] == ["XFORMERS"]
    assert codes(caught.value.selection) == {"DTYPE", "KV_CACHE_DTYPE", "HEAD_SIZE", "BLOCK_SIZE", "WINDOW"}
    for word in (
        "XFORMERS, chosen by environment",
        "never replaced",
        "DTYPE",
        "WINDOW",
        "change the engine's block size",
    ):
        assert word in str(caught.value)


def test_without_any_usable_candidate_the_error_lists_them_all(on):
    on(Device("cuda", capability=(13, 0)))
    with pytest.raises(SelectionError, match=r"no backend can serve the request on cuda 13.0") as caught:
        get_attn_backend(*SEVEN)
    assert all(name in str(caught.value) for name in PREFERENCE["cuda"])


def test_a_backend_of_another_platform_says_so(fresh):
    selection = explain(SelectionRequest(128), SIMULATED["cuda"], override="TORCH_SDPA")
    assert selection.backend is None
    assert codes(selection) == {"PLATFORM"}


def test_the_context_ends_and_nests_and_is_blind_to_errors_inside(on):
    request, device = SelectionRequest(128, block_size=256), SIMULATED["cuda"]
    with forced_backend("TRITON_ATTN"):
        with forced_backend("FLASHINFER"):
            assert explain(request, device).backend == "FLASHINFER"
        assert explain(request, device).backend == "TRITON_ATTN"
        with pytest.raises(RuntimeError, match="inside"), forced_backend("XFORMERS"):
            raise RuntimeError("inside")
        assert explain(request, device).backend == "TRITON_ATTN"
    assert explain(request, device).backend == "FLASH_ATTN"


def test_the_context_is_of_its_own_thread(on):
    request, device, seen = SelectionRequest(128), SIMULATED["cuda"], []
    with forced_backend("TRITON_ATTN"):
        thread = threading.Thread(target=lambda: seen.append(explain(request, device).backend))
        thread.start()
        thread.join()
        assert explain(request, device).backend == "TRITON_ATTN"
    assert seen == ["FLASHINFER"]


def test_the_retired_variable_has_no_effect_and_is_warned_of(on, monkeypatch):
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "XFORMERS")
    for _ in range(2):
        with pytest.warns(
            HeedfulWarning, match=r"VLLM_ATTENTION_BACKEND is set.*set HEEDFUL_ATTENTION_BACKEND instead"
        ):
            assert get_attn_backend(*SEVEN).name == "TORCH_SDPA"
    assert "VLLM_ATTENTION_BACKEND" in explain(SelectionRequest(64)).warnings[0]
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_attn_backend(*SEVEN)


def test_a_named_platform_that_is_not_here_is_simulated_with_a_warning(fresh, monkeypatch):
    monkeypatch.setenv("HEEDFUL_PLATFORM", "tpu")
    if not platforms.detect().simulated:
        pytest.skip("this machine has a TPU")
    with pytest.warns(HeedfulWarning, match="HEEDFUL_PLATFORM=tpu: no such device answers on this machine"):
        assert get_attn_backend(*SEVEN).name == "PALLAS"


# Flags


def test_attention_free_needs_no_heads_and_imports_no_kernel(on):
    before = set(sys.modules)
    assert get_attn_backend(0, None, "bfloat16", "auto", 16, True).name == "NO_ATTENTION"
    assert not {name for name in set(sys.modules) - before if name.startswith(("heedful.kernels", "triton"))}
    request = SelectionRequest(0, is_attention_free=True, num_heads=0, num_kv_heads=0)
    for device in SIMULATED.values():
        selection = explain(request, device)
        assert (selection.backend, selection.chosen_by) == ("NO_ATTENTION", "argument")


def test_an_attention_free_layer_has_nothing_that_a_feature_could_be_missing_from(on):
    request = SelectionRequest(0, sliding_window=64, kv_cache_dtype="fp8", is_attention_free=True)
    assert explain(request, SIMULATED["cuda"]).backend == "NO_ATTENTION"


def test_blocksparse_is_served_by_its_own_backend_where_there_is_one(fresh):
    request = SelectionRequest(128, is_blocksparse=True)
    assert explain(request, SIMULATED["cuda"]).backend == "BLOCKSPARSE_FLASH_ATTN"
    refused = explain(request, SIMULATED["tpu"])
    assert (refused.backend, codes(refused)) == (None, {"PLATFORM"})


def test_both_flags_together_are_an_error(on):
    with pytest.raises(BadInputError, match="is_attention_free and is_blocksparse exclude each other"):
        get_attn_backend(128, None, "bfloat16", "auto", 16, True, True)


@pytest.mark.parametrize("flag", ["is_attention_free", "is_blocksparse"])
@pytest.mark.parametrize("name", list(registry.BUILT_IN))
def test_an_override_other_than_the_flags_backend_is_refused(fresh, flag, name):
    wanted = {"is_attention_free": "NO_ATTENTION", "is_blocksparse": "BLOCKSPARSE_FLASH_ATTN"}[flag]
    selection = explain(SelectionRequest(128, **{flag: True}), SIMULATED["cuda"], override=name)
    if name == wanted:
        assert (selection.backend, selection.chosen_by) == (name, "argument")
    else:
        assert selection.backend is None
        told = f"{flag} asks for {wanted} and for no other backend"
        assert told in [r.text for r in selection.candidates[0].reasons if r.code == "POLICY"]


def test_special_backends_refuse_ordinary_requests(fresh):
    for name, code in (("NO_ATTENTION", "ATTENTION_FREE"), ("BLOCKSPARSE_FLASH_ATTN", "BLOCKSPARSE")):
        assert code in codes(explain(SelectionRequest(128), SIMULATED["cuda"], override=name))


# Nothing stale, nothing impure


def test_an_override_that_comes_and_goes_is_seen_at_once(on, monkeypatch):
    on(SIMULATED["cuda"])
    for _ in range(3):
        assert get_attn_backend(*SEVEN).name == "FLASHINFER"
        assert get_attn_backend(*SEVEN, False).name == "FLASHINFER"
        monkeypatch.setenv("HEEDFUL_ATTENTION_BACKEND", "TRITON_ATTN")
        assert get_attn_backend(*SEVEN).name == "TRITON_ATTN"
        assert get_attn_backend(*SEVEN, is_blocksparse=False).name == "TRITON_ATTN"
        with forced_backend("FLASHINFER"):
            assert get_attn_backend(*SEVEN).name == "FLASHINFER"
        monkeypatch.delenv("HEEDFUL_ATTENTION_BACKEND")


def test_every_steering_variable_is_seen_at_once(on, monkeypatch):
    on(SIMULATED["cuda"])
    monkeypatch.setenv("HEEDFUL_POLICY", "vllm-0.6.3")
    assert get_attn_backend(*SEVEN).name == "FLASH_ATTN"
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "XFORMERS")
    assert get_attn_backend(*SEVEN).name == "XFORMERS"
    monkeypatch.delenv("HEEDFUL_POLICY")
    with pytest.warns(HeedfulWarning):
        assert get_attn_backend(*SEVEN).name == "FLASHINFER"


def test_the_same_arguments_on_another_device_get_that_devices_answer(on):
    answers = {"cuda": "FLASHINFER", "rocm": "ROCM_FLASH", "tpu": "PALLAS", "xpu": "IPEX", "openvino": "OPENVINO"}
    for platform in (*answers, *reversed(answers)):
        on(SIMULATED[platform])
        assert get_attn_backend(*SEVEN).name == answers[platform]
    on(Device("cuda", capability=(7, 5)))
    assert get_attn_backend(*SEVEN).name == "TRITON_ATTN"


def test_many_devices_made_one_after_another_never_get_each_others_answers(on):
    for _ in range(200):
        on(Device("cuda", capability=(9, 0)))
        assert get_attn_backend(*SEVEN).name == "FLASHINFER"
        on(Device("rocm", arch="gfx942"))
        assert get_attn_backend(*SEVEN).name == "ROCM_FLASH"


def test_the_kept_decisions_are_bounded(on, monkeypatch):
    monkeypatch.setattr(selector, "_MOST_DECIDED", 8)
    for head_size in range(8, 400, 8):
        get_attn_backend(head_size, None, "bfloat16", "auto", 16, False)
    assert len(selector._DECIDED) <= 8


def test_the_whole_decision_table_is_the_same_forward_reversed_and_shuffled(fresh):
    grid = itertools.product(
        [device_of(platform, generation) for platform, generation, _ in PINNED],
        [64, 80, 128],
        ["bfloat16", "float32"],
        [16, 64, 256],
        [None, "TRITON_ATTN"],
    )
    table = list(grid)

    def answers(order):
        found = {}
        for index in order:
            device, head_size, dtype, block_size, override = table[index]
            request = SelectionRequest(head_size, dtype=dtype, block_size=block_size)
            found[index] = str(explain(request, device, override=override))
        return found

    forward = list(range(len(table)))
    shuffled = random.Random(1).sample(forward, len(forward))
    assert answers(forward) == answers(forward[::-1]) == answers(shuffled)


def test_the_pure_decision_is_blind_to_the_environment_and_the_context(fresh, monkeypatch):
    monkeypatch.setenv("HEEDFUL_ATTENTION_BACKEND", "XFORMERS")
    monkeypatch.setenv("HEEDFUL_POLICY", "vllm-0.6.3")
    with forced_backend("TRITON_ATTN"):
        found = decide(SelectionRequest(128), SIMULATED["cuda"])
    assert (found.backend, found.policy, found.chosen_by, found.warnings) == ("FLASHINFER", "strict", "preference", ())
    override = Override("TRITON_ATTN", "environment", "HEEDFUL_ATTENTION_BACKEND")
    assert decide(SelectionRequest(128), SIMULATED["cuda"], override=override).chosen_by == "environment"


def test_the_logged_name_is_the_returned_class(on, caplog):
    with caplog.at_level(logging.INFO, logger="heedful"):
        found = get_attn_backend(96, None, "float32", "auto", 16, False)
        get_attn_backend(96, None, "float32", "auto", 16, False)
    assert caplog.messages == [f"{found.name} on cpu, chosen by preference (policy strict)"]


# Decision, object and behaviour agree


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e5m2"])
def test_the_decision_is_the_class_that_is_returned_and_takes_the_request(on, dtype, kv_cache_dtype):
    selection = explain(SelectionRequest(64, dtype=dtype, kv_cache_dtype=kv_cache_dtype))
    found = get_attn_backend(64, None, dtype, kv_cache_dtype, 16, False)
    assert found is registry.load(selection.backend)
    assert found.name == selection.backend
    assert found.unsupported_reasons(selection.request, CPU) == []
    assert found.get_impl_cls().__module__.startswith("heedful.backends.torch_sdpa")


def test_fp32_is_never_flash_attention_whatever_is_preferred(fresh):
    for generation in ("8.0", "9.0", "10.0"):
        for block_size in (16, 64, 256):
            request = SelectionRequest(128, dtype="float32", block_size=block_size)
            assert explain(request, device_of("cuda", generation)).backend == "TRITON_ATTN"
            assert explain(request, device_of("cuda", generation), override="FLASH_ATTN").backend is None


def test_an_fp8_cache_goes_only_where_it_is_claimed(fresh):
    request = SelectionRequest(128, kv_cache_dtype="fp8", block_size=256)
    assert explain(request, SIMULATED["cuda"]).backend == "FLASHINFER"
    refused = explain(request, SIMULATED["cuda"], override="FLASH_ATTN")
    assert "KV_CACHE_DTYPE" in codes(refused)
    with pytest.raises(SelectionError):
        require(refused)


def test_a_census_of_requests_gets_what_it_asked_layer_by_layer(on):
    asked = [(64, None, "bfloat16"), (128, 4096, "float32"), (80, 8, "float16"), (0, None, "bfloat16")] * 3
    layers = [get_attn_backend(h, w, d, "auto", 16, h == 0) for h, w, d in asked]
    explained = [explain(SelectionRequest(h, w, d, is_attention_free=h == 0)).backend for h, w, d in asked]
    assert [layer.name for layer in layers] == explained


# Properties

REQUESTS = st.builds(
    SelectionRequest,
    head_size=st.sampled_from([16, 40, 44, 64, 80, 96, 120, 128, 192, 256, 512]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    block_size=st.sampled_from([8, 16, 24, 32, 64, 128, 256]),
    attn_type=st.sampled_from(["decoder", "encoder", "encoder_only", "encoder_decoder"]),
)
CONSTRAINTS = {
    "sliding_window": 128,
    "alibi": True,
    "logits_soft_cap": 30.0,
    "sinks": True,
    "kv_cache_dtype": "fp8",
    "head_size_v": 48,
    "is_blocksparse": True,
}
DEVICES = st.sampled_from([device_of(platform, generation) for platform, generation, _ in PINNED] + [Device("cpu")])


@settings(max_examples=150, deadline=None)
@given(REQUESTS, DEVICES, st.lists(st.sampled_from(sorted(CONSTRAINTS)), min_size=1, max_size=3, unique=True))
def test_adding_a_constraint_never_makes_a_backend_valid(request_, device, names):
    from dataclasses import replace

    tighter = replace(request_, **{name: CONSTRAINTS[name] for name in names})
    for name in registry.BUILT_IN:
        if name == "BLOCKSPARSE_FLASH_ATTN" and "is_blocksparse" in names:
            continue  # its own flag is what it serves
        backend = registry.load(name)
        if backend.unsupported_reasons(request_, device):
            assert backend.unsupported_reasons(tighter, device), name


@settings(max_examples=100, deadline=None)
@given(REQUESTS, DEVICES)
def test_who_is_chosen_has_no_reason_and_who_stood_before_has_one(request_, device):
    selection = decide(request_, device)
    standing = [c.backend for c in selection.candidates if not c.reasons]
    assert standing == ([selection.backend] if selection.backend else [])
    assert decide(request_, device) == selection


@settings(max_examples=100, deadline=None)
@given(REQUESTS, DEVICES, st.sampled_from(sorted(LIBRARIES)))
def test_losing_a_library_never_helps_and_never_hurts_those_who_need_it_not(request_, device, library):
    whole = decide(request_, device)
    lost = decide(request_, device, packages={library: Missing(ReasonCode.NOT_INSTALLED, "gone")})
    if whole.backend is None:
        assert lost.backend is None
    elif library not in (whole.chosen.facts or ""):
        assert lost.backend == whole.backend


def test_a_backend_whose_code_is_not_here_says_so_when_built(fresh):
    found = registry.load(require(explain(SelectionRequest(128), SIMULATED["tpu"])).backend)
    if isinstance(registry.package_facts(Device("tpu", arch="v5e", simulated=False))["heedful:PALLAS"], Missing):
        with pytest.raises(BackendUnavailableError, match="PALLAS cannot be built"):
            found.get_impl_cls()
