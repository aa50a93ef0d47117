"""The pytest door to the suite: cells as test items, results as JSON lines. Loads no torch in this process.

A test file is three lines::

    from heedful.conformance import parametrize_with_checks

    @parametrize_with_checks("my_package:MyBackend")
    def test_conformance(heedful_cell): heedful_cell()

Each cell runs in a worker process of its own pool, so that one that crashes or hangs costs one test item, also under
pytest-xdist. loadscope, loadfile and loadgroup are refused: they lose items when a worker dies (xdist issue 1362).
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from heedful.conformance.results import CheckResult, Outcome, reproduce
from heedful.errors import HeedfulError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from heedful.conformance.plan import ExpectedCell
    from heedful.conformance.pool import Workers
    from heedful.conformance.run import Runner, Terms

LOSING: Final = frozenset({"loadscope", "loadfile", "loadgroup"})
OPTIONS: Final = ("heedful_backend", "heedful_profile", "heedful_only", "heedful_report")
RECORD: Final = "heedful"
"""The user property that carries a result from a test item to its report, across processes."""


def parametrize_with_checks(backend: Any, profile: str = "smoke") -> pytest.MarkDecorator:
    """Make a test item of every cell of a backend; the test takes ``heedful_cell`` and calls it.

    backend: a registered name, ``module:Class`` or a class that can be imported. The --heedful-* options go before.
    """
    return pytest.mark.heedful(backend, profile)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the --heedful-* options."""
    group = parser.getgroup("heedful", "conformance of attention backends")
    group.addoption("--heedful-backend", metavar="NAME", help="test this backend: a registered name or module:Class")
    group.addoption("--heedful-profile", choices=("smoke", "ci", "full"), help="run this profile")
    group.addoption("--heedful-only", action="append", default=[], metavar="GLOB", help="run only these cells")
    group.addoption("--heedful-report", metavar="PATH", help="write one JSON line for each cell to this file")
    group.addoption("--heedful-seed", type=int, default=0, metavar="N", help="added to the seed of every case")
    group.addoption("--heedful-timeout", type=float, default=60.0, metavar="S", help="seconds that one cell may take")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, refuse what loses cells, and open the report where this process writes it."""
    config.addinivalue_line("markers", "heedful(backend, profile): one item for every cell of a backend's conformance")
    dist = config.getoption("dist", "no")
    if dist in LOSING and any(config.getoption(option) for option in OPTIONS):
        raise pytest.UsageError(_refusal(dist))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Ledger(config.getoption("heedful_report")), "heedful-ledger")


def _refusal(dist: str) -> str:
    return (
        f"--dist {dist} loses cells when a worker process dies (pytest-xdist issue 1362), and what was lost would look "
        "like what passed; use --dist load or --dist worksteal"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell each xdist worker how items are distributed; it cannot see that itself."""
    node.workerinput["heedful_dist"] = node.config.getoption("dist", "no")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One item for every planned cell of a marked function."""
    marker = metafunc.definition.get_closest_marker("heedful")
    if marker is None:
        return
    dist = getattr(metafunc.config, "workerinput", {}).get("heedful_dist", "no")
    if dist in LOSING:
        raise pytest.Collector.CollectError(_refusal(dist))
    try:
        cells = _planned(metafunc.config, *marker.args, **marker.kwargs)
    except HeedfulError as error:
        raise pytest.Collector.CollectError(str(error)) from None
    metafunc.parametrize("heedful_cell", cells, ids=[cell.expected.id for cell in cells], indirect=True)


class Cell:
    """One cell as a test's argument: call it to run it. Passes, skips, xfails or fails as the result says."""

    def __init__(self, runner: Runner, expected: ExpectedCell, profile: str) -> None:
        self.runner, self.expected, self.profile = runner, expected, profile
        self.workers: Workers | None = None
        self.result: CheckResult | None = None

    def __call__(self) -> None:
        """Run the cell in the session's worker process and turn its outcome into pytest's."""
        assert self.workers is not None
        self.result = next(iter(self.runner.lane([self.expected], self.workers)))
        _conclude(self.result, self._again())

    def _again(self) -> str:
        """The line that reruns this cell as it ran here."""
        spec = self.runner.known[self.expected.lane, self.expected.id].backend
        seed = f" --seed {self.runner.terms.seed}" if self.runner.terms.seed else ""
        return f"{reproduce(self.expected.id, self.profile)} --backend {shlex.quote(spec)}{seed}"


def _planned(config: pytest.Config, backend: Any, profile: str = "smoke") -> list[Cell]:
    from heedful.conformance.run import choose, runner_for

    profile = config.getoption("heedful_profile") or profile
    runner, cells = runner_for(config.getoption("heedful_backend") or backend, None, profile, _terms(config))
    return [Cell(runner, cell, profile) for cell in choose(cells, config.getoption("heedful_only"))]


def _terms(config: pytest.Config) -> Terms:
    from heedful.conformance.run import Terms

    return Terms(seed=config.getoption("heedful_seed"), timeout=config.getoption("heedful_timeout"))


def _conclude(result: CheckResult, again: str) -> None:
    if result.outcome == Outcome.PASS:
        return
    if result.outcome in (Outcome.NOT_SUPPORTED, Outcome.NOT_RUN):
        pytest.skip(f"{result.outcome}: {result.detail}")
    if result.outcome == Outcome.WAIVED:
        pytest.xfail(f"waived: {result.detail}")
    pytest.fail(f"{result.outcome}: {result.detail}\nagain: {again}", pytrace=False)


@pytest.fixture(scope="session")
def heedful_workers(pytestconfig: pytest.Config) -> Iterator[Workers]:
    """The worker process of this pytest process; a cell that kills it gets the next one a new one."""
    from heedful.conformance.pool import Workers

    terms = _terms(pytestconfig)
    with Workers(1, terms.timeout) as workers:
        yield workers


@pytest.fixture
def heedful_cell(request: pytest.FixtureRequest, heedful_workers: Workers) -> Iterator[Cell]:
    """The cell of this item. A test that does not call it has proven nothing, so that is an error."""
    cell: Cell = request.param
    cell.workers = heedful_workers
    yield cell
    if cell.result is None:
        pytest.fail(f"the test never called heedful_cell(), so {cell.expected.id} was not run", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Put the result on the report of the call, which xdist carries to the process that writes."""
    cell = getattr(item, "callspec", None) and item.callspec.params.get("heedful_cell")  # type: ignore[attr-defined]
    if call.when == "call" and isinstance(cell, Cell) and cell.result is not None:
        item.user_properties.append((RECORD, json.dumps(cell.result.to_dict())))
    return (yield)


class _Ledger:
    """Counts outcomes and writes them down, in the one process that sees every report."""

    def __init__(self, path: str | None) -> None:
        self.counts: Counter[str] = Counter()
        self.path = None if path is None else Path(path)
        if self.path is not None:
            try:
                self.path.write_text("", encoding="utf-8")
            except OSError as error:
                raise pytest.UsageError(f"cannot write --heedful-report {path}: {error.strerror}") from error

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep each cell's result once, as soon as it is there."""
        if report.when != "call":
            return
        for name, text in report.user_properties:
            if name == RECORD:
                self._keep(str(text))

    def _keep(self, text: str) -> None:
        self.counts[json.loads(text)["outcome"]] += 1
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Cells that were all out of reach are not a pass."""
        if self.counts and not self._executed() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """One line: how many cells ended how."""
        if not self.counts:
            return
        told = " · ".join(f"{self.counts[word]} {word}" for word in Outcome if self.counts[word])
        terminalreporter.write_line(f"heedful: {told}")
        if not self._executed():
            terminalreporter.write_line("heedful: no cell was executed, and what did not run did not pass", red=True)

    def _executed(self) -> int:
        return self.counts.total() - self.counts[Outcome.NOT_RUN]
