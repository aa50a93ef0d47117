"""Token ids to text, piece by piece: the pieces join to what decoding all ids at once gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heedful.runner.weights import Tokenizer

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no character, or not yet."""


class Detokeniser:
    """One stream. A piece is held back while it ends inside a character; special tokens give no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # ids from here on are decoded again: a tokenizer may treat the start of a text differently
        self._told = 0  # the text of ids before this is out

    def push(self, token_id: int) -> str:
        """The text that became certain with this token, often empty."""
        self._ids.append(token_id)
        fresh = self._fresh()
        if fresh.endswith(REPLACEMENT):
            return ""
        return self._tell(fresh)

    def flush(self) -> str:
        """What was held back, once no token follows."""
        return self._tell(self._fresh())

    def _fresh(self) -> str:
        told = self._decode(self._ids[self._context : self._told])
        return self._decode(self._ids[self._context :])[len(told) :]

    def _tell(self, fresh: str) -> str:
        if fresh:
            self._context, self._told = self._told, len(self._ids)
        return fresh

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
