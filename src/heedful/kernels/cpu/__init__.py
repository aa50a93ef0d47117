"""heedful's CPU kernels: paged attention, cache writes, block copies and the merge of states in C++.

They are called through ctypes, which lets go of the GIL; ``merge_states`` takes tensors, the others plain addresses.

Importing this package loads the compiled library and raises ImportError where it was not built. It loads no torch.
``HEEDFUL_CPU_ISA`` names the instruction set to run (see ``isas``); by default the best that this machine has.
``HEEDFUL_CPU_LIBRARY`` names another build of the library to load, such as a sanitized one; a missing file is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from heedful.kernels.cpu.library import (
    Attention,
    Cache,
    Copy,
    Form,
    Merge,
    State,
    Write,
    attend,
    chosen_isa,
    copy_blocks,
    isas,
    merge,
    operands,
    step,
    write_cache,
)

if TYPE_CHECKING:
    from heedful.kernels.cpu.states import merge_states

__all__ = [
    "Attention",
    "Cache",
    "Copy",
    "Form",
    "Merge",
    "State",
    "Write",
    "attend",
    "chosen_isa",
    "copy_blocks",
    "isas",
    "merge",
    "merge_states",
    "operands",
    "step",
    "write_cache",
]


def __getattr__(name: str) -> Any:  # merge_states alone needs torch
    if name != "merge_states":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from heedful.kernels.cpu.states import merge_states

    return merge_states
