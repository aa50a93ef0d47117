"""What the plain backend checks before it computes: shapes, scales, block tables, slots and lengths, on host values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from heedful.errors import BadInputError, MetadataError
from heedful.types import AttentionType

if TYPE_CHECKING:
    from heedful.backends.base import AttentionMetadata

ALL = frozenset({"lengths", "counts", "context", "block range", "block twice", "slot range", "slot twice"})
"""What is checked; a broken backend leaves some out."""


@dataclass(frozen=True)
class Host:
    """One step's metadata as Python integers."""

    num_prefills: int
    starts: list[int]
    seq_lens: list[int]
    contexts: list[int]
    tables: list[list[int]]
    slots: list[int]
    encoder_lens: list[int] = field(default_factory=list)
    cross_tables: list[list[int]] = field(default_factory=list)
    cross_slots: list[int] = field(default_factory=list)
    step: dict[Any, Any] = field(default_factory=dict)

    @property
    def encoder_starts(self) -> list[int]:
        """Where each sequence's encoder tokens begin, with the end."""
        return [0, *accumulate(self.encoder_lens)]

    @property
    def query_lens(self) -> list[int]:
        """Query tokens of each sequence."""
        return [b - a for a, b in zip(self.starts, self.starts[1:], strict=False)]


def number(word: str, value: Any) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadInputError(f"{word} is {value!r}; give one finite number")
    return float(value)


def scale(value: float | torch.Tensor, is_fp8: bool) -> float:
    """A positive finite float or 0-dim tensor; only 1 where the cache is not fp8."""
    if isinstance(value, torch.Tensor):
        if value.dim():
            raise BadInputError(f"a cache scale has shape {tuple(value.shape)}; give one number or a 0-dim tensor")
        value = value.item()
    found = number("cache scale", value)
    if found <= 0:
        raise BadInputError(f"cache scale {found} must be positive")
    if found != 1.0 and not is_fp8:
        raise BadInputError(f"cache scale {found} means nothing without an fp8 cache; give 1.0")
    return found


def per_head(word: str, values: Any, heads: int) -> torch.Tensor | None:
    """fp32 [heads] or None."""
    if values is None:
        return None
    found = torch.as_tensor(values, dtype=torch.float32)
    if tuple(found.shape) != (heads,):
        raise BadInputError(f"{word} has shape {tuple(found.shape)}; give one value a head, ({heads},)")
    return found


def kind(attn_type: AttentionType | str) -> str:
    """The plain word of an attention type."""
    if str(attn_type) not in set(AttentionType):
        raise BadInputError(f"unknown attn_type {attn_type!r}; give one of {', '.join(AttentionType)}")
    return str(attn_type)


def three_dims(word: str, x: Any, heads: int, size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[tokens, heads, size] of either form."""
    if not isinstance(x, torch.Tensor) or x.dim() not in (2, 3):
        raise BadInputError(f"{word} must be a tensor [tokens, {heads}, {size}] or [tokens, {heads * size}]")
    if tuple(x.shape[1:]) not in ((heads, size), (heads * size,)):
        raise BadInputError(f"{word} has shape {tuple(x.shape)}; give [tokens, {heads}, {size}] or the flat form")
    if dtype is not None and x.dtype != dtype:
        raise BadInputError(f"{word} is {x.dtype} but the query is {dtype}")
    return x.reshape(x.shape[0], heads, size)


def same_rows(key: torch.Tensor, value: torch.Tensor) -> None:
    """A value a key."""
    if len(key) != len(value):
        raise BadInputError(f"key has {len(key)} rows and value {len(value)}; give one value a key")


def lse_target(lse: torch.Tensor | None, shape: tuple[int, int]) -> None:
    """fp32 [tokens, heads] when given."""
    if lse is not None and (tuple(lse.shape) != shape or lse.dtype != torch.float32):
        raise BadInputError(f"output_lse is {lse.dtype} {tuple(lse.shape)}; give float32 {shape}")


def cache(views: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    """The cache's dtype, KV heads and sizes are the layer's."""
    heads, *each = sizes
    for view, size in zip(views, each, strict=True):
        if view.dtype != dtype or tuple(view.shape[2:]) != (heads, size):
            found = f"{view.dtype} with {tuple(view.shape[2:])} a slot"
            raise BadInputError(f"kv_cache holds {found}; this layer needs {dtype} with {(heads, size)}")


def is_empty(kv_cache: Any) -> bool:
    """The profiling run's cache."""
    parts = (kv_cache,) if isinstance(kv_cache, torch.Tensor) else kv_cache
    return all(part.numel() == 0 for part in parts)


def block_pairs(pairs: torch.Tensor, num_source: int, num_target: int) -> None:
    """int64 [n, 2] inside both caches."""
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype != torch.int64:
        raise BadInputError(f"pairs are {pairs.dtype} {tuple(pairs.shape)}; give int64 [n, 2]")
    for source, target in pairs.tolist():
        if not (0 <= source < num_source and 0 <= target < num_target):
            raise BadInputError(f"block pair ({source}, {target}) lies outside caches of {num_source}, {num_target}")


def no_block_both_ways(pairs: torch.Tensor) -> None:
    """The result of a copy must not depend on its order."""
    sources, targets = pairs[:, 0].tolist(), pairs[:, 1].tolist()
    both = set(sources) & set(targets)
    if both or len(set(targets)) != len(targets):
        raise BadInputError(f"copy_blocks: {sorted(both) or targets} would be read and written, or written twice")


def metadata(
    meta: AttentionMetadata,
    tokens: int,
    key_tokens: int | None,
    views: Any,
    attn_kind: str,
    wanted: frozenset[str] = ALL,
) -> Host:
    """Every value that the kernels would trust, checked; the message names the sequence."""
    host = _host(meta, attn_kind)
    _starts(host, tokens, attn_kind)
    if "counts" in wanted and attn_kind != "encoder":
        _counts(meta, host)
    if "lengths" in wanted and attn_kind in ("decoder", "encoder_only"):
        _each_length(host)
    if attn_kind in ("encoder", "encoder_only"):
        return host
    if views is None:
        _profiling(host, key_tokens, attn_kind, wanted)
    else:
        _pages(host, views, attn_kind, wanted)
        _slots(host, views, attn_kind, key_tokens, wanted)
    return host


def _host(meta: AttentionMetadata, attn_kind: str) -> Host:
    def listed(x: torch.Tensor | None) -> list[Any]:
        return [] if x is None else x.tolist()

    encoder_lens = listed(meta.encoder_seq_lens)
    if attn_kind == "encoder" and meta.num_encoder_tokens != sum(encoder_lens):
        encoder_lens = encoder_lens[: meta.num_prefills]  # the decodes were encoded in an earlier step
    return Host(
        meta.num_prefills,
        listed(meta.query_start_loc),
        listed(meta.seq_lens),
        listed(meta.context_lens),
        listed(meta.block_tables),
        listed(meta.slot_mapping),
        encoder_lens,
        listed(meta.cross_block_tables),
        listed(meta.cross_slot_mapping),
        meta.step,
    )


def _starts(host: Host, tokens: int, attn_kind: str) -> None:
    """The tokens can be cut into sequences at all."""
    seqs = len(host.seq_lens)
    short = len(host.encoder_lens) > seqs or min(host.encoder_lens, default=0) < 0
    if attn_kind in ("encoder", "encoder_decoder") and short:
        raise MetadataError(f"encoder_seq_lens {host.encoder_lens} do not describe {seqs} sequences")
    if attn_kind == "encoder":
        if sum(host.encoder_lens) > tokens:
            raise MetadataError(f"encoder_seq_lens {host.encoder_lens} need more than the {tokens} tokens given")
        return
    uneven = len(host.starts) != seqs + 1 or host.starts[0] != 0 or min(host.query_lens, default=0) < 0
    if uneven or host.starts[-1] > tokens:
        raise MetadataError(f"query_start_loc {host.starts} does not cut {tokens} tokens into {seqs} sequences")


def _counts(meta: AttentionMetadata, host: Host) -> None:
    counts = (meta.num_prefills, meta.num_decodes, meta.num_prefill_tokens, meta.num_decode_tokens)
    counted = meta.num_prefills + meta.num_decodes
    if min(counts) < 0 or counted > len(host.seq_lens) or any(host.seq_lens[counted:]):
        raise MetadataError(f"{counts[0]} prefills and {counts[1]} decodes, but seq_lens are {host.seq_lens}")
    if meta.max_query_len < max(host.query_lens, default=0) or meta.max_seq_len < max(host.seq_lens, default=0):
        raise MetadataError(f"max_query_len {meta.max_query_len}, max_seq_len {meta.max_seq_len} are too small")
    prefill_tokens = host.starts[meta.num_prefills]
    if (prefill_tokens, host.starts[-1] - prefill_tokens) != counts[2:]:
        raise MetadataError(f"token counts {counts[2:]} disagree with query_start_loc {host.starts}")


def _each_length(host: Host) -> None:
    for i, (query_len, seq_len, context) in enumerate(zip(host.query_lens, host.seq_lens, host.contexts, strict=True)):
        if context < 0 or seq_len != context + query_len:
            raise MetadataError(f"sequence {i}: seq_len {seq_len} is not context {context} + query_len {query_len}")


def _profiling(host: Host, key_tokens: int | None, attn_kind: str, wanted: frozenset[str]) -> None:
    if key_tokens is None:
        raise MetadataError("there is neither a cache nor key and value to attend to")
    if "context" in wanted and attn_kind == "decoder" and any(host.contexts):
        raise MetadataError(f"an empty kv_cache is the profiling run, but sequences have context {host.contexts}")


def _pages(host: Host, views: Any, attn_kind: str, wanted: frozenset[str]) -> None:
    num_blocks, block_size = views[0].shape[:2]
    is_cross = attn_kind == "encoder_decoder"
    tables, lens = (host.cross_tables, host.encoder_lens) if is_cross else (host.tables, host.seq_lens)
    for i, length in enumerate(lens):
        pages = -(-length // block_size)
        used = tables[i][:pages] if i < len(tables) else []
        outside = len(used) < pages or any(not 0 <= block < num_blocks for block in used)
        twice = len(set(used)) < len(used)
        if (outside and "block range" in wanted) or (twice and "block twice" in wanted):
            raise MetadataError(
                f"sequence {i}: block table {used} must name {pages} different blocks of 0…{num_blocks - 1} "
                f"for {length} tokens of {block_size} a block"
            )


def _slots(host: Host, views: Any, attn_kind: str, key_tokens: int | None, wanted: frozenset[str]) -> None:
    if key_tokens is None:
        return
    slots = host.cross_slots if attn_kind == "encoder_decoder" else host.slots
    if len(slots) != key_tokens:
        raise MetadataError(f"slot_mapping has {len(slots)} slots for {key_tokens} keys")
    written = [slot for slot in slots if slot >= 0]
    limit = views[0].shape[0] * views[0].shape[1]
    if "slot range" in wanted and any(slot >= limit for slot in written):
        raise MetadataError(f"slot {max(written)} lies past the cache's last slot {limit - 1}")
    if "slot twice" in wanted and len(set(written)) != len(written):
        raise MetadataError("a slot is written twice in one step; each token needs its own")
