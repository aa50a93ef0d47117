"""Who sees whom, and ALiBi: one additive fp32 bias for a tile of queries and keys, or None where nothing is hidden."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rules:
    """What hides keys in one layer and step. slopes: ALiBi, fp32 [num_kv_heads, group, 1, 1], or None."""

    causal: bool
    window: int | None
    slopes: torch.Tensor | None

    def first_key(self, position: int) -> int:
        """The first key that a query at this position may see."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def end_key(self, position: int, key_len: int) -> int:
        """One past the last key that a query at this position may see."""
        if self.causal:
            return min(key_len, position + 1)
        return key_len if self.window is None else min(key_len, position + self.window)


@dataclass(frozen=True)
class Tile:
    """Queries first_query … + queries of each sequence against keys first_key … + keys; all lists are per sequence.

    Positions count from the sequence's first key. key_lens: keys that exist; later ones in the tile are never seen.
    """

    first_query: tuple[int, ...]
    queries: int
    first_key: tuple[int, ...]
    keys: int
    key_lens: tuple[int, ...]

    def all_seen(self, rules: Rules) -> bool:
        """Whether every query of the tile sees every key of it, worked out on a few host numbers."""
        rows = zip(self.first_query, self.first_key, self.key_lens, strict=True)
        return all(
            rules.first_key(query + self.queries - 1) <= key and key + self.keys <= rules.end_key(query, key_len)
            for query, key, key_len in rows
        )


Mask = tuple[torch.Tensor | None, torch.Tensor | None]
"""(fp32 bias, rows to which it shows no key), both None where every row sees every key."""


def bias(tile: Tile, rules: Rules, group: int) -> Mask:
    """(bias fp32 [seqs, num_kv_heads | 1, group * queries, keys], rows without a key: bool [seqs, 1, group * queries]).

    Rows are ordered query head first. Positions are integers up to the one product with the slope, so that they are
    exact at any length whatever the model's dtype is.
    """
    if rules.slopes is None and tile.all_seen(rules):
        return None, None
    query_at = torch.tensor(tile.first_query)[:, None, None] + torch.arange(tile.queries)[:, None]  # [S, q, 1]
    key_at = torch.tensor(tile.first_key)[:, None, None] + torch.arange(tile.keys)  # [S, 1, n]
    distance = query_at - key_at
    seen = (key_at < torch.tensor(tile.key_lens)[:, None, None]).expand_as(distance)
    if rules.causal:
        seen = seen & (distance >= 0)
    if rules.window is not None:
        seen = seen & (distance.abs() < rules.window)
    blind = ~seen.any(-1).repeat(1, group)[:, None]  # [S, 1, group * q]
    return _additive(seen, distance, rules.slopes, group), blind


def _additive(seen: torch.Tensor, distance: torch.Tensor, slopes: torch.Tensor | None, group: int) -> torch.Tensor:
    if slopes is None:
        hidden = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        return hidden.repeat(1, group, 1)[:, None]
    linear = -slopes * distance.abs().float()[:, None, None]  # [S, KV, group, q, n]
    return linear.masked_fill_(~seen[:, None, None], -torch.inf).flatten(2, 3)
