"""Asking the closed forms: of the reference, and of a backend as a prefill, paged decodes or a chunk with context."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heedful.conformance.assemble import assemble
from heedful.conformance.batch import Layer, Tokens
from heedful.conformance.cases import Span
from heedful.conformance.closed_forms import TOLERANCE
from heedful.conformance.pages import starts_of
from heedful.conformance.tolerance import OutOfToleranceError
from heedful.errors import BadInputError
from heedful.reference import dequantise, reference_attention, store_rounded
from heedful.types import AttentionType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from heedful.conformance.batch import Batch
    from heedful.conformance.closed_forms import Form, Number, Rows


@dataclass(frozen=True)
class Asked:
    """A form as a step: ``rows`` of the output must be ``right`` [rows, H]; its other rows only fill the batch."""

    form: Form
    batch: Batch
    rows: Tensor
    right: Tensor
    lse: Tensor | None

    def judge(self, output: Tensor, lse: Tensor | None = None) -> dict[str, float]:
        """Margins {"known"} and, where lse is given and known, {"lse"}; raises OutOfToleranceError."""
        margins = judge_known(self.form, output.detach().cpu()[self.rows], self.right)
        if lse is None or self.lse is None:
            return margins
        return margins | {"lse": judge_known_lse(self.form, lse.detach().cpu()[self.rows], self.lse)}


@dataclass(frozen=True)
class _Piece:
    """The first ``length`` keys of a sequence of a form, ``context`` of them cached; the last queries are asked."""

    sequence: int
    context: int
    length: int
    asked: tuple[int, ...]
    decode: bool = False


def asked(form: Form, dtype: str, phase: str, block_size: int = 16) -> Asked:
    """The form as one step of a phase, one of ``form.phases``; pages are shuffled and unused slots poisoned."""
    if phase not in form.phases:
        raise BadInputError(
            f"{form.name!r} cannot be asked as {phase!r}; give one of {', '.join(form.phases) or 'none'}"
        )
    pieces = [piece for sequence in range(len(form.keys)) for piece in _pieces(form, sequence, phase)]
    spans = [_span(form, piece) for piece in pieces]
    case, generator = form.case(dtype, block_size), torch.Generator().manual_seed(1)
    batch = assemble(case, spans, _tokens(form, pieces, dtype), _layer(form), generator)
    ends = starts_of([span.query for span in spans]).tolist()[1:]
    rows = [row for piece, end in zip(pieces, ends, strict=True) for row in range(end - len(piece.asked), end)]
    lse = None if form.lse is None else _answers(form.lse, pieces, form.heads[0])
    return Asked(form, batch, torch.tensor(rows), _answers(form.right, pieces, form.heads[0]), lse)


def through_reference(form: Form, dtype: str) -> tuple[Tensor, Tensor]:
    """The reference's (output, LSE) for the form's queries, on inputs rounded to dtype: [rows, H, Dv], [rows, H]."""
    query, key, value = _flat(form, dtype)
    if form.kv_cache_dtype != "auto":
        key = dequantise(store_rounded(key, form.k_scale, form.kv_cache_dtype), form.k_scale)
        value = dequantise(store_rounded(value, form.v_scale, form.kv_cache_dtype), form.v_scale)
    layer = _layer(form)
    return reference_attention(
        query,
        key,
        value,
        starts_of([len(rows) for rows in form.queries]),
        starts_of([len(rows) for rows in form.keys]),
        scale=form.scale,
        causal=form.attn_type == AttentionType.DECODER,
        sliding_window=form.sliding_window,
        alibi_slopes=layer.alibi_slopes,
        logits_soft_cap=form.logits_soft_cap,
        sinks=layer.sinks,
    )


def numbers(rows: Rows, num_heads: int) -> Tensor:
    """float64 [rows, num_heads] of a form's right, lse or defect."""
    flat = [_per_head(number, num_heads) for sequence in rows for number in sequence]
    return torch.tensor(flat, dtype=torch.float64).reshape(-1, num_heads)


def judge_known(form: Form, found: Tensor, right: Tensor) -> dict[str, float]:
    """Margin {"known"} of an output [rows, H, Dv] of any float dtype against right [rows, H]."""
    wanted = right[..., None].expand_as(found)
    if form.exact:
        if not torch.equal(found, wanted.to(found.dtype)):
            raise OutOfToleranceError(_message(form, found, wanted, "not its one value bit for bit"), {"known": inf})
        return {"known": 0.0}
    share = _largest_share(found, wanted, str(found.dtype).removeprefix("torch."))
    if share > 1.0:
        raise OutOfToleranceError(_message(form, found, wanted, f"{share:.3g} times what is allowed"), {"known": share})
    return {"known": share}


def judge_known_lse(form: Form, found: Tensor, right: Tensor) -> float:
    """Share of the fp32 tolerance that an LSE [rows, H] uses; -inf is right only where it is wanted."""
    share = _largest_share(found, right, "float32")
    if share > 1.0:
        raise OutOfToleranceError(
            _message(form, found, right, f"LSE {share:.3g} times what is allowed"), {"lse": share}
        )
    return share


def _largest_share(found: Tensor, wanted: Tensor, dtype: str) -> float:
    off = torch.where(found.double() == wanted, 0.0, (found.double() - wanted).abs()).nan_to_num(nan=inf)
    size = torch.where(wanted.isfinite(), wanted, 0.0).abs().clamp(min=1.0)
    return float((off / (TOLERANCE[dtype] * size)).max()) if found.numel() else 0.0


def _message(form: Form, found: Tensor, wanted: Tensor, how: str) -> str:
    off = (found.double() - wanted).abs().nan_to_num(nan=inf)
    place = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
    got, right = float(found[place]), float(wanted[place])
    likely = [name for name, rows in form.defects.items() if _near(got, rows)]
    hint = f"; that is the value of the defect {likely[0]!r}" if likely else ""
    return f"{form.name}: {how} at row {place[0]}, head {place[1]}: expected {right:.9g}, got {got:.9g}{hint}"


def _near(got: float, rows: Rows) -> bool:
    """Whether a defect gives this value anywhere, within what bf16 would blur."""
    values = [
        x for sequence in rows for number in sequence for x in (number if isinstance(number, tuple) else (number,))
    ]
    return any(got == x or abs(got - x) <= 8e-3 * max(1.0, abs(x)) for x in values)


def _pieces(form: Form, sequence: int, phase: str) -> list[_Piece]:
    queries, keys = len(form.queries[sequence]), len(form.keys[sequence])
    every = tuple(range(queries))
    if phase == "decode":
        lengths = [keys - queries + 1 + row for row in every]
        return [_Piece(sequence, n - 1, n, (row,), decode=True) for row, n in zip(every, lengths, strict=True)]
    if phase == "chunked":
        new = queries if queries < keys else max(1, keys - max(1, keys // 3))
        return [_Piece(sequence, keys - new, keys, every[-new:])]
    return [_Piece(sequence, 0, keys, every)]


def _span(form: Form, piece: _Piece) -> Span:
    if form.attn_type == AttentionType.ENCODER_DECODER:
        return Span(0, len(piece.asked), encoder=piece.length)
    return Span(piece.context, piece.length - piece.context, piece.decode)


def _tokens(form: Form, pieces: Sequence[_Piece], dtype: str) -> Tokens:
    """Query rows that are not asked are zeros."""
    rows: list[Number] = []
    for piece in pieces:
        new = _span(form, piece).query
        rows += [0.0] * (new - len(piece.asked)) + [form.queries[piece.sequence][row] for row in piece.asked]
    keys, values = (
        tuple(_heads(numbers_of[p.sequence][: p.length], form, form.heads[1], dtype, along=along) for p in pieces)
        for numbers_of, along in ((form.keys, False), (form.values, True))
    )
    return Tokens(_heads(rows, form, form.heads[0], dtype), keys, values)


def _flat(form: Form, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of all sequences in order."""
    queries, keys, values = ([x for rows in part for x in rows] for part in (form.queries, form.keys, form.values))
    heads, kv = form.heads
    query, key = _heads(queries, form, heads, dtype), _heads(keys, form, kv, dtype)
    return query, key, _heads(values, form, kv, dtype, along=True)


def _heads(rows: Sequence[Number], form: Form, heads: int, dtype: str, *, along: bool = False) -> Tensor:
    """[rows, heads, head_size]: the number in element 0, or along the whole head."""
    scalars = numbers((tuple(rows),), heads)[..., None]
    full = scalars.repeat(1, 1, form.head_size)
    if not along:
        full[..., 1:] = 0.0
    return full.to(getattr(torch, dtype))


def _answers(rows: Rows, pieces: Sequence[_Piece], num_heads: int) -> Tensor:
    picked = tuple(tuple(rows[piece.sequence][row] for row in piece.asked) for piece in pieces)
    return numbers(picked, num_heads)


def _per_head(number: Number, num_heads: int) -> list[float]:
    return list(number) if isinstance(number, tuple) else [number] * num_heads


def _layer(form: Form) -> Layer:
    slopes, sinks = (None if x is None else torch.tensor(x) for x in (form.alibi_slopes, form.sinks))
    return Layer(form.scale, slopes, sinks, form.k_scale, form.v_scale)
