#!/usr/bin/env python3
"""Write the generated tables of docs/selection.md, or with --check tell whether they are current (exit 1).

A table stands between ``<!-- generated: NAME -->`` and ``<!-- end: NAME -->``; what is around it is written by hand.
Needs heedful installed. The tables are of simulated devices, so that every machine makes the same ones.
"""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from heedful import registry, vllm_063
from heedful.libraries import LIBRARIES
from heedful.selector import PREFERENCE, STRICT, decide
from heedful.types import PLATFORMS, AttentionType, Device, Override, Selection, SelectionRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from heedful.backends.capabilities import Capability

PAGE = Path(__file__).resolve().parent.parent / "docs" / "selection.md"
GENERATIONS = {
    "cuda": ("7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1", "13.0"),
    "rocm": ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1030"),
    "xpu": ("",),
    "tpu": ("v4", "v5e", "v5p", "v6e", "7x"),
    "cpu": ("",),
    "openvino": ("",),
}
BLOCK_SIZES = (16, 32, 64, 128, 256)
FEATURES = ("window", "alibi", "soft_cap", "sinks", "blocksparse", "lse")


def device(platform: str, generation: str) -> Device:
    """A simulated device of one generation."""
    if platform == "cuda":
        major, minor = generation.split(".")
        return Device("cuda", capability=(int(major), int(minor)))
    return Device(platform, arch=generation or None)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    columns = list(head)
    lines = [columns, ["---"] * len(columns), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def preference() -> str:
    """The candidates of policy strict, platform by platform."""
    return table(("platform", "candidates, best first"), ((p, ", ".join(PREFERENCE[p])) for p in PLATFORMS))


def claims() -> str:
    """Every capability row of every backend of this package."""
    head = ("backend", "platform", "variant", "generations", "dtypes", "cache dtypes", "head sizes", "block sizes")
    rows = [
        [name if first else "", *_claim(row)]
        for name in registry.BUILT_IN
        for first, row in _first_marked(registry.load(name).CAPABILITIES)
    ]
    return table((*head, "attention types", "features"), rows)


def _first_marked(rows: tuple[Capability, ...]) -> list[tuple[bool, Capability]]:
    return [(index == 0, row) for index, row in enumerate(rows)]


def _claim(row: Capability) -> list[str]:
    generations = "all" if row.generations is None else ", ".join(sorted(row.generations, key=_natural))
    every = row.attn_types == set(AttentionType)
    sizes = f"{row.head_sizes}{' (V may differ)' if row.mixed_head_sizes else ''}"
    words = [sorted(row.dtypes), sorted(row.kv_cache_dtypes)]
    return [
        row.platform,
        row.variant,
        generations,
        *(", ".join(word) for word in words),
        sizes,
        str(row.block_sizes),
        "all" if every else ", ".join(sorted(row.attn_types)),
        ", ".join(sorted(row.features)) or "none",
    ]


def _natural(word: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", word)]


def first_choices() -> str:
    """Backend and variant for a plain decoder request, generation by generation and block size by block size."""
    head = ("device", *(f"block {size}" for size in BLOCK_SIZES))
    rows = []
    for platform, generations in GENERATIONS.items():
        for generation in generations:
            found = device(platform, generation)
            answers = [decide(SelectionRequest(128, block_size=size), found) for size in BLOCK_SIZES]
            rows.append([str(found), *map(_told, answers)])
    return table(head, rows)


def _told(selection: Selection) -> str:
    if selection.chosen is None:
        return "none"
    return f"{selection.backend} ({selection.chosen.variant})" if selection.chosen.variant else str(selection.backend)


CASES: dict[str, tuple[Device, dict[str, object], str | None]] = {
    "cuda 9.0, block 16": (device("cuda", "9.0"), {}, None),
    "cuda 9.0, block 256": (device("cuda", "9.0"), {"block_size": 256}, None),
    "cuda 9.0, head size 80": (device("cuda", "9.0"), {"head_size": 80}, None),
    "cuda 9.0, float32": (device("cuda", "9.0"), {"dtype": "float32"}, None),
    "cuda 9.0, fp8 cache": (device("cuda", "9.0"), {"kv_cache_dtype": "fp8"}, None),
    "cuda 9.0, window 4096": (device("cuda", "9.0"), {"sliding_window": 4096}, None),
    "cuda 9.0, window 0": (device("cuda", "9.0"), {"sliding_window": 0}, None),
    "cuda 9.0, block 0": (device("cuda", "9.0"), {"block_size": 0}, None),
    "cuda 7.5, float16": (device("cuda", "7.5"), {"dtype": "float16"}, None),
    "cuda 13.0, block 16": (device("cuda", "13.0"), {}, None),
    "cuda 9.0, XFORMERS by name, head size 17": (device("cuda", "9.0"), {"head_size": 17}, "XFORMERS"),
    "cuda 9.0, TORCH_SDPA by name": (device("cuda", "9.0"), {}, "TORCH_SDPA"),
    "cuda 9.0, TRITON_ATTN by name": (device("cuda", "9.0"), {}, "TRITON_ATTN"),
    "cuda 9.0, torch_sdpa by name": (device("cuda", "9.0"), {}, "torch_sdpa"),
    "cpu, FLASH_ATTN by name": (device("cpu", ""), {}, "FLASH_ATTN"),
    "cpu, fp8 cache": (device("cpu", ""), {"kv_cache_dtype": "fp8"}, None),
    "cpu, block-sparse": (device("cpu", ""), {"is_blocksparse": True}, None),
    "cpu, attention-free": (device("cpu", ""), {"is_attention_free": True}, None),
    "cuda 9.0, attention-free, XFORMERS by name": (device("cuda", "9.0"), {"is_attention_free": True}, "XFORMERS"),
    "cuda 9.0, block-sparse and attention-free": (
        device("cuda", "9.0"),
        {"is_attention_free": True, "is_blocksparse": True},
        None,
    ),
    "rocm gfx942": (device("rocm", "gfx942"), {}, None),
    "tpu v5e, XFORMERS by name": (device("tpu", "v5e"), {}, "XFORMERS"),
    "tpu v5e, head size 96": (device("tpu", "v5e"), {"head_size": 96}, None),
}


def differences() -> str:
    """The same questions under both policies; head size 128, bfloat16, block 16 unless said."""
    rows = [
        [f"**{label}**" if strict.split(" (")[0] != release else label, strict, release]
        for label, strict, release in (
            (label, _answer(label, STRICT), _answer(label, vllm_063.POLICY)) for label in CASES
        )
    ]
    return table(("question", STRICT, vllm_063.POLICY), rows)


def _answer(label: str, policy: str) -> str:
    found, changes, name = CASES[label]
    request = SelectionRequest(**{"head_size": 128} | changes)
    try:
        selection = decide(request, found, policy, None if name is None else Override(name, "argument"))
    except (ValueError, AssertionError) as error:
        bases = (AssertionError, AttributeError, ValueError)
        return f"error ({next(base.__name__ for base in bases if isinstance(error, base))})"
    if selection.backend is not None:
        return _told(selection)
    codes = dict.fromkeys(str(reason.code) for one in selection.candidates for reason in one.reasons)
    return f"error: {', '.join(codes)}"


def stacks() -> str:
    """What a simulated device is taken to have."""
    rows = [
        [
            f"`{name}`",
            library.distribution,
            *(library.pins.get(platform, "") for platform in PLATFORMS),
            library.unpinned,
        ]
        for name, library in LIBRARIES.items()
    ]
    return table(("import name", "distribution", *PLATFORMS, "why in no stack"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "preference": preference,
    "first choices": first_choices,
    "claims": claims,
    "differences": differences,
    "stacks": stacks,
}


def rendered(text: str) -> str:
    """The page with every generated part made anew."""
    for name, make in PARTS.items():
        pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end: {name} -->)"
        if re.search(pattern, text, re.DOTALL) is None:
            sys.exit(f"{PAGE.name} has no part 'generated: {name}'; put its two marks back")
        body = make()
        text = re.sub(pattern, lambda found, body=body: f"{found[1]}{body}\n{found[2]}", text, flags=re.DOTALL)
    return text


def main() -> int:
    """Write the page, or check it."""
    old = PAGE.read_text(encoding="utf-8")
    new = rendered(old)
    if old == new:
        return 0
    if "--check" in sys.argv[1:]:
        sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), PAGE.name, "generated"))
        print(f"{PAGE.name} is not current; run scripts/selection_docs.py", file=sys.stderr)
        return 1
    PAGE.write_text(new, encoding="utf-8")
    print(f"wrote {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
