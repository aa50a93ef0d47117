"""OpenVINO's PagedAttention operator as a model of one node, run on torch's memory without copies."""

from __future__ import annotations

from functools import lru_cache

import openvino as ov
import torch
from openvino import PartialShape, Type, op
from openvino.op import _PagedAttentionExtension as Node

TYPES = {torch.float32: Type.f32, torch.bfloat16: Type.bf16, torch.int32: Type.i32}


class _Parameters(list):
    """The model's inputs by name, collected as they are named."""

    def add(self, name: str, kind: Type, *shape: int):
        """A new input's output port."""
        node = op.Parameter(kind, PartialShape(list(shape)))
        node.output(0).get_tensor().set_names({name})
        self.append(node)
        return node.output(0)


def _empty(kind: Type):
    return op.Constant(kind, ov.Shape([0]), []).output(0)


def _zero():
    return op.Constant(Type.i32, ov.Shape([]), [0]).output(0)


def _ports(heads: int, kv_heads: int, size: int, dtype: Type, add) -> list:
    """The node's 28 inputs in its own order; what plain attention does not need is an empty constant."""
    i32, f32 = Type.i32, Type.f32
    lists = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
    return [
        add("query", dtype, -1, heads * size),
        *(add(name, dtype, -1, kv_heads * size) for name in ("key", "value")),
        *(add(name, Type.dynamic, -1, -1, -1, -1) for name in ("key_cache", "value_cache")),
        *(add(name, i32, -1) for name in lists),
        add("scale", f32),
        add("sliding_window", i32),
        _empty(f32),  # ALiBi slopes
        add("max_context_len", i32),
        _empty(i32),  # score aggregation
        *(_empty(i32), _empty(i32), _empty(f32)),  # rotated blocks
        *(_empty(f32), _zero(), _zero()),  # sparse prefill
        _empty(f32),  # sinks
        *(_zero(), _empty(i32), _empty(i32), _empty(i32)),  # eviction
        *(_empty(i32), _empty(Type.u8), _empty(i32)),  # token types, bias between queries
    ]


def _model(heads: int, kv_heads: int, size: int, dtype: Type) -> ov.Model:
    parameters = _Parameters()
    node = Node(_ports(heads, kv_heads, size, dtype, parameters.add))
    facts = {"num_k_heads": kv_heads, "num_v_heads": kv_heads, "k_head_size": size, "v_head_size": size}
    for name, value in facts.items():
        node.get_rt_info()[name] = value
    return ov.Model([op.Result(node.output(0))], parameters, "paged_attention")


def _shared(x: torch.Tensor) -> ov.Tensor:
    if x.dtype == torch.bfloat16:
        return ov.Tensor(x.view(torch.int16).numpy(), ov.Shape(list(x.shape)), Type.bf16)
    return ov.Tensor(x.numpy(), shared_memory=True)


@lru_cache(maxsize=16)
def _compiled(heads: int, kv_heads: int, size: int, dtype: torch.dtype, threads: int) -> ov.CompiledModel:
    word = "f32" if dtype == torch.float32 else "bf16"
    settings = {
        "INFERENCE_PRECISION_HINT": word,
        "KV_CACHE_PRECISION": word,
        "INFERENCE_NUM_THREADS": threads,
        "ENABLE_CPU_PINNING": False,
    }
    return ov.Core().compile_model(_model(heads, kv_heads, size, TYPES[dtype]), "CPU", settings)


class PagedAttention:
    """One request: bind tensors once, then run. Every run hands the inputs over again, as a server must."""

    def __init__(self, heads: int, kv_heads: int, size: int, dtype: torch.dtype, threads: int) -> None:
        self._request = _compiled(heads, kv_heads, size, dtype, threads).create_infer_request()
        self._inputs: dict[str, ov.Tensor] = {}
        self._kept: tuple[object, ...] = ()

    def bind(self, output: torch.Tensor, **inputs: torch.Tensor) -> None:
        """Say where everything lies; inputs by the names of the node."""
        self._kept = (output, inputs)
        self._inputs = {name: _shared(x) for name, x in inputs.items()}
        self._output = _shared(output)

    def run(self) -> None:
        """Attend, after writing the new tokens' keys and values into the pages."""
        for name, tensor in self._inputs.items():
            self._request.set_tensor(name, tensor)
        self._request.set_output_tensor(0, self._output)
        self._request.infer()
