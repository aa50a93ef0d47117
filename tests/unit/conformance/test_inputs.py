"""Inputs of a case: seeded, poisoned, shuffled, near the edges where defects show, and legal for every backend."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from heedful.backends.base import AttentionBackend
from heedful.backends.paged import hnd_views, nhd_views, validate_metadata
from heedful.conformance.assemble import PAD_ROWS, PAD_SEQUENCES
from heedful.conformance.cases import BATCHES, FAMILIES, Case
from heedful.conformance.covering import common_array, legal
from heedful.conformance.inputs import CACHE_SCALES, build
from heedful.conformance.pages import POISON, as_bytes, without_repeats, written
from heedful.errors import BadInputError
from heedful.reference import dequantise, read_pages, reference_attention, u8_grid

KINDS = ("decoder", "encoder", "encoder_only", "encoder_decoder")
WORDS = ("auto", "fp8", "fp8_e5m2")
CASES = [
    case
    for batch, kind, word in itertools.product(BATCHES, KINDS, WORDS)
    if batch != "long"
    and legal(case := Case(dtype="bfloat16", batch=batch, attn_type=kind, kv_cache_dtype=word, head_size_v=48))
]
EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


class Plain(AttentionBackend):
    """A cache without kernels, [2, blocks, block_size, KV, size]."""

    name, CAPABILITIES = "PLAIN", ()

    @staticmethod
    def get_impl_cls():
        return Recorder

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, kv_cache_dtype="auto", head_size_v=None):
        shape = (num_blocks, block_size, num_kv_heads)
        return ((*shape, head_size), (*shape, head_size_v)) if head_size_v else (2, *shape, head_size)

    kv_views = staticmethod(nhd_views)
    swap_blocks = copy_blocks = staticmethod(lambda *_: None)


class HeadsFirst(Plain):
    """The same with heads before tokens."""

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, kv_cache_dtype="auto", head_size_v=None):
        return (2, num_blocks, num_kv_heads, block_size, head_size)

    kv_views = staticmethod(hnd_views)


class Opaque(Plain):
    """A layout that only the backend itself can read."""

    kv_views = staticmethod(lambda _cache: None)


class Recorder:
    """An impl that writes what it is given, as the contract says, into a Plain cache."""

    def __init__(self, batch):
        self.batch = batch

    def forward(self, query, key, value, kv_cache, attn_metadata, k_scale=1.0, v_scale=1.0, attn_type="decoder"):
        step = replace(self.batch, query=query, key=key, value=value, metadata=attn_metadata)
        step = replace(step, case=replace(self.batch.case, attn_type=attn_type), pages=nhd_views(kv_cache))
        for view, page in zip(nhd_views(kv_cache), step.pages_after(), strict=True):
            view.copy_(page)
        return query


@EVERY
def test_the_metadata_is_legal_and_fits_the_tensors(case):
    batch = build(case)
    blocks = 0 if batch.pages is None else len(batch.pages[0])
    keys = None if batch.key is None else len(batch.key)
    validate_metadata(batch.metadata, case.attn_type, len(batch.query), keys, blocks, case.block_size if blocks else 0)
    assert batch.query.shape[1:] == (case.num_heads, case.head_size)
    assert batch.query.dtype == torch.bfloat16
    if batch.key is not None:
        assert batch.key.shape[1:] == (case.num_kv_heads, case.head_size)
        assert batch.value.shape[1:] == (case.num_kv_heads, 48)


@EVERY
def test_the_expected_answer_is_finite_and_its_yardsticks_pass(case):
    batch = build(case)
    expected = batch.expected()
    assert len(expected.output) == len(batch.query)
    assert len(expected.lse) == batch.num_tokens
    assert not expected.output.isnan().any()
    for output, lse in zip(expected.yardsticks, expected.yardstick_lses, strict=True):
        assert max(expected.judge(output, lse).values()) <= 1


@EVERY
def test_nothing_but_written_slots_changes_and_the_poison_is_never_read(case):
    batch = build(case)
    if batch.pages is None or batch.key is None:
        assert batch.pages_after() is batch.pages
        return
    slots = batch.metadata.slot_mapping
    for before, after in zip(batch.pages, batch.pages_after(), strict=True):
        differs = (as_bytes(before) != as_bytes(after)).flatten(0, 1).flatten(1).any(1).nonzero()[:, 0].tolist()
        assert set(differs) <= set(slots[slots >= 0].tolist())
    poison = tuple(torch.where(p.float().abs() >= 400, -p.float(), p.float()).to(p.dtype) for p in batch.pages)
    assert torch.equal(replace(batch, pages=poison).expected().output, batch.expected().output)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_case_gives_the_same_bits_and_another_seed_others(family):
    case = Case(family=family, sinks=True)
    one, two, other = build(case), build(case), build(replace(case, seed=1))
    assert torch.equal(one.query, two.query)
    assert torch.equal(one.pages[0], two.pages[0])
    assert torch.equal(one.sinks, two.sinks)
    assert torch.equal(one.metadata.block_tables, two.metadata.block_tables)
    assert not torch.equal(one.query, other.query)


def logits(batch):
    span = batch.case.spans[0]
    query, key = batch.query[: span.query].double(), batch.key[: span.query].double()
    heads = torch.arange(batch.case.num_heads) // (batch.case.num_heads // batch.case.num_kv_heads)
    return torch.einsum("qhd,khd->hqk", query, key[:, heads]) * batch.scale


@pytest.mark.parametrize(("family", "size"), [("normal", 1.0), ("peaky", 4.0), ("coded", 4.0)])
def test_families_differ_in_the_size_of_their_logits(family, size):
    batch = build(Case(family=family, batch="exact_page", block_size=64))
    assert logits(batch).std().item() == pytest.approx(size, rel=0.2)


def test_coded_values_tell_their_position():
    batch = build(Case(family="coded", batch="prefill"))
    span = batch.case.spans[1]
    rows = batch.value[batch.case.spans[0].query :][: span.query]
    assert rows.abs()[:, 0, 0].tolist() == [1.0 + j % 7 for j in range(span.query)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cap", [2.0, 30.0])
def test_logits_reach_the_soft_cap(family, cap):
    batch = build(Case(family=family, logits_soft_cap=cap, batch="exact_page"))
    assert logits(batch).abs().max() > cap


@pytest.mark.parametrize("family", FAMILIES)
def test_sinks_lie_near_the_rows_lse(family):
    batch = build(Case(family=family, sinks=True, batch="exact_page"))
    _, lse = reference_attention(batch.query, *batch.keys_and_values(), *batch.starts(), scale=batch.scale)
    assert (lse.mean(0) - batch.sinks).abs().max() < 2.0
    share = (batch.sinks - torch.logaddexp(lse.double(), batch.sinks.double())).exp()
    assert 0.1 < share.mean() < 0.9


@EVERY
def test_every_slot_without_a_token_holds_large_finite_numbers(case):
    batch = build(case)
    if batch.pages is None:
        return
    cross = case.attn_type == "encoder_decoder"
    tables = batch.metadata.cross_block_tables if cross else batch.metadata.block_tables
    free = torch.ones(batch.pages[0].shape[:2], dtype=torch.bool).flatten()
    for row, held in zip(tables.tolist(), batch.held, strict=False):
        free[[row[p // case.block_size] * case.block_size + p % case.block_size for p in range(held)]] = False
    for page in batch.pages:
        flat = page.float().flatten(0, 1).flatten(1)
        assert flat.isfinite().all()
        assert flat[free].abs().min() >= min(POISON, torch.finfo(page.dtype).max) * 0.9
        assert not flat[~free].numel() or flat[~free].abs().max() < 100


def test_block_tables_are_shuffled_end_in_a_spare_block_and_own_their_blocks_alone():
    batch = build(Case(batch="decode", block_size=16))
    rows = [
        row[: -(-n // 16)].tolist() for row, n in zip(batch.metadata.block_tables, batch.metadata.seq_lens, strict=True)
    ]
    owned = [block for row in rows for block in row]
    assert len(set(owned)) == len(owned)
    assert owned != sorted(owned)
    spare = {
        row[-(-int(n) // 16) :][0].item()
        for row, n in zip(batch.metadata.block_tables, batch.metadata.seq_lens, strict=True)
    }
    assert len(spare) == 1
    assert not spare & set(owned)


def test_a_prefix_hit_shares_a_page_and_skips_a_token_that_is_there():
    batch = build(Case(batch="prefix_hit"))
    assert len(set(batch.metadata.block_tables[:, 0].tolist())) == 1
    assert batch.metadata.slot_mapping[0] == -1
    held = read_pages(batch.pages[0], batch.metadata.block_tables[0], int(batch.metadata.context_lens[0]) + 1)
    assert torch.equal(held[-1], batch.key[0])


@pytest.mark.parametrize("kind", KINDS)
def test_padded_batches_have_rows_and_sequences_of_nobody(kind):
    batch = build(Case(batch="padded", attn_type=kind))
    assert len(batch.query) - batch.num_tokens == PAD_ROWS
    assert batch.metadata.seq_lens[-PAD_SEQUENCES:].tolist() == [0] * PAD_SEQUENCES
    expected = batch.expected()
    assert expected.output[-PAD_ROWS:].abs().sum() == 0
    expected.judge(expected.yardsticks[0], torch.cat([expected.yardstick_lses[0], torch.full((PAD_ROWS, 4), math.nan)]))


def test_cross_attention_keeps_its_keys_apart_from_the_decoders_pages():
    batch = build(Case(batch="mixed", attn_type="encoder_decoder"))
    assert batch.key is batch.value is None
    assert 0 in batch.metadata.encoder_seq_lens.tolist()
    own, cross = (set(t.flatten().tolist()) for t in (batch.metadata.block_tables, batch.metadata.cross_block_tables))
    assert len(own & cross) == 1  # the spare block


def test_fp8_scales_are_exact_in_every_dtype():
    for scale in itertools.chain(*CACHE_SCALES):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert torch.tensor(scale, dtype=dtype).item() == scale
    seen = {(b.k_scale, b.v_scale) for s in range(12) for b in [build(Case(kv_cache_dtype="fp8", seed=s))]}
    assert seen == set(CACHE_SCALES)


def test_a_quantised_cache_is_judged_on_what_it_holds():
    batch = build(Case(kv_cache_dtype="fp8", batch="prefill"))
    key, value = batch.keys_and_values()
    assert not torch.equal(key.float(), batch.key)
    slots = batch.metadata.slot_mapping
    stored = [page.float().flatten(0, 1)[slots] for page in batch.pages_after()]
    assert torch.equal(key, dequantise(stored[0], batch.k_scale))
    assert torch.equal(value, dequantise(stored[1], batch.v_scale))


@pytest.mark.parametrize("backend", [Plain, HeadsFirst])
@pytest.mark.parametrize("word", WORDS)
def test_a_cache_of_any_layout_is_filled_alike(backend, word):
    batch = build(Case(batch="mixed", kv_cache_dtype=word))
    cache = batch.fill(backend)
    for view, page in zip(backend.kv_views(cache), batch.pages, strict=True):
        assert view.dtype == page.dtype
        assert torch.equal(view.float(), page.float())


def test_two_tensors_where_head_sizes_differ_and_none_without_a_cache():
    keys, values = build(Case(head_size_v=48)).fill(Plain)
    assert (keys.shape[-1], values.shape[-1]) == (64, 48)
    assert build(Case(attn_type="encoder_only", batch="ragged")).fill(Plain).numel() == 0


@pytest.mark.parametrize("batch_kind", ["mixed", "prefix_hit", "decode", "prefill"])
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("kind", ["decoder", "encoder_decoder"])
def test_an_opaque_cache_is_filled_by_a_forward_call(batch_kind, word, kind):
    case = Case(batch=batch_kind, kv_cache_dtype=word, attn_type=kind)
    if not legal(case):
        case = replace(case, batch="mixed")
    batch = build(case)
    cache = batch.fill(Opaque, Recorder(batch))
    tables = batch.metadata.cross_block_tables if kind == "encoder_decoder" else batch.metadata.block_tables
    for view, page in zip(nhd_views(cache), batch.pages, strict=True):
        for table, held in zip(tables, batch.held, strict=True):
            found, right = (read_pages(as_bytes(x), table, held) for x in (view, page))
            assert torch.equal(found, right)
    with pytest.raises(BadInputError, match="give fill an impl"):
        batch.fill(Opaque)


def test_a_batch_moves_to_a_device_whole():
    batch = build(Case(sinks=True, alibi=True))
    moved = batch.on("meta")
    assert {t.device.type for t in (moved.query, moved.key, moved.value, moved.sinks, moved.alibi_slopes)} == {"meta"}
    assert moved.metadata.slot_mapping.device.type == "meta"
    assert batch.query.device.type == "cpu"


def test_a_negative_slot_writes_nothing():
    page = torch.zeros(4, 16, 1, 1)
    after = written(page, torch.tensor([0, -1]), torch.tensor([5.0, 9.0]).reshape(2, 1, 1))
    assert after[0, 0].item() == 5.0
    assert after.count_nonzero() == 1
    assert page.count_nonzero() == 0


def test_repeats_of_a_slot_are_written_once():
    assert without_repeats([3, 4, 3, 5, 4]) == [3, 4, -1, 5, -1]


def test_what_cannot_be_built_is_refused():
    with pytest.raises(BadInputError, match="unknown input family 'odd'"):
        build(Case(family="odd"))
    with pytest.raises(BadInputError, match="'u4' has no rounding rule"):
        build(Case(kv_cache_dtype="u4"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_element_of_a_u8_case_lies_between_two_bytes(dtype):
    """A bf16 element often does; a kernel may round it either way, and then exact bytes could not be asked."""
    batch = build(Case(kv_cache_dtype="u8", dtype=dtype, batch="long"))
    for x in (batch.key, batch.value):
        own, zero = u8_grid(x)
        place = x.double() / own.double() + zero.double()
        assert ((place - place.floor() - 0.5).abs() >= 2**-8).all()


def test_every_case_of_the_covering_array_builds():
    for case in common_array():
        assert build(case).query.shape[1] == case.num_heads
