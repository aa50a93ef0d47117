"""From logits to the next token: greedy, or temperature with top-p and a seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from heedful.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    temperature 0 is greedy. top_p: the smallest set of tokens with at least this probability is drawn from. seed:
    the same seed gives the same tokens whatever else is in the batch; None draws a fresh one. max_tokens: new tokens.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 64
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for broken, message in self._violations():
            if broken:
                raise BadInputError(message)

    def _violations(self) -> tuple[tuple[bool, str], ...]:
        heat, top_p, seed = self.temperature, self.top_p, self.seed
        return (
            (not (math.isfinite(heat) and heat >= 0), f"temperature {heat} must be finite and 0 (greedy) or more"),
            (not 0 < top_p <= 1, f"top_p {top_p} must be above 0 and at most 1"),
            (self.max_tokens < 1, f"max_tokens {self.max_tokens} must be 1 or more"),
            (seed is not None and not 0 <= seed < 2**63, f"seed {seed} must be 0 or more and below 2**63"),
        )

    def generator(self) -> torch.Generator:
        """The request's own source of chance."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]
) -> list[int]:
    """One token id a row of logits [rows, vocab]; a generator is needed where the temperature is above 0."""
    chosen: list[int] = logits.argmax(-1).tolist()
    for row, (how, generator) in enumerate(zip(params, generators, strict=True)):
        if how.temperature > 0:
            chosen[row] = _draw(logits[row].float().cpu(), how, generator)
    return chosen


def _draw(logits: torch.Tensor, how: SamplingParams, generator: torch.Generator | None) -> int:
    # the largest logit is taken off first: a tiny temperature must not overflow
    probabilities = ((logits - logits.max()) / how.temperature).softmax(-1)
    ordered, tokens = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered  # what the likelier tokens hold together; the first is always kept
    kept = ordered.masked_fill(before >= how.top_p, 0.0)
    return int(tokens[torch.multinomial(kept, 1, generator=generator)])
