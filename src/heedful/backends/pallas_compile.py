"""Compiles the Pallas kernel for a TPU that is not here, in the sizes of a server's layer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp

from heedful.backends.pallas_impl import LANES, pages_in_flight
from heedful.errors import BackendUnavailableError, UnsupportedError
from heedful.kernels.pallas.attention import Form, Rules, Tiles, attention
from heedful.kernels.pallas.targets import compiled, figures

if TYPE_CHECKING:
    from collections.abc import Mapping

    from heedful.backends.builds import Build

HEADS: Final = (32, 8)
TILES, SEQUENCES, PAGES, TABLE = 16, 8, 512, 64
"""The sizes of the step and of the cache: they set what is moved, not the code."""
DTYPES: Final = {"bf16": "bfloat16", "f32": "float32"}


def compile_build(build: Build) -> Mapping[str, float]:
    """Figures of one build. Raises UnsupportedError for what Mosaic or XLA refuses."""
    options: Mapping[str, Any] = build.options
    rules = options.get("rules") or {}
    form = _form(options, rules)
    try:
        made = compiled(build.arch, partial(attention, form), *_shapes(options, rules, form))
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as cause:
        if str(cause).startswith(("ABORTED", "UNAVAILABLE")):
            raise BackendUnavailableError(f"libtpu does not answer: {str(cause).strip().splitlines()[0]}") from cause
        raise UnsupportedError(f"the compiler refuses {build.id}: {str(cause).strip().splitlines()[0]}") from cause
    return figures(made)


def _form(options: Mapping[str, Any], rules: Mapping[str, Any]) -> Form:
    return Form(
        causal=options.get("causal", True),
        capped="soft_cap" in rules,
        fetch=pages_in_flight(options["page"]),
        lse=rules.get("lse", False),
    )


def _shapes(options: Mapping[str, Any], rules: Mapping[str, Any], form: Form) -> tuple[Any, ...]:
    heads, kv_heads = HEADS
    dtype, page = DTYPES[options["dtype"]], (PAGES, kv_heads, options["page"])
    size, size_v = (-(-x // LANES) * LANES for x in (options["size"], options.get("size_v", options["size"])))
    tables = SEQUENCES * max(TABLE, form.fetch)

    def of(*shape: int, dtype: str = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    whole = [of(count, dtype="int32") for count in (TILES, TILES, TILES, SEQUENCES, tables)]
    slopes = of(heads, dtype="float32") if rules.get("alibi") else None
    numbers = Rules(of(2, dtype="float32"), of(1, dtype="int32"), of(heads, dtype="float32"), slopes)
    query = of(TILES, options["queries"], heads, size)
    return Tiles(*whole), numbers, query, of(*page, size), of(*page, size_v)
