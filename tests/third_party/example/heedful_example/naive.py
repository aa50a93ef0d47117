"""EXAMPLE_NAIVE: paged attention in plain torch, one sequence after another; slow, short and right."""

from __future__ import annotations

import torch

from heedful.backends.capabilities import Capability, Sizes
from heedful.conformance import from_kernel

CLAIMS = Capability(
    variant="naive",
    platform="cpu",
    dtypes=frozenset({"float32", "bfloat16"}),
    head_sizes=Sizes(low=8, high=256),
    block_sizes=Sizes(),
)


def naive_attention(query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, *, scale):
    """Causal attention over pages laid out NHD; float32 inside."""
    outputs = []
    for index, length in enumerate(seq_lens.tolist()):
        rows = query[query_start_loc[index] : query_start_loc[index + 1]].float()
        keys, values = (
            _gather(cache, block_tables[index], length, rows.shape[1]) for cache in (key_cache, value_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", rows, keys) * scale
        last_visible = torch.arange(length - rows.shape[0], length)[:, None]
        scores.masked_fill_(torch.arange(length) > last_visible, float("-inf"))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(outputs).to(query.dtype)


def _gather(cache, table, length, num_heads):
    blocks = table[: -(-length // cache.shape[1])].long()
    tokens = cache[blocks].flatten(0, 1)[:length].float()
    return tokens.repeat_interleave(num_heads // tokens.shape[1], dim=1)


EXAMPLE_NAIVE = from_kernel(naive_attention, CLAIMS, layout="NHD", name="EXAMPLE_NAIVE")
