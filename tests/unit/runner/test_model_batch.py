"""From chunks to one step's tensors, through the builder of whichever backend runs."""

import pytest
import torch

from heedful.backends.base import AttentionBackend
from heedful.backends.paged import CommonMetadataBuilder
from heedful.errors import MetadataError
from heedful.runner.batch import build_batch
from heedful.runner.scheduler import Chunk, Request


def request(tokens, blocks):
    made = Request(tokens, max_tokens=4)
    made.blocks = blocks
    return made


CHUNKS = [
    Chunk(request([10, 11, 12, 13, 14], [3, 1]), 2, 2, decode=False),
    Chunk(request([20, 21], [0]), 0, 2, decode=False),
    Chunk(request([30, 31, 32, 33, 34], [2, 5]), 4, 1, decode=True),
]


def test_tokens_positions_and_rows_to_sample_follow_the_chunks():
    batch = build_batch(CHUNKS, AttentionBackend, block_size=4)
    assert batch.token_ids.tolist() == [12, 13, 20, 21, 34]
    assert batch.positions.tolist() == [2, 3, 0, 1, 4]
    assert batch.sample_rows.tolist() == [3, 4]


def test_the_metadata_says_where_each_token_lies_in_the_cache():
    metadata = build_batch(CHUNKS, AttentionBackend, block_size=4).attn_metadata
    assert (metadata.num_prefills, metadata.num_decodes) == (2, 1)
    assert metadata.query_start_loc.tolist() == [0, 2, 4, 5]
    assert metadata.context_lens.tolist() == [2, 0, 4]
    assert metadata.seq_lens.tolist() == [4, 2, 5]
    assert metadata.slot_mapping.tolist() == [14, 15, 0, 1, 20]
    assert metadata.block_tables.tolist() == [[3, 1], [0, 0], [2, 5]]
    assert metadata.slot_mapping.dtype == torch.int64


def test_without_blocks_nothing_is_written():
    metadata = build_batch([Chunk(request([1, 2], []), 0, 2, decode=False)], AttentionBackend, 4).attn_metadata
    assert metadata.slot_mapping.tolist() == [-1, -1]


def test_a_backend_with_its_own_builder_gets_it():
    class Builder(CommonMetadataBuilder):
        built = 0

        def build(self, **options):
            Builder.built += 1
            return super().build(**options)

    class Backend(AttentionBackend):
        get_builder_cls = staticmethod(lambda: Builder)

    build_batch(CHUNKS, Backend, block_size=4)
    assert Builder.built == 1


def test_a_decode_before_a_prefill_is_an_error():
    with pytest.raises(MetadataError, match="prefill was added after a decode"):
        build_batch(CHUNKS[::-1], AttentionBackend, block_size=4)


def test_a_chunk_past_the_known_tokens_is_an_error():
    with pytest.raises(MetadataError, match="ends at token 3 of a request that has 2"):
        build_batch([Chunk(request([1, 2], [0]), 1, 2, decode=True)], AttentionBackend, block_size=4)
