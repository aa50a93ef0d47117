"""Whole-block copies and the merge of states against torch's operators, in one run: ratios of their least times.

Copies: `copy_blocks` inside the caches of all layers, `swap_blocks` from one cache to another, on HND pages of 8 heads,
16 tokens and size 128. Beside ours run torch's index_select with index_copy_ ("index_copy"), indexing ("indexing"), and
a loop that copies one block after another ("loop"). Merges: outputs [tokens, 32, 128] of several parts; beside ours the
same formula in torch operators, fp32 sums ("torch"), and the one for two parts that stays in the outputs' dtype ("two
parts": shorter, less exact). All fill memory that is there. Answers are compared before anything is
timed: copies must be equal, merges near.

Everyone takes turns on fresh block numbers. CPU time on one thread, wall time on more; GB/s are bytes read and written
once. The last line is JSON.

    python benchmarks/cpu_blocks.py [--rounds 15] [--threads 1] [--only merge] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from heedful.backends.torch_sdpa import TorchSdpaBackend
from heedful.kernels.cpu import chosen_isa, merge_states

KV_HEADS, BLOCK, HEADS, SIZE = 8, 16, 32, 128
TURN = 3e-3
"""Seconds that one contender is called again and again in its turn, at least."""


@dataclass(frozen=True)
class Blocks:
    """copy or swap of ``pairs`` blocks in each of ``layers`` caches of ``blocks`` blocks."""

    kind: str
    dtype: str
    layers: int
    blocks: int
    pairs: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.pairs} x {self.layers} layers"


@dataclass(frozen=True)
class Merge:
    """``parts`` states of ``tokens`` tokens."""

    dtype: str
    tokens: int
    parts: int
    kind: str = "merge"

    @property
    def name(self) -> str:
        return f"merge {self.parts} x {self.tokens} tokens"


SETTINGS = [
    Blocks("copy", "bfloat16", 32, 256, 1),
    Blocks("copy", "bfloat16", 32, 256, 16),
    Blocks("copy", "float8_e4m3fn", 32, 256, 16),
    Blocks("copy", "bfloat16", 1, 4096, 1024),
    Blocks("swap", "bfloat16", 1, 256, 4),
    Blocks("swap", "bfloat16", 1, 4096, 1024),
    Blocks("swap", "float32", 1, 2048, 512),
    Merge("bfloat16", 1, 2),
    Merge("bfloat16", 8, 2),
    Merge("bfloat16", 8, 8),
    Merge("bfloat16", 512, 2),
    Merge("bfloat16", 4096, 2),
    Merge("float32", 512, 2),
    Merge("float32", 4096, 4),
]


def raw(x):
    """One-byte floats as bytes: torch indexes no others."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def index_copy(src, dst, pairs):
    """K, then V: gather the blocks, then put them."""
    for source, target in zip(src, dst, strict=True):
        raw(target).index_copy_(0, pairs[:, 1], raw(source).index_select(0, pairs[:, 0]))


def indexing(src, dst, pairs):
    """The same in brackets, K and V at once."""
    raw(dst)[:, pairs[:, 1]] = raw(src)[:, pairs[:, 0]]


def loop(src, dst, pairs):
    """One block after another."""
    for source, target in pairs.tolist():
        dst[:, target].copy_(src[:, source])


def block_calls(setting):
    """Name -> a call with pairs, and its result: the caches written."""
    shape = TorchSdpaBackend.get_kv_cache_shape(setting.blocks, BLOCK, KV_HEADS, SIZE)
    make = lambda: torch.randn(shape).to(getattr(torch, setting.dtype))  # noqa: E731
    sources = [make() for _ in range(setting.layers)]
    targets = sources if setting.kind == "copy" else [make() for _ in sources]

    def ours(pairs):
        if setting.kind == "copy":
            TorchSdpaBackend.copy_blocks(sources, pairs)
        else:
            for source, target in zip(sources, targets, strict=True):
                TorchSdpaBackend.swap_blocks(source, target, pairs)

    def over_layers(way):
        return lambda pairs: [way(*both, pairs) for both in zip(sources, targets, strict=True)]

    peers = {"index_copy": index_copy, "indexing": indexing, "loop": loop}
    return {"heedful": ours} | {name: over_layers(way) for name, way in peers.items()}, targets


def some_pairs(setting):
    return torch.randperm(setting.blocks)[: 2 * setting.pairs].view(2, -1).T.contiguous()


def check_blocks(setting, calls, targets):
    """All must leave the same bytes."""
    pairs, found = some_pairs(setting), []
    before = [raw(target).clone() for target in targets]
    for call in calls.values():
        for target, was in zip(targets, before, strict=True):
            raw(target).copy_(was)
        call(pairs)
        found.append([raw(target).clone() for target in targets])
    for name, other in zip(calls, found, strict=True):
        if not all(map(torch.equal, other, found[0])):
            raise SystemExit(f"{setting.name}: {name} copied other bytes than heedful")


class MergeCase:
    """The states of a case, and what every contender fills: nobody's time goes into new memory for its answer."""

    def __init__(self, setting):
        shape, dtype = (setting.tokens, HEADS, SIZE), getattr(torch, setting.dtype)
        self.outputs = [torch.randn(shape).to(dtype) for _ in range(setting.parts)]
        self.lses = [torch.randn(shape[:2]) for _ in range(setting.parts)]
        self.output, self.sums, self.lse = torch.empty(shape, dtype=dtype), torch.empty(shape), torch.empty(shape[:2])

    def calls(self):
        """Name -> a call; each ignores what is drawn for it."""
        found = {"heedful": self.ours, "torch": self.in_torch}
        return found | ({"two parts": self.two_parts} if len(self.lses) == 2 else {})

    def ours(self, _):
        """heedful's."""
        return merge_states(self.outputs, self.lses, output=self.output, output_lse=self.lse)

    def in_torch(self, _):
        """The formula, sums in fp32."""
        every = torch.stack(self.lses)
        top = every.amax(0)
        weights = (every - top).exp()
        total = weights.sum(0)
        self.sums.zero_()
        for output, share in zip(self.outputs, weights / total, strict=True):
            self.sums.addcmul_(output if output.dtype == torch.float32 else output.float(), share[..., None])
        return self.output.copy_(self.sums), torch.add(top, total.log(), out=self.lse)

    def two_parts(self, _):
        """Two parts, in the dtype of the outputs."""
        top = torch.maximum(*self.lses)
        one, other = ((lse - top).exp() for lse in self.lses)
        total = one + other
        shares = [(weight / total)[..., None].to(self.output.dtype) for weight in (one, other)]
        torch.mul(self.outputs[0], shares[0], out=self.output).addcmul_(self.outputs[1], shares[1])
        return self.output, torch.add(top, total.log(), out=self.lse)


def check_merges(setting, calls):
    """Outputs within a few steps of the dtype, LSEs of fp32."""
    found = {name: [x.clone() for x in call(None)] for name, call in calls.items()}
    output, lse = found["heedful"]
    for name, (other, other_lse) in found.items():
        limit = 2 * torch.finfo(output.dtype).eps * float(output.abs().max())
        near = torch.allclose(other, output, atol=limit, rtol=0)
        if not near or not torch.allclose(other_lse, lse, atol=1e-5):
            raise SystemExit(f"{setting.name}: {name} differs from heedful")


def measure(setting, rounds, clock):
    """Least microseconds of a call of each contender, in turns."""
    if setting.kind == "merge":
        calls, draw = MergeCase(setting).calls(), lambda: None
        check_merges(setting, calls)
    else:
        calls, targets = block_calls(setting)
        draw = lambda: some_pairs(setting)  # noqa: E731
        check_blocks(setting, calls, targets)
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            least[name] = min(least[name], turn(call, draw, clock))
    return {name: round(seconds * 1e6, 1) for name, seconds in least.items()}


def turn(call, draw, clock):
    """Seconds of the quickest call of one turn; what is drawn for it does not count."""
    spent, best = 0.0, float("inf")
    while spent < TURN:
        argument = draw()
        began = clock()
        call(argument)
        best = min(best, clock() - began)
        spent += best
    return best


def moved_bytes(setting):
    """Bytes that must be read and written."""
    item = getattr(torch, setting.dtype).itemsize
    if setting.kind == "merge":
        return (setting.parts + 1) * setting.tokens * HEADS * (SIZE * item + 4)
    return 2 * setting.layers * setting.pairs * 2 * KV_HEADS * BLOCK * SIZE * item


def row_of(setting, us):
    """The figures of one case."""
    ratios = {name: round(time / us["heedful"], 2) for name, time in us.items() if name != "heedful"}
    rate = round(moved_bytes(setting) / us["heedful"] / 1e3, 1)
    return asdict(setting) | {"name": setting.name, "us": us, "gb_per_s": rate, "times_faster_than": ratios}


def line(row):
    """One row of the table."""
    ratios = "  ".join(f"{name} {ratio:.2f}" for name, ratio in row["times_faster_than"].items())
    return f"{row['dtype']:<14} {row['name']:<22}{row['us']['heedful']:>10.1f}{row['gb_per_s']:>8.1f}   {ratios}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="a part of a case's name")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    print(f"{'dtype':<14} {'case':<22}{'us':>10}{'GB/s':>8}   times faster than")
    rows = []
    for setting in SETTINGS:
        if options.only in setting.name:
            rows.append(row_of(setting, measure(setting, options.rounds, clock)))
            print(line(rows[-1]), flush=True)
    record = {"benchmark": "cpu_blocks", "torch": torch.__version__, "isa": chosen_isa(), "threads": options.threads}
    text = json.dumps(record | {"rows": rows})
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
