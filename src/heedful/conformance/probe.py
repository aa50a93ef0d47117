"""What this machine can prove of a lane, measured by running something there; runs in a worker process.

A lane is a platform at a fidelity, and each has a probe of its own: a TPU that is absent is no answer to the question
whether its kernels run in an interpreter. PROBES holds them; a lane without one can be proven nowhere yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from heedful.conformance.results import Fidelity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class Probe:
    """fidelity: None where the lane is out of reach, and text says why. device: the torch device of its tensors.

    broken: not even the worker processes could be started, so nothing is known of the lane.
    """

    fidelity: Fidelity | None
    device: str = "cpu"
    text: str = ""
    broken: bool = False


def probe(platform: str, fidelity: Fidelity = Fidelity.HARDWARE) -> Probe:
    """Run the lane's probe. Never looks at flags or at environment variables of heedful.

    openvino is the exception: HEEDFUL_OPENVINO_DEVICE says where its cells run, so that is where its probe adds.
    """
    lane = (platform, fidelity)
    if lane not in PROBES:
        return Probe(None, text=f"heedful proves nothing of {platform} at fidelity {fidelity} from this installation")
    return PROBES[lane]()


def _torch(platform: str, device: str) -> Probe:
    """Allocate and add on the platform's device of torch."""
    import torch

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


def _ipex_on_the_cpu() -> Probe:
    """The CPU build of IPEX attends to one key, which gives that key's value."""
    import torch

    from heedful import libraries
    from heedful.types import Missing

    library = libraries.import_once("intel_extension_for_pytorch")
    if isinstance(library, Missing):
        return Probe(None, text=f"intel_extension_for_pytorch cannot be imported: {library.cause}")
    row = torch.arange(16, dtype=torch.bfloat16).view(1, 1, 16)
    output, ends, table = torch.zeros_like(row), *(torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [[0]]))
    try:
        paged = library.llm.modules.PagedAttention
        paged.flash_attn_varlen_func(output, row, row[None], row[None], ends, ends, 1, 1, 1.0, True, table, None)
    except (RuntimeError, AssertionError, AttributeError) as error:
        version = getattr(library, "__version__", "of unknown version")
        told = str(error).strip().partition("\n")[0]
        return Probe(None, text=f"intel_extension_for_pytorch {version} does not attend on the CPU: {told}")
    if not torch.equal(output, row):
        return Probe(None, text=f"intel_extension_for_pytorch finds {output.tolist()} where the answer is 0 … 15")
    return Probe(Fidelity.EMULATED)


def _tpu(fidelity: Fidelity) -> Probe:
    """By jax: the chip itself, the interpreter of Pallas where there is none, or the compiler alone."""
    from heedful.conformance import probe_tpu

    why_not = {
        Fidelity.HARDWARE: probe_tpu.adds_on_a_tpu,
        Fidelity.EMULATED: probe_tpu.runs_in_the_interpreter,
        Fidelity.COMPILED: probe_tpu.compiles_for_a_tpu,
    }[fidelity]()
    return Probe(None, text=why_not) if why_not else Probe(fidelity)


PROBES: Final[Mapping[tuple[str, Fidelity], Callable[[], Probe]]] = {
    ("cpu", Fidelity.HARDWARE): partial(_torch, "cpu", "cpu"),
    ("cuda", Fidelity.HARDWARE): partial(_torch, "cuda", "cuda"),
    ("rocm", Fidelity.HARDWARE): partial(_torch, "rocm", "cuda"),
    ("xpu", Fidelity.HARDWARE): partial(_torch, "xpu", "xpu"),
    ("xpu", Fidelity.EMULATED): _ipex_on_the_cpu,
    ("openvino", Fidelity.HARDWARE): _openvino,
    ("tpu", Fidelity.HARDWARE): partial(_tpu, Fidelity.HARDWARE),
    ("tpu", Fidelity.EMULATED): partial(_tpu, Fidelity.EMULATED),
    ("tpu", Fidelity.COMPILED): partial(_tpu, Fidelity.COMPILED),
}
"""(platform, fidelity) -> what runs something there and says what came of it. A new lane is one line here."""
