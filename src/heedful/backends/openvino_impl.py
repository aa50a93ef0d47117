"""A layer of OPENVINO: which of the two operators a call goes through, and what each is handed.

The PagedAttention operator writes by block table and then attends, on the caller's own pages. It knows no slots, one
block size and one layout of a page. A call that has something else is written by us, its pages are gathered, and the
SDPA operator attends; ``way`` says why, and so does the log.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heedful.backends import openvino_models as models
from heedful.backends import openvino_u8 as u8
from heedful.backends import paged_arguments as arguments
from heedful.backends.capabilities import row_reasons
from heedful.backends.openvino import PAGED, U8_HEADER, OpenVinoBackend
from heedful.backends.paged_impl import Call, PagedImpl
from heedful.backends.paged_mask import Rules, Tile, bias
from heedful.errors import BadInputError
from heedful.types import Device

if TYPE_CHECKING:
    from collections.abc import Iterator

    import openvino as ov

    from heedful.backends.paged import Step
    from heedful.types import SelectionRequest

QUERY_TILE = 256
"""Most tokens of a prefill that attend in one call of the SDPA operator."""
MASK_ELEMENTS = 2**22
"""Most elements of such a call's mask."""
INT32_MAX = 2**31 - 1

_LOG = logging.getLogger("heedful")


class OpenVinoImpl(PagedImpl):
    """See AttentionImpl. device: the OpenVINO device that HEEDFUL_OPENVINO_DEVICE named when the layer was built."""

    backend = OpenVinoBackend

    def __init__(self, *args: Any, **options: Any) -> None:
        """See AttentionImpl."""
        super().__init__(*args, **options)
        self.device = models.device()
        slopes, sinks = self.alibi_slopes, self.sinks
        self._slopes = None if slopes is None else slopes.view(self.num_kv_heads, self.group, 1, 1)
        rules = {"scale": torch.tensor(self.scale), "sliding_window": _int32(min(self.sliding_window or 0, INT32_MAX))}
        if slopes is not None:
            rules["alibi_slopes"] = slopes
        if sinks is not None:
            rules["sinks"] = sinks.view(1, -1, 1, 1)
        self._constants = {name: models.shared(x) for name, x in rules.items()}

    def run(self, call: Call) -> None:
        """See PagedImpl: by the operator that ``way`` names."""
        if call.query.device.type != "cpu":
            raise BadInputError(f"OPENVINO reads host memory, but query is on {call.query.device}; move it to the CPU")
        if not call.step.num_tokens:
            self.write(call)
            return
        why_not = self.way(call)
        if not why_not:
            self._run_paged(call)
            return
        _tell_once(f"OPENVINO: a call goes through our own write and the SDPA operator, because {why_not}")
        super().run(call)

    def way(self, call: Call) -> str:
        """Why the PagedAttention operator cannot take the call, so that the SDPA operator does; empty where it can."""
        step = call.step
        if call.views is None or call.key is None:
            return "its keys are not in pages, or are there already"
        asked = (self.request, arguments.name_of(call.query.dtype), str(call.kind), step.block_size)
        if reasons := _not_paged(*asked):
            return reasons
        if self.device != "CPU":
            return f"on {self.device} the PagedAttention operator has another layout of pages"
        if step.write_rows is not None or step.write_blocks.numel() != step.num_tokens:
            return "its slot_mapping leaves a token unwritten, and the PagedAttention operator writes every token"
        if not all(view.transpose(1, 2).is_contiguous() for view in call.views):
            return "its pages do not lie side by side in memory"
        if _lists(step).tails_shared:
            return "another sequence has the page that a chunk ends in, whose tail the PagedAttention operator clears"
        return ""

    def _run_paged(self, call: Call) -> None:
        """Write and attend in one, on the memory of the call's own tensors where their rows lie side by side."""
        assert call.views is not None
        assert call.key is not None
        assert call.value is not None
        tokens = call.step.num_tokens
        rows = {"query": call.query, "key": call.key, "value": call.value}
        caches = {"key_cache": call.views[0], "value_cache": call.views[1]}
        inputs = {name: models.shared(_flat(x[:tokens])) for name, x in rows.items()}
        inputs |= {name: models.shared(view.transpose(1, 2).detach()) for name, view in caches.items()}
        lists = _lists(call.step)
        inputs |= self._constants | lists.inputs
        output = _flat(call.output[:tokens])
        tails = None if lists.tails is None else call.views[1][lists.tails]
        self._paged_model(call.query.dtype, call.views[0].dtype).run(inputs, models.shared(output))
        if tails is not None and lists.tails is not None:
            call.views[1].index_put_(lists.tails, tails)
        if output.data_ptr() != call.output.data_ptr():
            call.output[:tokens] = output.view(tokens, self.num_heads, self.head_size_v)

    def _paged_model(self, dtype: torch.dtype, stored: torch.dtype) -> models.Model:
        sizes = (self.num_heads, self.num_kv_heads, self.head_size, self.head_size_v)
        rules = (self.alibi_slopes is not None, self.sinks is not None)
        return models.model(models.PagedForm(*sizes, dtype, stored, *rules, self.device, torch.get_num_threads()))

    def row_size(self, size: int) -> int:
        """See PagedImpl."""
        return size + U8_HEADER if self.kv_cache_dtype == "u8" else size

    def write(self, call: Call) -> None:
        """See PagedImpl: what a step's SDPA operator finds in the cache."""
        if self.kv_cache_dtype == "u8" and call.key is not None and call.value is not None:
            call = replace(call, key=u8.store(call.key), value=u8.store(call.value))
        super().write(call)

    def attend(self, call: Call) -> None:
        """See PagedImpl: one sequence after another, in tiles of its queries, by the SDPA operator in fp32."""
        step = call.step
        rules = Rules(step.causal, self.sliding_window, self._slopes)
        for i, (start, end) in enumerate(pairwise(step.query_starts)):
            if start == end:
                continue
            if not step.key_lens[i]:
                call.output[start:end] = 0
                continue
            key, value = (_by_head(x) for x in self._keys_of(call, i))
            offset = step.key_lens[i] - (end - start)  # the position of the first query
            for a, b in self._query_tiles(end - start, step.key_lens[i]):
                low, high = rules.first_key(offset + a), rules.end_key(offset + b - 1, step.key_lens[i])
                tile = Tile((offset + a,), b - a, (low,), high - low, (step.key_lens[i],))
                mask, _ = bias(tile, rules, self.group)
                rows = slice(start + a, start + b)
                call.output[rows] = self._attend_tile(call.query[rows], key[:, low:high], value[:, low:high], mask)

    def _keys_of(self, call: Call, i: int) -> tuple[Tensor, Tensor]:
        """K and V of a sequence, [keys, num_kv_heads, size], in the order of its positions."""
        step = call.step
        if step.tables is None or call.views is None:
            assert call.key is not None
            assert call.value is not None
            rows = slice(step.key_starts[i], step.key_starts[i + 1])
            return call.key[rows], call.value[rows]
        pages = step.tables[i, : -(-step.key_lens[i] // step.block_size)]
        key, value = (view.index_select(0, pages).flatten(0, 1)[: step.key_lens[i]] for view in call.views)
        return (u8.load(key), u8.load(value)) if self.kv_cache_dtype == "u8" else (key, value)

    def _query_tiles(self, tokens: int, keys: int) -> Iterator[tuple[int, int]]:
        rows = max(16, min(QUERY_TILE, MASK_ELEMENTS // (self.num_heads * keys)))
        return ((a, min(a + rows, tokens)) for a in range(0, tokens, rows))

    def _attend_tile(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[tokens, num_heads, Dv] of query [tokens, num_heads, D] on key, value [num_kv_heads, keys, D | Dv]."""
        tokens = len(query)
        folded = query.float().view(tokens, self.num_kv_heads, self.group, -1).permute(1, 2, 0, 3).flatten(1, 2)
        if self.sinks is not None:
            key, value, mask = self._with_sink(key, value, mask, tokens)
        output = torch.empty(1, *folded.shape[:2], self.head_size_v)
        inputs = {"query": folded[None], "key": key[None], "value": value[None]}
        if mask is not None:
            inputs["mask"] = mask.expand(-1, -1, folded.shape[1], -1)
        form = models.SdpaForm(
            self.head_size,
            self.head_size_v,
            torch.float32,
            mask is not None,
            self.device,
            torch.get_num_threads(),
        )
        given = {name: models.shared(x.contiguous()) for name, x in inputs.items()}
        models.model(form).run(given | {"scale": self._constants["scale"]}, models.shared(output))
        heads = output[0].view(self.num_kv_heads, self.group, tokens, -1)
        return heads.permute(2, 0, 1, 3).flatten(1, 2)

    def _with_sink(self, key: Tensor, value: Tensor, mask: Tensor | None, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """One more key of zeros, whose score is the mask's: the sink. Its value is 0: it is in the denominator only."""
        assert self.sinks is not None
        sink = self.sinks.view(1, self.num_kv_heads, self.group, 1).expand(-1, -1, -1, tokens).flatten(2)[..., None]
        seen = key.new_zeros(1, 1, 1, key.shape[1]) if mask is None else mask
        seen = seen.expand(1, self.num_kv_heads, sink.shape[2], -1)
        key, value = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
        return key, value, torch.cat([seen, sink], -1)


def _int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _flat(x: Tensor) -> Tensor:
    """[rows, heads * size], contiguous; the memory of x where that is so already."""
    return x.detach().flatten(1).contiguous()


def _by_head(x: Tensor) -> Tensor:
    """[keys, num_kv_heads, size] -> fp32 [num_kv_heads, keys, size]."""
    return x.detach().transpose(0, 1).float().contiguous()


@dataclass(frozen=True)
class _Lists:
    """A step as the operator reads it; memory: the torch tensors behind the inputs.

    tails: (block, offset) of the slots past the last key of every sequence with several new tokens, whose V the
    operator clears. tails_shared: whether one of them may be another sequence's key.
    """

    inputs: dict[str, ov.Tensor]
    memory: tuple[Tensor, ...]
    tails: tuple[Tensor, Tensor] | None
    tails_shared: bool


def _lists(step: Step) -> _Lists:
    found: _Lists | None = step.derived.get("openvino")
    if found is None:
        found = step.derived["openvino"] = _made_lists(step)
    return found


def _made_lists(step: Step) -> _Lists:
    """Sequences without a query are left out: they need no answer, and the operator need not read an empty one."""
    assert step.tables is not None
    chosen = [i for i, count in enumerate(step.query_lens) if count]
    queries, keys = [step.query_lens[i] for i in chosen], [step.key_lens[i] for i in chosen]
    pages = [-(-length // step.block_size) for length in keys]
    tables = [step.tables[i, :count] for i, count in zip(chosen, pages, strict=True)]
    blocks = torch.cat(tables)
    lists = {
        "past_lens": _int32([length - count for length, count in zip(keys, queries, strict=True)]),
        "subsequence_begins": _starts(queries),
        "block_indices": blocks.to(torch.int32),
        "block_indices_begins": _starts(pages),
        "max_context_len": _int32(max(keys)),
    }
    ends = [
        (int(table[-1]), length % step.block_size)
        for table, count, length in zip(tables, queries, keys, strict=True)
        if count > 1 and length % step.block_size
    ]
    inputs = {name: models.shared(x) for name, x in lists.items()}
    return _Lists(inputs, tuple(lists.values()), _tails(ends, step.block_size), _any_twice(ends, blocks))


def _tails(ends: list[tuple[int, int]], block_size: int) -> tuple[Tensor, Tensor] | None:
    slots = [(block, offset) for block, first in ends for offset in range(first, block_size)]
    if not slots:
        return None
    blocks, offsets = torch.tensor(slots).unbind(1)
    return blocks, offsets


def _any_twice(ends: list[tuple[int, int]], blocks: Tensor) -> bool:
    """Whether a block that a chunk ends in stands in two tables."""
    return bool(ends) and int(torch.isin(blocks, torch.tensor([block for block, _ in ends])).sum()) > len(ends)


def _starts(lengths: list[int]) -> Tensor:
    return torch.nn.functional.pad(_int32(lengths).cumsum(0, dtype=torch.int32), (1, 0))


@lru_cache(maxsize=1024)
def _not_paged(request: SelectionRequest, dtype: str, kind: str, block_size: int) -> str:
    """What the PagedAttention operator's own capability row has against it."""
    asked = replace(request, dtype=dtype, attn_type=kind, block_size=block_size)
    return "; ".join(reason.text for reason in row_reasons(PAGED, asked, Device(PAGED.platform)))


@lru_cache(maxsize=64)
def _tell_once(message: str) -> None:
    _LOG.info("%s", message)
