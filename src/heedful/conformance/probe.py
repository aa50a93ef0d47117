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
    """Allocate and add on the platform's device. Never looks at flags or at environment variables of heedful.

    openvino is the exception: HEEDFUL_OPENVINO_DEVICE says where its cells run, so that is where this adds.
    """
    import torch

    if platform == "openvino":
        return _openvino()

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


def _openvino() -> Probe:
    """Its tensors are the host's; whatever device computes, it is a real one."""
    from heedful import environment, libraries
    from heedful.types import Missing

    library = libraries.import_once("openvino")
    if isinstance(library, Missing):
        return Probe(None, text=f"openvino cannot be imported: {library.cause}")
    word = environment.openvino_device()
    try:
        ones = library.op.Constant(library.Type.f32, library.Shape([4]), [1.0] * 4)
        given = library.op.Parameter(library.Type.f32, library.PartialShape([4]))
        added = library.opset13.add(given, ones)
        run = library.Core().compile_model(library.Model([added], [given], "ones"), word)
        found = run([ones.data])[0].tolist()
    except RuntimeError as error:
        return Probe(None, text=f"OpenVINO's {word} does not answer: {str(error).strip().splitlines()[-1]}")
    if found != [2.0] * 4:
        return Probe(None, text=f"OpenVINO's {word} adds one and one to {found}")
    return Probe(Fidelity.HARDWARE)
