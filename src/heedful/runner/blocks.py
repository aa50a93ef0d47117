"""Blocks of the paged cache: who holds which, and full blocks shared between requests with one prefix. No torch.

A block is shared only when all of its tokens are computed, and such a block is never written again, so sharing needs
no copy. A block that nobody holds keeps its content until the space is needed, oldest first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

from heedful.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def chain_keys(tokens: Sequence[int], block_size: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """One key a full block, of its tokens and all before it; ``known`` are the first keys, already computed."""
    keys = list(known)
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        parent = keys[-1] if keys else b""
        content = array("q", tokens[start : start + block_size]).tobytes()
        keys.append(hashlib.sha256(parent + content).digest())
    return keys


class BlockPool:
    """Reference counts of ``num_blocks`` blocks, and the content of those that can be shared."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise BadInputError(
                f"a cache of {num_blocks} blocks of {block_size} tokens holds nothing; give 1 or more of both"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._holders = [0] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to be reused comes first
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that allocate() can hand out; those that only keep old content count."""
        return len(self._idle)

    def holders(self, block: int) -> int:
        """How many requests hold the block."""
        return self._holders[block]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that num_tokens tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Blocks for one holder, or None when there are not enough now: the caller waits or preempts."""
        if count > self.num_free:
            return None
        return [self._take_idle() for _ in range(count)]

    def share(self, keys: Iterable[bytes]) -> list[int]:
        """The longest chain of computed blocks with these keys; the caller becomes one more holder of each."""
        shared: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            self._idle.pop(block, None)
            self._holders[block] += 1
            shared.append(block)
        return shared

    def publish(self, block: int, key: bytes) -> None:
        """Say that every token of the block is computed; of two blocks with one content the first stays known."""
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each block. A chain's last block is reused before its first, which more can share."""
        for block in reversed(blocks):
            if self._holders[block] < 1:
                raise BadInputError(f"block {block} is released but nobody holds it")
            self._holders[block] -= 1
            if not self._holders[block]:
                self._idle[block] = None
                self._idle.move_to_end(block, last=block in self._key_of)

    def _take_idle(self) -> int:
        block, _ = self._idle.popitem(last=False)
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
        self._holders[block] = 1
        return block
