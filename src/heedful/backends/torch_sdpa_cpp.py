"""TORCH_SDPA's variant ``cpp``: one call of heedful's CPU kernels for a whole step, over the cache as it lies.

The step's lengths and tables are turned into the kernels' arrays once a step; what only the layer knows is filled into
a copy of a template, so that a call costs a few microseconds of Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heedful.kernels.cpu import Attention, Write, attend, write_cache
from heedful.kernels.cpu.library import DTYPE_CODES

if TYPE_CHECKING:
    from heedful.backends.paged import Step
    from heedful.backends.paged_impl import Call, PagedImpl

CODES = {getattr(torch, name): code for name, code in DTYPE_CODES.items()}
INT32_MAX = 2**31 - 1
FLAT_BLOCK = INT32_MAX


@dataclass(frozen=True)
class _Arrays:
    """A step as the kernels read it: int32 arrays, and the int64 slot of every row of key (None: nothing to write)."""

    query_start: Tensor
    kv_lens: Tensor
    tables: Tensor | None
    key_start: Tensor
    slots: Tensor | None


def _arrays(step: Step) -> _Arrays:
    found: _Arrays | None = step.derived.get("cpp")
    if found is None:
        int32 = torch.int32
        tables = None if step.tables is None else step.tables.to(int32).contiguous()
        starts, lens = (torch.tensor(x, dtype=int32) for x in (step.query_starts, step.key_lens))
        found = _Arrays(starts, lens, tables, torch.tensor(step.key_starts, dtype=int32), _slots(step))
        step.derived["cpp"] = found
    return found


def _slots(step: Step) -> Tensor | None:
    count = step.write_blocks.numel()
    if not count:
        return None
    slots = step.write_blocks * step.block_size + step.write_offsets
    if step.write_rows is None:
        return slots
    every = torch.full((int(step.write_rows[-1]) + 1,), -1, dtype=torch.int64)
    every[step.write_rows] = slots
    return every


def can_read(call: Call) -> bool:
    """Whether the elements of a row lie side by side in the cache, which is all that the kernels ask of its strides."""
    return call.views is None or all(view.stride(-1) == 1 or view.shape[-1] == 1 for view in call.views)


def write(call: Call) -> None:
    """Store the step's K and V at their slots."""
    slots = _arrays(call.step).slots
    if slots is None or call.views is None or call.key is None or call.value is None:
        return
    pairs = ((call.key, call.views[0], call.k_scale), (call.value, call.views[1], call.v_scale))
    for x, view, scale in pairs:
        rows = x if x.stride(-1) == 1 else x.contiguous()
        write_cache(_write(rows, view, slots, scale))


def _write(rows: Tensor, view: Tensor, slots: Tensor, scale: float) -> Write:
    block, token, head, _ = view.stride()
    return Write(
        source=rows.data_ptr(),
        s_token=rows.stride(0),
        s_head=rows.stride(1),
        cache=view.data_ptr(),
        c_block=block,
        c_head=head,
        c_token=token,
        slots=slots.data_ptr(),
        tokens=slots.numel(),
        heads=view.shape[2],
        size=view.shape[3],
        block_size=view.shape[1],
        dtype=CODES[rows.dtype],
        cache_dtype=CODES[view.dtype],
        scale=scale,
    )


def run(layer: PagedImpl, call: Call) -> None:
    """Attend: every row of every sequence, output and LSE."""
    step, arrays = call.step, _arrays(call.step)
    query = _rows(call.query)
    output = call.output if call.output.stride(-1) == 1 else call.output.new_empty(call.output.shape)
    key, value, strides = _keys(call)
    request = Attention(
        query=query.data_ptr(),
        q_token=query.stride(0),
        q_head=query.stride(1),
        key=key.data_ptr(),
        value=value.data_ptr(),
        output=output.data_ptr(),
        o_token=output.stride(0),
        o_head=output.stride(1),
        query_start=arrays.query_start.data_ptr(),
        kv_lens=arrays.kv_lens.data_ptr(),
        key_start=arrays.key_start.data_ptr(),
        num_seqs=len(step.key_lens),
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        head_size_v=layer.head_size_v,
        block_size=step.block_size or FLAT_BLOCK,
        dtype=CODES[query.dtype],
        cache_dtype=CODES[key.dtype],
        causal=step.causal,
        window=min(layer.sliding_window or 0, INT32_MAX),
        scale=layer.scale,
        soft_cap=layer.logits_soft_cap or 0.0,
        k_scale=call.k_scale if call.views is not None else 1.0,
        v_scale=call.v_scale if call.views is not None else 1.0,
        threads=torch.get_num_threads(),
        **strides,
    )
    if arrays.tables is not None:
        request.block_tables, request.table_stride = arrays.tables.data_ptr(), arrays.tables.stride(0)
    if layer.alibi_slopes is not None:
        request.alibi_slopes = layer.alibi_slopes.data_ptr()
    if layer.sinks is not None:
        request.sinks = layer.sinks.data_ptr()
    if call.lse is not None:
        request.lse = call.lse.data_ptr()
        request.lse_token, request.lse_head = call.lse.stride()
    attend(request)
    if output is not call.output:
        call.output[: step.num_tokens] = output[: step.num_tokens]


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _keys(call: Call) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Keys, values and their strides: of the cache, or of the step's own rows."""
    if call.views is not None and call.step.tables is not None:
        key, value = call.views
        names = ("block", "token", "head")
        sides = (("k", key.stride()), ("v", value.stride()))
        return (
            key,
            value,
            {f"{side}_{name}": stride for side, s in sides for name, stride in zip(names, s, strict=False)},
        )
    assert call.key is not None
    assert call.value is not None
    key, value = _rows(call.key), _rows(call.value)
    strides = {"k_token": key.stride(0), "k_head": key.stride(1), "v_token": value.stride(0), "v_head": value.stride(1)}
    return key, value, strides
