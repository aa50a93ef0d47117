"""What OPENVINO's layer adds to the bare PagedAttention operator: decode of 8 sequences of 4096 keys, bf16, by default.

Both work on the same cache and the same numbers in turns, each call with all of its arguments, as a server makes it.
The layer's answer is held against float64 first. Figures: the least and the median CPU time of a call on one thread,
and the median of what a layer's call takes more than the bare call before it. "new step" has metadata that nothing is
known of, so that the checks of a step are in its time; "same step" is what every later layer of the step pays.

    python benchmarks/openvino_layer.py [--dtype bfloat16] [--batch 8] [--keys 4096] [--rounds 30]
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

import torch
from cpu_cases import Case
from cpu_peers import openvino as bare_operator
from cpu_problem import TOLERANCE, Problem

from heedful.backends.base import AttentionMetadata
from heedful.backends.openvino import OpenVinoBackend

LIMIT = 1.10


def metadata_of(p: Problem) -> AttentionMetadata:
    """A new step: nothing is known of it."""
    case, batch = p.case, len(p.case.q_lens)
    return AttentionMetadata(
        num_prefills=0,
        num_decodes=batch,
        num_prefill_tokens=0,
        num_decode_tokens=batch,
        query_start_loc=p.query_start,
        seq_lens=p.kv_lens,
        context_lens=p.kv_lens - 1,
        block_tables=p.tables,
        slot_mapping=p.slots,
        max_query_len=1,
        max_seq_len=max(case.kv_lens),
    )


def seconds(call, *arguments) -> float:
    """CPU seconds of one call."""
    begin = time.process_time()
    call(*arguments)
    return time.process_time() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(TOLERANCE))
    for name, default in (("batch", 8), ("keys", 4096), ("rounds", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    p = Problem(Case("openvino", "decode", (1,) * asked.batch, (asked.keys - 1,) * asked.batch, dtype=asked.dtype))
    bare, output = bare_operator(p), p.output()
    layer = OpenVinoBackend.get_impl_cls()(p.case.heads, p.case.size, p.scale, p.case.kv_heads)

    def forward(metadata: AttentionMetadata) -> None:
        layer.forward(p.query, *p.new, p.cache, metadata, output=output)

    forward(metadata_of(p))
    truth = p.truth()
    assert truth.error(output, None) < TOLERANCE[asked.dtype] * truth.largest, "the layer's answer is wrong"
    rounds = []
    for _ in range(asked.rounds):
        metadata = metadata_of(p)
        rounds.append((seconds(bare.call), seconds(forward, metadata), seconds(bare.call), seconds(forward, metadata)))
    columns = [[1e3 * x for x in column] for column in zip(*rounds, strict=True)]
    found = {
        name: {"least": min(times), "median": median(times)}
        for name, times in (("bare", columns[0] + columns[2]), ("new step", columns[1]), ("same step", columns[3]))
    }
    for name, at in (("new step", 1), ("same step", 3)):
        found[name]["adds"] = median(b - a for a, b in zip(columns[at - 1], columns[at], strict=True))
        found[name]["ratio"] = found[name]["least"] / found["bare"]["least"]
    for name, figures in found.items():
        print(f"{name:10}", "  ".join(f"{word} {figure:.3f}" for word, figure in figures.items()))
    print("within", LIMIT, "of the bare operator:", all(found[n]["ratio"] <= LIMIT for n in ("new step", "same step")))
    print(json.dumps({"case": vars(asked), "ms": found, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
