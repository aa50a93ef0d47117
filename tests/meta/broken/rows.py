"""Defects in sinks, LSE, empty rows and ALiBi."""

from __future__ import annotations

import math

import torch

from meta.plain import Plain


class SinkIgnored(Plain):
    """Sinks are taken and never applied."""

    def sink_logits(self, logits, part):
        return torch.full(logits.shape[:2], -torch.inf)


class SinkIgnoredInDecode(Plain):
    """Only prefill knows the sinks."""

    def sink_logits(self, logits, part):
        found = super().sink_logits(logits, part)
        return torch.full_like(found, -torch.inf) if part.phase == "decode" else found


class SinkScaled(Plain):
    """The sink is appended before the scale."""

    def sink_logits(self, logits, part):
        return super().sink_logits(logits, part) * self.scale


class SinkCapped(Plain):
    """The sink is appended before the soft cap."""

    def sink_logits(self, logits, part):
        return self.capped(super().sink_logits(logits, part), part)


class SinkInNumerator(Plain):
    """The sink's weight goes to the first key."""

    def normalised(self, logits, sink):
        weights, lse = super().normalised(logits, sink)
        if logits.shape[-1]:
            weights = weights.clone()
            weights[..., 0] += torch.exp(sink - lse).nan_to_num()
        return weights, lse


class SinkOfFirstHead(Plain):
    """Every head uses sink 0."""

    def sink_logits(self, logits, part):
        return super().sink_logits(logits, part)[:1].expand(logits.shape[:2])


class SinkOfKvHead(Plain):
    """sinks is indexed by KV head."""

    def sink_logits(self, logits, part):
        return super().sink_logits(logits, part)[self.head_map()]


class SinkHiddenByWindow(Plain):
    """The sink is masked like key 0."""

    def sink_logits(self, logits, part):
        sink = super().sink_logits(logits, part)
        if not part.kv_len or self.window is None:
            return sink
        return sink.masked_fill(~self.visible(part)[:, 0], -torch.inf)


class SinkCountedTwice(Plain):
    """Each of two splits adds the sink."""

    def sink_logits(self, logits, part):
        return super().sink_logits(logits, part) + math.log(2)


class SinkNegated(Plain):
    """The sink's sign is wrong."""

    def sink_logits(self, logits, part):
        return -super().sink_logits(logits, part)


class LseLog2(Plain):
    """The LSE is in base 2, as the kernel computes it inside (FlashInfer)."""

    def reported_lse(self, lse, logits, sink):
        return lse / math.log(2)


class LseWithoutSink(Plain):
    """The LSE leaves the sink out."""

    def reported_lse(self, lse, logits, sink):
        return torch.logsumexp(logits, -1) if logits.shape[-1] else torch.full_like(lse, -torch.inf)


class LseZeroForEmptyRow(Plain):
    """An empty row's LSE is 0.0 (torch's CPU flash kernel)."""

    def reported_lse(self, lse, logits, sink):
        return lse.masked_fill(lse.isneginf(), 0.0)


class LsePlusInfForEmptyRow(Plain):
    """An empty row's LSE is +inf (flash-attn)."""

    def reported_lse(self, lse, logits, sink):
        return lse.masked_fill(lse.isneginf(), torch.inf)


class LseWithoutMax(Plain):
    """log of the sum of exp(x - max), the maximum never added back."""

    def reported_lse(self, lse, logits, sink):
        return lse - logits.amax(-1) if logits.shape[-1] else lse


class LseNotFilled(Plain):
    """output_lse is taken and left as it was."""

    def fill_lse(self, output_lse, lse):
        pass


class LseWithoutSinkInEmptyRow(Plain):
    """A row without a key reports -inf although there is a sink."""

    def reported_lse(self, lse, logits, sink):
        return lse if logits.shape[-1] else torch.full_like(lse, -torch.inf)


class EmptyRowNaN(Plain):
    """softmax of nothing is 0/0."""

    def attend(self, q, k, v, part):
        out, lse = super().attend(q, k, v, part)
        return (out, lse) if part.kv_len else (torch.full_like(out, torch.nan), lse)


class EmptyRowSeesPadding(Plain):
    """A row without a key averages what stands in the padding (mean of V)."""

    def kv_len(self, host, kind, i):
        return super().kv_len(host, kind, i) or (1 if kind in ("decoder", "encoder_decoder") else 0)

    def table(self, host, kind, i):
        return super().table(host, kind, i) or (0,)


class AlibiIgnored(Plain):
    """Slopes are taken and never applied (vLLM 0.6.3, FlashInfer's paged path)."""

    def biased(self, x, part):
        return x


class AlibiIgnoredInDecode(Plain):
    """Only prefill adds the bias."""

    def biased(self, x, part):
        return x if part.phase == "decode" else super().biased(x, part)


class AlibiIgnoredInPrefill(Plain):
    """Only decode adds the bias (vLLM 0.6.3, IPEX)."""

    def biased(self, x, part):
        return x if part.phase == "prefill" else super().biased(x, part)


class AlibiWrongSign(Plain):
    """Far keys are favoured."""

    def bias(self, part):
        return -super().bias(part)


class AlibiPositionsInModelDtype(Plain):
    """Positions are an arange in bf16, exact to 256 only (vLLM 0.6.3, four backends)."""

    def distance(self, part):
        here, there = self.positions(part).to(part.dtype), torch.arange(part.kv_len).to(part.dtype)
        return (here[:, None] - there).float()


class AlibiSlopesInModelDtype(Plain):
    """Slopes are rounded to the model dtype."""

    def bias(self, part):
        return -self.slopes.to(part.dtype).float()[:, None, None] * self.distance(part).abs()


class AlibiTopLeft(Plain):
    """A chunk's or a decode's positions start at 0."""

    def distance(self, part):
        return torch.arange(part.query_len)[:, None].float() - torch.arange(part.kv_len).float()


class AlibiWithoutAbs(Plain):
    """-slope * (p - j): keys ahead of an encoder's query gain."""

    def bias(self, part):
        return -self.slopes[:, None, None] * self.distance(part)


class AlibiFromFirstKey(Plain):
    """slope * j: the same weights, another LSE (0 is not on the diagonal)."""

    def bias(self, part):
        return self.slopes[:, None, None] * torch.arange(part.kv_len).float().expand(part.query_len, -1)

    def biased(self, x, part):
        return super().biased(x, part) if part.kind == "decoder" else Plain.biased(_Right(self), x, part)


class _Right:
    """The correct bias of the same layer, for the kinds that a defect leaves alone."""

    def __init__(self, impl) -> None:
        self.slopes = impl.slopes
        self.bias = lambda part: Plain.bias(impl, part)


class AlibiScaled(Plain):
    """The bias is added before the scale."""

    def bias(self, part):
        return super().bias(part) * self.scale


class AlibiOfFirstSequence(Plain):
    """Every sequence gets the bias of the batch's first (vLLM 0.6.3, ROCm's Triton path)."""

    def parts(self, call):
        found = super().parts(call)
        call.host.step["first"] = found[0].kv_len - found[0].query_len if found else 0
        return found

    def distance(self, part):
        here = part.step["first"] + torch.arange(part.query_len)
        return here[:, None].float() - torch.arange(part.kv_len).float()


class AlibiSlopesRecomputed(Plain):
    """2^(-8 (h + 1) / n) for every n: wrong where n is no power of two."""

    def bias(self, part):
        ratio = torch.tensor([2 ** (-8 * (h + 1) / self.heads) for h in range(self.heads)])
        return -ratio[:, None, None] * self.distance(part).abs()


class AlibiOfKvHead(Plain):
    """Slopes are indexed by KV head."""

    def bias(self, part):
        return -self.slopes[self.head_map()][:, None, None] * self.distance(part).abs()
