"""One step's tensors for a case, the cache it starts from, and what must come out: ``Batch``.

A cache's content is kept layout-free as pages [num_blocks, block_size, KV, size]; ``Batch.fill`` pours it into a
backend's own cache. Every slot that holds no token yet is poisoned with large finite numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heedful.backends.base import AttentionMetadata
from heedful.conformance.pages import as_bytes, rows_of, slots_of, starts_of, step_metadata, without_repeats, written
from heedful.conformance.tolerance import judge, judge_lse
from heedful.errors import BadInputError
from heedful.reference import (
    dequantise,
    eager_yardstick,
    read_pages,
    reference_attention,
    store_rounded,
    tiled_yardstick,
)
from heedful.types import AttentionType

if TYPE_CHECKING:
    from heedful.backends.base import AttentionBackend, AttentionImpl, KVCache
    from heedful.conformance.cases import Case

    Pages = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Layer:
    """The numbers of a layer that a case leaves open. alibi_slopes, sinks: fp32 [num_heads]."""

    scale: float
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass(frozen=True)
class Tokens:
    """query [tokens, H, D] flat over the batch; keys and values per sequence, its context first: [length, KV, size]."""

    query: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


@dataclass(frozen=True)
class Expected:
    """What a step must give: output and LSE in float64, and what the two same-precision yardsticks make of it.

    output [rows, H, Dv] holds pad rows, which are 0; lse [tokens, H] does not, for the contract gives them no LSE.
    """

    output: Tensor
    lse: Tensor
    yardsticks: tuple[Tensor, ...]
    yardstick_lses: tuple[Tensor, ...]

    def judge(self, output: Tensor, lse: Tensor | None = None) -> dict[str, float]:
        """Margins of an answer (see tolerance.judge), of its LSE too where one is given; raises OutOfToleranceError."""
        margins = judge(output, self.output, self.yardsticks, self.yardsticks[0].dtype)
        if lse is None:
            return margins
        return margins | judge_lse(lse[: len(self.lse)], self.lse, self.yardstick_lses)


@dataclass(frozen=True)
class Batch:
    """One step: the arguments of ``AttentionImpl.forward``, the layer's numbers, and the cache before the step.

    key and value are None for ENCODER_DECODER (they are in the cache already). pages: K and V as stored, [num_blocks,
    block_size, KV, size]; None where the attention type has no cache. held: tokens of each sequence (encoder tokens for
    ENCODER_DECODER) that lie in the cache before the step. Everything lies on the CPU until ``on``.
    """

    case: Case
    query: Tensor
    key: Tensor | None
    value: Tensor | None
    metadata: AttentionMetadata
    layer: Layer
    pages: Pages | None
    held: tuple[int, ...] = ()

    @property
    def scale(self) -> float:
        """The softmax scale."""
        return self.layer.scale

    @property
    def alibi_slopes(self) -> Tensor | None:
        """fp32 [num_heads], or None."""
        return self.layer.alibi_slopes

    @property
    def sinks(self) -> Tensor | None:
        """fp32 [num_heads], or None."""
        return self.layer.sinks

    @property
    def k_scale(self) -> float:
        """1.0 without an fp8 cache."""
        return self.layer.k_scale

    @property
    def v_scale(self) -> float:
        """1.0 without an fp8 cache."""
        return self.layer.v_scale

    @property
    def num_tokens(self) -> int:
        """Rows of query that belong to a sequence; later rows are padding."""
        return int(self.starts()[0][-1])

    def fill(
        self, backend: type[AttentionBackend], impl: AttentionImpl | None = None, device: torch.device | str = "cpu"
    ) -> KVCache:
        """The backend's own cache as it stands before the step: context written, all else poisoned.

        An opaque layout (kv_views gives None) is filled by a forward call of ``impl`` that writes the context.
        """
        if self.pages is None:
            return torch.empty(0, dtype=self.query.dtype, device=device)
        cache = self._allocate(backend, device)
        views = backend.kv_views(cache)
        if views is None:
            self._write_context(impl, cache)
            return cache
        for view, page in zip(views, self.pages, strict=True):
            view.copy_(page)
        return cache

    def on(self, device: torch.device | str) -> Batch:
        """The same batch with the tensors of forward and of the layer on a device."""
        moved = {name: _to(getattr(self, name), device) for name in ("query", "key", "value")}
        layer = replace(self.layer, alibi_slopes=_to(self.alibi_slopes, device), sinks=_to(self.sinks, device))
        fields = {name: _to(value, device) for name, value in vars(self.metadata).items()}
        return replace(self, **moved, layer=layer, metadata=AttentionMetadata(**{**fields, "step": {}}))

    def pages_after(self) -> Pages | None:
        """What the cache must hold after the step, bit for bit, untouched slots included."""
        if self.pages is None or self.key is None or self.value is None:
            return self.pages
        word, slots = self.case.kv_cache_dtype, self.metadata.slot_mapping.cpu()
        rows = [(self.key.cpu(), self.k_scale), (self.value.cpu(), self.v_scale)]
        keys, values = (
            written(page, slots, store_rounded(new, scale, word))
            for page, (new, scale) in zip(self.pages, rows, strict=True)
        )
        return keys, values

    def expected(self) -> Expected:
        """The reference's answer and the yardsticks', computed from what the cache holds after the step's write."""
        arguments, rules, n = (self.query, *self.keys_and_values(), *self.starts()), self.rules(), self.num_tokens
        output, lse = reference_attention(*arguments, **rules)
        found = [kernel(*arguments, **rules) for kernel in (tiled_yardstick, eager_yardstick)]
        return Expected(output, lse[:n], tuple(out for out, _ in found), tuple(lse[:n] for _, lse in found))

    def rules(self) -> dict[str, Any]:
        """The keyword arguments of the reference and of the yardsticks."""
        return {
            "scale": self.scale,
            "causal": self.case.attn_type == AttentionType.DECODER,
            "sliding_window": self.case.sliding_window,
            "alibi_slopes": self.alibi_slopes,
            "logits_soft_cap": self.case.logits_soft_cap,
            "sinks": self.sinks,
        }

    def starts(self) -> tuple[Tensor, Tensor]:
        """query_start_loc and key_start_loc of the sequences that attend."""
        m, kind = self.metadata, self.case.attn_type
        if kind in (AttentionType.ENCODER, AttentionType.ENCODER_DECODER) and m.encoder_seq_lens is not None:
            keys = starts_of(m.encoder_seq_lens.tolist())
            return (keys, keys) if kind == AttentionType.ENCODER else (m.query_start_loc.cpu(), keys)
        return m.query_start_loc.cpu(), starts_of(m.seq_lens.tolist())

    def keys_and_values(self) -> Pages:
        """Key and value of every sequence in order, as attention reads them: un-paged, dequantised."""
        pages = self.pages_after()
        if pages is None:
            if self.key is None or self.value is None:
                raise BadInputError(f"case {self.case.id} has neither keys nor a cache to read them from")
            return self.key, self.value
        lengths = self.starts()[1].diff().tolist()
        found = []
        for page, scale in zip(pages, (self.k_scale, self.v_scale), strict=True):
            parts = [
                read_pages(page, row, n) for row, n in zip(rows_of(self._tables(), len(lengths)), lengths, strict=True)
            ]
            flat = torch.cat(parts) if parts else page.new_empty(0, *page.shape[2:])
            found.append(flat if self.case.kv_cache_dtype == "auto" else dequantise(flat, scale))
        return found[0], found[1]

    def _allocate(self, backend: type[AttentionBackend], device: torch.device | str) -> KVCache:
        if self.pages is None:
            raise BadInputError(f"case {self.case.id} has no cache")
        case, dtype = self.case, self.pages[0].dtype
        shape = backend.get_kv_cache_shape(
            len(self.pages[0]),
            case.block_size,
            case.num_kv_heads,
            case.head_size,
            case.kv_cache_dtype,
            case.head_size_v,
        )
        if isinstance(shape[0], int):
            return torch.zeros(shape, dtype=dtype, device=device)
        keys, values = (torch.zeros(part, dtype=dtype, device=device) for part in shape)
        return keys, values

    def _write_context(self, impl: AttentionImpl | None, cache: KVCache) -> None:
        if impl is None:
            raise BadInputError("kv_views gives None, so the context can only be written by forward: give fill an impl")
        earlier = self.context_step()
        if earlier.key is not None and len(earlier.key):
            arguments = (earlier.query, earlier.key, earlier.value, cache, earlier.metadata)
            impl.forward(*arguments, self.k_scale, self.v_scale, AttentionType.DECODER)

    def context_step(self) -> Batch:
        """The earlier step that wrote what the cache holds: prefills without context, in the model's dtype."""
        if self.pages is None:
            raise BadInputError(f"case {self.case.id} has no cache, so no earlier step wrote one")
        rows = [row.tolist() for row in rows_of(self._tables(), len(self.held))]
        slots = [
            s for row, n in zip(rows, self.held, strict=False) for s in slots_of(row, range(n), self.case.block_size)
        ]
        metadata = step_metadata(
            self.held, [0] * len(self.held), rows[: len(self.held)], without_repeats(slots), decodes=0
        )
        where = torch.tensor(slots, dtype=torch.int64)
        keys, values = (
            dequantise(as_bytes(page).flatten(0, 1)[where].view(page.dtype), scale).to(self.query.dtype)
            for page, scale in zip(self.pages, (self.k_scale, self.v_scale), strict=True)
        )
        query = self.query.new_zeros(len(slots), *self.query.shape[1:])
        return replace(self, query=query, key=keys, value=values, metadata=metadata)

    def _tables(self) -> Tensor | None:
        cross = self.case.attn_type == AttentionType.ENCODER_DECODER
        return self.metadata.cross_block_tables if cross else self.metadata.block_tables


def _to(value: Any, device: torch.device | str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
