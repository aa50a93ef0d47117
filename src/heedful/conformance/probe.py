"""What this machine can prove of a platform, measured by running something there; runs in a worker process."""

from __future__ import annotations

from dataclasses import dataclass

from heedful.conformance.results import Fidelity


@dataclass(frozen=True)
class Probe:
    """fidelity: None where the platform is out of reach, and text says why. device: the torch device of its tensors.

    broken: not even the worker processes could be started, so nothing is known of the platform.
    """

    fidelity: Fidelity | None
    device: str = "cpu"
    text: str = ""
    broken: bool = False


def probe(platform: str) -> Probe:
    """Allocate and add on the platform's device. Never looks at flags or at environment variables of heedful."""
    import torch

    devices = {"cpu": "cpu", "cuda": "cuda", "rocm": "cuda", "xpu": "xpu"}
    device = devices.get(platform)
    if device is None:
        return Probe(None, text=f"heedful runs no cells on {platform} from this installation")
    built = {"cuda": torch.version.cuda, "rocm": torch.version.hip}.get(platform, "yes")
    if built is None:
        return Probe(None, text=f"torch {torch.__version__} is not built for {platform}")
    try:
        total = int(torch.ones(4, device=device).sum())
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return Probe(None, text=f"no {platform} device answers: {str(error).splitlines()[0]}")
    if total != 4:
        return Probe(None, text=f"the {platform} device adds four ones to {total}")
    return Probe(Fidelity.HARDWARE, device)
