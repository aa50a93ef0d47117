"""Policy ``vllm-0.6.3``: decision for decision what the selector of vLLM 0.6.3 answered, for engines that migrate.

The oddities are kept on purpose: explicit choices are replaced off CUDA and never checked on it, XFORMERS takes what
FLASH_ATTN refuses whether or not it can, block-sparse beats everything. The rules stand as data; ``decide`` walks them
in the release's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from heedful.errors import AssertedSelectionError, AttributeSelectionError, BadInputError, did_you_mean
from heedful.types import (
    Candidate,
    Device,
    Missing,
    Override,
    Reason,
    ReasonCode,
    Selection,
    SelectionRequest,
)

POLICY: Final = "vllm-0.6.3"

NAMES: Final = (
    "FLASH_ATTN",
    "XFORMERS",
    "ROCM_FLASH",
    "TORCH_SDPA",
    "OPENVINO",
    "FLASHINFER",
    "PALLAS",
    "IPEX",
    "NO_ATTENTION",
)
"""The names that the release knew; block-sparse is reached by its flag alone."""

ONLY_ANSWER: Final[Mapping[str, str]] = {
    "cpu": "TORCH_SDPA",
    "openvino": "OPENVINO",
    "xpu": "IPEX",
    "tpu": "PALLAS",
    "rocm": "ROCM_FLASH",
}
"""Platforms with one answer, whatever was asked for."""

REFUSED_ON_CUDA: Final[Mapping[str, str]] = {"TORCH_SDPA": "cpu", "IPEX": "xpu"}
"""Explicit choices that CUDA refuses, and the platform that each is for; all others pass unchecked."""

FLASH_DTYPES: Final = frozenset({"float16", "bfloat16"})
FLASH_HEAD_SIZES: Final = frozenset({32, 64, 96, 128, 160, 192, 224, 256})
FLASH_LIBRARY: Final = "flash_attn"
_DEFAULT, _FALLBACK = "FLASH_ATTN", "XFORMERS"

LookUp = Callable[[str], str | Missing | None]
_Rule = tuple[ReasonCode, Callable[[SelectionRequest, Device], bool], str]


def _is_fp8(request: SelectionRequest) -> bool:
    kv_cache_dtype: Any = request.kv_cache_dtype
    if kv_cache_dtype is None:
        return False
    if not isinstance(kv_cache_dtype, str):
        raise AttributeSelectionError(
            f"kv_cache_dtype {kv_cache_dtype!r} is of type {type(kv_cache_dtype).__name__}, which has no startswith; "
            "give a word such as 'auto' or 'fp8'"
        )
    return kv_cache_dtype.startswith("fp8")


FLASH_RULES: Final[tuple[_Rule, ...]] = (
    (
        ReasonCode.CAPABILITY,
        lambda _, device: device.capability is None or device.capability < (8, 0),
        "needs compute capability 8.0; an unknown one counts as less",
    ),
    (ReasonCode.DTYPE, lambda request, _: request.dtype not in FLASH_DTYPES, "takes float16 and bfloat16"),
    (ReasonCode.KV_CACHE_DTYPE, lambda request, _: _is_fp8(request), "has no fp8 cache; FLASHINFER by name has"),
    (ReasonCode.BLOCK_SIZE, lambda request, _: request.block_size % 16 != 0, "takes block sizes divisible by 16"),
    (ReasonCode.WINDOW, lambda request, _: request.sliding_window is not None, "takes no sliding_window, not even 0"),
    (
        ReasonCode.HEAD_SIZE,
        lambda request, _: request.head_size not in FLASH_HEAD_SIZES,
        f"takes head sizes {', '.join(map(str, sorted(FLASH_HEAD_SIZES)))}",
    ),
)
"""What stands against FLASH_ATTN on CUDA: (code, is broken, text). The first broken rule ended the release's search."""


def decide(request: SelectionRequest, device: Device, override: Override | None, look_up: LookUp) -> Selection:
    """The release's answer. look_up gives a library's fact and is asked last.

    Raises what the release raised, as an error that is also of the recorded class: ValueError for an unknown name,
    AssertionError for a refused one, AttributeError for a cache dtype that is no text.
    """
    if request.is_blocksparse:
        return _selection("BLOCKSPARSE_FLASH_ATTN", "argument", request, device)
    if request.is_attention_free:
        return _selection("NO_ATTENTION", "argument", request, device)
    wanted = _DEFAULT if override is None else _known(override)
    chosen_by = "preference" if override is None else override.chosen_by
    if device.platform in ONLY_ANSWER:
        return _only_answer(wanted, chosen_by, request, device)
    if wanted in REFUSED_ON_CUDA:
        raise _refused(wanted, chosen_by, request, device)
    if wanted != _DEFAULT:
        return _selection(wanted, chosen_by, request, device)
    return _flash_or_fallback(chosen_by, request, device, look_up)


def _known(override: Override) -> str:
    if override.name not in NAMES:
        near = did_you_mean(str(override.name), NAMES)
        raise BadInputError(
            f"{override} names no attention backend of policy {POLICY}; the names are {', '.join(NAMES)}{near}"
        )
    return override.name


def _only_answer(wanted: str, chosen_by: str, request: SelectionRequest, device: Device) -> Selection:
    answer = ONLY_ANSWER[device.platform]
    same = wanted == answer or (device.platform == "rocm" and wanted == _DEFAULT)
    text = f"{device.platform} has one answer, {answer}"
    passed = () if same else (Candidate(wanted, (Reason(ReasonCode.PLATFORM, text, wanted, answer),)),)
    replaced = wanted != answer and chosen_by != "preference"
    return _selection(answer, "preference" if wanted != answer else chosen_by, request, device, passed, replaced)


def _refused(wanted: str, chosen_by: str, request: SelectionRequest, device: Device) -> AssertedSelectionError:
    home = REFUSED_ON_CUDA[wanted]
    reason = Reason(ReasonCode.PLATFORM, f"{wanted} is for {home} only", device.platform, home)
    record = Selection(None, chosen_by, (Candidate(wanted, (reason,)),), request, device, POLICY)
    return AssertedSelectionError(
        f"{wanted}, chosen by {chosen_by}, is for {home} only, not for {device} (policy {POLICY}); choose another",
        record,
    )


def _flash_or_fallback(chosen_by: str, request: SelectionRequest, device: Device, look_up: LookUp) -> Selection:
    reasons = _against_flash(request, device, look_up)
    if not reasons:
        return _selection(_DEFAULT, chosen_by, request, device)
    replaced = chosen_by != "preference"
    return _selection(_FALLBACK, "preference", request, device, (Candidate(_DEFAULT, reasons),), replaced)


def _against_flash(request: SelectionRequest, device: Device, look_up: LookUp) -> tuple[Reason, ...]:
    """The first broken rule, as in the release; its library is looked up only when no rule is broken."""
    for name in ("head_size", "block_size"):
        if type(size := getattr(request, name)) is not int:
            raise BadInputError(f"{name} {size!r} is of type {type(size).__name__}; give an int")
    for code, is_broken, text in FLASH_RULES:
        if is_broken(request, device):
            return (Reason(code, f"{_DEFAULT} {text}"),)
    fact = look_up(FLASH_LIBRARY)
    if isinstance(fact, Missing):
        return (Reason(fact.code, f"{_DEFAULT} needs {FLASH_LIBRARY}: {fact.cause}", hint="pip install flash-attn"),)
    return ()


def _selection(
    answer: str,
    chosen_by: str,
    request: SelectionRequest,
    device: Device,
    passed_over: tuple[Candidate, ...] = (),
    replaced: bool = False,
) -> Selection:
    candidates = (*passed_over, Candidate(answer))
    return Selection(answer, chosen_by, candidates, request, device, POLICY, _warnings(answer, request, replaced))


def _warnings(answer: str, request: SelectionRequest, replaced: bool) -> tuple[str, ...]:
    unseen = sorted({"alibi", "soft_cap", "sinks"} & request.features)
    unseen += [name for name in ("head_size_v",) if getattr(request, name) is not None]
    unseen += ["attn_type"] if request.attn_type != "decoder" else []
    told = (
        f"the explicit choice was replaced by {answer}, as vLLM 0.6.3 did" if replaced else "",
        f"policy {POLICY} does not look at {', '.join(unseen)}: {answer} may not support it" if unseen else "",
    )
    return tuple(filter(None, told))
