"""What a result may not depend on: threads, batch mates, how work is cut, where tensors lie, who else is calling."""

from __future__ import annotations

import threading

import pytest
import torch
from cpu_problem import BEST_FIRST, BF16, E4M3, EVERY, F16, F32, GARBAGE, MIXED, Problem, bits, kernels, same, using

TYPES = [(F32, None), (BF16, None), (F16, None), (BF16, E4M3), (F32, E4M3)]
LONG = (*MIXED, (3, 9000), (1, 17000))
"""Beside MIXED, a decode of several tokens in many parts and one that is long enough for longer parts."""
LOUD_RULES = {"sliding_window": 700, "logits_soft_cap": 5.0, "sinks": torch.tensor([0.0, -torch.inf, 2.0, 5.0])}


@pytest.mark.parametrize("isa", BEST_FIRST)
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("rules", [{}, LOUD_RULES], ids=["plain", "rules"])
def test_thread_count_does_not_change_a_bit(isa, types, rules):
    lens = LONG if not rules else MIXED
    mixed = Problem(lens=lens, dtype=types[0], cache=types[1], size=32, loud=4.0, rules=rules)
    one = mixed.run(isa)
    for threads in (2, 3):
        assert same(mixed.run(isa, threads=threads), one), threads


@pytest.mark.parametrize("isa", BEST_FIRST)
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_batch_mates_do_not_change_a_bit(isa, types, threads):
    mixed = Problem(lens=LONG, dtype=types[0], cache=types[1], size=32, loud=4.0)
    together = mixed.run(isa, threads=threads)
    for sequence, (begin, end) in enumerate(zip(mixed.starts, mixed.starts[1:], strict=False)):
        alone = mixed.run(isa, only=sequence)
        rows = slice(begin, end)
        assert same([x[rows] for x in alone], [x[rows] for x in together]), mixed.lens[sequence]
        others = torch.cat([alone[0][:begin], alone[0][end:]])
        assert others.isnan().all(), "rows of other sequences were written"


@pytest.mark.parametrize("isa", BEST_FIRST)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1), (5, 5)], ids=str)
@pytest.mark.parametrize("types", [(F32, None), (BF16, None), (BF16, E4M3)], ids=str)
@pytest.mark.parametrize("rules", [{}, {"sliding_window": 150}], ids=["plain", "window"])
def test_how_a_prefill_is_cut_does_not_change_a_bit(isa, heads, types, rules):
    """More threads, shorter units: with three rows a token, blocks of four rows then mix other tokens."""
    long = Problem(
        lens=((1100, 0), (300, 333)),
        dtype=types[0],
        cache=types[1],
        heads=heads[0],
        kv_heads=heads[1],
        size=16,
        loud=4.0,
        rules=rules,
    )
    whole = long.run(isa)
    for threads in (2, 5, 16):
        assert same(long.run(isa, threads=threads), whole), threads


@pytest.mark.parametrize("isa", EVERY)
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_strides_do_not_change_a_bit(isa, types):
    lens = MIXED if isa != "naive" else MIXED[:2]
    mixed = Problem(lens=lens, dtype=types[0], cache=types[1], size=40, size_v=24)
    plain = mixed.run(isa)
    wide = torch.full((mixed.heads + 3, mixed.tokens, 2 * mixed.size), torch.nan, dtype=mixed.dtype)
    query = wide.transpose(0, 1)[:, 2:-1, 7 : 7 + mixed.size]
    query.copy_(mixed.query)
    assert same(mixed.run(isa, query=query), plain)
    for order in ((0, 2, 1), (1, 0, 2), (2, 1, 0)):  # pages, heads and offsets nested in other orders
        assert same(mixed.run(isa, sides=[_laid_out(x, order) for x in (mixed.key_pages, mixed.value_pages)]), plain)


def _laid_out(pages, order):
    """The same pages, dimensions nested in another order, in rows wider than they are."""
    whole = bits(pages).view(*pages.shape[:3], -1)
    memory = torch.full([whole.shape[i] for i in order] + [whole.shape[3] * 2], 0x7F, dtype=torch.uint8)
    view = memory[..., : whole.shape[3]].permute(*(order.index(i) for i in range(3)), 3)
    view.copy_(whole)
    return view.view(pages.dtype)


@pytest.mark.parametrize("isa", EVERY)
def test_output_and_lse_are_written_through_their_strides_and_nowhere_else(isa):
    mixed = Problem(lens=MIXED[:2], size=40)
    call, plain, plain_lse = mixed.call()
    wide, wide_lse = torch.full((mixed.heads, mixed.tokens, 64), 7.0), torch.full((mixed.heads, mixed.tokens), 7.0)
    with using(isa):
        kernels.attend(call)
        call.output, call.o_token, call.o_head = wide.data_ptr(), wide.stride(1), wide.stride(0)
        call.lse, call.lse_token, call.lse_head = wide_lse.data_ptr(), wide_lse.stride(1), wide_lse.stride(0)
        kernels.attend(call)
    assert torch.equal(wide.transpose(0, 1)[..., :40], plain)
    assert torch.equal(wide_lse.T, plain_lse)
    assert (wide[..., 40:] == 7).all()


@pytest.mark.parametrize("isa", EVERY)
def test_without_an_lse_the_output_is_the_same(isa):
    mixed = Problem(lens=MIXED[:4], size=16)
    call, output, _ = mixed.call()
    call.lse = None
    with using(isa):
        kernels.attend(call)
    assert torch.equal(output, mixed.run(isa)[0])


@pytest.mark.parametrize("isa", BEST_FIRST)
def test_unused_table_entries_and_page_tails_are_never_read_into_a_result(isa):
    mixed = Problem(block=24, size=32)
    assert (mixed.tables == GARBAGE).any()
    assert mixed.key_pages.isnan().any()
    first = mixed.run(isa)
    assert not first[0].isnan().any()
    mixed.tables[mixed.tables == GARBAGE] = 2**31 - 1
    for side in (mixed.key_pages, mixed.value_pages):
        side[side.isnan()] = torch.inf
    assert same(mixed.run(isa), first)


@pytest.mark.parametrize("isa", BEST_FIRST)
def test_several_threads_may_call_at_once(isa):
    """One of them has the pool, the others find it busy and run alone: all get the same."""
    problems = [Problem(size=32, seed=seed, lens=(*MIXED, (1, 2000))) for seed in range(4)]
    right = [problem.run(isa) for problem in problems]
    wrong, start = [], threading.Barrier(len(problems))

    def caller(mine):
        start.wait()
        for _ in range(4):
            call, output, lse = problems[mine].call(threads=2)
            kernels.attend(call)
            if not same((output, lse), right[mine]):
                wrong.append(mine)

    with using(isa):
        callers = [threading.Thread(target=caller, args=(mine,)) for mine in range(len(problems))]
        for each in callers:
            each.start()
        for each in callers:
            each.join()
    assert wrong == []
