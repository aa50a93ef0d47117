"""Checks of the numbers: outputs and LSEs against the reference, whatever the batch and however it is cut."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from heedful.conformance.bench import Bench, agree, merged
from heedful.conformance.cuts import chunks, cut, rows_of
from heedful.types import PAD_SLOT_ID

if TYPE_CHECKING:
    from heedful.backends.base import AttentionBackend
    from heedful.conformance.bench import Margins
    from heedful.conformance.cases import Case


def check_output_agrees_with_reference(backend: type[AttentionBackend], case: Case) -> Margins:
    """Every rule of the contract at once, on one batch."""
    bench = Bench(backend, case)
    return agree(bench.on_host.expected(), bench.forward())


def check_lse_agrees_with_reference(backend: type[AttentionBackend], case: Case) -> Margins:
    """Asking for the LSE may take another kernel, so the output is judged again beside it."""
    bench = Bench(backend, case)
    lse = bench.empty_lse()
    output = bench.forward(output_lse=lse)
    return agree(bench.on_host.expected(), output, lse)


def check_a_row_without_keys_is_zero(backend: type[AttentionBackend], case: Case) -> None:
    """Output exactly 0 where a sequence has no visible key: never NaN, never a mean of what lies in the cache."""
    bench = Bench(backend, case)
    rows = _rows_without_keys(bench)
    output = bench.forward(output=bench.empty_output()).cpu()[rows]
    assert bool((output == 0).all()), f"rows {rows.tolist()} see no key but hold {output[output != 0][:4].tolist()}"


def check_a_row_without_keys_has_the_lse_of_nothing(backend: type[AttentionBackend], case: Case) -> None:
    """LSE -inf, or the sink alone where there is one."""
    bench = Bench(backend, case)
    rows, lse = _rows_without_keys(bench), bench.empty_lse()
    bench.forward(output_lse=lse)
    sinks = bench.on_host.sinks
    right = torch.full((case.num_heads,), -torch.inf) if sinks is None else sinks
    found = lse.cpu()[rows]
    close = torch.isclose(found, right.expand_as(found), rtol=1e-6, atol=1e-6)
    assert bool(close.all()), (
        f"rows {rows.tolist()} see no key; their LSE is {found.tolist()}, right is {right.tolist()}"
    )


def _rows_without_keys(bench: Bench) -> torch.Tensor:
    rows = bench.on_host.expected().output.abs().sum((1, 2)) == 0
    found = rows[: bench.on_host.num_tokens].nonzero()[:, 0]
    assert len(found), f"case {bench.case.id} has no row without keys; it cannot be asked this"
    return found


def check_chunking_never_changes_the_result(backend: type[AttentionBackend], case: Case) -> Margins:
    """One prefill, chunks of three and token by token: one answer and the same bytes in the cache."""
    bench, found = Bench(backend, case), []
    expected, after = bench.on_host.expected(), bench.on_host.pages_after()
    for size in (len(bench.on_host.query), 3, 1):
        cache = bench.fill()
        output = bench.empty_output()
        for pieces in chunks(bench.on_host, size):
            step = Bench(backend, case, cut(bench.on_host, pieces))
            rows = rows_of(bench.on_host, pieces).to(output.device)
            output[rows] = step.forward(bench.impl, kv_cache=cache)
        found.append(agree(expected, output, what=f"in steps of {size} tokens"))
        _same_pages(bench.pages(cache), after, size)
    return merged(found)


def _same_pages(
    pages: tuple[torch.Tensor, torch.Tensor] | None, right: tuple[torch.Tensor, torch.Tensor] | None, size: int
) -> None:
    if pages is None or right is None:
        return
    for name, one, other in zip("KV", pages, right, strict=True):
        assert torch.equal(one.double(), other.double()), f"steps of {size} tokens leave other {name} in the cache"


def check_a_profiling_run_needs_no_cache(backend: type[AttentionBackend], case: Case) -> Margins:
    """An empty kv_cache: the same answer from key and value alone, every feature applied."""
    bench = Bench(backend, case)
    seqs, tokens = len(bench.batch.metadata.seq_lens), len(bench.batch.query)
    fields: dict[str, Any] = {
        "block_tables": torch.zeros(seqs, 0, dtype=torch.int32, device=bench.batch.query.device),
        "slot_mapping": torch.full((tokens,), PAD_SLOT_ID, device=bench.batch.query.device),
    }
    metadata = replace(bench.batch.metadata, **fields, step={})
    cache = torch.empty(0, dtype=bench.batch.query.dtype, device=bench.batch.query.device)
    output = bench.forward(kv_cache=cache, attn_metadata=metadata)
    return agree(replace(bench.on_host, pages=None).expected(), output)
