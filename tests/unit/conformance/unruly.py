"""A backend that is right in decoder attention, dies in encoder-only, hangs in cross attention and is wrong in encoder.

Its deaths are chosen by the sequence's attention type, so that a few cells of the suite meet every one of them.
"""

import os
import signal
import time

from heedful.backends.builds import Build
from heedful.backends.torch_sdpa import TorchSdpaBackend
from heedful.errors import UnsupportedError
from heedful.types import Reason, ReasonCode


class Unruly(TorchSdpaBackend):
    """Behaves by attention type; ``death`` is how encoder-only attention ends the process."""

    name = "UNRULY"
    death = "signal"

    @classmethod
    def get_impl_cls(cls):
        from heedful.backends.torch_sdpa_impl import TorchSdpaImpl

        class Impl(TorchSdpaImpl):
            def forward(self, *args, attn_type="decoder", **kwargs):
                misbehave(str(attn_type), cls.death)
                answer = super().forward(*args, attn_type=attn_type, **kwargs)
                return answer + 1 if attn_type == "encoder" else answer

        return Impl


def misbehave(attn_type, death):
    """Die or hang."""
    if attn_type == "encoder_decoder":
        time.sleep(600)
    if attn_type == "encoder_only":
        deaths = {
            "signal": lambda: os.kill(os.getpid(), signal.SIGSEGV),
            "exit": lambda: os._exit(3),
            "exit0": lambda: os._exit(0),
            "system_exit": lambda: exit_by_exception(7),
        }
        deaths[death]()


def exit_by_exception(code):
    raise SystemExit(code)


def steered(platform, fidelity):
    """A probe that tells what steers heedful in the worker."""
    from heedful.conformance.probe import Probe

    return Probe(None, text=os.environ.get("HEEDFUL_CPU_ISA", "unset"))


def _build(variant, refused=None, profile="smoke"):
    limit = None if refused is None else Reason(ReasonCode.CAPABILITY, refused, variant, "smaller")
    return Build("attention", "x1", variant, {"bytes": 4096}, profile, limit)


class Builder(TorchSdpaBackend):
    """Its compiler takes all but what is called huge, says no figure of "mute", and breaks off at "broken"."""

    name = "BUILDER"
    BUILDS = (
        _build("plain"),
        _build("huge", "more than the memory of an x1"),
        _build("lie", "said to be refused"),
        _build("mute"),
        _build("broken"),
        _build("late", profile="ci"),
    )

    @classmethod
    def compile_build(cls, build):
        if build.variant == "huge":
            raise UnsupportedError("the compiler ran out of memory")
        if build.variant == "broken":
            raise RuntimeError("the compiler fell over")
        return {} if build.variant == "mute" else {"code_bytes": build.options["bytes"]}
