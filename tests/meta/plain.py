"""A correct paged attention backend in eager torch, one rule of the contract a method, made to be broken.

It shares no code with TORCH_SDPA, the reference or the suite. One class plays both roles, Backend and Impl, so that a
wrong variant is one subclass that overrides one method. Everything is computed in fp32, one sequence at a time.
Shapes: n query tokens, m keys, H heads, KV heads, D and Dv sizes; scores and logits are [H, n, m].
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch

from heedful.backends.base import AttentionImpl
from heedful.backends.capabilities import Capability, Sizes, unsupported_reasons
from heedful.errors import BadInputError, UnsupportedError
from heedful.types import DTYPES, AttentionType, Device, SelectionRequest, check_request
from meta import plain_checks as checks
from meta.plain_pages import PlainPages

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
EVERYTHING = Capability(
    variant="plain",
    platform="cpu",
    dtypes=frozenset(DTYPES),
    head_sizes=Sizes(),
    block_sizes=Sizes(),
    kv_cache_dtypes=frozenset({"auto", *FP8}),
    attn_types=frozenset(AttentionType),
    features=frozenset({"window", "alibi", "soft_cap", "sinks", "lse"}),
    mixed_head_sizes=True,
)


CPU = Device("cpu")


@dataclass(frozen=True)
class Part:
    """One sequence's share of a step: its query rows, and its keys either in pages (table) or in the call (source)."""

    index: int
    rows: slice
    query_len: int
    kv_len: int
    kind: str
    phase: str
    dtype: torch.dtype
    table: tuple[int, ...] = ()
    source: slice | None = None
    step: dict[Any, Any] = field(default_factory=dict)

    @property
    def is_encoder(self) -> bool:
        """Both ways visible: every token of the sequence sees every other."""
        return self.kind in ("encoder", "encoder_only")


@dataclass(frozen=True)
class Call:
    """One forward: 3-D tensors, the cache as (K, V) views or None where none is used, host values, float scales."""

    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    views: tuple[torch.Tensor, torch.Tensor] | None
    host: checks.Host
    kind: str
    k_scale: float
    v_scale: float


class Plain(PlainPages, AttentionImpl):
    """Right in every row of the contract's table."""

    name = "Plain"
    CAPABILITIES = (EVERYTHING,)
    ENFORCES: ClassVar[tuple[Capability, ...] | None] = None
    VALIDATES: ClassVar[frozenset[str]] = checks.ALL

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__

    # Backend ---------------------------------------------------------------------------------------------------------

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        return cls

    # Impl: construction ----------------------------------------------------------------------------------------------

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        blocksparse_params=None,
        logits_soft_cap=None,
        sinks=None,
        head_size_v=None,
    ) -> None:
        self.request = SelectionRequest(
            head_size=head_size,
            sliding_window=sliding_window,
            dtype="float32",
            kv_cache_dtype=kv_cache_dtype,
            is_blocksparse=blocksparse_params is not None,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size_v=head_size_v,
            attn_type=next(iter(self.CAPABILITIES[0].attn_types)) if self.CAPABILITIES else "decoder",
            alibi=alibi_slopes is not None,
            logits_soft_cap=logits_soft_cap,
            sinks=sinks is not None,
        )
        check_request(self.request)
        checks.number("scale", scale)
        self.heads, self.kv_heads = num_heads, num_kv_heads or num_heads
        self.size, self.size_v = head_size, head_size_v or head_size
        self.scale, self.window, self.cap = scale, sliding_window, logits_soft_cap
        self.slopes = checks.per_head("alibi_slopes", alibi_slopes, num_heads)
        self.sinks = checks.per_head("sinks", sinks, num_heads)
        self.cache_word = kv_cache_dtype
        self.refuse(self.request, skip=("encoder_decoder",))

    def refuse(self, request: SelectionRequest, skip: tuple[str, ...] = ()) -> None:
        """What CAPABILITIES exclude raises here; pairs with an attention type can only be seen in forward."""
        reasons = unsupported_reasons(self.name, self.ENFORCES or self.CAPABILITIES, request, CPU)
        kept = [r for r in reasons if not any(word in r.asked for word in skip)]
        if kept:
            raise UnsupportedError(f"{self.name} cannot serve {request.to_dict()}: {kept[0]}", tuple(kept))

    # Impl: one call --------------------------------------------------------------------------------------------------

    def forward(
        self,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        k_scale=1.0,
        v_scale=1.0,
        attn_type=AttentionType.DECODER,
        output=None,
        output_lse=None,
    ) -> torch.Tensor:
        self.check_lse(output_lse)
        call = self.opened(query, key, value, kv_cache, attn_metadata, (k_scale, v_scale), attn_type)
        target = self.target(output, query)
        checks.lse_target(output_lse, (query.shape[0], self.heads))
        out, lse = self.step(call)
        self.fill_lse(output_lse, lse)
        return self.answer(call, out, target)

    def step(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Write, then read."""
        self.write(call)
        return self.computed(call)

    def computed(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 output [tokens, H, Dv] and LSE [tokens, H]; rows of padding are 0 and -inf."""
        tokens = call.query.shape[0]
        out, lse = torch.zeros(tokens, self.heads, self.size_v), torch.full((tokens, self.heads), -torch.inf)
        for part in self.parts(call):
            k, v = self.keys_values(call, part)
            out[part.rows], lse[part.rows] = self.attend(call.query[part.rows].float(), k, v, part)
        return out, lse

    def opened(self, query, key, value, kv_cache, metadata, scales, attn_type) -> Call:
        """Check everything once, on host values."""
        kind = checks.kind(attn_type)
        dtype = str(query.dtype).removeprefix("torch.")
        block_size = self.request.block_size if checks.is_empty(kv_cache) else self.kv_views(kv_cache)[0].shape[1]
        self.refuse(replace(self.request, dtype=dtype, attn_type=kind, block_size=block_size))
        k_scale, v_scale = (self.scale_value(scale) for scale in scales)
        query = checks.three_dims("query", query, self.heads, self.size)
        if key is not None:
            key = checks.three_dims("key", key, self.kv_heads, self.size, query.dtype)
            value = checks.three_dims("value", value, self.kv_heads, self.size_v, query.dtype)
            checks.same_rows(key, value)
        views = self.opened_views(kv_cache, kind, query.dtype)
        host = self.validated(metadata, query, key, views, kind)
        return Call(query, key, value, views, host, kind, k_scale, v_scale)

    def opened_views(self, kv_cache: Any, kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
        """None for kinds without a cache, and in the profiling run."""
        if kind in ("encoder", "encoder_only") or checks.is_empty(kv_cache):
            return None
        views = self.kv_views(kv_cache)
        wanted = FP8.get(self.cache_word, dtype)
        checks.cache(views, wanted, (self.kv_heads, self.size, self.size_v))
        return views

    def validated(self, metadata, query, key, views, kind) -> checks.Host:
        rows = None if key is None else key.shape[0]
        return checks.metadata(metadata, query.shape[0], rows, views, kind, self.VALIDATES)

    def scale_value(self, scale: float | torch.Tensor) -> float:
        """One positive finite number; 1 unless the cache is fp8."""
        return checks.scale(scale, self.cache_word in FP8)

    def check_lse(self, output_lse: torch.Tensor | None) -> None:
        if output_lse is not None and not any("lse" in row.features for row in self.CAPABILITIES):
            raise UnsupportedError(f"{self.name} computes no LSE; call it without output_lse")

    def target(self, output: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor:
        """The tensor to fill, in the caller's form: flat if the query is."""
        shape = (query.shape[0], self.heads, self.size_v)
        shape = shape if query.dim() == 3 else (shape[0], shape[1] * shape[2])
        if output is None:
            return torch.empty(shape, dtype=query.dtype)
        if output.dtype != query.dtype or output.numel() != query.shape[0] * self.heads * self.size_v:
            raise BadInputError(f"output is {output.dtype} {tuple(output.shape)}; give {query.dtype} {shape}")
        return output

    def answer(self, call: Call, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Fill in place and return."""
        return target.copy_(out.reshape(target.shape))

    def fill_lse(self, output_lse: torch.Tensor | None, lse: torch.Tensor) -> None:
        if output_lse is not None:
            output_lse.copy_(lse)

    # Rules: cache ----------------------------------------------------------------------------------------------------

    def write(self, call: Call) -> None:
        """This step's K and V go into the cache before anything is read."""
        if call.views is None or call.key is None:
            return
        slots = self.slots(call)
        self.put(call.views[0], slots, self.stored(call.key[: len(slots)], call.k_scale, call.views[0].dtype))
        self.put(call.views[1], slots, self.stored(call.value[: len(slots)], call.v_scale, call.views[1].dtype))

    def slots(self, call: Call) -> list[int]:
        return call.host.cross_slots if call.kind == "encoder_decoder" else call.host.slots

    def put(self, view: torch.Tensor, slots: list[int], rows: torch.Tensor) -> None:
        for row, slot in zip(rows, slots, strict=True):
            if self.is_written(slot):
                block, offset = self.address(slot, view)
                view[block, offset] = row

    def is_written(self, slot: int) -> bool:
        return slot >= 0

    def address(self, slot: int, view: torch.Tensor) -> tuple[int, int]:
        """(block, offset) in Python's integers: no width to overflow."""
        return divmod(slot, view.shape[1])

    def stored(self, rows: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
        """What the cache holds: round_even(clamp(x / scale)) in fp8, the rows themselves otherwise."""
        if dtype not in FP8.values():
            return rows
        top = torch.finfo(dtype).max
        return (rows.float() / scale).clamp(-top, top).to(dtype)

    def read(self, rows: torch.Tensor, scale: float) -> torch.Tensor:
        return rows.float() * scale if rows.dtype in FP8.values() else rows.float()

    def keys_values(self, call: Call, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 [m, KV, D], [m, KV, Dv] of one sequence: from its pages, or from the call where there is no cache."""
        if part.source is not None:
            return call.key[part.source].float(), call.value[part.source].float()
        k_view, v_view = call.views
        return self.read(self.gather(k_view, part), call.k_scale), self.read(self.gather(v_view, part), call.v_scale)

    def gather(self, view: torch.Tensor, part: Part) -> torch.Tensor:
        """The first kv_len rows of the sequence's pages."""
        position = torch.arange(part.kv_len)
        table = torch.tensor(part.table, dtype=torch.int64)
        return view[table[position // view.shape[1]], position % view.shape[1]]

    def parts(self, call: Call) -> list[Part]:
        """The sequences that have query rows; prefill or decode is the state that the metadata gives."""
        host, kind, found = call.host, call.kind, []
        starts = host.encoder_starts if kind == "encoder" else host.starts
        for i, (start, stop) in enumerate(pairwise(starts)):
            kv_len = self.kv_len(host, kind, i)
            phase = "prefill" if i < host.num_prefills or kind == "encoder" else "decode"
            lens, table = (slice(start, stop), stop - start, kv_len), self.table(host, kind, i)
            part = Part(i, *lens, kind, phase, call.query.dtype, table, step=host.step)
            found.append(part if call.views is not None else self.unpaged(part, host))
        return [part for part in found if part.query_len]

    def kv_len(self, host: checks.Host, kind: str, i: int) -> int:
        return host.encoder_lens[i] if kind in ("encoder", "encoder_decoder") else host.seq_lens[i]

    def table(self, host: checks.Host, kind: str, i: int) -> tuple[int, ...]:
        tables = host.cross_tables if kind == "encoder_decoder" else host.tables
        return tuple(tables[i]) if i < len(tables) else ()

    def unpaged(self, part: Part, host: checks.Host) -> Part:
        starts = host.encoder_starts if part.kind in ("encoder", "encoder_decoder") else host.starts
        source = slice(starts[part.index], starts[part.index] + part.kv_len)
        return replace(part, table=(), source=source)

    # Rules: numbers --------------------------------------------------------------------------------------------------

    def attend(self, q, k, v, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """q fp32 [n, H, D], k [m, KV, D], v [m, KV, Dv] -> output [n, H, Dv], natural-log LSE [n, H]."""
        keys, values = k[:, self.head_map()].transpose(0, 1), v[:, self.value_head_map()].transpose(0, 1)
        logits = self.logits(self.scores(q.transpose(0, 1), keys, part), part)
        sink = torch.full(logits.shape[:2], -torch.inf) if self.sinks is None else self.sink_logits(logits, part)
        weights, lse = self.normalised(logits, sink)
        out = self.weighted(weights, values, part)
        return out.transpose(0, 1), self.reported_lse(lse, logits, sink).transpose(0, 1)

    def head_map(self) -> torch.Tensor:
        return torch.arange(self.heads) // (self.heads // self.kv_heads)

    def value_head_map(self) -> torch.Tensor:
        return self.head_map()

    def scores(self, q: torch.Tensor, k: torch.Tensor, part: Part) -> torch.Tensor:
        return q @ k.transpose(-1, -2)

    def logits(self, scores: torch.Tensor, part: Part) -> torch.Tensor:
        """The order of the rules: scale, soft cap, bias, mask."""
        return self.masked(self.biased(self.capped(self.scaled(scores, part), part), part), part)

    def scaled(self, scores: torch.Tensor, part: Part) -> torch.Tensor:
        return scores * self.scale

    def capped(self, x: torch.Tensor, part: Part) -> torch.Tensor:
        return x if self.cap is None else self.cap * torch.tanh(x / self.cap)

    def biased(self, x: torch.Tensor, part: Part) -> torch.Tensor:
        return x if self.slopes is None else x + self.bias(part)

    def bias(self, part: Part) -> torch.Tensor:
        """fp32 [H, n, m]: 0 on the diagonal, falling with distance on both sides."""
        return -self.slopes[:, None, None] * self.distance(part).abs()

    def distance(self, part: Part) -> torch.Tensor:
        """[n, m]: how far each key lies behind each query; fp32 holds every position exactly."""
        return self.positions(part)[:, None].float() - torch.arange(part.kv_len).float()

    def positions(self, part: Part) -> torch.Tensor:
        """Bottom-right: the last query stands at the last key."""
        return part.kv_len - part.query_len + torch.arange(part.query_len)

    def masked(self, x: torch.Tensor, part: Part) -> torch.Tensor:
        return x.masked_fill(~self.visible(part), -torch.inf)

    def visible(self, part: Part) -> torch.Tensor:
        """bool [n, m]."""
        ahead = torch.arange(part.kv_len) - self.positions(part)[:, None]
        return self.causal(ahead, part) & self.windowed(ahead, part)

    def causal(self, ahead: torch.Tensor, part: Part) -> torch.Tensor:
        """ahead [n, m] = key position - query position."""
        return ahead <= 0 if part.kind == "decoder" else torch.ones_like(ahead, dtype=torch.bool)

    def windowed(self, ahead: torch.Tensor, part: Part) -> torch.Tensor:
        """The token itself counts: min(i + 1, W) keys, in an encoder W - 1 to each side."""
        width = self.window_of(part)
        return torch.ones_like(ahead, dtype=torch.bool) if width is None else ahead.abs() < width

    def window_of(self, part: Part) -> int | None:
        return self.window

    def sink_logits(self, logits: torch.Tensor, part: Part) -> torch.Tensor:
        """[H, n]: one more logit a row, as given."""
        return self.sinks[:, None].expand(logits.shape[:2])

    def normalised(self, logits: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [H, n, m] with the sink in the denominator only, and the LSE [H, n] of that denominator."""
        with_sink = torch.cat((logits, sink[..., None]), -1)
        weights = torch.softmax(with_sink, -1)[..., :-1]
        lse = torch.logsumexp(with_sink, -1)
        return self.empty_rows(weights, lse), lse

    def empty_rows(self, weights: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return weights.masked_fill(lse.isneginf()[..., None], 0.0)

    def weighted(self, weights: torch.Tensor, values: torch.Tensor, part: Part) -> torch.Tensor:
        return weights @ values

    def reported_lse(self, lse: torch.Tensor, logits: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        return lse
