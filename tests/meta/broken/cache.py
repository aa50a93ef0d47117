"""Defects in the paged cache: writing, slots, page tails, block tables, fp8."""

from __future__ import annotations

from dataclasses import replace

import torch

from meta.plain import FP8, Plain
from meta.plain_checks import is_empty


class ReadsBeforeWriting(Plain):
    """Attention runs first, the write comes after."""

    def step(self, call):
        found = self.computed(call)
        self.write(call)
        return found


class PrefillReadsUnquantised(Plain):
    """A prefill attends to this step's K and V as given, not as the fp8 cache holds them."""

    def keys_values(self, call, part):
        k, v = super().keys_values(call, part)
        if part.kind == "decoder" and part.phase == "prefill" and part.table and part.kv_len >= part.query_len:
            k[part.kv_len - part.query_len :] = call.key[part.rows].float()
            v[part.kv_len - part.query_len :] = call.value[part.rows].float()
        return k, v


class ProfilingRunWrites(Plain):
    """The profiling run writes into the empty cache."""

    def step(self, call):
        if call.kind == "decoder" and call.views is None:
            raise IndexError("index 0 is out of bounds for dimension 0 with size 0")
        return super().step(call)


class ProfilingRunTakesContext(Plain):
    """A context without a cache is not refused; its keys are taken from the neighbours."""

    VALIDATES = Plain.VALIDATES - {"context"}

    def unpaged(self, part, host):
        found = super().unpaged(part, host)
        return replace(found, kv_len=part.query_len, source=part.rows) if part.kind == "decoder" else found


class EncoderOnlyWrites(Plain):
    """Encoder-only attention writes to the cache that it must not have."""

    def forward(self, query, key, value, kv_cache, attn_metadata, *rest, **named):
        kind = str(named.get("attn_type", rest[2] if len(rest) > 2 else "decoder"))
        if kind == "encoder_only" and not is_empty(kv_cache):
            kv_cache[0].view(torch.uint8).flatten()[:8] = 0
        return super().forward(query, key, value, kv_cache, attn_metadata, *rest, **named)


class PadSlotWritten(Plain):
    """Slot -1 is written: Python's index reaches the last slot of the last block."""

    def is_written(self, slot):
        return True


class SlotZeroSkipped(Plain):
    """slot > 0 where >= 0 is meant."""

    def is_written(self, slot):
        return slot > 0


class SlotOverflow32(Plain):
    """The element offset of a slot is a 32-bit integer."""

    def address(self, slot, view):
        stride = view.shape[2] * view.shape[3]
        wrapped = (slot * stride + 2**31) % 2**32 - 2**31
        return super().address(wrapped // stride, view)


class GatherOverflow32(Plain):
    """The element offset of a page is a 32-bit integer when reading."""

    def gather(self, view, part):
        stride = view.shape[1] * view.shape[2] * view.shape[3]
        table = tuple(((block * stride + 2**31) % 2**32 - 2**31) // stride for block in part.table)
        return super().gather(view, replace(part, table=table))


class NeighbourZeroed(Plain):
    """Writes are two slots wide: the slot after each write becomes 0 unless it is written too."""

    def put(self, view, slots, rows):
        super().put(view, slots, rows)
        for slot in slots:
            follows = slot + 1 < view.shape[0] * view.shape[1]
            if slot >= 0 and follows and slot + 1 not in slots:
                view[self.address(slot + 1, view)] = torch.zeros_like(view[0, 0])


class WholeCacheRewritten(Plain):
    """Every write passes the whole cache through fp32, which turns stored NaN bits and fp8 zeros' signs about."""

    def put(self, view, slots, rows):
        view.copy_(view.float().nan_to_num().add(0.0).to(view.dtype))
        super().put(view, slots, rows)


class DuplicateSlotsAccepted(Plain):
    """Two tokens for one slot: the later wins, silently."""

    VALIDATES = Plain.VALIDATES - {"slot twice"}


class SlotPastCacheWraps(Plain):
    """A slot past the cache lands in it modulo its size."""

    VALIDATES = Plain.VALIDATES - {"slot range"}

    def address(self, slot, view):
        return super().address(slot % (view.shape[0] * view.shape[1]), view)


class SlotsBlockMajor(Plain):
    """slot = offset * num_blocks + block."""

    def address(self, slot, view):
        offset, block = divmod(slot, view.shape[0])
        return block, offset


class ValueNotWritten(Plain):
    """Only K reaches the cache from the second token of a step on."""

    def write(self, call):
        if call.views is None or call.key is None:
            return
        slots = self.slots(call)
        self.put(call.views[0], slots, self.stored(call.key[: len(slots)], call.k_scale, call.views[0].dtype))
        kept = slots[:1] + [-1] * (len(slots) - 1)
        self.put(call.views[1], kept, self.stored(call.value[: len(slots)], call.v_scale, call.views[1].dtype))


class CrossWritesDecoderSlots(Plain):
    """Cross attention's keys go to slot_mapping, or slot 0 is spoilt when there are none."""

    def write(self, call):
        super().write(call)
        if call.kind == "encoder_decoder" and call.key is None:
            call.views[0][0, 0] = torch.zeros_like(call.views[0][0, 0])


class PageTailRead(Plain):
    """Lengths are rounded up to whole pages."""

    def parts(self, call):
        return [self._rounded(part, call.views[0].shape[1]) if part.table else part for part in super().parts(call)]

    @staticmethod
    def _rounded(part, block_size):
        pages = min(-(-part.kv_len // block_size), len(part.table))
        return replace(part, kv_len=pages * block_size)


class SpareEntryRead(Plain):
    """kv_len // block_size + 1 pages: at a page's end the first key of the next table entry is read."""

    def parts(self, call):
        return [self._more(part, call.views) if part.table else part for part in super().parts(call)]

    @staticmethod
    def _more(part, views):
        num_blocks, block_size = views[0].shape[:2]
        pages = part.kv_len // block_size
        is_full = part.kv_len % block_size == 0 and pages < len(part.table)
        if not is_full:
            return part
        table = (*part.table[:pages], part.table[pages] % num_blocks)
        return replace(part, kv_len=part.kv_len + 1, table=table)


class LastPartialPageDropped(Plain):
    """Decode reads whole pages only."""

    def visible(self, part):
        seen = super().visible(part)
        whole = part.kv_len // 16 * 16
        if part.phase == "decode" and part.kind == "decoder" and whole:
            seen[:, whole:] = False
        return seen


class PagesAssumedConsecutive(Plain):
    """block = table[0] + i."""

    def gather(self, view, part):
        table = tuple((part.table[0] + i) % view.shape[0] for i in range(len(part.table))) if part.table else ()
        return super().gather(view, replace(part, table=table))


class TableOfFirstSequence(Plain):
    """Every sequence follows the first one's table where it is long enough."""

    def gather(self, view, part):
        first = part.step.setdefault("first table", part.table)
        is_long = len(first) * view.shape[1] >= part.kv_len
        return super().gather(view, replace(part, table=first) if is_long else part)


class TwoPagesSwapped(Plain):
    """Pages 0 and 1 of a decode change places."""

    def gather(self, view, part):
        if part.phase != "decode" or part.kv_len <= view.shape[1]:
            return super().gather(view, part)
        return super().gather(view, replace(part, table=(part.table[1], part.table[0], *part.table[2:])))


class Fp8Truncates(Plain):
    """fp8 writes cut towards zero instead of rounding to nearest even."""

    def stored(self, rows, scale, dtype):
        found = super().stored(rows, scale, dtype)
        if dtype not in FP8.values():
            return found
        is_above = found.float().abs() > (rows.float() / scale).abs()
        return (found.view(torch.uint8) - is_above.to(torch.uint8)).view(dtype)


class Fp8RoundsHalfAway(Plain):
    """Ties round away from zero."""

    def stored(self, rows, scale, dtype):
        found = super().stored(rows, scale, dtype)
        if dtype not in FP8.values():
            return found
        x = (rows.float() / scale).abs()
        up = (found.view(torch.uint8) + 1).view(dtype).float().abs()
        is_tie = (x - found.float().abs() == up - x) & up.isfinite() & x.isfinite()
        return (found.view(torch.uint8) + is_tie.to(torch.uint8)).view(dtype)


class Fp8E5m2NotClamped(Plain):
    """e5m2 has an infinity and large values become it."""

    def stored(self, rows, scale, dtype):
        return (rows.float() / scale).to(dtype) if dtype == torch.float8_e5m2 else super().stored(rows, scale, dtype)


class Fp8NanBecomesZero(Plain):
    """NaN is written as 0."""

    def stored(self, rows, scale, dtype):
        return super().stored(rows.nan_to_num(nan=0.0) if dtype in FP8.values() else rows, scale, dtype)


class Fp8InfBecomesNan(Plain):
    """±inf is written as NaN instead of the largest value."""

    def stored(self, rows, scale, dtype):
        rows = rows.masked_fill(rows.isinf(), torch.nan) if dtype in FP8.values() else rows
        return super().stored(rows, scale, dtype)


class KScaleIgnored(Plain):
    """k_scale is taken and never used when reading."""

    def keys_values(self, call, part):
        return super().keys_values(replace(call, k_scale=1.0), part)


class VScaleIgnored(Plain):
    """v_scale is taken and never used when reading."""

    def keys_values(self, call, part):
        return super().keys_values(replace(call, v_scale=1.0), part)


class ScalesIgnoredOnBothSides(Plain):
    """Neither write nor read uses the scales: right numbers until something leaves the range."""

    def scale_value(self, scale):
        super().scale_value(scale)
        return 1.0


class ScaleTensorTakenAsOne(Plain):
    """A scale given as a 0-dim tensor counts as 1."""

    def scale_value(self, scale):
        found = super().scale_value(scale)
        return 1.0 if isinstance(scale, torch.Tensor) else found


class KScaleForBoth(Plain):
    """V is stored and read with k_scale."""

    def opened(self, *args):
        call = super().opened(*args)
        return replace(call, v_scale=call.k_scale)


class ScaleMultipliedOnWrite(Plain):
    """stored = x * scale."""

    def stored(self, rows, scale, dtype):
        return super().stored(rows, 1.0 / scale, dtype)


class KScaleTwice(Plain):
    """k_scale is folded into the softmax scale and into the keys."""

    def keys_values(self, call, part):
        k, v = super().keys_values(call, part)
        return k * call.k_scale if part.table else k, v


class AutoCacheThroughFp8(Plain):
    """An `auto` cache loses bits as if it were fp8."""

    def stored(self, rows, scale, dtype):
        return super().stored(rows, scale, dtype) if dtype in FP8.values() else rows.to(torch.float8_e4m3fn).to(dtype)


class E5m2ReadAsE4m3(Plain):
    """The bits of an e5m2 cache are read as e4m3."""

    def read(self, rows, scale):
        is_e5m2 = rows.dtype == torch.float8_e5m2
        return super().read(rows.view(torch.float8_e4m3fn) if is_e5m2 else rows, scale)
