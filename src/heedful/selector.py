"""Which backend serves a request, and why: a pure function of request, device, package facts, override and policy.

Everything that changes outside (environment variables, the context manager) is read before the decision and outside any
cache. A library is imported last, only for a candidate against which nothing else stands.
"""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from heedful import environment, libraries, platforms, registry, vllm_063
from heedful.backends.capabilities import row_reasons
from heedful.errors import BackendUnavailableError, BadInputError, HeedfulWarning, SelectionError, did_you_mean
from heedful.types import (
    Candidate,
    Device,
    Missing,
    Override,
    PackageFacts,
    Reason,
    ReasonCode,
    Selection,
    SelectionRequest,
    check_request,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from heedful.backends.base import AttentionBackend
    from heedful.backends.capabilities import Capability

STRICT: Final = "strict"
POLICIES: Final = (STRICT, vllm_063.POLICY)

PREFERENCE: Final[Mapping[str, tuple[str, ...]]] = {
    "cuda": ("FLASH_ATTN", "XFORMERS", "FLASHINFER", "TRITON_ATTN"),
    "rocm": ("ROCM_FLASH", "TRITON_ATTN"),
    "xpu": ("IPEX", "TRITON_ATTN"),
    "tpu": ("PALLAS",),
    "cpu": ("TORCH_SDPA",),
    "openvino": ("OPENVINO",),
}
"""The candidates of policy strict, best first. Third parties' backends are chosen by name only."""

_FLAGGED: Final = {"is_attention_free": "NO_ATTENTION", "is_blocksparse": "BLOCKSPARSE_FLASH_ATTN"}
_LOG = logging.getLogger("heedful")
_FORCED: ContextVar[str | None] = ContextVar("heedful_forced_backend", default=None)
_DECIDED: dict[Any, tuple[type[AttentionBackend], tuple[str, ...], Device]] = {}
_MOST_DECIDED: Final = 4096


def get_attn_backend(
    head_size: int,
    sliding_window: int | None,
    dtype: Any,
    kv_cache_dtype: str | None,
    block_size: int,
    is_attention_free: bool,
    is_blocksparse: bool = False,
) -> type[AttentionBackend]:
    """The backend class that serves the request on this process's device.

    dtype: a torch.dtype or its name. Raises SelectionError, with the record of every candidate's reasons, when none
    can; BadInputError for a request, override or policy that means nothing.
    """
    asked = (head_size, sliding_window, dtype, kv_cache_dtype, block_size, is_attention_free, is_blocksparse)
    device = platforms.detect()
    # the types stand in the key because 16 == 16.0 and 1 == True, which are not all legal; the device stands in it by
    # identity, which is quicker than its hash, and is kept with the answer so that no other one takes its id
    key = (asked, tuple(map(type, asked)), id(device), _FORCED.get(), environment.fingerprint())
    try:
        backend, cautions, _ = _DECIDED[key]
    except (KeyError, TypeError):
        backend, cautions = _decide_and_keep(key, asked, device)
    for caution in cautions:
        warnings.warn(caution, HeedfulWarning, stacklevel=2)
    return backend


def explain(
    request: SelectionRequest,
    device: Device | None = None,
    policy: str | None = None,
    override: str | None = None,
    packages: PackageFacts | None = None,
) -> Selection:
    """The decision with its whole record; ``backend`` is None when nothing can serve the request.

    device: None is this process's. policy: None is HEEDFUL_POLICY, else ``strict``. override: a backend's name; None
    asks the context manager, then the environment. packages: facts that go before the known ones, a library's version
    or a Missing. Where vLLM 0.6.3 raised, policy ``vllm-0.6.3`` raises as well.
    """
    here = platforms.detect() if device is None else device
    chosen_policy = _policy(policy)
    given = _override(override, chosen_policy)
    decision = decide(request, here, chosen_policy, given, packages or {})
    cautions = _cautions(chosen_policy, here if device is None else None)
    return replace(decision, warnings=(*cautions, *decision.warnings)) if cautions else decision


def decide(
    request: SelectionRequest,
    device: Device,
    policy: str = STRICT,
    override: Override | None = None,
    packages: PackageFacts | None = None,
) -> Selection:
    """The decision itself, blind to the environment: equal arguments give equal answers."""
    facts = _Facts(packages or {}, registry.package_facts(device), device.simulated)
    if policy == vllm_063.POLICY:
        return vllm_063.decide(request, device, override, facts.get)
    return _strict(request, device, override, facts)


def require(selection: Selection) -> Selection:
    """The selection itself if it chose a backend; raises SelectionError with every reason if it did not."""
    if selection.backend is None:
        raise SelectionError(_refusal(selection), selection)
    return selection


@contextmanager
def forced_backend(name: str) -> Iterator[None]:
    """Every selection inside, in this thread or task, is for this backend: validated, never replaced."""
    registry.check_name(name)
    token = _FORCED.set(name)
    try:
        yield
    finally:
        _FORCED.reset(token)


def forget() -> None:
    """Drop all kept decisions; for tests that change packages or devices under a running process."""
    _DECIDED.clear()


def _decide_and_keep(
    key: Any, asked: tuple[Any, ...], device: Device
) -> tuple[type[AttentionBackend], tuple[str, ...]]:
    selection = require(explain(SelectionRequest(*asked)))
    _LOG.info("%s", str(selection).splitlines()[0])
    backend = registry.load(str(selection.backend))
    if len(_DECIDED) >= _MOST_DECIDED:
        _DECIDED.clear()
    with suppress(TypeError):  # an argument that cannot be hashed is decided anew each time
        _DECIDED[key] = backend, selection.warnings, device
    return backend, selection.warnings


def _policy(given: str | None) -> str:
    told, policy = f"policy {given!r}", given
    if policy is None:
        policy = environment.read(environment.POLICY)
        told = f"{environment.POLICY}={policy!r}"
    if policy is None:
        return STRICT
    if policy not in POLICIES:
        near = did_you_mean(str(policy), POLICIES)
        raise BadInputError(f"{told} is no policy; the policies are {', '.join(POLICIES)}{near}")
    return policy


def _override(given: str | None, policy: str) -> Override | None:
    if given is not None:
        return Override(given, "argument")
    if (forced := _FORCED.get()) is not None:
        return Override(forced, "context")
    retired_counts = policy == vllm_063.POLICY
    for variable in (environment.BACKEND, environment.RETIRED_BACKEND)[: 1 + retired_counts]:
        if (named := environment.read(variable)) is not None:
            return Override(named, "environment", variable)
    return None


def _cautions(policy: str, detected: Device | None) -> Iterator[str]:
    """What the caller should know of the surroundings, beside the decision. detected: None where a device was given."""
    if policy == STRICT and environment.read(environment.RETIRED_BACKEND) is not None:
        yield (
            f"{environment.RETIRED_BACKEND} is set and has no effect under policy {STRICT}; "
            f"set {environment.BACKEND} instead, or {environment.POLICY}={vllm_063.POLICY}"
        )
    if detected is not None and detected.simulated and environment.platform() is not None:
        yield (
            f"{environment.PLATFORM}={detected.platform}: no such device answers on this machine, "
            "so the decision is for a simulated one with its libraries assumed"
        )


@dataclass(frozen=True)
class _Facts:
    """Package facts as one decision sees them: the caller's before the known ones."""

    given: PackageFacts
    known: PackageFacts
    assumed: bool

    def get(self, key: str) -> str | Missing | None:
        return self.given[key] if key in self.given else self.known.get(key)

    def told(self, needed: tuple[str, ...]) -> str:
        """``flashinfer 0.7.2 (assumed)``: what the record keeps of the libraries that a choice rests on."""
        return ", ".join(f"{name} {self.get(name)}{self._mark(name)}" for name in needed)

    def _mark(self, name: str) -> str:
        return (
            f" ({libraries.ASSUMED})"
            if self.assumed and name not in self.given and self.get(name) != libraries.ASSUMED
            else ""
        )


def _strict(request: SelectionRequest, device: Device, override: Override | None, facts: _Facts) -> Selection:
    check_request(request)
    flag = next((flag for flag in _FLAGGED if getattr(request, flag)), None)
    names, chosen_by = PREFERENCE[device.platform], "preference"
    if override is not None:
        registry.check_name(override.name, str(override))
        names, chosen_by = (override.name,), override.chosen_by
    elif flag is not None:
        names, chosen_by = (_FLAGGED[flag],), "argument"
    candidates: list[Candidate] = []
    winner: str | None = None
    for name in names:
        candidate = _examine(name, request, device, facts, _ahead(name, flag, winner))
        candidates.append(candidate)
        winner = winner or (None if candidate.reasons else name)
    return Selection(winner, chosen_by, tuple(candidates), request, device, STRICT)


def _ahead(name: str, flag: str | None, winner: str | None) -> Reason | None:
    """Why a candidate is out whatever it claims: the flag wants another backend, or a better one was found."""
    if flag is not None and name != _FLAGGED[flag]:
        text = f"{flag} asks for {_FLAGGED[flag]} and for no other backend"
        return Reason(ReasonCode.POLICY, text, name, _FLAGGED[flag], "drop the explicit choice or the flag")
    if winner is not None:
        return Reason(ReasonCode.POLICY, f"{winner} stands before it and serves the request", name, winner)
    return None


def _examine(name: str, request: SelectionRequest, device: Device, facts: _Facts, ahead: Reason | None) -> Candidate:
    try:
        backend = registry.load(name)
    except BackendUnavailableError as error:
        return Candidate(name, (Reason(ReasonCode.IMPORT_FAILED, str(error)),))
    reasons = [*([] if ahead is None else [ahead]), *backend.unsupported_reasons(request, device)]
    own_code = facts.get(f"heedful:{name}")
    if isinstance(own_code, Missing):
        hint = f"choose another backend; {name} can be judged on a simulated device"
        reasons.append(Reason(own_code.code, f"{name} is not built: {own_code.cause}", name, registry.BUILT, hint))
    return Candidate(name, tuple(reasons)) if reasons else _with_libraries(backend, request, device, facts)


def _with_libraries(
    backend: type[AttentionBackend], request: SelectionRequest, device: Device, facts: _Facts
) -> Candidate:
    """The first variant that takes the request and whose libraries are there; else what every variant lacks."""
    reasons: list[Reason] = []
    for variant, needed, note, against in _variants(backend, request, device):
        missing = against or _missing(backend.name, variant, needed, facts)
        if not missing:
            beside = "".join(f"; passed over: {reason.text}" for reason in reasons) + (f"; {note}" if note else "")
            return Candidate(backend.name, (), variant, facts.told(needed) + beside)
        reasons += missing
    return Candidate(backend.name, tuple(dict.fromkeys(reasons)))


def _variants(
    backend: type[AttentionBackend], request: SelectionRequest, device: Device
) -> Iterator[tuple[str, tuple[str, ...], str, list[Reason]]]:
    rows: list[Capability] = [row for row in backend.CAPABILITIES if row.platform == device.platform]
    judged = [(row, row_reasons(row, request, device)) for row in rows]
    if all(against for _, against in judged):  # a backend may judge by its own unsupported_reasons alone
        yield "", backend.LIBRARIES, "", []
        return
    for row, against in judged:
        yield row.variant, tuple(dict.fromkeys((*backend.LIBRARIES, *row.libraries))), row.note, against


def _missing(name: str, variant: str, needed: tuple[str, ...], facts: _Facts) -> list[Reason]:
    """The first library that is not there; what comes after it may fail for its want alone."""
    for library in needed:
        fact = facts.get(library)
        if isinstance(fact, Missing):
            text = f"{variant or name} needs {library}: {fact.cause}"
            return [
                Reason(
                    fact.code,
                    text,
                    library,
                    "an import that works",
                    libraries.how_to_get(library) or registry.install_hint(name),
                    variant,
                )
            ]
    return []


def _refusal(selection: Selection) -> str:
    where = f"on {selection.device} (policy {selection.policy})"
    first = f"no backend can serve the request {where}; every candidate's reasons follow, change one of them"
    if selection.chosen_by in ("context", "environment") or len(selection.candidates) == 1:
        name = selection.candidates[0].backend
        first = f"{name}, chosen by {selection.chosen_by}, cannot serve the request {where} and is never replaced"
    return "\n".join((first, *str(selection).splitlines()[1:]))
