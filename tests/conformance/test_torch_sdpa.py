"""TORCH_SDPA through the suite: the file that a third party writes for its own backend, here for both its variants."""

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


def test_each_run_above_is_of_the_variant_it_says():
    pytest.importorskip("heedful.kernels.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
    assert TorchSdpaBackend.get_impl_cls()(1, 16, 1.0).kernels is not None
    assert TorchVariantBackend.get_impl_cls()(1, 16, 1.0).kernels is None
