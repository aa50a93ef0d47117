"""Greedy, temperature, top-p and seeds."""

import pytest
import torch

from heedful.errors import BadInputError
from heedful.runner.sampling import SamplingParams, sample

LOGITS = torch.tensor([0.1, 2.0, 1.5, -3.0]).log_softmax(-1)


def draw(params, times):
    generator = params.generator()
    return [sample(LOGITS[None], [params], [generator])[0] for _ in range(times)]


def test_temperature_zero_takes_the_largest_logit_of_each_row():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert sample(logits, [SamplingParams()] * 2, [None, None]) == [1, 0]


def test_no_rows_give_no_tokens():
    assert sample(torch.empty(0, 5), [], []) == []


def test_one_seed_gives_the_same_tokens_and_another_gives_others():
    assert draw(SamplingParams(1.0, seed=3), 40) == draw(SamplingParams(1.0, seed=3), 40)
    assert draw(SamplingParams(1.0, seed=3), 40) != draw(SamplingParams(1.0, seed=4), 40)


def test_without_a_seed_two_requests_draw_differently():
    assert draw(SamplingParams(1.0), 60) != draw(SamplingParams(1.0), 60)


def test_a_row_draws_the_same_alone_and_beside_others():
    params = SamplingParams(1.0, seed=11)
    alone, beside = params.generator(), params.generator()
    others = SamplingParams(1.0, seed=1).generator()
    for _ in range(20):
        both = sample(LOGITS.repeat(2, 1), [SamplingParams(1.0, seed=1), params], [others, beside])
        assert sample(LOGITS[None], [params], [alone]) == both[1:]


def test_frequencies_follow_the_softmax_at_the_temperature():
    drawn = torch.bincount(torch.tensor(draw(SamplingParams(0.7, seed=0), 4000)), minlength=4) / 4000
    assert torch.allclose(drawn, (LOGITS / 0.7).softmax(-1), atol=0.03)


def test_top_p_draws_only_from_the_smallest_set_that_holds_it():
    probabilities = LOGITS.exp()
    likeliest, second = probabilities.sort(descending=True).values[:2].tolist()
    assert set(draw(SamplingParams(1.0, top_p=likeliest * 0.99, seed=0), 60)) == {1}
    assert set(draw(SamplingParams(1.0, top_p=likeliest + second * 0.5, seed=0), 200)) == {1, 2}
    assert set(draw(SamplingParams(1.0, top_p=1.0, seed=0), 3000)) == {0, 1, 2, 3}


def test_a_tiny_temperature_is_nearly_greedy_and_does_not_overflow():
    assert set(draw(SamplingParams(1e-30, seed=0), 20)) == {1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.01}, "top_p 1.01"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_values_that_mean_nothing_are_refused(arguments, message):
    with pytest.raises(BadInputError, match=message):
        SamplingParams(**arguments)
