"""How each platform is recognised: by what the driver shows in files and in its management library.

No probe creates a context on a device, and none loads torch. Each takes the machine to look at, so that a test can
bring its own files, environment and libraries.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from heedful import environment, libraries, nvml
from heedful.types import Device, Missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


@dataclass(frozen=True)
class Machine:
    """Where a probe looks: a file system root, the environment, the dynamic loader."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    load: Callable[[str], Any] = ctypes.CDLL

    def glob(self, pattern: str) -> list[Path]:
        """Matching paths in natural order: card2 before card10."""
        return sorted(self.root.glob(pattern), key=lambda path: _natural(str(path)))

    def text(self, path: Path | str) -> str:
        """A small file's content without line end; empty when it cannot be read."""
        try:
            return (self.root / path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return ""


@dataclass(frozen=True)
class Answer:
    """What a probe found, and what it saw in one line; no device means that the platform does not answer."""

    device: Device | None
    seen: str


def _found(device: Device, seen: str) -> Answer:
    return Answer(device, seen)


def _none(seen: str) -> Answer:
    return Answer(None, seen)


def cuda(machine: Machine) -> Answer:
    """NVIDIA's management library says what there is; where it cannot be loaded, the driver's files do."""
    visible = machine.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        library = machine.load("libnvidia-ml.so.1")
    except OSError as cause:
        return _cuda_by_files(machine, visible, f"libnvidia-ml.so.1 cannot be loaded: {cause}")
    try:
        found = nvml.first_visible(library, visible)
    except (nvml.NvmlError, AttributeError) as error:  # an old library exports fewer functions
        return _none(f"NVML: {error}")
    device = Device("cuda", capability=found.capability, name=found.name, simulated=False)
    return _found(device, f"NVML: {found.name}, compute capability {device.generation}{found.remark}")


def _cuda_by_files(machine: Machine, visible: str | None, why: str) -> Answer:
    cards = machine.glob("proc/driver/nvidia/gpus/*/information")
    if not cards or visible in ("", "-1"):
        return _none(f"{why}; {len(cards)} GPUs in the driver's files, CUDA_VISIBLE_DEVICES={visible!r}")
    model = re.search(r"Model:\s*(.+)", machine.text(cards[0]))
    name = model[1].strip() if model else "NVIDIA GPU"
    # the files do not tell the compute capability; without it no kernel is claimed for the device
    return _found(Device("cuda", name=name, simulated=False), f"{why}; the driver's files show {name}")


def rocm(machine: Machine) -> Answer:
    """The compute driver's topology in sysfs; a node counts when its render device is open to this process."""
    if not (machine.root / "dev/kfd").exists():
        return _none("there is no /dev/kfd")
    nodes = [node for node in map(_kfd_node, _kfd_files(machine)) if int(node.get("gfx_target_version", "0"))]
    open_nodes = [n for n in nodes if (machine.root / f"dev/dri/renderD{n.get('drm_render_minor')}").exists()]
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        open_nodes = _picked(machine.environ.get(variable), open_nodes)
    if not open_nodes:
        return _none(f"/dev/kfd is there; {len(nodes)} GPUs in its topology, none of them visible to this process")
    arch = _gfx(machine.environ.get("HSA_OVERRIDE_GFX_VERSION"), int(open_nodes[0]["gfx_target_version"]))
    device = Device("rocm", arch=arch, name=open_nodes[0]["name"] or arch, simulated=False)
    return _found(device, f"/dev/kfd topology: {arch}, {len(open_nodes)} visible of {len(nodes)}")


def _kfd_files(machine: Machine) -> Iterator[tuple[str, str]]:
    for path in machine.glob("sys/class/kfd/kfd/topology/nodes/*/properties"):
        yield machine.text(path), machine.text(path.parent / "name")


def _kfd_node(texts: tuple[str, str]) -> dict[str, str]:
    properties, name = texts
    pairs = (line.split(maxsplit=1) for line in properties.splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2} | {"name": name}


def _picked(visible: str | None, nodes: list[dict[str, str]]) -> list[dict[str, str]]:
    """The nodes that a comma-separated list of indexes or GPU-<unique id> leaves; the first bad word ends the list."""
    if visible is None:
        return nodes
    by_word = {str(index): node for index, node in enumerate(nodes)}
    by_word |= {f"GPU-{int(node.get('unique_id', '0')):x}": node for node in nodes}
    kept: list[dict[str, str]] = []
    for word in (word.strip() for word in visible.split(",")):
        if word not in by_word:
            break
        kept.append(by_word[word])
    return kept


def _gfx(override: str | None, version: int) -> str:
    """90402 -> gfx942; HSA_OVERRIDE_GFX_VERSION=11.0.0 wins, because the runtime compiles for it."""
    told = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", override or "")
    major, minor, step = map(int, told.groups()) if told else (version // 10000, version // 100 % 100, version % 100)
    return f"gfx{major}{minor:x}{step:x}"


def xpu(machine: Machine) -> Answer:
    """An Intel GPU with a render node, and the Level Zero loader through which torch would reach it."""
    cards = [c for c in machine.glob("sys/class/drm/renderD*") if machine.text(c / "device/vendor") == "0x8086"]
    cards = [card for card in cards if (machine.root / "dev/dri" / card.name).exists()]
    if not cards:
        return _none("no Intel GPU with a render node in /dev/dri")
    try:
        machine.load("libze_loader.so.1")
    except OSError as cause:
        return _none(f"an Intel GPU is there, but libze_loader.so.1 cannot be loaded: {cause}")
    name = f"Intel GPU {machine.text(cards[0] / 'device/device')}"
    return _found(Device("xpu", name=name, simulated=False), f"{name} and the Level Zero loader")


_TPU_CHIPS: Final = {
    "0x0027": "v3",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "7x",
}


def tpu(machine: Machine) -> Answer:
    """Google's chips by PCI id, and a device node (/dev/accel*, /dev/vfio/*) through which they are open here."""
    chips = list(_tpu_chips(machine))
    if not chips:
        return _none("no TPU on the PCI bus")
    nodes = [*machine.glob("dev/accel[0-9]*"), *machine.glob("dev/vfio/[0-9]*")]
    if not nodes or machine.environ.get("TPU_VISIBLE_CHIPS") == "":
        return _none(f"{len(chips)} TPU chips on the PCI bus, none of them open to this process")
    device = Device("tpu", arch=chips[0], name=f"TPU {chips[0]}", simulated=False)
    return _found(device, f"{len(chips)} TPU {chips[0]} chips, {len(nodes)} device nodes")


def _tpu_chips(machine: Machine) -> Iterable[str]:
    for path in machine.glob("sys/bus/pci/devices/*/vendor"):
        chip = _TPU_CHIPS.get(machine.text(path.parent / "device"))
        if machine.text(path) == "0x1ae0" and chip:
            yield chip


def cpu(machine: Machine) -> Answer:
    """Always there; the name is the processor's."""
    model = re.search(r"model name\s*:\s*(.+)", machine.text("proc/cpuinfo"))
    name = model[1].strip() if model else "CPU"
    return _found(Device("cpu", name=name, simulated=False), name)


def openvino(machine: Machine) -> Answer:
    """The library, on any machine, with the device that HEEDFUL_OPENVINO_DEVICE names; asked for by name only."""
    word = environment.openvino_device(machine.environ)
    version, library = libraries.installed("openvino"), libraries.import_once("openvino")
    if isinstance(version, Missing):
        return _none(f"openvino: {version.cause}")
    if isinstance(library, Missing):
        return _none(f"openvino: {library.cause}")
    core = library.Core()
    seen = [name for name in core.available_devices if name.partition(".")[0] == word]
    if not seen:
        there = ", ".join(core.available_devices) or "no device"
        return _none(f"openvino {version} sees {there}, but {environment.OPENVINO_DEVICE} names {word}")
    name = core.get_property(seen[0], "FULL_DEVICE_NAME").strip()
    return _found(Device("openvino", arch=word, name=name, simulated=False), f"openvino {version} on {word}: {name}")


PROBES: Final[Mapping[str, Callable[[Machine], Answer]]] = {
    "cuda": cuda,
    "rocm": rocm,
    "xpu": xpu,
    "tpu": tpu,
    "cpu": cpu,
    "openvino": openvino,
}
"""In the order of detection."""


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", text)]
