"""Which tokens of which requests the next step computes: continuous batching with chunked prefill. No torch.

Decodes go first, so that running streams do not stall; then prefills in order of arrival, cut to what is left of the
token budget; then requests that wait, as long as their whole prompt finds blocks. When a decode finds no block, the
newest request gives up its blocks and waits at the front with its tokens kept: it is computed again, never lost.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from heedful.errors import BadInputError
from heedful.runner.blocks import BlockPool, chain_keys

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(eq=False)
class Request:
    """One request's tokens and where they stand in the cache.

    tokens: the prompt, then what was sampled. computed: tokens whose K and V are in the cache. prefill_end: tokens that
    a prefill computes before the request decodes. shared: prompt tokens found in the cache, over all admissions.
    finish_reason: ``stop`` (an end token), ``length`` (max_tokens), ``aborted``, or None while it runs.
    """

    tokens: list[int]
    max_tokens: int
    num_prompt_tokens: int = field(init=False)
    computed: int = 0
    prefill_end: int = 0
    shared: int = 0
    preemptions: int = 0
    finish_reason: str | None = None
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def new_tokens(self) -> list[int]:
        """What was sampled so far."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def decoding(self) -> bool:
        """Whether the prefill is done: a state, not a length of one."""
        return 0 < self.prefill_end <= self.computed


@dataclass(frozen=True)
class Chunk:
    """``count`` tokens of one request, from ``start`` on; ``samples`` when the next token follows from them."""

    request: Request
    start: int
    count: int
    decode: bool

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last known token."""
        return self.start + self.count == len(self.request.tokens)


@dataclass
class SchedulerStats:
    """What happened so far. partial_chunks: prefill chunks that did not reach the prompt's end."""

    steps: int = 0
    prefill_chunks: int = 0
    partial_chunks: int = 0
    mixed_steps: int = 0
    shared_tokens: int = 0
    preemptions: int = 0
    largest_step: int = 0


class Scheduler:
    """Requests that wait and requests that run, over one BlockPool.

    max_num_seqs: requests that run at once. token_budget: tokens a step, at least max_num_seqs.
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int, token_budget: int, share_prefixes: bool = True) -> None:
        if max_num_seqs < 1 or token_budget < max_num_seqs:
            raise BadInputError(
                f"a token budget of {token_budget} cannot serve {max_num_seqs} sequences, which need a token each; "
                "raise max_num_batched_tokens or lower max_num_seqs (1 or more)"
            )
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        self.share_prefixes = share_prefixes
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.stats = SchedulerStats()

    def add(self, request: Request) -> None:
        """Queue a request; one that could never fit, even alone, is refused."""
        # the last sampled token is never computed, so it needs no slot
        needed = self.pool.blocks_for(len(request.tokens) + request.max_tokens - 1)
        if needed > self.pool.num_blocks:
            raise BadInputError(
                f"a prompt of {len(request.tokens)} tokens with max_tokens {request.max_tokens} needs {needed} "
                f"cache blocks of {self.pool.block_size} tokens, but the cache has {self.pool.num_blocks}; shorten "
                "the prompt, lower max_tokens or give the runner more blocks"
            )
        self.waiting.append(request)

    def schedule(self) -> list[Chunk]:
        """The next step: all prefills, then all decodes. Empty only when nothing is left to do."""
        planned: dict[Request, Chunk] = {}
        preempted = self._plan_decodes(planned)
        self._plan_prefills(planned)
        if not preempted:
            self._admit(planned)
        chunks = sorted(planned.values(), key=lambda chunk: chunk.decode)
        self._count(chunks)
        return chunks

    def complete(self, chunks: Sequence[Chunk], sampled: Sequence[int]) -> None:
        """Book a step that ran: ``sampled`` holds one token for each chunk that samples, in order."""
        tokens = iter(sampled)
        for chunk in chunks:
            request = chunk.request
            request.computed = chunk.start + chunk.count
            self._publish(request, chunk.start)
            if chunk.samples:
                request.tokens.append(next(tokens))

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it stands, and release its blocks."""
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
        self._release(request)

    def _plan_decodes(self, planned: dict[Request, Chunk]) -> bool:
        before = self.stats.preemptions
        for request in [s for s in self.running if s.decoding]:
            if request in self.running and self._extend(request):
                planned[request] = Chunk(request, request.computed, 1, decode=True)
        return self.stats.preemptions > before

    def _plan_prefills(self, planned: dict[Request, Chunk]) -> None:
        for request in self.running:
            if not request.decoding:
                self._plan_chunk(request, planned)

    def _admit(self, planned: dict[Request, Chunk]) -> None:
        while self.waiting and len(self.running) < self.max_num_seqs and self._left(planned):
            if not self._find_blocks(self.waiting[0]):
                return
            request = self.waiting.popleft()
            self.running.append(request)
            self._plan_chunk(request, planned)

    def _left(self, planned: dict[Request, Chunk]) -> int:
        return self.token_budget - sum(chunk.count for chunk in planned.values())

    def _plan_chunk(self, request: Request, planned: dict[Request, Chunk]) -> None:
        count = min(request.prefill_end - request.computed, self._left(planned))
        if count:
            planned[request] = Chunk(request, request.computed, count, decode=False)

    def _find_blocks(self, request: Request) -> bool:
        """Blocks for all known tokens: computed ones of a shared prefix, then fresh ones; False takes none."""
        size = self.pool.block_size
        request.keys = chain_keys(request.tokens, size, request.keys)
        usable = (len(request.tokens) - 1) // size  # the last token is always computed: its logits are needed
        shared = self.pool.share(request.keys[:usable]) if self.share_prefixes else []
        needed = self.pool.blocks_for(len(request.tokens)) - len(shared)
        spare = len(self.running)  # every running request may soon need its next block
        fresh = self.pool.allocate(needed) if needed + spare <= self.pool.num_free else None
        if fresh is None:
            self.pool.release(shared)
            return False
        request.blocks = shared + fresh
        request.computed = len(shared) * size
        request.prefill_end = len(request.tokens)
        request.shared += request.computed
        self.stats.shared_tokens += request.computed
        return True

    def _extend(self, request: Request) -> bool:
        """A block for the next token; False when the request itself had to give way."""
        while self.pool.blocks_for(request.computed + 1) > len(request.blocks):
            block = self.pool.allocate(1)
            if block is not None:
                request.blocks += block
                continue
            victim = self.running[-1]  # decodes are planned oldest first: it is not planned yet
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.preemptions += 1
        self.stats.preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.computed = request.prefill_end = 0

    def _publish(self, request: Request, since: int) -> None:
        """Make blocks that became full since that token known to others."""
        if not self.share_prefixes:
            return
        size = self.pool.block_size
        request.keys = chain_keys(request.tokens, size, request.keys)
        for index in range(since // size, request.computed // size):
            self.pool.publish(request.blocks[index], request.keys[index])

    def _count(self, chunks: Sequence[Chunk]) -> None:
        if not chunks:
            return
        prefills = [chunk for chunk in chunks if not chunk.decode]
        stats = self.stats
        stats.steps += 1
        stats.prefill_chunks += len(prefills)
        stats.partial_chunks += sum(not chunk.samples for chunk in prefills)
        stats.mixed_steps += 0 < len(prefills) < len(chunks)
        stats.largest_step = max(stats.largest_step, sum(chunk.count for chunk in chunks))
