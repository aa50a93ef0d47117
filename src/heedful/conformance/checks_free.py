"""Checks of a backend for attention-free models: no memory, no kernel, and a clear error if something attends."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from heedful.conformance.bench import device, must_refuse
from heedful.conformance.refusals import prove_refusal
from heedful.errors import UnsupportedError

if TYPE_CHECKING:
    from heedful.backends.base import AttentionBackend, AttentionMetadata
    from heedful.conformance.cases import Case


def check_attention_free_layers_need_no_memory(backend: type[AttentionBackend], case: Case) -> None:
    """0 heads of size 0: a cache without an element, copies of nothing, metadata that still describes a batch."""
    shape = backend.get_kv_cache_shape(8, case.block_size, 0, 0)
    assert all(isinstance(size, int) for size in shape), f"a cache of no heads has shape {shape}"
    elements = prod(size for size in shape if isinstance(size, int))
    assert elements == 0, f"a cache of no heads has shape {shape}, {elements} elements; it needs none"
    cache, pairs = torch.empty(0, device=device()), torch.tensor([[0, 1]], device=device())
    backend.copy_blocks([cache], pairs)
    backend.swap_blocks(cache, cache.clone(), pairs)
    metadata = _metadata(backend, case)
    assert metadata.seq_lens.tolist() == [5, 3], f"sequences of 5 and 3 tokens became {metadata.seq_lens.tolist()}"


def _metadata(backend: type[AttentionBackend], case: Case) -> AttentionMetadata:
    builder = backend.get_builder_cls()(case.block_size)
    for length in (5, 3):
        builder.add(length)
    metadata: AttentionMetadata = builder.build(device=device())
    return metadata


def check_attention_free_layers_refuse_to_attend(backend: type[AttentionBackend], case: Case) -> None:
    """A layer of 0 heads can be made, so that an engine need not treat it apart; its forward is an error."""
    layer = backend.get_impl_cls()(num_heads=0, head_size=0, scale=1.0)
    metadata, nothing = _metadata(backend, case), torch.empty(8, 0, 0, device=device())
    cache = torch.empty(0, device=device())

    def attend() -> None:
        layer.forward(nothing, nothing, nothing, cache, metadata)

    must_refuse(attend, "forward of an attention-free layer", UnsupportedError)


def check_attention_layers_are_refused(backend: type[AttentionBackend], case: Case) -> None:
    """A layer that has heads, on a backend that has no attention."""
    prove_refusal(backend, case, None, with_lse=False)
