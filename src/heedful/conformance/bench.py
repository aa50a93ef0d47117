"""Where a check meets a backend: one case's tensors on the device under test, its layer, its cache, its forward calls.

``Bench(backend, case)`` is all that most checks need. The device is the worker's own business: ``on_device`` sets it
for everything that runs inside.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from heedful.conformance.inputs import build
from heedful.conformance.tolerance import OutOfToleranceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from heedful.backends.base import AttentionBackend, AttentionImpl, KVCache
    from heedful.conformance.batch import Batch, Expected
    from heedful.conformance.cases import Case

Margins = dict[str, float]
"""Share of the allowance that was used (1.0 is the limit), by measure."""

_DEVICE: Final[ContextVar[str]] = ContextVar("heedful_conformance_device", default="cpu")


class OutOfReachError(Exception):
    """This machine cannot run the check at all (memory, threads); the cell is NOT_RUN with this text, never a pass."""


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """Everything inside builds its tensors on this torch device."""
    token = _DEVICE.set(device)
    try:
        yield
    finally:
        _DEVICE.reset(token)


def device() -> str:
    """The torch device under test."""
    return _DEVICE.get()


class Bench:
    """One case laid out for one backend. batch: the step's tensors. impl: its layer. cache: as it stands before."""

    def __init__(self, backend: type[AttentionBackend], case: Case, batch: Batch | None = None) -> None:
        self.backend, self.case = backend, case
        self.on_host = build(case) if batch is None else batch
        self.batch = self.on_host.on(device())
        self.impl = self.layer()
        self.cache = self.fill()

    def layer(self, **changes: Any) -> AttentionImpl:
        """A layer of the case, with some of the constructor's arguments changed."""
        return self.backend.get_impl_cls()(**(layer_arguments(self.case, self.batch) | changes))

    def fill(self) -> KVCache:
        """A new cache as it stands before the step: context written, every other slot poisoned."""
        return self.on_host.fill(self.backend, self.impl, device())

    def forward(self, impl: AttentionImpl | None = None, **changes: Any) -> torch.Tensor:
        """One call with the step's arguments, some of them changed."""
        return (impl or self.impl).forward(**(self.arguments() | changes))

    def arguments(self) -> dict[str, Any]:
        """Every argument of forward; metadata fresh, so that nothing that was derived for one call serves another."""
        batch = self.batch
        return {
            "query": batch.query,
            "key": batch.key,
            "value": batch.value,
            "kv_cache": self.cache,
            "attn_metadata": replace(batch.metadata, step={}),
            "k_scale": batch.k_scale,
            "v_scale": batch.v_scale,
            "attn_type": self.case.attn_type,
        }

    def empty_output(self, fill: float = float("nan")) -> torch.Tensor:
        """[tokens, num_heads, head_size_v] of the query's dtype, prefilled."""
        shape = (len(self.batch.query), self.case.num_heads, self.case.size_v)
        return torch.full(shape, fill, dtype=self.batch.query.dtype, device=device())

    def empty_lse(self) -> torch.Tensor:
        """fp32 [tokens, num_heads], NaN."""
        shape = (len(self.batch.query), self.case.num_heads)
        return torch.full(shape, float("nan"), dtype=torch.float32, device=device())

    def pages(self, cache: KVCache | None = None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(K, V) of a cache as [num_blocks, block_size, num_kv_heads, size] on the host; None for an opaque layout."""
        views = self.backend.kv_views(self.cache if cache is None else cache)
        return None if views is None else (views[0].cpu().clone(), views[1].cpu().clone())


def layer_arguments(case: Case, batch: Batch) -> dict[str, Any]:
    """The constructor's arguments for a case; a feature that the case lacks is not mentioned."""
    features = {
        "alibi_slopes": batch.alibi_slopes,
        "sliding_window": case.sliding_window,
        "logits_soft_cap": case.logits_soft_cap,
        "sinks": batch.sinks,
        "head_size_v": case.head_size_v,
    }
    return {
        "num_heads": case.num_heads,
        "head_size": case.head_size,
        "scale": batch.scale,
        "num_kv_heads": case.num_kv_heads,
        "kv_cache_dtype": case.kv_cache_dtype,
        **{name: value for name, value in features.items() if value is not None},
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits; NaN equals itself, 0.0 and -0.0 differ."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(_bits(a), _bits(b)))


def _bits(x: torch.Tensor) -> torch.Tensor:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().cpu().contiguous().view(words[x.element_size()])


def must_refuse(action: Callable[[], Any], what: str, *kinds: type[Exception]) -> None:
    """Run something that must raise one of ``kinds``; a pass, or an error of another kind, fails the check."""
    try:
        action()
    except kinds:
        return
    except Exception as error:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise AssertionError(f"{what} raised {type(error).__name__} ({error}); it must be {wanted}") from error
    raise AssertionError(f"{what} was taken without a word")


def agree(expected: Expected, output: torch.Tensor, lse: torch.Tensor | None = None, *, what: str = "") -> Margins:
    """Judge an answer by the tolerance policy; OutOfToleranceError says where it is off, prefixed with ``what``."""
    try:
        return expected.judge(output, lse)
    except OutOfToleranceError as error:
        if not what:
            raise
        raise OutOfToleranceError(f"{what}: {error}", error.margins) from error


def merged(found: Iterable[Margins]) -> Margins:
    """The largest share of each measure over several judgements."""
    largest: Margins = {}
    for margins in found:
        for name, share in margins.items():
            largest[name] = max(share, largest.get(name, 0.0))
    return largest
