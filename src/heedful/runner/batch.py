"""One step's tensors: token ids, positions, the rows whose logits are needed, and the backend's own metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from heedful.errors import MetadataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from heedful.backends.base import AttentionBackend, AttentionMetadata
    from heedful.runner.scheduler import Chunk


@dataclass(frozen=True)
class ModelInput:
    """token_ids, positions int64 [tokens]; sample_rows int64 [samples]: the last row of each chunk that samples."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    sample_rows: torch.Tensor
    attn_metadata: AttentionMetadata


def build_batch(
    chunks: Sequence[Chunk], backend: type[AttentionBackend], block_size: int, device: torch.device | str = "cpu"
) -> ModelInput:
    """The step of these chunks, which must come as all prefills, then all decodes. Without blocks: a profiling run."""
    builder = backend.get_builder_cls()(block_size)
    token_ids: list[int] = []
    positions: list[int] = []
    sample_rows: list[int] = []
    for chunk in chunks:
        end = chunk.start + chunk.count
        if end > len(chunk.request.tokens):
            raise MetadataError(f"a chunk ends at token {end} of a request that has {len(chunk.request.tokens)}")
        builder.add(chunk.count, chunk.start, chunk.request.blocks, decode=chunk.decode)
        token_ids += chunk.request.tokens[chunk.start : end]
        positions += range(chunk.start, end)
        if chunk.samples:
            sample_rows.append(len(token_ids) - 1)
    return ModelInput(
        token_ids=_int64(token_ids, device),
        positions=_int64(positions, device),
        sample_rows=_int64(sample_rows, device),
        attn_metadata=builder.build(device=device),
    )


def _int64(values: list[int], device: torch.device | str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
