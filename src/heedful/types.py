"""Plain data shared by the whole house: devices, requests, reasons, decisions. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import cached_property
from typing import Any, Final

from heedful.errors import BadInputError, did_you_mean

PLATFORMS: Final = ("cuda", "rocm", "xpu", "tpu", "cpu", "openvino")
DTYPES: Final = ("float32", "bfloat16", "float16")
KV_CACHE_DTYPES: Final = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "u8")
PAD_SLOT_ID: Final = -1
ITEMSIZE: Final[Mapping[str, int]] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
TORCH_DTYPES: Final = frozenset(
    {*ITEMSIZE, "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "int8", "uint8"}
)
"""Names that are a dtype at all; which of them a backend computes in is its CAPABILITIES' to say."""


class AttentionType(StrEnum):
    """Which tokens attend to which: see DESIGN §3 for what metadata each kind reads."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class ReasonCode(StrEnum):
    """The closed list of words that say why a backend cannot serve a request."""

    PLATFORM = "PLATFORM"
    CAPABILITY = "CAPABILITY"
    DTYPE = "DTYPE"
    KV_CACHE_DTYPE = "KV_CACHE_DTYPE"
    HEAD_SIZE = "HEAD_SIZE"
    HEAD_SIZE_V = "HEAD_SIZE_V"
    HEADS = "HEADS"
    BLOCK_SIZE = "BLOCK_SIZE"
    WINDOW = "WINDOW"
    ATTN_TYPE = "ATTN_TYPE"
    ALIBI = "ALIBI"
    SOFT_CAP = "SOFT_CAP"
    SINKS = "SINKS"
    BLOCKSPARSE = "BLOCKSPARSE"
    ATTENTION_FREE = "ATTENTION_FREE"
    FEATURE_PAIR = "FEATURE_PAIR"
    NOT_INSTALLED = "NOT_INSTALLED"
    IMPORT_FAILED = "IMPORT_FAILED"
    NOT_BUILT = "NOT_BUILT"
    POLICY = "POLICY"


@dataclass(frozen=True)
class Device:
    """A real or simulated accelerator: ``Device("cuda", capability=(9, 0))``, ``Device("rocm", arch="gfx942")``.

    ``simulated`` is True for every device that was made by hand and False for what ``platforms.detect`` found.
    """

    platform: str
    capability: tuple[int, int] | None = None
    arch: str | None = None
    name: str = ""
    simulated: bool = True

    def __post_init__(self) -> None:
        if self.platform not in PLATFORMS:
            near = did_you_mean(str(self.platform), PLATFORMS)
            raise BadInputError(f"unknown platform {self.platform!r}; the platforms are {', '.join(PLATFORMS)}{near}")
        given = self.capability
        if given is not None and (len(given) != 2 or any(type(part) is not int for part in given)):
            raise BadInputError(f"a compute capability is (major, minor), such as (9, 0), not {given!r}")
        object.__setattr__(self, "capability", None if given is None else tuple(given))

    @property
    def generation(self) -> str | None:
        """The word by which capability data names it: ``"9.0"``, ``"gfx942"``, ``"v5e"``; None if unknown."""
        if self.capability is not None and (self.platform == "cuda" or self.arch is None):
            return ".".join(map(str, self.capability))
        # ROCm writes feature flags behind the target, as in gfx90a:sramecc+:xnack-
        return None if self.arch is None else self.arch.partition(":")[0]

    def __str__(self) -> str:
        return f"{self.platform} {self.generation}" if self.generation else self.platform


@dataclass(frozen=True)
class SelectionRequest:
    """What a layer needs of its backend. None means: not said, so nothing is checked for it.

    head_size, head_size_v: elements per head of Q and K, and of V where it differs. block_size: tokens per cache page.
    sliding_window: visible keys including the token itself, None is off. dtype: a name such as ``"bfloat16"``; a
    torch.dtype becomes its name. kv_cache_dtype None is ``"auto"``.
    """

    head_size: int
    sliding_window: int | None = None
    dtype: str = "bfloat16"
    kv_cache_dtype: str | None = "auto"
    block_size: int = 16
    is_attention_free: bool = False
    is_blocksparse: bool = False
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_size_v: int | None = None
    attn_type: str = "decoder"
    alibi: bool = False
    logits_soft_cap: float | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        if type(self.dtype).__module__ == "torch":  # a torch.dtype, recognised without loading torch
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))

    @cached_property
    def features(self) -> frozenset[str]:
        """The optional features asked for, in the words that capability data uses."""
        asked = {
            "window": self.sliding_window is not None,
            "alibi": self.alibi,
            "soft_cap": self.logits_soft_cap is not None,
            "sinks": self.sinks,
            "blocksparse": self.is_blocksparse,
        }
        return frozenset(name for name, on in asked.items() if on)

    def to_dict(self) -> dict[str, Any]:
        """Only what was said: defaults and None are left out, so that a record reads like the call."""
        said = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}
        return {name: v if isinstance(v, int | float | None) else str(v) for name, v in said.items()}


@dataclass(frozen=True)
class Reason:
    """One thing that stands in the way: the value asked, the values accepted, and what to change."""

    code: ReasonCode
    text: str
    asked: str = ""
    accepted: str = ""
    hint: str = ""
    variant: str = ""

    def to_dict(self) -> dict[str, str]:
        """The record kept in reports."""
        return {k: str(v) for k, v in asdict(self).items() if v}

    def __str__(self) -> str:
        return f"{self.code}: {self.text}" + (f" ({self.hint})" if self.hint else "")


@dataclass(frozen=True)
class Missing:
    """A package fact that is a failure: which code it counts as and the first cause, repeated on every query."""

    code: ReasonCode
    cause: str


PackageFacts = Mapping[str, str | Missing]
"""Library -> its version, or why it is missing. A backend's own kernels are the entry ``heedful:<NAME>``."""


@dataclass(frozen=True)
class Override:
    """An explicit choice: the name as given, who made it, and the variable that holds it, if one does."""

    name: str
    chosen_by: str
    variable: str = ""

    def __str__(self) -> str:
        return f"{self.variable}={self.name!r}" if self.variable else f"backend {self.name!r}"


@dataclass(frozen=True)
class Candidate:
    """One backend that was looked at: all its reasons, or none and the variant that would run.

    facts: the libraries that the choice rests on, the variants that were passed over and why, the variant's note.
    """

    backend: str
    reasons: tuple[Reason, ...] = ()
    variant: str = ""
    facts: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The record kept in reports."""
        return {
            "backend": self.backend,
            "variant": self.variant,
            "facts": self.facts,
            "reasons": [r.to_dict() for r in self.reasons],
        }


@dataclass(frozen=True)
class Selection:
    """A decision and its whole record: who chose, every candidate in order with all its reasons, policy and device.

    chosen_by: ``argument`` (a flag of the request, or explain's override), ``context`` (forced_backend),
    ``environment`` or ``preference``.
    backend is None when nothing can serve the request.
    """

    backend: str | None
    chosen_by: str
    candidates: tuple[Candidate, ...]
    request: SelectionRequest
    device: Device
    policy: str
    warnings: tuple[str, ...] = ()

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that won, with its variant."""
        return next((c for c in self.candidates if c.backend == self.backend), None)

    def to_dict(self) -> dict[str, Any]:
        """The record kept in reports; plain JSON values only."""
        return {
            "backend": self.backend,
            "chosen_by": self.chosen_by,
            "policy": self.policy,
            "device": str(self.device),
            "simulated": self.device.simulated,
            "request": self.request.to_dict(),
            "candidates": [c.to_dict() for c in self.candidates],
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        head = f"{self.backend or 'no backend'} on {self.device}, chosen by {self.chosen_by} (policy {self.policy})"
        return "\n".join((head, *(line for c in self.candidates for line in _lines(c, self.backend))))


def _lines(candidate: Candidate, chosen: str | None) -> list[str]:
    mark = "*" if candidate.backend == chosen else " "
    title = f"{mark} {candidate.backend:<24}{candidate.variant:<16}{candidate.facts}".rstrip()
    return [title, *(f"      {reason}" for reason in candidate.reasons)]


_KINDS: Final[Mapping[type, tuple[str, ...]]] = {
    int: ("head_size", "sliding_window", "block_size", "num_heads", "num_kv_heads", "head_size_v"),
    bool: ("is_attention_free", "is_blocksparse", "alibi", "sinks"),
    str: ("dtype", "kv_cache_dtype", "attn_type"),
    float: ("logits_soft_cap",),
}
_KIND_WORDS: Final = {int: "an int", bool: "True or False", str: "a str", float: "a number"}
_OPTIONAL: Final = frozenset(
    {"sliding_window", "kv_cache_dtype", "num_heads", "num_kv_heads", "head_size_v", "logits_soft_cap"}
)


def check_kinds(request: SelectionRequest) -> None:
    """Raise BadInputError for a field of a foreign type, such as a torch.dtype as kv_cache_dtype."""
    for kind, names in _KINDS.items():
        for name in names:
            value = getattr(request, name)
            if not _is_kind(value, kind) and not (value is None and name in _OPTIONAL):
                given = f"{name} {value!r} is of type {type(value).__name__}"
                hint = f": {', '.join(KV_CACHE_DTYPES)}" if name == "kv_cache_dtype" else ""
                raise BadInputError(f"{given}; give {_KIND_WORDS[kind]}{hint}")


def _is_kind(value: object, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def check_request(request: SelectionRequest) -> None:
    """Raise BadInputError for a request that no backend could ever serve because it means nothing."""
    check_kinds(request)
    for broken, message in (*_broken_sizes(request), *_broken_numbers(request), *_broken_words(request)):
        if broken:
            raise BadInputError(message)


def _broken_sizes(r: SelectionRequest) -> Iterator[tuple[bool, str]]:
    required = () if r.is_attention_free else ("head_size", "num_heads", "num_kv_heads", "block_size")
    for name in (*required, "head_size_v"):
        size = getattr(r, name)
        yield size is not None and size < 1, f"{name} {size} must be 1 or more"


def _broken_numbers(r: SelectionRequest) -> Iterator[tuple[bool, str]]:
    heads, kv_heads, cap, window = r.num_heads, r.num_kv_heads, r.logits_soft_cap, r.sliding_window
    yield window is not None and window < 1, f"sliding_window {window} shows no key; give 1 or more, or None for off"
    split = bool(heads and kv_heads and heads % kv_heads)
    yield split, f"num_heads {heads} is not a multiple of num_kv_heads {kv_heads}; each KV head serves the same number"
    yield cap is not None and not 0 < cap < float("inf"), f"logits_soft_cap {cap} must be positive and finite, or None"
    both = r.is_attention_free and r.is_blocksparse
    yield both, "is_attention_free and is_blocksparse exclude each other; a layer has no attention or a sparse one"


def _broken_words(r: SelectionRequest) -> Iterator[tuple[bool, str]]:
    legal = {"dtype": DTYPES, "kv_cache_dtype": KV_CACHE_DTYPES, "attn_type": tuple(map(str, AttentionType))}
    for name, words in legal.items():
        word, known = getattr(r, name), TORCH_DTYPES if name == "dtype" else words
        if word is not None and word not in known:
            yield True, f"unknown {name} {str(word)!r}; give one of {', '.join(words)}{did_you_mean(str(word), words)}"
