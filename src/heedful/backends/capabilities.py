"""Capability data and the one function that turns it into reasons. A capability is a claim; conformance proves it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Final

from heedful.types import ITEMSIZE, AttentionType, Device, Reason, ReasonCode, SelectionRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class Sizes:
    """The sizes a kernel takes: an explicit set, or low…high in steps; ``row_bytes`` also asks for aligned rows."""

    listed: frozenset[int] | None = None
    multiple_of: int = 1
    low: int = 1
    high: int | None = None
    row_bytes: int = 1

    def accepts(self, size: int, itemsize: int = 1) -> bool:
        """An empty explicit set accepts nothing."""
        if self.listed is not None:
            return size in self.listed
        in_range = size >= self.low and (self.high is None or size <= self.high)
        return in_range and size % self.multiple_of == 0 and size * itemsize % self.row_bytes == 0

    @property
    def smallest(self) -> int:
        """The least size that is accepted (rows of bytes aside); 0 where none is."""
        if self.listed is not None:
            return min(self.listed, default=0)
        return -(-self.low // self.multiple_of) * self.multiple_of

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        if self.listed is not None:
            return ", ".join(map(str, sorted(self.listed))) or "none"
        top = "" if self.high is None else f" to {self.high}"
        step = "" if self.multiple_of == 1 else f" in multiples of {self.multiple_of}"
        rows = "" if self.row_bytes == 1 else f", rows of {self.row_bytes} bytes"
        return f"{self.low}{top or ' and up'}{step}{rows}"


def listed(*sizes: int) -> Sizes:
    """An explicit set of sizes."""
    return Sizes(listed=frozenset(sizes))


@dataclass(frozen=True)
class Capability:
    """One row of CAPABILITIES: what one variant of a backend claims on one platform.

    generations: explicit words of ``Device.generation`` ("9.0", "gfx942"), or None where every generation is alike.
    features: of window, alibi, soft_cap, sinks, blocksparse, attention_free, lse, graphs. excluded_pairs: what does not
    go together, in the words of features and attention types. mixed_head_sizes: head_size_v may differ.
    libraries: import names this variant needs beyond the backend's own. note: what a decision for it says beside the
    libraries, such as the steps that it hands on to another variant when it runs.
    """

    variant: str
    platform: str
    dtypes: frozenset[str]
    head_sizes: Sizes
    block_sizes: Sizes
    generations: frozenset[str] | None = None
    kv_cache_dtypes: frozenset[str] = frozenset({"auto"})
    attn_types: frozenset[str] = frozenset({AttentionType.DECODER})
    features: frozenset[str] = frozenset()
    excluded_pairs: frozenset[frozenset[str]] = frozenset()
    mixed_head_sizes: bool = False
    max_group: int | None = None
    libraries: tuple[str, ...] = ()
    note: str = ""


HALF: Final = frozenset({"bfloat16", "float16"})
HALF_AND_SINGLE: Final = HALF | {"float32"}
FP8_CACHES: Final = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2"})
CACHELESS: Final = frozenset({AttentionType.ENCODER, AttentionType.ENCODER_ONLY})
EVERY_ATTN_TYPE: Final = frozenset(AttentionType)
TRITON_ON_CUDA: Final = frozenset({"7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"})
TRITON_ON_ROCM: Final = frozenset({"gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1151", "gfx1200", "gfx1201"})
"""Targets for which Triton made binaries, or whose major has one of an earlier minor (8.7, 12.1)."""


def pairs(*words: tuple[str, str]) -> frozenset[frozenset[str]]:
    """Pairs of words that do not go together."""
    return frozenset(frozenset(pair) for pair in words)


CONTRACT_EXCLUDES = pairs(("window", "encoder_decoder"), ("alibi", "encoder_decoder"))
"""What the contract itself refuses for every backend: cross attention has no positions in common."""

_FEATURE_CODES = {
    "window": ReasonCode.WINDOW,
    "alibi": ReasonCode.ALIBI,
    "soft_cap": ReasonCode.SOFT_CAP,
    "sinks": ReasonCode.SINKS,
    "blocksparse": ReasonCode.BLOCKSPARSE,
}


def unsupported_reasons(
    name: str, rows: Sequence[Capability], request: SelectionRequest, device: Device
) -> list[Reason]:
    """[] if any row takes the request; else every reason of every row of the device's platform."""
    on_platform = [row for row in rows if row.platform == device.platform]
    if not on_platform:
        platforms = ", ".join(dict.fromkeys(row.platform for row in rows)) or "none"
        text = f"{name} does not run on {device.platform}"
        return [Reason(ReasonCode.PLATFORM, text, device.platform, platforms, "choose another backend or platform")]
    found = [row_reasons(row, request, device) for row in on_platform]
    return [] if not all(found) else list(dict.fromkeys(reason for reasons in found for reason in reasons))


def supported_variant(rows: Sequence[Capability], request: SelectionRequest, device: Device) -> str | None:
    """The variant of the first row that takes the request, in the order of CAPABILITIES."""
    fitting = (r.variant for r in rows if r.platform == device.platform and not row_reasons(r, request, device))
    return next(fitting, None)


def row_reasons(row: Capability, request: SelectionRequest, device: Device) -> list[Reason]:
    """Every reason of one row: its device generation, then each field of the request."""
    checks = (_generation(row, device), *_sizes(row, request), *_words(row, request), *_features(row, request))
    return [reason for reason in checks if reason is not None]


def _reason(row: Capability, code: ReasonCode, text: str, asked: object, accepted: object, hint: str = "") -> Reason:
    return Reason(code, text, str(asked), str(accepted), hint, row.variant)


def _listing(words: Iterable[str]) -> str:
    return _joined(frozenset(words))


@cache
def _joined(words: frozenset[str]) -> str:
    return ", ".join(sorted(words, key=_natural)) or "none"


def _natural(word: str) -> tuple[float, str]:
    """9.0 before 10.0, and plain words by their letters."""
    return (float(word), "") if word.replace(".", "", 1).isdigit() else (0.0, word)


def _generation(row: Capability, device: Device) -> Reason | None:
    if row.generations is None or device.generation in row.generations:
        return None
    accepted = _listing(row.generations)
    text = f"{row.variant} has no kernel for {device}, only for {accepted}"
    return _reason(row, ReasonCode.CAPABILITY, text, device.generation or "unknown", accepted)


def _sizes(row: Capability, request: SelectionRequest) -> Iterable[Reason | None]:
    if request.is_attention_free:
        return
    itemsize = ITEMSIZE.get(request.dtype, 1)
    if not row.head_sizes.accepts(request.head_size, itemsize):
        text = f"{row.variant} takes head sizes {row.head_sizes}"
        yield _reason(row, ReasonCode.HEAD_SIZE, text, request.head_size, row.head_sizes)
    yield _head_size_v(row, request, itemsize)
    if not row.block_sizes.accepts(request.block_size):
        text = f"{row.variant} takes block sizes {row.block_sizes}"
        yield _reason(
            row, ReasonCode.BLOCK_SIZE, text, request.block_size, row.block_sizes, "change the engine's block size"
        )
    yield _group(row, request)


def _head_size_v(row: Capability, request: SelectionRequest, itemsize: int) -> Reason | None:
    size = request.head_size_v
    if size is None or size == request.head_size:
        return None
    if row.mixed_head_sizes and row.head_sizes.accepts(size, itemsize):
        return None
    accepted = row.head_sizes if row.mixed_head_sizes else "equal to head_size"
    return _reason(row, ReasonCode.HEAD_SIZE_V, f"{row.variant} takes head_size_v {accepted}", size, accepted)


def _group(row: Capability, request: SelectionRequest) -> Reason | None:
    if row.max_group is None or not request.num_heads or not request.num_kv_heads:
        return None
    group = request.num_heads // request.num_kv_heads
    if group <= row.max_group:
        return None
    text = f"{row.variant} takes at most {row.max_group} query heads a KV head"
    return _reason(row, ReasonCode.HEADS, text, group, row.max_group)


def _words(row: Capability, request: SelectionRequest) -> Iterable[Reason | None]:
    asked = (
        (ReasonCode.DTYPE, "dtype", request.dtype, row.dtypes),
        (ReasonCode.KV_CACHE_DTYPE, "kv_cache_dtype", request.kv_cache_dtype or "auto", row.kv_cache_dtypes),
        (ReasonCode.ATTN_TYPE, "attn_type", str(request.attn_type), row.attn_types),
    )
    for code, field, value, accepted in asked if not request.is_attention_free else ():
        if value not in accepted:
            text = f"{row.variant} takes {field} {_listing(accepted)}"
            yield _reason(row, code, text, value, _listing(accepted))


def _features(row: Capability, request: SelectionRequest) -> Iterable[Reason | None]:
    only_free = row.features == {"attention_free"}
    if request.is_attention_free != ("attention_free" in row.features):
        text = f"{row.variant} {'only answers' if only_free else 'does not answer'} attention-free requests"
        yield _reason(row, ReasonCode.ATTENTION_FREE, text, request.is_attention_free, only_free)
    if request.is_attention_free:
        return  # no score is computed, so there is nothing that a window or a cap could be missing from
    if "blocksparse" in row.features and not request.is_blocksparse:
        text = f"{row.variant} computes block-sparse attention only"
        yield _reason(row, ReasonCode.BLOCKSPARSE, text, "dense", "block-sparse")
    for name in sorted(request.features - row.features):
        text = f"{row.variant} has no {name}"
        yield _reason(row, _FEATURE_CODES[name], text, name, _listing(row.features))
    if not row.excluded_pairs and not request.features:
        return  # every pair of the contract holds a feature
    present = words_of(request)
    excluded = [sorted(pair) for pair in row.excluded_pairs | CONTRACT_EXCLUDES if pair <= present]
    for pair in sorted(excluded):
        text = f"{row.variant} cannot combine {' and '.join(pair)}"
        yield _reason(row, ReasonCode.FEATURE_PAIR, text, " + ".join(pair), "either alone")


def words_of(request: SelectionRequest) -> frozenset[str]:
    """The words of a request that excluded_pairs may name: features, attention type, dtype, cache dtype."""
    stored = request.kv_cache_dtype or "auto"
    family = {"fp8"} if stored.startswith("fp8") else set()
    return request.features | {str(request.attn_type), request.dtype, stored} | family
