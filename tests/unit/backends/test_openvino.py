"""OPENVINO computes the contract on both of its operators, against the float64 reference, where openvino is there."""

from __future__ import annotations

import gc
import logging
import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip(
    "openvino", reason="openvino is not installed: pip install 'heedful[openvino]'", exc_type=ImportError
)

from heedful.backends import openvino_impl, openvino_models, openvino_u8
from heedful.backends.openvino import OpenVinoBackend
from heedful.backends.paged import CommonMetadataBuilder
from heedful.backends.torch_sdpa import TorchSdpaBackend
from heedful.errors import BadInputError, MetadataError, UnsupportedError
from heedful.platforms import device_for
from heedful.reference import reference_attention
from heedful.selector import explain
from heedful.types import SelectionRequest

DTYPES = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
MIXED = [(6, 0, False), (20, 0, False), (40, 6, False), (21, 90, False), (1, 120, True), (1, 2, True), (3, 35, True)]
SLOPES, SINKS = torch.tensor([0.5, 0.25, 0.1, 0.3]), torch.tensor([0.3, -2.0, 5.0, -torch.inf])
RULES = {
    "plain": {},
    "window": {"sliding_window": 5},
    "wide_window": {"sliding_window": 2**40},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": SINKS},
    "window_sinks": {"sliding_window": 33, "sinks": SINKS},
    "alibi_sinks": {"alibi_slopes": SLOPES, "sinks": SINKS},
    "all": {"sliding_window": 33, "alibi_slopes": SLOPES, "sinks": SINKS},
}


@pytest.fixture
def here(bare_scene):
    """A scene on OPENVINO, in pages of 32 unless the test says otherwise."""

    class Here(bare_scene):
        def __init__(self, seqs, block_size=32, **facts):
            super().__init__(seqs, block_size=block_size, **facts)

        def impl(self, backend=OpenVinoBackend, **rules):
            sizes = (self.num_heads, self.size, self.size**-0.5, self.num_kv_heads)
            return backend.get_impl_cls()(*sizes, head_size_v=self.size_v, **rules)

    return Here


@pytest.fixture
def ways(monkeypatch):
    """Every answer of ``way``, in order: empty where the PagedAttention operator took the call."""
    found, asked = [], openvino_impl.OpenVinoImpl.way
    monkeypatch.setattr(
        openvino_impl.OpenVinoImpl, "way", lambda self, call: found.append(asked(self, call)) or found[-1]
    )
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [32, 16])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_a_mixed_batch_agrees_with_the_reference(here, dtype, block_size, rules):
    here(MIXED, block_size=block_size, dtype=dtype, pad_rows=2).check(**rules)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (7, 5), (33, 65), (64, 128), (16, 8), (80, 80), (127, 127), (512, 2)])
def test_heads_of_any_size_are_right(here, dtype, sizes):
    here(MIXED, dtype=dtype, size=sizes[0], size_v=sizes[1]).check()


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1), (5, 5)])
@pytest.mark.parametrize("block_size", [32, 5])
def test_each_query_head_reads_its_own_kv_head(here, heads, block_size):
    here(MIXED, block_size=block_size, num_heads=heads[0], num_kv_heads=heads[1]).check()


def test_which_operator_runs_follows_the_capability_rows(here, ways):
    here(MIXED).run()
    here(MIXED, block_size=16).run()
    here(MIXED).run(**RULES["all"])
    here(MIXED, dtype=torch.bfloat16, size=33).run()
    assert ways[0] == ""
    assert "takes block sizes 32" in ways[1]
    assert "cannot combine alibi and window" in ways[2]
    assert "rows of 4 bytes" in ways[3]


@pytest.mark.parametrize(
    ("facts", "rules"),
    [({}, {"sliding_window": 33, "alibi_slopes": SLOPES}), ({"dtype": torch.bfloat16, "size": 33}, {})],
)
def test_what_the_rows_leave_out_the_operator_still_gets_wrong(here, monkeypatch, facts, rules):
    """docs/findings.md: once this fails, OpenVINO was mended and the row may claim more."""
    monkeypatch.setattr(openvino_impl.OpenVinoImpl, "way", lambda self, call: "")
    one = here(MIXED, **facts)
    right, _ = one.expected(**rules)
    assert not (one.run(**rules)[: one.tokens].double() - right).abs().max() < 10 * DTYPES[one.dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_pages_are_written_in_place_and_nothing_else_is(here, ways, dtype):
    one, two = here(MIXED, dtype=dtype), here(MIXED, dtype=dtype)
    for each in (one, two):
        each.cache[each.cache.isnan()] = 777
    one.run()
    two.run(two.impl(TorchSdpaBackend))
    assert ways == [""]
    assert torch.equal(one.cache, two.cache)


def test_a_page_tail_that_the_operator_clears_is_read_by_no_other_sequence(here, ways):
    """A chunk ends inside a page that another sequence's table names too, and has keys in behind that end."""
    one = here([(3, 3, False), (1, 20, True)])
    block, other = one.tables[0][0], one.tables[1][0]
    view = one.cache[:, block]
    view[:, :, 6:21] = one.cache[:, other][:, :, 6:21]
    one.metadata.block_tables[1, 0] = block
    one.metadata.slot_mapping[3] = block * 32 + 20
    for known in (one.keys, one.values):
        known[1][:6] = known[0]
    one.check()
    assert "another sequence has the page" in ways[0]


@pytest.mark.parametrize("writer", [TorchSdpaBackend, OpenVinoBackend], ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_of_torch_sdpa_is_read_by_openvino_and_the_other_way_round(here, ways, writer, dtype):
    reader = OpenVinoBackend if writer is TorchSdpaBackend else TorchSdpaBackend
    whole = here([(70, 0, False)], dtype=dtype)
    right, _ = whole.expected()
    cache, parts, done = torch.full_like(whole.cache, torch.nan), [], 0
    for backend, count in ((writer, 45), (reader, 24), (reader, 1)):
        builder = CommonMetadataBuilder(32)
        builder.add(count, done, whole.tables[0], decode=count == 1)
        rows = slice(done, done + count)
        given = (whole.query[rows], whole.key[rows], whole.value[rows], cache, builder.build())
        parts.append(whole.impl(backend).forward(*given))
        done += count
    assert (torch.cat(parts).double() - right).abs().max() < DTYPES[dtype]
    assert ways == [""] * (1 if writer is OpenVinoBackend else 2)


def test_a_step_with_a_token_that_is_not_written_goes_the_other_way_and_says_so(here, ways, caplog):
    openvino_impl._tell_once.cache_clear()
    one = here([(20, 0, False), (1, 40, True)])
    right = one.run()
    one.metadata.slot_mapping[:8] = -1  # tokens 0-7 are there already
    one.key[:8] = 99
    with caplog.at_level(logging.INFO, "heedful"):
        found = one.run()
    assert torch.allclose(found, right, atol=2e-6)
    assert ways[0] == ""
    assert "slot_mapping leaves a token unwritten" in ways[1]
    assert "slot_mapping leaves a token unwritten" in caplog.text
    assert not (one.cache[0] == 99).any()


def test_a_slot_that_the_block_table_does_not_imply_is_refused(here):
    one = here(MIXED)
    one.metadata.slot_mapping[0] += 1
    with pytest.raises(MetadataError, match="row 0 has slot"):
        one.run()


def test_pages_that_are_not_side_by_side_are_read_right_too(here, ways):
    one = here(MIXED)
    right = one.run()
    wide = torch.zeros(*one.cache.shape[:-1], 40)
    wide[..., :16] = one.cache
    one.cache = wide[..., :16]
    assert torch.allclose(one.run(), right, atol=1e-6)
    assert "side by side" in ways[1]


def test_output_does_not_depend_on_strides(here):
    one = here(MIXED)
    right = one.run()
    one.query = one.query.transpose(0, 1).contiguous().transpose(0, 1)
    one.key = torch.stack([one.key, one.key], -1)[..., 0]
    one.value = one.value.transpose(1, 2).contiguous().transpose(1, 2)
    output = torch.empty(len(one.query), 4, 32)[..., ::2]
    one.impl().forward(one.query, one.key, one.value, one.cache, one.metadata, output=output)
    assert torch.allclose(output, right, atol=1e-6)


@pytest.mark.parametrize("block_size", [32, 16])
@pytest.mark.parametrize("tail", [torch.nan, torch.inf, 1e30])
def test_what_lies_past_the_last_key_never_reaches_the_output(here, block_size, tail):
    clean, dirty = here(MIXED, block_size), here(MIXED, block_size)
    for one, fill in ((clean, 0.0), (dirty, tail)):
        one.cache[one.cache.isnan()] = fill
    assert torch.equal(clean.run(), dirty.run())


@pytest.mark.parametrize("block_size", [32, 16])
def test_nothing_is_a_batch_too(here, block_size):
    assert here([], block_size).run().shape == (0, 4, 16)
    here([(0, 0, False), (4, 0, False), (0, 5, True), (1, 3, True)], block_size, pad_rows=3).check()


def test_the_flat_form_is_answered_flat(here):
    one = here(MIXED)
    right = one.run()
    flat = [x.flatten(1) for x in (one.query, one.key, one.value)]
    assert torch.equal(one.impl().forward(*flat, one.cache, one.metadata), right.flatten(1))


def test_the_profiling_run_attends_without_a_cache(here, ways):
    one = here([(40, 0, False), (7, 0, False)])
    right = one.run()
    found = one.impl().forward(one.query, one.key, one.value, torch.empty(0), one.metadata)
    assert torch.allclose(found, right, atol=2e-6)
    assert "not in pages" in ways[1]


@pytest.mark.parametrize("kind", ["encoder", "encoder_only"])
@pytest.mark.parametrize("rules", [{}, RULES["window"], RULES["all"]])
def test_an_encoder_sees_both_sides(here, kind, rules):
    assert here([(40, 0, False), (300, 0, False)]).encoder_error(kind, **rules) < 5e-6


def test_threads_share_a_layer(here, share_a_layer):
    share_a_layer([here(MIXED, seed=seed) for seed in range(4)], times=30)


def test_layers_alike_share_a_compiled_model_and_its_requests(here, monkeypatch):
    monkeypatch.setattr(openvino_models, "_MODELS", {})
    one = here(MIXED)
    for _ in range(3):
        one.run(one.impl())
    (model,) = openvino_models._MODELS.values()
    assert len(model._idle) == 1
    one.run(one.impl(**RULES["sinks"]))
    here(MIXED, dtype=torch.bfloat16).run()
    assert len(openvino_models._MODELS) == 3


def test_the_number_of_threads_is_the_callers(here, monkeypatch):
    monkeypatch.setattr(openvino_models, "_MODELS", {})
    one = here(MIXED)
    for count in (1, 2):
        torch.set_num_threads(count)
        one.run()
    torch.set_num_threads(1)
    for form, model in openvino_models._MODELS.items():
        assert model.compiled.get_property("INFERENCE_NUM_THREADS") == form.threads
        assert model.compiled.get_property("ENABLE_CPU_PINNING") is False
    assert [form.threads for form in openvino_models._MODELS] == [1, 2]


@pytest.mark.parametrize(("dtype", "hint"), [(torch.float32, "float"), (torch.bfloat16, "bfloat16")])
def test_the_precision_is_never_left_to_the_plugin(here, monkeypatch, dtype, hint):
    monkeypatch.setattr(openvino_models, "_MODELS", {})
    here(MIXED, dtype=dtype).run()
    (model,) = openvino_models._MODELS.values()
    told = model.compiled.get_property("INFERENCE_PRECISION_HINT")
    assert told.get_type_name() == {"float": "f32", "bfloat16": "bf16"}[hint]


def test_an_idle_request_keeps_no_cache_alive(here, ways):
    one = here(MIXED)
    memory = one.cache.numpy().copy()
    one.cache = torch.from_numpy(memory)  # whose storage lives as long as something looks at it
    told = weakref.ref(memory)
    one.run()
    del memory, one.cache
    gc.collect()
    assert ways == [""]
    assert told() is None


def test_what_no_operator_has_is_refused(here):
    one = here(MIXED)
    with pytest.raises(UnsupportedError, match="has no soft_cap"):
        one.impl(logits_soft_cap=5.0)
    given, lse = (one.query, one.key, one.value, one.cache, one.metadata), torch.empty(len(one.query), 4)
    with pytest.raises(UnsupportedError, match="returns no LSE"):
        one.impl().forward(*given, output_lse=lse)
    with pytest.raises(UnsupportedError, match="kv_cache_dtype"):
        OpenVinoBackend.get_impl_cls()(4, 16, 0.25, kv_cache_dtype="fp8")


@pytest.mark.parametrize(("word", "told"), [("NPU", "OpenVINO sees only"), ("gpu", "is no device of OpenVINO")])
def test_a_device_that_is_not_there_is_one_clear_error(here, monkeypatch, word, told):
    if word in openvino_models._core().available_devices:
        pytest.skip(f"this machine has an {word}")
    monkeypatch.setenv("HEEDFUL_OPENVINO_DEVICE", word)
    with pytest.raises(BadInputError, match=told):
        here(MIXED).impl()


def test_a_tensor_elsewhere_is_an_error(here):
    call = SimpleNamespace(query=torch.empty(1, 4, 16, device="meta"))
    with pytest.raises(BadInputError, match="query is on meta; move it to the CPU"):
        here(MIXED).impl().run(call)


def test_the_record_names_the_device_and_the_variant(fresh):
    device = device_for("openvino")
    for block_size, variant in ((32, "paged"), (16, "sdpa")):
        record = explain(SelectionRequest(64, block_size=block_size), device).to_dict()
        assert record["device"] == "openvino CPU"
        (candidate,) = record["candidates"]
        assert (record["backend"], candidate["variant"]) == ("OPENVINO", variant)
        assert ("a step goes by sdpa if its slot_mapping leaves a token" in candidate["facts"]) is (variant == "paged")


def test_the_page_of_findings_shows_what_the_library_does(capsys):
    """Once this fails, OpenVINO was mended: take the row off docs/findings.md and let the capability row claim more."""
    page = (Path(__file__).parents[3] / "docs" / "findings.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (snippet,) = (snippet for snippet in snippets if "openvino_models" in snippet)
    names = {}
    exec(compile(snippet, "docs/findings.md", "exec"), names)
    assert "both" in capsys.readouterr().out
    five_tokens = names["five_tokens"]
    alone = [five_tokens(), five_tokens(window=3), five_tokens(slope=0.5), five_tokens(size=7)]
    assert max(error for error, _ in alone) < 1e-6
    assert five_tokens(window=3, slope=0.5)[0] > 0.1
    assert five_tokens(window=99, slope=0.5)[0] > 0.1
    assert five_tokens(torch.bfloat16)[0] < 2e-2
    assert not five_tokens(torch.bfloat16, size=7)[0] < 0.1
    for dtype, tail in ((torch.float32, 0), (torch.bfloat16, 0), (torch.float16, 7)):
        assert (five_tokens(dtype)[1][5:] == tail).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", ["paged", "sdpa", "both"])
@pytest.mark.parametrize("rules", [{}, RULES["window"], {"sinks": SINKS}])
def test_a_u8_cache_is_read_as_it_was_stored_on_both_operators(monkeypatch, dtype, path, rules):
    """In three steps, which on "both" take turns."""
    asked, calls = openvino_impl.OpenVinoImpl.way, []
    turns = {"paged": ["", "", ""], "sdpa": ["asked"] * 3, "both": ["", "asked", ""]}[path]
    monkeypatch.setattr(
        openvino_impl.OpenVinoImpl,
        "way",
        lambda self, call: asked(self, call) or turns[calls.append(1) or len(calls) - 1],
    )
    query, key, value = (torch.randn(70, heads, 16).to(dtype) for heads in (4, 2, 2))
    cache = torch.full(OpenVinoBackend.get_kv_cache_shape(5, 32, 2, 16, "u8"), 7, dtype=torch.uint8)
    layer = OpenVinoBackend.get_impl_cls()(4, 16, 0.25, 2, kv_cache_dtype="u8", **rules)
    parts, done = [], 0
    for count in (45, 24, 1):
        builder = CommonMetadataBuilder(32)
        builder.add(count, done, [3, 0, 4], decode=count == 1)
        rows = slice(done, done + count)
        parts.append(layer.forward(query[rows], key[rows], value[rows], cache, builder.build()))
        done += count
    held = [openvino_u8.load(side[[3, 0, 4]].transpose(1, 2).flatten(0, 1)[:70]) for side in cache]
    for found, given in zip(held, (key, value), strict=True):
        span = given.float().amax(-1) - given.float().amin(-1)
        assert ((found - given.float()).abs().amax(-1) <= span / 509).all()
    ends = torch.tensor([0, 70])
    right, _ = reference_attention(query, *held, ends, ends, scale=0.25, **rules)
    assert (torch.cat(parts).double() - right).abs().max() < DTYPES[dtype]
    assert (cache[:, [1, 2]] == 7).all()
    assert (cache[:, 4, :, 6:] == 7).all()


def test_a_u8_cache_takes_no_scale(here):
    one = here(MIXED)
    layer = OpenVinoBackend.get_impl_cls()(4, 16, 0.25, 2, kv_cache_dtype="u8")
    cache = torch.zeros(OpenVinoBackend.get_kv_cache_shape(40, 32, 2, 16, "u8"), dtype=torch.uint8)
    with pytest.raises(BadInputError, match="kv_cache_dtype 'u8' has no scale"):
        layer.forward(one.query, one.key, one.value, cache, one.metadata, 0.5)
    with pytest.raises(BadInputError, match="the K cache is float32"):
        layer.forward(one.query, one.key, one.value, cache.float(), one.metadata)


class U8Pages:
    """One head of 16 in two pages of OpenVINO's u8 cache, written and read by the bare operator."""

    def __init__(self, **mode):
        form = openvino_models.PagedForm(1, 1, 16, 16, torch.float32, torch.float32, False, False, "CPU", 1)
        settings = openvino_models._settings(form) | {"KV_CACHE_PRECISION": "u8"} | mode
        compiled = openvino_models._core().compile_model(openvino_models._paged(form), "CPU", settings)
        self.model = openvino_models.Model(compiled)
        self.tokens = torch.randn(3, 40, 16, generator=torch.Generator().manual_seed(0))
        shapes = [compiled.input(name).get_partial_shape() for name in ("key_cache", "value_cache")]
        sizes = [(2, *(shape[at].get_length() for at in (1, 2, 3))) for shape in shapes]
        self.key, self.value = (torch.full(size, 7, dtype=torch.uint8) for size in sizes)

    def step(self, first, end):
        """Write tokens first … end, attend, and give the answer."""
        output = torch.empty(end - first, 16)
        inputs = dict(zip(("query", "key", "value"), self.tokens[:, first:end].contiguous(), strict=True))
        inputs |= {"key_cache": self.key, "value_cache": self.value}
        lists = {"past_lens": [first], "subsequence_begins": [0, end - first], "max_context_len": end}
        lists |= {"block_indices": [0, 1], "block_indices_begins": [0, 2], "sliding_window": 0}
        inputs |= {name: torch.tensor(x, dtype=torch.int32) for name, x in lists.items()} | {
            "scale": torch.tensor(0.25)
        }
        self.model.run({name: openvino_models.shared(x) for name, x in inputs.items()}, openvino_models.shared(output))
        return output


def test_by_channel_a_new_token_changes_what_the_u8_cache_holds_of_earlier_ones():
    """docs/findings.md: why the cache by channel, which is the plugin's choice, is not what we use."""
    pages = U8Pages()
    pages.step(0, 20)
    before = pages.key.clone()
    for token in range(20, 24):
        pages.step(token, token + 1)
    assert pages.key.shape == (2, 1, 40, 16)  # 8 rows of scales and zero points, then a row a token
    assert (pages.key != before)[0, 0, 8:28].any(1).sum() > 10


def test_by_token_the_u8_cache_keeps_earlier_tokens_and_is_read_as_it_was_stored():
    """docs/findings.md: the setting that our u8 cache rests on."""
    pages = U8Pages(KEY_CACHE_QUANT_MODE="BY_TOKEN")
    pages.step(0, 20)
    before = pages.key.clone(), pages.value.clone()
    output = pages.step(20, 40)
    query, *sides = pages.tokens[:, :, None]
    held = [openvino_u8.load(cache.view(64, 24))[:40] for cache in (pages.key, pages.value)]
    for cache, old, x, side in zip((pages.key, pages.value), before, held, sides, strict=True):
        assert torch.equal(cache.view(64, 24)[:20], old.view(64, 24)[:20])
        assert (cache.view(64, 24)[40:] == 7).all()
        span = side[:, 0].amax(1) - side[:, 0].amin(1)
        assert ((x - side[:, 0]).abs().amax(1) <= span / 509).all()
    ends = torch.tensor([0, 20]), torch.tensor([0, 40])
    right, _ = reference_attention(query[20:], *(x[:, None] for x in held), *ends, scale=0.25)
    assert (output - right[:, 0]).abs().max() < 1e-6
    raw, _ = reference_attention(query[20:], *sides, *ends, scale=0.25)
    assert (output - raw[:, 0]).abs().max() > 1e-3
