"""Checks of refusals: what means nothing, does not fit or is not claimed is one clear error, and changes no cache."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from heedful.conformance.bench import Bench, device, must_refuse, same_bits
from heedful.errors import HeedfulError, MetadataError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from heedful.backends.base import AttentionBackend
    from heedful.conformance.cases import Case

NAN, INF = float("nan"), float("inf")


def check_an_unknown_argument_is_refused(backend: type[AttentionBackend], case: Case) -> None:
    """A misspelt feature must not be left out in silence, neither of a layer nor of a call."""
    bench = Bench(backend, case)
    kinds = (TypeError, HeedfulError)
    must_refuse(lambda: bench.layer(sliding_windows=7), "a layer with sliding_windows=7", *kinds)
    must_refuse(lambda: bench.forward(soft_cap=2.0), "forward with soft_cap=2.0", *kinds)


MEANINGLESS: tuple[Mapping[str, Any], ...] = (
    {"sliding_window": 0},
    {"sliding_window": -1},
    {"num_heads": 5},
    {"num_heads": 0},
    {"num_kv_heads": 0},
    {"head_size": 0},
    {"head_size_v": 0},
    {"logits_soft_cap": 0.0},
    {"logits_soft_cap": NAN},
    {"scale": NAN},
    {"scale": INF},
    {"kv_cache_dtype": "fp9"},
)


def check_a_layer_that_means_nothing_is_refused(backend: type[AttentionBackend], case: Case) -> None:
    """Windows that show no key, heads that do not divide, caps and scales that are no positive finite number."""
    bench = Bench(backend, case)
    for change in MEANINGLESS:
        must_refuse(partial(bench.layer, **change), f"a layer with {_told(change)}", HeedfulError)


def _told(change: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in change.items())


def check_blocksparse_is_refused_unless_claimed(backend: type[AttentionBackend], case: Case) -> None:
    """blocksparse_params for a dense backend must not be computed densely."""
    bench = Bench(backend, case)
    if any("blocksparse" in row.features for row in backend.CAPABILITIES):
        return
    params = {"local_blocks": 2, "vert_stride": 4, "block_size": 16, "homo_head": True}

    def attend() -> None:
        bench.forward(bench.layer(blocksparse_params=params))

    must_refuse(attend, "a layer with blocksparse_params", UnsupportedError)


def check_per_head_numbers_must_fit_the_heads(backend: type[AttentionBackend], case: Case) -> None:
    """Slopes or sinks for fewer or more heads than there are."""
    bench = Bench(backend, case)
    name, right = ("alibi_slopes", bench.batch.alibi_slopes) if case.alibi else ("sinks", bench.batch.sinks)
    assert right is not None
    for wrong in (right[:1], right[:-1], torch.cat([right, right]), right[None]):
        what = f"{name} of shape {list(wrong.shape)} for {case.num_heads} heads"
        must_refuse(partial(bench.layer, **{name: wrong}), what, HeedfulError)


def check_a_bad_cache_scale_is_refused(backend: type[AttentionBackend], case: Case) -> None:
    """A scale is one positive finite number, and 1 where the cache is not fp8; nothing is written before the error."""
    bench = Bench(backend, case)
    bad: list[Any] = [NAN, INF, 0.0, -1.0, torch.ones(2, device=device()), torch.tensor(NAN, device=device())]
    if case.kv_cache_dtype in ("auto", "u8"):
        bad.append(0.5)
    for scale in bad:
        for name in ("k_scale", "v_scale"):
            _refused_call(bench, {name: scale}, f"forward with {name}={scale!r}", HeedfulError)


def _refused_call(bench: Bench, changes: Mapping[str, Any], what: str, *kinds: type[Exception]) -> None:
    """The call must raise one of ``kinds``, and the cache must be as it was."""
    before = bench.pages() if bench.batch.pages is not None else None
    must_refuse(lambda: bench.forward(**changes), what, *kinds)
    after = bench.pages() if bench.batch.pages is not None else None
    if before is not None and after is not None:
        assert all(map(same_bits, before, after)), f"{what} was refused, but only after the cache had changed"


def check_tensors_that_do_not_fit_are_refused(backend: type[AttentionBackend], case: Case) -> None:
    """Wrong head sizes, head counts, row counts and dtypes."""
    bench = Bench(backend, case)
    given = bench.arguments()
    query, key, value = (given[name] for name in ("query", "key", "value"))
    other = torch.float32 if key.dtype != torch.float32 else torch.bfloat16
    wrong: dict[str, Mapping[str, Any]] = {
        "a query of another head size": {"query": query[..., :-8]},
        "a query of twice the head size": {"query": torch.cat([query, query], -1)},
        "a query of fewer heads": {"query": query[:, :-1]},
        "a query of twice the heads": {"query": torch.cat([query, query], 1)},
        "a query of fewer rows": {"query": query[:-1]},
        "a key in another dtype": {"key": key.to(other)},
        "a value of fewer rows": {"value": value[:-1]},
        "a key of more heads": {"key": torch.cat([key, key], 1)},
        "a key without a value": {"value": None},
        "an output of another dtype": {"output": bench.empty_output().to(other)},
        "an output of fewer rows": {"output": bench.empty_output()[:-1]},
    }
    for what, changes in wrong.items():
        _refused_call(bench, changes, what, HeedfulError)


def check_a_block_outside_the_cache_is_refused(backend: type[AttentionBackend], case: Case) -> None:
    """A table entry that a sequence needs points past the cache, or before it."""
    bench = Bench(backend, case)
    name = "cross_block_tables" if case.attn_type == "encoder_decoder" else "block_tables"
    pages = bench.batch.pages
    assert pages is not None
    for block in (len(pages[0]), -1, 2**31 - 1):
        tables = getattr(bench.batch.metadata, name).clone()
        tables[0, 0] = block
        _refused_step(bench, f"{name}[0][0] = {block} in a cache of {len(pages[0])} blocks", **{name: tables})


def _refused_step(bench: Bench, what: str, **fields: Any) -> None:
    metadata = replace(bench.batch.metadata, **fields, step={})
    _refused_call(bench, {"attn_metadata": metadata}, f"a step with {what}", MetadataError)


def check_a_block_named_twice_is_refused(backend: type[AttentionBackend], case: Case) -> None:
    """One block in two places of a sequence's table: its tokens would be read twice."""
    bench = Bench(backend, case)
    m = bench.batch.metadata
    long = int(m.seq_lens.argmax())
    tables = m.block_tables.clone()
    tables[long, 1] = tables[long, 0]
    _refused_step(bench, f"block {int(tables[long, 0])} twice in sequence {long}", block_tables=tables)


def check_a_slot_outside_the_cache_is_refused(backend: type[AttentionBackend], case: Case) -> None:
    """A token's slot lies past the last block."""
    bench = Bench(backend, case)
    pages = bench.batch.pages
    assert pages is not None
    past = len(pages[0]) * case.block_size
    for slot in (past, past + 3, 2**40):
        slots = bench.batch.metadata.slot_mapping.clone()
        slots[-1] = slot
        _refused_step(bench, f"slot {slot} in a cache of {past} slots", slot_mapping=slots)


def check_a_slot_written_twice_is_refused(backend: type[AttentionBackend], case: Case) -> None:
    """Two tokens for one slot: which one wins would be chance."""
    bench = Bench(backend, case)
    slots = bench.batch.metadata.slot_mapping.clone()
    slots[-1] = slots[0]
    _refused_step(bench, f"slot {int(slots[0])} written twice", slot_mapping=slots)


def check_lengths_that_disagree_are_refused(backend: type[AttentionBackend], case: Case) -> None:
    """seq_len = context_len + query_len, starts never fall, and the tensors speak of as many sequences and tokens."""
    bench = Bench(backend, case)
    m = bench.batch.metadata
    starts = m.query_start_loc.clone()
    starts[1] = starts[-1] + 1
    wrong: dict[str, Mapping[str, Any]] = {
        "seq_lens one more": {"seq_lens": m.seq_lens + 1},
        "context_lens one more": {"context_lens": m.context_lens + 1},
        "query_start_loc that falls": {"query_start_loc": starts},
        "fewer seq_lens than sequences": {"seq_lens": m.seq_lens[:-1]},
        "fewer block tables than sequences": {"block_tables": m.block_tables[:-1]},
        "fewer slots than tokens": {"slot_mapping": m.slot_mapping[:-1]},
        "block tables too narrow": {"block_tables": m.block_tables[:, :0]},
    }
    for what, fields in wrong.items():
        _refused_step(bench, what, **fields)


def check_counts_that_disagree_are_refused(backend: type[AttentionBackend], case: Case) -> None:
    """num_prefills, num_decodes and their tokens describe the batch, and the maxima bound it."""
    bench = Bench(backend, case)
    m = bench.batch.metadata
    wrong: dict[str, Mapping[str, Any]] = {
        "one sequence too many": {"num_decodes": m.num_decodes + 1},
        "one sequence too few": {"num_decodes": m.num_decodes - 1},
        "one decode token too few": {"num_decode_tokens": m.num_decode_tokens - 1},
        "one prefill token too many": {"num_prefill_tokens": m.num_prefill_tokens + 1},
        "a max_seq_len below the longest": {"max_seq_len": m.max_seq_len - 1},
        "a max_query_len below the longest": {"max_query_len": m.max_query_len - 1},
    }
    for what, fields in wrong.items():
        _refused_step(bench, what, **fields)


def check_a_profiling_run_with_context_is_refused(backend: type[AttentionBackend], case: Case) -> None:
    """An empty cache cannot hold the context that the metadata speaks of."""
    bench = Bench(backend, case)
    empty = torch.empty(0, dtype=bench.batch.query.dtype, device=device())
    must_refuse(lambda: bench.forward(kv_cache=empty), "a context with an empty kv_cache", MetadataError)


def check_graphs_are_refused_unless_claimed(backend: type[AttentionBackend], case: Case) -> None:
    """Without device graphs graph_capture is an error naming the capability; begin_forward does nothing."""
    Bench(backend, case)
    state = backend.get_state_cls()(runner=None)
    if any("graphs" in row.features for row in backend.CAPABILITIES):
        assert isinstance(state.graph_capture(1), contextlib.AbstractContextManager), "graph_capture gave no context"
        return
    must_refuse(lambda: state.graph_capture(1), "graph_capture without the capability", UnsupportedError)
    state.begin_forward(None)
