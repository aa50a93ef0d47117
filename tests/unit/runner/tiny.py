"""A tiny Llama-type model with seeded weights, and the same model once more: dense, float64, without a cache."""

import math
from functools import cache

import torch

from heedful.runner.model import ModelConfig
from heedful.runner.weights import Checkpoint

END = 0
CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    max_positions=128,
)


def checkpoint(config=CONFIG, tokenizer=None, eos=(), seed=0):
    """Weights with unit-size activations, so that logits lie well apart."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in config.weight_shapes().items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * noise if len(shape) == 1 else noise / math.sqrt(shape[-1]) * 1.5
    weights["rotary.inv_freq"] = 100.0 ** (-torch.arange(0, config.head_size, 2) / config.head_size)
    return Checkpoint(config, weights, frozenset(eos), "float32", tokenizer, "tiny")


def dense_logits(made, tokens):
    """float64 logits [tokens, vocab] of one sequence: every rule written out, nothing shared with the runner."""
    c, w = made.config, {name: tensor.double() for name, tensor in made.weights.items()}
    x = w["model.embed_tokens.weight"][torch.tensor(tokens)]
    n = len(tokens)
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    visible = (j <= i) & (i - j < (c.sliding_window or n))
    angle = (torch.arange(n)[:, None] * w["rotary.inv_freq"]).repeat(1, 2)
    for layer in range(c.num_layers):
        p = {k.split(".", 3)[3]: v for k, v in w.items() if k.startswith(f"model.layers.{layer}.")}
        h = _norm(x, p["input_layernorm.weight"], c)
        q, k, v = (_split(h @ p[f"self_attn.{s}_proj.weight"].T, c) for s in "qkv")
        q, k = (t * angle.cos() + _quarter_turn(t) * angle.sin() for t in (q, k))
        k, v = (t.repeat_interleave(c.num_heads // c.num_kv_heads, 0) for t in (k, v))
        scores = (q @ k.transpose(1, 2) / math.sqrt(c.head_size)).masked_fill(~visible, -math.inf)
        x = x + (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1) @ p["self_attn.o_proj.weight"].T
        h = _norm(x, p["post_attention_layernorm.weight"], c)
        gate = h @ p["mlp.gate_proj.weight"].T
        x = x + (gate * gate.sigmoid() * (h @ p["mlp.up_proj.weight"].T)) @ p["mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight"] if c.tied_embeddings else w["lm_head.weight"]
    return _norm(x, w["model.norm.weight"], c) @ head.T


def _norm(x, weight, c):
    return weight * x / (x.square().mean(-1, keepdim=True) + c.rms_norm_eps).sqrt()


def _quarter_turn(x):
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


def _split(x, c):
    return x.reshape(len(x), -1, c.head_size).transpose(0, 1)


@cache
def _greedy(config, prompt, count, seed):
    made, tokens = checkpoint(config, seed=seed), list(prompt)
    for _ in range(count):
        top = dense_logits(made, tokens)[-1].topk(2)
        assert top.values[0] - top.values[1] > 1e-3, "the prompt leaves two tokens too close to judge: choose another"
        tokens.append(int(top.indices[0]))
    return tokens[len(prompt) :]


def greedy(prompt, count, config=CONFIG, seed=0):
    """What greedy decoding must give, by the dense model."""
    return list(_greedy(config, tuple(prompt), count, seed))


def prompts(count, length=11, prefix=()):
    """Seeded prompts of growing length."""
    generator = torch.Generator().manual_seed(count * 100 + length)
    tails = (torch.randint(1, CONFIG.vocab_size, (length + i,), generator=generator) for i in range(count))
    return [[*prefix, *tail.tolist()] for tail in tails]
