"""A run small enough to read whole, and the means to make others."""

import math

import pytest

from heedful.conformance.plan import ExpectedCell, Plan
from heedful.conformance.results import CheckResult, Outcome
from heedful.report import Report
from heedful.report.provenance import Provenance

PASS, FAIL, CRASH, NOT_RUN = Outcome.PASS, Outcome.FAIL, Outcome.CRASH, Outcome.NOT_RUN
NOT_SUPPORTED, WAIVED = Outcome.NOT_SUPPORTED, Outcome.WAIVED
HARDWARE, SELECT = "cpu.hardware", "cpu.select"
SINKS = {"code": "SINKS", "text": "sdpa has no sinks", "asked": "sinks"}
SELECTION = {
    "backend": "TORCH_SDPA",
    "chosen_by": "preference",
    "policy": "strict",
    "device": "cpu",
    "simulated": True,
    "request": {"head_size": 64},
    "candidates": [
        {"backend": "FAST", "variant": "", "facts": "", "reasons": [{"code": "DTYPE", "text": "takes float16"}]},
        {"backend": "TORCH_SDPA", "variant": "sdpa", "facts": "torch 2.13.0", "reasons": []},
    ],
    "warnings": [],
}
WAIVER = {"reason": "library bug", "owner": "ada", "issue": "tracker#7", "expires": "2026-12-31"}
PROVENANCE = Provenance(
    heedful="1.2.3",
    commit="c0ffee",
    dirty=True,
    python="CPython 3.11.7",
    packages={"heedful": "1.2.3", "torch": "2.13.0+cpu"},
    platform="cpu",
    device="cpu",
    device_name="",
    simulated=False,
    cpu="Example 9000",
    cores=2,
    machine="x86_64",
    os="Example Linux 12",
    kernel="Linux 6.1",
    image=None,
    command=("heedful", "conform", "--only", "a b"),
    seeds=(0,),
    environment={"HEEDFUL_PLATFORM": "cpu"},
    started="2026-12-01T05:00:00Z",
    finished="2026-12-01T05:00:09Z",
)


def cell_id(name, backend="TORCH_SDPA"):
    return f"cpu/{backend}/{name}"


def expected(name, outcome=PASS, reason=None, lane=HARDWARE, backend="TORCH_SDPA"):
    return ExpectedCell(lane, cell_id(name, backend), outcome, reason)


def result(name, outcome=PASS, lane=HARDWARE, backend="TORCH_SDPA", **fields):
    return CheckResult(lane, cell_id(name, backend), outcome, **fields)


def report_of(cells, results, provenance=PROVENANCE, profiles=None, only=()):
    return Report.create(
        Plan(tuple(cells)),
        results,
        provenance=provenance,
        profiles={HARDWARE: "ci"} if profiles is None else profiles,
        reproduce=lambda r: f"heedful conform --only '{r.id}'",
        only=only,
    )


@pytest.fixture
def report():
    """One cell of every kind: passed, failed, crashed, refused as planned, waived, not run, lost, and a selection."""
    cells = [
        expected("prefill[bf16-d64]"),
        expected("decode[bf16-d64]"),
        expected("decode[f32-d64]"),
        expected("sinks[bf16-d64]", NOT_SUPPORTED, SINKS),
        expected("window[bf16-d64]"),
        expected("free[free-empty]", backend="NO_ATTENTION"),
        expected("late[bf16-d64]"),
        expected("bf16", lane=SELECT, backend="SELECT"),
    ]
    results = [
        result("prefill[bf16-d64]", margins={"output": 0.25, "lse": 0.5}, seconds=1.0, facts={"tokens": 7}),
        result("decode[bf16-d64]", FAIL, detail="output differs\nat row 3 | col 1", margins={"output": math.nan}),
        result("decode[f32-d64]", CRASH, detail="signal 11", seconds=0.5),
        result("sinks[bf16-d64]", NOT_SUPPORTED, reason=SINKS),
        result("window[bf16-d64]", WAIVED, detail="off by 3", facts={"waiver": WAIVER}),
        result("free[free-empty]", NOT_RUN, backend="NO_ATTENTION", detail="no device answers"),
        result("bf16", lane=SELECT, backend="SELECT", facts={"selection": SELECTION}),
    ]
    return report_of(cells, results)
