"""A backend out of one function: what a vendor writes to put a paged-attention kernel through the suite.

``from_kernel(fn, capabilities, layout)`` makes the class; heedful checks arguments and metadata, writes the cache,
answers empty rows and clears padding. fn only attends::

    def my_kernel(query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, *, scale):
        ...                                      # returns output [tokens, num_heads, head_size_v]

    MY_KERNEL = from_kernel(my_kernel, Capability(...), layout="NHD")

What fn gets: query [tokens, num_heads, head_size], without padding; key_cache and value_cache [num_blocks, block_size,
num_kv_heads, size] (NHD) or [num_blocks, num_kv_heads, block_size, size] (HND), this step's tokens already in them;
block_tables int32 [seqs, blocks], spare entries 0; query_start_loc int32 [seqs + 1]; seq_lens int32 [seqs], the keys of
each sequence. Every sequence has a query and a key. Queries are the last tokens of their sequence.

Keywords: scale; and, for what the capabilities claim and only then: causal (a claim of any attention type but
decoder), sliding_window, alibi_slopes, logits_soft_cap, sinks (each None where the layer has none), k_scale and
v_scale (a claim of an fp8 cache). A claim of ``lse`` means that fn returns (output, lse fp32 [tokens, num_heads]).

Attention without a cache (encoders, the profiling run) reaches fn as a small cache of the model's dtype that holds
the keys of the call, with scales of 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from heedful.backends.base import AttentionBackend, AttentionImpl, HndBackend, check_cache_arguments
from heedful.backends.capabilities import Capability
from heedful.backends.paged import FP8_DTYPES, nhd_views
from heedful.backends.paged_impl import Call, PagedImpl
from heedful.errors import BadInputError
from heedful.types import AttentionType

if TYPE_CHECKING:
    from heedful.backends.base import KVCache
    from heedful.backends.paged import Step

    Views = tuple[torch.Tensor, torch.Tensor]

Kernel = Callable[..., Any]

_POSITIONAL = ("query", "key_cache", "value_cache", "block_tables", "query_start_loc", "seq_lens")
_KEYWORDS = {
    "window": "sliding_window",
    "alibi": "alibi_slopes",
    "soft_cap": "logits_soft_cap",
    "sinks": "sinks",
}


class KernelBackend(HndBackend):
    """Base of the classes that from_kernel makes; pages lie head after head (HND)."""

    kernel: ClassVar[Kernel]
    impl: ClassVar[type[AttentionImpl]]
    keywords: ClassVar[tuple[str, ...]]

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """See AttentionBackend."""
        return cls.impl

    @staticmethod
    def plane(view: torch.Tensor) -> torch.Tensor:
        """From a view [num_blocks, block_size, num_kv_heads, size] to the kernel's own order of dimensions."""
        return view.transpose(1, 2)


class NhdKernelBackend(KernelBackend):
    """The same with pages that lie token after token (NHD)."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        kv_cache_dtype: str = "auto",
        head_size_v: int | None = None,
    ) -> tuple[int, ...] | tuple[tuple[int, ...], tuple[int, ...]]:
        """[2, num_blocks, block_size, num_kv_heads, head_size], or one shape for K and one for V where sizes differ."""
        check_cache_arguments(num_blocks, block_size, num_kv_heads, head_size, kv_cache_dtype, head_size_v)
        page = (num_blocks, block_size, num_kv_heads)
        if head_size_v is None or head_size_v == head_size:
            return (2, *page, head_size)
        return (*page, head_size), (*page, head_size_v)

    @staticmethod
    def kv_views(kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionBackend."""
        return nhd_views(kv_cache)

    @staticmethod
    def plane(view: torch.Tensor) -> torch.Tensor:
        """See KernelBackend."""
        return view


_LAYOUTS: dict[str, type[KernelBackend]] = {"NHD": NhdKernelBackend, "HND": KernelBackend}


def from_kernel(
    fn: Kernel, capabilities: Capability | Sequence[Capability], layout: str = "NHD", *, name: str | None = None
) -> type[AttentionBackend]:
    """A backend class around fn (see the module's text); bind it to ``name``, so that workers find ``module:name``.

    name: fn's name in capitals when None. Raises BadInputError for an unknown layout, or for a claim whose keyword fn
    does not take.
    """
    rows = (capabilities,) if isinstance(capabilities, Capability) else tuple(capabilities)
    word = fn.__name__.upper() if name is None else name
    if layout not in _LAYOUTS:
        raise BadInputError(f"unknown layout {layout!r}; give NHD or HND")
    if not word.isidentifier():
        raise BadInputError(f"a backend cannot be named {word!r}; give name=, the variable that the class is bound to")
    if not rows:
        raise BadInputError(f"{word} claims nothing; give at least one Capability")
    keywords = _keywords(rows)
    _check_signature(fn, word, keywords)
    facts = {"name": word, "CAPABILITIES": rows, "kernel": staticmethod(fn), "keywords": keywords}
    place = {"__module__": fn.__module__, "__doc__": fn.__doc__}
    made = type(word, (_LAYOUTS[layout],), facts | place | {"__qualname__": word})
    backend = cast("type[KernelBackend]", made)
    backend.impl = type(f"{word}_Impl", (KernelImpl,), place | {"backend": backend})
    return backend


def _keywords(rows: Sequence[Capability]) -> tuple[str, ...]:
    """The keyword arguments that the claims ask for."""
    kinds = frozenset().union(*(row.attn_types for row in rows))
    features = frozenset().union(*(row.features for row in rows))
    caches = frozenset().union(*(row.kv_cache_dtypes for row in rows))
    found = ["scale"]
    if kinds - {AttentionType.DECODER}:
        found.append("causal")
    found += [keyword for feature, keyword in _KEYWORDS.items() if feature in features]
    return (*found, *(("k_scale", "v_scale") if caches & set(FP8_DTYPES) else ()))


def _check_signature(fn: Kernel, name: str, keywords: Sequence[str]) -> None:
    try:
        inspect.signature(fn).bind(*_POSITIONAL, **dict.fromkeys(keywords))
    except TypeError as cause:
        call = f"{', '.join(_POSITIONAL)}, *, {', '.join(keywords)}"
        raise BadInputError(
            f"{fn.__name__} cannot be called as its claims ask ({cause}); take ({call}) or claim less for {name}"
        ) from cause
    except ValueError:  # a built-in without a signature: the call itself will tell
        return


@dataclass(frozen=True)
class _Batch:
    """What fn gets beside query and cache, and the rows of the call that it answers. tables int32 [seqs, blocks],
    starts int32 [seqs + 1], lens int32 [seqs]; rows int64, None where they are all rows in order."""

    tables: torch.Tensor
    starts: torch.Tensor
    lens: torch.Tensor
    rows: torch.Tensor | None
    num_tokens: int


def _batch(step: Step, tables: torch.Tensor, device: torch.device) -> _Batch:
    """Only sequences with a query and a key: the rows of others need no kernel. tables: [seqs, blocks] on the CPU."""
    alive = [i for i, (q, k) in enumerate(zip(step.query_lens, step.key_lens, strict=True)) if q and k]
    starts = list(accumulate((step.query_lens[i] for i in alive), initial=0))
    rows = [row for i in alive for row in range(*step.query_starts[i : i + 2])]
    chosen = None if len(rows) == step.num_tokens else torch.tensor(rows, device=device)
    lens = torch.tensor([step.key_lens[i] for i in alive], dtype=torch.int32, device=device)
    used = tables[torch.tensor(alive, dtype=torch.int64)].to(device, torch.int32)
    return _Batch(used, torch.tensor(starts, dtype=torch.int32, device=device), lens, chosen, len(rows))


class KernelImpl(PagedImpl):
    """A layer around a function; see the module's text."""

    backend: ClassVar[type[KernelBackend]]

    def attend(self, call: Call) -> None:
        """See PagedImpl."""
        rows = call.step.num_tokens
        call.output[:rows] = 0
        if call.lse is not None:
            call.lse[:rows] = -torch.inf if self.sinks is None else self.sinks.to(call.lse.device)
        views, batch = self._uncached(call) if call.views is None else (call.views, self._cached(call))
        if batch.num_tokens:
            self._put(call, batch, self._answer_of(call, views, batch))

    def _cached(self, call: Call) -> _Batch:
        """Worked out by the first layer of a step, on the device of its query."""
        key = ("from_kernel", call.query.device)
        if key not in call.step.derived:
            assert call.step.tables is not None
            call.step.derived[key] = _batch(call.step, call.step.tables, call.query.device)
        found: _Batch = call.step.derived[key]
        return found

    def _uncached(self, call: Call) -> tuple[Views, _Batch]:
        """The call's own keys as pages, each sequence from a new page on; page 0 is spare."""
        sizes, lens = self.backend.CAPABILITIES[0].block_sizes, call.step.key_lens
        size = 16 if sizes.accepts(16) else sizes.smallest
        counts = torch.tensor([-(-length // size) for length in lens], dtype=torch.int64)
        firsts = counts.cumsum(0) - counts + 1
        width = max(counts.tolist(), default=0)
        tables = torch.where(torch.arange(width) < counts[:, None], firsts[:, None] + torch.arange(width), 0)
        blocks = int(counts.sum()) + 1
        slots = [first * size + j for first, n in zip(firsts.tolist(), lens, strict=True) for j in range(n)]
        at = torch.tensor(slots, dtype=torch.int64, device=call.query.device)
        assert call.key is not None
        assert call.value is not None
        views = (self._scratch(call.key, at, blocks, size), self._scratch(call.value, at, blocks, size))
        return views, _batch(call.step, tables, call.query.device)

    def _scratch(self, x: torch.Tensor, at: torch.Tensor, blocks: int, size: int) -> torch.Tensor:
        """Rows of x at the slots: a view [blocks, size, num_kv_heads, x's size] of pages in the kernel's layout."""
        plane = self.backend.plane  # its own inverse
        view = plane(plane(x.new_zeros(blocks, size, *x.shape[1:])).contiguous())
        view[at // size, at % size] = x[: len(at)]
        return view

    def _answer_of(self, call: Call, views: Views, batch: _Batch) -> Any:
        query = call.query[: batch.num_tokens] if batch.rows is None else call.query.index_select(0, batch.rows)
        planes = [self.backend.plane(view) for view in views]
        keywords = {word: value for word, value in self._values(call).items() if word in self.backend.keywords}
        numbers = (batch.tables, batch.starts, batch.lens)
        return self.backend.kernel(query.contiguous(), *planes, *numbers, **keywords)

    def _values(self, call: Call) -> dict[str, Any]:
        device, paged = call.query.device, call.views is not None
        return {
            "scale": self.scale,
            "causal": call.step.causal,
            "sliding_window": self.sliding_window,
            "alibi_slopes": None if self.alibi_slopes is None else self.alibi_slopes.to(device),
            "logits_soft_cap": self.logits_soft_cap,
            "sinks": None if self.sinks is None else self.sinks.to(device),
            "k_scale": call.k_scale if paged else 1.0,
            "v_scale": call.v_scale if paged else 1.0,
        }

    def _put(self, call: Call, batch: _Batch, answer: Any) -> None:
        """Check what the kernel gave, then into the rows of the call."""
        has_lse = any("lse" in row.features for row in self.backend.CAPABILITIES)
        parts = answer if has_lse and isinstance(answer, tuple) else (answer,)
        rows_heads = (batch.num_tokens, self.num_heads)
        shapes = [(*rows_heads, self.head_size_v), rows_heads]
        wanted = shapes if has_lse else shapes[:1]
        got = [tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__ for part in parts]
        if got != wanted:
            raise BadInputError(f"{self.backend.name} returned {got}; its claims promise {wanted}")
        rows = slice(0, batch.num_tokens) if batch.rows is None else batch.rows
        call.output[rows] = parts[0].to(call.output.dtype)
        if call.lse is not None:
            call.lse[rows] = parts[1].float()
