"""The frame of a layer that reads a paged cache: check the arguments, write K and V, attend, clear the pad rows.

A backend derives from PagedImpl and writes one method, ``attend``; refusals, errors and padding are then alike in all.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from heedful.backends import paged_arguments as arguments
from heedful.backends.base import AttentionBackend, AttentionImpl, AttentionMetadata, refuse_unknown, refuse_unsupported
from heedful.backends.paged import cache_dtype, cache_parts, validate_metadata, write_cache
from heedful.backends.paged_repeat import Kept, cache_sides, form_of, keep, kept
from heedful.errors import BadInputError, UnsupportedError
from heedful.memory import Apart, check_apart, check_no_gradient, check_unshared
from heedful.types import AttentionType, Reason, ReasonCode, SelectionRequest, check_request

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from heedful.backends.base import KVCache
    from heedful.backends.paged import Step
    from heedful.backends.paged_repeat import Repeat

_UNCACHED = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


@dataclass(frozen=True)
class Call:
    """One forward, checked. T query rows, H heads, KV heads, D and Dv sizes.

    query [T, H, D]; key, value [rows, KV, D | Dv] or None; views of the cache [num_blocks, block_size, KV, D | Dv], or
    None where keys are taken from key and value (encoders, the profiling run). output [T, H, Dv] in the query's dtype,
    lse fp32 [T, H] or None: attend fills the rows of sequences in both.
    """

    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    views: tuple[torch.Tensor, torch.Tensor] | None
    step: Step
    kind: AttentionType
    k_scale: float
    v_scale: float
    output: torch.Tensor
    lse: torch.Tensor | None


class PagedImpl(AttentionImpl):
    """A layer over a paged cache. ``backend`` names the class whose CAPABILITIES and layout it has."""

    backend: ClassVar[type[AttentionBackend]]
    repeats = False
    """Whether run may answer with a Repeat: only a layer that computes on the CPU."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Sequence[float] | torch.Tensor | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        blocksparse_params: dict[str, Any] | None = None,
        logits_soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        head_size_v: int | None = None,
        **unknown: object,
    ) -> None:
        """See AttentionImpl."""
        refuse_unknown(f"{type(self).__name__}()", unknown, AttentionImpl.__init__)
        self.num_heads = arguments.whole_number("num_heads", num_heads)
        self.num_kv_heads = num_heads if num_kv_heads is None else arguments.whole_number("num_kv_heads", num_kv_heads)
        self.head_size = arguments.whole_number("head_size", head_size)
        self.head_size_v = head_size if head_size_v is None else arguments.whole_number("head_size_v", head_size_v)
        self.request = SelectionRequest(
            head_size=head_size,
            sliding_window=sliding_window,
            kv_cache_dtype=kv_cache_dtype,
            is_blocksparse=blocksparse_params is not None,
            num_heads=num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size_v=head_size_v,
            alibi=alibi_slopes is not None,
            logits_soft_cap=logits_soft_cap,
            sinks=sinks is not None,
        )
        check_request(self.request)
        self.scale = arguments.positive_number("scale", scale)
        self.sliding_window, self.logits_soft_cap = sliding_window, logits_soft_cap
        self.kv_cache_dtype = kv_cache_dtype
        self.alibi_slopes = arguments.per_head("alibi_slopes", alibi_slopes, num_heads, finite=True)
        self.sinks = arguments.per_head("sinks", sinks, num_heads, finite=False)
        refuse_unsupported(self.backend, self.request)
        self._alike = _alike(type(self), self.request)

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @abstractmethod
    def attend(self, call: Call) -> None:
        """Fill call.output and call.lse for every row that belongs to a sequence. The cache is written already."""

    def run(self, call: Call) -> Repeat | None:
        """Write, then attend. The answer: how other calls of the same form and step can do so, if they can."""
        self.write(call)
        self.attend(call)
        return None

    def write(self, call: Call) -> None:
        """Store this step's K and V in the cache, where there is one."""
        if call.views is not None and call.key is not None and call.value is not None:
            write_cache(call.key, call.value, call.views, call.step, call.k_scale, call.v_scale)

    def row_size(self, size: int) -> int:
        """Elements of a head's row in the cache."""
        return size

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCache,
        attn_metadata: AttentionMetadata,
        k_scale: float | torch.Tensor = 1.0,
        v_scale: float | torch.Tensor = 1.0,
        attn_type: AttentionType | str = AttentionType.DECODER,
        output: torch.Tensor | None = None,
        output_lse: torch.Tensor | None = None,
        **unknown: object,
    ) -> torch.Tensor:
        """See AttentionImpl."""
        if unknown:
            refuse_unknown(f"{type(self).__name__}.forward()", unknown, AttentionImpl.forward)
        check_no_gradient((("query", query), ("key", key), ("value", value), ("output", output)))
        scales = self._scales(k_scale, v_scale)
        form = None
        if self.repeats:
            form = form_of(self._alike, attn_type, query, key, value, kv_cache, output, output_lse)
        known = kept(attn_metadata, form)
        if known is None or not known.apart.holds((output, output_lse), (query, key, value, *cache_sides(kv_cache))):
            given = (query, key, value, kv_cache, attn_metadata, scales, attn_type, output, output_lse)
            with torch.no_grad():
                return self._checked(form, *given)
        answer = self._new_answer(query) if output is None else output
        known.repeat.run(self, query, key, value, kv_cache, scales, answer, output_lse)
        if known.pads:
            _clear(known.step, answer, output_lse)
        return answer

    def _checked(
        self,
        form: Hashable,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        scales: tuple[float, float],
        attn_type: AttentionType | str,
        output: torch.Tensor | None,
        output_lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """Forward with every check; what passed them all is kept under its form."""
        answer = self._answer(query, output)
        call = self._call(query, key, value, kv_cache, metadata, scales, attn_type, answer, output_lse)
        repeat, pads = self.run(call), len(answer) > call.step.num_tokens
        if pads:
            _clear(call.step, answer, output_lse)
        if repeat is not None:
            apart = Apart((output, output_lse), (query, key, value, *cache_sides(kv_cache)))
            keep(metadata, form, Kept(call.step, repeat, pads, apart))
        return answer

    def _call(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        scales: tuple[float, float],
        attn_type: AttentionType | str,
        answer: torch.Tensor,
        output_lse: torch.Tensor | None,
    ) -> Call:
        kind = arguments.attention_type(attn_type)
        if not isinstance(metadata, AttentionMetadata):
            raise BadInputError(f"attn_metadata is {type(metadata).__name__}; give an AttentionMetadata")
        q = arguments.rows_of_heads("query", query, self.num_heads, self.head_size)
        k, v = self._keys(key, value, q, kind)
        views = None if kind in _UNCACHED else self._views(kv_cache, q)
        num_blocks, block_size = (0, 0) if views is None else views[0].shape[:2]
        self._refuse(q, kind, block_size)
        lse = self._lse(output_lse, q)
        step = validate_metadata(metadata, kind, len(q), None if k is None else len(k), num_blocks, block_size)
        out = answer.view(len(answer), self.num_heads, self.head_size_v)
        caches = () if views is None else (("the K cache", views[0]), ("the V cache", views[1]))
        check_apart((("output", out), ("output_lse", lse)), (("query", q), ("key", k), ("value", v), *caches))
        return Call(q, k, v, views, step, kind, *scales, out, lse)

    def _scales(self, k_scale: float | torch.Tensor, v_scale: float | torch.Tensor) -> tuple[float, float]:
        if type(k_scale) is type(v_scale) is float and k_scale == v_scale == 1.0:
            return 1.0, 1.0
        found = arguments.positive_number("k_scale", k_scale), arguments.positive_number("v_scale", v_scale)
        if self.kv_cache_dtype in ("auto", "u8") and found != (1.0, 1.0):
            raise BadInputError(
                f"k_scale {found[0]} and v_scale {found[1]} came, but a cache of kv_cache_dtype "
                f"{self.kv_cache_dtype!r} has no scale; leave them at 1 or build the layer with an fp8 cache"
            )
        return found

    def _answer(self, query: Any, output: torch.Tensor | None) -> torch.Tensor:
        """The tensor that forward returns: output itself, or a new one in the query's form, flat or not."""
        q = arguments.rows_of_heads("query", query, self.num_heads, self.head_size)
        if q.dtype not in arguments.MODEL_DTYPES:
            words = ", ".join(map(arguments.name_of, arguments.MODEL_DTYPES))
            raise BadInputError(f"query is {arguments.name_of(q.dtype)}; give one of {words}")
        if output is None:
            return self._new_answer(query)
        heads, size = self.num_heads, self.head_size_v
        flat = isinstance(output, torch.Tensor) and output.dim() == 2
        shape = (len(q), heads * size) if flat else (len(q), heads, size)
        return arguments.writable("output", output, shape, q.dtype, q.device)

    def _new_answer(self, query: torch.Tensor) -> torch.Tensor:
        rows, heads, size = query.shape[0], self.num_heads, self.head_size_v
        shape = (rows, heads * size) if query.dim() == 2 else (rows, heads, size)
        return torch.empty(shape, dtype=query.dtype, device=query.device)  # dense, whatever the query is

    def _keys(
        self, key: torch.Tensor | None, value: torch.Tensor | None, query: torch.Tensor, kind: AttentionType
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if (key is None) != (value is None):
            raise BadInputError("one of key and value is None; give both, or neither for encoder_decoder attention")
        if key is None:
            if kind is not AttentionType.ENCODER_DECODER:
                raise BadInputError(f"key and value are None; {kind} attention needs them in every step")
            return None, None
        k = arguments.rows_of_heads("key", key, self.num_kv_heads, self.head_size)
        v = arguments.rows_of_heads("value", value, self.num_kv_heads, self.head_size_v)
        arguments.same_kind("key", k, query)
        arguments.same_kind("value", v, query)
        wanted = len(k) if kind is AttentionType.ENCODER_DECODER else len(query)
        if (len(k), len(v)) != (wanted, wanted):
            raise BadInputError(f"key has {len(k)} rows, value {len(v)}, query {len(query)}; they must agree")
        return k, v

    def _views(self, kv_cache: KVCache, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The cache as checked views, or None in the profiling run, where the cache is empty."""
        arguments.check_cache(kv_cache)
        if all(part.numel() == 0 for part in cache_parts(kv_cache)):
            return None
        views = self.backend.kv_views(kv_cache)
        if views is None:
            raise BadInputError(f"{self.backend.name} has an opaque cache layout; PagedImpl needs views of it")
        dtype = cache_dtype(self.kv_cache_dtype, query.dtype)
        for name, view, size in (("K", views[0], self.head_size), ("V", views[1], self.head_size_v)):
            self._check_view(name, view, self.row_size(size), dtype, query.device)
        arguments.check_sides(*views)
        if views[0].shape[:2] != views[1].shape[:2]:
            raise BadInputError(
                f"the K cache has pages {list(views[0].shape[:2])}, the V cache {list(views[1].shape[:2])}"
            )
        return views

    def _check_view(self, name: str, view: torch.Tensor, size: int, dtype: torch.dtype, device: torch.device) -> None:
        if tuple(view.shape[2:]) != (self.num_kv_heads, size):
            got = f"{view.shape[2]} heads of size {view.shape[3]}"
            raise BadInputError(f"the {name} cache has {got}, but the layer has {self.num_kv_heads} of size {size}")
        if view.dtype != dtype:
            asked = f"kv_cache_dtype {self.kv_cache_dtype!r} with this query means {arguments.name_of(dtype)}"
            raise BadInputError(f"the {name} cache is {arguments.name_of(view.dtype)}, but {asked}")
        if view.device != device:
            raise BadInputError(f"the {name} cache is on {view.device}, but query is on {device}")
        check_unshared(f"the {name} cache", view)

    def _lse(self, output_lse: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
        if output_lse is None:
            return None
        if not any("lse" in row.features for row in self.backend.CAPABILITIES):
            text = f"{self.backend.name} returns no LSE (capability: lse)"
            reason = Reason(ReasonCode.CAPABILITY, text, "output_lse", "None", "leave output_lse out")
            raise UnsupportedError(f"output_lse was given, but {text}; leave it out", (reason,))
        return arguments.writable("output_lse", output_lse, (len(query), self.num_heads), torch.float32, query.device)

    def _refuse(self, query: torch.Tensor, kind: AttentionType, block_size: int) -> None:
        """What only a call tells (dtype, kind, page size) may be excluded too; each answer is worked out once."""
        _allowed(self.backend, self.request, arguments.name_of(query.dtype), str(kind), block_size)


def _clear(step: Step, output: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Empty the rows past those of the sequences."""
    with torch.no_grad():
        output[step.num_tokens :] = 0
        if lse is not None:
            lse[step.num_tokens :] = -torch.inf


@dataclass(frozen=True, eq=False)
class _Alike:
    """Stands for all layers whose forward checks alike; told from others by identity, which is quicker than a hash."""

    layer: type[PagedImpl]
    request: SelectionRequest


_alike = lru_cache(maxsize=1024)(_Alike)


@lru_cache(maxsize=1024)
def _allowed(
    backend: type[AttentionBackend], request: SelectionRequest, dtype: str, kind: str, block_size: int
) -> None:
    """Raise UnsupportedError as refuse_unsupported does; what was allowed once is not looked at again."""
    known = frozenset({"dtype", "attn_type", "block_size"} if block_size else {"dtype", "attn_type"})
    size = block_size or request.block_size
    refuse_unsupported(backend, replace(request, dtype=dtype, attn_type=kind, block_size=size), known)
