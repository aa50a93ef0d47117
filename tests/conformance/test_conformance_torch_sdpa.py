"""TORCH_SDPA through the suite: the file that a third party writes for its own backend."""

from heedful.conformance import parametrize_with_checks


@parametrize_with_checks("TORCH_SDPA", profile="smoke")
def test_conformance(heedful_cell):
    heedful_cell()
