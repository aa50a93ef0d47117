"""What proving costs: whole profiles of a backend, planned, run in workers and reported, by the command itself.

Figures are seconds of wall time, start of Python and of workers included, and cells a second. A profile that does not
end with every cell as planned is an error: a figure of a wrong run says nothing. The last line is JSON. Exit 1 when a
figure is over its limit (two cores).

    python benchmarks/conformance.py [--backend TORCH_SDPA] [--workers 2] [--profiles smoke ci] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from heedful.report import Report

LIMITS = {"smoke": 60.0, "ci": 300.0}
COMMAND = (sys.executable, "-c", "import sys; from heedful.cli import main; sys.exit(main())", "conform")


def measure(backend: str, profile: str, workers: int) -> tuple[float, int]:
    """Seconds of one run, and how many cells ran."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        words = ("--backend", backend, "--profile", profile, "--workers", str(workers), "--json", str(path))
        began = time.perf_counter()
        done = subprocess.run(
            [*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
        )
        seconds = time.perf_counter() - began
        if done.returncode != 0:
            sys.exit(f"{backend} did not pass {profile} (exit {done.returncode}):\n{done.stdout}")
        return seconds, Report.load(path).reached


def main() -> int:
    """Measure, print a table and one line of JSON, compare with the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="TORCH_SDPA")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--profiles", nargs="+", default=["smoke", "ci"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = {}
    for profile in arguments.profiles:
        seconds, cells = measure(arguments.backend, profile, arguments.workers)
        figures[profile] = {"seconds": round(seconds, 1), "cells": cells, "cells_a_second": round(cells / seconds, 1)}
        limit = f"limit {LIMITS[profile]:g} s" if profile in LIMITS else "no limit"
        print(f"{profile:<8}{seconds:>8.1f} s {cells:>7} cells   {limit}")
    text = json.dumps({"backend": arguments.backend, "workers": arguments.workers, "figures": figures})
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)
    return int(any(figures[name]["seconds"] > limit for name, limit in LIMITS.items() if name in figures))


if __name__ == "__main__":
    sys.exit(main())
