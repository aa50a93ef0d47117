"""A Llama-type decoder in plain torch over the attention of a backend: RMSNorm, rotary, grouped heads, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import embedding, linear, silu

from heedful.errors import WeightsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from heedful.backends.base import AttentionImpl, AttentionMetadata, KVCache

LAYER_WEIGHTS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a Llama-type model, in elements; sliding_window counts the token itself, None is off."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_positions: int
    rms_norm_eps: float = 1e-5
    tied_embeddings: bool = True
    sliding_window: int | None = None

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the model reads, by the name that checkpoints use; rotary.inv_freq is fp32."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        attention: list[tuple[int, ...]] = [(hidden,), (q, hidden), (kv, hidden), (kv, hidden), (hidden, q)]
        sizes = [*attention, (hidden,), (inner, hidden), (inner, hidden), (hidden, inner)]
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            shapes |= {f"model.layers.{layer}.{n}.weight": s for n, s in zip(LAYER_WEIGHTS, sizes, strict=True)}
        shapes |= {"model.norm.weight": (hidden,), "rotary.inv_freq": (self.head_size // 2,)}
        return shapes if self.tied_embeddings else shapes | {"lm_head.weight": (self.vocab_size, hidden)}


def check_weights(config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise WeightsError that names every tensor that is missing, left over or of another shape."""
    expected = config.weight_shapes()
    wrong = [f"{name} is missing" for name in expected if name not in weights]
    wrong += [f"{name} is not part of a Llama-type model" for name in weights if name not in expected]
    shared = (name for name in expected if name in weights)
    wrong += [
        f"{name} has shape {tuple(weights[name].shape)}, not {expected[name]}"
        for name in shared
        if tuple(weights[name].shape) != expected[name]
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise WeightsError(
            f"these weights do not fit {config}: {'; '.join(wrong[:5])}{more}; give a matching checkpoint"
        )


class Llama:
    """weights: see ModelConfig.weight_shapes, all of one dtype and device. make_impl: the attention of a layer."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, torch.Tensor], make_impl: Callable[[], AttentionImpl]
    ) -> None:
        check_weights(config, weights)
        self.config = config
        self._embedding = weights["model.embed_tokens.weight"]
        self._norm = weights["model.norm.weight"]
        self._head = self._embedding if config.tied_embeddings else weights["lm_head.weight"]
        self._inv_freq = weights["rotary.inv_freq"].float()
        self._layers = [_Layer(config, _of_layer(weights, n), make_impl()) for n in range(config.num_layers)]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[KVCache],
        attn_metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """token_ids, positions int64 [tokens], one cache a layer; the last hidden states [tokens, hidden_size]."""
        hidden = embedding(token_ids, self._embedding)
        rotary = self._rotary(positions, hidden.dtype)
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            hidden = layer.forward(hidden, rotary, kv_cache, attn_metadata)
        return _rms_norm(hidden, self._norm, self.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] to logits [rows, vocab_size]."""
        return linear(hidden, self._head)

    def _rotary(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None].float() * self._inv_freq  # fp32: bf16 cannot count past 256
        return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]  # [tokens, 1, head_size / 2]


def _of_layer(weights: Mapping[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    return {name: weights[f"model.layers.{layer}.{name}.weight"] for name in LAYER_WEIGHTS}


class _Layer:
    """Attention, then the gated feed-forward, each after a norm and added to the stream."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor], impl: AttentionImpl) -> None:
        self.config, self.weights, self.impl = config, weights, impl

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        kv_cache: KVCache,
        attn_metadata: AttentionMetadata,
    ) -> torch.Tensor:
        w, eps = self.weights, self.config.rms_norm_eps
        normed = _rms_norm(hidden, w["input_layernorm"], eps)
        query = _rotate(self._heads("self_attn.q_proj", normed), rotary)
        key = _rotate(self._heads("self_attn.k_proj", normed), rotary)
        value = self._heads("self_attn.v_proj", normed)
        attended = self.impl.forward(query, key, value, kv_cache, attn_metadata).flatten(1)
        hidden = hidden + linear(attended, w["self_attn.o_proj"])
        normed = _rms_norm(hidden, w["post_attention_layernorm"], eps)
        gated = silu(linear(normed, w["mlp.gate_proj"])) * linear(normed, w["mlp.up_proj"])
        return hidden + linear(gated, w["mlp.down_proj"])

    def _heads(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weights[name]).view(len(hidden), -1, self.config.head_size)


def _rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    exact = hidden.float()
    return weight * (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)).to(hidden.dtype)


def _rotate(heads: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """heads [tokens, heads, head_size]: element i turns together with element i + head_size / 2."""
    cos, sin = rotary
    left, right = heads.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
