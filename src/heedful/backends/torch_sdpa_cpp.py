"""TORCH_SDPA's variant ``cpp``: one call of heedful's CPU kernels writes a step's K and V and attends, all as it lies.

The step's lengths and tables are turned into the kernels' arrays once a step, sizes and strides into a form once for
all layers alike: what is left to a call are addresses, scales and the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heedful.kernels.cpu import Attention, Form, Write, operands, step
from heedful.kernels.cpu.library import DTYPE_CODES

if TYPE_CHECKING:
    from heedful.backends.base import KVCache
    from heedful.backends.paged import Step
    from heedful.backends.paged_impl import Call, PagedImpl
    from heedful.backends.paged_repeat import Repeat

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


def run(layer: PagedImpl, call: Call) -> Repeat | None:
    """Store the step's K and V at their slots, then attend: every row of every sequence, output and LSE."""
    straight = _straight(call)
    repeat = _Repeat(layer, straight)
    scales = (call.k_scale, call.v_scale)
    repeat.run(layer, straight.query, straight.key, straight.value, straight.views, scales, straight.output, call.lse)
    if straight is call:
        return repeat
    if straight.output is not call.output:
        call.output[: call.step.num_tokens] = straight.output[: call.step.num_tokens]
    return None


def _straight(call: Call) -> Call:
    """The call itself where the elements of every row lie side by side, else with copies in which they do."""
    key, value = (None if x is None else _rows(x) for x in (call.key, call.value))
    query, output = _rows(call.query), call.output
    if output.stride(-1) != 1:
        output = output.new_empty(output.shape)
    same = query is call.query and key is call.key and value is call.value and output is call.output
    return call if same else replace(call, query=query, key=key, value=value, output=output)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _Repeat:
    """See Repeat."""

    __slots__ = ("_arrays", "_flat", "_form", "_value_after")

    def __init__(self, layer: PagedImpl, call: Call) -> None:
        self._arrays = _arrays(call.step)
        self._flat = call.views is None
        # K comes first in a cache of one tensor
        self._value_after = call.views[1].data_ptr() - call.views[0].data_ptr() if call.views else 0
        self._form = Form(_attention(layer, call, self._arrays), *_writes(call, self._arrays.slots))

    def run(
        self,
        layer: PagedImpl,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: KVCache | None,
        scales: tuple[float, float],
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """See Repeat."""
        new_key, new_value = (0, 0) if key is None or value is None else (key.data_ptr(), value.data_ptr())
        if self._flat or kv_cache is None:
            key_cache, value_cache, scales = new_key, new_value, (1.0, 1.0)
        elif isinstance(kv_cache, Tensor):
            key_cache = kv_cache.data_ptr()
            value_cache = key_cache + self._value_after
        else:
            key_cache, value_cache = kv_cache[0].data_ptr(), kv_cache[1].data_ptr()
        slopes, sinks = layer.alibi_slopes, layer.sinks
        step(
            self._form,
            operands(
                query.data_ptr(),
                new_key,
                new_value,
                key_cache,
                value_cache,
                output.data_ptr(),
                0 if lse is None else lse.data_ptr(),
                0 if slopes is None else slopes.data_ptr(),
                0 if sinks is None else sinks.data_ptr(),
                layer.scale,
                *scales,
                torch.get_num_threads(),
            ),
        )


def _attention(layer: PagedImpl, call: Call, arrays: _Arrays) -> Attention:
    key, value = call.views or (call.key, call.value)
    assert key is not None
    assert value is not None
    block_size = call.step.block_size if call.views else FLAT_BLOCK
    found = Attention(
        q_token=call.query.stride(0),
        q_head=call.query.stride(1),
        k_token=key.stride(-3),
        k_head=key.stride(-2),
        v_token=value.stride(-3),
        v_head=value.stride(-2),
        o_token=call.output.stride(0),
        o_head=call.output.stride(1),
        query_start=arrays.query_start.data_ptr(),
        kv_lens=arrays.kv_lens.data_ptr(),
        key_start=arrays.key_start.data_ptr(),
        num_seqs=len(call.step.key_lens),
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        head_size_v=layer.head_size_v,
        block_size=block_size,
        dtype=CODES[call.query.dtype],
        cache_dtype=CODES[key.dtype],
        causal=call.step.causal,
        window=min(layer.sliding_window or 0, INT32_MAX),
        soft_cap=layer.logits_soft_cap or 0.0,
    )
    if arrays.tables is not None:
        found.k_block, found.v_block = key.stride(0), value.stride(0)
        found.block_tables, found.table_stride = arrays.tables.data_ptr(), arrays.tables.stride(0)
    if call.lse is not None:
        found.lse_token, found.lse_head = call.lse.stride()
    return found


def _writes(call: Call, slots: Tensor | None) -> tuple[Write, Write]:
    if slots is None or call.views is None or call.key is None or call.value is None:
        return Write(), Write()
    return _write(call.key, call.views[0], slots), _write(call.value, call.views[1], slots)


def _write(rows: Tensor, view: Tensor, slots: Tensor) -> Write:
    block, token, head, _ = view.stride()
    return Write(
        s_token=rows.stride(0),
        s_head=rows.stride(1),
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
    )
