"""What a caller may get wrong: one clear error before the cache is touched, never a crash, never a wrong answer.

Every case runs on both variants of TORCH_SDPA: the kernels trust what was checked, torch's operators check again.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from heedful.backends.paged import CommonMetadataBuilder
from heedful.backends.torch_sdpa import TorchSdpaBackend
from heedful.backends.torch_sdpa_impl import TorchSdpaImpl
from heedful.errors import BadInputError, MetadataError

SEQS = [(8, 0, False), (1, 3, True)]
ROWS, HEADS, SIZE = 9, 4, 16
INT32 = torch.iinfo(torch.int32)


class OnTorch(TorchSdpaBackend):
    """The variant that needs no kernels."""

    CAPABILITIES = tuple(row for row in TorchSdpaBackend.CAPABILITIES if row.variant == "torch")


class OnTorchImpl(TorchSdpaImpl):
    """A layer of it."""

    backend = OnTorch


@pytest.fixture(params=[TorchSdpaImpl, OnTorchImpl], ids=["cpp", "torch"])
def layer(request):
    """A layer of four heads of 16 on two KV heads."""
    found = request.param(HEADS, SIZE, 0.25, 2)
    if request.param is TorchSdpaImpl and found.kernels is None:
        pytest.skip("the kernels were not built")
    return found


def given(one):
    """The arguments of forward."""
    return {
        "query": one.query,
        "key": one.key,
        "value": one.value,
        "kv_cache": one.cache,
        "attn_metadata": one.metadata,
    }


def refused(layer, one, change, error=BadInputError):
    """The text of the error; the cache is as it was. No pytest.raises: it would print tensors that have no memory."""
    before = one.cache.float()
    try:
        layer.forward(**given(one) | change)
    except error as caught:
        text = str(caught)
    else:
        raise AssertionError(f"{change.keys()} passed")
    assert torch.equal(one.cache.float().nan_to_num(7), before.nan_to_num(7)), "refused, but the cache had changed"
    assert "\n" not in text
    return text


def freed(x):
    """x without its memory, as some engines leave tensors that they moved away."""
    gone = x.clone()
    gone.untyped_storage().resize_(0)
    return gone


KINDS = ("query", "key", "value")


def named(*names):
    return pytest.mark.parametrize("name", names)


# Tensors that are not there -------------------------------------------------------------------------------------------


@named("query", "key", "value")
def test_rows_without_memory_are_an_error(layer, scene, name):
    one = scene(SEQS)
    assert f"{name} is of layout strided without memory" in refused(layer, one, {name: freed(given(one)[name])})


@named("query", "key", "value")
@pytest.mark.parametrize("hide", [lambda x: torch.complex(x, -x).conj().imag, torch._neg_view], ids=["imag", "whole"])
def test_rows_that_are_not_what_lies_in_memory_are_an_error(layer, scene, name, hide):
    """Views of complex numbers may negate each element when it is read; an address does not tell."""
    one = scene(SEQS)
    hidden = hide(given(one)[name])
    assert hidden.is_neg()
    assert f"{name} is a view that negates what lies in memory" in refused(layer, one, {name: hidden})


@named("query", "key", "value")
def test_sparse_rows_are_an_error(layer, scene, name):
    one = scene(SEQS)
    assert f"{name} is of layout sparse_coo without" in refused(layer, one, {name: given(one)[name].to_sparse()})


@named("query", "key", "value", "kv_cache")
def test_one_tensor_on_meta_is_an_error(layer, scene, name):
    one = scene(SEQS)
    assert "on meta" in refused(layer, one, {name: given(one)[name].to("meta")})


def test_a_whole_call_on_meta_is_an_error(layer, scene):
    one = scene(SEQS)
    names = ("query", "key", "value", "kv_cache")
    assert "on meta" in refused(layer, one, {name: given(one)[name].to("meta") for name in names})


@pytest.mark.parametrize("change", [freed, lambda x: x.to_sparse()], ids=["freed", "sparse"])
@named("output", "output_lse", "kv_cache")
def test_what_is_filled_must_be_there(layer, scene, change, name):
    one = scene(SEQS)
    shape = {"output": (ROWS, HEADS, SIZE), "output_lse": (ROWS, HEADS), "kv_cache": one.cache.shape}[name]
    assert "without memory behind it" in refused(layer, one, {name: change(torch.zeros(shape))})


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
def test_numbers_of_heads_on_meta_are_an_error(name):
    with pytest.raises(BadInputError, match=rf"{name} has shape \[4\] on meta; give"):
        TorchSdpaImpl(HEADS, SIZE, 0.25, 2, **{name: torch.zeros(HEADS, device="meta")})


def test_a_scale_on_meta_is_an_error(scene):
    one = scene(SEQS, word="fp8")
    scale = torch.tensor(1.0, device="meta")
    assert "k_scale is a tensor of shape [] on meta" in refused(one.impl(), one, {"k_scale": scale})


# Dtypes and forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_a_foreign_dtype_is_an_error(layer, scene, dtype):
    one = scene(SEQS)
    word = str(dtype).removeprefix("torch.")
    assert f"query is {word}; give one of" in refused(layer, one, {"query": one.query.to(dtype)})
    assert f"key is {word}, but query" in refused(layer, one, {"key": one.key.to(dtype)})
    assert f"output is {word} on cpu" in refused(layer, one, {"output": torch.zeros(9, 4, 16).to(dtype)})
    cache = torch.zeros(one.cache.shape).to(dtype)
    assert f"the K cache is {word}, but" in refused(layer, one, {"kv_cache": cache})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"query": None}, "query is NoneType"),
        ({"query": [[1.0]]}, "query is list"),
        ({"query": torch.tensor(1.0)}, "query has shape []"),
        ({"query": torch.zeros(9)}, "query has shape [9]"),
        ({"query": torch.zeros(9, 4, 16, 1)}, "query has shape [9, 4, 16, 1]"),
        ({"key": torch.zeros(9, 2, 16).numpy()}, "key is ndarray"),
        ({"kv_cache": (None, None)}, "a KV cache came as (None, None)"),
        ({"kv_cache": ()}, "0 parts"),
        ({"kv_cache": torch.tensor(1.0)}, "a KV cache came as a tensor []"),
        ({"kv_cache": torch.zeros(2)}, "a KV cache came as a tensor [2]"),
        ({"kv_cache": {"K": 1, "V": 2}}, "kv_cache is dict"),
        ({"kv_cache": torch.zeros(2, 6, 2, 4)}, "the K cache has shape [6, 2, 4]"),
        ({"kv_cache": (torch.zeros(0, 2, 4, 16), torch.zeros(6, 2, 4, 16))}, "the K cache has pages [0, 4]"),
        ({"output": "here"}, "output is str"),
        ({"output_lse": torch.zeros(9, 4).half()}, "output_lse is float16"),
        ({"k_scale": "1"}, "k_scale is '1'"),
        ({"attn_type": []}, "unknown attn_type []"),
    ],
)
def test_a_foreign_form_is_an_error(layer, scene, change, text):
    assert text in refused(layer, scene(SEQS), change)


# Memory that two things share -----------------------------------------------------------------------------------------


def test_an_output_may_not_lie_in_what_is_read(layer, scene):
    one = scene(SEQS)
    memory = torch.zeros(20, HEADS, SIZE)
    memory[:ROWS] = one.query
    for output in (memory[:ROWS], memory[1 : ROWS + 1], memory.view(20, 64)[8 : 8 + ROWS]):
        text = refused(layer, one, {"query": memory[:ROWS], "output": output})
        assert "output lies in the memory of query" in text
    apart = layer.forward(**given(one) | {"query": memory[:ROWS], "output": memory[ROWS : 2 * ROWS]})
    assert torch.equal(apart, layer.forward(**given(one)))


@named("key", "value")
def test_an_output_may_not_lie_in_new_keys_or_values(layer, scene, name):
    one = scene(SEQS)
    memory = torch.zeros(ROWS, HEADS, SIZE)
    rows = memory.view(-1)[: ROWS * 2 * SIZE].view(ROWS, 2, SIZE).copy_(given(one)[name])
    assert f"output lies in the memory of {name}" in refused(layer, one, {name: rows, "output": memory})


def test_an_output_may_not_lie_in_the_cache(layer, scene):
    one = scene(SEQS)
    size = ROWS * HEADS * SIZE
    text = refused(layer, one, {"output": one.cache.view(-1)[:size].view(ROWS, HEADS, SIZE)})
    assert "output lies in the memory of the K cache" in text
    text = refused(layer, one, {"output_lse": one.cache[1].view(-1)[: ROWS * HEADS].view(ROWS, HEADS)})
    assert "output_lse lies in the memory of the V cache" in text


def test_an_lse_may_not_lie_in_the_output(layer, scene):
    output = torch.zeros(ROWS, HEADS, SIZE)
    change = {"output": output, "output_lse": output.view(-1)[: ROWS * HEADS].view(ROWS, HEADS)}
    assert "output_lse lies in the memory of output" in refused(layer, scene(SEQS), change)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("output", lambda: torch.zeros(1, HEADS, SIZE).expand(ROWS, HEADS, SIZE)),
        ("output", lambda: torch.zeros(1000).as_strided((ROWS, HEADS, SIZE), (SIZE, SIZE, 1))),
        ("output", lambda: torch.zeros(1000).as_strided((ROWS, HEADS * SIZE), (63, 1))),
        ("output_lse", lambda: torch.zeros(ROWS, 1).expand(ROWS, HEADS)),
        ("kv_cache", lambda: torch.zeros(2, 1, 2, 4, SIZE).expand(2, 6, 2, 4, SIZE)),
        ("kv_cache", lambda: torch.zeros(2, 6, 1, 4, SIZE).expand(2, 6, 2, 4, SIZE)),
        ("kv_cache", lambda: torch.zeros(2, 6, 2, 4, 1).expand(2, 6, 2, 4, SIZE)),
    ],
    ids=["rows", "strides", "flat", "heads", "blocks", "kv heads", "elements"],
)
def test_what_is_filled_may_hold_no_element_twice(layer, scene, name, make):
    assert "several elements lie in one place" in refused(layer, scene(SEQS), {name: make()})


@pytest.mark.parametrize("make", [lambda k: (k, k), lambda k: k[None].expand(2, -1, -1, -1, -1)])
def test_keys_and_values_may_not_be_one_cache(layer, scene, make):
    one = scene(SEQS)
    assert "the K and the V cache are one memory" in refused(layer, one, {"kv_cache": make(one.cache[0])})


def test_what_lies_elsewhere_in_a_later_call_is_looked_at_again(layer, scene):
    """Layers of one step whose tensors have the same forms share its checks; where tensors lie is not shared."""
    one = scene(SEQS)
    one.cache = torch.stack([one.cache[0].clone(), one.cache[1].clone()])
    usual = given(one) | {"output": torch.zeros(ROWS, HEADS, SIZE), "kv_cache": tuple(one.cache)}
    for _ in range(2):
        layer.forward(**usual)
    for name in ("query", "key", "value", "output"):
        assert f"{name} is of layout strided without" in refused(layer, one, usual | {name: freed(usual[name])})
    for pair in ((one.cache[0], freed(one.cache[1])), (freed(one.cache[0]), one.cache[1])):
        assert "the KV cache is of layout strided without" in refused(layer, one, usual | {"kv_cache": pair})
    assert "are one memory" in refused(layer, one, usual | {"kv_cache": (one.cache[0], one.cache[0])})
    assert "output lies in the memory of query" in refused(layer, one, usual | {"query": usual["output"]})


# Inputs of any strides are legal, if they can be read -----------------------------------------------------------------


def test_inputs_that_hold_an_element_twice_are_read_as_they_are(layer, scene):
    one = scene(SEQS)
    rows = {name: given(one)[name][:1] for name in ("query", "key", "value")}
    spread = {name: x.expand(ROWS, -1, -1) for name, x in rows.items()}
    plain = {name: x.contiguous() for name, x in spread.items()}
    right = layer.forward(**given(one) | plain)
    assert torch.equal(layer.forward(**given(one) | spread), right)


def test_rows_in_reverse_and_other_orders_are_read_right(layer, scene):
    """torch has no negative strides: flips are copies, transposes and slices are not."""
    one = scene(SEQS)
    right = layer.forward(**given(one))
    other = {name: given(one)[name].flip(0).flip(0) for name in KINDS}
    other["query"] = one.query.transpose(0, 2).contiguous().transpose(0, 2)
    other["key"] = torch.stack([one.key, one.key], -1)[..., 1]
    other["value"] = one.value.repeat(1, 1, 2)[..., SIZE:]
    assert not any(other[name].is_contiguous() for name in KINDS)
    assert torch.allclose(layer.forward(**given(one) | other), right, atol=1e-6)


# Gradients and inference mode -----------------------------------------------------------------------------------------


@named("query", "key", "value", "output")
def test_a_gradient_is_not_lost_in_silence(layer, scene, name):
    one = scene(SEQS)
    wanted = {"output": torch.zeros(ROWS, HEADS, SIZE)} | {k: given(one)[k].clone() for k in KINDS}
    change = {name: wanted[name].requires_grad_()}
    assert f"{name} requires grad, but no gradient is computed here" in refused(layer, one, change)
    right = layer.forward(**given(one))
    with torch.no_grad():
        assert torch.equal(layer.forward(**given(one) | change), right)
    with torch.inference_mode():
        assert torch.equal(layer.forward(**given(one) | change), right)


def test_a_new_output_asks_for_no_gradient(layer, scene):
    one = scene(SEQS)
    with torch.no_grad():
        found = layer.forward(**given(one) | {"query": one.query.clone().requires_grad_()})
    assert not found.requires_grad


def test_an_output_of_inference_mode_is_filled_there_alone(layer, scene):
    one = scene(SEQS)
    with torch.inference_mode():
        output = torch.zeros(ROWS, HEADS, SIZE)
    assert "output was made in torch.inference_mode()" in refused(layer, one, {"output": output})
    with torch.inference_mode():
        assert torch.equal(layer.forward(**given(one) | {"output": output}), layer.forward(**given(one)))


# Tables and lengths ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "change", "text"),
    [
        ("block_tables", lambda t: t * 0 + INT32.max, "block_tables[0] is block 2147483647, outside"),
        ("block_tables", lambda t: t * 0 + INT32.min, "block_tables[0] is block -2147483648, outside"),
        ("block_tables", lambda t: t[:, :0], "block_tables has 0 entries"),
        ("block_tables", lambda t: t[0], "block_tables is torch.int32 [2]"),
        ("block_tables", lambda t: t[..., None], "block_tables is torch.int32 [2, 2, 1]"),
        ("block_tables", lambda t: t.float(), "block_tables is torch.float32"),
        ("block_tables", lambda t: t.tolist(), "block_tables is [["),
        ("block_tables", lambda t: t.numpy(), "block_tables is array([[3, 5], [0, 0]]"),
        ("block_tables", lambda t: t.to("meta"), "on meta"),
        ("block_tables", lambda t: t.to_sparse(), "sparse"),
        ("block_tables", lambda t: t[:1].expand(2, -1), "sequence 1: row 8 has slot"),
        ("slot_mapping", lambda t: t + 2**40, "row 0 has slot"),
        ("slot_mapping", lambda t: t * 0 + torch.iinfo(torch.int64).max, "row 0 has slot 9223372036854775807"),
        ("slot_mapping", lambda t: t.double(), "slot_mapping is torch.float64"),
        ("slot_mapping", lambda t: t[:, None], "slot_mapping is torch.int64 [9, 1]"),
        ("slot_mapping", lambda t: t.to("meta"), "on meta"),
        ("seq_lens", lambda t: t * 0 + INT32.max, "seq_len 2147483647 is not"),
        ("seq_lens", lambda t: t * 0 + INT32.min, "neither may be negative"),
        ("query_start_loc", lambda t: t * 0 + INT32.max, "begins at 2147483647"),
        ("query_start_loc", lambda t: t[:0], "query_start_loc has 0 rows"),
        ("num_prefills", lambda n: None, "num_prefills is None"),
        ("num_decodes", lambda n: 1.0, "num_decodes is 1.0"),
        ("num_prefills", lambda n: -(2**70), "num_prefills -1180591620717411303424"),
        ("max_seq_len", lambda n: "8", "max_seq_len is '8'"),
    ],
)
def test_bad_metadata_is_one_error_that_names_the_field(layer, scene, field, change, text):
    one = scene(SEQS)
    wrong = replace(one.metadata, **{field: change(getattr(one.metadata, field))}, step={})
    assert text in refused(layer, one, {"attn_metadata": wrong}, MetadataError)


def test_a_cache_with_fewer_blocks_than_the_table_names_is_an_error(layer, scene):
    one = scene(SEQS)
    for blocks in range(1, one.cache.shape[1]):
        kept = [table for table in one.tables if max(table) < blocks]
        if len(kept) < len(one.tables):
            text = refused(layer, one, {"kv_cache": one.cache[:, :blocks].clone()}, MetadataError)
            assert f"outside the cache of {blocks} blocks" in text


# Nothing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seqs", [[], [(0, 0, False)], [(0, 5, True)], [(0, 0, False), (0, 4, True), (0, 0, True)]])
@pytest.mark.parametrize("pads", [0, 3])
def test_a_step_without_tokens_answers_with_pad_rows(layer, scene, seqs, pads):
    one = scene(seqs, pad_rows=pads)
    output, lse = torch.full((pads, HEADS, SIZE), 7.0), torch.full((pads, HEADS), 7.0)
    before = one.cache.clone()
    layer.forward(**given(one), output=output, output_lse=lse)
    assert (output == 0).all()
    assert (lse == -torch.inf).all()
    assert torch.equal(one.cache.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("cache", [torch.empty(0), torch.empty(2, 0, 2, 4, 16), (torch.empty(0), torch.empty(0)), []])
def test_no_tokens_and_no_cache(layer, scene, cache):
    one = scene([])
    if isinstance(cache, list):
        cache = [torch.empty(0, 2, 4, 16)] * 2
    found = layer.forward(**given(one) | {"kv_cache": cache})
    assert found.shape == (0, HEADS, SIZE)


@pytest.mark.parametrize("kind", ["encoder", "encoder_only", "encoder_decoder"])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_encoders_of_nothing(layer, kind, lengths):
    builder = CommonMetadataBuilder(4)
    for length in lengths:
        builder.add(0, encoder_len=length)
    metadata = builder.build()
    if not lengths:
        nothing = torch.empty(0, dtype=torch.int32)
        metadata = replace(metadata, encoder_seq_lens=nothing, num_encoder_tokens=0, max_encoder_seq_len=0)
        metadata = replace(metadata, cross_block_tables=nothing.view(0, 0), cross_slot_mapping=nothing.long())
    none, keys = torch.empty(0, HEADS, SIZE), torch.empty(0, 2, SIZE)
    for cache in (torch.empty(0), torch.zeros(2, 3, 2, 4, SIZE)):
        found = layer.forward(none, keys, keys, cache, metadata, attn_type=kind)
        assert found.shape == (0, HEADS, SIZE)


def test_queries_without_any_encoder_key_are_zero(layer):
    builder = CommonMetadataBuilder(4)
    builder.add(3, encoder_len=0)
    lse = torch.zeros(3, HEADS)
    query, cache = torch.ones(3, HEADS, SIZE), torch.full((2, 3, 2, 4, SIZE), torch.nan)
    kind = {"attn_type": "encoder_decoder", "output_lse": lse}
    found = layer.forward(query, None, None, cache, builder.build(), **kind)
    assert (found == 0).all()
    assert (lse == -torch.inf).all()
