"""Known answers as plain data: inputs whose right value a person can work out, and the values that a defect would give.

Scalars stand in element 0 of a head, zeros elsewhere; V is constant along the head. No torch here, so that a plan can
list the forms; closed_form_runs.py asks them of the reference and of backends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, log
from typing import TYPE_CHECKING, Final

from heedful.conformance.cases import Case
from heedful.types import AttentionType

if TYPE_CHECKING:
    from collections.abc import Mapping

TOLERANCE: Final[Mapping[str, float]] = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}
"""How far an answer may lie from the right one, times max(1, |right|)."""

PHASES: Final = ("prefill", "decode", "chunked")
"""How a decoder form is asked: one prefill, paged decodes one token each, or a chunk after a context."""

Number = float | tuple[float, ...]
"""One number for every head, or one a head."""

Rows = tuple[tuple[Number, ...], ...]
"""One number a row (or key), by sequence."""


@dataclass(frozen=True)
class Form:
    """Queries are the last rows of their sequences. right, lse and each defect: one number a query, by sequence.

    values of several numbers are one a KV head; right and defects of several are one a query head. exact: the output is
    the value bit for bit. reference_only: no step can ask it, for it has fewer keys than queries.
    """

    name: str
    queries: Rows
    keys: Rows
    values: Rows
    right: Rows
    defects: Mapping[str, Rows] = field(default_factory=dict)
    lse: Rows | None = None
    scale: float = 1.0
    heads: tuple[int, int] = (1, 1)
    head_size: int = 64
    attn_type: str = AttentionType.DECODER
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    sinks: tuple[float, ...] | None = None
    kv_cache_dtype: str = "auto"
    k_scale: float = 1.0
    v_scale: float = 1.0
    exact: bool = False
    reference_only: bool = False

    @property
    def phases(self) -> tuple[str, ...]:
        """The ways a backend can be asked; attention types other than the decoder's have one, their own."""
        if self.reference_only:
            return ()
        return PHASES if self.attn_type == AttentionType.DECODER else (str(self.attn_type),)

    def case(self, dtype: str, block_size: int = 16) -> Case:
        """The layer as a Case: for CAPABILITIES, for ids, and for the suite's tensors."""
        return Case(
            dtype=dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_size=self.head_size,
            block_size=block_size,
            attn_type=self.attn_type,
            sliding_window=self.sliding_window,
            alibi=self.alibi_slopes is not None,
            logits_soft_cap=self.logits_soft_cap,
            sinks=self.sinks is not None,
            batch="ragged",
        )


def _pos(length: int) -> tuple[float, ...]:
    """V that tells its position: 0, 1, 2 …"""
    return tuple(float(j) for j in range(length))


def _zeros(length: int) -> tuple[float, ...]:
    """Queries or keys that make every logit 0."""
    return (0.0,) * length


_WINDOW_4 = (0.0, 0.5, 1.0, 1.5, 2.5, 3.5, 4.5, 5.5)
_CAUSAL = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5)
_FAR = 4096

FORMS: Final[tuple[Form, ...]] = (
    Form(
        "soft cap",
        queries=((1.0,),),
        keys=((98.0, 100.0),),
        values=((0.0, 1.0),),
        right=((0.536656,),),
        defects={"ignored": ((0.880797,),)},
        logits_soft_cap=50.0,
    ),
    Form(
        "soft cap after scale",
        queries=((1.0,),),
        keys=((98.0, 100.0),),
        values=((0.0, 1.0),),
        right=((0.605017,),),
        defects={"cap before scale": ((0.518353,),), "ignored": ((0.731059,),)},
        scale=0.5,
        logits_soft_cap=50.0,
    ),
    Form(
        "sink of logit 0",
        queries=((0.0,),),
        keys=(_zeros(3),),
        values=((4.0,) * 3,),
        right=((3.0,),),
        defects={"ignored": ((4.0,),)},
        lse=((log(4.0),),),
        sinks=(0.0,),
    ),
    Form(
        "sink of -inf",
        queries=((0.0,),),
        keys=(_zeros(3),),
        values=((4.0,) * 3,),
        right=((4.0,),),
        defects={"taken for 0": ((3.0,),)},
        lse=((log(3.0),),),
        sinks=(-inf,),
    ),
    Form(
        "window 4, last row",
        queries=((0.0,),),
        keys=(_zeros(8),),
        values=(_pos(8),),
        right=((5.5,),),
        defects={"ignored": ((3.5,),), "one key more": ((5.0,),), "one key less": ((6.0,),)},
        lse=((log(4.0),),),
        sliding_window=4,
    ),
    Form(
        "window 4, every row",
        queries=(_zeros(8),),
        keys=(_zeros(8),),
        values=(_pos(8),),
        right=(_WINDOW_4,),
        defects={"one key more": ((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0),), "ignored": (_CAUSAL,)},
        lse=(tuple(log(float(min(i + 1, 4))) for i in range(8)),),
        sliding_window=4,
    ),
    Form(
        "window 4, last two rows",
        queries=(_zeros(2),),
        keys=(_zeros(8),),
        values=(_pos(8),),
        right=((4.5, 5.5),),
        defects={"top-left": ((0.0, 0.5),), "ignored": ((3.0, 3.5),)},
        sliding_window=4,
    ),
    Form(
        "causal, last two rows",
        queries=(_zeros(2),),
        keys=(_zeros(8),),
        values=(_pos(8),),
        right=((3.0, 3.5),),
        defects={"top-left": ((0.0, 0.5),), "not causal": ((3.5, 3.5),)},
        lse=((log(7.0), log(8.0)),),
    ),
    Form(
        "causal, every row",
        queries=(_zeros(8),),
        keys=(_zeros(8),),
        values=(_pos(8),),
        right=(_CAUSAL,),
        defects={"not causal": ((3.5,) * 8,)},
    ),
    Form(
        "a mask hides key 1",
        queries=(_zeros(2),),
        keys=(_zeros(2),),
        values=((2.0, 6.0),),
        right=((2.0, 4.0),),
        defects={"hidden key seen": ((4.0, 4.0),)},
    ),
    Form(
        "ALiBi, slope 1/2",
        queries=((0.0,),),
        keys=(_zeros(4),),
        values=(_pos(4),),
        right=((2.084576,),),
        defects={"ignored": ((1.5,),), "sign": ((3.0 - 2.084576,),)},
        lse=((log(sum(2.718281828459045 ** (-0.5 * d) for d in range(4))),),),
        alibi_slopes=(0.5,),
    ),
    Form(
        "ALiBi, slope 1/4",
        queries=((0.0,),),
        keys=(_zeros(4),),
        values=(_pos(4),),
        right=((1.807095,),),
        defects={"ignored": ((1.5,),), "another head's slope": ((2.084576,),)},
        alibi_slopes=(0.25,),
    ),
    Form(
        "ALiBi, far out",
        queries=((0.0,),),
        keys=(_zeros(_FAR),),
        values=(tuple(float(_FAR - 1 - j) for j in range(_FAR)),),  # V tells the distance, which counts only near by
        right=((1.5414941,),),
        defects={"positions in bf16": ((3.5072,),)},
        alibi_slopes=(0.5,),
    ),
    Form(
        "encoder-only",
        queries=(_zeros(6),),
        keys=(_zeros(6),),
        values=(_pos(6),),
        right=((2.5,) * 6,),
        defects={"causal leak": (_CAUSAL[:6],)},
        attn_type=AttentionType.ENCODER_ONLY,
    ),
    Form(
        "encoder",
        queries=(_zeros(6),),
        keys=(_zeros(6),),
        values=(_pos(6),),
        right=((2.5,) * 6,),
        defects={"causal leak": (_CAUSAL[:6],)},
        attn_type=AttentionType.ENCODER,
    ),
    Form(
        "encoder window 2 sees one key on each side",
        queries=(_zeros(6),),
        keys=(_zeros(6),),
        values=(_pos(6),),
        right=((0.5, 1.0, 2.0, 3.0, 4.0, 4.5),),
        defects={"causal window": ((0.0, 0.5, 1.5, 2.5, 3.5, 4.5),), "ignored": ((2.5,) * 6,)},
        attn_type=AttentionType.ENCODER_ONLY,
        sliding_window=2,
    ),
    Form(
        "cross attention over 3, 0 and 2 keys",
        queries=((0.0,), (0.0,), (0.0,)),
        keys=(_zeros(3), (), _zeros(2)),
        values=(_pos(3), (), _pos(2)),
        right=((1.0,), (0.0,), (0.5,)),
        defects={"causal": ((0.0,), (0.0,), (0.0,))},
        lse=((log(3.0),), (-inf,), (log(2.0),)),
        attn_type=AttentionType.ENCODER_DECODER,
    ),
    Form(
        "rows without keys",
        queries=(_zeros(5),),
        keys=(_zeros(2),),
        values=((1.0, 3.0),),
        right=((0.0, 0.0, 0.0, 1.0, 2.0),),
        defects={"mean of V": ((2.0, 2.0, 2.0, 1.0, 2.0),), "top-left": ((1.0, 2.0, 2.0, 2.0, 2.0),)},
        lse=((-inf, -inf, -inf, 0.0, 0.693147),),
        reference_only=True,
    ),
    Form(
        "merge of parts",
        queries=((1.0,),),
        keys=((0.0, 1.0, 2.0, 3.0),),
        values=((1.0, 2.0, 3.0, 4.0),),
        right=((3.4926527,),),
        defects={"log2 LSE in a base-e merge": ((3.5564781,),)},
        lse=((3.4401897,),),
    ),
    Form(
        "head map",
        queries=((0.0,),),
        keys=(_zeros(3),),
        values=(((1.0, 2.0),) * 3,),
        right=(((1.0, 1.0, 2.0, 2.0),),),
        defects={"KV heads tiled": (((1.0, 2.0, 1.0, 2.0),),)},
        heads=(4, 2),
    ),
    Form(
        "one key",
        queries=((0.7,),),
        keys=((1.3,),),
        values=((0.1,),),
        right=((0.1,),),
        exact=True,
    ),
    Form(
        "magnitude",
        queries=((256.0,),),
        keys=((256.0, 128.0),),
        values=((1.0, 0.0),),
        right=((1.0,),),
        defects={"QK formed in fp16": ((float("nan"),),)},
        scale=128**-0.5,
        head_size=128,
    ),
    Form(
        "fp8 scales",
        queries=((1.0,),),
        keys=((2.0, 4.0),),
        values=((1.0, 3.0),),
        right=((2.761594,),),
        defects={"k_scale ignored": ((2.999329,),), "v_scale ignored": ((5.523188,),), "both": ((5.998659,),)},
        kv_cache_dtype="fp8",
        k_scale=0.25,
        v_scale=0.5,
    ),
)

ALIBI_SLOPES: Final[Mapping[int, tuple[float, ...]]] = {
    1: (2.0**-8,),
    2: (2.0**-4, 2.0**-8),
    3: (2.0**-4, 2.0**-8, 2.0**-2),
    6: (0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125),
    8: tuple(2.0**-k for k in range(1, 9)),
}
"""Number of heads -> published slopes. A rule that spreads 6 heads evenly begins .39685, .15749."""

FP8_WRITES: Final[Mapping[str, tuple[tuple[float, float], ...]]] = {
    "fp8_e4m3": (
        *((1000.0, 448.0), (-1000.0, -448.0), (inf, 448.0), (-inf, -448.0), (448.0, 448.0)),
        *((17.0, 16.0), (19.0, 20.0), (21.0, 20.0), (17.5, 18.0), (-19.0, -20.0), (0.0, 0.0)),
        *((2.0**-9, 2.0**-9), (2.0**-10, 0.0), (3 * 2.0**-10, 2.0**-8), (1.1 * 2.0**-10, 2.0**-9)),
    ),
    "fp8_e5m2": (
        *((1e5, 57344.0), (-1e5, -57344.0), (inf, 57344.0), (-inf, -57344.0), (61440.0, 57344.0)),
        *((9.0, 8.0), (11.0, 12.0), (13.0, 12.0), (9.5, 10.0), (-11.0, -12.0), (0.0, 0.0)),
        *((2.0**-16, 2.0**-16), (2.0**-17, 0.0), (3 * 2.0**-17, 2.0**-15), (1.1 * 2.0**-17, 2.0**-16)),
    ),
}
"""Cache word -> (value written, value held): clamped, and between two steps to the nearest, ties to even."""

LAST_PAGES: Final = ((1, 1, 1), (15, 15, 1), (16, 16, 1), (17, 1, 2), (32, 16, 2), (33, 1, 3))
"""(length, tokens in the last page, pages) for pages of 16."""

LAST_BYTE_OF_32_BITS: Final = 65536 * 16 * 16 * 128
"""Offset in bytes of block 65536 in pages of 16 tokens, 16 heads of 128, 1 byte: 2147483648, past int32."""
