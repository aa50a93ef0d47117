"""Inputs on which a defect must show: each witness runs a backend and says everything that could be seen of it.

Not the suite's checks: these only compare a variant with the plain backend, so that no variant is a no-op.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from heedful.backends.paged import CommonMetadataBuilder
from meta.plain import FP8, Plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Seen = dict[str, Any]
PREFILLS = ((0, 5), (0, 17), (0, 9))
CHUNKS = ((19, 5), (7, 16), (32, 1))
DECODES = ((15, 1, True), (35, 1, True), (6, 1, True))
MIXED = ((0, 6), (18, 3), (20, 1, True), (35, 1, True))
SPECULATIVE = ((18, 3, True), (7, 2, True))


@dataclass(frozen=True)
class Scene:
    """One layer on one step. spans: (context, query tokens, is decode, encoder tokens) a sequence."""

    spans: tuple[tuple[Any, ...], ...] = MIXED
    dtype: torch.dtype = torch.float32
    word: str = "auto"
    heads: tuple[int, int] = (6, 2)
    size: int = 48
    size_v: int | None = None
    kind: str = "decoder"
    rules: dict[str, Any] = field(default_factory=dict)
    scale: float = 0.3
    factor: float = 1.0
    k_scale: Any = 1.0
    v_scale: Any = 1.0
    pads: int = 0
    flat: bool = False
    strided: bool = False
    given: float | None = None
    with_lse: bool = True
    profiling: bool = False
    edit: Callable[[Any], None] | None = None
    spare: int = 2
    from_block_0: bool = False

    @property
    def layer(self) -> dict[str, Any]:
        """Arguments of the constructor."""
        common = {"num_heads": self.heads[0], "head_size": self.size, "scale": self.scale}
        rest = {"num_kv_heads": self.heads[1], "kv_cache_dtype": self.word, "head_size_v": self.size_v}
        return common | rest | self.rules


def slopes(heads: int = 6) -> torch.Tensor:
    """Slopes that no rule yields, so that a backend must use what it is given."""
    return torch.linspace(0.03, 0.6, heads)


def sinks(heads: int = 6) -> torch.Tensor:
    """Near the LSE of ordinary rows, another value a head."""
    return torch.linspace(-1.0, 4.0, heads)


class Stage:
    """Tensors, cache and metadata of a scene, seeded alike for every backend."""

    def __init__(self, backend: type[Plain], scene: Scene) -> None:
        self.scene, self.draw = scene, torch.Generator().manual_seed(7)
        order = torch.randperm(120, generator=self.draw)
        self.blocks: list[int] = (torch.arange(119, -1, -1) if scene.from_block_0 else order).tolist()
        self.metadata = self._metadata(backend)
        self.cache = self._cache(backend)
        rows = self._rows()
        self.query = self._tensor(rows, scene.heads[0], scene.size)
        self.key = self._tensor(self.key_rows, scene.heads[1], scene.size)
        self.value = self._tensor(self.key_rows, scene.heads[1], scene.size_v or scene.size)

    def _spans(self) -> list[tuple[int, int, bool, int]]:
        return [(*span, *(False, 0)[len(span) - 2 :]) for span in self.scene.spans]

    def _metadata(self, backend: type[Plain]) -> Any:
        builder = backend.get_builder_cls()(16)
        assert issubclass(backend.get_builder_cls(), CommonMetadataBuilder)
        for context, query, decode, encoder in self._spans():
            own, cross = self._take(context + query), self._take(encoder) if encoder else []
            builder.add(query, context, own, decode=decode, encoder_len=encoder, cross_blocks=cross)
        tokens = sum(query for _, query, *_ in self._spans())
        found = builder.build(pad_tokens=tokens + self.scene.pads)
        wide = torch.full((len(found.block_tables), found.block_tables.shape[1] + 3), 3, dtype=torch.int32)
        wide[:, : found.block_tables.shape[1]] = found.block_tables
        return replace(found, block_tables=wide[:, : found.block_tables.shape[1] + 1])

    def _take(self, tokens: int) -> list[int]:
        if self.scene.profiling:
            return []
        return [self.blocks.pop() for _ in range(-(-tokens // 16) + self.scene.spare - 2)]

    def _rows(self) -> int:
        meta, scene = self.metadata, self.scene
        self.key_rows = len(meta.slot_mapping)
        if scene.kind == "encoder":
            self.key_rows = sum(span[3] for span in self._spans()) + scene.pads
            return self.key_rows
        if scene.kind == "encoder_decoder":
            self.key_rows = len(meta.cross_slot_mapping)
        return len(meta.slot_mapping)

    def _cache(self, backend: type[Plain]) -> Any:
        scene, dtype = self.scene, FP8.get(self.scene.word, self.scene.dtype)
        shape = backend.get_kv_cache_shape(128, 16, scene.heads[1], scene.size, scene.word, scene.size_v)
        if scene.profiling:
            return torch.empty(0, dtype=dtype)
        shapes = [shape[1:]] * 2 if isinstance(shape[0], int) else shape
        parts = [torch.full(s, 200.0).to(dtype) for s in shapes]
        for view in (part.transpose(1, 2) for part in parts):
            for table, length in self._contexts():
                for position in range(length):
                    row = torch.randn(view.shape[2:], generator=self.draw).to(dtype)
                    view[table[position // 16], position % 16] = row
        if not isinstance(shape[0], int):
            return tuple(parts)
        return torch.stack([part.view(torch.uint8) if dtype.itemsize == 1 else part for part in parts]).view(dtype)

    def _contexts(self) -> Iterator[tuple[list[int], int]]:
        """Pages that hold keys of earlier steps."""
        meta = self.metadata
        yield from zip(meta.block_tables.tolist(), meta.context_lens.tolist(), strict=True)
        if meta.cross_block_tables is not None:
            yield from zip(meta.cross_block_tables.tolist(), meta.encoder_seq_lens.tolist(), strict=True)

    def _tensor(self, rows: int, heads: int, size: int) -> torch.Tensor:
        x = (torch.randn(rows, heads, size, generator=self.draw) * self.scene.factor).to(self.scene.dtype)
        if self.scene.strided:
            wide = torch.full((rows, heads + 1, size), 99.0, dtype=x.dtype)
            wide[:, :heads] = x
            x = wide[:, :heads]
        return x.reshape(rows, heads * size) if self.scene.flat else x

    def run(self, impl: Any, **changes: Any) -> Seen:
        """One forward and what came of it."""
        scene = self.scene
        output = lse = None
        if scene.given is not None:
            wide = torch.full((len(self.query), scene.heads[0], (scene.size_v or scene.size) + 2), scene.given)
            output = wide.to(scene.dtype)[..., :-2]
        if scene.with_lse:
            lse = torch.full((len(self.query), scene.heads[0]), 5.0)
        named = {"k_scale": scene.k_scale, "v_scale": scene.v_scale, "attn_type": scene.kind} | changes
        args = (self.query, self.key, self.value, self.cache, self.metadata)
        out = impl.forward(*args, **named, output=output, output_lse=lse)
        seen: Seen = {"dtype": out.dtype, "shape": out.shape, "out": out.clone(), "query": self.query.clone()}
        parts = list(self.cache) if isinstance(self.cache, tuple) else [self.cache]
        seen |= {f"cache {i}": part.clone() for i, part in enumerate(parts)}
        return seen | {"returned": output is None or out is output, "lse": lse, "output": output}


def scene_run(backend: type[Plain], scene: Scene) -> Seen:
    """The step of one scene."""
    stage = Stage(backend, scene)
    if scene.edit is not None:
        scene.edit(stage)
    return stage.run(backend(**scene.layer))


def seen_or_error(run: Callable[[], Seen]) -> Seen:
    """What was seen, or the kind of error that came."""
    with contextlib.suppress(RecursionError):
        try:
            return run()
        except Exception as error:
            return {"error": type(error).__name__}
    return {"error": "RecursionError"}


def differs(a: Seen, b: Seen) -> list[str]:
    """The things that two runs show differently; numbers further apart than rounding."""
    if a.keys() != b.keys():
        return sorted(a.keys() ^ b.keys())
    return [name for name in a if not alike(a[name], b[name])]


def alike(a: Any, b: Any) -> bool:
    """Equal, or equal to rounding."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return bool(a == b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.itemsize == 1:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-5, equal_nan=True)
