import pytest

from heedful.backends.capabilities import (
    Capability,
    Sizes,
    listed,
    pairs,
    row_reasons,
    supported_variant,
    unsupported_reasons,
    words_of,
)
from heedful.types import Device, ReasonCode, SelectionRequest

CPU = Device("cpu")
ALIGNED = Sizes(low=1, high=512, row_bytes=16)


def row(**changes):
    claims = {
        "variant": "v",
        "platform": "cpu",
        "dtypes": frozenset({"bfloat16", "float32"}),
        "head_sizes": Sizes(),
        "block_sizes": Sizes(),
    }
    return Capability(**claims | changes)


def codes(claims, request, device=CPU):
    return [str(reason.code) for reason in row_reasons(claims, request, device)]


@pytest.mark.parametrize(
    ("itemsize", "head_size", "accepted"),
    [
        (2, 80, True),
        (2, 112, True),
        (2, 120, True),
        (2, 44, False),
        (2, 46, False),
        (2, 100, False),
        (4, 44, True),
        (4, 100, True),
        (4, 46, False),
        (1, 16, True),
        (1, 24, False),
    ],
)
def test_rows_of_sixteen_bytes_depend_on_the_item_size(itemsize, head_size, accepted):
    assert ALIGNED.accepts(head_size, itemsize) is accepted


@pytest.mark.parametrize(
    ("dtype", "head_size", "found"),
    [("bfloat16", 120, []), ("bfloat16", 100, ["HEAD_SIZE"]), ("float32", 100, []), ("float32", 46, ["HEAD_SIZE"])],
)
def test_the_requests_dtype_decides_the_row_length(dtype, head_size, found):
    assert codes(row(head_sizes=ALIGNED), SelectionRequest(head_size, dtype=dtype)) == found


def test_an_empty_list_of_sizes_accepts_nothing():
    assert not any(listed().accepts(size) for size in range(-1, 600))
    assert str(listed()) == "none"


def test_sizes_have_both_ends_and_steps():
    sizes = Sizes(multiple_of=16, low=32, high=64)
    assert [size for size in range(100) if sizes.accepts(size)] == [32, 48, 64]


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (listed(64, 16), "16, 64"),
        (Sizes(), "1 and up"),
        (Sizes(low=16, high=256, row_bytes=16), "16 to 256, rows of 16 bytes"),
        (Sizes(multiple_of=64, low=64), "64 and up in multiples of 64"),
    ],
)
def test_sizes_read_like_a_sentence(sizes, text):
    assert str(sizes) == text


DENIED = {
    "DTYPE": {"dtype": "float16"},
    "KV_CACHE_DTYPE": {"kv_cache_dtype": "fp8"},
    "ATTN_TYPE": {"attn_type": "encoder"},
    "WINDOW": {"sliding_window": 4},
    "ALIBI": {"alibi": True},
    "SOFT_CAP": {"logits_soft_cap": 30.0},
    "SINKS": {"sinks": True},
    "BLOCKSPARSE": {"is_blocksparse": True},
    "ATTENTION_FREE": {"is_attention_free": True},
    "HEAD_SIZE_V": {"head_size_v": 32},
    "HEAD_SIZE": {"head_size": 600},
    "BLOCK_SIZE": {"block_size": 12},
    "HEADS": {"num_heads": 32, "num_kv_heads": 2},
}


@pytest.mark.parametrize("code", DENIED)
def test_each_thing_that_is_not_claimed_is_a_reason_of_its_own_code(code):
    claims = row(head_sizes=Sizes(high=512), block_sizes=Sizes(multiple_of=16, low=16), max_group=8)
    assert codes(claims, SelectionRequest(64)) == []
    assert codes(claims, SelectionRequest(**{"head_size": 64} | DENIED[code])) == [code]


def test_every_reason_is_told_not_only_the_first():
    request = SelectionRequest(64, dtype="float16", kv_cache_dtype="fp8", attn_type="encoder", alibi=True, sinks=True)
    assert set(codes(row(), request)) == {"DTYPE", "KV_CACHE_DTYPE", "ATTN_TYPE", "ALIBI", "SINKS"}


def test_a_generation_is_a_member_of_an_explicit_set():
    claims = row(platform="cuda", generations=frozenset({"9.0", "10.0"}))
    accepted = [
        capability
        for capability in [(8, 9), (9, 0), (9, 1), (10, 0), (10, 3), (13, 0)]
        if not codes(claims, SelectionRequest(64), Device("cuda", capability=capability))
    ]
    assert accepted == [(9, 0), (10, 0)]
    assert codes(claims, SelectionRequest(64), Device("cuda")) == ["CAPABILITY"]


def test_generations_are_listed_in_numeric_order():
    claims = row(platform="cuda", generations=frozenset({"10.0", "9.0", "12.1"}))
    (reason,) = row_reasons(claims, SelectionRequest(64), Device("cuda", capability=(13, 0)))
    assert reason.accepted == "9.0, 10.0, 12.1"
    assert reason.asked == "13.0"


def test_pairs_that_do_not_go_together_are_refused_together_only():
    claims = row(
        features=frozenset({"alibi", "window"}),
        kv_cache_dtypes=frozenset({"auto", "fp8"}),
        excluded_pairs=pairs(("alibi", "window"), ("alibi", "fp8")),
    )
    assert codes(claims, SelectionRequest(64, alibi=True)) == []
    assert codes(claims, SelectionRequest(64, sliding_window=4)) == []
    both = SelectionRequest(64, alibi=True, sliding_window=4, kv_cache_dtype="fp8")
    assert codes(claims, both) == ["FEATURE_PAIR", "FEATURE_PAIR"]


@pytest.mark.parametrize("feature", [{"sliding_window": 4}, {"alibi": True}])
def test_the_contract_itself_refuses_positions_in_cross_attention(feature):
    claims = row(features=frozenset({"alibi", "window"}), attn_types=frozenset({"encoder_decoder"}))
    assert codes(claims, SelectionRequest(64, attn_type="encoder_decoder", **feature)) == ["FEATURE_PAIR"]


def test_an_fp8_word_stands_for_its_family():
    assert "fp8" in words_of(SelectionRequest(64, kv_cache_dtype="fp8_e5m2"))
    assert words_of(SelectionRequest(64, kv_cache_dtype=None)) == {"auto", "bfloat16", "decoder"}


def test_a_second_value_size_must_be_claimed_and_be_a_legal_size():
    mixed = row(mixed_head_sizes=True, head_sizes=Sizes(high=128))
    assert codes(mixed, SelectionRequest(64, head_size_v=128)) == []
    assert codes(mixed, SelectionRequest(64, head_size_v=256)) == ["HEAD_SIZE_V"]
    assert codes(row(), SelectionRequest(64, head_size_v=64)) == []


def test_an_attention_free_request_looks_at_nothing_else():
    free = row(features=frozenset({"attention_free"}), head_sizes=listed(), block_sizes=listed(), dtypes=frozenset())
    request = SelectionRequest(0, 64, "float16", "fp8", 0, is_attention_free=True, alibi=True, num_heads=0)
    assert codes(free, request) == []


def test_any_row_that_takes_the_request_is_enough_and_the_first_names_the_variant():
    rows = (row(variant="a", dtypes=frozenset({"float16"})), row(variant="b"), row(variant="c"))
    assert unsupported_reasons("X", rows, SelectionRequest(64), CPU) == []
    assert supported_variant(rows, SelectionRequest(64), CPU) == "b"
    assert supported_variant(rows, SelectionRequest(64, sinks=True), CPU) is None


def test_without_a_fitting_row_every_rows_reasons_are_told_with_their_variant():
    rows = (row(variant="a", dtypes=frozenset({"float16"})), row(variant="b", block_sizes=listed(32)))
    found = unsupported_reasons("X", rows, SelectionRequest(64), CPU)
    assert {(reason.variant, str(reason.code)) for reason in found} == {("a", "DTYPE"), ("b", "BLOCK_SIZE")}


def test_a_foreign_platform_is_one_reason_that_names_the_backends_own():
    (reason,) = unsupported_reasons("X", (row(), row(platform="cuda")), SelectionRequest(64), Device("tpu"))
    assert (reason.code, reason.asked, reason.accepted) == (ReasonCode.PLATFORM, "tpu", "cpu, cuda")
