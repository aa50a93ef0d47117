"""Defects in metadata, re-entrancy, mixed batches and block copies."""

from __future__ import annotations

from dataclasses import replace

import torch

from meta.plain import Plain
from meta.plain_checks import ALL


class NothingValidated(Plain):
    """Metadata is trusted: bad tables and slots are wrapped into the cache."""

    VALIDATES = frozenset()

    def gather(self, view, part):
        pages = -(-part.kv_len // view.shape[1])
        table = tuple(block % view.shape[0] for block in (*part.table, *[0] * pages))
        return super().gather(view, replace(part, table=table))

    def address(self, slot, view):
        return super().address(slot % (view.shape[0] * view.shape[1]), view)


class BlocksOutOfRangeWrap(Plain):
    """A block number past the cache is taken modulo its size."""

    VALIDATES = ALL - {"block range"}

    def gather(self, view, part):
        pages = -(-part.kv_len // view.shape[1])
        table = tuple(block % view.shape[0] for block in (*part.table, *[0] * pages))
        return super().gather(view, replace(part, table=table))


class CyclicTableAccepted(Plain):
    """One block twice in a sequence's table is not noticed."""

    VALIDATES = ALL - {"block twice"}


class LengthsNotChecked(Plain):
    """seq_len that is not context_len + query_len is not noticed."""

    VALIDATES = ALL - {"lengths"}


class CountsNotChecked(Plain):
    """num_prefills and num_decodes that do not describe the batch are not noticed."""

    VALIDATES = ALL - {"counts"}


class MaskKeptInMetadata(Plain):
    """The first layer's mask serves every layer of the step (vLLM 0.6.3, "FIXME: This is a hack")."""

    def visible(self, part):
        found = part.step.setdefault(("mask", part.kind, part.index), super().visible(part))
        return found if found.shape == (part.query_len, part.kv_len) else super().visible(part)


class BiasKeptInMetadata(Plain):
    """The first layer's ALiBi bias serves every layer of the step."""

    def bias(self, part):
        found = part.step.setdefault(("bias", part.index), super().bias(part))
        return found if found.shape[1:] == (part.query_len, part.kv_len) else super().bias(part)


class TablesKeptOnImpl(Plain):
    """The first step's block tables serve every later step of the layer."""

    def table(self, host, kind, i):
        kept = self.__dict__.setdefault("kept", {})
        now = super().table(host, kind, i)
        first = kept.setdefault((kind, i), now)
        return first if len(first) >= len(now) else now


class AnswerKeptOnImpl(Plain):
    """The answer is a buffer of the layer: the next call overwrites it."""

    def target(self, output, query):
        if output is not None:
            return super().target(output, query)
        buffers = self.__dict__.setdefault("buffers", {})
        return buffers.setdefault((tuple(query.shape), query.dtype), super().target(None, query))


class ScalesKeptOnImpl(Plain):
    """The first call's k_scale serves every later call."""

    def opened(self, *args):
        call = super().opened(*args)
        return replace(call, k_scale=self.__dict__.setdefault("k_scale", call.k_scale))


class MixedBatchRefused(Plain):
    """Prefills and decodes in one batch are not taken (vLLM 0.6.3, four backends assert)."""

    def opened(self, query, key, value, kv_cache, metadata, *rest):
        assert not (metadata.num_prefills and metadata.num_decodes)
        return super().opened(query, key, value, kv_cache, metadata, *rest)


class DecodesOfMixedBatchLeftOut(Plain):
    """In a mixed batch only the prefills are computed."""

    def parts(self, call):
        found = super().parts(call)
        is_mixed = len({part.phase for part in found}) == 2
        return [part for part in found if not is_mixed or part.phase == "prefill"]


class DecodeTablesFromStart(Plain):
    """The decodes of a mixed batch read block_tables from row 0."""

    def parts(self, call):
        shift = call.host.num_prefills
        return [self._shifted(part, call, shift) if part.phase == "decode" else part for part in super().parts(call)]

    def _shifted(self, part, call, shift):
        table = self.table(call.host, part.kind, part.index - shift)
        is_long = call.views is not None and len(table) * call.views[0].shape[1] >= part.kv_len
        return replace(part, table=table) if is_long else part


class SequencesSeeEachOther(Plain):
    """Without a cache the keys of all earlier sequences are visible (no block-diagonal mask)."""

    def unpaged(self, part, host):
        found = super().unpaged(part, host)
        return replace(found, kv_len=found.source.stop, source=slice(0, found.source.stop))


class EmptySequenceShiftsTables(Plain):
    """Sequences without tokens are dropped before block_tables is indexed."""

    def parts(self, call):
        found = super().parts(call)
        moved = [replace(p, table=self.table(call.host, p.kind, i)) if p.table else p for i, p in enumerate(found)]
        size = call.views[0].shape[1] if call.views is not None else 0
        return [m if len(m.table) * size >= m.kv_len else p for m, p in zip(moved, found, strict=True)]


class EmptyBatchCrashes(Plain):
    """A step without tokens divides by zero."""

    def opened(self, query, *rest):
        return super().opened(query, *rest) if query.shape[0] else 1 // 0


class ChunkReadsCacheBeforeStep(Plain):
    """A chunk's own keys are hidden: only the context is attended to."""

    def visible(self, part):
        seen = super().visible(part)
        start = part.kv_len - part.query_len
        if part.kind == "decoder" and part.phase == "prefill" and start:
            seen[:, start:] = False
        return seen


class CopyBlocksOffByOne(Plain):
    """The source is the block after."""

    @classmethod
    def copy_blocks(cls, caches, pairs):
        super().copy_blocks(caches, pairs)
        for cache in caches:
            for part in cache:
                for source, target in pairs.tolist():
                    part[target] = part[(source + 1) % part.shape[0]]


class CopyBlocksFirstLayerOnly(Plain):
    """Only the first layer's cache is copied."""

    @classmethod
    def copy_blocks(cls, caches, pairs):
        super().copy_blocks(caches[:1], pairs)


class CopyBlocksKeysOnly(Plain):
    """copy_blocks leaves V."""

    @classmethod
    def copy_blocks(cls, caches, pairs):
        super().copy_blocks([(cache[0], cache[1].clone()) for cache in caches], pairs)


class CopyBlocksFirstPairOnly(Plain):
    """Only the first pair is copied."""

    @classmethod
    def copy_blocks(cls, caches, pairs):
        super().copy_blocks(caches, pairs[:1])


class CopyBlocksChainAccepted(Plain):
    """A block both source and destination is copied in list order."""

    @classmethod
    def copy_blocks(cls, caches, pairs):
        for row in pairs:
            super().copy_blocks(caches, row[None])


class SwapBlocksKeysOnly(Plain):
    """swap_blocks leaves V."""

    @classmethod
    def swap_blocks(cls, src, dst, pairs):
        super().swap_blocks(src, (dst[0], dst[1].clone()), pairs)


class SwapBlocksReversed(Plain):
    """Source and destination of each pair are exchanged."""

    @classmethod
    def swap_blocks(cls, src, dst, pairs):
        super().swap_blocks(src, dst, pairs.flip(1))


class SwapBlocksWholeCache(Plain):
    """The whole source cache is copied over the destination."""

    @classmethod
    def swap_blocks(cls, src, dst, pairs):
        super().swap_blocks(src, dst, pairs)
        count = min(src[0].shape[0], dst[0].shape[0])
        everything = torch.arange(count)[:, None].expand(count, 2).contiguous()
        super().swap_blocks(src, dst, everything)
