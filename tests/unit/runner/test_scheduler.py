"""Scheduler alone, with an imaginary model: each sampled token is the number of tokens known so far."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.errors import BadInputError
from heedful.runner.blocks import BlockPool
from heedful.runner.scheduler import Chunk, Request, Scheduler


def make(num_blocks=16, block_size=4, max_num_seqs=4, token_budget=8, share_prefixes=True):
    return Scheduler(BlockPool(num_blocks, block_size), max_num_seqs, token_budget, share_prefixes)


def step(scheduler):
    chunks = scheduler.schedule()
    scheduler.complete(chunks, [len(c.request.tokens) for c in chunks if c.samples])
    return chunks


def shapes(chunks):
    return [(c.start, c.count, c.decode) for c in chunks]


def run(scheduler, limit=500):
    """Finish requests at max_tokens, as an engine does; every step that ran."""
    steps = []
    while scheduler.running or scheduler.waiting:
        assert len(steps) < limit, "no end in sight"
        chunks = step(scheduler)
        assert chunks, "a step without work would never end"
        steps.append(chunks)
        for request in [c.request for c in chunks if len(c.request.new_tokens) >= c.request.max_tokens]:
            scheduler.finish(request)
    return steps


def test_a_long_prompt_is_prefilled_in_chunks_and_only_the_last_one_samples():
    scheduler = make(token_budget=8)
    request = Request(list(range(19)), max_tokens=2)
    scheduler.add(request)
    first, second, third = (step(scheduler) for _ in range(3))
    assert shapes(first) == [(0, 8, False)]
    assert shapes(second) == [(8, 8, False)]
    assert shapes(third) == [(16, 3, False)]
    assert [c.samples for chunks in (first, second) for c in chunks] == [False, False]
    assert request.new_tokens == [19]
    assert shapes(step(scheduler)) == [(19, 1, True)]
    assert scheduler.stats.partial_chunks == 2


def test_a_last_chunk_of_one_token_is_still_a_prefill():
    scheduler = make(token_budget=8)
    scheduler.add(Request(list(range(9)), max_tokens=2))
    step(scheduler)
    assert shapes(step(scheduler)) == [(8, 1, False)]


def test_decodes_are_served_before_prefills_but_stand_after_them_in_the_batch():
    scheduler = make(token_budget=8)
    scheduler.add(Request([1, 2, 3], max_tokens=9))
    step(scheduler)
    scheduler.add(Request(list(range(20)), max_tokens=9))
    assert shapes(step(scheduler)) == [(0, 7, False), (3, 1, True)]
    assert scheduler.stats.mixed_steps == 1


def test_requests_join_and_leave_between_steps():
    scheduler = make(max_num_seqs=2)
    first, second, third = (Request([n, n, n], max_tokens=5) for n in (1, 2, 3))
    for request in (first, second, third):
        scheduler.add(request)
    assert [c.request for c in step(scheduler)] == [first, second]
    scheduler.finish(first)
    assert {c.request for c in step(scheduler)} == {second, third}


def test_a_prefix_that_is_computed_is_shared_and_not_computed_again():
    scheduler = make()
    prefix = [7] * 8
    first = Request([*prefix, 1], max_tokens=3)
    second = Request([*prefix, 2, 3], max_tokens=3)
    scheduler.add(first)
    while not first.new_tokens:
        step(scheduler)
    scheduler.add(second)
    chunks = step(scheduler)
    assert shapes(chunks) == [(8, 2, False), (9, 1, True)]
    assert second.blocks[:2] == first.blocks[:2]
    assert [scheduler.pool.holders(block) for block in second.blocks] == [2, 2, 1]
    assert second.shared == scheduler.stats.shared_tokens == 8


def test_the_last_token_is_computed_even_when_the_whole_prompt_is_in_the_cache():
    scheduler = make()
    first = Request([7] * 8, max_tokens=3)
    scheduler.add(first)
    step(scheduler)
    scheduler.add(Request([7] * 8, max_tokens=3))
    assert shapes(step(scheduler))[0] == (4, 4, False)


def test_a_shared_block_is_never_written():
    scheduler = make(num_blocks=32)
    for n in range(4):
        scheduler.add(Request([5] * 9 + [n], max_tokens=6))
    while scheduler.running or scheduler.waiting:
        chunks = scheduler.schedule()
        for c in chunks:
            written = {c.request.blocks[p // 4] for p in range(c.start, c.start + c.count)}
            assert all(scheduler.pool.holders(block) == 1 for block in written)
        scheduler.complete(chunks, [0 for c in chunks if c.samples])
        for request in [c.request for c in chunks if len(c.request.new_tokens) >= c.request.max_tokens]:
            scheduler.finish(request)
    assert scheduler.stats.shared_tokens > 0


def test_blocks_whose_tokens_are_not_computed_yet_are_not_shared():
    scheduler = make(token_budget=8)
    scheduler.add(Request([7] * 14, max_tokens=3))
    step(scheduler)
    second = Request([7] * 14, max_tokens=3)
    scheduler.add(second)
    assert shapes(step(scheduler)) == [(8, 6, False), (8, 2, False)]
    assert second.shared == 8


def test_without_sharing_every_prompt_is_computed():
    scheduler = make(share_prefixes=False)
    scheduler.add(Request([7] * 8, max_tokens=1))
    run(scheduler)
    scheduler.add(Request([7] * 8, max_tokens=1))
    assert shapes(step(scheduler)) == [(0, 8, False)]


def test_when_blocks_run_out_the_newest_request_waits_and_loses_no_token():
    scheduler = make(num_blocks=4, block_size=2, token_budget=8, share_prefixes=False)
    old, new = Request([1, 2], max_tokens=6), Request([3, 4], max_tokens=6)
    scheduler.add(old)
    scheduler.add(new)
    while not new.preemptions:
        step(scheduler)
    kept = list(new.tokens)
    assert list(scheduler.waiting) == [new]
    assert new.blocks == []
    assert not old.preemptions
    run(scheduler)
    assert new.tokens[: len(kept)] == kept
    assert len(new.new_tokens) == len(old.new_tokens) == 6
    assert scheduler.stats.preemptions == new.preemptions
    assert scheduler.pool.num_free == 4


def test_a_request_that_waits_for_blocks_is_admitted_once_they_are_free():
    scheduler = make(num_blocks=4, block_size=4, token_budget=16)
    first, second = Request([1] * 9, max_tokens=2), Request([2] * 9, max_tokens=2)
    scheduler.add(first)
    scheduler.add(second)
    assert [c.request for c in step(scheduler)] == [first]
    scheduler.finish(first)
    assert [c.request for c in step(scheduler)] == [second]


def test_preempted_requests_come_back_in_order_before_those_that_never_ran():
    scheduler = make(num_blocks=6, block_size=2, max_num_seqs=3, share_prefixes=False)
    first, second, third, late = (Request([n, n], max_tokens=8) for n in range(4))
    for request in (first, second, third, late):
        scheduler.add(request)
    while not second.preemptions:
        step(scheduler)
    assert list(scheduler.waiting) == [second, third, late]


def test_a_waiting_request_leaves_each_running_one_its_next_block():
    scheduler = make(num_blocks=5, block_size=4, token_budget=16)
    running, waiting = Request([1] * 9, max_tokens=6), Request([2] * 8, max_tokens=4)
    scheduler.add(running)
    step(scheduler)
    scheduler.add(waiting)
    assert [c.request for c in step(scheduler)] == [running]
    assert run(scheduler)
    assert scheduler.stats.preemptions == 0


def test_a_request_that_could_never_fit_is_refused_with_what_to_do():
    scheduler = make(num_blocks=2, block_size=4)
    with pytest.raises(
        BadInputError, match=r"prompt of 5 tokens with max_tokens 5 needs 3 cache blocks .* has 2; shorten"
    ):
        scheduler.add(Request([1] * 5, max_tokens=5))
    scheduler.add(Request([1] * 5, max_tokens=4))


def test_a_budget_below_one_token_a_sequence_is_refused():
    with pytest.raises(BadInputError, match="raise max_num_batched_tokens or lower max_num_seqs"):
        make(max_num_seqs=9, token_budget=8)


def test_finishing_a_waiting_request_takes_it_out_of_the_queue():
    scheduler = make(max_num_seqs=1)
    first, second = Request([1], max_tokens=2), Request([2], max_tokens=2)
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    scheduler.finish(second)
    assert not scheduler.waiting
    assert scheduler.running == [first]


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=8),
    max_tokens=st.integers(1, 8),
    num_blocks=st.integers(7, 14),
    token_budget=st.integers(3, 9),
    share_prefixes=st.booleans(),
)
def test_every_request_gets_all_its_tokens_whatever_the_pressure(
    prompts, max_tokens, num_blocks, token_budget, share_prefixes
):
    """Each token is computed exactly once after each admission, steps keep the budget, and all blocks come back."""
    scheduler = make(num_blocks, 3, 3, token_budget, share_prefixes)
    requests = [Request(list(prompt), max_tokens) for prompt in prompts]
    for request in requests:
        scheduler.add(request)
    for chunks in run(scheduler):
        assert sum(c.count for c in chunks) <= token_budget
        assert [c.decode for c in chunks] == sorted(c.decode for c in chunks)
        assert len({c.request for c in chunks}) == len(chunks) <= 3
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.tokens == prompt + list(range(len(prompt), len(prompt) + max_tokens))
    assert scheduler.pool.num_free == num_blocks


def test_a_chunk_samples_only_at_the_last_known_token():
    request = Request([1, 2, 3], max_tokens=1)
    assert not Chunk(request, 0, 2, decode=False).samples
    assert Chunk(request, 2, 1, decode=False).samples
