"""What attention.py computes, made to be read: one sequence, one query head after another, over its gathered pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from heedful.kernels.pallas.attention import Form, Rules, Tiles


def attention(
    form: Form, tiles: Tiles, rules: Rules, query: jax.Array, key_cache: jax.Array, value_cache: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(output [N, Q, H, Dv], LSE [N, Q, H]), both fp32; arguments as for the kernel, caches never as bits."""
    found = [
        _one_head(form, tiles, rules, n, head, query[n, :, head], key_cache, value_cache)
        for n in range(len(query))
        for head in range(query.shape[2])
    ]
    count, queries, heads = query.shape[:3]
    output, lse = (jnp.stack(part).reshape(count, heads, queries, -1) for part in zip(*found, strict=True))
    return output.swapaxes(1, 2), lse.swapaxes(1, 2)[..., 0]


def _one_head(
    form: Form, tiles: Tiles, rules: Rules, n: int, head: int, query: jax.Array, *caches: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The n-th tile's query [Q, D] of one head -> output [Q, Dv], LSE [Q]."""
    (scale, soft_cap), window = rules.numbers, rules.window[0]
    key, value = _sequence(tiles, n, head * caches[0].shape[1] // len(rules.sinks), *caches)
    score = jnp.matmul(query.astype(jnp.float32), key.T, precision="highest") * scale
    if form.capped:
        score = soft_cap * jnp.tanh(score / soft_cap)
    distance = tiles.position[n] + jnp.arange(len(query))[:, None] - jnp.arange(len(key))
    if rules.slopes is not None:
        score = score - rules.slopes[head] * jnp.abs(distance)
    seen = jnp.abs(distance) < window
    if form.causal:
        seen = seen & (distance >= 0)
    logits = jnp.where(seen, score, -jnp.inf)
    lse = jax.nn.logsumexp(jnp.pad(logits, ((0, 0), (0, 1)), constant_values=rules.sinks[head]), axis=1)
    weight = jnp.where(seen, jnp.exp(logits - lse[:, None]), 0.0)
    return jnp.matmul(weight, value, precision="highest"), lse


def _sequence(tiles: Tiles, n: int, kv_head: int, *caches: jax.Array) -> list[jax.Array]:
    """K [keys, D] and V [keys, Dv] of the n-th tile's sequence and a KV head, fp32: its pages end to end, then cut."""
    sequence, width = tiles.sequence[n], len(tiles.pages) // len(tiles.keys)
    pages = tiles.pages[sequence * width : (sequence + 1) * width]
    keys = int(tiles.keys[sequence]) if tiles.queries[n] else 0
    return [cache[pages, kv_head].reshape(-1, cache.shape[3])[:keys].astype(jnp.float32) for cache in caches]
