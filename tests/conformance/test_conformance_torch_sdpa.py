"""TORCH_SDPA through the suite: the file that a third party writes for its own backend, here for both its variants."""

import pytest
from torch_variant import TorchVariantBackend

from heedful.backends.torch_sdpa import TorchSdpaBackend
from heedful.conformance import parametrize_with_checks
from heedful.conformance.results import Outcome
from heedful.conformance.run import run_conformance

GOOD = {Outcome.PASS, Outcome.NOT_SUPPORTED}


@parametrize_with_checks("TORCH_SDPA", profile="smoke")
def test_conformance(heedful_cell):
    heedful_cell()


@parametrize_with_checks(TorchVariantBackend, profile="smoke")
def test_conformance_without_our_kernels(heedful_cell):
    heedful_cell()


@pytest.mark.parametrize("isa", ["naive", "portable", "avx2", "avx512", "avx512_bf16"])
def test_every_instruction_set_of_this_machine_conforms(isa, monkeypatch):
    kernels = pytest.importorskip("heedful.kernels.cpu", reason="the kernels were not built", exc_type=ImportError)
    if isa != "naive" and not kernels.isas().get(isa):
        pytest.skip(f"this machine or build lacks {isa}")
    monkeypatch.setenv("HEEDFUL_CPU_ISA", isa)
    results = list(run_conformance("TORCH_SDPA", profile="smoke"))
    assert len(results) > 300
    assert [str(result) for result in results if result.outcome not in GOOD] == []


def test_each_run_above_is_of_the_variant_it_says():
    pytest.importorskip("heedful.kernels.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
    assert TorchSdpaBackend.get_impl_cls()(1, 16, 1.0).kernels is not None
    assert TorchVariantBackend.get_impl_cls()(1, 16, 1.0).kernels is None
