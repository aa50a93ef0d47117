"""The host values of a step: read once from the metadata, checked, and kept on ``metadata.step`` for every layer.

A bad length, block table or slot is a MetadataError that names the sequence, before any kernel sees it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import attrgetter, index, is_
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from heedful.errors import MetadataError
from heedful.types import AttentionType

if TYPE_CHECKING:
    from heedful.backends.base import AttentionMetadata


@dataclass(frozen=True)
class Step:
    """What one kind of attention does in one step, in host values.

    query_starts: first query row of each sequence, and one past the last. key_lens: keys each sequence sees (from the
    cache, or flat rows where ``tables`` is None). tables int64 [seqs, blocks], CPU; entries past a sequence's last page
    are 0. write_*: where the step's K and V go; write_rows None means the first rows, in order. fresh: per sequence,
    whether this step brings all of its keys and writes them. watch: tells whether the metadata that all this was read
    from is still the same. derived: what a backend works out once a step.
    """

    query_starts: tuple[int, ...]
    key_lens: tuple[int, ...]
    num_prefills: int
    causal: bool
    tables: torch.Tensor | None
    block_size: int
    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    write_rows: torch.Tensor | None
    fresh: tuple[bool, ...]
    watch: Watch = field(compare=False)
    derived: dict[Any, Any] = field(default_factory=dict, compare=False)

    @property
    def num_tokens(self) -> int:
        """Query rows that belong to a sequence; later rows are padding."""
        return self.query_starts[-1]

    @property
    def key_starts(self) -> tuple[int, ...]:
        """First flat key row of each sequence, where keys are not read from a cache."""
        return tuple(accumulate(self.key_lens, initial=0))

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Query rows of each sequence."""
        return tuple(b - a for a, b in pairwise(self.query_starts))


def validate_metadata(
    metadata: AttentionMetadata,
    attn_type: AttentionType | str,
    num_query_rows: int,
    num_key_rows: int | None,
    num_blocks: int = 0,
    block_size: int = 0,
) -> Step:
    """The step's host values, checked; found again on ``metadata.step`` by every layer that asks alike.

    num_query_rows, num_key_rows: rows of the tensors that forward got (None: no key). num_blocks 0: no cache.
    """
    asked = (str(attn_type), num_query_rows, num_key_rows, num_blocks, block_size)
    kept: Step | None = metadata.step.get(asked)
    if kept is not None and kept.watch.holds(metadata):
        return kept
    step = _Check(metadata, str(attn_type), num_query_rows, num_key_rows, num_blocks, block_size).step()
    metadata.step[asked] = step
    return step


_TENSORS = {
    "query_start_loc": torch.int32,
    "seq_lens": torch.int32,
    "context_lens": torch.int32,
    "block_tables": torch.int32,
    "slot_mapping": torch.int64,
    "encoder_seq_lens": torch.int32,
    "cross_slot_mapping": torch.int64,
    "cross_block_tables": torch.int32,
}
_OPTIONAL = {"encoder_seq_lens", "cross_slot_mapping", "cross_block_tables"}
_NUMBERS = ("num_prefills", "num_decodes", "num_prefill_tokens", "num_decode_tokens", "max_query_len", "max_seq_len")
_OPTIONAL_NUMBERS = ("num_encoder_tokens", "max_encoder_seq_len")


_FIELDS = attrgetter(*_TENSORS, *_NUMBERS, "num_encoder_tokens", "max_encoder_seq_len")


class Watch:
    """Tells whether a field of a metadata object was replaced, or a tensor of it written in place, since it was made.

    It holds on to the fields, so that no other tensor takes the place of one in memory.
    """

    __slots__ = ("fields", "tensors", "versions")

    def __init__(self, metadata: AttentionMetadata) -> None:
        self.fields: tuple[Any, ...] = _FIELDS(metadata)
        # an inference tensor does not count its writes
        self.tensors = [t for t in self.fields if isinstance(t, torch.Tensor) and not t.is_inference()]
        self.versions = [t._version for t in self.tensors]

    def holds(self, metadata: AttentionMetadata) -> bool:
        """Whether it is all the same."""
        same = all(map(is_, _FIELDS(metadata), self.fields))
        return same and [t._version for t in self.tensors] == self.versions


class _Check:
    """One pass over a metadata object. Each method checks one kind of thing and keeps what it read."""

    def __init__(
        self,
        metadata: AttentionMetadata,
        attn_type: str,
        num_query_rows: int,
        num_key_rows: int | None,
        num_blocks: int,
        block_size: int,
    ) -> None:
        self.watch = Watch(metadata)  # before anything is read: what is written meanwhile shows
        self.metadata, self.attn_type = metadata, attn_type
        self.num_query_rows, self.num_key_rows = num_query_rows, num_key_rows
        self.num_blocks, self.block_size = num_blocks, block_size

    def step(self) -> Step:
        """Run every check that the kind of attention calls for."""
        self._forms()
        starts, seq_lens, context_lens = self._lengths()
        self._counts(starts, seq_lens)
        kind = AttentionType(self.attn_type)
        if kind is AttentionType.ENCODER:
            return self._encoder()
        if kind is AttentionType.ENCODER_DECODER:
            return self._cross(starts)
        self._rows("query", self.num_query_rows, starts[-1])
        cached = kind is AttentionType.DECODER and self.num_blocks > 0
        if not cached:
            self._no_context(context_lens, kind)
            return self._flat(starts, seq_lens, causal=kind is AttentionType.DECODER)
        return self._paged(starts, seq_lens, context_lens)

    def _fail(self, message: str, sequence: int | None = None) -> NoReturn:
        where = "" if sequence is None else f"sequence {sequence}: "
        raise MetadataError(f"{where}{message}")

    def _forms(self) -> None:
        for name, dtype in _TENSORS.items():
            self._form(name, dtype, getattr(self.metadata, name))
        for name in (*_NUMBERS, *_OPTIONAL_NUMBERS):
            self._number(name, getattr(self.metadata, name))
        seqs = len(self.metadata.seq_lens)
        lengths = {"query_start_loc": seqs + 1, "context_lens": seqs, "block_tables": seqs, "cross_block_tables": seqs}
        for name, length in (lengths | {"encoder_seq_lens": seqs}).items():
            tensor = getattr(self.metadata, name)
            if tensor is not None and len(tensor) != length:
                self._fail(f"{name} has {len(tensor)} rows, but seq_lens speaks of {seqs} sequences: {length} expected")

    def _form(self, name: str, dtype: torch.dtype, tensor: Any) -> None:
        if tensor is None and name in _OPTIONAL:
            return
        dims = 2 if name.endswith("block_tables") else 1
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tensor.dim() != dims:
            is_tensor = isinstance(tensor, torch.Tensor)
            got = f"{tensor.dtype} {list(tensor.shape)}" if is_tensor else " ".join(repr(tensor).split())
            self._fail(f"{name} is {got}; it must be {str(dtype).removeprefix('torch.')} with {dims} dimension(s)")
        if tensor.is_meta or tensor.layout != torch.strided:
            self._fail(f"{name} is {tensor.layout} on {tensor.device}; give a dense tensor that holds its numbers")

    def _number(self, name: str, value: Any) -> None:
        if value is None and name in _OPTIONAL_NUMBERS:
            return
        try:
            index(value)
        except (TypeError, RuntimeError):  # a tensor on meta holds no number
            self._fail(f"{name} is {value!r}; give a whole number")

    def _lengths(self) -> tuple[list[int], list[int], list[int]]:
        starts = self.metadata.query_start_loc.tolist()
        seq_lens, context_lens = self.metadata.seq_lens.tolist(), self.metadata.context_lens.tolist()
        if starts[0] != 0:
            self._fail(f"query_start_loc begins at {starts[0]}; it must begin at 0")
        for i, (seq_len, context_len) in enumerate(zip(seq_lens, context_lens, strict=True)):
            query_len = starts[i + 1] - starts[i]
            if query_len < 0:
                self._fail(f"query_start_loc falls from {starts[i]} to {starts[i + 1]}; it must never fall", i)
            if context_len < 0 or seq_len < 0:
                self._fail(f"seq_len {seq_len} and context_len {context_len}; neither may be negative", i)
            if seq_len != context_len + query_len:
                sides = f"seq_len {seq_len} is not context_len {context_len} + query_len {query_len}"
                self._fail(f"{sides}; the three must agree", i)
        return starts, seq_lens, context_lens

    def _counts(self, starts: list[int], seq_lens: list[int]) -> None:
        m, seqs = self.metadata, len(seq_lens)
        if m.num_prefills < 0 or m.num_decodes < 0 or m.num_prefills + m.num_decodes > seqs:
            self._fail(f"num_prefills {m.num_prefills} and num_decodes {m.num_decodes}, but there are {seqs} sequences")
        for i in range(m.num_prefills + m.num_decodes, seqs):
            if seq_lens[i]:
                counted = f"num_prefills {m.num_prefills} + num_decodes {m.num_decodes}"
                self._fail(f"seq_len {seq_lens[i]} past the {counted} counted sequences; padding has seq_len 0", i)
        middle = starts[m.num_prefills]
        tokens = {"num_prefill_tokens": middle, "num_decode_tokens": starts[-1] - middle}
        for name, real in tokens.items():
            if getattr(m, name) != real:
                self._fail(f"{name} is {getattr(m, name)}, but query_start_loc gives {real}")
        longest = max((b - a for a, b in pairwise(starts)), default=0)
        for name, real in (("max_query_len", longest), ("max_seq_len", max(seq_lens, default=0))):
            if getattr(m, name) < real:
                self._fail(f"{name} is {getattr(m, name)}, but a sequence has {real}")

    def _rows(self, name: str, rows: int, needed: int) -> None:
        if rows < needed:
            self._fail(f"{name} has {rows} rows, but the sequences need {needed}")

    def _no_context(self, context_lens: list[int], kind: AttentionType) -> None:
        why = "encoder-only attention has no cache" if kind is AttentionType.ENCODER_ONLY else "the KV cache is empty"
        for i, context_len in enumerate(context_lens):
            if context_len:
                self._fail(f"context_len {context_len}, but {why}, so there is no context to read", i)
        if kind is AttentionType.ENCODER_ONLY and self.metadata.num_decode_tokens:
            self._fail(f"num_decodes {self.metadata.num_decodes}: encoder-only attention is one prefill a sequence")

    def _flat(self, starts: list[int], key_lens: list[int], *, causal: bool) -> Step:
        if self.num_key_rows is None:
            self._fail("key and value are None, but there is no cache to read them from")
        self._rows("key", self.num_key_rows, sum(key_lens))
        nothing = torch.empty(0, dtype=torch.int64)
        fresh = (True,) * len(key_lens)
        prefills = self.metadata.num_prefills
        sizes = (tuple(starts), tuple(key_lens), prefills, causal, None, 0)
        return Step(*sizes, nothing, nothing, None, fresh, self.watch)

    def _encoder(self) -> Step:
        lengths = self._encoder_lens()
        tokens = self.metadata.num_encoder_tokens
        running = lengths if tokens == sum(lengths) else lengths[: self.metadata.num_prefills]
        if tokens != sum(running):
            self._fail(f"num_encoder_tokens is {tokens}, but encoder_seq_lens add up to {sum(lengths)}")
        self._rows("query", self.num_query_rows, sum(running))
        starts = [0]
        for length in running:
            starts.append(starts[-1] + length)
        return self._flat(starts, running, causal=False)

    def _encoder_lens(self) -> list[int]:
        if self.metadata.encoder_seq_lens is None:
            self._fail(f"encoder_seq_lens is None; {self.attn_type} attention needs it")
        lengths: list[int] = self.metadata.encoder_seq_lens.tolist()
        for i, length in enumerate(lengths):
            if length < 0:
                self._fail(f"encoder_seq_len {length}; it may not be negative", i)
        longest = self.metadata.max_encoder_seq_len
        if longest is not None and longest < max(lengths, default=0):
            self._fail(f"max_encoder_seq_len is {longest}, but a sequence has {max(lengths)}")
        return lengths

    def _cross(self, starts: list[int]) -> Step:
        lengths = self._encoder_lens()
        self._rows("query", self.num_query_rows, starts[-1])
        if not self.num_blocks:
            return self._flat(starts, lengths, causal=False)
        if self.metadata.cross_block_tables is None:
            self._fail("cross_block_tables is None; encoder_decoder attention reads the encoder's keys through it")
        tables = self._tables(self.metadata.cross_block_tables, lengths, "cross_block_tables")
        if self.num_key_rows is None:
            slots = torch.empty(0, dtype=torch.int64)
        else:
            slots = self._slots("cross_slot_mapping", self.metadata.cross_slot_mapping, self.num_key_rows)
        wanted, owners = self._homes(tables, [0] * len(lengths), lengths)
        return self._write(tuple(starts), lengths, tables, slots, wanted, owners, causal=False)

    def _paged(self, starts: list[int], seq_lens: list[int], context_lens: list[int]) -> Step:
        if self.num_key_rows is None:
            self._fail("key and value are None; only encoder_decoder attention finds them in the cache already")
        tables = self._tables(self.metadata.block_tables, seq_lens, "block_tables")
        slots = self._slots("slot_mapping", self.metadata.slot_mapping, self.num_key_rows)
        self._rows("slot_mapping", len(slots), starts[-1])
        wanted, owners = self._homes(tables, context_lens, seq_lens)
        return self._write(tuple(starts), seq_lens, tables, slots, wanted, owners, causal=True)

    def _slots(self, name: str, slots: torch.Tensor | None, rows: int) -> torch.Tensor:
        if slots is None or len(slots) != rows:
            got = None if slots is None else len(slots)
            self._fail(
                f"{name} has {got} entries, but key has {rows} rows; give one a row, negative where none is written"
            )
        return slots.cpu()

    def _tables(self, tables: torch.Tensor, lengths: list[int], name: str) -> torch.Tensor:
        """int64 [seqs, most pages in use]; entries that no key needs are 0."""
        pages = [-(-length // self.block_size) for length in lengths]
        for i, count in enumerate(pages):
            if count > tables.shape[1]:
                need = f"{lengths[i]} keys in blocks of {self.block_size} need {count}"
                self._fail(f"{name} has {tables.shape[1]} entries, but {need}", i)
        width = max(pages, default=0)
        found = tables[:, :width].cpu().long()
        used = torch.arange(width) < torch.tensor(pages, dtype=torch.int64)[:, None]
        outside = used & ((found < 0) | (found >= self.num_blocks))
        if outside.any():
            i, j = (int(x) for x in outside.nonzero()[0])
            self._fail(f"{name}[{j}] is block {int(found[i, j])}, outside the cache of {self.num_blocks} blocks", i)
        self._no_cycle(torch.where(used, found, -1 - torch.arange(width)), name)
        return torch.where(used, found, 0)

    def _no_cycle(self, tables: torch.Tensor, name: str) -> None:
        ordered = tables.sort(dim=1).values
        again = ordered[:, 1:] == ordered[:, :-1]
        if again.any():
            i, j = (int(x) for x in again.nonzero()[0])
            self._fail(f"{name} names block {int(ordered[i, j])} twice; a block holds one part of a sequence", i)

    def _homes(self, tables: torch.Tensor, first: list[int], last: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The slot that each new key belongs to, and whose it is, flat over the sequences."""
        begin, end = torch.tensor(first, dtype=torch.int64), torch.tensor(last, dtype=torch.int64)
        counts = end - begin
        owners = torch.repeat_interleave(torch.arange(len(first)), counts)
        offset = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
        position = begin[owners] + offset
        return tables[owners, position // self.block_size] * self.block_size + position % self.block_size, owners

    def _write(
        self,
        starts: tuple[int, ...],
        key_lens: list[int],
        tables: torch.Tensor,
        slots: torch.Tensor,
        wanted: torch.Tensor,
        owners: torch.Tensor,
        *,
        causal: bool,
    ) -> Step:
        written = slots >= 0
        self._right_slots(slots, written, wanted, owners)
        rows = None if bool(written[: int(written.sum())].all()) else written.nonzero()[:, 0]
        chosen = slots[written]
        fresh = self._fresh(written, owners, starts, key_lens) if causal else (False,) * len(key_lens)
        blocks, offsets = chosen // self.block_size, chosen % self.block_size
        return Step(
            starts,
            tuple(key_lens),
            self.metadata.num_prefills,
            causal,
            tables,
            self.block_size,
            blocks,
            offsets,
            rows,
            fresh,
            self.watch,
        )

    def _right_slots(
        self, slots: torch.Tensor, written: torch.Tensor, wanted: torch.Tensor, owners: torch.Tensor
    ) -> None:
        known = min(len(slots), len(wanted))
        wrong = written.clone()
        wrong[:known] &= slots[:known] != wanted[:known]
        if wrong.any():
            row = int(wrong.nonzero()[0])
            if row >= known:
                self._fail(f"row {row} is padding, but it has slot {int(slots[row])}; padding has slot -1")
            why = f"its block table puts that token in slot {int(wanted[row])}"
            self._fail(f"row {row} has slot {int(slots[row])}, but {why}", int(owners[row]))
        ordered, order = slots[written].sort(stable=True)
        twice = ordered[1:] == ordered[:-1]
        if twice.any():
            at = int(twice.nonzero()[0])
            row = int(written.nonzero()[order[at + 1], 0])
            self._fail(f"slot {int(ordered[at])} is written twice in a step (again in row {row})", int(owners[row]))

    def _fresh(
        self, written: torch.Tensor, owners: torch.Tensor, starts: tuple[int, ...], key_lens: list[int]
    ) -> tuple[bool, ...]:
        skipped = set(owners[~written[: len(owners)]].tolist())
        return tuple(starts[i + 1] - starts[i] == length and i not in skipped for i, length in enumerate(key_lens))
