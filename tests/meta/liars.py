"""Backends that lie about themselves rather than miscompute."""

from __future__ import annotations

from dataclasses import replace

from heedful.errors import UnsupportedError
from heedful.types import Reason, ReasonCode
from meta.plain import EVERYTHING, Plain

NOTHING = (replace(EVERYTHING, dtypes=frozenset()),)


class ClaimsEverythingRefusesEverything(Plain):
    """Every claim is there, and every layer is refused."""

    def __init__(self, *args, **kwargs) -> None:
        reason = Reason(ReasonCode.DTYPE, "no kernel for it today")
        raise UnsupportedError("no kernel for it today", (reason,))


class ClaimsNothingComputesEverything(Plain):
    """No request is claimed, every one is served."""

    CAPABILITIES = NOTHING
    ENFORCES = (EVERYTHING,)


class ClaimsNothingRefusesEverything(Plain):
    """An honest nobody."""

    CAPABILITIES = NOTHING


class RefusesForTheWrongReason(Plain):
    """Says SINKS where its CAPABILITIES say SOFT_CAP."""

    CAPABILITIES = (replace(EVERYTHING, features=EVERYTHING.features - {"soft_cap"}),)

    def refuse(self, request, skip=()):
        try:
            super().refuse(request, skip)
        except UnsupportedError as error:
            raise UnsupportedError(str(error), (Reason(ReasonCode.SINKS, "no sinks"),)) from None


class RefusesWithAnyError(Plain):
    """Refuses by falling over."""

    CAPABILITIES = RefusesForTheWrongReason.CAPABILITIES

    def refuse(self, request, skip=()):
        try:
            super().refuse(request, skip)
        except UnsupportedError as error:
            raise RuntimeError(str(error)) from None


class AnswersNothing(Plain):
    """Returns the output as it found it, without an error; its own is NaN: freed memory may hold the right answer."""

    def target(self, output, query):
        return super().target(output, query) if output is not None else super().target(None, query).fill_(float("nan"))

    def step(self, call):
        return call.query.new_empty(0), call.query.new_empty(0)

    def fill_lse(self, output_lse, lse):
        pass

    def answer(self, call, out, target):
        return target
