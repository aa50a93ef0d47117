"""A call of a layer that repeats an earlier one of its step in all but addresses: it need not be checked again.

Of a call's tensors the checks look at type, shape, strides, dtype and device, never at an element: what passed once
passes again, if its tensors lie apart in memory again. A call that did not pass is not kept, so every one like it meets
the checks and their error. What is kept stands on the metadata, whose values it came from, and serves every layer that
checks alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from heedful.backends.base import AttentionMetadata

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch

    from heedful.backends.base import KVCache
    from heedful.backends.paged_impl import PagedImpl
    from heedful.backends.paged_step import Step
    from heedful.memory import Apart


class Repeat(Protocol):
    """What a call of a known form is left with. It holds no tensor of a call."""

    def run(
        self,
        layer: PagedImpl,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCache,
        scales: tuple[float, float],
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Write and attend as the call did that this came from, on tensors of the same forms."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What calls of one form do in one step, as long as the step's metadata stays as it is.

    pads: rows to clear. apart: what is left to see of where a call's tensors lie.
    """

    step: Step
    repeat: Repeat
    pads: bool
    apart: Apart


def form_of(
    layers: object, attn_type: object, query: Any, key: Any, value: Any, kv_cache: Any, output: Any, lse: Any
) -> Hashable:
    """All that the checks see of a CPU layer's call, scales and metadata aside; None for what is no call.

    layers: one object for all layers that check alike.
    """
    try:
        hash(attn_type)
        if key is None or output is None or isinstance(kv_cache, (tuple, list)):
            cache = _pair_form(kv_cache) if isinstance(kv_cache, (tuple, list)) else _form(kv_cache)
            return (layers, attn_type, *map(_form, (query, key, value, output, lse)), cache)
        return (  # the usual call, spelt out: half as dear to make and to find
            layers, attn_type, None if lse is None else _form(lse),
            type(query), query.shape, query.stride(), query.dtype, query.is_cpu,
            type(key), key.shape, key.stride(), key.dtype, key.is_cpu,
            type(value), value.shape, value.stride(), value.dtype, value.is_cpu,
            type(kv_cache), kv_cache.shape, kv_cache.stride(), kv_cache.dtype, kv_cache.is_cpu,
            type(output), output.shape, output.stride(), output.dtype, output.is_cpu,
        )  # fmt: skip
    except Exception:  # no word, no tensor, or one without strides: the checks say what it is
        return None


def _form(x: Any) -> Hashable:
    return None if x is None else (type(x), x.shape, x.stride(), x.dtype, x.is_cpu)


def _pair_form(pair: Any) -> Hashable:
    """Where K and V are one memory the pair has a form of its own, which the checks refuse."""
    return (*map(_form, pair), len({x.data_ptr() for x in pair}))


def kept(metadata: object, form: Hashable) -> Kept | None:
    """What a call of the form can repeat; None where it has to be checked."""
    if form is None or not isinstance(metadata, AttentionMetadata):
        return None
    found: Kept | None = metadata.step.get(form)
    return found if found is not None and found.step.watch.holds(metadata) else None


def keep(metadata: AttentionMetadata, form: Hashable, known: Kept) -> None:
    """Let calls of the form repeat this one."""
    metadata.step[form] = known


def cache_sides(kv_cache: KVCache) -> tuple[torch.Tensor, ...]:
    """The tensors of a cache: one, or a pair."""
    return tuple(kv_cache) if isinstance(kv_cache, (tuple, list)) else (kv_cache,)
