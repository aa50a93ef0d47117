"""Markdown: the whole document once, then what no quoted text may do to it, and its size."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from heedful.report import Report, markdown
from heedful.report.sections import code, fenced

from .conftest import (
    FAIL,
    NOT_RUN,
    NOT_SUPPORTED,
    PROVENANCE,
    SELECT,
    SELECTION,
    cell_id,
    expected,
    report_of,
    result,
)

GOLDEN = """\
# heedful conformance report

**NOT AS PLANNED: 3 cells, 1 of them without a result; 6 of 8 cells ran.**

## Outcomes

| outcome | cells |
| --- | ---: |
| PASS | 2 |
| FAIL | 1 |
| NOT_SUPPORTED | 1 |
| WAIVED | 1 |
| XPASS | 0 |
| CRASH | 1 |
| TIMEOUT | 0 |
| DEVICE_LOST | 0 |
| INFRA_ERROR | 0 |
| NOT_RUN | 1 |
| no result | 1 |

## Planned and run

| lane | backend | profile | planned | asked for | ran | not as planned |
| --- | --- | --- | ---: | ---: | ---: | ---: |
| `cpu.hardware` | `TORCH_SDPA` | `ci` | 6 | 6 | 5 | 3 |
| `cpu.hardware` | `NO_ATTENTION` | `ci` | 1 | 1 | 0 | 0 |
| `cpu.select` | `SELECT` | – | 1 | 1 | 1 | 0 |

## Not as planned

### `cpu/TORCH_SDPA/decode[bf16-d64]`

FAIL, planned PASS, in `cpu.hardware`.

```text
output differs
at row 3 | col 1
```

```sh
heedful conform --only 'cpu/TORCH_SDPA/decode[bf16-d64]'
```

### `cpu/TORCH_SDPA/decode[f32-d64]`

CRASH, planned PASS, in `cpu.hardware`.

```text
signal 11
```

```sh
heedful conform --only 'cpu/TORCH_SDPA/decode[f32-d64]'
```

### `cpu/TORCH_SDPA/late[bf16-d64]`

no result, planned PASS, in `cpu.hardware`.

```text
the run ended before this cell
```


## Waived

| cell | reason | owner | issue | expires |
| --- | --- | --- | --- | --- |
| `cpu/TORCH_SDPA/window[bf16-d64]` | `library bug` | `ada` | `tracker#7` | `2026-12-31` |

## Selections

| selection | device | chosen | by | refused, and why |
| --- | --- | --- | --- | --- |
| `bf16` | `cpu` | `TORCH_SDPA` | `preference (strict)` | `FAST: DTYPE` |

## Margins

The largest error of each backend and dtype, as a share of what is allowed. 1 is the limit.

| backend | dtype | worst | of | in |
| --- | --- | ---: | --- | --- |
| `TORCH_SDPA` | `bf16` | nan | `output` | `decode[bf16-d64]` |

## Not supported

| lane | backend | reason | cells |
| --- | --- | --- | ---: |
| `cpu.hardware` | `TORCH_SDPA` | `SINKS: sdpa has no sinks` | 1 |

## Not run

| lane | backend | reason | cells |
| --- | --- | --- | ---: |
| `cpu.hardware` | `NO_ATTENTION` | `no device answers` | 1 |

## Provenance

| fact | value |
| --- | --- |
| heedful | `1.2.3` |
| commit | `c0ffee, with changes` |
| device | `cpu` |
| processor | `Example 9000, 2 cores, x86_64` |
| system | `Example Linux 12, Linux 6.1` |
| ran on | `host` |
| Python | `CPython 3.11.7` |
| torch | `2.13.0+cpu` |
| packages | `2, listed in the JSON report` |
| command | `heedful conform --only 'a b'` |
| seeds | `0` |
| environment | `HEEDFUL_PLATFORM=cpu` |
| time | `2026-12-01T05:00:00Z to 2026-12-01T05:00:09Z` |
| seconds in cells | `1.5` |
| plan | `02aba93e9f6284c2c682fac7c6e8fdfec5107289bf0b7056f3cbb38e171f0693` |
"""
HOSTILE = (
    "<script>alert(1)</script> <img src=x onerror=alert(1)> [a](javascript:b) ![c](d) | `` ` ``` \\| \\\\|"
    " @everyone #1 **bold** \x1b[31m\u202egnp.exe\x00\ud800\n# heading\n```\n<b>\n~~~\n| x |\r\n"
)


def test_the_document_reads_as_it_should(report):
    assert markdown.render(report).rstrip("\n") + "\n" == GOLDEN


def test_it_is_rendered_alike_from_the_file(tmp_path, report):
    report.write(tmp_path / "r.json")
    assert markdown.render(Report.load(tmp_path / "r.json")) == markdown.render(report)


@pytest.mark.parametrize(
    ("results", "sentence"),
    [
        ([result("a[x]"), result("b[x]")], "**AS PLANNED: 2 of 2 cells ran, and each ended as planned.**"),
        ([result("a[x]"), result("b[x]", NOT_RUN)], "**AS PLANNED: 1 of 2 cells ran, and each ended as planned.**"),
        ([result("a[x]", NOT_RUN), result("b[x]", NOT_RUN)], "**NOTHING REACHED: none of 2 cells could run.**"),
        ([result("a[x]"), result("b[x]", FAIL)], "**NOT AS PLANNED: 1 cell; 2 of 2 cells ran.**"),
        ([result("a[x]")], "**NOT AS PLANNED: 1 cell, 1 of them without a result; 1 of 2 cells ran.**"),
    ],
)
def test_the_verdict_comes_first(results, sentence):
    text = markdown.render(report_of([expected("a[x]"), expected("b[x]")], results))
    assert text.splitlines()[:3] == ["# heedful conformance report", "", sentence]


def test_a_partial_report_says_what_it_proves():
    cells = [expected("a[x]"), expected("b[x]")]
    text = markdown.render(report_of(cells, [result("a[x]")], only=("*a*",)))
    assert "Partial: narrowed to `*a*`. It proves only 1 of 2 planned cells.\n" in text


def test_a_stated_image_is_marked_as_stated():
    digest = f"sha256:{'ab' * 32}"
    text = markdown.render(report_of([expected("a[x]")], [result("a[x]")], replace(PROVENANCE, image=digest)))
    assert f"| ran on | `{digest} (stated)` |" in text


def test_the_worst_margin_of_each_backend_and_dtype_is_told():
    results = [
        result("a[bf16-d64]", margins={"output": 0.25, "lse": 0.75}),
        result("b[bf16-d64]", margins={"output": 0.5}),
        result("a[f32-d64]", margins={"output": 0.125}),
        result("plain", margins={"output": 1.5}),
    ]
    text = markdown.render(report_of([expected(r.id.split("/")[-1]) for r in results], results))
    rows = [line for line in text[text.index("## Margins") :].splitlines() if line.startswith("| `TORCH")]
    assert rows == [
        "| `TORCH_SDPA` | – | 1.5 | `output` | `plain` |",
        "| `TORCH_SDPA` | `bf16` | 0.75 | `lse` | `a[bf16-d64]` |",
        "| `TORCH_SDPA` | `f32` | 0.125 | `output` | `a[f32-d64]` |",
    ]


def hostile_report(count=1):
    provenance = replace(PROVENANCE, cpu=HOSTILE, command=(HOSTILE,), environment={HOSTILE: HOSTILE})
    selection = SELECTION | {"device": HOSTILE, "candidates": [dict(SELECTION["candidates"][0], backend=HOSTILE)]}
    results = [
        row
        for n in range(count)
        for row in (
            result(f"{n}{HOSTILE}", FAIL, detail=HOSTILE * 30, lane=HOSTILE, margins={HOSTILE: 2.0}),
            result(f"r{n}{HOSTILE}", NOT_SUPPORTED, reason={"code": HOSTILE, "text": f"{n}{HOSTILE}"}),
            result(f"n{n}{HOSTILE}", NOT_RUN, detail=f"{n}{HOSTILE}"),
            result(f"s{n}{HOSTILE}", lane=SELECT, facts={"selection": selection}),
        )
    ]
    return report_of([], results, provenance, profiles={HOSTILE: HOSTILE}, only=(HOSTILE,))


def kinds(text):
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    return {token.type for outer in tokens for token in (outer, *(outer.children or ()))}


def test_hostile_text_is_shown_and_never_becomes_markup():
    text = markdown.render(hostile_report())
    assert kinds(text).isdisjoint({"html_inline", "html_block", "link_open", "image", "em_open", "hr"})
    assert "alert(1)" in text
    assert all(char.isprintable() or char == "\n" for char in text)
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    titles = [after.content for before, after in pairwise(tokens) if before.type == "heading_open"]
    assert [title for title in titles if title[0] != "`" and title != "heedful conformance report"] == [
        "Outcomes",
        "Planned and run",
        "Not as planned",
        "Selections",
        "Margins",
        "Not supported",
        "Not run",
        "Provenance",
    ]


def test_hostile_text_keeps_each_table_to_its_columns():
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown.render(hostile_report()))
    widths, cells = set(), 0
    for token in tokens:
        cells += token.type in ("td_open", "th_open")
        if token.type == "tr_close":
            widths.add(cells)
            cells = 0
    assert widths == {2, 4, 5, 7}


@given(st.text(st.characters(codec=None), max_size=40))
def test_any_text_as_code_is_one_code_span_in_one_table_cell(text):
    table = f"| a | b |\n| --- | --- |\n| {code(text)} | end |\n"
    tokens = MarkdownIt("commonmark").enable("table").parse(table)
    inlines = [token for token in tokens if token.type == "inline"][2:]
    assert [inline.content for inline in inlines[1:]] == ["end"]
    assert [child.type for child in inlines[0].children] in (["code_inline"], ["text"])


@given(st.text(st.characters(codec=None), max_size=40))
def test_any_text_as_a_block_stays_in_its_block(text):
    tokens = MarkdownIt("commonmark").parse(f"{fenced(text)}\n\nend\n")
    assert [token.type for token in tokens] == ["fence", "paragraph_open", "inline", "paragraph_close"]


def test_a_report_of_any_size_fits_a_step_summary_and_counts_what_was_cut():
    text = markdown.render(hostile_report(4000))
    assert len(text.encode()) < 1_048_576
    shown = text.count("\n### ")
    more = re.findall(r"… and (\d+) more, in the JSON report\.", text)
    assert 100 < shown < 12_000
    assert int(more[0]) + shown == 12_000  # NOT_RUN is never against the plan
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles[:3] == ["Outcomes", "Planned and run", "Not as planned"]
    assert titles[-1] == "Provenance"


def test_a_long_detail_is_cut_and_says_by_how_much():
    report = report_of([expected("a[x]")], [result("a[x]", FAIL, detail="x" * 5000)])
    assert f"{'x' * 2000}… (3000 more characters)" in markdown.render(report)
    assert cell_id("a[x]") in markdown.render(report)


def test_kernel_builds_have_a_table_of_their_figures():
    builds = [
        replace(result("compiles[attention-x1-a]"), facts={"figures": {"code_bytes": 4096.0, "flops": 1.5e9}}),
        replace(result("compiles[attention-x1-b]"), facts={"figures": {"code_bytes": 20.0}}),
    ]
    text = markdown.render(report_of([expected(r.id.partition("SDPA/")[2]) for r in builds], builds))
    assert "| build | code_bytes | flops | seconds |" in text
    assert "| `cpu/TORCH_SDPA/compiles[attention-x1-a]` | 4,096 | 1,500,000,000 |" in text
    assert "| `cpu/TORCH_SDPA/compiles[attention-x1-b]` | 20 | – |" in text
