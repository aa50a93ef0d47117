"""The merge of states: outputs and LSEs of parts become those of the whole, as reference.merge_states has it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cpu_problem import BEST_FIRST, BF16, EVERY, F16, F32, bits, kernels, same, using

from heedful import reference
from heedful.errors import BadInputError
from heedful.kernels.cpu import merge_states

INF, NAN = math.inf, math.nan


def parts(count, tokens=7, heads=3, size=40, dtype=F32, spread=3.0, empty=0.3, seed=0):
    """Random outputs and LSEs; some parts have no key for some rows, and NaN stands in their place."""
    random = torch.Generator().manual_seed(seed)
    outputs = [torch.randn(tokens, heads, size, generator=random).to(dtype) for _ in range(count)]
    lses = [torch.randn(tokens, heads, generator=random) * spread for _ in range(count)]
    for output, lse in zip(outputs, lses, strict=True):
        gone = torch.rand(tokens, heads, generator=random) < empty
        lse[gone] = torch.where(torch.rand(tokens, heads, generator=random) < 0.8, -INF, INF)[gone]
        output[gone] = NAN
    return outputs, lses


def check(found, outputs, lses):
    """Within a step of the dtype of the float64 answer; sums are fp32, so their error goes by the largest summand."""
    wanted, wanted_lse = reference.merge_states([x.double() for x in outputs], [x.double() for x in lses])
    output, lse = found
    scale = torch.stack([x.double().nan_to_num(0, 0, 0).abs() for x in outputs]).amax()
    limit = wanted.abs() * 0.501 * torch.finfo(output.dtype).eps + 5e-7 * scale + 2.0**-25
    assert (output.double() - wanted).abs().sub(limit).amax() <= 0
    none = wanted_lse == -INF
    assert torch.equal(lse == -INF, none)
    assert ((lse.double() - wanted_lse).abs() <= 1e-6 + 1.2e-7 * wanted_lse.abs())[~none].all()


@pytest.mark.parametrize("isa", EVERY)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("size", [1, 3, 16, 24, 64, 72, 128, 130, 576])
def test_parts_merge_as_the_reference_has_it(isa, dtype, size):
    for count, (tokens, heads) in itertools.product((1, 2, 3, 9), ((1, 1), (5, 3), (9, 8))):
        outputs, lses = parts(count, tokens, heads, size, dtype)
        with using(isa):
            check(merge_states(outputs, lses), outputs, lses)


@pytest.mark.parametrize("isa", EVERY)
@pytest.mark.parametrize("cut", range(6))
@pytest.mark.parametrize("holder", [0, 1])
def test_two_parts_of_a_sequence_are_the_whole_where_one_holds_the_sink(isa, cut, holder):
    random = torch.Generator().manual_seed(cut)
    query, key, value = (torch.randn(n, 2, 24, generator=random, dtype=torch.float64) for n in (3, 5, 5))
    starts, sinks = torch.tensor([0, 3]), torch.tensor([0.5, 2.0])
    rules = {"scale": 0.7, "causal": False}
    found = []
    for i, keys in enumerate((slice(0, cut), slice(cut, 5))):
        ends = torch.tensor([0, len(key[keys])])
        held = {"sinks": sinks} if i == holder else {}
        found.append(reference.reference_attention(query, key[keys], value[keys], starts, ends, **rules, **held))
    whole, whole_lse = reference.reference_attention(
        query, key, value, starts, torch.tensor([0, 5]), sinks=sinks, **rules
    )
    with using(isa):
        output, lse = merge_states([x.float() for x, _ in found], [x.float() for _, x in found])
    assert (output - whole).abs().max() < 1e-6
    assert (lse - whole_lse).abs().max() < 1e-6


@pytest.mark.parametrize("isa", EVERY)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("empty", [-INF, INF])
def test_the_only_part_with_keys_comes_back_bit_for_bit(isa, dtype, empty):
    integers = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    random = torch.Generator().manual_seed(0)
    output = torch.randint(-(2**15), 2**15, (4, 5, 437), generator=random).to(integers)  # NaN of many kinds, subnormals
    output[:, :, 7] = torch.iinfo(integers).min  # -0
    output = output.view(dtype)
    lse = torch.tensor([0.1, -0.0, 3e38, -3e38, NAN]).repeat(4, 1)
    nothing = torch.full_like(lse, empty)
    garbage = torch.full_like(output, NAN)
    with using(isa):
        assert same(merge_states([output], [lse]), (output, lse))
        for order in ((0, 1, 2), (1, 0, 2), (1, 2, 0)):
            outputs, lses = [output, garbage, garbage], [lse, nothing, nothing]
            found, found_lse = merge_states([outputs[i] for i in order], [lses[i] for i in order])
            assert same((found, found_lse), (output, lse))


@pytest.mark.parametrize("isa", EVERY)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_rows_without_a_key_are_zero(isa, count):
    outputs = [torch.full((3, 2, 20), NAN)] * count
    lses = [torch.full((3, 2), -INF if i % 2 else INF) for i in range(count)]
    with using(isa):
        output, lse = merge_states(outputs, lses)
    assert torch.equal(bits(output), bits(torch.zeros(3, 2, 20)))
    assert (lse == -INF).all()


@pytest.mark.parametrize("isa", EVERY)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    ("high", "low"),
    [
        (0.0, -88.0),
        (0.0, -104.0),
        (0.0, -3.4e38),
        (3.4e38, 0.0),
        (3.4e38, -3.4e38),
        (88.7, -15.4),
        (-1e4, -1.02e4),
        (1e4, 9.8e3),
        (1e30, 9e29),
        (-1e30, -3e38),
    ],
)
def test_a_part_far_below_another_counts_as_nothing(isa, dtype, high, low):
    random = torch.Generator().manual_seed(0)
    outputs = [torch.randn(2, 3, 20, generator=random).to(dtype) for _ in range(3)]
    lses = [torch.full((2, 3), x) for x in (low, high, low)]
    with using(isa):
        output, lse = merge_states(outputs, lses)
    assert torch.equal(output, outputs[1])
    assert torch.equal(lse, lses[1])
    check((output, lse), outputs, lses)


@pytest.mark.parametrize("isa", EVERY)
@pytest.mark.parametrize("level", [-3e38, -1e5, -700.0, 700.0, 1e5, 3e38])
def test_equal_parts_share_alike_at_any_level(isa, level):
    outputs = [torch.full((2, 3, 20), x) for x in (1.0, 2.0, 6.0, 7.0)]
    lses = [torch.full((2, 3), level)] * 4
    with using(isa):
        output, lse = merge_states(outputs, lses)
    assert (output == 4).all()
    assert torch.allclose(lse.double(), torch.tensor(level, dtype=F32).double() + math.log(4), rtol=1.2e-7)


@pytest.mark.parametrize("isa", EVERY)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("below", [0.0, 50.0, 500.0])
def test_a_nan_in_a_part_with_keys_reaches_its_element_and_no_other(isa, dtype, below):
    outputs, lses = parts(3, tokens=9, heads=2, size=37, dtype=dtype, empty=0)
    outputs[1][4, 1, 30] = outputs[2][8, 0, 0] = NAN
    lses[1] -= below
    with using(isa):
        output, lse = merge_states(outputs, lses)
    wrong = output.isnan().nonzero().tolist()
    assert wrong == [[4, 1, 30], [8, 0, 0]]
    assert lse.isfinite().all()


@pytest.mark.parametrize("isa", EVERY)
@pytest.mark.parametrize("other", [1.0, NAN, -3e38])
def test_a_nan_lse_is_not_hidden_and_stays_in_its_row(isa, other):
    outputs, lses = parts(2, tokens=3, heads=5, empty=0)
    lses[0][1, 2], lses[1][1, 2] = NAN, other
    with using(isa):
        output, lse = merge_states(outputs, lses)
    rows = torch.zeros(3, 5, dtype=torch.bool)
    rows[1, 2] = True
    assert torch.equal(output.isnan().all(-1), rows)
    assert torch.equal(output.isnan().any(-1), rows)
    assert torch.equal(lse.isnan(), rows)


@pytest.mark.parametrize("isa", EVERY)
def test_infinite_outputs_stay_infinite(isa):
    outputs, lses = parts(2, tokens=2, heads=2, size=33, empty=0)
    outputs[0][0, 0, 5], outputs[1][1, 1, 32] = INF, -INF
    with using(isa):
        output, _ = merge_states(outputs, lses)
    assert (output[0, 0, 5], output[1, 1, 32]) == (INF, -INF)
    assert output.isinf().sum() == 2


@pytest.mark.parametrize("isa", EVERY)
def test_many_parts_merge(isa):
    outputs, lses = parts(300, tokens=2, heads=2, size=20, spread=30.0, empty=0.5)
    with using(isa):
        check(merge_states(outputs, lses), outputs, lses)


@pytest.mark.parametrize("isa", EVERY)
@pytest.mark.parametrize("shape", [(0, 3, 16), (4, 0, 16), (4, 3, 0), (0, 0, 0)], ids=str)
def test_nothing_merges_to_nothing(isa, shape):
    outputs = [torch.ones(shape)] * 2
    with using(isa):
        output, lse = merge_states(outputs, [torch.zeros(shape[:2])] * 2)
    assert output.shape == shape
    assert torch.allclose(lse, torch.full(shape[:2], math.log(2)))


@pytest.mark.parametrize("isa", BEST_FIRST)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_thread_count_does_not_change_a_bit(isa, dtype):
    outputs, lses = parts(3, tokens=301, heads=5, size=72, dtype=dtype)
    found = []
    for threads in (1, 2, 3, 7):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        with using(isa):
            found.append(merge_states(outputs, lses))
        torch.set_num_threads(before)
    assert all(same(each, found[0]) for each in found)
    check(found[0], outputs, lses)


@pytest.mark.parametrize("isa", EVERY)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_strides_do_not_change_a_bit_and_gaps_stay(isa, dtype):
    outputs, lses = parts(3, tokens=6, heads=5, size=24, dtype=dtype)
    wide = [_laid_out(outputs[0], (1, 0, 2)), _laid_out(outputs[1], (2, 0, 1)), _laid_out(outputs[2], (0, 1, 2), 3)]
    thin = [lses[0].T.contiguous().T, lses[1].repeat(1, 2)[:, :5], torch.stack([lses[2]] * 2, -1)[..., 1]]
    memory, memory_lse = torch.full((5, 8, 40), 7.0, dtype=dtype), torch.full((5, 8), 7.0)
    output, lse = memory.transpose(0, 1)[1:7, :, 8:32], memory_lse.T[1:7]
    with using(isa):
        plain = merge_states(outputs, lses)
        found = merge_states(wide, thin, output=output, output_lse=lse)
        scattered = torch.zeros(6, 24, 5, dtype=dtype).transpose(1, 2)
        merge_states(outputs, lses, output=scattered)
    assert found[0] is output
    assert found[1] is lse
    assert same(found, plain)
    assert torch.equal(bits(scattered), bits(plain[0]))
    output.fill_(7)
    lse.fill_(7)
    assert (memory == 7).all()
    assert (memory_lse == 7).all()


def _laid_out(x, order, step=1):
    """x in another memory order, its last dimension `step` apart."""
    memory = torch.full([x.shape[i] for i in order[:-1]] + [x.shape[order[-1]] * step], NAN, dtype=x.dtype)
    view = memory[..., ::step].permute([order.index(i) for i in range(3)])
    return view.copy_(x)


@pytest.mark.parametrize("isa", EVERY)
@pytest.mark.parametrize("target", [0, 1])
def test_a_part_may_be_filled_in_place(isa, target):
    outputs, lses = parts(2, tokens=40, heads=3, size=72, dtype=BF16)
    with using(isa):
        right = merge_states(outputs, lses)
        found = merge_states(outputs, lses, output=outputs[target], output_lse=lses[target])
    assert found[0] is outputs[target]
    assert same(found, right)


def test_parts_may_come_as_one_tensor():
    outputs, lses = parts(4)
    assert same(merge_states(torch.stack(outputs), torch.stack(lses)), merge_states(outputs, lses))


def test_inputs_are_left_as_they_were():
    outputs, lses = parts(3)
    before = [x.clone() for x in (*outputs, *lses)]
    merge_states(outputs, lses)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip((*outputs, *lses), before, strict=True))


# Errors ---------------------------------------------------------------------------------------------------------------

ONE, LSE = torch.zeros(4, 2, 8), torch.zeros(4, 2)


def overlapping():
    memory = torch.zeros(5, 2, 8)
    return {"outputs": [memory[:4], ONE], "output": memory[1:]}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"outputs": []}, "0 outputs and 2 LSEs"),
        ({"outputs": [], "lses": []}, "one part at least"),
        ({"lses": [LSE]}, "2 outputs and 1 LSEs; give one LSE an output"),
        ({"outputs": None}, "outputs is NoneType; give a list"),
        ({"lses": LSE[0, 0]}, r"lses is float32 \[\]; give a list"),
        ({"outputs": [None, ONE]}, r"outputs\[0\] is NoneType; give \[tokens, .*, one of float32"),
        ({"outputs": [ONE, ONE.numpy()]}, r"outputs\[1\] is ndarray; give float32 \[4, 2, 8\]"),
        ({"outputs": [ONE.double()] * 2}, r"outputs\[0\] is float64 \[4, 2, 8\]; give \[tokens"),
        ({"outputs": [ONE.char()] * 2}, r"outputs\[0\] is int8"),
        ({"outputs": [ONE[0]] * 2}, r"outputs\[0\] is float32 \[2, 8\]"),
        ({"outputs": [ONE, ONE.half()]}, r"outputs\[1\] is float16 \[4, 2, 8\]; give float32 \[4, 2, 8\]"),
        ({"outputs": [ONE, ONE[:3]]}, r"outputs\[1\] is float32 \[3, 2, 8\]; give float32 \[4, 2, 8\]"),
        ({"lses": [LSE, LSE[:, :1]]}, r"lses\[1\] is float32 \[4, 1\]; give float32 \[4, 2\]"),
        ({"lses": [LSE, LSE.double()]}, r"lses\[1\] is float64"),
        ({"lses": [LSE.T, LSE.T]}, r"lses\[0\] is float32 \[2, 4\]"),
        ({"outputs": [ONE.to("meta")] * 2}, r"outputs\[0\] is on meta; these kernels run on the CPU"),
        ({"lses": [LSE, LSE.to("meta")]}, r"lses\[1\] is on meta"),
        ({"outputs": [ONE, ONE.to_sparse()]}, r"outputs\[1\] is of layout sparse_coo without memory behind it"),
        ({"outputs": [ONE, torch._neg_view(ONE)]}, r"outputs\[1\] is a view that negates"),
        ({"output": ONE[:3]}, r"output is float32 \[3, 2, 8\]; give float32 \[4, 2, 8\]"),
        ({"output": torch.zeros(4, 2, 8).half()}, "output is float16"),
        ({"output": torch.zeros(1, 2, 8).expand(4, 2, 8)}, "several elements lie in one place"),
        ({"output_lse": torch.zeros(1, 2).expand(4, 2)}, "output_lse has shape"),
        ({"output_lse": torch.zeros(4, 2).double()}, "output_lse is float64"),
        (overlapping(), r"output lies in the memory of outputs\[0\]"),
        ({"output": torch.zeros(4, 2, 8), "output_lse": None}, None),
    ],
)
def test_what_does_not_fit_is_one_clear_error(change, text):
    arguments = {"outputs": [ONE, ONE.clone()], "lses": [LSE, LSE.clone()]} | change
    if text is None:
        assert merge_states(**arguments)[0] is change["output"]
        return
    with pytest.raises(BadInputError, match=text) as caught:
        merge_states(**arguments)
    assert "\n" not in str(caught.value)


def test_memory_that_is_gone_is_an_error():
    gone = torch.zeros(4, 2, 8)
    gone.untyped_storage().resize_(0)
    text = ""
    try:
        merge_states([gone, ONE], [LSE, LSE])
    except BadInputError as error:  # pytest would print the tensor in a traceback, and torch dies of that
        text = str(error)
    assert "outputs[0] is of layout strided without memory behind it" in text


def test_an_lse_may_not_lie_in_the_output():
    memory = torch.zeros(64)
    with pytest.raises(BadInputError, match="output_lse lies in the memory of output,"):
        merge_states([ONE], [LSE], output=memory.view(4, 2, 8), output_lse=memory[:8].view(4, 2))


def test_a_gradient_is_not_lost_in_silence():
    with pytest.raises(BadInputError, match="a tensor of merge_states requires grad, but no gradient is computed"):
        merge_states([ONE, ONE.clone().requires_grad_()], [LSE, LSE])
    with torch.no_grad():
        output, _ = merge_states([ONE, ONE.clone().requires_grad_()], [LSE, LSE])
    assert not output.requires_grad


def test_an_unknown_instruction_set_is_an_error():
    with using("avx9"), pytest.raises(BadInputError, match="HEEDFUL_CPU_ISA='avx9'"):
        merge_states([ONE], [LSE])


def test_it_is_where_engines_find_it():
    assert kernels.merge_states is merge_states
