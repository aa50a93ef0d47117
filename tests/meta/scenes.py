"""The witnesses by name: layers and steps, bad metadata, calls in a row, block copies, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from meta.witness import (
    CHUNKS,
    DECODES,
    MIXED,
    PREFILLS,
    SPECULATIVE,
    Scene,
    Seen,
    Stage,
    scene_run,
    seen_or_error,
    sinks,
    slopes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from meta.plain import Plain

    Witness = Callable[[type[Plain]], Seen]

CAP = {"logits_soft_cap": 2.0}
WINDOW = {"sliding_window": 5}
ENCODED = ((0, 4, False, 19), (0, 7, False, 6), (0, 2, False, 11))
CROSS = ((0, 4, False, 19), (3, 2, False, 0), (20, 1, True, 2))
BATCHES = {"prefill": PREFILLS, "chunk": CHUNKS, "decode": DECODES, "mixed": MIXED, "speculative": SPECULATIVE}
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cap": CAP,
    "window": WINDOW,
    "alibi": {"alibi_slopes": slopes()},
    "sinks": {"sinks": sinks()},
    "alibi cap": {"alibi_slopes": slopes(), **CAP},
    "alibi window": {"alibi_slopes": slopes(), **WINDOW},
    "sinks cap": {"sinks": sinks(), **CAP},
    "sinks window": {"sinks": sinks(), **WINDOW},
}
SCENES: dict[str, Scene] = {
    f"{batch} {rule}": Scene(spans, rules=rules) for batch, spans in BATCHES.items() for rule, rules in RULES.items()
}
SCENES |= {f"encoder {rule}": Scene(ENCODED, kind="encoder", rules=RULES[rule]) for rule in RULES}
SCENES |= {f"encoder-only {rule}": Scene(PREFILLS, kind="encoder_only", rules=RULES[rule]) for rule in RULES}
SCENES |= {f"cross {rule}": Scene(CROSS, kind="encoder_decoder", rules=RULES[rule]) for rule in ("plain", "sinks")}
SCENES |= {f"profiling {rule}": Scene(PREFILLS, profiling=True, rules=RULES[rule]) for rule in RULES}
SCENES |= {
    f"{word} {dtype}": Scene(MIXED, dtype=dtype, word=word, k_scale=0.05, v_scale=torch.tensor(0.11))
    for word in ("fp8", "fp8_e5m2")
    for dtype in (torch.float32, torch.bfloat16)
}


def _overwrite(stage: Stage) -> None:
    """NaN, infinities, ties and values past the largest fp8 number among the keys and values."""
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e6, -1e6, 17.0, 19.0, 1.0625])
    for x in (stage.key, stage.value):
        x.view(-1)[: len(special)] = special.to(x.dtype)


def _far(stage: Stage) -> None:
    stage.query.fill_(40.0)
    stage.key.fill_(40.0)


def _cross_read(stage: Stage) -> None:
    stage.key = stage.value = None


SCENES |= {
    "special fp8": Scene(MIXED, word="fp8", edit=_overwrite),
    "special e5m2": Scene(MIXED, word="fp8_e5m2", edit=_overwrite),
    "magnitude": Scene(PREFILLS, dtype=torch.float16, edit=_far, scale=0.14),
    "peaky": Scene(PREFILLS, factor=8.0, scale=1.0),
    "bf16": Scene(((0, 400), (300, 1, True)), dtype=torch.bfloat16),
    "bf16 alibi": Scene(((700, 2), (300, 1, True)), dtype=torch.bfloat16, rules=RULES["alibi"]),
    "fp16": Scene(((0, 20), (300, 1, True)), dtype=torch.float16),
    "mixed sizes": Scene(MIXED, size_v=80),
    "small values": Scene(MIXED, size_v=16),
    "head 80": Scene(MIXED, size=80),
    "pads": Scene(MIXED, pads=3),
    "pads given": Scene(MIXED, pads=3, given=torch.nan, with_lse=False),
    "encoder pads": Scene(ENCODED, kind="encoder", pads=2, given=torch.nan, with_lse=False),
    "given": Scene(MIXED, given=3.0),
    "flat": Scene(MIXED, flat=True),
    "strided": Scene(MIXED, strided=True),
    "empty sequence": Scene(((0, 4), (0, 0), (20, 3), (35, 1, True))),
    "nothing": Scene(((0, 0),)),
    "page end": Scene(((16, 16), (31, 1, True)), spare=3),
    "block 0": Scene(PREFILLS, from_block_0=True),
    "window of one": Scene(MIXED, rules={"sliding_window": 1}),
    "square pages": Scene(MIXED, heads=(16, 16)),
    "cross read": Scene(CROSS, kind="encoder_decoder", edit=_cross_read),
    "cross window": Scene(CROSS, kind="encoder_decoder", rules=WINDOW),
    "cross alibi": Scene(CROSS, kind="encoder_decoder", rules=RULES["alibi"]),
    "scale without fp8": Scene(MIXED, k_scale=2.0),
    "NaN scale": Scene(MIXED, word="fp8", k_scale=torch.nan),
    "window of zero": Scene(MIXED, rules={"sliding_window": 0}),
    "odd heads": Scene(MIXED, heads=(6, 4)),
    "one sink": Scene(MIXED, rules={"sinks": torch.ones(1)}),
    "one slope": Scene(MIXED, rules={"alibi_slopes": torch.ones(1)}),
    "block-sparse": Scene(MIXED, rules={"blocksparse_params": {"local_blocks": 4}}),
    "unknown argument": Scene(MIXED, rules={"logit_soft_cap": 2.0}),
}


def _field(name: str, change: Callable[[Any], Any]) -> Callable[[Stage], None]:
    def edit(stage: Stage) -> None:
        value = getattr(stage.metadata, name)
        stage.metadata = replace(stage.metadata, **{name: change(value)})

    return edit


def _with(index: int | tuple[int, int], number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[index] = number
        return x

    return change


def _key_dtype(stage: Stage) -> None:
    stage.key = stage.key.bfloat16()


def _wide_query(stage: Stage) -> None:
    stage.query = torch.cat((stage.query, stage.query), -1)


SCENES |= {
    "block past cache": Scene(edit=_field("block_tables", _with((1, 0), 128))),
    "block twice": Scene(edit=lambda s: s.metadata.block_tables[1].copy_(s.metadata.block_tables[1, :1].expand(4))),
    "negative block": Scene(edit=_field("block_tables", _with((1, 0), -1))),
    "slot past cache": Scene(edit=_field("slot_mapping", _with(0, 128 * 16 + 3))),
    "slot twice": Scene(edit=_field("slot_mapping", lambda x: _with(0, int(x[1]))(x))),
    "seq_len": Scene(edit=_field("seq_lens", _with(1, 20))),
    "counts": Scene(edit=lambda s: s.__setattr__("metadata", replace(s.metadata, num_prefills=1, num_decodes=3))),
    "profiling context": Scene(CHUNKS, profiling=True),
    "key dtype": Scene(edit=_key_dtype),
    "query size": Scene(edit=_wide_query),
}


def calls_in_a_row(backend: type[Plain]) -> Seen:
    """One layer, two steps: the first answer must stand, the second must be its own."""
    scene = Scene(DECODES, word="fp8", k_scale=0.5)
    impl, found = backend(**scene.layer), {}
    first = Stage(backend, scene)
    args = (first.query, first.key, first.value, first.cache, first.metadata)
    answer = impl.forward(*args, k_scale=0.5)
    for name, spans, k_scale in (
        ("second", DECODES, 0.25),
        ("third", ((8, 1, True), (20, 1, True), (9, 1, True)), 0.5),
    ):
        stage = Stage(backend, replace(scene, spans=spans, k_scale=k_scale))
        stage.query.mul_(2)
        found |= {f"{name} {key}": value for key, value in stage.run(impl).items()}
    return found | {"first": answer}


def layers_of_a_step(backend: type[Plain]) -> Seen:
    """Two layers with other rules share one metadata object."""
    stage, found = Stage(backend, Scene(MIXED)), {}
    for name in ("plain", "window", "alibi"):
        found |= {f"{name} {k}": v for k, v in stage.run(backend(**Scene(rules=RULES[name]).layer)).items()}
    rules = {"alibi_slopes": slopes().flip(0)}
    return found | {f"other {k}": v for k, v in stage.run(backend(**Scene(rules=rules).layer)).items()}


def _caches(backend: type[Plain], seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(backend.get_kv_cache_shape(8, 16, 2, 8), generator=draw) for _ in range(2)]


def copies(backend: type[Plain]) -> Seen:
    """Blocks copied inside two layers' caches."""
    caches = _caches(backend, 1)
    backend.copy_blocks(caches, torch.tensor([[1, 5], [2, 0], [1, 7]]))
    return {f"layer {i}": cache for i, cache in enumerate(caches)}


def copies_in_a_chain(backend: type[Plain]) -> Seen:
    """A block both source and destination."""
    caches = _caches(backend, 1)
    backend.copy_blocks(caches, torch.tensor([[1, 5], [5, 0]]))
    return {"layer 0": caches[0]}


def swaps(backend: type[Plain]) -> Seen:
    """Blocks copied from one cache to another."""
    (src, dst) = _caches(backend, 2)
    backend.swap_blocks(src, dst, torch.tensor([[1, 5], [2, 0]]))
    return {"source": src, "destination": dst}


def far_slots(backend: type[Plain]) -> Seen:
    """Two blocks on both sides of byte 2^31 of a 2 GiB cache that is never touched elsewhere."""
    cache = torch.empty(backend.get_kv_cache_shape(65538, 16, 16, 128), dtype=torch.float8_e4m3fn)
    impl = backend(16, 128, 0.1, kv_cache_dtype="fp8")
    stage = Stage(backend, Scene(((3, 1, True),), word="fp8", heads=(16, 16), size=128))
    far = torch.tensor([[65536]], dtype=torch.int32)
    stage.metadata = replace(stage.metadata, block_tables=far, slot_mapping=torch.tensor([65536 * 16 + 3]))
    for part in (0, 1):
        cache[part, 65536].view(torch.uint8).fill_(0x30)
    out = impl.forward(stage.query, stage.key, stage.value, cache, stage.metadata)
    return {"out": out, "block": cache[:, 65536].clone()}


def unknown_forward_argument(backend: type[Plain]) -> Seen:
    """forward with a word that nobody knows."""
    return Stage(backend, Scene()).run(backend(**Scene().layer), logits_softcap=3.0)


def claims(backend: type[Plain]) -> Seen:
    """What CAPABILITIES say: a refusal that is claimed and never made shows here."""
    return {"claims": backend.CAPABILITIES}


FUNCTIONS = (
    calls_in_a_row,
    layers_of_a_step,
    copies,
    copies_in_a_chain,
    swaps,
    unknown_forward_argument,
    claims,
    far_slots,
)


def witnesses() -> dict[str, Witness]:
    """Every witness by name, each never raising."""
    found: dict[str, Witness] = {}
    for name, scene in SCENES.items():
        found[name] = lambda backend, scene=scene: seen_or_error(lambda: scene_run(backend, scene))
    for function in FUNCTIONS:
        found[function.__name__] = lambda backend, run=function: seen_or_error(lambda: run(backend))
    return found
