"""The contract of a backend: static facts (Backend), one object a layer (Impl), one a step (Metadata), graph State.

This module imports no torch, so that the selector, the planner and a report can read CAPABILITIES anywhere.
Shapes and rules are DESIGN §3's: docs/contract.md repeats them for kernel authors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar

from heedful.backends.capabilities import Capability, row_reasons, supported_variant, unsupported_reasons
from heedful.errors import BadInputError, UnknownArgumentError, UnsupportedError
from heedful.types import KV_CACHE_DTYPES, AttentionType, Device, Reason, ReasonCode, SelectionRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from heedful.backends.builds import Build

    KVCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class AttentionBackend(ABC):
    """Static facts of one backend. Never instantiated; everything is a class member."""

    name: ClassVar[str]
    CAPABILITIES: ClassVar[tuple[Capability, ...]]
    LIBRARIES: ClassVar[tuple[str, ...]] = ()
    """Import names that every variant needs; a variant's own stand in its Capability row."""
    BUILDS: ClassVar[tuple[Build, ...]] = ()
    """What a lane ``compiled`` builds; compile_build makes each."""
    EMULATES: ClassVar[bool] = False
    """Whether the layer also computes on host memory where the device is absent: in an interpreter, slowly."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """The class of a layer's object; importing it may load torch and the backend's library."""

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        """The class of a step's metadata: one shared type."""
        return AttentionMetadata

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """The class that builds a step's metadata from sequences."""
        from heedful.backends.paged import CommonMetadataBuilder

        return CommonMetadataBuilder

    @classmethod
    def get_state_cls(cls) -> type[AttentionState]:
        """The class that captures graphs on devices that have them."""
        return CommonAttentionState

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        kv_cache_dtype: str = "auto",
        head_size_v: int | None = None,
    ) -> tuple[int, ...] | tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of one layer's cache: one shape [2, …], or a (K, V) pair of shapes where head_size_v differs."""

    @staticmethod
    @abstractmethod
    def kv_views(kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(K, V) as strided views [num_blocks, block_size, num_kv_heads, size]; None for an opaque layout."""

    @staticmethod
    @abstractmethod
    def swap_blocks(src: KVCache, dst: KVCache, pairs: torch.Tensor) -> None:
        """Copy whole blocks between two caches; pairs int64 [n, 2] of (source block, destination block)."""

    @staticmethod
    @abstractmethod
    def copy_blocks(caches: Sequence[KVCache], pairs: torch.Tensor) -> None:
        """Copy whole blocks inside each cache; pairs int64 [n, 2]; a block both source and destination is an error."""

    @classmethod
    def compile_build(cls, build: Build) -> Mapping[str, float]:
        """Compile one of BUILDS for its device generation, here, without the device; figures of what came out.

        Names of figures end in their unit: ``temp_bytes``. Raises UnsupportedError for what the compiler refuses.
        """
        raise UnsupportedError(f"{cls.name} compiles nothing without its device, {build.id} was asked; BUILDS is empty")

    @classmethod
    def unsupported_reasons(cls, request: SelectionRequest, device: Device) -> list[Reason]:
        """Why this backend cannot serve the request on the device; an empty list means that it can."""
        return unsupported_reasons(cls.name, cls.CAPABILITIES, request, device)

    @classmethod
    def variant_for(cls, request: SelectionRequest, device: Device) -> str | None:
        """The first capability row without a reason: the sub-version that would run."""
        return supported_variant(cls.CAPABILITIES, request, device)


def refuse_unknown(where: str, given: Mapping[str, object], contract: Callable[..., object]) -> None:
    """Raise UnknownArgumentError for the first keyword given that the contract's method does not have."""
    for word in given:
        known = [name for name in signature(contract).parameters if name != "self"]
        near = get_close_matches(word, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
        raise UnknownArgumentError(f"{where} got an unknown argument {word!r}; {hint}")


def refuse_unsupported(
    backend: type[AttentionBackend], request: SelectionRequest, known: frozenset[str] = frozenset()
) -> None:
    """Raise UnsupportedError with every reason if no row of CAPABILITIES takes the request.

    known: which of dtype, attn_type and block_size the caller means; a layer does not know them when it is built, and
    then it is refused only if every value that a row claims for them is.
    """
    reasons = claim_reasons(backend, request, known)
    if reasons:
        why = "; ".join(map(str, reasons))
        hint = "`heedful select` shows a backend that can serve the layer"
        raise UnsupportedError(f"{backend.name} cannot serve {request.to_dict()}: {why}. {hint}", reasons)


@lru_cache(maxsize=4096)
def claim_reasons(
    backend: type[AttentionBackend], request: SelectionRequest, known: frozenset[str]
) -> tuple[Reason, ...]:
    """() if some row takes the request on some device generation, else the reasons of every row."""
    found: list[Reason] = []
    for row in backend.CAPABILITIES:
        trials = [_row_reasons(row, trial) for trial in _trials(row, request, known)]
        if not all(trials):
            return ()
        fewest: list[Reason] = min(trials, key=len, default=[])
        found.extend(fewest)
    return tuple(dict.fromkeys(found))


def _row_reasons(row: Capability, request: SelectionRequest) -> list[Reason]:
    """The device's generation is left out: it is judged at selection, where the device is known."""
    reasons = row_reasons(row, request, Device(row.platform))
    return [reason for reason in reasons if reason.code is not ReasonCode.CAPABILITY]


def _trials(row: Capability, request: SelectionRequest, known: frozenset[str]) -> list[SelectionRequest]:
    dtypes = [request.dtype] if "dtype" in known else sorted(row.dtypes)
    kinds = [request.attn_type] if "attn_type" in known else sorted(row.attn_types)
    block_size = request.block_size if "block_size" in known else row.block_sizes.smallest
    return [replace(request, dtype=dtype, attn_type=kind, block_size=block_size) for dtype in dtypes for kind in kinds]


class HndBackend(AttentionBackend):
    """A backend whose pages hold one head after another: K and V each [num_blocks, num_kv_heads, block_size, size]."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        kv_cache_dtype: str = "auto",
        head_size_v: int | None = None,
    ) -> tuple[int, ...] | tuple[tuple[int, ...], tuple[int, ...]]:
        """[2, num_blocks, num_kv_heads, block_size, head_size], or one shape for K and one for V where sizes differ."""
        check_cache_arguments(num_blocks, block_size, num_kv_heads, head_size, kv_cache_dtype, head_size_v)
        page = (num_blocks, num_kv_heads, block_size)
        if head_size_v is None or head_size_v == head_size:
            return (2, *page, head_size)
        return (*page, head_size), (*page, head_size_v)

    @staticmethod
    def kv_views(kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See AttentionBackend."""
        from heedful.backends.paged import hnd_views

        return hnd_views(kv_cache)

    @staticmethod
    def swap_blocks(src: KVCache, dst: KVCache, pairs: torch.Tensor) -> None:
        """See AttentionBackend; the caches may lie on two devices."""
        from heedful.backends.paged import swap_blocks

        swap_blocks(src, dst, pairs)

    @staticmethod
    def copy_blocks(caches: Sequence[KVCache], pairs: torch.Tensor) -> None:
        """See AttentionBackend."""
        from heedful.backends.paged import copy_blocks

        copy_blocks(caches, pairs)


def check_cache_arguments(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    kv_cache_dtype: str,
    head_size_v: int | None,
) -> None:
    """Raise BadInputError for a cache that no one could allocate."""
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "num_kv_heads": num_kv_heads, "head_size": head_size}
    for name, size in (sizes | {"head_size_v": head_size if head_size_v is None else head_size_v}).items():
        if size < 1:
            raise BadInputError(f"a KV cache with {name} {size} was asked for; {name} must be 1 or more")
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        words = ", ".join(KV_CACHE_DTYPES)
        raise BadInputError(f"unknown kv_cache_dtype {kv_cache_dtype!r}; give one of {words}")


class AttentionImpl(ABC):
    """One layer's attention. Holds no state of a call: forward is re-entrant and safe from several threads."""

    @abstractmethod
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
    ) -> None:
        """alibi_slopes and sinks: fp32 [num_heads]. Whatever CAPABILITIES exclude raises UnsupportedError here."""

    @abstractmethod
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
    ) -> torch.Tensor:
        """Write this step's K and V, then attend.

        query [tokens, num_heads, head_size]; key, value [tokens, num_kv_heads, head_size | head_size_v]; output
        [tokens, num_heads, head_size_v], filled in place and returned; the flat form [tokens, heads*size] is accepted
        and answered flat. output_lse fp32 [tokens, num_heads], natural log, filled when given.
        """


@dataclass
class AttentionMetadata:
    """One step's batch: all prefills, then all decodes (a chunk with context is a prefill).

    query_start_loc int32 [seqs+1]; seq_lens, context_lens int32 [seqs]; block_tables int32 [seqs, blocks];
    slot_mapping int64 [tokens], negative = do not write. seq_len = context_len + query_len. encoder_* describe the
    encoder's tokens, cross_* the cache of encoder keys that ENCODER_DECODER reads.
    """

    num_prefills: int
    num_decodes: int
    num_prefill_tokens: int
    num_decode_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
    encoder_seq_lens: torch.Tensor | None = None
    max_encoder_seq_len: int | None = None
    num_encoder_tokens: int | None = None
    cross_slot_mapping: torch.Tensor | None = None
    cross_block_tables: torch.Tensor | None = None
    step: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """What was derived once for this step and serves every layer; looked up by the very tensors it came from."""


class AttentionState(ABC):
    """What a runner keeps to capture and replay device graphs."""

    @abstractmethod
    def __init__(self, runner: Any) -> None: ...

    @abstractmethod
    def graph_capture(self, max_batch_size: int) -> AbstractContextManager[None]:
        """Everything inside is captured at batch sizes up to max_batch_size."""

    @abstractmethod
    def begin_forward(self, model_input: Any) -> None:
        """Called once a step before the model runs."""


class CommonAttentionState(AttentionState):
    """The state of a device without graphs: begin_forward does nothing, graph_capture is an error."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def graph_capture(self, max_batch_size: int) -> AbstractContextManager[None]:
        """See AttentionState. Refused here: the platform has no device graphs."""
        raise UnsupportedError(
            f"graph_capture(max_batch_size={max_batch_size}) was asked of a backend whose device has no graphs "
            "(capability: graphs); run the model eagerly"
        )

    def begin_forward(self, model_input: Any) -> None:
        """See AttentionState."""
