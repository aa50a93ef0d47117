"""Where tensors lie: what has no address, what holds an element twice, what lies in something else."""

from __future__ import annotations

import itertools

import pytest
import torch

from heedful.errors import BadInputError
from heedful.memory import check_addressable, check_apart, check_no_gradient, check_unshared, span


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(3, 4),
        torch.zeros(3, 4).T,
        torch.zeros(3, 4)[1:, ::2],
        torch.zeros(1).expand(3, 4),
        torch.zeros(0, 4),
        torch.zeros(3, 0, device="meta"),
        torch.zeros(3, dtype=torch.float8_e4m3fn),
    ],
    ids=lambda x: f"{list(x.shape)}{x.stride()}",
)
def test_what_lies_in_memory_may_be_addressed(x):
    check_addressable("x", x)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.zeros(2, 2).to_sparse(), "x is of layout sparse_coo without memory behind it; give a dense"),
        (lambda: torch.zeros(2, 2).to_mkldnn(), "x is of layout _mkldnn without memory"),
        (lambda: torch.zeros(2, 2, device="meta"), "x is on meta; give a dense tensor that holds its elements"),
        (lambda: torch._efficientzerotensor(2, 2), "x is of layout strided without memory"),
        (lambda: torch.complex(torch.zeros(2), torch.ones(2)).conj().imag, "x is a view that negates"),
    ],
)
def test_what_does_not_may_not(make, text):
    with pytest.raises(BadInputError, match=text):
        check_addressable("x", make())


def test_freed_memory_is_no_memory():
    x = torch.zeros(4)
    x.untyped_storage().resize_(0)
    text = ""
    try:
        check_addressable("x", x)
    except BadInputError as error:  # pytest.raises would print x, and torch dies of that
        text = str(error)
    assert "x is of layout strided without memory" in text


def cells(x):
    """The places of x's elements, one by one."""
    offsets = [
        sum(i * s for i, s in zip(at, x.stride(), strict=True)) for at in itertools.product(*map(range, x.shape))
    ]
    return [x.storage_offset() + offset for offset in offsets]


VIEWS = {
    "plain": torch.zeros(3, 4, 5),
    "transposed": torch.zeros(3, 4, 5).permute(2, 0, 1),
    "sliced": torch.zeros(6, 8, 5)[1::2, ::3, 2:],
    "a dimension of one": torch.zeros(3, 1, 5).as_strided((3, 1, 5), (5, 0, 1)),
    "one element": torch.zeros(1).expand(1, 1),
    "expanded": torch.zeros(3, 1).expand(3, 4),
    "rows that overlap": torch.zeros(20).as_strided((3, 4), (3, 1)),
    "rows that touch": torch.zeros(20).as_strided((3, 4), (4, 1)),
    "windows": torch.zeros(20).unfold(0, 4, 2),
}


@pytest.mark.parametrize("x", VIEWS.values(), ids=VIEWS)
def test_an_element_that_is_held_twice_is_found(x):
    places = cells(x)
    if len(set(places)) == len(places):
        check_unshared("x", x)
    else:
        with pytest.raises(BadInputError, match=r"x has shape .* several elements lie in one place"):
            check_unshared("x", x)


@pytest.mark.parametrize("x", VIEWS.values(), ids=VIEWS)
def test_a_span_goes_from_the_first_byte_to_the_last(x):
    first, last = span(x)
    begin = x.untyped_storage().data_ptr()
    assert (first - begin, last - begin) == (4 * min(cells(x)), 4 * max(cells(x)) + 4)


def test_nothing_spans_nothing():
    first, last = span(torch.zeros(0, 5))
    assert first == last


def test_what_is_written_may_lie_beside_what_is_read_but_not_in_it():
    memory = torch.zeros(10, 4)
    one, other, last = memory[:4], memory[4:8], memory[8:]
    check_apart([("a", one), ("b", None)], [("c", other), ("d", last), ("e", None)])
    check_apart([], [("a", one), ("b", memory)])
    with pytest.raises(BadInputError, match="a lies in the memory of c, which is still read; give one of its own"):
        check_apart([("a", memory[3:5])], [("b", last), ("c", other)])
    with pytest.raises(BadInputError, match="b lies in the memory of a"):
        check_apart([("a", one), ("b", memory[3:6])], [("c", last)])
    check_apart([("a", memory[2:2])], [("b", memory)])


def test_one_memory_under_two_names_is_one():
    memory = torch.zeros(8)
    for same in (torch.from_numpy(memory.numpy()), torch.from_numpy(memory.numpy()[3:5])):
        with pytest.raises(BadInputError, match="a lies in the memory of b"):
            check_apart([("a", same)], [("b", memory)])


def test_a_gradient_that_nobody_asks_for_is_none():
    x = torch.zeros(2, requires_grad=True)
    check_no_gradient([("x", x.detach()), ("y", None), ("z", [1.0])])
    with torch.no_grad():
        check_no_gradient([("x", x)])
    with torch.inference_mode():
        check_no_gradient([("x", x)])
    with pytest.raises(BadInputError, match="x requires grad, but no gradient is computed here; call inside"):
        check_no_gradient([("x", x)])
