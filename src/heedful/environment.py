"""The environment variables that steer selection, read at every call and never inside a cache."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from heedful.errors import BadInputError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

BACKEND: Final = "HEEDFUL_ATTENTION_BACKEND"
POLICY: Final = "HEEDFUL_POLICY"
PLATFORM: Final = "HEEDFUL_PLATFORM"
PLUGINS: Final = "HEEDFUL_PLUGINS"
RETIRED_BACKEND: Final = "VLLM_ATTENTION_BACKEND"
OPENVINO_DEVICE: Final = "HEEDFUL_OPENVINO_DEVICE"
OPENVINO_DEVICES: Final = ("CPU", "GPU", "NPU")
"""The first is what counts where the variable is not set."""

_KEYS: Final = tuple(map(os.fsencode, (BACKEND, POLICY, PLUGINS, RETIRED_BACKEND)))
_PLATFORM_KEY: Final = os.fsencode(PLATFORM)
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


def fingerprint() -> object:
    """What the steering variables hold now, as a cache key; equal keys mean equal values.

    os.environ.get takes 0.8 us for an unset name, a cached decision has 5 us for everything: so CPython's own table
    behind os.environ is read where there is one.
    """
    table = getattr(os.environ, "_data", None)
    if table is None or os.name != "posix":
        return tuple(map(os.environ.get, (BACKEND, POLICY, PLUGINS, RETIRED_BACKEND)))
    get, (backend, policy, plugins, retired) = table.get, _KEYS
    return get(backend), get(policy), get(plugins), get(retired)


def platform() -> str | None:
    """HEEDFUL_PLATFORM as it stands now; as quick as fingerprint."""
    table = getattr(os.environ, "_data", None)
    if table is not None and os.name == "posix" and _PLATFORM_KEY not in table:
        return None
    return os.environ.get(PLATFORM)


def read(name: str) -> str | None:
    """A steering variable as it stands now; an empty text is a value, and an illegal one."""
    return os.environ.get(name)


def flag(name: str, default: bool) -> bool:
    """A yes-or-no variable: 1 true yes on, 0 false no off in any case; anything else is an error."""
    text = read(name)
    if text is None:
        return default
    word = text.casefold()
    if word not in _TRUE | _FALSE:
        raise BadInputError(f"{name}={text!r} is neither yes nor no; give 1, true, yes or on, or 0, false, no or off")
    return word in _TRUE


def openvino_device(environ: Mapping[str, str] = os.environ) -> str:
    """HEEDFUL_OPENVINO_DEVICE, CPU where it is not set; whether OpenVINO sees that device is not asked here."""
    word = environ.get(OPENVINO_DEVICE, OPENVINO_DEVICES[0])
    if word not in OPENVINO_DEVICES:
        near = did_you_mean(word, OPENVINO_DEVICES)
        known = ", ".join(OPENVINO_DEVICES)
        raise BadInputError(f"{OPENVINO_DEVICE}={word!r} is no device of OpenVINO; the devices are {known}{near}")
    return word
