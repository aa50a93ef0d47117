"""Checks of the call's form: outputs in place, flat tensors, strides, padding, inputs that stay as they were."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from heedful.conformance.bench import Bench, agree, device, merged, same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from heedful.backends.base import AttentionBackend
    from heedful.conformance.bench import Margins
    from heedful.conformance.cases import Case


def check_pad_rows_are_zero(backend: type[AttentionBackend], case: Case) -> Margins:
    """Rows past the last sequence are 0 in a tensor that held NaN, and in one that the backend makes."""
    bench = Bench(backend, case)
    real = bench.on_host.num_tokens
    for output in (bench.forward(output=bench.empty_output()), bench.forward()):
        left = output[real:].cpu()
        assert bool((left == 0).all()), f"rows {real}… are padding but hold {left[left != 0][:4].tolist()}"
    return agree(bench.on_host.expected(), output)


def check_output_is_filled_in_place_and_returned(backend: type[AttentionBackend], case: Case) -> Margins:
    """The caller's tensor is what comes back, every row of it written; without one a tensor of query's dtype comes."""
    bench = Bench(backend, case)
    given, made = bench.empty_output(), bench.forward()
    returned = bench.forward(output=given)
    assert returned.data_ptr() == given.data_ptr(), "output was given, but another tensor came back"
    assert made.shape == given.shape, f"without output the answer has shape {list(made.shape)}, not {list(given.shape)}"
    assert made.dtype == given.dtype, f"the answer is {made.dtype}; the query is {given.dtype}"
    expected = bench.on_host.expected()
    return merged((agree(expected, given, what="in the given output"), agree(expected, made)))


def check_the_flat_form_is_answered_flat(backend: type[AttentionBackend], case: Case) -> Margins:
    """[tokens, heads*size] in, the same numbers as [tokens, num_heads*head_size_v] out, in place or not."""
    bench = Bench(backend, case)
    inputs = bench.arguments()
    flat: dict[str, Any] = {name: inputs[name].flatten(1) for name in _INPUTS}
    given = bench.empty_output().flatten(1)
    found = []
    for output in (bench.forward(**flat), bench.forward(**flat, output=given)):
        assert output.shape == given.shape, f"flat tensors were answered with shape {list(output.shape)}"
        found.append(agree(bench.on_host.expected(), output.reshape(-1, case.num_heads, case.size_v)))
    assert not given.isnan().any(), "a flat output was given but not filled"
    return merged(found)


def check_strides_never_change_the_result(backend: type[AttentionBackend], case: Case) -> Margins:
    """Slices of wider tensors, transposes and every second element, for inputs, output and block tables."""
    bench, found = Bench(backend, case), []
    expected, plain = bench.on_host.expected(), bench.arguments()
    for name, layout in LAYOUTS.items():
        inputs: dict[str, Any] = {word: layout(x) for word in _INPUTS if (x := plain[word]) is not None}
        tables: dict[str, Any] = {word: _of_a_wider_table(getattr(bench.batch.metadata, word)) for word in _TABLES}
        metadata = replace(bench.batch.metadata, **tables, step={})
        output = layout(bench.empty_output())
        bench.forward(**inputs, attn_metadata=metadata, output=output)
        found.append(agree(expected, output, what=f"with tensors that are {name}"))
    return merged(found)


_INPUTS = ("query", "key", "value")
_TABLES = ("block_tables", "cross_block_tables")


def _of_a_wider_table(table: torch.Tensor | None) -> torch.Tensor | None:
    """The same rows as a slice of the engine's larger table; what stands beside them is another block's number."""
    if table is None:
        return None
    return torch.cat([table, torch.ones_like(table), torch.zeros_like(table)], 1)[:, : table.shape[1]]


def _sliced(x: torch.Tensor) -> torch.Tensor:
    """As a slice of a fused tensor: rows further apart, something large beside them."""
    wide = torch.full((x.shape[0], x.shape[1] + 3, x.shape[2]), 1e3, dtype=x.dtype, device=x.device)
    wide[:, 1 : 1 + x.shape[1]] = x
    return wide[:, 1 : 1 + x.shape[1]]


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _every_second(x: torch.Tensor) -> torch.Tensor:
    """The last dimension strided."""
    wide = torch.full((*x.shape, 2), 1e3, dtype=x.dtype, device=x.device)
    wide[..., 0] = x
    return wide[..., 0]


LAYOUTS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slices of wider ones": _sliced,
    "stored heads first": _heads_first,
    "every second element of longer ones": _every_second,
}


def check_inputs_are_left_as_they_were(backend: type[AttentionBackend], case: Case) -> None:
    """forward writes to the cache and to output, and to nothing else that it is given."""
    bench = Bench(backend, case)
    arguments = bench.arguments()
    given = {name: arguments[name] for name in _INPUTS}
    given |= {name: x for name, x in vars(bench.batch.metadata).items() if name != "step"}
    given |= {"alibi_slopes": bench.batch.alibi_slopes, "sinks": bench.batch.sinks}
    before = {name: x.clone() for name, x in given.items() if isinstance(x, torch.Tensor)}
    bench.forward()
    changed = [name for name, x in before.items() if not same_bits(x, given[name])]
    assert not changed, f"forward changed {', '.join(changed)}"


def check_a_step_without_tokens_is_legal(backend: type[AttentionBackend], case: Case) -> None:
    """No sequence, no token: an answer of no rows, and the cache as it was."""
    bench = Bench(backend, case)
    metadata = backend.get_builder_cls()(case.block_size).build(device=device())
    before = bench.pages()
    none: dict[str, Any] = {name: bench.arguments()[name][:0] for name in _INPUTS}
    output = bench.forward(**none, attn_metadata=metadata)
    assert output.shape == (0, case.num_heads, case.size_v), f"no token gave shape {list(output.shape)}"
    after = bench.pages()
    if before is not None and after is not None:
        assert all(map(same_bits, before, after)), "a step without tokens changed the cache"


def check_a_scale_may_be_a_tensor(backend: type[AttentionBackend], case: Case) -> None:
    """A 0-dim tensor means the same as the float."""
    bench = Bench(backend, case)
    given = bench.arguments()
    scales: dict[str, Any] = {name: torch.tensor(given[name], device=device()) for name in ("k_scale", "v_scale")}
    as_floats, pages = bench.forward(), bench.pages()
    bench.cache = bench.fill()
    assert same_bits(as_floats, bench.forward(**scales)), "0-dim tensors as scales give another output than floats"
    again = bench.pages()
    if pages is not None and again is not None:
        assert all(map(same_bits, pages, again)), "0-dim tensors as scales store other bytes than floats"
