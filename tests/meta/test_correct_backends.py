"""No false alarm: a correct backend ends every cell as its CAPABILITIES promise, whatever the seed."""

from __future__ import annotations

import pytest

from heedful.registry import load
from meta.judge import failures
from meta.plain import Plain

CORRECT = {"plain": lambda: (Plain, None), "TORCH_SDPA": lambda: (load("TORCH_SDPA"), "TORCH_SDPA")}


def alarms(word, profile, seed=0):
    backend, name = CORRECT[word]()
    return failures(backend, profile, seed, name)


@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("word", CORRECT)
def test_correct_backend_passes_smoke(word, seed):
    assert alarms(word, "smoke", seed) == []


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("word", CORRECT)
def test_correct_backend_passes_ci(word, seed):
    assert alarms(word, "ci", seed) == []


@pytest.mark.nightly
@pytest.mark.parametrize("word", CORRECT)
def test_correct_backend_passes_full(word):
    assert alarms(word, "full") == []
