"""Engine over a tiny model: whatever the batching, greedy tokens are those of the dense model."""

from dataclasses import replace

import pytest

from heedful.errors import BadInputError
from heedful.runner import Engine, ModelRunner, RunnerOptions, SamplingParams
from runner.tiny import CONFIG, checkpoint, greedy, prompts

ROOMY = RunnerOptions(num_blocks=64, block_size=4)
TEN = SamplingParams(max_tokens=10)


def engine(options=ROOMY, config=CONFIG, eos=()):
    return Engine(ModelRunner(checkpoint(config, eos=eos), options))


def answers(made, asked, params=TEN):
    requests = [made.add(prompt, params) for prompt in asked]
    made.run()
    return [request.new_tokens for request in requests]


def expected(asked, config=CONFIG):
    return [greedy(prompt, 10, config) for prompt in asked]


def test_a_batch_gives_the_tokens_of_the_dense_model():
    asked = prompts(5)
    assert answers(engine(), asked) == expected(asked)


def test_chunked_prefill_gives_the_same_tokens():
    asked = prompts(5)
    made = engine(replace(ROOMY, max_num_batched_tokens=5, max_num_seqs=3))
    assert answers(made, asked) == expected(asked)
    assert made.stats.partial_chunks >= 5
    assert made.stats.mixed_steps > 0
    assert made.stats.largest_step <= 5


def test_a_shared_prefix_gives_the_same_tokens_from_fewer_blocks():
    asked = prompts(4, prefix=range(1, 18))
    made = engine()
    first = made.add(asked[0], TEN)
    made.step()
    others = [made.add(prompt, TEN) for prompt in asked[1:]]
    made.step()
    assert [made.pool.holders(block) for block in first.blocks[:4]] == [4] * 4
    made.run()
    assert [request.new_tokens for request in (first, *others)] == expected(asked)
    assert [request.shared for request in (first, *others)] == [0, 16, 16, 16]


def test_a_second_turn_finds_the_first_answer_in_the_cache():
    made = engine()
    (prompt,) = prompts(1)
    first = made.add(prompt, TEN)
    made.run()
    turn = [*first.tokens, 3, 4]
    second = made.add(turn, TEN)
    made.run()
    assert second.shared == (len(first.tokens) - 1) // 4 * 4
    assert second.new_tokens == greedy(turn, 10)


def test_a_sliding_window_gives_the_same_tokens_in_chunks_and_decodes():
    config = replace(CONFIG, sliding_window=6)
    asked = prompts(3)
    made = engine(replace(ROOMY, max_num_batched_tokens=7, max_num_seqs=3), config)
    assert answers(made, asked) == expected(asked, config)


def test_running_out_of_blocks_costs_time_and_no_token():
    asked = prompts(4)
    made = engine(replace(ROOMY, num_blocks=12))
    assert answers(made, asked) == expected(asked)
    assert made.stats.preemptions > 0
    assert made.pool.num_free == 12


def test_requests_that_join_later_change_nothing():
    asked = prompts(3)
    made = engine()
    requests = []
    for prompt in asked:
        requests.append(made.add(prompt, TEN))
        made.step()
        made.step()
    made.run()
    assert [request.new_tokens for request in requests] == expected(asked)


def test_each_token_is_told_once_in_order_as_it_comes():
    made = engine()
    heard = []
    (prompt,) = prompts(1)
    request = made.add(prompt, TEN, lambda request, token: heard.append((token, len(request.new_tokens))))
    made.run()
    assert heard == [(token, i + 1) for i, token in enumerate(request.new_tokens)]


def test_a_request_ends_at_an_end_token_which_is_its_last():
    (prompt,) = prompts(1)
    tokens = greedy(prompt, 10)
    end = tokens[4]
    stop = tokens.index(end)
    request = (made := engine(eos=[end])).add(prompt, TEN)
    made.run()
    assert request.new_tokens == tokens[: stop + 1]
    assert request.finish_reason == "stop"


def test_end_tokens_can_be_ignored():
    (prompt,) = prompts(1)
    tokens = greedy(prompt, 10)
    request = (made := engine(eos=tokens)).add(prompt, replace(TEN, ignore_eos=True))
    made.run()
    assert request.new_tokens == tokens
    assert request.finish_reason == "length"


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch():
    asked = prompts(4)
    drawn = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=10)
    alone = [answers(engine(), [prompt], drawn)[0] for prompt in asked]
    assert answers(engine(), asked, drawn) == alone
    assert alone != expected(asked)


def test_an_aborted_request_frees_its_blocks_and_is_told_no_more():
    made = engine()
    heard = []
    asked = prompts(2)
    doomed = made.add(asked[0], TEN, lambda request, token: heard.append(token))
    other = made.add(asked[1], TEN, lambda request, token: made.abort(doomed))
    made.run()
    assert doomed.finish_reason == "aborted"
    assert len(heard) == len(doomed.new_tokens) == 1
    assert other.new_tokens == expected(asked)[1]
    assert made.pool.num_free == 64
    made.abort(doomed)
    assert doomed.finish_reason == "aborted"


def test_a_listener_may_add_the_next_request():
    made = engine()
    asked = prompts(2)
    added = []
    made.add(asked[0], replace(TEN, max_tokens=1), lambda request, token: added.append(made.add(asked[1], TEN)))
    made.run()
    assert added[0].new_tokens == expected(asked)[1]


def test_step_says_who_got_a_token_and_nothing_when_there_is_no_work():
    made = engine(replace(ROOMY, max_num_batched_tokens=16))
    request = made.add(list(range(1, 30)), TEN)
    assert [made.step(), made.step()] == [[], [request]]
    made.run()
    assert made.step() == []


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 5, "prompt has no tokens"),
        ([1, 61], 5, "token id 61 is outside the vocabulary of 61"),
        ([1, -1], 5, "token id -1 is outside"),
        ([1] * 100, 29, "passes the model's 128 positions"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused(prompt, max_tokens, message):
    with pytest.raises(BadInputError, match=message):
        engine().add(prompt, SamplingParams(max_tokens=max_tokens))
