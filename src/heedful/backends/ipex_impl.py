"""A layer of IPEX: a step cut into the calls that the operators of the library take.

A sequence with one query goes by the decode operator where that is right, all others by the one for chunks. Keys that
are not in a cache (encoders, the profiling run) are laid out in pages first, so that one path computes everything.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from heedful.backends import paged_arguments as arguments
from heedful.backends.capabilities import row_reasons
from heedful.backends.ipex import IpexBackend
from heedful.backends.ipex_libraries import Part, Rules, library_for
from heedful.backends.paged_impl import Call, PagedImpl
from heedful.errors import UnsupportedError
from heedful.types import Device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from heedful.backends.capabilities import Capability
    from heedful.backends.ipex_libraries import Library, Views
    from heedful.backends.paged import Step
    from heedful.types import SelectionRequest

PAGE = 128
"""Tokens a page, where the layer lays out keys itself."""


class IpexImpl(PagedImpl):
    """See AttentionImpl."""

    backend = IpexBackend

    def __init__(self, *args: Any, **options: Any) -> None:
        """See AttentionImpl."""
        super().__init__(*args, **options)
        self._rules = Rules(self.scale, self.sliding_window, self.logits_soft_cap)

    def run(self, call: Call) -> None:
        """See PagedImpl; refused where the library that is here has less than the other one claims."""
        row = library_for(call.query.device.type).row
        _refuse(row, self.request, arguments.name_of(call.query.dtype), str(call.kind), call.step.block_size)
        super().run(call)

    def write(self, call: Call) -> None:
        """See PagedImpl: by the library's operator where that is right for these pages and slots."""
        if call.views is None or call.key is None or call.value is None or not call.step.write_blocks.numel():
            return
        library = library_for(call.query.device.type)
        pages, step = library.pages(call.views), call.step
        if pages is not None and step.write_rows is None:
            count = step.write_blocks.numel()
            if library.write(call.key[:count], call.value[:count], pages, _slots(step)):
                return
        super().write(call)

    def attend(self, call: Call) -> None:
        """See PagedImpl."""
        step = call.step
        for i, (start, end) in enumerate(pairwise(step.query_starts)):
            if not step.key_lens[i]:
                call.output[start:end] = 0
        if call.views is None:
            views, tables = self._laid_out(call)
        else:
            assert step.tables is not None
            views, tables = call.views, step.tables
        if self.sliding_window == 1:
            _see_themselves(call, views, tables)
            return
        library = library_for(call.query.device.type)
        pages = library.pages(views)
        parts = self._parts(step, tables, views, library, packed=pages is None)
        if pages is None:
            pages = library.packed(views, _blocks(tables).to(views[0].device))
        for part, single in parts:
            self._attend_part(call, library, pages, part, single=single)

    def _attend_part(self, call: Call, library: Library, pages: Views, part: Part, *, single: bool) -> None:
        query, target = call.query[part.rows].contiguous(), call.output[part.rows]
        in_place = isinstance(part.rows, slice) and target.is_contiguous()
        output = target if in_place else torch.empty_like(query)
        (library.single if single else library.varlen)(query, pages, part, self._rules, output)
        if not in_place:
            call.output[part.rows] = output

    def _laid_out(self, call: Call) -> tuple[Views, Tensor]:
        """K and V [rows, num_kv_heads, size] in pages, as views of them, and each sequence's table."""
        assert call.key is not None
        assert call.value is not None
        lengths, device = call.step.key_lens, call.key.device
        counts = [-(-length // PAGE) for length in lengths]
        firsts = _starts(counts).long()
        tables = firsts[:-1, None] + torch.arange(max(counts, default=0))
        owners = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
        position = torch.arange(len(owners)) - _starts(lengths).long()[owners]
        where = ((firsts[owners] + position // PAGE).to(device), (position % PAGE).to(device))
        views = []
        for x in (call.key, call.value):
            laid = x.new_zeros(max(int(firsts[-1]), 1), self.num_kv_heads, PAGE, x.shape[2]).transpose(1, 2)
            views.append(laid.index_put_(where, x[: len(owners)]))
        return (views[0], views[1]), tables.clamp_(max=max(int(firsts[-1]) - 1, 0))

    def _parts(
        self, step: Step, tables: Tensor, views: Views, library: Library, *, packed: bool
    ) -> list[tuple[Part, bool]]:
        """What each operator gets, and whether it is the one for single queries; worked out once a step."""
        split, device = library.takes_single(self._rules, views[0].shape[1]), views[0].device
        asked = ("ipex", split, packed, device)
        if asked not in step.derived:
            numbers = torch.searchsorted(_blocks(tables), tables) if packed else tables
            step.derived[asked] = _cut(step, numbers, device, split=split)
        found: list[tuple[Part, bool]] = step.derived[asked]
        return found


def _cut(step: Step, tables: Tensor, device: torch.device, *, split: bool) -> list[tuple[Part, bool]]:
    """Sequences without a query or without a key are left out: operators need not read an empty one."""
    lens = step.query_lens
    chosen = [i for i, count in enumerate(lens) if count and step.key_lens[i]]
    single = [i for i in chosen if split and lens[i] == 1]
    several = [i for i in chosen if not (split and lens[i] == 1)]
    both = ((several, False), (single, True))
    return [(_part(step, tables, sequences, device), alone) for sequences, alone in both if sequences]


def _part(step: Step, tables: Tensor, sequences: list[int], device: torch.device) -> Part:
    queries, keys = ([lengths[i] for i in sequences] for lengths in (step.query_lens, step.key_lens))
    return Part(
        _rows(step, sequences, device),
        tables[sequences].to(device, torch.int32),
        _starts(queries).to(device),
        _starts(keys).to(device),
        torch.tensor(keys, dtype=torch.int32, device=device),
        max(queries),
        max(keys),
        step.causal,
    )


def _rows(step: Step, sequences: list[int], device: torch.device) -> slice | Tensor:
    """The query rows of some sequences; a slice where they stand together."""
    rows = [row for i in sequences for row in range(step.query_starts[i], step.query_starts[i + 1])]
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


def _starts(lengths: Sequence[int]) -> Tensor:
    """int32 [len + 1]: 0 and the running sums."""
    return torch.nn.functional.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))


def _blocks(tables: Tensor) -> Tensor:
    """The numbers in some tables, each once, in order."""
    found: Tensor = tables.unique()  # type: ignore[no-untyped-call]
    return found


def _slots(step: Step) -> Tensor:
    if "ipex slots" not in step.derived:
        step.derived["ipex slots"] = step.write_blocks * step.block_size + step.write_offsets
    found: Tensor = step.derived["ipex slots"]
    return found


def _see_themselves(call: Call, views: Views, tables: Tensor) -> None:
    """A window of 1: the softmax of one score is 1, whatever its cap. No operator can say this window."""
    lens, device = torch.tensor(call.step.query_lens), views[1].device
    starts, keys = torch.tensor(call.step.query_starts), torch.tensor(call.step.key_lens)
    owners = torch.repeat_interleave(torch.arange(len(lens)), lens)
    position = torch.arange(len(owners)) - starts[owners] + (keys - lens)[owners]
    blocks, offsets = tables[owners, position // views[1].shape[1]], position % views[1].shape[1]
    seen = views[1][blocks.to(device), offsets.to(device)]
    call.output[: len(owners)] = seen.repeat_interleave(call.output.shape[1] // seen.shape[1], 1)


@lru_cache(maxsize=1024)
def _refuse(row: Capability, request: SelectionRequest, dtype: str, kind: str, block_size: int) -> None:
    """Raise UnsupportedError where the row of the library that is here does not take the call."""
    size = block_size or row.block_sizes.smallest
    reasons = row_reasons(row, replace(request, dtype=dtype, attn_type=kind, block_size=size), Device(row.platform))
    if reasons:
        why = "; ".join(map(str, reasons))
        library = row.libraries[0].partition(".")[0]
        raise UnsupportedError(
            f"{library} is what IPEX has on this machine, and it cannot serve the call: {why}", tuple(reasons)
        )
