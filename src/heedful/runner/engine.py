"""Many requests over one runner: add them at any time, step, and hear of each token as it is sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from heedful.errors import BadInputError
from heedful.runner.batch import build_batch
from heedful.runner.blocks import BlockPool
from heedful.runner.sampling import SamplingParams, sample
from heedful.runner.scheduler import Chunk, Request, Scheduler, SchedulerStats

if TYPE_CHECKING:
    import torch

    from heedful.runner.model_runner import ModelRunner

OnToken = Callable[[Request, int], None]


@dataclass(frozen=True)
class _Job:
    params: SamplingParams
    generator: torch.Generator | None
    on_token: OnToken | None


class Engine:
    """Continuous batching. ``stats`` says what the scheduler did; ``pool`` who holds which block."""

    def __init__(self, runner: ModelRunner) -> None:
        options = runner.options
        self.runner = runner
        self.pool = BlockPool(runner.num_blocks, options.block_size)
        self._scheduler = Scheduler(
            self.pool, options.max_num_seqs, options.max_num_batched_tokens, options.share_prefixes
        )
        self._jobs: dict[Request, _Job] = {}

    @property
    def stats(self) -> SchedulerStats:
        """Counts since the engine was made."""
        return self._scheduler.stats

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._jobs)

    def add(
        self, prompt: Sequence[int], params: SamplingParams | None = None, on_token: OnToken | None = None
    ) -> Request:
        """Queue a prompt of token ids; on_token hears of each new token, in order. Refused: what could never fit."""
        params = params or SamplingParams()
        self._check_prompt(prompt, params)
        request = Request(list(prompt), params.max_tokens)
        self._scheduler.add(request)
        generator = params.generator() if params.temperature > 0 else None
        self._jobs[request] = _Job(params, generator, on_token)
        return request

    def abort(self, request: Request) -> None:
        """End a request now and release its blocks; one that is finished stays as it is."""
        if request in self._jobs:
            self._finish(request, "aborted")

    def step(self) -> list[Request]:
        """Run one step; the requests that got a token. Empty when the step only prefilled or nothing is left."""
        chunks = self._scheduler.schedule()
        if not chunks:
            return []
        logits = self.runner.execute(build_batch(chunks, self.runner.backend, self.pool.block_size, self.runner.device))
        sampled = self._sample(chunks, logits)
        self._scheduler.complete(chunks, list(sampled.values()))
        listeners = [(self._jobs[request].on_token, request) for request in sampled]
        for request, token in sampled.items():
            self._end_if_done(request, token)
        for on_token, request in listeners:  # after all are booked: a listener may add, abort or raise
            if on_token is not None and request.finish_reason != "aborted":
                on_token(request, sampled[request])
        return list(sampled)

    def run(self) -> None:
        """Step until every request is finished."""
        while self.unfinished:
            self.step()

    def _check_prompt(self, prompt: Sequence[int], params: SamplingParams) -> None:
        config = self.runner.config
        if not prompt:
            raise BadInputError("the prompt has no tokens; give one or more")
        outside = next((token for token in prompt if not 0 <= token < config.vocab_size), None)
        if outside is not None:
            raise BadInputError(f"token id {outside} is outside the vocabulary of {config.vocab_size}")
        if len(prompt) + params.max_tokens > config.max_positions:
            raise BadInputError(
                f"a prompt of {len(prompt)} tokens with max_tokens {params.max_tokens} passes the model's "
                f"{config.max_positions} positions; shorten the prompt or lower max_tokens"
            )

    def _sample(self, chunks: Sequence[Chunk], logits: torch.Tensor) -> dict[Request, int]:
        requests = [chunk.request for chunk in chunks if chunk.samples]
        jobs = [self._jobs[request] for request in requests]
        tokens = sample(logits, [job.params for job in jobs], [job.generator for job in jobs])
        return dict(zip(requests, tokens, strict=True))

    def _end_if_done(self, request: Request, token: int) -> None:
        params = self._jobs[request].params
        if token in self.runner.checkpoint.eos_token_ids and not params.ignore_eos:
            self._finish(request, "stop")
        elif len(request.new_tokens) >= params.max_tokens:
            self._finish(request, "length")

    def _finish(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        self._scheduler.finish(request)
        del self._jobs[request]
