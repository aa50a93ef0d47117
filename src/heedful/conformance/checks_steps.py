"""Checks of what must not depend on what: batch mates, other layers, earlier steps, calls that run at the same time."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

from heedful.conformance.bench import Bench, agree, merged, same_bits
from heedful.conformance.cuts import Piece, cut, expected_of, rows_of, whole

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from heedful.backends.base import AttentionBackend
    from heedful.conformance.bench import Margins
    from heedful.conformance.cases import Case


def check_batch_mates_never_matter(backend: type[AttentionBackend], case: Case) -> Margins:
    """Each sequence alone, and all of them in another order, give the rows that the whole batch gives."""
    bench = Bench(backend, case)
    expected, pieces = bench.on_host.expected(), whole(bench.on_host)
    orders: list[list[Piece]] = [[piece] for piece in pieces]
    orders.append(sorted(pieces, key=lambda piece: (piece.decode, -piece.sequence)))
    found = []
    for order in orders:
        names = ", ".join(str(piece.sequence) for piece in order)
        output = Bench(backend, case, cut(bench.on_host, order)).forward(bench.impl)
        found.append(agree(expected_of(expected, rows_of(bench.on_host, order)), output, what=f"sequences {names}"))
    return merged(found)


def check_layers_share_a_steps_metadata(backend: type[AttentionBackend], case: Case) -> Margins:
    """Layers that differ in scale, window and slopes, one metadata object: none sees what another derived."""
    ours = Bench(backend, case)
    plainer = replace(case, sliding_window=None, alibi=False)
    layer = replace(ours.on_host.layer, scale=2 * ours.on_host.scale, alibi_slopes=None)
    theirs = Bench(backend, plainer, replace(ours.on_host, case=plainer, layer=layer))
    alike = _with_other_numbers(ours)
    shared, found = ours.arguments()["attn_metadata"], []
    for name, bench in (("first", theirs), ("second", ours), ("third", alike), ("first again", theirs)):
        output = bench.forward(attn_metadata=shared)
        found.append(agree(bench.on_host.expected(), output, what=f"the {name} layer on shared metadata"))
    return merged(found)


def _with_other_numbers(bench: Bench) -> Bench:
    """A layer with the same features and other numbers for them: half the slopes, one more key in the window."""
    case, layer = bench.case, bench.on_host.layer
    slopes = None if layer.alibi_slopes is None else layer.alibi_slopes / 2
    other = replace(case, sliding_window=None if case.sliding_window is None else case.sliding_window + 1)
    batch = replace(bench.on_host, case=other, layer=replace(layer, alibi_slopes=slopes))
    return Bench(bench.backend, other, batch)


def check_a_layer_keeps_nothing_of_a_step(backend: type[AttentionBackend], case: Case) -> Margins:
    """Other steps on the same layer: they are right, they leave the first answer alone, and it comes out again."""
    bench, found = Bench(backend, case), []
    first = bench.forward()
    kept = first.clone()
    like_it = Bench(backend, replace(case, seed=case.seed + 1))
    for name, step in (("another step", _another_step(backend, case)), ("a step of the same lengths", like_it)):
        found.append(agree(step.on_host.expected(), step.forward(bench.impl), what=name))
        assert same_bits(first, kept), f"{name} changed the tensor that the first one answered with"
    bench.cache = bench.fill()
    assert same_bits(bench.forward(), kept), "the same step gives other bits after other steps"
    return merged(found)


def _another_step(backend: type[AttentionBackend], case: Case) -> Bench:
    """Other tokens, pages and lengths for the same layer, and other cache scales where there are any."""
    batch = "chunked" if case.batch != "chunked" else "mixed"
    first = Bench(backend, case).on_host
    for seed in range(case.seed + 1, case.seed + 20):
        other = Bench(backend, replace(case, batch=batch, seed=seed))
        if case.kv_cache_dtype == "auto" or other.on_host.k_scale != first.k_scale:
            break
    return other


def check_forward_is_reentrant(backend: type[AttentionBackend], case: Case) -> None:
    """A second call that begins and ends in the middle of a first one, and calls from two threads, change nothing."""
    ours, theirs = Bench(backend, case), _another_step(backend, case)
    right = ours.forward(), theirs.forward(ours.impl)

    def inner() -> None:
        theirs.cache = theirs.fill()
        assert same_bits(theirs.forward(ours.impl), right[1]), "a call inside another call gives other bits"

    ops = _Interruption(-1, inner)
    with ops:
        ours.forward()
    for at in range(0, ops.count, max(1, ops.count // MOMENTS)):
        ours.cache = ours.fill()
        with _Interruption(at, inner):
            output = ours.forward()
        assert same_bits(output, right[0]), f"a call that is interrupted at operation {at} gives other bits"
    _from_threads(ours, theirs, right)


MOMENTS = 12
"""How many moments of a forward are interrupted."""


class _Interruption(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of what runs inside, and runs ``action`` before one of them."""

    def __init__(self, at: int, action: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.at, self.action, self.count = at, action, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; saying so spares the seconds that importing torch's compiler takes."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch once an operation; the mode is off while it runs."""
        if self.count == self.at:
            self.action()
        self.count += 1
        return func(*args, **(kwargs or {}))


def _from_threads(ours: Bench, theirs: Bench, right: tuple[torch.Tensor, torch.Tensor]) -> None:
    gate, wrong = threading.Barrier(2), list[str]()

    def runs(bench: Bench, answer: torch.Tensor) -> None:
        gate.wait()
        answers = [bench.forward(ours.impl) for _ in range(5)]
        wrong.extend(bench.case.id for found in answers if not same_bits(found, answer))

    threads = [threading.Thread(target=runs, args=pair) for pair in zip((ours, theirs), right, strict=True)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong, f"two threads in one layer give other bits for {', '.join(sorted(set(wrong)))}"
