"""Defects in the order of the rules, the scale, the soft cap, the head map and the precision of the sums."""

from __future__ import annotations

import math

import torch

from meta.plain import Plain


class SoftCapIgnored(Plain):
    """The soft cap is taken and never applied."""

    def capped(self, x, part):
        return x


class SoftCapIgnoredInDecode(Plain):
    """Prefill caps, decode does not (a second kernel that nobody updated)."""

    def capped(self, x, part):
        return x if part.phase == "decode" else super().capped(x, part)


class SoftCapIgnoredInChunk(Plain):
    """A chunk with context goes through another kernel, without the cap."""

    def capped(self, x, part):
        return x if part.phase == "prefill" and part.kv_len > part.query_len else super().capped(x, part)


class SoftCapIgnoredWhenProfiling(Plain):
    """Without a cache the cap is dropped (vLLM 0.6.3, FlashInfer's profiling path)."""

    def capped(self, x, part):
        return x if part.source is not None else super().capped(x, part)


class SoftCapBeforeScale(Plain):
    """scale * cap * tanh(qk / cap)."""

    def logits(self, scores, part):
        return self.masked(self.biased(self.scaled(self.capped(scores, part), part), part), part)


class SoftCapAfterMask(Plain):
    """Masked keys come out of the cap at -cap and are visible again."""

    def logits(self, scores, part):
        return self.biased(self.capped(self.masked(self.scaled(scores, part), part), part), part)


class SoftCapAfterBias(Plain):
    """The ALiBi bias is capped too."""

    def logits(self, scores, part):
        return self.masked(self.capped(self.biased(self.scaled(scores, part), part), part), part)


class SoftCapNotScaledBack(Plain):
    """tanh(x / cap) without the factor cap."""

    def capped(self, x, part):
        return x if self.cap is None else torch.tanh(x / self.cap)


class SoftCapClamps(Plain):
    """A hard clamp at ±cap instead of tanh."""

    def capped(self, x, part):
        return x if self.cap is None else x.clamp(-self.cap, self.cap)


class ScaleOnePercentHigh(Plain):
    """The softmax scale is 1 % high."""

    def scaled(self, scores, part):
        return scores * self.scale * 1.01


class ScaleOfPaddedHead(Plain):
    """The scale comes from the head size that the kernel pads to, 128 for 80."""

    def scaled(self, scores, part):
        padded = 1 << (self.size - 1).bit_length()
        return scores * self.scale * math.sqrt(self.size / padded)


class ScaleIgnoredInPrefill(Plain):
    """Prefill uses 1/sqrt(head_size) whatever it was given (vLLM 0.6.3 to 0.7.0, FlashInfer)."""

    def scaled(self, scores, part):
        return scores * (self.size**-0.5 if part.phase == "prefill" else self.scale)


class ScaleOfValueHead(Plain):
    """The scale is taken from head_size_v."""

    def scaled(self, scores, part):
        return scores * self.scale * math.sqrt(self.size / self.size_v)


class HeadMapTiled(Plain):
    """kv_head = q_head % num_kv_heads: KV heads are tiled where they should be repeated."""

    def head_map(self):
        return torch.arange(self.heads) % self.kv_heads


class ValueHeadMapTiled(Plain):
    """K is repeated, V is tiled."""

    def value_head_map(self):
        return torch.arange(self.heads) % self.kv_heads


class FirstKvHeadForAll(Plain):
    """Every query head reads KV head 0 (a multi-query kernel serving grouped heads)."""

    def head_map(self):
        return torch.zeros(self.heads, dtype=torch.int64)


class LastGroupLeftOut(Plain):
    """The query heads of the last KV head are never computed."""

    def weighted(self, weights, values, part):
        out = super().weighted(weights, values, part)
        out[(self.kv_heads - 1) * (self.heads // self.kv_heads) :] = 0
        return out


class HeadTailIgnored(Plain):
    """Elements of a head past a multiple of 32 never enter q·k (a vector loop without its remainder)."""

    def scores(self, q, k, part):
        size = max(self.size // 32 * 32, min(self.size, 32))
        return super().scores(q[..., :size], k[..., :size], part)


class ValueTailIgnored(Plain):
    """Elements of V past head_size stay 0 where head_size_v is larger."""

    def weighted(self, weights, values, part):
        out = super().weighted(weights, values, part)
        out[..., self.size :] = 0
        return out


class LowPrecisionAccumulator(Plain):
    """P·V is summed in the 16-bit model dtype, 16 keys at a time."""

    def weighted(self, weights, values, part):
        if part.dtype == torch.float32:
            return super().weighted(weights, values, part)
        total = torch.zeros(*weights.shape[:2], values.shape[-1], dtype=part.dtype)
        for start in range(0, weights.shape[-1], 16):
            total += (weights[..., start : start + 16] @ values[:, start : start + 16]).to(part.dtype)
        return total.float()


class ScoresInHalf(Plain):
    """q·k leaves the tensor core in fp16 for fp16 inputs: past 65,504 it is inf."""

    def scores(self, q, k, part):
        found = super().scores(q, k, part)
        return found.masked_fill(found > 65504, torch.inf) if part.dtype == torch.float16 else found


class ScoresInBfloat16(Plain):
    """q·k is rounded to bf16 before the softmax."""

    def scores(self, q, k, part):
        found = super().scores(q, k, part)
        return found.bfloat16().float() if part.dtype == torch.bfloat16 else found


class FloatThroughBfloat16(Plain):
    """fp32 inputs are multiplied as bf16 (a tensor-core default that nobody asked for)."""

    def scores(self, q, k, part):
        if part.dtype != torch.float32:
            return super().scores(q, k, part)
        return super().scores(q.bfloat16().float(), k.bfloat16().float(), part)


class NoMaxSubtracted(Plain):
    """exp(x) / sum exp(x) without the maximum: inf / inf above 88."""

    def normalised(self, logits, sink):
        weights, lse = super().normalised(logits, sink)
        return weights.masked_fill((logits > 88.7).any(-1, keepdim=True), torch.nan), lse


class NewestKeyDropped(Plain):
    """Decode does not see the token that this step wrote."""

    def visible(self, part):
        seen = super().visible(part)
        if part.phase == "decode" and part.kv_len > 1:
            seen[:, -1] = False
        return seen


class OldestKeyDropped(Plain):
    """Decode starts at key 1."""

    def visible(self, part):
        seen = super().visible(part)
        if part.phase == "decode" and part.kv_len > 1:
            seen[:, 0] = False
        return seen


class SplitNotWeighted(Plain):
    """Split-KV decode averages its two halves instead of weighing them by their LSE."""

    def normalised(self, logits, sink):
        half = logits.shape[-1] // 2
        if logits.shape[1] != 1 or not half:
            return super().normalised(logits, sink)
        _, lse = super().normalised(logits, sink)
        parts = [super(SplitNotWeighted, self).normalised(x, sink)[0] for x in (logits[..., :half], logits[..., half:])]
        return torch.cat(parts, -1) / 2, lse
