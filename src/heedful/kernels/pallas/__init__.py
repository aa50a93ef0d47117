"""Kernels in JAX Pallas for TPUs, and how they are compiled for one that is not here (targets.py).

Importing this package loads no jax. ``import_jax`` does, and is the way in: it settles first what jax and libtpu read
from the environment when they are loaded, on a machine that has no TPU.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

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
"""What is set where no TPU is on the PCI bus and jax was not imported yet; what the user has set stands."""


def import_jax() -> Any:
    """The module jax. Raises ImportError where it is not installed."""
    from heedful.probes import Machine, tpu

    if "jax" not in sys.modules and tpu(Machine()).device is None:
        for name, value in WITHOUT_A_TPU.items():
            os.environ.setdefault(name, value)
    import jax

    return jax
