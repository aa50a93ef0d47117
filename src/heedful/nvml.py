"""The few questions that detection has for NVIDIA's management library; it opens no CUDA context."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from heedful.errors import HeedfulError

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAME_BYTES = 96


class NvmlError(HeedfulError):
    """The library answered with a return code, or no GPU is visible to this process."""


@dataclass(frozen=True)
class Gpu:
    """One GPU; remark is what a person should know of how it was picked."""

    name: str
    capability: tuple[int, int]
    remark: str = ""


def first_visible(library: Any, visible: str | None) -> Gpu:
    """The GPU that CUDA would call device 0, by the rules of CUDA_VISIBLE_DEVICES; None is all."""
    with _session(library):
        count = ctypes.c_uint()
        _ask(library.nvmlDeviceGetCount_v2, ctypes.byref(count))
        handle = _pick(library, visible, count.value)
        found = _describe(library, handle)
        return Gpu(found.name, found.capability, _remark(library, visible, count.value))


@contextmanager
def _session(library: Any) -> Iterator[None]:
    _ask(library.nvmlInit_v2)
    try:
        yield
    finally:
        library.nvmlShutdown()


def _ask(function: Any, *arguments: Any) -> None:
    code = function(*arguments)
    if code:
        raise NvmlError(f"{function.__name__} answered {code}")


def _pick(library: Any, visible: str | None, count: int) -> ctypes.c_void_p:
    word = "0" if visible is None else visible.split(",")[0].strip()
    told = f"CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else "CUDA_VISIBLE_DEVICES is not set"
    if word.isdigit() and int(word) < count:
        return _by_index(library, int(word))
    if word.startswith("MIG-"):
        return _parent_of_slice(library, word)
    if word.startswith("GPU-"):
        for index in range(count):
            if _text(library.nvmlDeviceGetUUID, handle := _by_index(library, index)).startswith(word):
                return handle
    raise NvmlError(f"{count} GPUs, none of them visible: {told}")


def _by_index(library: Any, index: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _ask(library.nvmlDeviceGetHandleByIndex_v2, ctypes.c_uint(index), ctypes.byref(handle))
    return handle


def _parent_of_slice(library: Any, uuid: str) -> ctypes.c_void_p:
    part, whole = ctypes.c_void_p(), ctypes.c_void_p()
    _ask(library.nvmlDeviceGetHandleByUUID, uuid.encode(), ctypes.byref(part))
    _ask(library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, part, ctypes.byref(whole))
    return whole


def _describe(library: Any, handle: ctypes.c_void_p) -> Gpu:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _ask(library.nvmlDeviceGetCudaComputeCapability, handle, ctypes.byref(major), ctypes.byref(minor))
    return Gpu(_text(library.nvmlDeviceGetName, handle), (major.value, minor.value))


def _text(function: Any, handle: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_NAME_BYTES)
    _ask(function, handle, buffer, ctypes.c_uint(_NAME_BYTES))
    return buffer.value.decode(errors="replace")


def _remark(library: Any, visible: str | None, count: int) -> str:
    """NVML counts in bus order, CUDA by default the fastest first: with unlike GPUs an index may mean another one."""
    if visible is not None and not visible.split(",")[0].strip().isdigit():
        return ""
    kinds = {_describe(library, _by_index(library, index)).capability for index in range(count)}
    return "" if len(kinds) < 2 else "; the GPUs differ: set CUDA_DEVICE_ORDER=PCI_BUS_ID to be sure of the index"
