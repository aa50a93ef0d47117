"""What runs in a worker process: one cell at a time, on one torch thread. Loads torch when the worker starts."""

from __future__ import annotations

import os
import time
import traceback
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from heedful.backends.builds import Build
from heedful.conformance.results import FIGURES, Outcome
from heedful.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from heedful.conformance.cases import Case

EXIT_ZERO: Final = 120
"""Stands for exit code 0 of os._exit: the pool takes a worker that leaves with 0 for one that has finished."""


@dataclass(frozen=True)
class Order:
    """One cell to run. backend: a registered name or ``module:Class``. reason: set where a refusal is to be proven.

    case: a Build where the check is its compilation.
    """

    backend: str
    check: str
    module: str
    case: Case | Build
    device: str = "cpu"
    reason: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Ended:
    """What came of it; the parent adds lane, id and waivers."""

    outcome: Outcome
    detail: str = ""
    margins: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def start() -> None:
    """Prepare a fresh worker: torch on one thread, and an exit code for every death."""
    import torch

    torch.set_num_threads(1)
    leave = os._exit
    os._exit = lambda code: leave(code or EXIT_ZERO)  # type: ignore[assignment]


def run_cell(order: Order) -> Ended:
    """Run one check, or prove one refusal. Never raises."""
    began = time.perf_counter()
    ended = _ended(order)
    return replace(ended, seconds=time.perf_counter() - began)


def _ended(order: Order) -> Ended:
    from heedful.conformance.bench import OutOfReachError, on_device

    try:
        with on_device(order.device):
            found = _action(order)() or {}
    except (BackendUnavailableError, OutOfReachError) as error:
        return Ended(Outcome.NOT_RUN, str(error))
    except Exception as error:
        return Ended(Outcome.FAIL, told(error), margins=getattr(error, "margins", {}))
    except BaseException as error:
        return Ended(Outcome.CRASH, f"the cell raised {type(error).__name__}({error}), which ends a process")
    if order.reason is not None:
        return Ended(Outcome.NOT_SUPPORTED, order.reason.get("text", ""))
    if isinstance(order.case, Build):
        return Ended(Outcome.PASS, facts={FIGURES: dict(found)})
    return Ended(Outcome.PASS, margins=found)


def _action(order: Order) -> Callable[[], Any]:
    from heedful.conformance.checks_builds import prove_build_refused
    from heedful.conformance.refusals import prove_refusal
    from heedful.registry import resolve

    backend = resolve(order.backend)
    if order.reason is None:
        check = getattr(import_module(f"heedful.conformance.{order.module}"), f"check_{order.check}")
        return partial(check, backend, order.case)
    if isinstance(order.case, Build):
        return partial(prove_build_refused, backend, order.case)
    with_lse = order.reason.get("asked") == "lse"
    return partial(prove_refusal, backend, order.case, order.reason, with_lse=with_lse)


def told(error: Exception) -> str:
    """The message of a failed check; any other error with its type and the two innermost places it came through."""
    if isinstance(error, AssertionError) and str(error):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    places = "".join(f"\n  {os.path.basename(f.filename)}:{f.lineno} in {f.name}: {f.line}" for f in frames)  # noqa: PTH119
    return f"{type(error).__name__}: {error}{places}"
