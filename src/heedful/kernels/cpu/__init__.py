"""heedful's CPU kernels: paged attention and cache writes in C++, called through ctypes, which lets go of the GIL.

Importing this package loads the compiled library and raises ImportError where it was not built. It loads no torch.
``HEEDFUL_CPU_ISA`` names the instruction set to run (see ``isas``); by default the best that this machine has.
``HEEDFUL_CPU_LIBRARY`` names another build of the library to load, such as a sanitized one; a missing file is an error.
"""

from __future__ import annotations

from heedful.kernels.cpu.library import Attention, Form, Write, attend, chosen_isa, isas, operands, step, write_cache

__all__ = ["Attention", "Form", "Write", "attend", "chosen_isa", "isas", "operands", "step", "write_cache"]
