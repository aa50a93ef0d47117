"""Kernels in JAX Pallas for TPUs: attention.py the kernel, naive.py the same to be read, targets.py its compilers.

Importing this package loads no jax, but settles what jax and libtpu read from the environment when they are loaded, on
a machine that has no TPU.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

from heedful.probes import Machine, tpu

if TYPE_CHECKING:
    from collections.abc import Mapping

WITHOUT_A_TPU: Final[Mapping[str, str]] = {
    "JAX_PLATFORMS": "cpu",  # else libtpu, where it is installed, looks for a TPU and tells stderr that there is none
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else one process at a time may compile
    "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks the network what machine it is on
    "TPU_LOG_DIR": "disabled",  # else libtpu writes files to /tmp
    # else libtpu complains that it does not know them; what is compiled for is always said (targets.py)
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
"""What is set where no TPU is on the PCI bus; what the user has set stands. jax reads the first as it is imported."""


def _settle() -> None:
    late = {"JAX_PLATFORMS"} if "jax" in sys.modules else set()
    if tpu(Machine()).device is None:
        for name in WITHOUT_A_TPU.keys() - late:
            os.environ.setdefault(name, WITHOUT_A_TPU[name])


_settle()
