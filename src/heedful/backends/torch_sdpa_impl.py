"""A layer of TORCH_SDPA: which rows attend together, from where their keys come, and where the result goes.

The query heads of a KV head are folded into the rows of one call, which torch runs many times faster than
``enable_gqa``. Everything is computed in fp32, except long bf16 prefills, where a CPU may have faster bf16 units.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heedful.backends.capabilities import row_reasons
from heedful.backends.paged_impl import Call, PagedImpl
from heedful.backends.paged_mask import Rules, Tile, bias
from heedful.backends.torch_sdpa import TorchSdpaBackend
from heedful.backends.torch_sdpa_maths import Part, flash, join, spelt_out
from heedful.backends.torch_sdpa_plan import Folded, Single, plan
from heedful.backends.torch_sdpa_read import read
from heedful.errors import BadInputError
from heedful.types import Device

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from heedful.backends.base import AttentionBackend
    from heedful.backends.paged_repeat import Repeat
    from heedful.types import SelectionRequest

QUERY_TILE = 256
"""Most tokens of a prefill that attend in one call."""
BIAS_ELEMENTS = 2**23
"""Most elements of a tile's bias or explicit scores."""


class TorchSdpaImpl(PagedImpl):
    """See AttentionImpl."""

    backend = TorchSdpaBackend

    def __init__(self, *args: Any, **options: Any) -> None:
        """See AttentionImpl. The variant is chosen here, once: the first that claims the layer and can be loaded."""
        super().__init__(*args, **options)
        for name, numbers in (("alibi_slopes", self.alibi_slopes), ("sinks", self.sinks)):
            if numbers is not None and not numbers.is_cpu:
                raise BadInputError(
                    f"TORCH_SDPA runs on the CPU, but {name} is on {numbers.device}; move it to the CPU"
                )
        self.kernels = _kernels(self.backend, self.request)
        self.repeats = self.kernels is not None

    def run(self, call: Call) -> Repeat | None:
        """See PagedImpl. The kernels, unless this call's cache is one that only torch can read."""
        if call.query.device.type != "cpu":
            raise BadInputError(f"TORCH_SDPA runs on the CPU, but query is on {call.query.device}; move it to the CPU")
        if self.kernels is not None and self.kernels.can_read(call):
            repeat: Repeat | None = self.kernels.run(self, call)
            return repeat
        return super().run(call)

    def attend(self, call: Call) -> None:
        """See PagedImpl: what torch computes."""
        rules = self._rules(call)
        row_bytes = 4 * (self.head_size + self.head_size_v)
        work = plan(call.step, rules, self.num_kv_heads, row_bytes, exact=self.kv_cache_dtype == "auto")
        for folded in work.folded:
            self._attend_folded(call, folded, rules)
        for single in work.single:
            self._attend_single(call, single, rules)
        if work.unseeing.numel():
            self._fill_unseeing(call, work.unseeing)

    def _rules(self, call: Call) -> Rules:
        slopes = self.alibi_slopes
        if slopes is not None:
            slopes = slopes.view(self.num_kv_heads, self.group, 1, 1)
        return Rules(call.step.causal, self.sliding_window, slopes)

    def _attend_folded(self, call: Call, folded: Folded, rules: Rules) -> None:
        """Decodes and short chunks: all their rows against each tile of keys."""
        assert call.views is not None
        tokens = call.query.index_select(0, folded.rows).float()
        query = self._fold(tokens.view(folded.seqs, folded.tokens, *tokens.shape[1:]))
        parts = []
        for wanted in folded.reads:
            key, value = (read(view, wanted, torch.float32) for view in call.views)
            mask = bias(wanted.tile, rules, self.group)
            parts.append(spelt_out(query, key, value, mask, self.scale * call.k_scale, self.logits_soft_cap))
        self._put(call, folded.rows, folded.tokens, parts)

    def _attend_single(self, call: Call, single: Single, rules: Rules) -> None:
        """A prefill: tiles of its queries, each against all the keys that it may see."""
        dtype = self._single_dtype(call)
        first_key, key, value = self._keys_of(call, single, dtype)
        start, end = call.step.query_starts[single.sequence : single.sequence + 2]
        key_len = call.step.key_lens[single.sequence]
        offset = key_len - (end - start)  # the position of the first query
        for a, b in self._query_tiles(end - start, key_len):
            low, high = rules.first_key(offset + a), rules.end_key(offset + b - 1, key_len)
            seen = slice(low - first_key, high - first_key)
            query = self._fold(call.query[None, start + a : start + b].to(dtype))
            mask = bias(Tile((offset + a,), b - a, (low,), high - low, (key_len,)), rules, self.group)
            tensors = (query, key[:, :, seen], value[:, :, seen], mask, self.scale * call.k_scale)
            part = flash(*tensors) if self.logits_soft_cap is None else spelt_out(*tensors, self.logits_soft_cap)
            self._put(call, slice(start + a, start + b), b - a, [part])

    def _single_dtype(self, call: Call) -> torch.dtype:
        """bf16 only where torch's kernel gives the result itself; the LSE of its bf16 form is right to 1e-4 only."""
        plain = self.sinks is None and self.logits_soft_cap is None and call.lse is None
        exact = call.views is None or self.kv_cache_dtype == "auto"
        return torch.bfloat16 if plain and exact and call.query.dtype == torch.bfloat16 else torch.float32

    def _keys_of(self, call: Call, single: Single, dtype: torch.dtype) -> tuple[int, Tensor, Tensor]:
        """(position of the first key, K, V [1, num_kv_heads, keys, size]): this step's own, or the cache's."""
        if single.read is not None and call.views is not None:
            key, value = (read(view, single.read, dtype) for view in call.views)
            return single.read.tile.first_key[0], key, value
        assert call.key is not None
        assert call.value is not None
        key, value = (_by_head(x[single.rows], dtype) for x in (call.key, call.value))
        return 0, key, value

    def _query_tiles(self, tokens: int, keys: int) -> Iterator[tuple[int, int]]:
        rows = max(16, min(QUERY_TILE, BIAS_ELEMENTS // (self.num_heads * keys)))
        return ((a, min(a + rows, tokens)) for a in range(0, tokens, rows))

    def _fold(self, query: Tensor) -> Tensor:
        """[seqs, tokens, num_heads, size] -> [seqs, num_kv_heads, group * tokens, size]."""
        heads = query.view(*query.shape[:2], self.num_kv_heads, self.group, -1)
        return heads.permute(0, 2, 3, 1, 4).flatten(2, 3).contiguous()

    def _unfold(self, x: Tensor, tokens: int) -> Tensor:
        """[seqs, num_kv_heads, group * tokens, size] -> [seqs * tokens, num_heads, size]."""
        rows = x.reshape(*x.shape[:2], self.group, tokens, -1).permute(0, 3, 1, 2, 4)
        return rows.flatten(2, 3).flatten(0, 1)

    def _put(self, call: Call, rows: Tensor | slice, tokens: int, parts: list[Part]) -> None:
        """Join the parts, apply v_scale, then into the rows of the call."""
        sinks = self.sinks
        if sinks is not None:
            sinks = sinks.view(self.num_kv_heads, self.group).repeat_interleave(tokens, 1)
        output, lse = join(parts, sinks)
        if call.views is not None and call.v_scale != 1:
            output = output * call.v_scale
        call.output[rows] = self._unfold(output, tokens).to(call.output.dtype)
        if call.lse is not None:
            call.lse[rows] = self._unfold(lse[..., None], tokens)[..., 0]

    def _fill_unseeing(self, call: Call, rows: Tensor) -> None:
        """Rows without any key: output 0; the sink, where there is one, is the whole denominator."""
        call.output[rows] = 0
        if call.lse is not None:
            call.lse[rows] = -torch.inf if self.sinks is None else self.sinks.expand(len(rows), -1)


def _kernels(backend: type[AttentionBackend], request: SelectionRequest) -> ModuleType | None:
    """heedful's own kernels, if the first variant that claims the layer is theirs and they were built."""
    row = next((row for row in backend.CAPABILITIES if not row_reasons(row, request, Device("cpu"))), None)
    if row is None or row.variant != "cpp":
        return None
    try:
        return import_module("heedful.backends.torch_sdpa_cpp")
    except ImportError:  # not built: the decision record says so, see heedful.libraries
        return None


def _by_head(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[keys, num_kv_heads, size] -> [1, num_kv_heads, keys, size]; torch's kernel wants the last stride to be 1."""
    heads = x.transpose(0, 1)[None].to(dtype)
    return heads if heads.stride(-1) == 1 else heads.contiguous()
