"""IPEX computes the contract on each of its libraries, against the float64 reference.

The CPU build of intel-extension-for-pytorch is the real one where it can be imported (tox -e xpu), else a stand-in.
Its XPU build and vllm-xpu-kernels are always stand-ins: nothing here can load them.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import ipex_fakes
import pytest
import torch

from heedful import libraries
from heedful.backends import ipex_impl, ipex_libraries
from heedful.backends.capabilities import HALF_AND_SINGLE
from heedful.backends.ipex import IPEX, XPU_KERNELS, IpexBackend
from heedful.backends.torch_sdpa import TorchSdpaBackend
from heedful.errors import BackendUnavailableError, BadInputError, MetadataError, UnsupportedError
from heedful.types import Missing, ReasonCode

REAL = libraries.import_once("intel_extension_for_pytorch")
HERE = ipex_fakes.IPEX_ON_CPU if isinstance(REAL, Missing) else REAL
MADE = {
    "cpu": lambda: ipex_libraries.IpexOnCpu(HERE),
    "xpu": lambda: ipex_libraries.IpexOnXpu(ipex_fakes.IPEX_ON_XPU),
    "kernels": lambda: ipex_libraries.XpuKernels(ipex_fakes.XPU_KERNELS),
}
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
HALVES = (torch.bfloat16, torch.float16)
MIXED = [(6, 0, False), (20, 0, False), (40, 6, False), (21, 90, False), (1, 120, True), (1, 2, True), (3, 35, True)]
RULES = {
    "plain": {},
    "window": {"sliding_window": 5},
    "window_of_two": {"sliding_window": 2},
    "window_of_one": {"sliding_window": 1},
    "wide_window": {"sliding_window": 2**40},
    "soft_cap": {"logits_soft_cap": 3.0},
    "window_soft_cap": {"sliding_window": 33, "logits_soft_cap": 3.0},
    "window_of_one_soft_cap": {"sliding_window": 1, "logits_soft_cap": 3.0},
}


@pytest.fixture(params=MADE)
def library(request, monkeypatch):
    """Each library in turn, for tensors on the CPU."""
    made = MADE[request.param]()
    monkeypatch.setattr(ipex_impl, "library_for", lambda device: made)
    return made


@pytest.fixture
def on_cpu(monkeypatch):
    made = MADE["cpu"]()
    monkeypatch.setattr(ipex_impl, "library_for", lambda device: made)
    return made


@pytest.fixture
def here(bare_scene):
    """A scene on IPEX, in pages of 16 and heads of 64 unless the test says otherwise."""

    class Here(bare_scene):
        def __init__(self, seqs, dtype=torch.bfloat16, **facts):
            super().__init__(seqs, dtype=dtype, **{"size": 64, "block_size": 16} | facts)

        def impl(self, layer=ipex_impl.IpexImpl, **rules):
            return layer(self.num_heads, self.size, self.size**-0.5, self.num_kv_heads, **rules)

    return Here


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_a_mixed_batch_agrees_with_the_reference(here, library, dtype, rules):
    one = here(MIXED, dtype=dtype, pad_rows=2)
    if "logits_soft_cap" in rules and library.row is XPU_KERNELS:
        with pytest.raises(UnsupportedError, match=r"vllm_xpu_kernels is what IPEX has on this machine.*SOFT_CAP"):
            one.run(**rules)
    else:
        one.check(**rules)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("size", [16, 24, 80, 96, 120, 192, 256])
def test_pages_and_heads_of_any_claimed_size_are_right(here, on_cpu, block_size, size):
    here(MIXED, block_size=block_size, size=size).check()


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1), (33, 1), (5, 5)])
def test_each_query_head_reads_its_own_kv_head(here, library, heads):
    here(MIXED, num_heads=heads[0], num_kv_heads=heads[1]).check()


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("block_size", [8, 128])
def test_the_cpu_build_is_right_to_the_last_bits_of_fp32(here, on_cpu, monkeypatch, rules, block_size):
    """No GPU of Intel's takes fp32 here, so that it is not claimed; on the CPU it is the sharpest check there is."""

    class WithSingle(IpexBackend):
        CAPABILITIES = (replace(IPEX, dtypes=HALF_AND_SINGLE),)

    class Layer(ipex_impl.IpexImpl):
        backend = WithSingle

    monkeypatch.setattr(ipex_libraries.IpexOnCpu, "row", WithSingle.CAPABILITIES[0])
    one = here([(300, 700, False), *MIXED], dtype=torch.float32, block_size=block_size)
    right, _ = one.expected(**rules)
    assert (one.run(one.impl(Layer, **rules)).double() - right).abs().max() < TOLERANCE[torch.float32]


def test_single_queries_go_by_their_own_operator_where_that_is_right(here, on_cpu, monkeypatch):
    asked, single = [], on_cpu.single
    monkeypatch.setattr(on_cpu, "single", lambda *given: asked.append(given[2].key_lens.tolist()) or single(*given))
    here(MIXED).check()
    here([(1, 0, False), (2, 5, True), (1, 9, True)]).check()
    here(MIXED).check(sliding_window=33, logits_soft_cap=3.0)
    assert asked == [[121, 3], [1, 10]]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_pages_are_written_in_place_and_nothing_else_is(here, library, dtype):
    one, two = here(MIXED, dtype=dtype, pad_rows=2), here(MIXED, dtype=dtype, pad_rows=2)
    for each in (one, two):
        each.cache[each.cache.isnan()] = 777
    one.run()
    two.run(TorchSdpaBackend.get_impl_cls()(4, 64, 0.125, 2))
    assert torch.equal(one.cache, two.cache)


def test_a_token_that_is_not_written_is_read_from_the_cache(here, library):
    one = here([(20, 0, False), (1, 40, True)])
    right = one.run()
    one.metadata.slot_mapping[:8] = -1  # tokens 0-7 are there already
    one.key[:8] = 99
    assert torch.equal(one.run(), right)
    assert not (one.cache[0] == 99).any()


@pytest.mark.parametrize("damage", ["slot", "block", "negative block", "twice"])
def test_a_table_or_slot_that_would_end_the_process_is_an_error(here, library, damage):
    one = here(MIXED)
    tables = one.metadata.block_tables
    if damage == "slot":
        one.metadata.slot_mapping[0] += 1
    elif damage == "twice":
        tables[3, 1] = tables[3, 0]
    else:
        tables[3, 0] = -1 if damage == "negative block" else len(one.cache[0])
    with pytest.raises(MetadataError):
        one.run()


def test_pages_in_the_other_layout_are_refused_by_their_shape(here, library):
    one = here(MIXED)
    one.cache = one.cache.transpose(2, 3).contiguous()  # [2, num_blocks, block_size, num_kv_heads, size]
    with pytest.raises(BadInputError, match="the K cache has 16 heads of size 64, but the layer has 2 of size 64"):
        one.run()


@pytest.mark.parametrize("layout", ["wide", "heads last", "uneven"])
def test_pages_of_any_strides_are_right(here, library, layout):
    one = here(MIXED)
    right = one.run()
    if layout == "wide":
        wide = torch.zeros(*one.cache.shape[:-1], 72, dtype=one.dtype)
        wide[..., :64] = one.cache
        one.cache = wide[..., :64]
    elif layout == "heads last":
        one.cache = one.cache.transpose(2, 3).contiguous().transpose(2, 3)
    else:
        one.cache = (one.cache[0], torch.stack([one.cache[1], one.cache[1]], 1)[:, 1])
    assert torch.allclose(one.run().float(), right.float(), atol=1e-2)


def test_output_does_not_depend_on_strides(here, library):
    one = here(MIXED)
    right = one.run()
    one.query = one.query.transpose(0, 1).contiguous().transpose(0, 1)
    one.key = torch.stack([one.key, one.key], -1)[..., 0]
    one.value = one.value.transpose(1, 2).contiguous().transpose(1, 2)
    output = torch.empty(len(one.query), 4, 128, dtype=one.dtype)[..., ::2]
    one.impl().forward(one.query, one.key, one.value, one.cache, one.metadata, output=output)
    assert torch.equal(output, right)


@pytest.mark.parametrize("tail", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("rules", [{}, {"sliding_window": 5}])
def test_what_lies_past_the_last_key_never_reaches_the_output(here, library, tail, rules):
    clean, dirty = here(MIXED), here(MIXED)
    for one, fill in ((clean, 0.0), (dirty, tail)):
        one.cache[one.cache.isnan()] = fill
    assert torch.equal(clean.run(**rules), dirty.run(**rules))


def test_nothing_is_a_batch_too(here, library):
    assert here([]).run().shape == (0, 4, 64)
    here([(0, 0, False), (4, 0, False), (0, 5, True), (1, 3, True)], pad_rows=3).check()


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_the_profiling_run_attends_without_a_cache(here, on_cpu, rules):
    one = here([(140, 0, False), (7, 0, False), (1, 0, False)])
    right, _ = one.expected(**rules)
    found = one.impl(**rules).forward(one.query, one.key, one.value, torch.empty(0), one.metadata)
    assert (found.double() - right).abs().max() < TOLERANCE[one.dtype]


@pytest.mark.parametrize("kind", ["encoder", "encoder_only"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_an_encoder_sees_both_sides(here, on_cpu, kind, rules):
    one = here([(40, 0, False), (300, 0, False), (1, 0, False)])
    assert one.encoder_error(kind, **rules) < TOLERANCE[one.dtype]


def test_threads_share_a_layer(here, share_a_layer, on_cpu):
    share_a_layer([here(MIXED, seed=seed) for seed in range(4)], times=10)


@pytest.mark.parametrize(
    ("rules", "told"),
    [({"alibi_slopes": [0.5] * 4}, "ALIBI"), ({"sinks": torch.zeros(4)}, "SINKS"), ({"kv_cache_dtype": "fp8"}, "KV_")],
)
def test_what_no_library_has_is_refused(here, rules, told):
    with pytest.raises(UnsupportedError, match=told):
        here(MIXED).impl(**rules)


def test_a_log_sum_exp_is_refused(here, on_cpu):
    one = here(MIXED)
    given, lse = (one.query, one.key, one.value, one.cache, one.metadata), torch.empty(len(one.query), 4)
    with pytest.raises(UnsupportedError, match="returns no LSE"):
        one.impl().forward(*given, output_lse=lse)


def test_slots_past_32_bits_are_not_left_to_the_operator(on_cpu):
    pages = (torch.empty(1, dtype=torch.bfloat16).expand(2**25, 1, 64, 16),) * 2
    slots = torch.zeros(1, dtype=torch.int64)
    row = torch.zeros(1, 1, 16, dtype=torch.bfloat16)
    assert on_cpu.write(row, row, pages, slots) is False


# -- which library -----------------------------------------------------------------------------------------------------

ABSENT = Missing(ReasonCode.NOT_INSTALLED, "ModuleNotFoundError: not there")


@pytest.fixture
def present(monkeypatch):
    """Say which libraries can be imported."""
    ipex_libraries.library_for.cache_clear()

    def say(ipex=ABSENT, kernels=ABSENT):
        found = {"intel_extension_for_pytorch": ipex, "vllm_xpu_kernels": kernels}
        monkeypatch.setattr(libraries, "import_once", lambda name: found[name.partition(".")[0]])

    yield say
    ipex_libraries.library_for.cache_clear()


@pytest.mark.parametrize(
    ("ipex", "kernels", "device", "made"),
    [
        (ipex_fakes.IPEX_ON_CPU, ABSENT, "cpu", ipex_libraries.IpexOnCpu),
        (ipex_fakes.IPEX_ON_CPU, ipex_fakes.XPU_KERNELS, "cpu", ipex_libraries.IpexOnCpu),
        (ipex_fakes.IPEX_ON_CPU, ipex_fakes.XPU_KERNELS, "xpu", ipex_libraries.XpuKernels),
        (ipex_fakes.IPEX_ON_XPU, ipex_fakes.XPU_KERNELS, "xpu", ipex_libraries.IpexOnXpu),
        (ABSENT, ipex_fakes.XPU_KERNELS, "xpu", ipex_libraries.XpuKernels),
    ],
)
def test_the_library_follows_from_the_device_and_what_is_installed(present, ipex, kernels, device, made):
    present(ipex, kernels)
    assert type(ipex_libraries.library_for(device)) is made


@pytest.mark.parametrize(
    ("ipex", "kernels", "device", "error", "told"),
    [
        (ABSENT, ABSENT, "cpu", BackendUnavailableError, "not there; vllm_xpu_kernels: .*not there.*pip install"),
        (ABSENT, ipex_fakes.XPU_KERNELS, "cpu", BackendUnavailableError, "it computes on xpu only"),
        (ipex_fakes.IPEX_ON_CPU, ABSENT, "xpu", BackendUnavailableError, "2.8.0.cpu is here, which does not compute"),
        (ipex_fakes.IPEX_ON_CPU, ABSENT, "cuda", BadInputError, "but query is on cuda"),
    ],
)
def test_a_device_without_a_library_is_one_clear_error(present, ipex, kernels, device, error, told):
    present(ipex, kernels)
    with pytest.raises(error, match=told):
        ipex_libraries.library_for(device)


def test_without_a_library_there_is_no_layer(present):
    present()
    with pytest.raises(BackendUnavailableError, match="IPEX cannot be built"):
        IpexBackend.get_impl_cls()
    present(kernels=ipex_fakes.XPU_KERNELS)
    assert IpexBackend.get_impl_cls() is ipex_impl.IpexImpl


# -- the stand-ins against the real libraries --------------------------------------------------------------------------


def arguments_of(function):
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.skipif(isinstance(REAL, Missing), reason="intel-extension-for-pytorch is not here; tox -e xpu has it")
@pytest.mark.parametrize("name", ["reshape_and_cache", "single_query_cached_kv_attention", "flash_attn_varlen_func"])
def test_the_stand_in_has_the_signatures_of_ipex(name):
    real, fake = (each.llm.modules.PagedAttention for each in (REAL, ipex_fakes.IPEX_ON_CPU))
    assert arguments_of(getattr(fake, name)) == arguments_of(getattr(real, name))


THEIRS = libraries.import_once("vllm_xpu_kernels")
with_kernels = pytest.mark.skipif(
    isinstance(THEIRS, Missing), reason="vllm-xpu-kernels is not here; tox -e xpu has its Python files"
)


@with_kernels
def test_the_stand_in_has_the_signature_of_vllm_xpu_kernels():
    assert arguments_of(ipex_fakes.XPU_KERNELS.flash_attn_varlen_func) == arguments_of(THEIRS.flash_attn_varlen_func)


@with_kernels
@pytest.mark.parametrize("rules", [RULES["plain"], RULES["window"], RULES["window_of_two"], RULES["window_of_one"]])
def test_what_vllm_xpu_kernels_is_asked_means_the_same_to_its_own_reference(here, monkeypatch, rules):
    """The package computes in plain torch where it has no kernel for a size, so its Python files can judge our call.

    That reference reads pages [block_size, num_kv_heads, size] only; the kernels take strides.
    """
    interface = sys.modules["vllm_xpu_kernels.flash_attn_interface"]

    def no_kernel(*given):
        raise RuntimeError("Chunk prefill kernel tuple not compiled for this configuration.")

    monkeypatch.setattr(torch.ops, "_vllm_fa2_C", SimpleNamespace(varlen_fwd=no_kernel), raising=False)
    monkeypatch.setattr(interface, "_SPEC_DECODE_MAX_QLEN", 0)
    made = ipex_libraries.XpuKernels(THEIRS)
    monkeypatch.setattr(ipex_impl, "library_for", lambda device: made)
    one = here(MIXED)
    one.cache = one.cache.transpose(2, 3).contiguous().transpose(2, 3)
    one.check(**rules)


@with_kernels
def test_python_files_without_kernels_do_not_count_as_the_library():
    if THEIRS.flash_attn_interface.FA2_AVAILABLE:
        pytest.skip("this machine can load the kernels")
    assert isinstance(libraries.installed(XPU_KERNELS.libraries[0]), Missing)


# -- docs/findings.md: once one of these fails, the library was mended, and its row goes ------------------------------


@pytest.fixture(scope="module")
def shown():
    """The names that the page's snippet defines."""
    page = (Path(__file__).parents[3] / "docs" / "findings.md").read_text(encoding="utf-8")
    codes = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (code,) = (code for code in codes if "intel_extension_for_pytorch" in code)
    names = {}
    exec(compile(code, "docs/findings.md", "exec"), names)
    return names


with_ipex = pytest.mark.skipif(isinstance(REAL, Missing), reason="intel-extension-for-pytorch is not here")


@with_ipex
def test_windows_mean_one_thing_in_decode_and_another_in_chunks(shown):
    chunk, decode = shown["chunk"], shown["decode"]
    assert max(chunk(), decode(), chunk(left=4, sliding_window=5), decode(window=5, sliding_window=5)) < 1e-6
    assert min(chunk(left=5, sliding_window=5), decode(window=4, sliding_window=5)) > 0.01
    assert chunk(left=0, sliding_window=1) > 0.01
    assert chunk(left=0) < 1e-6


@with_ipex
def test_decode_reads_pages_wrong_that_do_not_divide_128_and_chunks_do_not(shown):
    assert shown["chunk"](block_size=5) < 1e-6
    assert shown["decode"](keys=200, block_size=8) < 1e-6
    assert not shown["decode"](keys=200, block_size=5) < 0.01


@with_ipex
def test_a_window_with_a_soft_cap_and_alibi_in_chunks_are_refused_by_the_operators(shown):
    with pytest.raises(RuntimeError, match="window_size"):
        shown["decode"](window=5, soft_cap=3.0)
    with pytest.raises(RuntimeError, match="alibi_slopes is not supported"):
        shown["chunk"](slopes=torch.ones(1))


@with_ipex
def test_varlen_attention_drops_the_scale_and_aligns_to_the_first_key(shown):
    assert shown["flat"](scale=0.25) < 1e-6
    assert shown["flat"](scale=2.0) > 0.1
    assert shown["flat"](queries=2) > 0.1


@with_ipex
@pytest.mark.parametrize("what", ["a slot of -1", "a block that is not there", "pages laid out as the docstring says"])
def test_what_ends_the_process_still_does(what):
    """None of it reaches the library through a layer: see the tests of tables, slots and layouts above."""
    calls = {
        "a slot of -1": "paged.reshape_and_cache(row, row, pages[0], pages[1], torch.tensor([-1] * 64).int())",
        "a block that is not there": "paged.flash_attn_varlen_func(row, row, *pages, ends, ends, 64, 64, 1.0, True, "
        "torch.full((1, 64), 2**30).int(), None)",
        "pages laid out as the docstring says": "paged.reshape_and_cache(row, row, *(x.transpose(1, 2).contiguous() "
        "for x in pages), torch.arange(64).int() + 2**14 - 64)",
    }
    code = (
        "import torch, intel_extension_for_pytorch as ipex; paged = ipex.llm.modules.PagedAttention; "
        "row, ends = torch.ones(64, 2, 64), torch.tensor([0, 64]).int(); "
        f"pages = [torch.ones(2**10, 2, 16, 64) for _ in 'kv']; {calls[what]}; del row, pages"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode < 0, done.stderr.decode()
