import json
import subprocess
import sys

import pytest

import heedful

PUBLIC = [
    "AttentionBackend",
    "AttentionImpl",
    "AttentionMetadata",
    "AttentionType",
    "Device",
    "ModelRunner",
    "Selection",
    "SelectionRequest",
    "explain",
    "forced_backend",
    "get_attn_backend",
    "reference_attention",
]


def in_new_process(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_importing_heedful_loads_the_package_itself_and_nothing_else():
    code = """
import sys, json
before = set(sys.modules)
import heedful
print(json.dumps(sorted(n for n in set(sys.modules) - before if n.partition('.')[0] not in sys.stdlib_module_names)))
"""
    assert in_new_process(code) == ["heedful"]


def test_the_public_names_are_these():
    assert heedful.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(heedful))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_loaded_on_first_use(name):
    assert getattr(heedful, name).__name__ == name


def test_a_name_that_is_not_there_is_told_with_those_that_are():
    with pytest.raises(AttributeError, match="no attribute 'get_backend'; it has AttentionBackend"):
        heedful.get_backend  # noqa: B018


def test_the_version_is_the_installed_one():
    from importlib.metadata import version

    assert heedful.__version__ == version("heedful")


def test_choosing_on_simulated_devices_loads_no_torch_and_no_backend_library():
    code = """
import sys, json
from heedful import Device, SelectionRequest, explain
from heedful.platforms import SIMULATED
for device in SIMULATED.values():
    explain(SelectionRequest(128), device)
    explain(SelectionRequest(128), device, policy="vllm-0.6.3")
libraries = {"torch", "triton", "numpy", "jax", "openvino", "flash_attn", "xformers", "flashinfer", "typer", "rich"}
print(json.dumps(sorted(libraries & set(sys.modules))))
"""
    assert in_new_process(code) == []
