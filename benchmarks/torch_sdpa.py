"""TORCH_SDPA's variant `torch` against plain torch: what paging costs, what folding a KV head's query heads gains.

Per case three things run in turn, so that a busy machine disturbs them alike: heedful's layer (it also checks, writes
the new token and reads shuffled pages), torch's SDPA with ``enable_gqa`` on contiguous K and V, and torch's SDPA on
contiguous K and V with the group folded into the query length (decode only: causal prefill cannot be folded by hand).
Figures are medians of CPU time on one thread, in ms. The last line is JSON.

    python benchmarks/torch_sdpa.py [--rounds 9] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import scaled_dot_product_attention

from heedful.backends.paged import CommonMetadataBuilder
from heedful.backends.torch_sdpa import TorchSdpaBackend
from heedful.backends.torch_sdpa_impl import TorchSdpaImpl

HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 16
SCALE = SIZE**-0.5


class TorchVariant(TorchSdpaBackend):
    """Without heedful's own kernels: benchmarks/cpu_attention.py measures those."""

    CAPABILITIES = tuple(row for row in TorchSdpaBackend.CAPABILITIES if row.variant == "torch")


class TorchVariantImpl(TorchSdpaImpl):
    """A layer of it."""

    backend = TorchVariant


@dataclass(frozen=True)
class Setting:
    """One case: seqs sequences of length keys, of which the last ``tokens`` are new."""

    name: str
    dtype: str
    seqs: int
    tokens: int
    length: int


SETTINGS = [
    Setting(name, dtype, seqs, tokens, length)
    for dtype in ("bfloat16", "float32")
    for name, seqs, tokens, length in (
        ("decode b1 1k", 1, 1, 1024),
        ("decode b1 4k", 1, 1, 4096),
        ("decode b8 1k", 8, 1, 1024),
        ("decode b8 4k", 8, 1, 4096),
        ("prefill 1x2048", 1, 2048, 2048),
    )
]


def paged(setting, query, key, value):
    """A call of heedful's layer on shuffled pages."""
    pages = -(-setting.length // BLOCK)
    blocks = torch.randperm(setting.seqs * pages).view(setting.seqs, pages).tolist()
    builder = CommonMetadataBuilder(BLOCK)
    for row in blocks:
        builder.add(setting.tokens, setting.length - setting.tokens, row, decode=setting.tokens == 1)
    metadata = builder.build()
    shape = TorchSdpaBackend.get_kv_cache_shape(setting.seqs * pages, BLOCK, KV_HEADS, SIZE)
    cache = torch.randn(shape).to(query.dtype)
    layer = TorchVariantImpl(HEADS, SIZE, SCALE, KV_HEADS)
    return lambda: layer.forward(query, key, value, cache, metadata)


def contenders(setting):
    """Name -> a call without arguments."""
    dtype = getattr(torch, setting.dtype)
    rows = setting.seqs * setting.tokens
    query = torch.randn(rows, HEADS, SIZE).to(dtype)
    new = [torch.randn(rows, KV_HEADS, SIZE).to(dtype) for _ in range(2)]
    q = query.view(setting.seqs, setting.tokens, HEADS, SIZE).transpose(1, 2)
    k, v = (torch.randn(setting.seqs, KV_HEADS, setting.length, SIZE).to(dtype) for _ in range(2))
    causal = setting.tokens > 1
    found = {
        "heedful": paged(setting, query, *new),
        "enable_gqa": lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
    }
    if not causal:
        folded = q.reshape(setting.seqs, KV_HEADS, HEADS // KV_HEADS, SIZE)
        found["folded"] = lambda: scaled_dot_product_attention(folded, k, v)
    return found


def measure(setting, rounds):
    """Median ms of each contender, their calls interleaved."""
    calls = contenders(setting)
    times = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            began = time.thread_time()
            call()
            if turn:  # the first turn warms up
                times[name].append((time.thread_time() - began) * 1e3)
    return {name: round(median(values), 3) for name, values in times.items()}


def ratio(ms, peer):
    """How many times faster heedful is than the peer."""
    return round(ms[peer] / ms["heedful"], 2) if peer in ms else None


def line(setting, ms):
    """One row of the table."""
    folded = f"{ms['folded']:10.2f}" if "folded" in ms else " " * 9 + "-"
    gains = "  ".join(f"{ratio(ms, peer) or '-':>6}" for peer in ("enable_gqa", "folded"))
    return f"{setting.dtype:<9} {setting.name:<15}{ms['heedful']:10.2f}{ms['enable_gqa']:12.2f}{folded}   {gains}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("dtype     case              heedful  enable_gqa    folded   times faster than gqa, folded (contiguous)")
    rows = []
    for setting in SETTINGS:
        ms = measure(setting, options.rounds)
        ratios = {f"x_{peer}": ratio(ms, peer) for peer in ("enable_gqa", "folded")}
        rows.append(asdict(setting) | {"ms": ms} | ratios)
        print(line(setting, ms), flush=True)
    text = json.dumps({"benchmark": "torch_sdpa", "torch": torch.__version__, "rows": rows})
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
