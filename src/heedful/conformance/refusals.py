"""The proof behind NOT_SUPPORTED: what CAPABILITIES exclude must raise UnsupportedError when it is tried."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from heedful.conformance.bench import Bench
from heedful.conformance.inputs import build
from heedful.errors import BackendUnavailableError, UnsupportedError
from heedful.reference import CACHE_FLOATS
from heedful.types import Device

if TYPE_CHECKING:
    from collections.abc import Mapping

    from heedful.backends.base import AttentionBackend
    from heedful.conformance.cases import Case


def prove_refusal(
    backend: type[AttentionBackend], case: Case, reason: Mapping[str, str] | None, *, with_lse: bool
) -> None:
    """Build the layer and run the step: construction or forward must refuse, in the words that CAPABILITIES predict.

    reason: the planned Reason's record. with_lse: the request itself is claimed, what is not is its LSE.
    """
    try:
        _attempt(backend, case, with_lse)
    except UnsupportedError as error:
        if reason is not None and not with_lse:
            _check_words(error, {reason["code"], *_predicted(backend, case)})
    except BackendUnavailableError:
        raise
    except Exception as error:
        raise AssertionError(
            f"refused, but with {type(error).__name__} ({error}); it must be UnsupportedError"
        ) from error
    else:
        excluded = reason["text"] if reason else "it"
        raise AssertionError(f"CAPABILITIES exclude this ({excluded}), but it was computed without a word")


def _attempt(backend: type[AttentionBackend], case: Case, with_lse: bool) -> None:
    storable = case.kv_cache_dtype in ("auto", "u8", *CACHE_FLOATS)
    bench = Bench(backend, case, build(case if storable else replace(case, kv_cache_dtype="auto")))
    bench.forward(output_lse=bench.empty_lse()) if with_lse else bench.forward()


def _check_words(error: UnsupportedError, predicted: set[str]) -> None:
    codes = [str(getattr(found, "code", "")) for found in error.reasons]
    if codes:
        told = f"CAPABILITIES predict {', '.join(sorted(predicted))}; the error names {', '.join(codes)}"
        assert predicted & set(codes), told


def _predicted(backend: type[AttentionBackend], case: Case) -> set[str]:
    """Every code that stands against the case: a layer refuses its window before it hears of the attention type."""
    platforms = dict.fromkeys(row.platform for row in backend.CAPABILITIES)
    reasons = (backend.unsupported_reasons(case.request(), Device(platform)) for platform in platforms)
    return {str(reason.code) for found in reasons for reason in found}
