"""Options that several subcommands share, their shell completion, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

import typer

from heedful.errors import BadInputError
from heedful.types import DTYPES, KV_CACHE_DTYPES, PLATFORMS, AttentionType, Device

PROFILES = ("smoke", "ci", "full")
POLICIES = ("strict", "vllm-0.6.3")


def _starting_with(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def complete_backend(incomplete: str) -> list[str]:
    """Registered backend names."""
    from heedful import registry

    return _starting_with(registry.names(), incomplete.upper())


def complete_platform(incomplete: str) -> list[str]:
    """The six platforms."""
    return _starting_with(PLATFORMS, incomplete)


def complete_profile(incomplete: str) -> list[str]:
    """The three profiles."""
    return _starting_with(PROFILES, incomplete)


def complete_policy(incomplete: str) -> list[str]:
    """The two policies."""
    return _starting_with(POLICIES, incomplete)


def complete_dtype(incomplete: str) -> list[str]:
    """Model dtypes."""
    return _starting_with(DTYPES, incomplete)


def complete_kv_cache_dtype(incomplete: str) -> list[str]:
    """Cache dtypes."""
    return _starting_with(KV_CACHE_DTYPES, incomplete)


def complete_attn_type(incomplete: str) -> list[str]:
    """Attention types."""
    return _starting_with(AttentionType, incomplete)


Platform = Annotated[
    str | None,
    typer.Option(
        metavar="PLATFORM",
        help=f"One of {', '.join(PLATFORMS)}; default: HEEDFUL_PLATFORM, else detected.",
        autocompletion=complete_platform,
    ),
]
Capability = Annotated[
    str | None, typer.Option(metavar="X.Y", help="Simulate a CUDA device of this compute capability, such as 9.0.")
]
Arch = Annotated[
    str | None, typer.Option(metavar="NAME", help="Simulate a device of this architecture, such as gfx942.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the record as JSON.")]


def device_from(platform: str | None, capability: str | None = None, arch: str | None = None) -> Device:
    """The device that the options mean: simulated where a generation is given, else the platform's own."""
    from heedful import platforms

    if capability is None and arch is None:
        return platforms.device_for(platform)
    generation = None if capability is None else parse_capability(capability)
    return Device(platform or _implied_platform(generation, arch), capability=generation, arch=arch)


def _implied_platform(capability: tuple[int, int] | None, arch: str | None) -> str:
    if capability is not None and arch is None:
        return "cuda"
    if capability is None and arch is not None and arch.startswith("gfx"):
        return "rocm"
    raise BadInputError(f"--arch {arch} does not tell the platform; add --platform, one of {', '.join(PLATFORMS)}")


def parse_capability(text: str) -> tuple[int, int]:
    """``"9.0"`` -> (9, 0)."""
    found = re.fullmatch(r"(\d+)\.(\d+)", text)
    if found is None:
        raise BadInputError(f"--capability {text!r} is not a compute capability; write major.minor, such as 9.0")
    return int(found[1]), int(found[2])
