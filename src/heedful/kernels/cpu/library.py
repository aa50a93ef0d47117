"""The C interface of heedful_cpu.h, as ctypes structures and functions. Pointers are addresses; strides in elements."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from struct import Struct
from typing import Final

from heedful.errors import BadInputError, did_you_mean

_POINTER, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float

DTYPE_CODES: Final = {"float32": 0, "bfloat16": 1, "float16": 2, "float8_e4m3fn": 3, "float8_e5m2": 4}
NAIVE: Final = "naive"
_FAILURES: Final = {1: "this machine lacks the instruction set {isa!r}", 2: "no memory for scratch space"}


class Attention(ctypes.Structure):
    """struct heedful_attention: one call of paged varlen attention."""

    _fields_ = (
        ("query", _POINTER),
        ("q_token", _I64),
        ("q_head", _I64),
        ("key", _POINTER),
        ("k_block", _I64),
        ("k_head", _I64),
        ("k_token", _I64),
        ("value", _POINTER),
        ("v_block", _I64),
        ("v_head", _I64),
        ("v_token", _I64),
        ("output", _POINTER),
        ("o_token", _I64),
        ("o_head", _I64),
        ("lse", _POINTER),
        ("lse_token", _I64),
        ("lse_head", _I64),
        ("query_start", _POINTER),
        ("kv_lens", _POINTER),
        ("block_tables", _POINTER),
        ("table_stride", _I64),
        ("key_start", _POINTER),
        ("alibi_slopes", _POINTER),
        ("sinks", _POINTER),
        ("num_seqs", _I32),
        ("num_heads", _I32),
        ("num_kv_heads", _I32),
        ("head_size", _I32),
        ("head_size_v", _I32),
        ("block_size", _I32),
        ("dtype", _I32),
        ("cache_dtype", _I32),
        ("causal", _I32),
        ("window", _I32),
        ("scale", _F32),
        ("soft_cap", _F32),
        ("k_scale", _F32),
        ("v_scale", _F32),
        ("threads", _I32),
    )


class Write(ctypes.Structure):
    """struct heedful_write: one step's keys or values into their slots."""

    _fields_ = (
        ("source", _POINTER),
        ("s_token", _I64),
        ("s_head", _I64),
        ("cache", _POINTER),
        ("c_block", _I64),
        ("c_head", _I64),
        ("c_token", _I64),
        ("slots", _POINTER),
        ("tokens", _I64),
        ("heads", _I32),
        ("size", _I32),
        ("block_size", _I32),
        ("dtype", _I32),
        ("cache_dtype", _I32),
        ("scale", _F32),
    )


class Form(ctypes.Structure):
    """struct heedful_form: a layer's step without the addresses, scales and threads of a call."""

    _fields_ = (("attention", Attention), ("key", Write), ("value", Write))


operands: Final = Struct("9P3fi").pack
"""struct heedful_operands as bytes: query, key, value, key_cache, value_cache, output, lse, alibi_slopes, sinks; scale,
k_scale, v_scale; threads. 0 is a null pointer."""


class Cache(ctypes.Structure):
    """struct heedful_cache: one layer's keys, values or both; five dimensions, the block first."""

    _fields_ = (
        ("source", _POINTER),
        ("target", _POINTER),
        ("source_strides", _I64 * 5),
        ("target_strides", _I64 * 5),
        ("shape", _I64 * 5),
        ("item", _I64),
    )


class Copy(ctypes.Structure):
    """struct heedful_copy: whole blocks of several caches, the same pairs in each. caches: the address of an array."""

    _fields_ = (
        ("caches", _POINTER),
        ("pairs", _POINTER),
        ("num_caches", _I64),
        ("num_pairs", _I64),
        ("threads", _I32),
    )


class State(ctypes.Structure):
    """struct heedful_state: the output and LSE of attention over some of the keys."""

    _fields_ = (
        ("output", _POINTER),
        ("o_token", _I64),
        ("o_head", _I64),
        ("lse", _POINTER),
        ("lse_token", _I64),
        ("lse_head", _I64),
    )


class Merge(ctypes.Structure):
    """struct heedful_merge: the states of several parts become that of the whole. parts: the address of an array."""

    _fields_ = (
        ("parts", _POINTER),
        ("whole", State),
        ("tokens", _I64),
        ("num_parts", _I32),
        ("num_heads", _I32),
        ("head_size", _I32),
        ("dtype", _I32),
        ("threads", _I32),
    )


def _load() -> ctypes.CDLL:
    path = _path()
    try:
        return _declared(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as cause:  # no library at all, or one that lacks a function
        raise ImportError(
            f"{path} is no library of this release ({cause}); build it again from these sources"
        ) from cause


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.heedful_attend.argtypes = (ctypes.POINTER(Attention), ctypes.c_char_p)
    library.heedful_write_cache.argtypes = (ctypes.POINTER(Write), ctypes.c_char_p)
    library.heedful_step.argtypes = (ctypes.POINTER(Form), ctypes.c_char_p, ctypes.c_char_p)
    library.heedful_copy_blocks.argtypes = (ctypes.POINTER(Copy), ctypes.c_char_p)
    library.heedful_merge_states.argtypes = (ctypes.POINTER(Merge), ctypes.c_char_p)
    library.heedful_isas.restype = ctypes.c_char_p
    return library


def _path() -> Path:
    """HEEDFUL_CPU_LIBRARY, else beside this file in a wheel, else where the installer put it in an editable install."""
    asked = os.environ.get("HEEDFUL_CPU_LIBRARY")
    if asked is not None:
        if not Path(asked).is_file():
            raise ImportError(f"HEEDFUL_CPU_LIBRARY={asked!r} names no file; name a built library or unset it")
        return Path(asked)
    name = "libheedful_cpu.so"
    places = [Path(__file__).with_name(name)]
    with suppress(metadata.PackageNotFoundError):
        places.append(Path(str(metadata.distribution("heedful").locate_file(f"heedful/kernels/cpu/{name}"))))
    for place in places:
        if place.is_file():
            return place
    raise ImportError(
        f"{name} was not built: heedful was installed where no C++ compiler was found; "
        "install one (g++ 12 or newer) and install heedful again"
    )


_LIBRARY: Final = _load()


@lru_cache(maxsize=1)
def isas() -> dict[str, bool]:
    """The instruction sets compiled in, best first, and whether this machine has each."""
    words = _LIBRARY.heedful_isas().decode().split()
    return {name: here == "1" for name, _, here in (word.partition(":") for word in words)}


def chosen_isa() -> str:
    """The instruction set that runs: HEEDFUL_CPU_ISA, else the best of this machine. ``naive`` is the plain loops."""
    return _checked(_asked())


def _asked() -> str | None:
    """HEEDFUL_CPU_ISA as it is now. os.environ says None by way of two exceptions, 2 µs in every call of a kernel."""
    try:
        found: bytes | None = os.environ._data.get(b"HEEDFUL_CPU_ISA")  # type: ignore[attr-defined]
    except AttributeError:  # another object took its place
        return os.environ.get("HEEDFUL_CPU_ISA")
    return None if found is None else os.fsdecode(found)


@lru_cache(maxsize=16)
def _checked(asked: str | None) -> str:
    if asked is None:
        return next(name for name, here in isas().items() if here)
    known = [*isas(), NAIVE]
    if asked not in known:
        hint = did_you_mean(asked, known)
        raise BadInputError(f"HEEDFUL_CPU_ISA={asked!r} names no instruction set; one of {', '.join(known)}{hint}")
    if asked != NAIVE and not isas()[asked]:
        here = ", ".join(name for name, there in isas().items() if there)
        raise BadInputError(f"HEEDFUL_CPU_ISA={asked!r}, but this machine lacks it; it has {here}")
    return asked


def attend(call: Attention) -> None:
    """Run one call. Every pointer, table entry and length must have been checked: C does not look again."""
    _run(_LIBRARY.heedful_attend, call)


def write_cache(call: Write) -> None:
    """Write rows into their slots: stored = round_even(clamp(x / scale)) where the cache is fp8, else as they are."""
    _run(_LIBRARY.heedful_write_cache, call)


def step(form: Form, operands: bytes) -> None:
    """Write, then attend, in one call: what a form leaves out is in the operands. As for ``attend``, all is checked."""
    isa = chosen_isa()
    _judge(_LIBRARY.heedful_step(form, operands, isa.encode()), isa)


def copy_blocks(call: Copy) -> None:
    """Copy whole blocks, bit for bit. Every block must have been checked, and that nothing written is read as well."""
    _run(_LIBRARY.heedful_copy_blocks, call)


def merge(call: Merge) -> None:
    """Join states. ``heedful.kernels.cpu.merge_states`` is the same for tensors, checked."""
    _run(_LIBRARY.heedful_merge_states, call)


def _run(function: object, call: Attention | Write | Copy | Merge) -> None:
    isa = chosen_isa()
    _judge(function(ctypes.byref(call), isa.encode()), isa)  # type: ignore[operator]


def _judge(status: int, isa: str) -> None:
    if status:
        raise MemoryError(_FAILURES.get(status, f"status {status}").format(isa=isa))
