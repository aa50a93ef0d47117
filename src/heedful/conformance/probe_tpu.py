"""What this machine can prove of a TPU, by jax: each function runs something and returns why it could not, else ""."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def adds_on_a_tpu() -> str:
    """Add on the first TPU that jax sees."""
    jax = _jax()
    if isinstance(jax, str):
        return jax
    try:
        chip = jax.devices("tpu")[0]
        total = float(jax.numpy.ones(4, device=chip).sum())
    except RuntimeError as error:
        return f"no TPU answers: {str(error).splitlines()[0]}"
    return "" if total == 4 else f"{chip} adds four ones to {total}"


def runs_in_the_interpreter() -> str:
    """Run a Pallas kernel as plain XLA on the host; a machine that has a TPU proves its kernels there."""
    if not adds_on_a_tpu():
        return "this machine has a TPU: the lane tpu.hardware proves its kernels"
    jax = _jax()
    if isinstance(jax, str):
        return jax
    try:
        total = float(_doubled(interpret=True)(jax.numpy.ones((8, 128))).sum())
    except Exception as error:  # whatever jax raises, the interpreter did not run
        return f"the Pallas interpreter of jax {jax.__version__} does not run: {_first_line(error)}"
    return "" if total == 2 * 8 * 128 else f"the Pallas interpreter doubles 1024 ones to {total}"


def compiles_for_a_tpu() -> str:
    """Compile a Pallas kernel for a TPU by libtpu."""
    jax = _jax()
    if isinstance(jax, str):
        return jax
    from heedful.kernels.pallas.targets import compiled, figures

    try:
        made = compiled("v5e", _doubled(interpret=False), jax.ShapeDtypeStruct((8, 128), "float32"))
        code = figures(made)["code_bytes"]
    except Exception as error:  # no libtpu, a wrong one, one that another process holds
        return f"libtpu compiles nothing here: {_first_line(error)}"
    return "" if code > 0 else "libtpu compiles a kernel to no code"


def _doubled(*, interpret: bool) -> Any:
    import jax
    from jax.experimental import pallas as pl

    def kernel(x: Any, y: Any) -> None:
        y[...] = x[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8, 128), "float32"), interpret=interpret)


def _jax() -> Any:
    """The module, or why there is none."""
    try:
        import_module("heedful.kernels.pallas")  # it settles the environment that jax reads
        return import_module("jax")
    except (ImportError, OSError, RuntimeError) as error:
        return f"jax cannot be imported: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
