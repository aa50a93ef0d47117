"""A backend that is right in decoder attention, dies in encoder-only, hangs in cross attention and is wrong in encoder.

Its deaths are chosen by the sequence's attention type, so that a few cells of the suite meet every one of them.
"""

import os
import signal
import time

from heedful.backends.torch_sdpa import TorchSdpaBackend


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


def steered(platform):
    """A probe that tells what steers heedful in the worker."""
    from heedful.conformance.probe import Probe

    return Probe(None, text=os.environ.get("HEEDFUL_CPU_ISA", "unset"))
