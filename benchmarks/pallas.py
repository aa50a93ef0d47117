"""How long the Pallas kernel takes to compile for each TPU and for the interpreter, and how it runs there beside jax's.

The first table: wall and CPU seconds of libtpu's compiler, a kernel each, and the gate of 2 seconds of waiting (it
compiles on two threads, so CPU seconds are more). The second: milliseconds of a call in the interpreter, for heedful's
kernel and for those that jax ships (flash, paged, splash), each held against plain softmax first. An interpreter is no
TPU: the figures compare emulations.

    python benchmarks/pallas.py [--rounds 5] [--archs v5e,v6e]
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial

import heedful.kernels.pallas  # noqa: F401  before jax: it settles what jax reads from the environment

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from heedful.backends.pallas import PallasBackend
from heedful.kernels.pallas.attention import NO_WINDOW, Form, Rules, Tiles, attention

LIMIT = 2.0
HEADS, KV_HEADS, SIZE, PAGE = 8, 2, 128, 16


def timed(call):
    """(answer, wall seconds, CPU seconds)."""
    wall, cpu = time.perf_counter(), time.process_time()
    answer = jax.block_until_ready(call())
    return answer, time.perf_counter() - wall, time.process_time() - cpu


def compile_times(archs) -> float:
    """Print what each build of profile ci takes; the longest, in seconds of waiting."""
    builds = [b for b in PallasBackend.BUILDS if b.profile != "full" and b.arch in archs]
    for arch in archs:
        PallasBackend.compile_build(next(b for b in builds if b.arch == arch))  # libtpu starts with the first
    worst = 0.0
    for build in builds:
        jax.clear_caches()
        figures, wall, cpu = timed(partial(PallasBackend.compile_build, build))
        if wall >= LIMIT:  # the machine may be busy: the less of two
            jax.clear_caches()
            wall = min(wall, timed(partial(PallasBackend.compile_build, build))[1])
        worst = max(worst, wall)
        print(f"{build.id:44s} {wall:6.2f} s wall {cpu:6.2f} s CPU  code {figures['code_bytes'] / 1024:6.0f} KiB")
    print(f"longest: {worst:.2f} s, limit {LIMIT} s: {'kept' if worst < LIMIT else 'BROKEN'}")
    return worst


def step(lengths, queries, dtype):
    """heedful's arguments for sequences of these lengths, whose last ``queries`` tokens attend."""
    generator, count = np.random.default_rng(0), len(lengths)
    width = max(lengths) // PAGE
    blocks = generator.permutation(count * width).astype(np.int32)
    cache = (count * width, KV_HEADS, PAGE, SIZE)
    key, value = (generator.standard_normal(cache, np.float32).astype(dtype) for _ in range(2))
    query = generator.standard_normal((count, queries, HEADS, SIZE), np.float32).astype(dtype)
    keys = np.array(lengths, np.int32)
    tiles = Tiles(np.arange(count, dtype=np.int32), keys - queries, np.full(count, queries, np.int32), keys, blocks)
    return tiles, query, key, value


def rules():
    """Plain attention."""
    sinks = np.full(HEADS, -np.inf, np.float32)
    return Rules(np.array([SIZE**-0.5, 0], np.float32), np.array([NO_WINDOW], np.int32), sinks, None)


def plain(query, keys, values):
    """query [H, Q, D], keys, values [H, K, D], causal at the end: in fp32."""
    score = np.einsum("hqd,hkd->hqk", query, keys) * SIZE**-0.5
    late = np.arange(keys.shape[1]) > np.arange(query.shape[1])[:, None] + keys.shape[1] - query.shape[1]
    weight = np.exp(np.where(late, -np.inf, score - score.max(-1, keepdims=True)))
    return np.einsum("hqk,hkd->hqd", weight / weight.sum(-1, keepdims=True), values)


def gathered(tiles, cache, n):
    """[H, keys, D] of the n-th sequence, each KV head repeated for its group."""
    width = len(tiles.pages) // len(tiles.keys)
    pages = cache[np.asarray(tiles.pages[n * width : (n + 1) * width])].astype(np.float32)
    flat = pages.transpose(1, 0, 2, 3).reshape(KV_HEADS, -1, SIZE)[:, : tiles.keys[n]]
    return flat.repeat(HEADS // KV_HEADS, 0)


def shown(name, call, right, rounds):
    """Print a kernel's error, first call and least call in seconds; the same as a dict."""
    answer, first, _ = timed(call)
    error = float(np.abs(np.asarray(answer, np.float32) - right).max())
    least = min(timed(call)[1] for _ in range(rounds))
    print(f"{name:44s} error {error:8.1e}  first {first:6.2f} s  then {least * 1e3:8.2f} ms")
    return {name: {"error": error, "first": first, "least": least}}


def decode(rounds):
    """Eight sequences of 512 keys, one new token each."""
    tiles, query, key, value = step([512] * 8, 1, np.float32)
    right = np.stack(
        [plain(query[n].swapaxes(0, 1), *(gathered(tiles, x, n) for x in (key, value)))[:, 0] for n in range(8)]
    )
    form = Form(causal=True, fetch=8, interpret=True)
    found = shown(
        "decode 8 x 512: heedful", lambda: attention(form, tiles, rules(), query, key, value)[0][:, 0], right, rounds
    )
    pages = [jnp.asarray(x.swapaxes(0, 1)) for x in (key, value)]
    table = tiles.pages.reshape(8, -1)
    scaled = query[:, 0] * SIZE**-0.5
    shipped = jax.jit(lambda: paged_attention(scaled, *pages, tiles.keys, table, pages_per_compute_block=8))
    return found | shown("decode 8 x 512: jax paged_attention", shipped, right, rounds)


def prefill(rounds):
    """One sequence of 512 tokens."""
    tiles, query, key, value = step([512], 512, np.float32)
    keys, values = (gathered(tiles, x, 0) for x in (key, value))
    right = plain(query[0].swapaxes(0, 1), keys, values)
    of = np.arange(8, dtype=np.int32)
    small = Tiles(of * 0, of * 64, of * 0 + 64, tiles.keys, tiles.pages)
    form, cut = Form(causal=True, fetch=8, interpret=True), query.reshape(8, 64, HEADS, SIZE)
    ours = partial(attention, form, small, rules(), cut, key, value)
    found = shown("prefill 512: heedful", lambda: ours()[0].reshape(512, HEADS, SIZE).swapaxes(0, 1), right, rounds)
    q, k, v = (jnp.asarray(x) for x in (query[0].swapaxes(0, 1), keys, values))
    fixed = jax.jit(lambda: flash.flash_attention(q[None], k[None], v[None], causal=True, sm_scale=SIZE**-0.5)[0])
    found |= shown("prefill 512: jax flash_attention", fixed, right, rounds)
    mask = masks.MultiHeadMask([masks.CausalMask((512, 512)) for _ in range(HEADS)])
    kernel = splash.make_splash_mha_single_device(mask, interpret=True)
    return found | shown(
        "prefill 512: jax splash_attention", jax.jit(lambda: kernel(q * SIZE**-0.5, k, v)), right, rounds
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--archs", default="v4,v5e,v5p,v6e,7x")
    asked = parser.parse_args()
    worst = compile_times(asked.archs.split(","))
    jax.clear_caches()
    pl.pallas_call = partial(pl.pallas_call, interpret=True)  # jax's own take no such argument
    calls = {**decode(asked.rounds), **prefill(asked.rounds)}
    print(json.dumps({"jax": jax.__version__, "longest_compile": worst, "limit": LIMIT, "calls": calls}))
    if worst >= LIMIT:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
