"""The merge of states for tensors: attention over parts of the keys, outputs and LSEs, becomes that over all."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from heedful.errors import BadInputError
from heedful.kernels.cpu.library import DTYPE_CODES, Merge, State, merge
from heedful.memory import check_addressable, check_apart, check_no_gradient, check_unshared, reach, span

if TYPE_CHECKING:
    from collections.abc import Sequence

    Place = tuple[int, ...]
    """The address of a tensor's elements, then its strides."""

CODES: Final = {getattr(torch, word): DTYPE_CODES[word] for word in ("float32", "bfloat16", "float16")}


def merge_states(
    outputs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    *,
    output: Tensor | None = None,
    output_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Join the attention of parts that share no key and of which at most one holds the sink: (output, LSE) of them all.

    outputs: one [tokens, num_heads, head_size_v] a part, fp32, bf16 or fp16, on the CPU; lses: one fp32 [tokens,
    num_heads] a part, natural log. Either may be one tensor [parts, ...]. Any strides. output, output_lse: filled and
    returned where given; they may be the tensors of one part, and share memory with nothing else.

    As heedful.reference.merge_states: an LSE of -inf or +inf means that the part saw no key, and its output is not
    read. One part left comes back bit for bit, none gives 0 and -inf. NaN is passed on. Sums are fp32. Whatever does
    not fit raises BadInputError.
    """
    pairs = _pairs(outputs, lses)
    form = pairs[0][0].shape, pairs[0][0].dtype
    parts = _places(pairs, *form)
    whole = _whole(output, output_lse, *form)
    if (output is not None or output_lse is not None) and _may_meet(whole, parts, *form):
        _check_memory(whole, pairs)
    if torch.is_grad_enabled():
        check_no_gradient(("a tensor of merge_states", x) for pair in (*pairs, whole) for x in pair)
    _run(whole, pairs, parts)
    return whole


def _pairs(outputs: Any, lses: Any) -> list[tuple[Any, Any]]:
    """(output, LSE) of each part, of which the first output has a legal form."""
    for name, given in (("outputs", outputs), ("lses", lses)):
        if not isinstance(given, (list, tuple)) and not (isinstance(given, Tensor) and given.dim()):
            raise BadInputError(f"{name} is {_told(given)}; give a list of tensors, or one tensor [parts, ...]")
    found = list(zip(outputs, lses, strict=False))
    if len(outputs) != len(lses) or not found:
        given = f"{len(outputs)} outputs and {len(lses)} LSEs"
        raise BadInputError(f"merge_states was given {given}; give one LSE an output, and one part at least")
    first = found[0][0]
    if not isinstance(first, Tensor) or first.dim() != 3 or first.dtype not in CODES:
        dtypes = ", ".join(map(_word, CODES))
        raise BadInputError(f"outputs[0] is {_told(first)}; give [tokens, num_heads, head_size_v], one of {dtypes}")
    return found


def _places(pairs: list[tuple[Any, Any]], shape: torch.Size, dtype: torch.dtype) -> list[tuple[Place, Place]]:
    rows = shape[:2]
    return [
        (_place(output, shape, dtype, "outputs", i), _place(lse, rows, torch.float32, "lses", i))
        for i, (output, lse) in enumerate(pairs)
    ]


def _place(x: Any, shape: torch.Size, dtype: torch.dtype, name: str, i: int = -1) -> Place:
    """Where x lies; an error unless it is a tensor of that form in this machine's memory."""
    try:
        if isinstance(x, Tensor) and x.shape == shape and x.dtype == dtype and x.is_cpu and not x.is_neg():
            address = x.data_ptr()
            if address or not x.numel():
                return (address, *x.stride())
    except RuntimeError:  # sparse: it has no address
        pass
    raise _fault(x, shape, dtype, name if i < 0 else f"{name}[{i}]")


def _fault(x: Any, shape: torch.Size, dtype: torch.dtype, name: str) -> BadInputError:
    """What is wrong with an x that has no place."""
    if isinstance(x, Tensor) and x.shape == shape and x.dtype == dtype and x.is_cpu:
        check_addressable(name, x)
    if isinstance(x, Tensor) and not x.is_cpu:
        return BadInputError(f"{name} is on {x.device}; these kernels run on the CPU, so move it there")
    return BadInputError(f"{name} is {_told(x)}; give {_word(dtype)} {list(shape)}")


def _told(x: Any) -> str:
    return f"{_word(x.dtype)} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _whole(output: Any, output_lse: Any, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The two tensors that are filled: those given, checked, or new ones."""
    found = []
    forms = (("output", output, shape, dtype), ("output_lse", output_lse, shape[:2], torch.float32))
    for name, given, size, kind in forms:
        if given is not None:
            _place(given, size, kind, name)
            check_unshared(name, given)
        found.append(torch.empty(size, dtype=kind) if given is None else given)
    return found[0], found[1]


def _may_meet(
    whole: tuple[Tensor, Tensor], parts: list[tuple[Place, Place]], shape: torch.Size, dtype: torch.dtype
) -> bool:
    """Whether what is filled reaches into anything else."""
    forms = ((shape, dtype.itemsize), (shape[:2], 4))
    read = [_span(place, *form) for part in parts for place, form in zip(part, forms, strict=True)]
    output, lse = (span(x) for x in whole)
    return _meet(output, lse) or any(_meet(output, other) or _meet(lse, other) for other in read)


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _span(place: Place, shape: torch.Size, item: int) -> tuple[int, int]:
    return place[0], place[0] + item * reach(shape, place[1:])


def _check_memory(whole: tuple[Tensor, Tensor], pairs: list[tuple[Tensor, Tensor]]) -> None:
    """What is filled lies in nothing that is read, except as the very tensor of a part: a row is read, then filled."""
    read = [
        (f"{word}[{i}]", x)
        for i, pair in enumerate(pairs)
        for word, x, filled in zip(("outputs", "lses"), pair, whole, strict=True)
        if x is not filled and (x.data_ptr() != filled.data_ptr() or x.stride() != filled.stride())
    ]
    check_apart(zip(("output", "output_lse"), whole, strict=True), read)


def _run(whole: tuple[Tensor, Tensor], pairs: list[tuple[Tensor, Tensor]], parts: list[tuple[Place, Place]]) -> None:
    output, lse = whole
    tokens, num_heads, size = output.shape
    target = output if output.stride(-1) == 1 else torch.empty(output.shape, dtype=output.dtype)
    words, kept = array("q"), []
    for (x, _), (place, rows) in zip(pairs, parts, strict=True):
        if place[3] != 1:  # the kernels want the elements of a row side by side
            kept.append(x.contiguous())
            place = (kept[-1].data_ptr(), *kept[-1].stride())
        words.extend((*place[:3], *rows))
    state = State(target.data_ptr(), *target.stride()[:2], lse.data_ptr(), *lse.stride())
    threads, (address, _) = torch.get_num_threads(), words.buffer_info()
    merge(Merge(address, state, tokens, len(parts), num_heads, size, CODES[output.dtype], threads))
    if target is not output:
        output.copy_(target)
