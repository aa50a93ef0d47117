"""Where tensors lie in memory: what must hold before something that takes plain addresses may read or write them.

Strides and addresses are all that a kernel sees. A tensor without memory behind it, one that holds an element twice, or
an output that lies in an input would end in a crash or in a wrong result; here each is one clear error.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from heedful.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    Named = Iterable[tuple[str, torch.Tensor | None]]


def check_addressable(name: str, x: torch.Tensor) -> None:
    """Raise BadInputError unless x's elements lie in memory, where its strides say and as they are."""
    try:
        address, strided = x.data_ptr(), True
    except RuntimeError:  # sparse, mkldnn
        address, strided = 0, False
    if not address and x.numel() and (x.is_cpu or x.is_meta or not strided):  # other devices may tell no addresses
        kind = "on meta" if x.is_meta else f"of layout {str(x.layout).removeprefix('torch.')} without memory behind it"
        raise BadInputError(f"{name} is {kind}; give a dense tensor that holds its elements")
    if x.is_neg():
        raise BadInputError(f"{name} is a view that negates what lies in memory; give a tensor of its own")


def check_apart(written: Named, read: Named) -> None:
    """Raise BadInputError if a tensor that is written shares memory with another one of either kind; None is none.

    What has no address is an error too.
    """
    seen = [(name, *_addressed(name, x)) for name, x in read if x is not None]
    for name, x in written:
        if x is None:
            continue
        first, last = _addressed(name, x)
        for other, begin, end in seen:
            if first < end and begin < last:
                raise BadInputError(f"{name} lies in the memory of {other}, which is still read; give one of its own")
        seen.append((name, first, last))


class Apart:
    """check_apart for tensors of the same forms as some that passed it: only addresses are looked at again."""

    __slots__ = ("read", "written")

    def __init__(self, written: Iterable[torch.Tensor | None], read: Iterable[torch.Tensor | None]) -> None:
        self.written = [_length(x) for x in written]
        self.read = [_length(x) for x in read]

    def holds(self, written: Iterable[torch.Tensor | None], read: Iterable[torch.Tensor | None]) -> bool:
        """Whether the check would pass; if not, it tells what is wrong."""
        seen = []
        for x, length in zip(read, self.read, strict=True):
            if x is not None:
                first = x.data_ptr()
                if (not first and length) or x.is_neg():
                    return False
                seen.append((first, first + length))
        for x, length in zip(written, self.written, strict=True):
            if x is not None:
                first = x.data_ptr()
                end = first + length
                if (not first and length) or x.is_neg() or any(first < last and begin < end for begin, last in seen):
                    return False
                seen.append((first, end))
        return True


def _length(x: torch.Tensor | None) -> int:
    return 0 if x is None else reach(x.shape, x.stride()) * x.element_size()


def _addressed(name: str, x: torch.Tensor) -> tuple[int, int]:
    check_addressable(name, x)
    return span(x)


def span(x: torch.Tensor) -> tuple[int, int]:
    """The address of x's first byte, and one past its last; twice the same if it has no elements, or no address."""
    first = x.data_ptr()
    return first, first + reach(x.shape, x.stride()) * x.element_size() if first else 0


@lru_cache(maxsize=1024)
def reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last, both counted."""
    if 0 in shape:
        return 0
    return 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))


def check_unshared(name: str, x: torch.Tensor) -> None:
    """Raise BadInputError if two of x's elements may lie in one place, so that writing one changes the other."""
    if not _unshared(x.shape, x.stride()):
        form = f"shape {list(x.shape)} and strides {list(x.stride())}"
        why = "several elements lie in one place, as with a stride 0, and cannot be filled"
        raise BadInputError(f"{name} has {form}: {why}; give one that owns its elements")


@lru_cache(maxsize=1024)
def _unshared(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether each stride steps over all that the smaller ones reach, which is so for every view cut from a tensor."""
    reach = 0
    for stride, length in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if length and stride <= reach:
            return False
        reach += stride * (length - 1)
    return True


def check_no_gradient(named: Named) -> None:
    """Raise BadInputError if a gradient is wanted of a tensor: nothing here computes one."""
    from torch import Tensor, is_grad_enabled

    if not is_grad_enabled():
        return
    for name, x in named:
        if isinstance(x, Tensor) and x.requires_grad:
            why = "requires grad, but no gradient is computed here"
            raise BadInputError(f"{name} {why}; call inside torch.no_grad() or torch.inference_mode(), or detach it")
