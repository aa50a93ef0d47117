"""PALLAS computes the contract in Pallas' interpreter, against the float64 reference, where jax is there."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import heedful.kernels.pallas  # noqa: F401  before jax: it settles what jax reads from the environment

pytest.importorskip("jax", reason="jax is not installed: pip install 'heedful[tpu]'", exc_type=ImportError)

from heedful.backends import pallas_impl
from heedful.backends.builds import Build
from heedful.backends.paged import CommonMetadataBuilder
from heedful.backends.pallas import PallasBackend
from heedful.backends.torch_sdpa import TorchSdpaBackend
from heedful.errors import BadInputError, MetadataError, UnsupportedError
from heedful.kernels.pallas import attention as kernel
from heedful.kernels.pallas import naive
from heedful.kernels.pallas.targets import TOPOLOGIES

jax, attention = pallas_impl.jax, kernel.attention
DTYPES = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
MIXED = [(6, 0, False), (20, 0, False), (40, 6, False), (21, 90, False), (1, 120, True), (1, 2, True), (3, 35, True)]
SLOPES, SINKS = torch.tensor([0.5, 0.25, 0.1, 0.3]), torch.tensor([0.3, -2.0, 5.0, -torch.inf])
RULES = {
    "plain": {},
    "window": {"sliding_window": 5},
    "wide_window": {"sliding_window": 2**40},
    "alibi": {"alibi_slopes": SLOPES},
    "soft_cap": {"logits_soft_cap": 2.0},
    "sinks": {"sinks": SINKS},
    "all": {"sliding_window": 33, "alibi_slopes": SLOPES, "sinks": SINKS, "logits_soft_cap": 2.0},
}


@pytest.fixture
def here(scene):
    """A scene on PALLAS, in pages of 16 unless the test says otherwise."""

    class Here(scene):
        def __init__(self, seqs, block_size=16, **facts):
            super().__init__(seqs, block_size=block_size, **facts)

        def impl(self, backend=PallasBackend, **rules):
            sizes = (self.num_heads, self.size, self.size**-0.5, self.num_kv_heads)
            return backend.get_impl_cls()(*sizes, head_size_v=self.size_v, **rules)

    return Here


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_a_mixed_batch_agrees_with_the_reference(here, dtype, rules):
    here(MIXED, dtype=dtype, pad_rows=2).check(**rules)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(8, 8), (64, 128), (128, 64), (80, 80), (120, 16), (256, 256)])
def test_heads_of_any_size_are_right(here, dtype, sizes):
    here(MIXED[3:], dtype=dtype, size=sizes[0], size_v=sizes[1]).check()


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1), (5, 5)])
@pytest.mark.parametrize("block_size", [8, 64, 256])
def test_each_query_head_reads_its_own_kv_head(here, heads, block_size):
    here(MIXED, block_size=block_size, num_heads=heads[0], num_kv_heads=heads[1]).check()


def test_a_group_of_many_heads_gets_fewer_queries_a_tile(here):
    one = here([(70, 0, False)], num_heads=64, num_kv_heads=1, size=8)
    one.check()
    (layout,) = (x for key, x in step_of(one).derived.items() if key[0] == "pallas")
    assert layout.queries * 64 == pallas_impl.TILE_ROWS


def step_of(one):
    (step,) = one.metadata.step.values()
    return step


@pytest.mark.parametrize(
    ("seqs", "queries"),
    [([(1, 9, True)] * 3, 1), ([(5, 0, False)], 16), ([(70, 0, False)], 64), ([(70, 0, False), (1, 9, True)], 16)],
)
def test_tiles_fit_the_step(here, seqs, queries):
    one = here(seqs)
    one.check()
    assert pallas_impl.tile_queries(step_of(one), 2) == queries


def test_steps_of_other_lengths_run_the_same_kernel(here):
    """Tiles, sequences and tables come in buckets; only the cache's own size is a shape of its own."""
    compiled = pallas_impl.attention.__globals__["_emulated"]
    seen = []
    for seqs in ([(3, 0, False)], [(3, 40, False), (9, 70, False)], [(16, 0, False)] * 4, [(7, 90, False)] * 5):
        one = here(seqs)
        wide = torch.full((2, 64, *one.cache.shape[2:]), torch.nan)
        wide[:, : one.cache.shape[1]] = one.cache
        one.cache = wide
        one.check()
        seen.append(compiled._cache_size())
    assert seen == [seen[0]] * 4


def test_layers_that_differ_in_numbers_alone_share_a_kernel(here):
    compiled = pallas_impl.attention.__globals__["_emulated"]
    here(MIXED).check()
    before = compiled._cache_size()
    for rules in ({"sliding_window": 7}, {"sinks": SINKS}, {"sliding_window": 3, "sinks": SINKS}):
        here(MIXED).check(**rules)
    assert compiled._cache_size() == before


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 64, 65])
def test_a_bucket_is_the_next_power_of_two(count):
    found = pallas_impl.bucket(count)
    assert found >= max(count, 8)
    assert found & (found - 1) == 0
    assert found == 8 or found < 2 * count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_reads_the_cache_where_it_is(here, monkeypatch, dtype):
    read = []
    monkeypatch.setattr(pallas_impl, "attention", lambda *given: read.append(given) or attention(*given))
    one = here(MIXED, dtype=dtype)
    one.run()
    places = [array.unsafe_buffer_pointer() for array in read[0][4:]]
    assert places == [one.cache[0].data_ptr(), one.cache[1].data_ptr()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["strided", "misaligned", "interleaved"])
def test_pages_that_it_cannot_read_in_place_are_copied_and_the_log_says_so(here, caplog, dtype, kind):
    pallas_impl._tell_once.cache_clear()
    one = here(MIXED, dtype=dtype)
    right, lse = one.run()
    shape = one.cache.shape
    if kind == "strided":
        other = torch.zeros(*shape[:-1], 40, dtype=dtype)[..., :16]
    elif kind == "misaligned":
        other = torch.zeros(one.cache.numel() + 1, dtype=dtype)[1:].view(shape)
    else:
        other = torch.zeros(shape[1], shape[0], *shape[2:], dtype=dtype).transpose(0, 1)
    other.copy_(one.cache)
    one.cache = other
    with caplog.at_level(logging.INFO, "heedful"):
        found, found_lse = one.run()
    assert torch.equal(found, right)
    assert torch.equal(found_lse, lse)
    assert "the pages of each step are copied, because they do not" in caplog.text


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_that_are_no_whole_vectors_are_padded_as_on_a_tpu(here, monkeypatch, dtype):
    monkeypatch.setattr(pallas_impl, "lanes", lambda size: -(-size // 128) * 128)
    monkeypatch.setattr(pallas_impl, "_why_copy", lambda pages: "the TPU reads its own memory")
    sizes = []
    monkeypatch.setattr(
        pallas_impl, "attention", lambda *given: sizes.extend(x.shape[-1] for x in given[3:]) or attention(*given)
    )
    here(MIXED, dtype=dtype, size=80, size_v=136, num_heads=2, num_kv_heads=1).check()
    assert sizes == [128, 128, 256]


def test_it_says_once_that_there_is_no_tpu(here, caplog):
    if pallas_impl.on_tpu():
        pytest.skip("this machine has a TPU")
    pallas_impl._tell_once.cache_clear()
    pallas_impl.on_tpu.cache_clear()
    with caplog.at_level(logging.INFO, "heedful"):
        here(MIXED).run()
        here(MIXED).run()
    assert caplog.text.count("no TPU here, so its kernel runs in Pallas' interpreter") == 1


@pytest.mark.parametrize("writer", [TorchSdpaBackend, PallasBackend], ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_of_torch_sdpa_is_read_by_pallas_and_the_other_way_round(here, writer, dtype):
    reader = PallasBackend if writer is TorchSdpaBackend else TorchSdpaBackend
    read_in_turn(here, dtype, 16, (writer, reader, reader))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", range(3))
def test_torch_sdpa_openvino_and_pallas_continue_one_cache(here, dtype, first):
    pytest.importorskip("openvino", reason="openvino is not installed: pip install 'heedful[openvino]'")
    from heedful.backends.openvino import OpenVinoBackend

    backends = [TorchSdpaBackend, OpenVinoBackend, PallasBackend]
    read_in_turn(here, dtype, 32, backends[first:] + backends[:first])


def read_in_turn(here, dtype, block_size, backends):
    """A sequence of 45, 24 and 1 tokens, each part written and attended by the next backend, on one memory."""
    whole = here([(70, 0, False)], block_size, dtype=dtype)
    right, _ = whole.expected()
    cache, parts, done = torch.full_like(whole.cache, torch.nan), [], 0
    for backend, count in zip(backends, (45, 24, 1), strict=True):
        builder = CommonMetadataBuilder(block_size)
        builder.add(count, done, whole.tables[0], decode=count == 1)
        rows = slice(done, done + count)
        given = (whole.query[rows], whole.key[rows], whole.value[rows], cache, builder.build())
        parts.append(whole.impl(backend).forward(*given))
        done += count
    assert (torch.cat(parts).double() - right).abs().max() < DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_written_slots_change_and_nothing_else_does(here, dtype):
    one, two = here(MIXED, dtype=dtype), here(MIXED, dtype=dtype)
    for each in (one, two):
        each.cache[each.cache.isnan()] = 777
    one.metadata.slot_mapping[:3] = two.metadata.slot_mapping[:3] = -1
    one.run()
    two.run(two.impl(TorchSdpaBackend))
    assert torch.equal(one.cache, two.cache)


def test_a_slot_that_the_block_table_does_not_imply_is_refused(here):
    one = here(MIXED)
    one.metadata.slot_mapping[0] += 1
    with pytest.raises(MetadataError, match="row 0 has slot"):
        one.run()


@pytest.mark.parametrize("tail", [torch.nan, torch.inf, 1e30])
def test_what_lies_past_the_last_key_never_reaches_the_output(here, tail):
    clean, dirty = here(MIXED), here(MIXED)
    for one, fill in ((clean, 0.0), (dirty, tail)):
        one.cache[one.cache.isnan()] = fill
    assert all(map(torch.equal, clean.run(), dirty.run()))


def test_nothing_is_a_batch_too(here):
    assert here([]).run()[0].shape == (0, 4, 16)
    here([(0, 0, False), (4, 0, False), (0, 5, True), (1, 3, True)], pad_rows=3).check(sinks=SINKS)


def test_the_profiling_run_attends_without_a_cache(here):
    one = here([(40, 0, False), (7, 0, False)])
    right, _ = one.run()
    found = one.impl().forward(one.query, one.key, one.value, torch.empty(0), one.metadata)
    assert torch.allclose(found, right, atol=2e-6)


@pytest.mark.parametrize("kind", ["encoder", "encoder_only"])
@pytest.mark.parametrize("rules", [{}, RULES["window"], RULES["all"]])
def test_an_encoder_sees_both_sides(here, kind, rules):
    assert here([(40, 0, False), (100, 0, False)]).encoder_error(kind, **rules) < 5e-6


def test_threads_share_a_layer(here, share_a_layer):
    share_a_layer([here(MIXED, seed=seed) for seed in range(3)], times=5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rules", [RULES["plain"], RULES["all"]], ids=["plain", "all"])
def test_a_tpus_memories_and_semaphores_show_no_race(here, monkeypatch, dtype, rules):
    """Pallas plays a TPU: every copy happens as late as its semaphore allows, and memory is NaN until it is written."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call
    from jax.experimental.pallas import tpu as pltpu

    playing = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan")
    monkeypatch.setattr(pallas_impl, "interpreted", lambda: playing)
    monkeypatch.setattr(pallas_impl, "_array", as_it_is)
    here([(5, 0, False), (3, 290, False), (1, 130, True)], dtype=dtype, num_heads=2, num_kv_heads=1).check(
        **{name: value[:2] if isinstance(value, torch.Tensor) else value for name, value in rules.items()}
    )
    assert not interpret_pallas_call.races.races_found


def as_it_is(x):
    return jax.dlpack.from_dlpack(x)


def test_a_race_would_be_found(here, monkeypatch):
    """The same with a kernel that does not wait for its pages."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call
    from jax.experimental.pallas import tpu as pltpu

    playing = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
    monkeypatch.setattr(pallas_impl, "interpreted", lambda: playing)
    monkeypatch.setattr(kernel._Pages, "wait", lambda self, part: None)
    here([(1, 130, True)], num_heads=2, num_kv_heads=1, size=24).run()
    assert interpret_pallas_call.races.races_found


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("capped", [True, False])
def test_the_kernel_and_the_naive_version_agree(causal, capped):
    generator = np.random.default_rng(0)
    tiles = kernel.Tiles(
        *(np.array(x, np.int32) for x in ([0, 1, 1, 0], [16, 0, 4, 0], [1, 4, 3, 0], [17, 7], [5, 2, 0, 1, 0, 0, 0, 0]))
    )
    numbers, window = np.array([0.3, 2.0], np.float32), np.array([9], np.int32)
    rules = kernel.Rules(numbers, window, np.array([0.5, -np.inf], np.float32), np.array([0.1, 0.2], np.float32))
    query, key, value = (
        generator.standard_normal(s, np.float32) for s in [(4, 4, 2, 8), (6, 1, 16, 8), (6, 1, 16, 24)]
    )
    form = kernel.Form(causal=causal, capped=capped, fetch=2, lse=True, interpret=True)
    found, right = (f(form, tiles, rules, query, key, value) for f in (kernel.attention, naive.attention))
    for one, other in zip(found, right, strict=True):
        for n, count in enumerate(tiles.queries):
            np.testing.assert_allclose(one[n, :count], other[n, :count], atol=2e-6)


def test_what_it_does_not_claim_is_refused(here):
    for word in ("fp8", "u8"):
        with pytest.raises(UnsupportedError, match="kv_cache_dtype"):
            PallasBackend.get_impl_cls()(4, 16, 0.25, kv_cache_dtype=word)
    with pytest.raises(UnsupportedError, match="float16"):
        here(MIXED, dtype=torch.float16).run()
    with pytest.raises(UnsupportedError, match="block sizes"):
        here(MIXED, block_size=20).run()
    with pytest.raises(UnsupportedError, match="head sizes"):
        here(MIXED, size=20).run()


def test_a_tensor_elsewhere_is_an_error(here):
    call = SimpleNamespace(query=torch.empty(1, 4, 16, device="meta"))
    with pytest.raises(BadInputError, match="query is on meta; move it to the CPU"):
        here(MIXED).impl().attend(call)


@pytest.mark.parametrize("build", [b for b in PallasBackend.BUILDS if b.profile == "smoke"], ids=lambda build: build.id)
def test_the_kernel_compiles_for_every_generation(build):
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'heedful[tpu]'")
    began = time.process_time()
    figures = PallasBackend.compile_build(build)
    assert time.process_time() - began < 10
    assert figures["code_bytes"] > 0
    assert figures["flops"] > 0
    assert figures["argument_bytes"] >= 2 * 512 * 8 * 16 * 128 * 2


def test_what_the_compiler_refuses_is_an_unsupported_error():
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'heedful[tpu]'")
    options = dict(PallasBackend.BUILDS[0].options) | {"queries": 1, "page": 65536}
    with pytest.raises(UnsupportedError, match=r"the compiler refuses attention-v5e-huge: .*"):
        PallasBackend.compile_build(Build("attention", "v5e", "huge", options))


def test_every_build_has_an_id_of_its_own():
    ids = [build.id for build in PallasBackend.BUILDS]
    assert len(set(ids)) == len(ids)
    assert {build.arch for build in PallasBackend.BUILDS} == set(TOPOLOGIES)


def test_the_page_of_findings_shows_what_jaxs_shipped_kernels_do(capsys):
    """Once this fails, jax was mended: take the row off docs/findings.md."""
    page = (Path(__file__).parents[3] / "docs" / "findings.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (snippet,) = (snippet for snippet in snippets if "import paged_attention" in snippet)
    exec(compile(snippet, "docs/findings.md", "exec"), {})
    error, ragged = capsys.readouterr().out.splitlines()
    assert 5e-4 < float(error.rpartition(" ")[2]) < 1e-2
    assert "'ReshapeTransform' object has no attribute 'indices'" in ragged
