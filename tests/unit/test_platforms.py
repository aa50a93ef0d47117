# ruff: noqa: N802  the fake library has the names of the real one
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from heedful import libraries, platforms, probes
from heedful.errors import BadInputError
from heedful.probes import Machine
from heedful.types import PLATFORMS, Device, Missing, ReasonCode


def absent(name):
    raise OSError(f"{name}: cannot open shared object file")


def machine(root, files=(), environ=None, load=absent):
    for name, text in dict(files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(root, environ or {}, load)


class FakeNvml:
    """NVIDIA's management library with the GPUs given as (name, uuid, capability); a slice is a MIG uuid of GPU 0."""

    def __init__(self, *gpus, init=0, slices=()):
        self.gpus, self.init, self.slices, self.open = gpus, init, slices, 0

    def __getattr__(self, name):
        def call(*arguments):
            return getattr(self, f"do_{name}")(*arguments)

        if not name.startswith("nvml"):
            raise AttributeError(name)
        call.__name__ = name
        return call

    def do_nvmlInit_v2(self):
        self.open += not self.init
        return self.init

    def do_nvmlShutdown(self):
        self.open -= 1
        return 0

    def do_nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.gpus)
        return 0

    def do_nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = index.value + 1
        return 0

    def do_nvmlDeviceGetHandleByUUID(self, uuid, handle):
        handle._obj.value = 100
        return 0 if uuid.decode() in self.slices else 6

    def do_nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part, whole):
        assert part.value == 100
        whole._obj.value = 1
        return 0

    def do_nvmlDeviceGetUUID(self, handle, buffer, size):
        buffer.value = self.gpus[handle.value - 1][1].encode()
        return 0

    def do_nvmlDeviceGetName(self, handle, buffer, size):
        buffer.value = self.gpus[handle.value - 1][0].encode()
        return 0

    def do_nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = self.gpus[handle.value - 1][2]
        return 0


H200, T4 = ("NVIDIA H200", "GPU-aaaa-1", (9, 0)), ("Tesla T4", "GPU-bbbb-2", (7, 5))


def cuda(tmp_path, visible=None, library=None, files=()):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    load = absent if library is None else lambda name: library
    return probes.cuda(machine(tmp_path, files, environ, load))


def test_cuda_is_recognised_through_nvml_and_the_library_is_closed_again(tmp_path):
    library = FakeNvml(H200)
    answer = cuda(tmp_path, library=library)
    assert answer.device == Device("cuda", capability=(9, 0), name="NVIDIA H200", simulated=False)
    assert answer.seen == "NVML: NVIDIA H200, compute capability 9.0"
    assert library.open == 0


@pytest.mark.parametrize(
    ("visible", "capability"),
    [("0", (9, 0)), ("1", (7, 5)), ("1,0", (7, 5)), (" 1 ", (7, 5)), ("GPU-bbbb", (7, 5)), ("GPU-aaaa-1,1", (9, 0))],
)
def test_cuda_visible_devices_says_which_gpu_comes_first(tmp_path, visible, capability):
    assert cuda(tmp_path, visible, FakeNvml(H200, T4)).device.capability == capability


def test_a_slice_has_the_capability_of_its_gpu(tmp_path):
    answer = cuda(tmp_path, "MIG-cccc-3", FakeNvml(H200, slices=("MIG-cccc-3",)))
    assert answer.device.capability == (9, 0)


@pytest.mark.parametrize("visible", ["", "-1", "2", "GPU-zzzz", "NoDevFiles", "MIG-unknown"])
def test_a_hidden_gpu_does_not_answer(tmp_path, visible):
    library = FakeNvml(H200, T4)
    answer = cuda(tmp_path, visible, library)
    assert answer.device is None
    assert library.open == 0


def test_unlike_gpus_are_remarked_on_because_cuda_orders_them_by_speed(tmp_path):
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in cuda(tmp_path, None, FakeNvml(T4, H200)).seen
    assert "CUDA_DEVICE_ORDER" not in cuda(tmp_path, None, FakeNvml(H200, H200)).seen


def test_a_driver_that_does_not_start_is_told_with_its_code(tmp_path):
    answer = cuda(tmp_path, library=FakeNvml(H200, init=9))
    assert answer == probes.Answer(None, "NVML: nvmlInit_v2 answered 9")


def test_an_old_library_without_the_function_is_told(tmp_path):
    class Old:
        def nvmlInit_v2(self):
            return 0

        def nvmlShutdown(self):
            return 0

    assert cuda(tmp_path, library=Old()).seen == "NVML: 'Old' object has no attribute 'nvmlDeviceGetCount_v2'"


def test_no_gpu_at_all_is_told(tmp_path):
    assert (
        cuda(tmp_path, library=FakeNvml()).seen == "NVML: 0 GPUs, none of them visible: CUDA_VISIBLE_DEVICES is not set"
    )


def test_without_nvml_the_drivers_files_name_the_gpu_but_no_capability_is_made_up(tmp_path):
    files = {"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA A10\nIRQ: 5\n"}
    answer = cuda(tmp_path, files=files)
    assert answer.device == Device("cuda", name="NVIDIA A10", simulated=False)
    assert "the driver's files show NVIDIA A10" in answer.seen
    assert cuda(tmp_path, "", files=files).device is None


def test_nothing_of_nvidia_is_no_cuda(tmp_path):
    answer = cuda(tmp_path)
    assert answer.device is None
    assert "libnvidia-ml.so.1 cannot be loaded" in answer.seen


CPU_NODE = "cpu_cores_count 16\nsimd_count 0\ngfx_target_version 0\n"


def kfd(*targets):
    files = {"dev/kfd": "", "sys/class/kfd/kfd/topology/nodes/0/properties": CPU_NODE}
    for index, target in enumerate(targets, start=1):
        node, minor = f"sys/class/kfd/kfd/topology/nodes/{index}", 127 + index
        properties = f"simd_count 304\ngfx_target_version {target}\ndrm_render_minor {minor}\nunique_id {index + 9}\n"
        files |= {f"{node}/properties": properties, f"{node}/name": f"card{index}\n", f"dev/dri/renderD{minor}": ""}
    return files


@pytest.mark.parametrize(
    ("target", "arch"),
    [
        (90010, "gfx90a"),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (110000, "gfx1100"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
    ],
)
def test_rocm_reads_the_target_from_the_topology(tmp_path, target, arch):
    answer = probes.rocm(machine(tmp_path, kfd(target)))
    assert answer.device == Device("rocm", arch=arch, name="card1", simulated=False)
    assert answer.seen == f"/dev/kfd topology: {arch}, 1 visible of 1"


def test_sysfs_of_the_host_without_the_device_is_no_rocm(tmp_path):
    files = {name: text for name, text in kfd(90402).items() if name != "dev/kfd"}
    assert probes.rocm(machine(tmp_path, files)) == probes.Answer(None, "there is no /dev/kfd")


def test_a_gpu_whose_render_node_is_not_in_the_container_does_not_count(tmp_path):
    files = {name: text for name, text in kfd(90402, 110000).items() if name != "dev/dri/renderD128"}
    assert probes.rocm(machine(tmp_path, files)).device.arch == "gfx1100"


@pytest.mark.parametrize(
    ("environ", "arch"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, "gfx1100"),
        ({"ROCR_VISIBLE_DEVICES": "1,0"}, "gfx1100"),
        ({"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "1"}, "gfx942"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-b"}, "gfx1100"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "gfx1100"),
        ({"HIP_VISIBLE_DEVICES": ""}, None),
        ({"HIP_VISIBLE_DEVICES": "-1"}, None),
        ({"HIP_VISIBLE_DEVICES": "7,0"}, None),
        ({"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}, "gfx1100"),
    ],
)
def test_rocm_honours_what_is_visible(tmp_path, environ, arch):
    device = probes.rocm(machine(tmp_path, kfd(90402, 110000), environ)).device
    assert (device and device.arch) == arch


def test_the_topology_is_walked_in_numeric_order(tmp_path):
    targets = [90402] * 10 + [110000]
    assert probes.rocm(machine(tmp_path, kfd(*targets), {"HIP_VISIBLE_DEVICES": "10"})).device.arch == "gfx1100"


def render_node(vendor, device="0x0bd5"):
    card = "sys/class/drm/renderD128/device"
    return {f"{card}/vendor": f"{vendor}\n", f"{card}/device": device, "dev/dri/renderD128": ""}


def test_xpu_is_an_intel_render_node_and_the_level_zero_loader(tmp_path):
    asked = []
    answer = probes.xpu(machine(tmp_path, render_node("0x8086"), load=asked.append))
    assert answer.device == Device("xpu", name="Intel GPU 0x0bd5", simulated=False)
    assert asked == ["libze_loader.so.1"]


def test_an_intel_gpu_without_level_zero_or_another_vendors_gpu_is_no_xpu(tmp_path):
    without = probes.xpu(machine(tmp_path / "a", render_node("0x8086")))
    assert without.device is None
    assert "libze_loader.so.1 cannot be loaded" in without.seen
    assert probes.xpu(machine(tmp_path / "b", render_node("0x10de"), load=str)).device is None


def test_an_intel_gpu_that_is_not_open_to_the_container_is_no_xpu(tmp_path):
    files = render_node("0x8086")
    del files["dev/dri/renderD128"]
    assert probes.xpu(machine(tmp_path, files, load=str)).device is None


def pci(device, vendor="0x1ae0"):
    slot = "sys/bus/pci/devices/0000:00:05.0"
    return {f"{slot}/vendor": f"{vendor}\n", f"{slot}/device": f"{device}\n"}


@pytest.mark.parametrize(
    ("chip", "node", "arch"),
    [
        ("0x005e", "dev/accel0", "v4"),
        ("0x0063", "dev/vfio/0", "v5e"),
        ("0x0062", "dev/vfio/0", "v5p"),
        ("0x006f", "dev/vfio/1", "v6e"),
        ("0x0076", "dev/vfio/0", "7x"),
    ],
)
def test_tpu_is_a_chip_on_the_bus_and_a_device_node(tmp_path, chip, node, arch):
    answer = probes.tpu(machine(tmp_path, pci(chip) | {node: ""}))
    assert answer.device == Device("tpu", arch=arch, name=f"TPU {arch}", simulated=False)


def test_a_chip_without_node_a_node_without_chip_and_a_network_card_are_no_tpu(tmp_path):
    assert probes.tpu(machine(tmp_path / "a", pci("0x0063"))).device is None
    assert probes.tpu(machine(tmp_path / "b", {"dev/vfio/0": "", "dev/accel0": ""})).device is None
    assert probes.tpu(machine(tmp_path / "c", pci("0x0042") | {"dev/vfio/0": ""})).device is None
    assert probes.tpu(machine(tmp_path / "d", pci("0x0063", "0x8086") | {"dev/vfio/0": ""})).device is None


def test_the_vfio_control_node_alone_is_no_tpu(tmp_path):
    assert probes.tpu(machine(tmp_path, pci("0x0063") | {"dev/vfio/vfio": ""})).device is None


def test_cpu_always_answers(tmp_path):
    cpuinfo = {"proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 9004\n"}
    assert probes.cpu(machine(tmp_path / "a", cpuinfo)).device == Device("cpu", name="AMD EPYC 9004", simulated=False)
    assert probes.cpu(machine(tmp_path / "b")).device.name == "CPU"


class Library:
    """OpenVINO as a machine with some devices shows it."""

    def __init__(self, *devices):
        self.devices = devices

    def Core(self):
        return SimpleNamespace(
            available_devices=list(self.devices), get_property=lambda device, fact: f"{fact} of {device} "
        )


NO_OPENVINO = Missing(ReasonCode.IMPORT_FAILED, "OSError: no")


@pytest.mark.parametrize(
    ("library", "word", "name"),
    [
        (Library("CPU"), None, "FULL_DEVICE_NAME of CPU"),
        (Library("CPU", "GPU.0", "GPU.1"), "GPU", "FULL_DEVICE_NAME of GPU.0"),
        (Library("CPU"), "NPU", None),
        (NO_OPENVINO, None, None),
    ],
)
def test_openvino_is_real_where_its_library_sees_the_device_asked_for(fresh, monkeypatch, library, word, name):
    monkeypatch.setattr(libraries, "installed", lambda _: library if library is NO_OPENVINO else "2026.4.1")
    monkeypatch.setattr(libraries, "import_once", lambda _: library)
    if word:
        monkeypatch.setenv("HEEDFUL_OPENVINO_DEVICE", word)
    found = platforms.device_for("openvino")
    assert (found.platform, found.simulated, found.name) == ("openvino", name is None, name or "")
    assert str(found) == (f"openvino {word or 'CPU'}" if name else "openvino")
    told = platforms.observations()["openvino"]
    assert (name or (f"HEEDFUL_OPENVINO_DEVICE names {word}" if word else "OSError: no")) in told


@pytest.mark.parametrize(("text", "near"), [("gpu", "; did you mean 'GPU'?"), ("", ""), ("CUDA", "")])
def test_a_word_that_is_no_openvino_device_is_one_clear_error(fresh, monkeypatch, text, near):
    monkeypatch.setenv("HEEDFUL_OPENVINO_DEVICE", text)
    with pytest.raises(BadInputError) as caught:
        platforms.device_for("openvino")
    told = f"HEEDFUL_OPENVINO_DEVICE={text!r} is no device of OpenVINO; the devices are CPU, GPU, NPU"
    assert str(caught.value).startswith(told)
    assert near in str(caught.value)


def detected(monkeypatch, *answering):
    order = []

    def probe(platform):
        def answer(_machine):
            order.append(platform)
            device = Device(platform, name="real", simulated=False) if platform in answering else None
            return probes.Answer(device, f"saw {platform}")

        return answer

    monkeypatch.setattr(platforms, "PROBES", {platform: probe(platform) for platform in probes.PROBES})
    return order


@pytest.mark.parametrize(
    ("answering", "first"),
    [
        (("cuda", "rocm", "cpu"), "cuda"),
        (("rocm", "xpu", "cpu"), "rocm"),
        (("xpu", "tpu", "cpu"), "xpu"),
        (("tpu", "cpu"), "tpu"),
        (("cpu", "openvino"), "cpu"),
    ],
)
def test_the_first_platform_that_answers_is_detected_and_openvino_is_never_guessed(
    fresh, monkeypatch, answering, first
):
    order = detected(monkeypatch, *answering)
    assert platforms.detect().platform == first
    assert order == list(probes.PROBES)[: list(probes.PROBES).index(first) + 1]


def test_detection_runs_once_a_process(fresh, monkeypatch):
    order = detected(monkeypatch, "cpu")
    assert platforms.detect() is platforms.detect() is platforms.device_for("cpu")
    assert len(order) == 5


def test_the_environment_names_the_platform_and_an_argument_goes_before_it(fresh, monkeypatch):
    detected(monkeypatch, "cuda", "cpu")
    monkeypatch.setenv("HEEDFUL_PLATFORM", "cpu")
    assert platforms.detect() == platforms.device_for(None) == Device("cpu", name="real", simulated=False)
    assert platforms.device_for("cuda").platform == "cuda"
    monkeypatch.delenv("HEEDFUL_PLATFORM")
    assert platforms.detect().platform == "cuda"


def test_a_platform_that_does_not_answer_is_simulated_and_says_so(fresh, monkeypatch):
    detected(monkeypatch, "cpu")
    for platform in PLATFORMS:
        device = platforms.device_for(platform)
        assert (device.platform, device.simulated) == (platform, platform != "cpu")


@pytest.mark.parametrize(
    ("text", "near"), [("", ""), ("CUDA", "cuda"), ("cuda ", "cuda"), ("hip", ""), ("rcom", "rocm")]
)
def test_an_unknown_platform_is_one_clear_error(fresh, monkeypatch, text, near):
    hint = f"; did you mean '{near}'?" if near else ""
    told = f"{text!r} is no platform; the platforms are cuda, rocm, xpu, tpu, cpu, openvino{hint}"
    with pytest.raises(BadInputError) as caught:
        platforms.device_for(text)
    assert str(caught.value) == f"platform {told}"
    monkeypatch.setenv("HEEDFUL_PLATFORM", text)
    with pytest.raises(BadInputError) as caught:
        platforms.detect()
    assert str(caught.value) == f"HEEDFUL_PLATFORM={told}"


def test_what_each_probe_saw_is_kept(fresh, monkeypatch):
    detected(monkeypatch, "cpu")
    assert platforms.observations() == {platform: f"saw {platform}" for platform in PLATFORMS}


def test_detection_loads_no_torch_and_initialises_no_device():
    code = """
import ctypes, sys, json
calls, real = [], ctypes.CDLL
class Watched(real):
    def __getattr__(self, name):
        calls.append(name)
        return super().__getattr__(name)
ctypes.CDLL = Watched
from heedful import platforms
platforms.detect()
contexts = [name for name in calls if name.startswith(("cu", "hip", "ze"))]
print(json.dumps([contexts, sorted({"torch", "jax"} & set(sys.modules))]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], []]
