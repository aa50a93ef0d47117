"""Defects in the form of a call: strides, padding rows, outputs, refusals."""

from __future__ import annotations

from dataclasses import replace

import torch

from heedful.backends.capabilities import listed
from meta import plain_checks as checks
from meta.plain import EVERYTHING, FP8, Plain


def as_if_contiguous(x):
    """What a kernel sees that takes a pointer and no strides."""
    strides = [1]
    for size in reversed(x.shape[1:]):
        strides.insert(0, strides[0] * size)
    return torch.as_strided(x, x.shape, strides, x.storage_offset())


class QueryAssumedContiguous(Plain):
    """query's strides are never read."""

    def opened(self, query, *rest):
        return super().opened(as_if_contiguous(query), *rest)


class KeyAssumedContiguous(Plain):
    """key's strides are never read (a slice of a fused QKV tensor)."""

    def opened(self, query, key, *rest):
        return super().opened(query, None if key is None else as_if_contiguous(key), *rest)


class ValueAssumedContiguous(Plain):
    """value's strides are never read."""

    def opened(self, query, key, value, *rest):
        return super().opened(query, key, None if value is None else as_if_contiguous(value), *rest)


class OutputAssumedContiguous(Plain):
    """output's strides are never read."""

    def answer(self, call, out, target):
        as_if_contiguous(target).copy_(out.reshape(target.shape))
        return target


class BlockTablesAssumedContiguous(Plain):
    """The row stride of block_tables is taken to be its width (a slice of the engine's larger table)."""

    def validated(self, metadata, *rest):
        tables = as_if_contiguous(metadata.block_tables)
        return super().validated(replace(metadata, block_tables=tables), *rest)


class PadRowsLeft(Plain):
    """Rows past the last sequence keep what stood in the output."""

    def answer(self, call, out, target):
        used = call.host.encoder_starts[-1] if call.kind == "encoder" else call.host.starts[-1]
        target[:used] = out.reshape(target.shape)[:used].to(target.dtype)
        return target

    def target(self, output, query):
        return super().target(output, query) if output is not None else super().target(None, query).fill_(7.0)


class PadRowsComputed(Plain):
    """Rows of padding repeat the last real row."""

    def answer(self, call, out, target):
        used = call.host.encoder_starts[-1] if call.kind == "encoder" else call.host.starts[-1]
        if 0 < used < out.shape[0]:
            out[used:] = out[used - 1]
        return super().answer(call, out, target)


class OutputNotFilled(Plain):
    """A fresh tensor is returned and `output` never filled."""

    def target(self, output, query):
        return super().target(None if output is None else torch.empty_like(output), query)


class OutputNotReturned(Plain):
    """`output` is filled and a copy returned."""

    def answer(self, call, out, target):
        return super().answer(call, out, target).clone()


class OutputAccumulated(Plain):
    """The result is added to what stood in `output`."""

    def answer(self, call, out, target):
        return target.add_(out.reshape(target.shape).to(target.dtype))

    def target(self, output, query):
        return super().target(output, query) if output is not None else super().target(None, query).zero_()


class OutputInFloat32(Plain):
    """Without `output` the answer comes in the accumulator's dtype."""

    def target(self, output, query):
        found = super().target(output, query)
        return found if output is not None else found.float()


class FlatAnsweredInThreeDims(Plain):
    """The flat form is taken and answered [tokens, heads, size]."""

    def answer(self, call, out, target):
        return super().answer(call, out, target).view(out.shape)


class FlatHeadsInterleaved(Plain):
    """The flat form is read [size, heads] instead of [heads, size]."""

    def opened(self, query, *rest):
        if query.dim() == 2:
            query = query.view(query.shape[0], self.size, self.heads).transpose(1, 2)
        return super().opened(query, *rest)


class QueryScaledInPlace(Plain):
    """The caller's query is overwritten."""

    def step(self, call):
        found = super().step(call)
        call.query.mul_(self.scale)
        return found


def without(feature):
    """CAPABILITIES that leave one feature out."""
    return (replace(EVERYTHING, features=EVERYTHING.features - {feature}),)


class _Unrefusing(Plain):
    """Refuses what the plain backend does, whatever less it claims itself."""

    ENFORCES = (EVERYTHING,)


class SoftCapDropped(_Unrefusing):
    """Claims no soft cap, takes one and leaves it out."""

    CAPABILITIES = without("soft_cap")

    def capped(self, x, part):
        return x


class SinksDropped(_Unrefusing):
    """Claims no sinks, takes them and leaves them out."""

    CAPABILITIES = without("sinks")

    def sink_logits(self, logits, part):
        return torch.full(logits.shape[:2], -torch.inf)


class WindowDropped(_Unrefusing):
    """Claims no window, takes one and leaves it out."""

    CAPABILITIES = without("window")

    def window_of(self, part):
        return None


class AlibiDropped(_Unrefusing):
    """Claims no ALiBi, takes slopes and leaves them out."""

    CAPABILITIES = without("alibi")

    def biased(self, x, part):
        return x


class LseDropped(Plain):
    """Claims no LSE, takes output_lse and leaves it as it was."""

    CAPABILITIES = without("lse")

    def check_lse(self, output_lse):
        pass

    def fill_lse(self, output_lse, lse):
        pass


class BlocksparseDropped(Plain):
    """blocksparse_params are taken and dense attention is computed (vLLM 0.6.3, FlashInfer)."""

    def refuse(self, request, skip=()):
        super().refuse(replace(request, is_blocksparse=False), skip)


class DtypeNotRefused(_Unrefusing):
    """Claims fp32 alone, computes in anything."""

    CAPABILITIES = (replace(EVERYTHING, dtypes=frozenset({"float32"})),)


class CacheWordNotRefused(_Unrefusing):
    """Claims no fp8 cache, takes the word."""

    CAPABILITIES = (replace(EVERYTHING, kv_cache_dtypes=frozenset({"auto"})),)


class HeadSizeNotRefused(_Unrefusing):
    """Claims head sizes 64 and 128, takes any."""

    CAPABILITIES = (replace(EVERYTHING, head_sizes=listed(64, 128)),)


class MixedHeadSizesNotRefused(_Unrefusing):
    """Claims head_size_v = head_size, takes others."""

    CAPABILITIES = (replace(EVERYTHING, mixed_head_sizes=False),)


class BlockSizeNotRefused(_Unrefusing):
    """Claims pages of 16, takes any cache."""

    CAPABILITIES = (replace(EVERYTHING, block_sizes=listed(16)),)


class AttnTypeNotRefused(_Unrefusing):
    """Claims decoder attention alone and answers the others with it."""

    CAPABILITIES = (replace(EVERYTHING, attn_types=frozenset({"decoder"})),)


class WindowWithCrossNotRefused(Plain):
    """A window in cross attention is left out where the contract refuses it."""

    def refuse(self, request, skip=()):
        is_cross = request.attn_type == "encoder_decoder"
        super().refuse(replace(request, sliding_window=None) if is_cross else request, skip)


class AlibiWithCrossNotRefused(Plain):
    """ALiBi in cross attention is left out where the contract refuses it."""

    def refuse(self, request, skip=()):
        super().refuse(replace(request, alibi=False) if request.attn_type == "encoder_decoder" else request, skip)


class UnknownArgumentSwallowed(Plain):
    """**kwargs: a misspelt feature is left out."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **{word: kwargs[word] for word in kwargs if word in KNOWN})


class UnknownForwardArgumentSwallowed(Plain):
    """forward(**kwargs) takes anything."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **{word: kwargs[word] for word in kwargs if word in FORWARD})


class WindowOfZeroTaken(Plain):
    """sliding_window 0 counts as off."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **(kwargs | {"sliding_window": kwargs.get("sliding_window") or None}))


class ScaleWithoutFp8Taken(Plain):
    """A scale other than 1 is left out where the cache is not fp8."""

    def scale_value(self, scale):
        found = checks.scale(scale, is_fp8=True)
        return found if self.cache_word in FP8 else 1.0


class NanScaleTaken(Plain):
    """A scale that is not a positive finite number counts as 1."""

    def scale_value(self, scale):
        number = float(scale)
        return super().scale_value(scale) if 0 < number < float("inf") else 1.0


class SinksOfAnyLength(Plain):
    """One sink is spread over all heads."""

    def __init__(self, num_heads, head_size, scale, *args, **kwargs) -> None:
        sinks = kwargs.get("sinks")
        if sinks is not None and sinks.numel() != num_heads:
            sinks = sinks.reshape(-1)[:1].expand(num_heads)
        super().__init__(num_heads, head_size, scale, *args, **(kwargs | {"sinks": sinks}))


class SlopesOfAnyLength(Plain):
    """Too few slopes are repeated."""

    def __init__(self, num_heads, head_size, scale, *args, **kwargs) -> None:
        slopes = kwargs.get("alibi_slopes")
        if slopes is not None and len(slopes) != num_heads:
            slopes = torch.as_tensor(slopes).repeat(num_heads)[:num_heads]
        super().__init__(num_heads, head_size, scale, *args, **(kwargs | {"alibi_slopes": slopes}))


class HeadCountsNotChecked(Plain):
    """num_heads that num_kv_heads does not divide are rounded down: the last KV head takes what is left."""

    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, *args, **kwargs) -> None:
        kv_heads = num_kv_heads or num_heads
        super().__init__(num_heads, head_size, scale, kv_heads if num_heads % kv_heads == 0 else None, *args, **kwargs)
        self.kv_heads = kv_heads

    def head_map(self):
        return super().head_map().clamp(max=self.kv_heads - 1)


class KeyDtypeNotChecked(Plain):
    """A key in another dtype than the query is converted, silently."""

    def opened(self, query, key, value, *rest):
        same = (None if x is None else x.to(query.dtype) for x in (key, value))
        return super().opened(query, *same, *rest)


class WrongShapeTaken(Plain):
    """A query of the wrong head size is cut or reshaped until it fits."""

    def opened(self, query, *rest):
        wanted = (self.heads, self.size)
        if query.dim() == 3 and tuple(query.shape[1:]) != wanted and query[0].numel() >= self.heads * self.size:
            query = query.reshape(query.shape[0], -1)[:, : self.heads * self.size].reshape(-1, *wanted)
        return super().opened(query, *rest)


KNOWN = frozenset(Plain.__init__.__code__.co_varnames)
FORWARD = frozenset(Plain.forward.__code__.co_varnames)
