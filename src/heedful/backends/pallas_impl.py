"""A layer of PALLAS: how a step is cut into tiles of queries, and what of torch's memory the kernel reads.

Sizes that change from step to step are rounded up (see ``bucket``), so that a kernel is compiled a few times and not
for every length. On a machine without a TPU the kernel runs in Pallas' interpreter, on the very memory of the cache.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
import torch

from heedful.backends.paged_impl import Call, PagedImpl
from heedful.backends.pallas import PallasBackend
from heedful.errors import BadInputError
from heedful.kernels.pallas.attention import NO_WINDOW, Form, Rules, Tiles, attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from heedful.backends.paged import Step

TILE_QUERIES: Final = (1, 16, 64)
"""Queries a tile: the smallest that holds every sequence's queries; at most the second where there are decodes."""
TILE_ROWS: Final = 1024
"""Most rows (queries x heads of a group) of a tile: what fits beside the pages in a TPU core's memory."""
FETCHED_KEYS: Final = 128
"""Keys that a buffer holds where pages are smaller than that."""
SCRATCH_PAGE: Final = 32
"""Tokens a page where keys come without a cache."""
LANES: Final = 128
"""Of a TPU's vectors. XLA lays narrower pages out in another order, and would turn a cache round in every call."""
ALIGNMENT: Final = 64
"""Bytes; XLA copies whatever does not begin at a multiple."""

_LOG = logging.getLogger("heedful")


def bucket(count: int, least: int = 8) -> int:
    """The next power of two, at least ``least``: tiles, sequences, pages of a table and scratch pages come in these."""
    return max(least, 1 << max(count - 1, 0).bit_length())


def lanes(size: int) -> int:
    """The head size that the kernel computes with: whole vectors on a TPU, as it is in the interpreter."""
    return -(-size // LANES) * LANES if on_tpu() else size


def pages_in_flight(block_size: int) -> int:
    """Pages that one buffer holds."""
    return max(1, FETCHED_KEYS // block_size)


class PallasImpl(PagedImpl):
    """See AttentionImpl."""

    backend = PallasBackend

    def __init__(self, *args: Any, **options: Any) -> None:
        """See AttentionImpl."""
        super().__init__(*args, **options)
        sinks = np.full(self.num_heads, -np.inf, np.float32) if self.sinks is None else self.sinks.cpu().numpy()
        window = NO_WINDOW if self.sliding_window is None else min(self.sliding_window, NO_WINDOW)
        self._rules = Rules(
            np.array([self.scale, self.logits_soft_cap or 0.0], np.float32),
            np.array([window], np.int32),
            sinks,
            None if self.alibi_slopes is None else self.alibi_slopes.cpu().numpy(),
        )

    def attend(self, call: Call) -> None:
        """See PagedImpl: one launch for all sequences."""
        if call.query.device.type != "cpu":
            raise BadInputError(f"PALLAS reads host memory, but query is on {call.query.device}; move it to the CPU")
        tokens = call.step.num_tokens
        if not tokens:
            return
        layout = self._layout(call)
        keys, values, tables = self._pages(call)
        query = call.query.detach().index_select(0, layout.rows).view(*layout.shape, self.num_heads, -1)
        form = self._form(call, pages_in_flight(keys.shape[2]))
        tiles = layout.tiles(tables, form.fetch)
        output, lse = attention(form, tiles, self._rules, _query(query), keys, values)
        call.output[:tokens] = _to_torch(output).flatten(0, 1).index_select(0, layout.places)[..., : self.head_size_v]
        if call.lse is not None:
            assert lse is not None
            call.lse[:tokens] = _to_torch(lse).flatten(0, 1).index_select(0, layout.places)

    def _form(self, call: Call, fetch: int) -> Form:
        interpret = interpreted()
        return Form(
            causal=call.step.causal,
            capped=self.logits_soft_cap is not None,
            fetch=fetch,
            lse=call.lse is not None or interpret is not False,  # one kernel for both where nothing is to be saved
            interpret=interpret,
        )

    def _layout(self, call: Call) -> _Layout:
        """Worked out by the first layer of a step that has as many query heads a KV head."""
        queries = tile_queries(call.step, self.group)
        key = ("pallas", queries)
        if key not in call.step.derived:
            call.step.derived[key] = _Layout.of(call.step, queries)
        found: _Layout = call.step.derived[key]
        return found

    def _pages(self, call: Call) -> tuple[jax.Array, jax.Array, Tensor]:
        """(K pages, V pages, tables into them): the cache itself where the kernel can read it, else a copy."""
        if call.views is None:
            assert call.key is not None
            assert call.value is not None
            tables, slots, count = _scratch_tables(call.step)
            key, value = (_scratch(x.detach(), slots, count) for x in (call.key, call.value))
            return _array(key), _array(value), tables
        assert call.step.tables is not None
        pages = [view.detach().transpose(1, 2) for view in call.views]
        if why := _why_copy(pages):
            _tell_once(f"PALLAS: the pages of each step are copied, because {why}")
            blocks, tables = _compact(call.step.tables)
            return _array(pages[0][blocks]), _array(pages[1][blocks]), tables
        return _array(pages[0]), _array(pages[1]), call.step.tables


def tile_queries(step: Step, group: int) -> int:
    """Queries a tile of this step holds; a decode would leave most of a large tile empty."""
    decodes = len(step.key_lens) > step.num_prefills
    fitting = [q for q in TILE_QUERIES[: 2 if decodes else 3] if q * group <= TILE_ROWS] or [1]
    longest = max(step.query_lens, default=1)
    return next((q for q in fitting if q >= longest), fitting[-1])


@dataclass(frozen=True)
class _Layout:
    """A step as tiles of ``queries`` rows. sequence, position, count int32 [N] as in Tiles, keys int32 [S] likewise.

    rows int64 [N * queries]: which query row stands where; places int64 [tokens]: where each query row stands.
    """

    queries: int
    sequence: np.ndarray
    position: np.ndarray
    count: np.ndarray
    keys: np.ndarray
    rows: Tensor
    places: Tensor

    @classmethod
    def of(cls, step: Step, queries: int) -> _Layout:
        """Tiles of one sequence after another; a tile's rows past its queries are row 0, whose answer is dropped."""
        starts = np.array(step.query_starts[:-1], np.int64)
        lengths, keys = np.array(step.query_lens, np.int64), np.array(step.key_lens, np.int64)
        tiles = -(-lengths // queries)
        sequence = np.repeat(np.arange(len(lengths)), tiles)
        offset = (np.arange(len(sequence)) - (tiles.cumsum() - tiles)[sequence]) * queries
        count = np.minimum(queries, lengths[sequence] - offset)
        within = np.arange(queries)
        real = within < count[:, None]
        rows = np.where(real, (starts[sequence] + offset)[:, None] + within, 0)
        size, seqs = bucket(len(sequence)), bucket(len(keys))
        position = (keys - lengths)[sequence] + offset
        places = torch.from_numpy(real.reshape(-1).nonzero()[0])
        spread = torch.from_numpy(np.concatenate([rows.reshape(-1), np.zeros((size - len(rows)) * queries, np.int64)]))
        of_tiles = (_padded(sequence, size), _padded(position, size), _padded(count, size))
        return cls(queries, *of_tiles, _padded(keys, seqs), spread, places)

    @property
    def shape(self) -> tuple[int, int]:
        """(tiles, queries a tile)."""
        return len(self.sequence), self.queries

    def tiles(self, tables: Tensor, fetch: int) -> Tiles:
        """With the block tables, int64 [sequences, pages]: a whole number of fetches wide, and of as many sequences."""
        width = fetch * bucket(-(-tables.shape[1] // fetch), 1)
        pages = np.zeros((len(self.keys), width), np.int32)
        pages[: tables.shape[0], : tables.shape[1]] = tables.numpy()
        return Tiles(self.sequence, self.position, self.count, self.keys, pages.reshape(-1))


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    found = np.zeros(size, np.int32)
    found[: len(values)] = values
    return found


@lru_cache(maxsize=1)
def on_tpu() -> bool:
    """Whether jax computes on a TPU; else the kernel is interpreted, and the log says so once."""
    found: bool = jax.default_backend() == "tpu"
    if not found:
        _tell_once("PALLAS: there is no TPU here, so its kernel runs in Pallas' interpreter, on the CPU")
    return found


def interpreted() -> Any:
    """Form.interpret on this machine."""
    return not on_tpu()


def _why_copy(pages: Sequence[Tensor]) -> str:
    """What keeps the kernel from reading the cache where it is; empty where nothing does."""
    if on_tpu():
        return "the cache is in host memory and the TPU reads its own"
    if not all(x.is_contiguous() for x in pages):
        return "they do not lie side by side in memory"
    if any(x.data_ptr() % ALIGNMENT for x in pages):
        return f"they do not begin at a multiple of {ALIGNMENT} bytes"
    return ""


def _compact(tables: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks that the tables name, as many as a bucket holds, and tables that name their places among them."""
    blocks, places = torch.unique(tables, return_inverse=True)
    spare = torch.zeros(bucket(len(blocks)) - len(blocks), dtype=torch.int64)
    return torch.cat([blocks, spare]), places


def _scratch_tables(step: Step) -> tuple[Tensor, Tensor, int]:
    """Pages for flat keys: (tables [seqs, pages], slot of each key row, number of pages); each sequence has its own."""
    lengths = torch.tensor(step.key_lens, dtype=torch.int64)
    counts = -(-lengths // SCRATCH_PAGE)
    firsts = counts.cumsum(0) - counts
    tables = firsts[:, None] + torch.arange(int(counts.max()))
    tables = torch.where(tables < (firsts + counts)[:, None], tables, 0)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    slots = torch.arange(len(owner)) - torch.tensor(step.key_starts[:-1])[owner] + firsts[owner] * SCRATCH_PAGE
    return tables, slots, bucket(int(counts.sum()))


def _scratch(x: Tensor, slots: Tensor, pages: int) -> Tensor:
    """The rows of x, [rows, KV, size], in pages [pages, KV, SCRATCH_PAGE, size]."""
    found = x.new_zeros(pages, x.shape[1], SCRATCH_PAGE, x.shape[2])
    found.transpose(1, 2)[slots // SCRATCH_PAGE, slots % SCRATCH_PAGE] = x[: len(slots)]
    return found


def _query(x: Tensor) -> jax.Array:
    """In fp32 where the kernel is interpreted: XLA has no quick bfloat16 on a CPU, and the products are the same."""
    return _array(x if on_tpu() else x.float())


def _array(x: Tensor) -> jax.Array:
    """Contiguous memory as jax sees it, without a copy; on a TPU a copy there. Interpreted, bfloat16 goes as bits."""
    if more := lanes(x.shape[-1]) - x.shape[-1]:
        x = torch.nn.functional.pad(x, (0, more))  # zeros change no score; those of V are cut off again
    if on_tpu():
        return jax.device_put(jax.dlpack.from_dlpack(x), jax.devices("tpu")[0])
    return jax.dlpack.from_dlpack(x.view(torch.int16) if x.dtype == torch.bfloat16 else x, copy=False)


def _to_torch(x: jax.Array) -> Tensor:
    """The array, when it is computed, as a torch tensor on the host."""
    here = jax.device_put(x, jax.devices("cpu")[0]) if on_tpu() else x
    return torch.utils.dlpack.from_dlpack(jax.block_until_ready(here))


@lru_cache(maxsize=64)
def _tell_once(message: str) -> None:
    _LOG.info("%s", message)
