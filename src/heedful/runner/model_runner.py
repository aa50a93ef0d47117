"""Runs a model on the backend that selection gives: choose, make state and layers, profile, make the cache, step."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from heedful.backends.paged import cache_dtype
from heedful.errors import BackendUnavailableError, BadInputError, HeedfulError, SelectionError
from heedful.runner.batch import ModelInput, build_batch
from heedful.runner.model import Llama
from heedful.runner.scheduler import Chunk, Request
from heedful.selector import explain, get_attn_backend
from heedful.types import DTYPES, SelectionRequest

if TYPE_CHECKING:
    from heedful.backends.base import AttentionBackend, AttentionImpl, KVCache
    from heedful.runner.weights import Checkpoint

TORCH_DEVICES = {"cuda": "cuda", "rocm": "cuda", "xpu": "xpu"}
"""The name by which torch knows a platform's device; the tensors of all others live on the host."""


@dataclass(frozen=True)
class RunnerOptions:
    """How a model is served.

    dtype: of weights and activations; None is the checkpoint's. block_size: tokens a cache block. num_blocks: None
    makes as many as kv_cache_bytes hold. max_num_seqs: requests that run at once. max_num_batched_tokens: tokens a
    step computes at most, so a longer prompt is prefilled in chunks. share_prefixes: requests share computed blocks.
    emulated: run on a device that is only simulated, in host memory, where the backend has an emulation: a proof of
    numbers, not of speed.
    """

    dtype: str | None = None
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int = 256 << 20
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    share_prefixes: bool = True
    emulated: bool = False

    def __post_init__(self) -> None:
        if self.num_blocks is not None and self.num_blocks < 1:
            raise BadInputError(f"num_blocks {self.num_blocks} must be 1 or more; None fills kv_cache_bytes")


class ModelRunner:
    """One model, its backend and its cache. ``backend`` is the chosen class, ``selection`` the record that says why.

    The choice is made once, here: forced_backend and HEEDFUL_ATTENTION_BACKEND count when the runner is made.
    Errors: SelectionError, BackendUnavailableError, WeightsError, BadInputError.
    """

    def __init__(self, checkpoint: Checkpoint, options: RunnerOptions | None = None) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.options = options or RunnerOptions()
        self.dtype = self.options.dtype or checkpoint.dtype
        if self.dtype not in DTYPES:
            raise BadInputError(f"unknown dtype {self.dtype!r}; give one of {', '.join(DTYPES)}")
        self.selection = explain(self._request())
        self.backend = self._select()
        self._refuse_simulated()
        device = self.selection.device
        self.device = torch.device("cpu" if device.simulated else TORCH_DEVICES.get(device.platform, "cpu"))
        self.attn_state = self.backend.get_state_cls()(weakref.proxy(self))
        self.model = Llama(self.config, self._place_weights(), self._make_impl)
        self.kv_caches: list[KVCache] = [self._empty() for _ in range(self.config.num_layers)]
        self._profile()
        self.num_blocks = self._count_blocks()
        self.kv_caches = [self._make_cache() for _ in range(self.config.num_layers)]

    @torch.inference_mode()
    def execute(self, model_input: ModelInput) -> torch.Tensor:
        """Run one step and write its K and V; logits [samples, vocab_size], all finite or a HeedfulError."""
        self.attn_state.begin_forward(model_input)
        hidden = self.model.forward(
            model_input.token_ids, model_input.positions, self.kv_caches, model_input.attn_metadata
        )
        logits = self.model.logits(hidden[model_input.sample_rows])
        if not bool(logits.isfinite().all()):
            raise HeedfulError(
                f"{self.backend.name} in {self.dtype} gave logits that are not finite; run "
                f"`heedful conform --backend {self.backend.name}`, or use float32"
            )
        return logits

    def _request(self) -> SelectionRequest:
        return SelectionRequest(
            head_size=self.config.head_size,
            sliding_window=self.config.sliding_window,
            dtype=self.dtype,
            kv_cache_dtype=self.options.kv_cache_dtype,
            block_size=self.options.block_size,
        )

    def _refuse_simulated(self) -> None:
        device = self.selection.device
        if device.simulated and not (self.options.emulated and self.backend.EMULATES):
            why = f"; {self.backend.name} has no emulation" if self.options.emulated else ""
            raise BackendUnavailableError(
                f"a model was to run on {device}, but that device is only simulated here{why}; unset HEEDFUL_PLATFORM, "
                "or use a machine that has one"
            )

    def _select(self) -> type[AttentionBackend]:
        asked = self._request()
        return get_attn_backend(
            asked.head_size, asked.sliding_window, asked.dtype, asked.kv_cache_dtype, asked.block_size, False, False
        )

    def _same_backend(self, part: str) -> type[AttentionBackend]:
        """Ask again, as each part of an engine does; parts with two backends would read each other's cache wrongly."""
        backend = self._select()
        if backend is not self.backend:
            raise SelectionError(
                f"the runner chose {self.backend.name}, but its {part} chose {backend.name}; "
                "keep the override as it is while a runner is made",
                self.selection,
            )
        return backend

    def _make_impl(self) -> AttentionImpl:
        config = self.config
        return self._same_backend("attention layer").get_impl_cls()(
            config.num_heads,
            config.head_size,
            config.head_size**-0.5,
            config.num_kv_heads,
            sliding_window=config.sliding_window,
            kv_cache_dtype=self.options.kv_cache_dtype,
        )

    def _place_weights(self) -> dict[str, torch.Tensor]:
        kind = getattr(torch, self.dtype)
        exact = "rotary.inv_freq"
        weights = self.checkpoint.weights
        return {
            name: tensor.to(self.device, torch.float32 if name == exact else kind) for name, tensor in weights.items()
        }

    def _profile(self) -> None:
        """One prefill of a block's length with empty caches: what cannot run fails here, before the cache is made."""
        count = min(self.options.block_size, self.config.max_positions)
        request = Request([0] * count, max_tokens=1)
        self.execute(build_batch([Chunk(request, 0, count, decode=False)], self.backend, count, self.device))

    def _cache_shapes(self, num_blocks: int) -> tuple[Any, ...]:
        """The shape of one layer's cache: dimensions, or a pair of shapes."""
        return self._same_backend("cache").get_kv_cache_shape(
            num_blocks,
            self.options.block_size,
            self.config.num_kv_heads,
            self.config.head_size,
            self.options.kv_cache_dtype,
        )

    def _cache_dtype(self) -> torch.dtype:
        return cache_dtype(self.options.kv_cache_dtype, getattr(torch, self.dtype))

    def _count_blocks(self) -> int:
        if self.options.num_blocks is not None:
            return self.options.num_blocks
        shape = self._cache_shapes(1)
        elements = sum(map(prod, shape)) if isinstance(shape[0], tuple) else prod(shape)
        block_bytes = elements * self._cache_dtype().itemsize * self.config.num_layers
        if self.options.kv_cache_bytes < block_bytes:
            raise BadInputError(
                f"kv_cache_bytes {self.options.kv_cache_bytes} is less than one block of {block_bytes} bytes; raise it"
            )
        return self.options.kv_cache_bytes // block_bytes

    def _make_cache(self) -> KVCache:
        shape = self._cache_shapes(self.num_blocks)
        if isinstance(shape[0], tuple):
            return (self._zeros(shape[0]), self._zeros(shape[1]))
        return self._zeros(shape)

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=self._cache_dtype(), device=self.device)

    def _empty(self) -> torch.Tensor:
        return torch.empty(0, dtype=self._cache_dtype(), device=self.device)
