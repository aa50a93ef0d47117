"""One point of the test space as plain data: a layer, a batch shape, an input family. No torch; dtypes are words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from heedful.types import AttentionType, SelectionRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BATCHES: Final = (
    "prefill",
    "decode",
    "mixed",
    "chunked",
    "prefix_hit",
    "ragged",
    "length_one",
    "exact_page",
    "padded",
    "empty",
    "speculative",
    "long",
)
FAMILIES: Final = ("normal", "peaky", "coded")

CACHED_ONLY: Final = frozenset({"decode", "mixed", "chunked", "prefix_hit", "speculative", "long"})
"""Batch kinds that read keys of earlier steps: without a cache they mean nothing."""

_SHORT: Final = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True)
class Span:
    """One sequence of a batch: keys in the cache before this step, tokens of this step, its state, encoder keys."""

    context: int
    query: int
    decode: bool = False
    encoder: int = 0

    @property
    def length(self) -> int:
        """Keys that exist after this step's write."""
        return self.context + self.query


@dataclass(frozen=True)
class Case:
    """One layer on one batch. Sizes are elements, block_size is tokens a page, sliding_window counts the token itself.

    batch: one of BATCHES. family: one of FAMILIES. The run's seed is added to ``seed``.
    """

    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    head_size_v: int | None = None
    block_size: int = 16
    attn_type: str = AttentionType.DECODER
    sliding_window: int | None = None
    alibi: bool = False
    logits_soft_cap: float | None = None
    sinks: bool = False
    batch: str = "mixed"
    family: str = "normal"
    seed: int = 0
    attention_free: bool = False

    @property
    def id(self) -> str:
        """``bf16-fp8-h4k2-d80-b16-w5-sinks-chunked-peaky``: every field that is not at its plain value."""
        if self.attention_free:
            return f"free-{self.batch}"
        return "-".join(part for part in self._parts() if part)

    def _parts(self) -> tuple[str, ...]:
        size_v = f"v{self.head_size_v}" if self.head_size_v is not None else ""
        return (
            _SHORT.get(self.dtype, self.dtype),
            "" if self.kv_cache_dtype == "auto" else self.kv_cache_dtype,
            f"h{self.num_heads}k{self.num_kv_heads}",
            f"d{self.head_size}{size_v}",
            f"b{self.block_size}",
            "" if self.attn_type == AttentionType.DECODER else str(self.attn_type),
            "" if self.sliding_window is None else f"w{self.sliding_window}",
            "alibi" if self.alibi else "",
            "" if self.logits_soft_cap is None else f"cap{self.logits_soft_cap:g}",
            "sinks" if self.sinks else "",
            self.batch,
            self.family,
            f"s{self.seed}" if self.seed else "",
        )

    def request(self) -> SelectionRequest:
        """The same layer as a question to the selector and to CAPABILITIES."""
        if self.attention_free:
            return SelectionRequest(head_size=0, dtype=self.dtype, is_attention_free=True)
        return SelectionRequest(
            head_size=self.head_size,
            sliding_window=self.sliding_window,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            block_size=self.block_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size_v=self.head_size_v,
            attn_type=str(self.attn_type),
            alibi=self.alibi,
            logits_soft_cap=self.logits_soft_cap,
            sinks=self.sinks,
        )

    @property
    def size_v(self) -> int:
        """head_size_v, or head_size where it was not said."""
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def spans(self) -> tuple[Span, ...]:
        """The sequences of the batch, prefills first. Cross attention also says how many encoder keys each has."""
        rows = _SPANS[self.batch](self.block_size)
        if self.attn_type not in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
            rows += _WITH_CONTEXT.get(self.batch, ())
        if self.attn_type != AttentionType.ENCODER_DECODER:
            return rows
        lengths = (self.block_size + 3, 0, 2)
        return tuple(Span(s.context, s.query, s.decode, lengths[i % 3]) for i, s in enumerate(rows))


def cells(profile: str) -> list[tuple[str, Case]]:
    """Every (check name, case) of a profile; see checklist.py."""
    from heedful.conformance.checklist import cells as listed  # it imports this module

    return listed(profile)


_WITH_CONTEXT: Final = {
    "padded": (Span(17, 1, True), Span(3, 1, True)),
    "empty": (Span(5, 0),),
}
"""What these kinds add where there is a cache."""

_SPANS: Final[Mapping[str, Callable[[int], tuple[Span, ...]]]] = {
    "prefill": lambda page: (Span(0, 5), Span(0, page + 1), Span(0, 9)),
    "decode": lambda page: (Span(page - 1, 1, True), Span(2 * page + 3, 1, True), Span(6, 1, True)),
    "mixed": lambda page: (Span(0, 6), Span(page + 2, 3), Span(page + 4, 1, True), Span(2, 1, True)),
    "chunked": lambda page: (Span(page + 3, 5), Span(7, page), Span(2 * page, 3)),
    "prefix_hit": lambda page: (Span(page, 7), Span(page, 1), Span(2 * page, 4)),
    "ragged": lambda page: (Span(0, 1), Span(0, 2 * page + 3), Span(0, 7), Span(0, 2)),
    "length_one": lambda _page: (Span(0, 1), Span(0, 1)),
    "exact_page": lambda page: (Span(0, page), Span(0, 2 * page)),
    "padded": lambda page: (Span(0, 4), Span(0, page + 2), Span(0, 3)),
    "empty": lambda _page: (Span(0, 3), Span(0, 0), Span(0, 2)),
    "speculative": lambda page: (Span(page + 2, 3, True), Span(7, 2, True), Span(page - 1, 4, True)),
    "long": lambda _page: (Span(0, 130), Span(2000, 3), Span(4095, 1, True)),
}
