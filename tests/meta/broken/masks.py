"""Defects in what is visible: causal alignment, windows, encoders, cross attention."""

from __future__ import annotations

from dataclasses import replace

import torch

from meta.plain import Plain


def has_context(part) -> bool:
    """A chunk of a prefill whose earlier keys are in the cache."""
    return part.phase == "prefill" and part.kv_len > part.query_len


class CausalTopLeft(Plain):
    """A chunk's query i sees keys 0…i (the default of `is_causal=True` in many libraries)."""

    def causal(self, ahead, part):
        shift = part.kv_len - part.query_len if has_context(part) else 0
        return super().causal(ahead + shift, part)


class CausalSeesNext(Plain):
    """Each prefill token also sees the one after it."""

    def causal(self, ahead, part):
        return super().causal(ahead - 1 if part.phase == "prefill" else ahead, part)


class CausalHidesSelf(Plain):
    """A prefill token does not see itself unless it is alone."""

    def causal(self, ahead, part):
        seen = super().causal(ahead, part)
        if part.kind != "decoder" or part.phase != "prefill":
            return seen
        alone = seen.sum(-1, keepdim=True) == 1
        return seen & ((ahead != 0) | alone)


class CausalIgnoredInPrefill(Plain):
    """Prefill is bidirectional."""

    def causal(self, ahead, part):
        return super().causal(ahead, part) | (part.phase == "prefill")


class ContextIgnored(Plain):
    """A chunk attends to its own keys only: what a prefix hit or an earlier chunk left in the cache is lost."""

    def visible(self, part):
        seen = super().visible(part)
        if has_context(part) and part.kind == "decoder":
            seen[:, : part.kv_len - part.query_len] = False
        return seen


class SpeculationSeesAhead(Plain):
    """Each token of a decode with several tokens sees all of them."""

    def causal(self, ahead, part):
        return super().causal(ahead, part) | (part.phase == "decode")


class SpeculationTopLeft(Plain):
    """A decode with several tokens masks as if they were the first of the sequence."""

    def causal(self, ahead, part):
        shift = part.kv_len - part.query_len if part.phase == "decode" and part.query_len > 1 else 0
        return super().causal(ahead + shift, part)


class SpeculationAsOneToken(Plain):
    """Of a decode's several tokens only the first is computed."""

    def parts(self, call):
        found = super().parts(call)
        return [part if part.phase == "prefill" or part.kind != "decoder" else self._first(part) for part in found]

    @staticmethod
    def _first(part):
        rows = slice(part.rows.start, part.rows.start + 1)
        return replace(part, rows=rows, query_len=1, kv_len=part.kv_len - part.query_len + 1)


class EncoderCausal(Plain):
    """The encoder's mask is causal (vLLM 0.6.3, TORCH_SDPA with a window or ALiBi)."""

    def causal(self, ahead, part):
        return ahead <= 0 if part.kind == "encoder" else super().causal(ahead, part)


class EncoderOnlyCausal(Plain):
    """An encoder-only model is masked like a decoder."""

    def causal(self, ahead, part):
        return ahead <= 0 if part.kind == "encoder_only" else super().causal(ahead, part)


class EncoderWithDecoderLengths(Plain):
    """Encoder attention cuts its keys by the decoder's seq_lens (vLLM 0.6.3, TORCH_SDPA)."""

    def kv_len(self, host, kind, i):
        return min(host.seq_lens[i], host.encoder_lens[i]) if kind == "encoder" else super().kv_len(host, kind, i)


class CrossCausal(Plain):
    """Cross attention is causal, top-left."""

    def causal(self, ahead, part):
        shift = part.kv_len - part.query_len
        return ahead + shift <= 0 if part.kind == "encoder_decoder" else super().causal(ahead, part)


class CrossWithDecoderLengths(Plain):
    """Cross attention reads as many keys as the decoder has."""

    def kv_len(self, host, kind, i):
        if kind != "encoder_decoder":
            return super().kv_len(host, kind, i)
        return min(host.seq_lens[i], host.encoder_lens[i])


class CrossWithDecoderTables(Plain):
    """Cross attention follows block_tables where cross_block_tables is meant."""

    def table(self, host, kind, i):
        return super().table(host, "decoder", i) + super().table(host, kind, i)


class WindowPlusOne(Plain):
    """The window is W keys and the token itself (vLLM before PR 9403)."""

    def window_of(self, part):
        return None if self.window is None else self.window + 1


class WindowMinusOne(Plain):
    """One key too few, but never none."""

    def window_of(self, part):
        return None if self.window is None else max(1, self.window - 1)


class WindowIgnored(Plain):
    """The window is taken and never applied (vLLM 0.6.3, ROCm's Triton kernel warns and goes on)."""

    def window_of(self, part):
        return None


class WindowIgnoredInDecode(Plain):
    """Only prefill masks by window (vLLM 0.6.3, TORCH_SDPA)."""

    def window_of(self, part):
        return None if part.phase == "decode" else self.window


class WindowIgnoredInPrefill(Plain):
    """Only decode masks by window."""

    def window_of(self, part):
        return None if part.phase == "prefill" and not has_context(part) and not part.is_encoder else self.window


class WindowIgnoredInChunk(Plain):
    """A chunk with context goes through a kernel without the window."""

    def window_of(self, part):
        return None if has_context(part) else self.window


class WindowPlusOneInDecode(Plain):
    """Prefill counts the token itself, decode does not."""

    def window_of(self, part):
        return self.window + 1 if self.window is not None and part.phase == "decode" else self.window


class WindowTopLeft(Plain):
    """In a chunk the window is measured from the chunk's start."""

    def windowed(self, ahead, part):
        return super().windowed(ahead + part.kv_len - part.query_len if has_context(part) else ahead, part) | (
            ahead == 0
        )


class WindowDroppedWithAlibi(Plain):
    """A bias replaces the mask that held the window (vLLM 0.6.3, TORCH_SDPA, IPEX, XFORMERS)."""

    def window_of(self, part):
        return None if self.slopes is not None else self.window


class WindowByWholePages(Plain):
    """Decode keeps whole pages of 16 that touch the window."""

    def windowed(self, ahead, part):
        if self.window is None or part.phase != "decode":
            return super().windowed(ahead, part)
        first = part.kv_len - part.query_len - self.window + 1
        return torch.arange(part.kv_len).expand_as(ahead) >= max(0, first) // 16 * 16


class EncoderWindowIgnored(Plain):
    """Encoders see everything."""

    def window_of(self, part):
        return None if part.is_encoder else self.window


class EncoderWindowOneSided(Plain):
    """An encoder's window looks back only in distance, forward without end."""

    def windowed(self, ahead, part):
        return super().windowed(ahead.clamp(max=0) if part.is_encoder else ahead, part)


class EncoderWindowCausal(Plain):
    """With a window an encoder gets the decoder's causal band."""

    def causal(self, ahead, part):
        is_banded = self.window is not None and part.is_encoder
        return ahead <= 0 if is_banded else super().causal(ahead, part)


class EncoderWindowPlusOne(Plain):
    """|i - j| <= W."""

    def window_of(self, part):
        return self.window + 1 if self.window is not None and part.is_encoder else self.window


class EncoderWindowHalved(Plain):
    """W is read as the whole width, half to each side."""

    def window_of(self, part):
        return self.window // 2 + 1 if self.window is not None and part.is_encoder else self.window
