"""NO_ATTENTION: the backend of models without attention. It needs no cache memory and refuses to attend."""

# ruff: noqa: ARG002, ARG004 - the contract's arguments mean nothing here

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NoReturn

from heedful.backends.base import AttentionBackend, AttentionImpl, AttentionMetadata, refuse_unknown, refuse_unsupported
from heedful.backends.capabilities import Capability, Sizes
from heedful.errors import UnsupportedError
from heedful.types import DTYPES, KV_CACHE_DTYPES, PLATFORMS, AttentionType, Reason, ReasonCode, SelectionRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import torch

    from heedful.backends.base import KVCache

_EVERYWHERE = tuple(
    Capability(
        variant="none",
        platform=platform,
        dtypes=frozenset(DTYPES),
        head_sizes=Sizes(low=0),
        block_sizes=Sizes(low=0),
        kv_cache_dtypes=frozenset(KV_CACHE_DTYPES),
        features=frozenset({"attention_free"}),
    )
    for platform in PLATFORMS
)


class NoAttentionBackend(AttentionBackend):
    """Answers attention-free requests on every platform; everything that has to do with a cache does nothing."""

    name = "NO_ATTENTION"
    CAPABILITIES: ClassVar[tuple[Capability, ...]] = _EVERYWHERE

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """See AttentionBackend."""
        return NoAttentionImpl

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        kv_cache_dtype: str = "auto",
        head_size_v: int | None = None,
    ) -> tuple[int, ...]:
        """(0,): an allocation of it takes no memory."""
        return (0,)

    @staticmethod
    def kv_views(kv_cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Two views without an element."""
        empty = kv_cache if not isinstance(kv_cache, tuple) else kv_cache[0]
        return empty.new_empty((0, 0, 0, 0)), empty.new_empty((0, 0, 0, 0))

    @staticmethod
    def swap_blocks(src: KVCache, dst: KVCache, pairs: torch.Tensor) -> None:
        """Nothing to copy."""

    @staticmethod
    def copy_blocks(caches: Sequence[KVCache], pairs: torch.Tensor) -> None:
        """Nothing to copy."""


class NoAttentionImpl(AttentionImpl):
    """What a layer of an attention-free model gets, so that an engine need not treat it apart; forward is an error."""

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
        """A layer with heads is refused. In one without, a window or a cap shapes nothing and is let through."""
        refuse_unknown("NoAttentionImpl()", unknown, AttentionImpl.__init__)
        request = SelectionRequest(
            head_size=head_size,
            sliding_window=sliding_window,
            kv_cache_dtype=kv_cache_dtype,
            is_attention_free=not (num_heads and head_size),
            is_blocksparse=blocksparse_params is not None,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size_v=head_size_v,
            alibi=alibi_slopes is not None,
            logits_soft_cap=logits_soft_cap,
            sinks=sinks is not None,
        )
        refuse_unsupported(NoAttentionBackend, request)

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
    ) -> NoReturn:
        """Always an error: nothing in an attention-free model attends."""
        text = "NO_ATTENTION serves attention-free models, which have nothing to attend with"
        hint = "select a backend with is_attention_free=False for this layer"
        reason = Reason(ReasonCode.ATTENTION_FREE, text, f"forward({attn_type})", "no forward", hint)
        raise UnsupportedError(f"forward({attn_type}) was called, but {text}; {hint}", (reason,))
