"""Ragged paged attention for TPUs: prefills, chunks and decodes of one step in one launch.

A program attends for one tile of queries of one sequence and one KV head. It streams that sequence's pages from HBM
through two buffers, so that the next pages are on their way while these are multiplied, and keeps a running softmax.
naive.py says the same without tiles, pages in flight or a running softmax.

Letters: N tiles, Q queries a tile, G query heads a KV head, R = Q * G rows, KV, D and Dv as everywhere, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

if TYPE_CHECKING:
    from collections.abc import Callable

HIDDEN: Final = -1e30
"""The score of a key that a row does not see: finite, so that no difference of two of them is NaN."""
NO_WINDOW: Final = 2**30


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for, beside the shapes of its arguments.

    capped: whether Rules.soft_cap holds. fetch: pages a buffer holds. interpret: False on a TPU, True for the
    interpreter that makes plain XLA of the kernel, or pltpu.InterpretParams for the one that plays a TPU's memories and
    semaphores.
    """

    causal: bool
    capped: bool = False
    fetch: int = 8
    lse: bool = False
    interpret: Any = False


class Rules(NamedTuple):
    """A layer's numbers, which the kernel reads when it runs: layers that differ in them share it.

    numbers fp32 [2]: scale, soft cap. window int32 [1]: NO_WINDOW is off. sinks fp32 [H]: -inf is none. slopes fp32 [H]
    or None, with which the kernel has no ALiBi at all.
    """

    numbers: jax.Array
    window: jax.Array
    sinks: jax.Array
    slopes: jax.Array | None


class Tiles(NamedTuple):
    """Where each tile of queries stands, int32. A spare tile has 0 queries.

    sequence [N]; position [N]: of the tile's first query among its sequence's keys; queries [N]: how many are real;
    keys [S]; pages [S * width]: the block tables, one after another, width a multiple of Form.fetch.
    """

    sequence: jax.Array
    position: jax.Array
    queries: jax.Array
    keys: jax.Array
    pages: jax.Array


QUICKLY: Final = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_backend_optimization_level": 0,
}
"""How the interpreter's XLA is compiled: in a third of the time, to code that is several times slower. An emulation
meets many shapes for a few calls each, and is no measure of speed anyway."""


def attention(
    form: Form, tiles: Tiles, rules: Rules, query: jax.Array, key_cache: jax.Array, value_cache: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """(output [N, Q, H, Dv] in the query's dtype, LSE fp32 [N, Q, H] or None). Rows past a tile's queries: anything.

    query [N, Q, H, D]; caches [num_blocks, KV, block_size, D | Dv] in the query's dtype, or the bits of bfloat16 as
    int16 beside an fp32 query, which XLA reads many times faster on a CPU.
    """
    run: Callable[..., tuple[jax.Array, jax.Array | None]] = _emulated if form.interpret else _compiled
    return run(form, tiles, rules, query, key_cache, value_cache)


def _attention(
    form: Form, tiles: Tiles, rules: Rules, query: jax.Array, key_cache: jax.Array, value_cache: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """The launch: queries folded by KV head, rows ordered query first, head of the group second."""
    count, queries, heads, size = query.shape
    kv_heads, block_size = key_cache.shape[1:3]
    group = heads // kv_heads
    rows = queries * group
    folded = query.reshape(count, queries, kv_heads, group, size).transpose(0, 2, 1, 3, 4)
    inputs = [folded.reshape(count, kv_heads, rows, size)]
    specs = [_by_tile(rows, size)]
    for by_head in (rules.sinks, rules.slopes):
        if by_head is not None:
            inputs.append(jnp.tile(by_head.reshape(kv_heads, 1, group), (1, queries, 1)).reshape(kv_heads, rows, 1))
            specs.append(pl.BlockSpec((1, rows, 1), lambda _, h, *__: (h, 0, 0)))
    answers = [(value_cache.shape[3], query.dtype), *([(1, jnp.float32)] if form.lse else [])]
    keys = form.fetch * block_size
    found = pl.pallas_call(
        partial(_kernel, form=form, group=group, alibi=rules.slopes is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tiles) + 2,
            grid=(count, kv_heads),
            in_specs=[*specs, *[pl.BlockSpec(memory_space=pl.ANY)] * 2],
            out_specs=[_by_tile(rows, width) for width, _ in answers],
            scratch_shapes=[
                *(pltpu.VMEM((2, keys, cache.shape[3]), cache.dtype) for cache in (key_cache, value_cache)),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((count, kv_heads, rows, width), dtype) for width, dtype in answers],
        cost_estimate=_cost(inputs[0].shape, tiles, block_size, value_cache.shape[3]),
        interpret=form.interpret,
        name="ragged_paged_attention",
    )(*tiles, rules.numbers, rules.window, *inputs, key_cache, value_cache)
    unfolded = [
        x.reshape(count, kv_heads, queries, group, -1).transpose(0, 2, 1, 3, 4).reshape(count, queries, heads, -1)
        for x in found
    ]
    return unfolded[0], unfolded[1][..., 0] if form.lse else None


_compiled = jax.jit(_attention, static_argnums=0)
_emulated = jax.jit(_attention, static_argnums=0, compiler_options=QUICKLY)


def _cost(shape: tuple[int, ...], tiles: Tiles, block_size: int, width: int) -> pl.CostEstimate:
    """Of every tile seeing every page that a table has room for: what the shapes bound, since lengths are data."""
    count, kv_heads, rows, size = shape
    keys = tiles.pages.shape[0] // tiles.keys.shape[0] * block_size
    scores = count * kv_heads * rows * keys
    moved = count * kv_heads * (keys + rows) * (size + width) * 4
    return pl.CostEstimate(flops=2 * scores * (size + width), bytes_accessed=moved, transcendentals=scores)


def _by_tile(rows: int, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, 1, rows, width), lambda n, h, *_: (n, h, 0, 0))


class _Pages(NamedTuple):
    """The pages of one program's sequence and KV head on their way to VMEM: two buffers, one semaphore a side each."""

    table: Any
    first: Any
    head: Any
    caches: tuple[Any, Any]
    buffers: tuple[Any, Any]
    semaphores: Any
    fetch: int

    def start(self, part: Any) -> None:
        """Send the part-th run of pages on its way, into the buffer of its parity."""
        self._each(part, lambda copy: copy.start())

    def wait(self, part: Any) -> None:
        """Until that run of pages is there."""
        self._each(part, lambda copy: copy.wait())

    def _each(self, part: Any, do: Any) -> None:
        at, block_size = jax.lax.rem(part, 2), self.caches[0].shape[2]

        def one(j: Any, _: Any) -> None:
            block = self.table[self.first + part * self.fetch + j]
            place = pl.ds(pl.multiple_of(j * block_size, block_size), block_size)
            for side, (cache, buffer) in enumerate(zip(self.caches, self.buffers, strict=True)):
                source, semaphore = cache.at[block, self.head], self.semaphores.at[at, side]
                do(pltpu.make_async_copy(source, buffer.at[at, place], semaphore))

        jax.lax.fori_loop(0, self.fetch, one, None)


def _kernel(*refs: Any, form: Form, group: int, alibi: bool) -> None:
    """One tile of one KV head. refs: Tiles, numbers, window, query, sinks, slopes?, caches, output, lse?, scratch."""
    tiles, (numbers, window_ref, query_ref, sinks), rest = Tiles(*refs[:5]), refs[5:9], list(refs[9:])
    slopes = rest.pop(0)[0] if alibi else None
    window = window_ref[0]
    key_cache, value_cache, output_ref, *rest = rest
    lse_ref = rest.pop(0) if form.lse else None
    key_buffer, value_buffer, semaphores = rest
    n, head = pl.program_id(0), pl.program_id(1)
    sequence = tiles.sequence[n]
    keys = tiles.keys[sequence]
    width = tiles.pages.shape[0] // tiles.keys.shape[0]
    pages = _Pages(
        tiles.pages,
        sequence * width,
        head,
        (key_cache, value_cache),
        (key_buffer, value_buffer),
        semaphores,
        form.fetch,
    )
    step = key_buffer.shape[1]
    begin, end = _parts(form, tiles.position[n], tiles.queries[n], keys, window, step)
    query = query_ref[0, 0]
    rows = query.shape[0]
    position = tiles.position[n] + jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, (rows, step), 0), group)

    def body(part: Any, state: Any) -> Any:
        pl.when(part + 1 < end)(lambda: pages.start(part + 1))
        pages.wait(part)
        at = part * step + jax.lax.broadcasted_iota(jnp.int32, (rows, step), 1)
        seen = _seen(form, position, at, keys, window)
        score = _dot(query, key_buffer[jax.lax.rem(part, 2)], ((1,), (1,))) * numbers[0]
        if form.capped:
            score = numbers[1] * jnp.tanh(score / numbers[1])
        if slopes is not None:
            score = score - slopes * jnp.abs(position - at).astype(jnp.float32)
        # what lies past the last key may be NaN, and 0 * NaN would be one too
        value = value_buffer[jax.lax.rem(part, 2)]
        real = part * step + jax.lax.broadcasted_iota(jnp.int32, value.shape, 0) < keys
        return _softmax(state, score, seen, jnp.where(real, value, jnp.zeros_like(value)))

    pl.when(begin < end)(lambda: pages.start(begin))
    state = _first_state(value_buffer.shape[2], sinks[0])
    largest, total, weighted = jax.lax.fori_loop(begin, end, body, state)
    output_ref[0, 0] = (weighted / jnp.where(total == 0, 1.0, total)).astype(output_ref.dtype)
    if lse_ref is not None:
        lse_ref[0, 0] = jnp.where(total == 0, -jnp.inf, largest + jnp.log(jnp.where(total == 0, 1.0, total)))


def _parts(form: Form, position: Any, queries: Any, keys: Any, window: Any, step: int) -> tuple[Any, Any]:
    """Which runs of ``step`` keys any query of the tile sees: first, and one past the last."""
    last = position + queries - 1
    end = jnp.minimum(keys, last + (1 if form.causal else window))
    begin = jax.lax.div(jnp.maximum(0, position - (window - 1)), step)
    return begin, jnp.where(queries > 0, jax.lax.div(end + (step - 1), step), 0)


def _seen(form: Form, position: Any, at: Any, keys: Any, window: Any) -> Any:
    distance = position - at
    near = distance < window if form.causal else jnp.abs(distance) < window
    behind = distance >= 0 if form.causal else True
    return jnp.logical_and(at < keys, jnp.logical_and(near, behind))


def _first_state(width: int, sinks: Any) -> tuple[Any, Any, Any]:
    """(largest score, sum, weighted sum of values) of no key: a sink, [R, 1], is one more logit, of no value."""
    total = jnp.where(sinks > HIDDEN, 1.0, 0.0)
    return jnp.maximum(sinks, HIDDEN), total, jnp.zeros((sinks.shape[0], width), jnp.float32)


def _softmax(state: tuple[Any, Any, Any], score: Any, seen: Any, value: Any) -> tuple[Any, Any, Any]:
    largest, total, weighted = state
    score = jnp.where(seen, score, HIDDEN)
    new = jnp.maximum(largest, score.max(-1, keepdims=True))
    weight = jnp.where(seen, jnp.exp(score - new), 0.0)
    kept = jnp.exp(largest - new)
    total = kept * total + weight.sum(-1, keepdims=True)
    return new, total, kept * weighted + _dot(_rounded(weight, value.dtype), value, ((1,), (0,)))


def _rounded(weight: Any, dtype: Any) -> Any:
    """The weights in the dtype of the values, as the matrix unit takes them."""
    if dtype == jnp.int16:
        return jax.lax.reduce_precision(weight, exponent_bits=8, mantissa_bits=7)
    return weight.astype(dtype)


def _dot(a: Any, b: Any, dimensions: Any) -> Any:
    """An fp32 product. b may be the bits of bfloat16; for fp32 the matrix unit must not round to bfloat16."""
    if b.dtype == jnp.int16:
        b = jax.lax.bitcast_convert_type(b.astype(jnp.int32) << 16, jnp.float32)
    exact = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (dimensions, ((), ())), precision=exact, preferred_element_type=jnp.float32)
