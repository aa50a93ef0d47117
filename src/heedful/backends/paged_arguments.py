"""What a layer's constructor and forward accept, said once for every backend: one clear error for each violation."""

from __future__ import annotations

import math
from typing import Any

import torch

from heedful.errors import BadInputError
from heedful.memory import check_addressable, check_unshared
from heedful.types import AttentionType

MODEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def name_of(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def whole_number(name: str, value: Any) -> int:
    """An int that is one: a float or a bool is an error."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInputError(f"{name} is {value!r}; give a whole number")
    return value


def positive_number(name: str, value: Any) -> float:
    """A float that is positive and finite; a 0-dim tensor counts as its value."""
    if isinstance(value, torch.Tensor):
        if value.dim() != 0 or value.is_meta:
            form = f"shape {list(value.shape)} on {value.device}"
            raise BadInputError(f"{name} is a tensor of {form}; give one number or a 0-dim tensor that holds it")
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadInputError(f"{name} is {value!r}; give one positive finite number")
    if not (math.isfinite(value) and value > 0):
        raise BadInputError(f"{name} is {value}; it must be positive and finite")
    return float(value)


def per_head(name: str, values: Any, num_heads: int, *, finite: bool) -> torch.Tensor | None:
    """fp32 [num_heads] on the device it came on; None stays None. finite: -inf is an error as NaN and +inf are."""
    if values is None:
        return None
    try:
        found = torch.as_tensor(values).detach().to(torch.float32)
    except (TypeError, ValueError, RuntimeError) as cause:
        raise BadInputError(f"{name} is {values!r}; give {num_heads} numbers, one a query head") from cause
    if tuple(found.shape) != (num_heads,) or found.is_meta:
        where = " on meta" if found.is_meta else ""
        raise BadInputError(f"{name} has shape {list(found.shape)}{where}; give [{num_heads}], one number a query head")
    bad = ~found.isfinite() & ((found != -math.inf) | finite)
    if bad.any():
        head = int(bad.nonzero()[0])
        raise BadInputError(f"{name}[{head}] is {float(found[head])}; give a finite number")
    return found.clone()


def attention_type(word: object) -> AttentionType:
    """One of the four words, or an error that lists them."""
    try:
        return AttentionType(word)  # type: ignore[arg-type]
    except ValueError as cause:
        raise BadInputError(f"unknown attn_type {word!r}; give one of {', '.join(AttentionType)}") from cause


def rows_of_heads(name: str, x: Any, heads: int, size: int) -> torch.Tensor:
    """x as a view [rows, heads, size]; the flat form [rows, heads*size] is accepted."""
    if not isinstance(x, torch.Tensor):
        raise BadInputError(f"{name} is {type(x).__name__}; give a tensor [tokens, {heads}, {size}]")
    if x.dim() == 2 and x.shape[1] == heads * size:
        return x.view(len(x), heads, size)
    if x.dim() != 3 or tuple(x.shape[1:]) != (heads, size):
        wanted = f"[tokens, {heads}, {size}] or [tokens, {heads * size}]"
        raise BadInputError(f"{name} has shape {list(x.shape)}; give {wanted}")
    return x


def same_kind(name: str, x: torch.Tensor, query: torch.Tensor) -> None:
    """x must have the query's dtype and device."""
    if x.dtype != query.dtype:
        raise BadInputError(f"{name} is {name_of(x.dtype)}, but query is {name_of(query.dtype)}; give both one dtype")
    if x.device != query.device:
        raise BadInputError(f"{name} is on {x.device}, but query is on {query.device}; put both on one device")


def writable(name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that forward fills in place: right shape, dtype and device, and no two elements in one place."""
    if not isinstance(x, torch.Tensor) or tuple(x.shape) != shape:
        got = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise BadInputError(f"{name} is {got}; give {name_of(dtype)} {list(shape)}")
    if x.dtype != dtype or x.device != device:
        raise BadInputError(f"{name} is {name_of(x.dtype)} on {x.device}; give {name_of(dtype)} on {device}")
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise BadInputError(
            f"{name} was made in torch.inference_mode(), where alone it may be filled; fill it there too"
        )
    check_addressable(name, x)
    check_unshared(name, x)
    return x


def check_cache(kv_cache: Any) -> None:
    """Raise BadInputError for what is no tensor or pair, or has no memory behind it."""
    if not isinstance(kv_cache, (torch.Tensor, tuple, list)):
        raise BadInputError(f"kv_cache is {type(kv_cache).__name__}; give a tensor [2, ...] or a (K, V) pair")
    for part in (kv_cache,) if isinstance(kv_cache, torch.Tensor) else kv_cache:
        if isinstance(part, torch.Tensor):
            check_addressable("the KV cache", part)


def check_sides(key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise BadInputError if K and V lie in one place."""
    if key.data_ptr() and key.data_ptr() == value.data_ptr():
        raise BadInputError("the K and the V cache are one memory, so that V overwrites K; give each its own")
