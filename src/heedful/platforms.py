"""Which device this process has: detected once, without initialising it; or simulated, for any other machine.

Detection asks cuda, rocm, xpu, tpu in this order and ends with cpu. ``openvino`` is a library on a cpu machine and is
never guessed. HEEDFUL_PLATFORM names the platform instead; one that does not answer here is simulated.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from heedful import environment
from heedful.errors import BadInputError, did_you_mean
from heedful.probes import PROBES, Answer, Machine
from heedful.types import PLATFORMS, Device

SIMULATED: Final = {
    "cuda": Device("cuda", capability=(9, 0)),
    "rocm": Device("rocm", arch="gfx942"),
    "xpu": Device("xpu"),
    "tpu": Device("tpu", arch="v5e"),
    "cpu": Device("cpu"),
    "openvino": Device("openvino"),
}
"""What stands in for a platform that does not answer on this machine."""


def detect() -> Device:
    """The device of this process: HEEDFUL_PLATFORM's, else the first platform that answers. Found once a process."""
    named = environment.platform()
    return _first() if named is None else _named(named, f"{environment.PLATFORM}=")


def device_for(platform: str | None = None) -> Device:
    """The platform's device on this machine, else a simulated one; without a platform the same as detect."""
    return detect() if platform is None else _named(platform, "platform ")


def observations() -> dict[str, str]:
    """What each platform's probe saw, in the order of detection; a report on why the device is the one it is."""
    return {platform: _answer(platform).seen for platform in PROBES}


def forget() -> None:
    """Detect anew at the next call; for tests that change what there is to see."""
    _first.cache_clear()
    _named.cache_clear()
    _answer.cache_clear()


@cache
def _answer(platform: str) -> Answer:
    return PROBES[platform](Machine())


@cache
def _first() -> Device:
    asked = (_answer(platform).device for platform in PROBES if platform != "openvino")
    return next(device for device in asked if device is not None)


@cache
def _named(platform: str, source: str) -> Device:
    if platform not in PLATFORMS:
        near = did_you_mean(platform, PLATFORMS)
        raise BadInputError(f"{source}{platform!r} is no platform; the platforms are {', '.join(PLATFORMS)}{near}")
    return _answer(platform).device or SIMULATED[platform]
