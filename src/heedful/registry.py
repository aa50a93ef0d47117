"""Which backends there are: a name -> where its class lives and how to get what it needs. Imports none until asked.

Third parties register classes in the entry point group ``heedful.backends``; they are found on first need, never at
import, never shadow a backend of this package, and are chosen only by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from heedful import environment, libraries
from heedful.errors import BackendUnavailableError, BadInputError, did_you_mean
from heedful.types import Device, Missing, PackageFacts, ReasonCode

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from heedful.backends.base import AttentionBackend

GROUP: Final = "heedful.backends"
BUILT: Final = "built"


@dataclass(frozen=True)
class Entry:
    """One backend of this package: ``module:Class`` and how to install what it needs."""

    spec: str
    hint: str = ""


_HERE = "heedful.backends"
BUILT_IN: Final[Mapping[str, Entry]] = MappingProxyType(
    {
        "FLASH_ATTN": Entry(f"{_HERE}.flash_attn:FlashAttentionBackend", "pip install flash-attn"),
        "XFORMERS": Entry(f"{_HERE}.xformers:XFormersBackend", "pip install xformers"),
        "ROCM_FLASH": Entry(f"{_HERE}.rocm_flash:RocmFlashBackend", "pip install 'heedful[rocm]' amd-aiter"),
        "TORCH_SDPA": Entry(f"{_HERE}.torch_sdpa:TorchSdpaBackend", "pip install 'heedful[cpu]'"),
        "OPENVINO": Entry(f"{_HERE}.openvino:OpenVinoBackend", "pip install 'heedful[openvino]'"),
        "IPEX": Entry(f"{_HERE}.ipex:IpexBackend", "pip install intel-extension-for-pytorch==2.8.0 torch==2.8.0"),
        "FLASHINFER": Entry(f"{_HERE}.flashinfer:FlashInferBackend", "pip install flashinfer-python"),
        "PALLAS": Entry(f"{_HERE}.pallas:PallasBackend", "pip install 'heedful[tpu]'"),
        "NO_ATTENTION": Entry(f"{_HERE}.no_attention:NoAttentionBackend"),
        "BLOCKSPARSE_FLASH_ATTN": Entry(
            f"{_HERE}.blocksparse_flash_attn:BlocksparseFlashAttentionBackend", "pip install 'heedful[cuda]'"
        ),
        "TRITON_ATTN": Entry(f"{_HERE}.triton_attn:TritonAttentionBackend", "pip install triton"),
    }
)


def names() -> tuple[str, ...]:
    """Every registered backend: those of this package, then third parties' by name."""
    return (*BUILT_IN, *_plugins()) if environment.flag(environment.PLUGINS, default=True) else tuple(BUILT_IN)


def load(name: str) -> type[AttentionBackend]:
    """The class of a registered backend; loads no torch by itself.

    Raises BadInputError for an unknown name, BackendUnavailableError with the first cause for a broken plugin.
    """
    if name in BUILT_IN:
        return _class_at(BUILT_IN[name].spec)
    check_name(name)
    return _plugin(name)


def resolve(spec: str) -> type[AttentionBackend]:
    """The class behind a registered name or ``module:Class``."""
    return _class_at(spec) if ":" in spec else load(spec)


def check_name(name: str, given: str = "") -> None:
    """Raise BadInputError with all names and the nearest one, unless name is registered. given: how it was asked."""
    known = names()
    if name not in known:
        told = given or f"backend {name!r}"
        near = did_you_mean(str(name), known)
        raise BadInputError(f"{told} names no attention backend; the names are {', '.join(known)}{near}")


def install_hint(name: str) -> str:
    """How to get what a backend needs; empty where it needs nothing or a third party knows better."""
    return BUILT_IN[name].hint if name in BUILT_IN else ""


def package_facts(device: Device) -> PackageFacts:
    """Library -> version, or why it is missing; ``heedful:<NAME>`` is a backend's own code.

    Real facts come from importing the library, each on its first look-up. On a simulated device every library of the
    platform's pinned stack counts as present.
    """
    return _AssumedFacts(device.platform) if device.simulated else _RealFacts()


def forget() -> None:
    """Drop what was learnt of third parties' entry points; for tests that install one."""
    _plugins.cache_clear()
    _plugin.cache_clear()
    _class_at.cache_clear()


class _RealFacts(Mapping[str, "str | Missing"]):
    """Facts of this machine."""

    def __getitem__(self, key: str) -> str | Missing:
        name = key.removeprefix("heedful:")
        if name == key:
            return libraries.installed(key)
        if name not in names():
            raise KeyError(key)
        return _own_code(name)

    def __iter__(self) -> Iterator[str]:
        return iter((*libraries.LIBRARIES, *(f"heedful:{name}" for name in names())))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        # asked before every look-up; answering must not import the library
        return isinstance(key, str) and (not key.startswith("heedful:") or key.removeprefix("heedful:") in names())


class _AssumedFacts(_RealFacts):
    """Facts that a simulated device is taken to have."""

    def __init__(self, platform: str) -> None:
        self.platform = platform

    def __getitem__(self, key: str) -> str | Missing:
        return libraries.ASSUMED if key.startswith("heedful:") else libraries.pinned(key, self.platform)


def _own_code(name: str) -> str | Missing:
    not_built = getattr(load(name), "not_built", "")
    return Missing(ReasonCode.NOT_BUILT, not_built) if not_built else BUILT


@cache
def _plugins() -> Mapping[str, EntryPoint]:
    from importlib.metadata import entry_points

    found = tuple(entry_points(group=GROUP))
    counts = Counter(point.name for point in found)
    for point in found:
        others = [p for p in found if p.name == point.name and p is not point]
        if point.name in BUILT_IN:
            raise BadInputError(_clash(point, f"the built-in {BUILT_IN[point.name].spec}"))
        if counts[point.name] > 1:
            raise BadInputError(_clash(point, _origin(others[0])))
    return {point.name: point for point in sorted(found, key=lambda point: point.name)}


def _origin(point: EntryPoint) -> str:
    return f"{point.value} of {point.dist.name if point.dist else 'an unnamed distribution'}"


def _clash(point: EntryPoint, other: str) -> str:
    return (
        f"two backends claim the name {point.name!r}: {_origin(point)} and {other}; "
        f"uninstall one, or set {environment.PLUGINS}=off to use this package's own backends only"
    )


@cache
def _plugin(name: str) -> type[AttentionBackend]:
    point = _plugins()[name]
    backend = _class_at(point.value.partition("[")[0].strip())
    if backend.name != name:
        raise BackendUnavailableError(
            f"the entry point {name!r} leads to {_origin(point)}, which calls itself {backend.name!r}; "
            "give both the same name"
        )
    return backend


@cache
def _class_at(spec: str) -> type[AttentionBackend]:
    module_name, _, path = spec.partition(":")
    module = libraries.import_once(module_name)
    if isinstance(module, Missing):
        raise BackendUnavailableError(f"{spec} cannot be imported: {module.cause}")
    return _checked(spec, _attribute(module, path, spec))


def _attribute(found: Any, path: str, spec: str) -> Any:
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise BackendUnavailableError(f"{spec} cannot be found: {error}") from None
    return found


def _checked(spec: str, found: Any) -> type[AttentionBackend]:
    from heedful.backends.base import AttentionBackend

    if not (isinstance(found, type) and issubclass(found, AttentionBackend)):
        raise BackendUnavailableError(f"{spec} is {found!r}, not a subclass of heedful.AttentionBackend")
    if found.__abstractmethods__:
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise BackendUnavailableError(f"{spec} leaves members of AttentionBackend open: {missing}; define them")
    for member in ("name", "CAPABILITIES"):
        if not hasattr(found, member):
            raise BackendUnavailableError(f"{spec} has no {member}; every backend states its name and its CAPABILITIES")
    return found
