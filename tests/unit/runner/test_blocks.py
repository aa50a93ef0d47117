"""BlockPool against what a cache needs: nothing handed out twice, nothing lost, only computed blocks shared."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.errors import BadInputError
from heedful.runner.blocks import BlockPool, chain_keys


def test_a_key_depends_on_every_token_before_it():
    one = chain_keys([1, 2, 3, 4, 5, 6], 2)
    other = chain_keys([9, 2, 3, 4, 5, 6], 2)
    assert len(one) == 3
    assert not set(one) & set(other)


def test_only_full_blocks_have_keys_and_known_keys_are_continued():
    first = chain_keys([1, 2, 3, 4, 5], 2)
    assert len(first) == 2
    assert chain_keys([1, 2, 3, 4, 5, 6, 7], 2, first) == chain_keys([1, 2, 3, 4, 5, 6, 7], 2)


def test_allocate_gives_none_and_takes_nothing_when_there_are_not_enough():
    pool = BlockPool(3, 4)
    held = pool.allocate(2)
    assert held is not None
    assert len(set(held)) == 2
    assert pool.allocate(2) is None
    assert pool.num_free == 1


def test_a_published_block_is_shared_and_is_free_again_only_after_its_last_holder():
    pool = BlockPool(2, 2)
    (block,) = pool.allocate(1)
    keys = chain_keys([5, 6], 2)
    pool.publish(block, keys[0])
    assert pool.share(keys) == [block]
    assert pool.holders(block) == 2
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2


def test_a_block_that_is_not_published_is_never_shared():
    pool = BlockPool(2, 2)
    pool.allocate(1)
    assert pool.share(chain_keys([5, 6], 2)) == []


def test_content_outlives_its_holders_until_the_space_is_needed():
    pool = BlockPool(2, 2)
    keys = chain_keys([5, 6], 2)
    (block,) = pool.allocate(1)
    pool.publish(block, keys[0])
    pool.release([block])
    assert pool.share(keys) == [block]
    pool.release([block])
    assert sorted(pool.allocate(2)) == [0, 1]
    assert pool.share(keys) == []


def test_blocks_without_content_are_reused_first_and_the_end_of_a_chain_before_its_start():
    pool = BlockPool(3, 2)
    chain = pool.allocate(2)
    keys = chain_keys([1, 2, 3, 4], 2)
    for block, key in zip(chain, keys, strict=True):
        pool.publish(block, key)
    (empty,) = pool.allocate(1)
    pool.release(chain)
    pool.release([empty])
    assert pool.allocate(2) == [empty, chain[1]]
    assert pool.share(keys) == [chain[0]]


def test_a_chain_is_shared_only_up_to_its_first_gap():
    pool = BlockPool(3, 1)
    blocks = pool.allocate(3)
    keys = chain_keys([1, 2, 3], 1)
    pool.publish(blocks[0], keys[0])
    pool.publish(blocks[2], keys[2])
    assert pool.share(keys) == [blocks[0]]


def test_of_two_blocks_with_one_content_the_first_stays_known():
    pool = BlockPool(2, 2)
    first, second = pool.allocate(2)
    keys = chain_keys([7, 8], 2)
    pool.publish(first, keys[0])
    pool.publish(second, keys[0])
    pool.release([second])
    assert pool.share(keys) == [first]


def test_releasing_what_nobody_holds_is_an_error():
    pool = BlockPool(2, 2)
    with pytest.raises(BadInputError, match="block 1 is released but nobody holds it"):
        pool.release([1])


@pytest.mark.parametrize(("blocks", "size"), [(0, 16), (4, 0)])
def test_a_pool_that_holds_nothing_is_refused(blocks, size):
    with pytest.raises(BadInputError, match="holds nothing"):
        BlockPool(blocks, size)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 1), min_size=1, max_size=6)), max_size=40))
def test_any_order_of_sharing_allocating_and_releasing_keeps_the_counts_true(steps):
    """Holders are counted by the test itself; a block with a holder is never handed out as fresh."""
    pool = BlockPool(8, 1)
    held: list[list[int]] = []
    for releases, tokens in steps:
        if releases and held:
            pool.release(held.pop(0))
        keys = chain_keys(tokens, 1)
        shared = pool.share(keys)
        fresh = pool.allocate(len(tokens) - len(shared))
        if fresh is None:
            pool.release(shared)
        else:
            assert not set(fresh) & {block for blocks in held for block in blocks}
            for block, key in zip(fresh, keys[len(shared) :], strict=True):
                pool.publish(block, key)
            held.append(shared + fresh)
        counts = Counter(block for blocks in held for block in blocks)
        assert [pool.holders(block) for block in range(8)] == [counts[block] for block in range(8)]
        assert pool.num_free == 8 - len(counts)
