"""OpenVINO's two attention operators, each as a model of one node: compiled once, run on torch's memory.

A compiled model is shared by all layers that are alike and by any number of threads: each run takes an idle request.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import openvino as ov
import torch
from openvino import PartialShape, Type, op, opset13
from openvino.op import _PagedAttentionExtension as PagedAttention

from heedful import environment
from heedful.errors import BackendUnavailableError, BadInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE = 32
"""Tokens a page of the PagedAttention operator, whatever shape its cache is declared with."""

TYPES = {torch.float32: Type.f32, torch.bfloat16: Type.bf16, torch.float16: Type.f16}
HINTS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f32"}
"""What the plugin computes in. Unset, it takes bf16 for fp32 models on CPUs that have bf16. It has no fp16 on x86."""


def device() -> str:
    """The OpenVINO device that HEEDFUL_OPENVINO_DEVICE names; BadInputError where OpenVINO does not see it."""
    word = environment.openvino_device()
    seen = [name.partition(".")[0] for name in _core().available_devices]
    if word not in seen:
        raise BadInputError(
            f"{environment.OPENVINO_DEVICE}={word}, but OpenVINO sees only {', '.join(seen) or 'no device'}; "
            f"install the driver of the {word}, or name one that is there"
        )
    return word


@lru_cache(maxsize=1)
def _core() -> ov.Core:
    return ov.Core()


def shared(x: torch.Tensor) -> ov.Tensor:
    """The memory of a contiguous CPU tensor as OpenVINO's, without a copy; the object keeps it alive."""
    if x.dtype == torch.bfloat16:
        return ov.Tensor(x.view(torch.int16).numpy(), ov.Shape(list(x.shape)), Type.bf16)
    return ov.Tensor(x.numpy(), shared_memory=True)


@dataclass(frozen=True)
class PagedForm:
    """What a compiled PagedAttention model is made for. stored: of the cache; alibi, sinks: whether it has them."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: torch.dtype
    stored: torch.dtype
    alibi: bool
    sinks: bool
    device: str
    threads: int


@dataclass(frozen=True)
class SdpaForm:
    """What a compiled SDPA model is made for. masked: whether it takes an additive mask."""

    head_size: int
    head_size_v: int
    dtype: torch.dtype
    masked: bool
    device: str
    threads: int


class Model:
    """A compiled model with its idle requests; ``places`` gives the index of each input by name."""

    def __init__(self, compiled: ov.CompiledModel) -> None:
        self.compiled = compiled
        self.places = {port.get_any_name(): at for at, port in enumerate(compiled.inputs)}
        self._idle: deque[ov.InferRequest] = deque()  # its pop and append are atomic

    def run(self, inputs: Mapping[str, ov.Tensor], output: ov.Tensor) -> None:
        """Compute into output. inputs: all of them, because an idle request points at memory that may be gone."""
        try:
            request = self._idle.pop()
        except IndexError:
            request = self.compiled.create_infer_request()
        for name, tensor in inputs.items():
            request.set_input_tensor(self.places[name], tensor)
        request.set_output_tensor(0, output)
        request.infer()
        self._idle.append(request)


_MODELS: dict[PagedForm | SdpaForm, Model] = {}
_LOCK = Lock()


def model(form: PagedForm | SdpaForm) -> Model:
    """The compiled model of that form; made once a process."""
    found = _MODELS.get(form)
    if found is None:
        with _LOCK:
            found = _MODELS.get(form)
            if found is None:
                found = _MODELS[form] = _compiled(form)
    return found


def _compiled(form: PagedForm | SdpaForm) -> Model:
    made = _paged(form) if isinstance(form, PagedForm) else _sdpa(form)
    try:
        return Model(_core().compile_model(made, form.device, _settings(form)))
    except RuntimeError as cause:
        told = str(cause).strip().splitlines()[-1]
        raise BackendUnavailableError(
            f"OpenVINO {ov.__version__} cannot compile {form} for {form.device}: {told}; "
            f"set {environment.OPENVINO_DEVICE}=CPU, or choose another backend"
        ) from cause


def _settings(form: PagedForm | SdpaForm) -> dict[str, Any]:
    found: dict[str, Any] = {"INFERENCE_PRECISION_HINT": HINTS[form.dtype]}
    if isinstance(form, PagedForm):
        found["KV_CACHE_PRECISION"] = "u8" if form.stored == torch.uint8 else TYPES[form.stored].get_type_name()
        if form.stored == torch.uint8:  # by channel a new token would change the bytes of earlier ones
            found["KEY_CACHE_QUANT_MODE"] = "BY_TOKEN"
    if form.device == "CPU":  # a pinned thread would fight with the caller's own, and with a second process
        found |= {"INFERENCE_NUM_THREADS": form.threads, "ENABLE_CPU_PINNING": False}
    return found


class _Inputs(list[op.Parameter]):
    """A model's parameters, collected as they are named."""

    def add(self, name: str, kind: Type, *shape: int) -> ov.Output:
        """A new input's port."""
        node = op.Parameter(kind, PartialShape(list(shape)))
        node.output(0).get_tensor().set_names({name})
        self.append(node)
        return node.output(0)


def _none(kind: Type) -> ov.Output:
    return op.Constant(kind, ov.Shape([0]), []).output(0)


def _zero(kind: Type) -> ov.Output:
    return op.Constant(kind, ov.Shape([]), [0]).output(0)


def _paged(form: PagedForm) -> ov.Model:
    """The node's 28 inputs in its own order; what attention over whole pages does not need is an empty constant."""
    inputs, dtype, i32, f32 = _Inputs(), TYPES[form.dtype], Type.i32, Type.f32
    lists = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
    node = PagedAttention(
        [
            inputs.add("query", dtype, -1, form.num_heads * form.head_size),
            inputs.add("key", dtype, -1, form.num_kv_heads * form.head_size),
            inputs.add("value", dtype, -1, form.num_kv_heads * form.head_size_v),
            inputs.add("key_cache", Type.dynamic, -1, -1, -1, -1),
            inputs.add("value_cache", Type.dynamic, -1, -1, -1, -1),
            *(inputs.add(name, i32, -1) for name in lists),
            inputs.add("scale", f32),
            inputs.add("sliding_window", i32),
            inputs.add("alibi_slopes", f32, -1) if form.alibi else _none(f32),
            inputs.add("max_context_len", i32),
            _none(i32),  # score aggregation
            *(_none(i32), _none(i32), _none(f32)),  # rotated blocks
            *(_none(f32), _zero(i32), _zero(i32)),  # sparse prefill
            inputs.add("sinks", f32, 1, form.num_heads, 1, 1) if form.sinks else _none(f32),
            *(_zero(i32), _none(i32), _none(i32), _none(i32)),  # eviction
            *(_none(i32), _none(Type.u8), _none(i32)),  # token types, bias between queries
        ]
    )
    facts = {"num_k_heads": form.num_kv_heads, "num_v_heads": form.num_kv_heads}
    for name, fact in (facts | {"k_head_size": form.head_size, "v_head_size": form.head_size_v}).items():
        node.get_rt_info()[name] = fact
    return ov.Model([op.Result(node.output(0))], inputs, "paged_attention")


def _sdpa(form: SdpaForm) -> ov.Model:
    """query [1, KV, rows, D], key, value [1, KV, keys, D | Dv], mask [1, 1 | KV, rows, keys]."""
    inputs, dtype = _Inputs(), TYPES[form.dtype]
    query = inputs.add("query", dtype, 1, -1, -1, form.head_size)
    key = inputs.add("key", dtype, 1, -1, -1, form.head_size)
    value = inputs.add("value", dtype, 1, -1, -1, form.head_size_v)
    mask = inputs.add("mask", dtype, 1, -1, -1, -1) if form.masked else _zero(dtype)
    scale = inputs.add("scale", dtype)
    node = opset13.scaled_dot_product_attention(query, key, value, mask, scale)
    return ov.Model([op.Result(node.output(0))], inputs, "sdpa")
