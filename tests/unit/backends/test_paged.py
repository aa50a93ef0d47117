"""The paged cache: what is written where, and what a step's metadata may say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from heedful.backends.paged import (
    CommonMetadataBuilder,
    cache_dtype,
    hnd_views,
    nhd_views,
    store,
    validate_metadata,
    write_cache,
)
from heedful.errors import BadInputError, MetadataError
from heedful.types import PAD_SLOT_ID

NUM_BLOCKS, BLOCK_SIZE = 8, 4


def batch(**pads):
    """A chunk of 6 after 3, a fresh prefill of 2, a decode after 8; tables [5, 2, 7], [0], [1, 4, 6]."""
    builder = CommonMetadataBuilder(BLOCK_SIZE)
    builder.add(6, 3, [5, 2, 7])
    builder.add(2, 0, [0])
    builder.add(1, 8, [1, 4, 6], decode=True)
    return builder.build(**pads)


def check(metadata, rows=None, kind="decoder", keys="same"):
    rows = len(metadata.slot_mapping) if rows is None else rows
    return validate_metadata(metadata, kind, rows, rows if keys == "same" else keys, NUM_BLOCKS, BLOCK_SIZE)


# The builder ----------------------------------------------------------------------------------------------------------


def test_the_builder_says_what_a_step_is():
    m = batch(pad_sequences=4, pad_tokens=12)
    assert (m.num_prefills, m.num_decodes, m.num_prefill_tokens, m.num_decode_tokens) == (2, 1, 8, 1)
    assert m.query_start_loc.tolist() == [0, 6, 8, 9, 9]
    assert m.seq_lens.tolist() == [9, 2, 9, 0]
    assert m.context_lens.tolist() == [3, 0, 8, 0]
    assert m.block_tables.tolist() == [[5, 2, 7], [0, 0, 0], [1, 4, 6], [0, 0, 0]]
    assert m.slot_mapping.tolist() == [23, 8, 9, 10, 11, 28, 0, 1, 24, -1, -1, -1]
    assert (m.max_query_len, m.max_seq_len) == (6, 9)
    assert m.encoder_seq_lens is None
    check(m)


@pytest.mark.parametrize(
    ("length", "pages", "last"), [(1, 1, 1), (15, 1, 15), (16, 1, 16), (17, 2, 1), (32, 2, 16), (33, 3, 1)]
)
def test_a_sequence_ends_in_its_last_page(length, pages, last):
    builder = CommonMetadataBuilder(16)
    builder.add(length, 0, list(range(pages)))
    slots = builder.build().slot_mapping.tolist()
    assert slots[-1] == (pages - 1) * 16 + last - 1
    short = CommonMetadataBuilder(16)
    short.add(length, 0, list(range(pages - 1)) or [])
    if pages > 1:
        with pytest.raises(MetadataError, match="allocate one more"):
            short.build()


def test_tokens_that_are_in_the_cache_already_get_no_slot():
    builder = CommonMetadataBuilder(4)
    builder.add(3, 4, [0, 1], first_written=6)
    assert builder.build().slot_mapping.tolist() == [PAD_SLOT_ID, PAD_SLOT_ID, 6]


def test_a_prefill_after_a_decode_is_an_error():
    builder = CommonMetadataBuilder(4)
    builder.add(1, 4, [0, 1], decode=True)
    with pytest.raises(MetadataError, match="prefills, then all decodes"):
        builder.add(4, 0, [2])


def test_the_encoders_tokens_are_written_once():
    builder = CommonMetadataBuilder(4)
    builder.add(2, 0, [0], encoder_len=5, cross_blocks=[3, 1])
    builder.add(1, 4, [2, 5], decode=True, encoder_len=3, cross_blocks=[4])
    m = builder.build()
    assert m.encoder_seq_lens.tolist() == [5, 3]
    assert (m.num_encoder_tokens, m.max_encoder_seq_len) == (5, 5)
    assert m.cross_slot_mapping.tolist() == [12, 13, 14, 15, 4]
    check(m, kind="encoder_decoder", keys=5)
    check(m, kind="encoder_decoder", keys=None)
    assert check(m, rows=5, kind="encoder").key_lens == (5,)


# Validation -----------------------------------------------------------------------------------------------------------


def put(tensor, at, value):
    found = tensor.clone()
    found[at] = value
    return found


@pytest.mark.parametrize(
    ("field", "change", "text"),
    [
        (
            "block_tables",
            lambda t: put(t, (2, 1), 8),
            r"^sequence 2: block_tables\[1\] is block 8, outside the cache of 8",
        ),
        ("block_tables", lambda t: put(t, (0, 0), -1), r"^sequence 0: block_tables\[0\] is block -1"),
        ("block_tables", lambda t: put(t, (2, 2), 1), "^sequence 2: block_tables names block 1 twice"),
        (
            "block_tables",
            lambda t: t[:, :2],
            "^sequence 0: block_tables has 2 entries, but 9 keys in blocks of 4 need 3",
        ),
        ("block_tables", lambda t: t[:2], "block_tables has 2 rows"),
        ("block_tables", lambda t: t.long(), "block_tables is torch.int64"),
        ("slot_mapping", lambda t: put(t, 6, 2), "^sequence 1: row 6 has slot 2, but its block table puts"),
        ("slot_mapping", lambda t: put(t, 8, 10**9), "^sequence 2: row 8 has slot 1000000000"),
        ("slot_mapping", lambda t: put(t, 7, 0), "^sequence 1: row 7 has slot 0"),
        ("slot_mapping", lambda t: put(t, 9, 3), "row 9 is padding, but it has slot 3"),
        ("slot_mapping", lambda t: t.int(), "slot_mapping is torch.int32"),
        ("slot_mapping", lambda t: t[:-1], "slot_mapping has 9 entries, but key has 10 rows"),
        ("seq_lens", lambda t: put(t, 1, 3), r"^sequence 1: seq_len 3 is not context_len 0 \+ query_len 2"),
        ("seq_lens", lambda t: t.long(), "seq_lens is torch.int64"),
        ("seq_lens", lambda t: None, "seq_lens is None"),
        ("seq_lens", lambda t: t.tolist(), r"seq_lens is \[9, 2, 9\]; it must be int32"),
        ("context_lens", lambda t: put(t, 0, -1), "^sequence 0: seq_len 9 and context_len -1"),
        ("query_start_loc", lambda t: put(t, 2, 5), "^sequence 1: query_start_loc falls from 6 to 5"),
        ("query_start_loc", lambda t: put(t, 0, 1), "begins at 1"),
        ("query_start_loc", lambda t: t[:-1], "query_start_loc has 3 rows"),
        ("seq_lens", lambda t: t.to("meta"), "seq_lens is torch.strided on meta; give a dense tensor"),
        ("block_tables", lambda t: t.to("meta"), "block_tables is torch.strided on meta"),
        ("slot_mapping", lambda t: t.to_sparse(), "slot_mapping is torch.sparse_coo on cpu"),
        ("num_prefills", lambda n: None, "num_prefills is None; give a whole number"),
        ("num_prefills", lambda n: float(n), "num_prefills is 2.0; give a whole number"),
        ("num_decode_tokens", lambda n: str(n), "num_decode_tokens is '1'; give"),
        ("max_query_len", lambda n: torch.tensor(9, device="meta"), "max_query_len is tensor"),
        ("max_encoder_seq_len", lambda n: "5", "max_encoder_seq_len is '5'; give"),
        ("num_prefills", lambda n: n + 1, "num_prefills 3 and num_decodes 1, but there are 3 sequences"),
        ("num_decodes", lambda n: n - 1, "^sequence 2: seq_len 9 past the num_prefills 2"),
        ("num_prefill_tokens", lambda n: n - 1, "num_prefill_tokens is 7, but query_start_loc gives 8"),
        ("num_decode_tokens", lambda n: n + 1, "num_decode_tokens is 2"),
        ("max_query_len", lambda n: n - 1, "max_query_len is 5"),
        ("max_seq_len", lambda n: n - 1, "max_seq_len is 8"),
    ],
)
def test_metadata_that_does_not_describe_the_batch_names_the_sequence(field, change, text):
    metadata = batch(pad_tokens=10)
    broken = replace(metadata, **{field: change(getattr(metadata, field))})
    with pytest.raises(MetadataError, match=text):
        check(broken, rows=10)


def test_two_sequences_cannot_write_one_slot():
    builder = CommonMetadataBuilder(4)
    builder.add(2, 0, [3])
    builder.add(2, 0, [3])
    with pytest.raises(MetadataError, match=r"^sequence 1: slot 12 is written twice in a step \(again in row 2\)"):
        check(builder.build())


def test_two_sequences_may_read_one_prefix():
    builder = CommonMetadataBuilder(4)
    builder.add(2, 4, [3, 1])
    builder.add(2, 4, [3, 2])
    assert check(builder.build()).key_lens == (6, 6)


def test_spare_table_entries_may_be_anything():
    m = batch()
    wide = torch.cat([m.block_tables, torch.full((3, 2), -7, dtype=torch.int32)], 1)
    wide[1, 1:] = 10**6
    step = check(replace(m, block_tables=wide))
    assert step.tables.tolist() == [[5, 2, 7], [0, 0, 0], [1, 4, 6]]


def test_fewer_rows_than_tokens_is_an_error():
    m = batch()
    with pytest.raises(MetadataError, match="query has 8 rows, but the sequences need 9"):
        check(m, rows=8)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"encoder_seq_lens": None}, "encoder_seq_lens is None"),
        ({"encoder_seq_lens": torch.tensor([5, -3], dtype=torch.int32)}, "sequence 1: encoder_seq_len -3"),
        ({"max_encoder_seq_len": 4}, "max_encoder_seq_len is 4"),
        ({"cross_block_tables": None}, "cross_block_tables is None"),
        ({"cross_block_tables": torch.tensor([[3, 9], [4, 0]], dtype=torch.int32)}, "sequence 0: cross_block_tables"),
        ({"cross_slot_mapping": torch.tensor([12, 13, 14, 15, 5])}, "sequence 0: row 4 has slot 5"),
        ({"cross_slot_mapping": None}, "cross_slot_mapping has None entries"),
    ],
)
def test_cross_metadata_is_checked_too(change, text):
    builder = CommonMetadataBuilder(4)
    builder.add(2, 0, [0], encoder_len=5, cross_blocks=[3, 1])
    builder.add(1, 4, [2, 5], decode=True, encoder_len=3, cross_blocks=[4])
    with pytest.raises(MetadataError, match=text):
        check(replace(builder.build(), **change), kind="encoder_decoder", keys=5)


def test_the_encoders_token_count_must_fit_its_lengths():
    builder = CommonMetadataBuilder(4)
    builder.add(2, encoder_len=5)
    with pytest.raises(MetadataError, match="num_encoder_tokens is 4, but encoder_seq_lens add up to 5"):
        check(replace(builder.build(), num_encoder_tokens=4), rows=5, kind="encoder")


def test_encoder_only_attention_has_neither_context_nor_decodes():
    with pytest.raises(MetadataError, match="sequence 0: context_len 3, but encoder-only attention has no cache"):
        check(batch(), kind="encoder_only")
    builder = CommonMetadataBuilder(4)
    builder.add(1, 0, decode=True)
    with pytest.raises(MetadataError, match="one prefill a sequence"):
        check(builder.build(), kind="encoder_only")


def test_a_step_is_checked_once_and_again_only_when_it_changed():
    m = batch()
    step = check(m)
    assert check(m) is step
    m.slot_mapping[0] = -1
    assert check(m) is not step
    assert check(m).write_blocks.numel() == 8
    other = replace(m, seq_lens=m.seq_lens.clone())
    assert other.step is m.step
    first = check(m)
    assert check(other) is not first


# Writes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("views_of", [hnd_views, nhd_views])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_slots_of_the_step_change(views_of, dtype):
    cache = torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, BLOCK_SIZE, 3).to(dtype)  # as many heads as tokens in a page
    expected = [view.clone() for view in views_of(cache)]
    m = batch(pad_tokens=11)
    m.slot_mapping[1] = -1
    key, value = torch.randn(2, 11, BLOCK_SIZE, 3).to(dtype).unbind(0)
    for row, slot in enumerate(m.slot_mapping.tolist()):
        if slot >= 0:
            for view, x in zip(expected, (key, value), strict=True):
                view[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = x[row]
    write_cache(key, value, views_of(cache), check(m))
    assert all(torch.equal(a, b) for a, b in zip(views_of(cache), expected, strict=True))


def test_a_negative_slot_writes_nothing_anywhere():
    builder = CommonMetadataBuilder(16)
    builder.add(2, 0, [0])
    m = builder.build()
    m.slot_mapping[1] = -1
    cache = torch.zeros(2, 4, 1, 16, 1)
    x = torch.tensor([5.0, 9.0])[:, None, None]
    write_cache(x, x, hnd_views(cache), validate_metadata(m, "decoder", 2, 2, 4, 16))
    assert cache[0].flatten().nonzero().flatten().tolist() == [0]
    assert cache[0].flatten()[0] == 5


@pytest.mark.parametrize("word", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_fp8_clamps_rounds_to_even_and_keeps_nan(word):
    dtype = cache_dtype(word, torch.bfloat16)
    limit = torch.finfo(dtype).max
    x = torch.tensor([1000.0 * limit, -1000.0 * limit, torch.inf, -torch.inf, torch.nan])
    assert store(x, 1.0, dtype).float().tolist()[:4] == [limit, -limit, limit, -limit]
    assert store(x, 1.0, dtype)[4].isnan()
    step = torch.finfo(dtype).eps
    ties = torch.tensor([1 + step / 2, 1 + 3 * step / 2, 1 + 5 * step / 2])
    assert store(ties, 1.0, dtype).float().tolist() == [1.0, 1 + 2 * step, 1 + 2 * step]
    assert store(ties * 0.25, 0.25, dtype).float().tolist() == [1.0, 1 + 2 * step, 1 + 2 * step]


def test_a_cache_has_the_dtype_of_its_word():
    words = {"auto": torch.float16, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
    assert {word: cache_dtype(word, torch.float16) for word in words} == words
    assert cache_dtype("fp8_e5m2", torch.float32) == torch.float8_e5m2
    with pytest.raises(BadInputError, match="'u4'; give auto, u8, fp8"):
        cache_dtype("u4", torch.float32)


def test_every_fp8_value_survives_a_round_trip():
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float()
        finite = values[values.isfinite()]
        assert torch.equal(store(finite, 1.0, dtype).float(), finite)


def test_a_slot_beyond_32_bits_is_written_where_it_belongs():
    block, size = 65536, 16 * 16 * 128
    cache = torch.empty(2, block + 1, 16, 16, 128, dtype=torch.uint8)  # 4 GiB of address space, three pages touched
    views = hnd_views(cache.view(torch.float8_e4m3fn))
    builder = CommonMetadataBuilder(16)
    builder.add(1, 0, [block])
    m = builder.build()
    x = torch.full((1, 16, 128), 2.0)
    write_cache(x, x, views, validate_metadata(m, "decoder", 1, 1, block + 1, 16))
    assert block * size == 2147483648
    assert (views[0][block, 0].float() == 2).all()
    assert (views[0][0, 0].float() == 0).all()


@pytest.mark.parametrize(
    ("cache", "text"), [(torch.zeros(3, 4, 2, 4, 8), "3 parts"), (torch.zeros(2, 4, 8), r"K cache has shape \[4, 8\]")]
)
def test_a_tensor_that_is_no_cache_is_an_error(cache, text):
    with pytest.raises(BadInputError, match=text):
        hnd_views(cache)
