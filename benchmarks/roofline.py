"""roofline.cpp, compiled for this machine when it is first asked for, and called through ctypes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("roofline.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-pthread", "-Wno-psabi")
ROUNDS = 200_000  # of twelve instructions: under a millisecond; many times that where threads must start first
READ = 64 << 20  # bytes that a measurement of reading goes over at least


class Roofline:
    """What reading, multiply-add and bf16 dot products reach on so many threads, measured when asked."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "roofline.so"
            subprocess.run([os.environ.get("CXX", "g++"), *FLAGS, str(SOURCE), "-o", str(path)], check=True)
            self._library = ctypes.CDLL(str(path))
        for name in ("read_rate", "fma_rate", "dot_rate", "tile_rate"):
            getattr(self._library, name).restype = ctypes.c_double
        self._library.read_rate.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int)
        for name in ("fma_rate", "dot_rate", "tile_rate"):
            getattr(self._library, name).argtypes = (ctypes.c_int, ctypes.c_int64)

    def measure(self, address: int, size: int) -> dict[str, float]:
        """GB/s of reading size bytes at address, as often as the smallest caches need; GFLOP/s of the arithmetic."""
        passes, rounds = max(1, READ // size), ROUNDS if self.threads == 1 else 20 * ROUNDS
        return {
            "read": self._library.read_rate(-(-address // 64) * 64, size - 64, self.threads, passes),
            "fma": self._library.fma_rate(self.threads, rounds),
            "dot": self._library.dot_rate(self.threads, rounds),
            "tile": self._library.tile_rate(self.threads, rounds // 4),
        }


def last_level_cache() -> int:
    """Bytes of the largest cache of core 0; 32 MB where the system does not tell."""
    found = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        found.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
    return max(found, default=32 << 20)
