"""Worker processes: forked from a server that has imported torch and never run it, one cell each at a time.

A cell that kills its worker or never ends costs that cell; the next one gets a fresh worker.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, Final, Self

from pebble import ProcessExpired, ProcessPool

from heedful.conformance.checklist import CHECKS
from heedful.conformance.probe import Probe, probe
from heedful.conformance.results import Fidelity, Outcome
from heedful.conformance.worker import EXIT_ZERO, Ended, Order, run_cell, start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

DEPTH: Final = 8
"""Cells that wait for each worker: enough that none idles, few enough to stop soon."""

PRELOADED: Final = ("worker", "refusals", *dict.fromkeys(check.module for check in CHECKS))
"""What a worker needs in any case; importing it runs nothing, so that forking from there is safe."""

STARTS: Final = 3
"""Pools that may break in a row without a result before the rest of the cells are INFRA_ERROR."""


class Workers:
    """A pool as a context manager. timeout: seconds that one cell may take. probing: what says what is there."""

    def __init__(
        self,
        count: int = 1,
        timeout: float = 60.0,
        *,
        starting: Callable[[], None] = start,
        probing: Callable[[str, Fidelity], Probe] = probe,
    ) -> None:
        self.count, self.timeout, self._starting, self._probing = count, timeout, starting, probing
        self._pool: ProcessPool | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End every worker; the next cell starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()  # type: ignore[no-untyped-call]
            pool.join()

    def probe(self, platform: str, fidelity: Fidelity) -> Probe:
        """What this machine can prove of a lane; a probe that dies, hangs or cannot start proves nothing."""
        try:
            found = self._submit(self._probing, platform, fidelity).result()
        except BrokenProcessPool as error:
            self.stop()
            return Probe(None, text=cannot_start(error), broken=True)
        except (TimeoutError, OSError, RuntimeError) as error:
            why = death(error, self.timeout)
            return Probe(None, text=f"the probe of {platform}.{fidelity} did not come back: {why}")
        assert isinstance(found, Probe)
        return found

    def run(self, orders: Iterable[Order]) -> Iterator[tuple[Order, Ended]]:
        """Every order with what came of it, in order."""
        waiting, window, broken = deque(orders), deque[tuple[Order, "Future[Any]"]](), 0
        while waiting or window:
            try:
                self._fill(waiting, window)
                order, future = window[0]
                ended = self._ended(future)
            except (BrokenProcessPool, OSError, RuntimeError) as error:
                self.stop()
                waiting.extendleft(order for order, _ in reversed(window))
                window.clear()
                broken += 1
                if broken == STARTS:
                    yield from ((order, Ended(Outcome.INFRA_ERROR, cannot_start(error))) for order in waiting)
                    return
                continue
            broken = 0
            window.popleft()
            yield order, ended

    def _fill(self, waiting: deque[Order], window: deque[tuple[Order, Future[Any]]]) -> None:
        while waiting and len(window) < DEPTH * self.count:
            window.append((waiting[0], self._submit(run_cell, waiting[0])))
            waiting.popleft()

    def _submit(self, function: Callable[..., Any], *arguments: object) -> Future[Any]:
        if self._pool is None:
            self._pool = ProcessPool(
                self.count, initializer=_begin, initargs=(self._starting, _steering()), context=_context()
            )
        future: Future[Any] = self._pool.schedule(function, args=arguments, timeout=self.timeout)
        return future

    def _ended(self, future: Future[Any]) -> Ended:
        try:
            ended = future.result()
        except TimeoutError as error:
            return Ended(Outcome.TIMEOUT, death(error, self.timeout), seconds=self.timeout)
        except ProcessExpired as error:
            return Ended(Outcome.CRASH, death(error, self.timeout))
        except BrokenProcessPool:
            raise
        except Exception as error:
            return Ended(Outcome.INFRA_ERROR, f"the worker could not answer: {type(error).__name__}: {error}")
        assert isinstance(ended, Ended)
        return ended


def _steering() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("HEEDFUL_")}


def _begin(starting: Callable[[], None], steering: dict[str, str]) -> None:
    """A worker's own environment is the one that the fork server first saw; what steers heedful is as it stands now."""
    for name in _steering().keys() - steering.keys():
        del os.environ[name]
    os.environ.update(steering)
    starting()


def _context() -> Any:
    """Forked from a server that has only imported torch: quick to start, and safe, because nothing ran there."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", *(f"heedful.conformance.{name}" for name in PRELOADED)])
    return context


def death(error: BaseException, timeout: float) -> str:
    """How a worker ended: the signal, the exit code, or that it never did."""
    if isinstance(error, TimeoutError):
        return f"no end after {timeout:g} s; its process was stopped"
    code = getattr(error, "exitcode", None)
    if code is None:
        return f"{type(error).__name__}: {error}"
    if code < 0:
        known = {int(s): s.name for s in signal.Signals}
        return f"the process was killed by {known.get(-code, f'signal {-code}')}"
    return f"the process ended itself with exit code {0 if code == EXIT_ZERO else code}"


def cannot_start(error: BaseException) -> str:
    """What a broken pool means for the person who started the run."""
    return (
        f"the worker processes cannot start ({type(error).__name__}: {error}); a script that starts a run needs "
        "`if __name__ == '__main__':` around it, and torch must import"
    )
