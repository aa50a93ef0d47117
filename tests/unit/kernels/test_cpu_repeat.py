"""Calls that repeat an earlier one of their step are not checked again: they must do what a checked call does."""

from __future__ import annotations

import gc
import os
import threading
import types
import weakref
from dataclasses import replace
from unittest import mock

import pytest
import torch
from cpu_problem import BEST_FIRST, bits, using
from cpu_step import (
    BLOCK,
    HEADS,
    KV_HEADS,
    SIZE,
    Step,
    by_heads,
    checked,
    copied,
    disguised,
    one_less,
    outcome,
    same,
    strided,
    wide,
)

from heedful.backends.paged_impl import PagedImpl
from heedful.backends.paged_step import Watch
from heedful.backends.torch_sdpa import TorchSdpaBackend
from heedful.conformance.bench import Bench
from heedful.conformance.cases import cells
from heedful.errors import BadInputError, MetadataError
from heedful.kernels.cpu import chosen_isa, library
from heedful.types import AttentionType, Device


@pytest.fixture
def checks():
    """How many calls were checked."""
    with mock.patch.object(PagedImpl, "_checked", autospec=True, side_effect=PagedImpl._checked) as spy:
        yield lambda: spy.call_count


CHANGES = {
    "the same": lambda s: {},
    "no output": lambda s: {"output": None},
    "all flat": lambda s: {
        "query": s.normal(s.rows, HEADS * SIZE),
        "key": s.normal(s.rows, KV_HEADS * SIZE),
        "value": s.normal(s.rows, KV_HEADS * SIZE),
        "output": None,
    },
    "a flat output": lambda s: {"output": s.normal(s.rows, HEADS * SIZE)},
    "an output of other strides": lambda s: {"output": by_heads(s.normal(s.rows, HEADS, SIZE))},
    "an output with room": lambda s: {"output": wide(s.normal(s.rows, HEADS, SIZE))},
    "an output of strided elements": lambda s: {"output": strided(s.normal(s.rows, HEADS, SIZE))},
    "a query of other strides": lambda s: {"query": wide(s.normal(s.rows, HEADS, SIZE))},
    "a query of strided elements": lambda s: {"query": strided(s.normal(s.rows, HEADS, SIZE))},
    "a key of other strides": lambda s: {"key": by_heads(s.normal(s.rows, KV_HEADS, SIZE))},
    "a value of one head": lambda s: {"value": s.normal(s.rows, 1, SIZE).expand(-1, KV_HEADS, -1)},
    "more pages": lambda s: {"kv_cache": s.cache(12)},
    "a cache of a list": lambda s: {"kv_cache": list(s.cache())},
    "a cache of a pair": lambda s: {"kv_cache": (s.cache()[1], s.cache()[0])},
    "a cache with room": lambda s: {"kv_cache": wide(s.cache())},
    "a cache of two halves": lambda s: {"kv_cache": torch.stack([*s.cache(), *s.cache()])[::3]},
    "a cache for torch": lambda s: {"kv_cache": strided(s.cache())},
    "an lse": lambda s: {"output_lse": s.normal(s.rows, HEADS, dtype=torch.float32)},
    "an lse of other strides": lambda s: {"output_lse": s.normal(HEADS, s.rows, dtype=torch.float32).T},
    "the word": lambda s: {"attn_type": "decoder"},
    "scales of 0-dim tensors": lambda s: {"k_scale": torch.tensor(1.0), "v_scale": torch.tensor(1.0)},
    "scales of whole numbers": lambda s: {"k_scale": 1, "v_scale": 1},
}
FP8_CHANGES = {
    "other scales": lambda s: {"k_scale": 0.25, "v_scale": 3.0},
    "a 0-dim tensor": lambda s: {"k_scale": torch.tensor(0.125)},
    "a whole number": lambda s: {"k_scale": 2},
}
LAYERS = {
    "another scale": {"scale": 0.5},
    "a window": {"sliding_window": 6},
    "a soft cap": {"logits_soft_cap": 3.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.1, 0.3]},
    "sinks": {"sinks": torch.tensor([0.3, -2.0, 5.0, 1.0])},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_call_of_another_form_in_the_same_step_is_what_a_checked_one_is(change, dtype):
    step = Step(dtype)
    impl = step.impl()
    for name in ("the same", "the same", "changed", "the same", "changed", "changed"):
        arguments = step.arguments(**(change(step) if name == "changed" else {}))
        wanted = checked(impl, arguments)
        assert isinstance(wanted, list), wanted
        assert same(outcome(impl, arguments), wanted), name


@pytest.mark.parametrize("change", FP8_CHANGES.values(), ids=FP8_CHANGES)
def test_scales_are_those_of_the_call(change):
    step = Step(torch.bfloat16, "fp8")
    impl = step.impl()
    for changes in ({}, {}, change(step), {}, change(step)):
        arguments = step.arguments(**changes)
        assert same(outcome(impl, arguments), checked(impl, arguments)), changes


@pytest.mark.parametrize("rules", LAYERS.values(), ids=LAYERS)
def test_another_layer_computes_its_own(rules):
    step = Step()
    plain, other, third = step.impl(), step.impl(**rules), step.impl(**rules)
    if "sinks" in rules or "alibi_slopes" in rules:  # two layers that check alike, with other numbers
        third = step.impl(**{name: torch.as_tensor(x) / 2 for name, x in rules.items()})
    for impl in (plain, other, plain, other, third):
        arguments = step.arguments()
        assert same(outcome(impl, arguments), checked(impl, arguments))
    arguments = step.arguments()
    assert not same(checked(plain, arguments), checked(other, arguments)), "this rule changes nothing here"


def test_other_dtypes_share_a_step():
    step = Step()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.bfloat16, torch.float32):
        step.dtype = dtype
        impl, arguments = step.impl(), step.arguments()
        assert same(outcome(impl, arguments), checked(impl, arguments)), dtype


def test_layers_that_check_alike_are_checked_once_in_a_step(checks):
    step = Step()
    for scale in (0.1, 0.2, 0.3):
        step.impl(scale=scale).forward(**step.arguments())
    assert checks() == 1
    step.impl(sliding_window=4).forward(**step.arguments())
    step.impl().forward(**step.arguments(output=None))
    assert checks() == 3
    step.impl().forward(**step.arguments(attn_metadata=replace(step.metadata, step={})))
    assert checks() == 4


def test_a_layer_on_torch_is_checked_in_every_call(checks):
    step = Step()
    impl = TorchSdpaBackend.get_impl_cls()(1, 513, 1.0)
    for _ in range(2):
        rows = torch.ones(step.rows, 1, 513)
        impl.forward(rows, rows, rows, torch.ones(2, 9, 1, BLOCK, 513), step.metadata)
    assert checks() == 2


def turned(name, how):
    """The usual tensor, made wrong in one way."""
    return lambda step: {name: how(step.arguments()[name])}


ONE_WAY = {
    "is in disguise": disguised,
    "is elsewhere": lambda x: torch.empty_like(x, device="meta"),
    "has another dtype": lambda x: x.view(torch.int32),
    "has one less": one_less,
}
TURNED = {
    f"the {name} {word}": turned(name, how)
    for name in ("query", "key", "value", "kv_cache", "output")
    for word, how in ONE_WAY.items()
}
WRONG = TURNED | {
    "an unknown word": lambda s: {"scales": 1},
    "a query of another size": lambda s: {"query": s.normal(s.rows, HEADS, SIZE + 1)},
    "a query in a list": lambda s: {"query": [[0.0]]},
    "too few rows": lambda s: (
        {name: s.normal(4, h, SIZE) for name, h in (("query", 4), ("key", 2), ("value", 2))} | {"output": None}
    ),
    "no key": lambda s: {"key": None},
    "neither key nor value": lambda s: {"key": None, "value": None},
    "a key of more rows": lambda s: {"key": s.normal(s.rows + 1, KV_HEADS, SIZE)},
    "a key without strides": lambda s: {"key": s.normal(s.rows, KV_HEADS, SIZE).to_sparse()},
    "an array": lambda s: {"value": s.normal(s.rows, KV_HEADS, SIZE).numpy()},
    "no cache": lambda s: {"kv_cache": None},
    "a cache of one part": lambda s: {"kv_cache": s.cache()[:1]},
    "a cache of three parts": lambda s: {"kv_cache": [*s.cache(), s.cache()[0]]},
    "a cache of more heads": lambda s: {"kv_cache": s.normal(2, 9, KV_HEADS + 1, BLOCK, SIZE)},
    "a cache of fewer blocks": lambda s: {"kv_cache": s.cache(4)},
    "an empty cache": lambda s: {"kv_cache": torch.empty(0)},
    "an output of another shape": lambda s: {"output": s.normal(s.rows, SIZE, HEADS)},
    "an output of one place": lambda s: {"output": s.normal(1, HEADS, SIZE).expand(s.rows, -1, -1)},
    "an lse of another dtype": lambda s: {"output_lse": s.normal(s.rows, HEADS, dtype=torch.float16)},
    "an lse of another shape": lambda s: {"output_lse": s.normal(HEADS, s.rows, dtype=torch.float32)},
    "a scale": lambda s: {"k_scale": 2.0},
    "a scale of NaN": lambda s: {"v_scale": float("nan")},
    "a scale that is a bool": lambda s: {"k_scale": True},
    "a scale of two": lambda s: {"k_scale": torch.ones(2)},
    "an unknown kind": lambda s: {"attn_type": "decodr"},
    "a kind that is no word": lambda s: {"attn_type": ["decoder"]},
    "another kind": lambda s: {"attn_type": "encoder_only"},
    "no metadata": lambda s: {"attn_metadata": None},
    "what looks like metadata": lambda s: {"attn_metadata": types.SimpleNamespace(**vars(s.metadata))},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_wrong_call_is_the_same_error_every_time(change):
    step = Step()
    impl = step.impl()
    for name in ("right", "right", "wrong", "wrong", "right", "wrong"):
        arguments = step.arguments(**(change(step) if name == "wrong" else {}))
        wanted = outcome(impl, arguments | {"attn_metadata": fresh(arguments["attn_metadata"])})
        assert isinstance(wanted, tuple) == (name == "wrong"), wanted
        found = outcome(impl, arguments)
        assert isinstance(found, tuple) == (name == "wrong"), found
        if name == "wrong":
            assert found == wanted


def fresh(metadata):
    return replace(metadata, step={}) if hasattr(metadata, "__dataclass_fields__") else metadata


class Kind(str):
    """Equal to a word, and without a hash."""

    __slots__ = ()
    __hash__ = None

    def __eq__(self, other):
        return str.__eq__(self, other)


def test_a_kind_without_a_hash_is_checked_in_every_call(checks):
    step = Step()
    for _ in range(2):
        step.impl().forward(**step.arguments(attn_type=Kind("decoder")))
    assert checks() == 2


def test_metadata_that_was_written_in_place_is_validated_again():
    step = Step()
    impl = step.impl()
    for _ in range(2):
        impl.forward(**step.arguments())
    step.metadata.slot_mapping[0] += 1
    for _ in range(2):
        arguments = step.arguments()
        before = copied(arguments["kv_cache"])
        with pytest.raises(MetadataError, match="sequence 0: row 0 has slot"):
            impl.forward(**arguments)
        assert torch.equal(arguments["kv_cache"], before)
    step.metadata.slot_mapping[0] = -1
    for _ in range(2):
        arguments = step.arguments()
        assert same(outcome(impl, arguments), checked(impl, arguments))


@pytest.mark.parametrize("field", ["seq_lens", "block_tables", "max_seq_len", "num_decodes"])
def test_a_field_that_was_replaced_is_validated_again(field):
    step = Step()
    impl = step.impl()
    for _ in range(2):
        impl.forward(**step.arguments())
    setattr(step.metadata, field, getattr(step.metadata, field) * 0)
    for _ in range(2):
        with pytest.raises(MetadataError):
            impl.forward(**step.arguments())


def test_a_replaced_table_sends_keys_elsewhere():
    step = Step()
    impl = step.impl()
    for _ in range(2):
        impl.forward(**step.arguments())
    for name in ("block_tables", "slot_mapping"):
        setattr(step.metadata, name, getattr(step.metadata, name).clone())
    step.metadata.block_tables[2, 0] = 8
    step.metadata.slot_mapping[6] = 8 * BLOCK + 3
    arguments = step.arguments()
    wanted = checked(impl, arguments)
    assert same(outcome(impl, arguments), wanted)
    assert same(outcome(impl, arguments), wanted)


def test_a_watch_tells_equal_values_of_other_objects_apart():
    metadata = Step().metadata
    watch = Watch(metadata)
    assert watch.holds(metadata)
    assert watch.holds(replace(metadata))
    assert not watch.holds(replace(metadata, seq_lens=metadata.seq_lens.clone()))
    metadata.context_lens.zero_()
    assert not watch.holds(metadata)


def test_the_instruction_set_is_that_of_the_moment():
    step = Step()
    impl, found = step.impl(), []
    arguments = step.arguments()
    for isa in (BEST_FIRST[0], "naive", BEST_FIRST[-1], "naive", BEST_FIRST[0]):
        with using(isa):
            assert chosen_isa() == isa
            wanted = checked(impl, arguments)
            found.append(outcome(impl, arguments))
            assert same(found[-1], wanted), isa
    assert same(found[0], found[-1])
    assert same(found[1], found[3])
    assert not same(found[0], found[1]), "these two agree in every bit, so this test sees nothing"


def test_an_unknown_instruction_set_is_an_error_before_anything_is_written():
    step = Step()
    impl = step.impl()
    for _ in range(2):
        impl.forward(**step.arguments())
    arguments = step.arguments()
    before = copied(arguments["kv_cache"])
    with using("portible"), pytest.raises(BadInputError, match="HEEDFUL_CPU_ISA='portible'"):
        impl.forward(**arguments)
    assert torch.equal(arguments["kv_cache"], before)
    assert arguments["output"].isnan().all()


def test_an_environment_that_was_put_in_the_place_of_pythons_own_is_read():
    with mock.patch("os.environ", dict(os.environ) | {"HEEDFUL_CPU_ISA": "naive"}):
        assert chosen_isa() == "naive"
    assert chosen_isa() == BEST_FIRST[0]


def test_threads_are_those_of_the_moment():
    step, before = Step(), torch.get_num_threads()
    impl, asked = step.impl(), []

    def spy(form, operands, isa, real=library._LIBRARY.heedful_step):
        asked.append(int.from_bytes(operands[-4:], "little"))
        return real(form, operands, isa)

    try:
        with mock.patch.object(library._LIBRARY, "heedful_step", spy):
            for threads in (1, 2, 3, 1):
                torch.set_num_threads(threads)
                impl.forward(**step.arguments())
    finally:
        torch.set_num_threads(before)
    assert asked == [1, 2, 3, 1]


def test_rows_of_padding_are_cleared_in_every_call():
    step = Step()
    impl = step.impl()
    for _ in range(3):
        lse = torch.zeros(step.rows, HEADS)
        answer = impl.forward(**step.arguments(output_lse=lse))
        assert (answer[-2:] == 0).all()
        assert (lse[-2:] == -torch.inf).all()
        assert not answer.isnan().any()


def test_two_threads_share_a_layer_and_a_step():
    """Each with tensors of its own, some of forms that the other has not shown yet."""
    step = Step(torch.bfloat16)
    impl, changes = step.impl(), [change for change in CHANGES.values() for _ in range(20)]
    calls = [[step.arguments(**change(step)) for change in changes] for _ in range(2)]
    wanted = [[checked(impl, arguments) for arguments in side] for side in calls]
    found, start = [[], []], threading.Barrier(2)

    def work(side):
        start.wait()
        for arguments in calls[side]:
            found[side].append(outcome(impl, arguments))

    workers = [threading.Thread(target=work, args=(side,)) for side in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for side in (0, 1):
        assert all(same(a, b) for a, b in zip(found[side], wanted[side], strict=True))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda step, first: {"query": first["query"].clone().requires_grad_()}, "query requires grad"),
        (lambda step, first: {"query": first["output"]}, "output lies in the memory of query"),
        (lambda step, first: {"key": torch.imag(torch.zeros(first["key"].shape, dtype=torch.complex64).conj())}, "key"),
    ],
    ids=["gradient", "shared memory", "negated view"],
)
def test_what_a_form_does_not_tell_is_looked_at_in_every_call(change, error):
    step = Step()
    impl, first = step.impl(), step.arguments()
    first["output"] = torch.empty(step.rows, HEADS, SIZE)
    for _ in range(2):
        impl.forward(**first)
    with pytest.raises(BadInputError, match=error):
        impl.forward(**(first | change(step, first)))


def test_no_tensor_of_a_call_is_kept():
    step = Step()
    impl = step.impl()
    for _ in range(2):
        arguments = step.arguments(output_lse=torch.zeros(step.rows, HEADS))
        alive = [weakref.ref(x) for name, x in arguments.items() if isinstance(x, torch.Tensor)]
        impl.forward(**arguments)
        del arguments
        gc.collect()
        assert [ref for ref in alive if ref() is not None] == []


def cases(attn_type):
    """What the suite's smoke profile runs on the kernels, and does not refuse."""
    found = dict.fromkeys(case for _, case in cells("smoke") if case.attn_type == attn_type)
    on_kernels = [case for case in found if max(case.head_size, case.size_v) <= 512]
    return [case for case in on_kernels if not TorchSdpaBackend.unsupported_reasons(case.request(), Device("cpu"))]


@pytest.mark.parametrize("attn_type", list(AttentionType))
def test_every_case_of_the_suite_repeats_bit_for_bit(attn_type, checks):
    """The calls of two layers of one step, on caches of their own."""
    ours = cases(attn_type)
    assert len(ours) >= 3
    for case in ours:
        bench, before = Bench(TorchSdpaBackend, case), checks()
        arguments, found = bench.arguments(), []
        for _ in range(2):
            cache = bench.fill()
            answer = bench.layer().forward(**(arguments | {"kv_cache": cache}))
            found.append([bits(x) for x in (answer, *cache)])
        assert all(map(torch.equal, *found)), case
        assert checks() == before + 1, case
