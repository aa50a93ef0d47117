"""What choosing costs: the import, a decision that was made before, a decision that is new.

Import: ``import heedful`` in a new process, measured inside it, without the interpreter's own start.
Kept: get_attn_backend in seven arguments, the answer kept from before. New: explain with its whole record, on this
machine's device and on a simulated GPU. Figures are medians of CPU time, so that a busy machine disturbs them less; the
last line is JSON. Exit 1 when a figure is over its limit.

    python benchmarks/selection.py [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import process_time
from timeit import timeit

from heedful import Device, SelectionRequest, explain, get_attn_backend, platforms

LIMITS = {"import_ms": 60.0, "kept_us": 5.0, "new_here_us": 500.0, "new_simulated_us": 500.0, "new_vllm_us": 500.0}
IMPORT = "import time; began = time.process_time(); import heedful; print((time.process_time() - began) * 1e3)"
CALLS = 2_000


def import_ms(rounds: int) -> float:
    """Median over new processes of the time that ``import heedful`` takes."""
    runs = [
        subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        for _ in range(rounds)
    ]
    return median(float(run.stdout) for run in runs)


def kept_us(rounds: int) -> float:
    """One answer asked for again and again, the environment read each time."""
    seven = (128, None, "bfloat16", "auto", 16, False, False)
    get_attn_backend(*seven)
    return median(
        timeit(lambda: get_attn_backend(*seven), number=CALLS, timer=process_time) / CALLS * 1e6 for _ in range(rounds)
    )


def new_us(rounds: int, device: Device, policy: str) -> float:
    """A hundred unlike requests, each decided anew; libraries are imported before the clock starts."""
    sizes = itertools.product((64, 80, 96, 128, 256), (16, 32, 64, 128, 256), ("bfloat16", "float16"), (None, 4096))
    requests = [SelectionRequest(h, w, d, block_size=b) for h, b, d, w in sizes]

    def decide_all() -> None:
        for request in requests:
            explain(request, device, policy)

    decide_all()
    return median(timeit(decide_all, number=1, timer=process_time) / len(requests) * 1e6 for _ in range(rounds))


def main() -> int:
    """Measure, print a table and one line of JSON, compare with the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    here, gpu = platforms.detect(), Device("cuda", capability=(9, 0))
    figures = {
        "import_ms": import_ms(arguments.rounds),
        "kept_us": kept_us(arguments.rounds),
        "new_here_us": new_us(arguments.rounds, here, "strict"),
        "new_simulated_us": new_us(arguments.rounds, gpu, "strict"),
        "new_vllm_us": new_us(arguments.rounds, gpu, "vllm-0.6.3"),
    }
    for name, figure in figures.items():
        print(f"{name:<18}{figure:>10.2f}   limit {LIMITS[name]:g}")
    record = {"device": str(here), "rounds": arguments.rounds, "limits": LIMITS, "figures": figures}
    text = json.dumps(record)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)
    return int(any(figures[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
