"""TORCH_SDPA through the suite: the file that a third party writes for its own backend, here for both its variants."""

import os
import subprocess
import sys

import pytest
from torch_variant import TorchVariantBackend

from heedful.backends.torch_sdpa import TorchSdpaBackend
from heedful.conformance import parametrize_with_checks


@parametrize_with_checks("TORCH_SDPA", profile="smoke")
def test_conformance(heedful_cell):
    heedful_cell()


@parametrize_with_checks(TorchVariantBackend, profile="smoke")
def test_conformance_without_our_kernels(heedful_cell):
    heedful_cell()


def conform(isa, *only):
    """The smoke profile in a process of its own: workers keep the environment that the first of them saw."""
    code = "import sys; from heedful.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "conform", "--backend", "TORCH_SDPA", "--profile", "smoke", *only]
    settings = os.environ | {"HEEDFUL_CPU_ISA": isa, "HEEDFUL_PLATFORM": "cpu"}
    return subprocess.run(command, env=settings, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("isa", ["naive", "portable", "avx2", "avx512"])  # test_conformance runs on the best
def test_the_other_instruction_sets_conform_too(isa):
    kernels = pytest.importorskip("heedful.kernels.cpu", exc_type=ImportError)
    if isa != "naive" and not kernels.isas().get(isa):
        pytest.skip(f"this machine or build lacks {isa}")
    done = conform(isa)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_instruction_set_reaches_the_workers():
    pytest.importorskip("heedful.kernels.cpu", exc_type=ImportError)
    done = conform("avx3", "--only", "cpu/TORCH_SDPA/output_agrees*f32-h4k2-d128*normal*")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "HEEDFUL_CPU_ISA='avx3' names no instruction set" in done.stdout


def test_each_run_above_is_of_the_variant_it_says():
    pytest.importorskip("heedful.kernels.cpu", exc_type=ImportError)
    assert TorchSdpaBackend.get_impl_cls()(1, 16, 1.0).kernels is not None
    assert TorchVariantBackend.get_impl_cls()(1, 16, 1.0).kernels is None
