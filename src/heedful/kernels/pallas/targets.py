"""TPU generations as targets of libtpu's ahead-of-time compiler, which needs no TPU; figures of what it made."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import jax
from jax.experimental import topologies

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TOPOLOGIES: Final[Mapping[str, str]] = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "7x": "tpu7x:2x2x1",
}
"""Device generation -> the smallest slice of it that libtpu knows by name."""


@lru_cache(maxsize=len(TOPOLOGIES))
def _chip(arch: str) -> Any:
    """One chip of that generation, as libtpu describes it."""
    return topologies.get_topology_desc(TOPOLOGIES[arch], "tpu").devices[0]


def compiled(arch: str, function: Callable[..., Any], *shapes: Any) -> Any:
    """The function compiled for a TPU of that generation. shapes: pytrees of jax.ShapeDtypeStruct.

    Raises what Mosaic or XLA raises for a kernel that they refuse.
    """
    chip = _chip(arch)
    where = jax.sharding.SingleDeviceSharding(chip)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes)
    target = jax.sharding.AbstractDevice(device_kind=chip.device_kind, num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=target)):
        lowered = jax.jit(function).lower(*placed)
    return lowered.compile()


def figures(executable: Any) -> dict[str, float]:
    """What the compiler tells of an executable: memory in bytes, and operations (a kernel's by its own estimate)."""
    memory, costs = executable.memory_analysis(), executable.cost_analysis() or {}
    told = {
        "code_bytes": memory.generated_code_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "flops": costs.get("flops"),
    }
    return {name: float(value) for name, value in told.items() if value is not None}
