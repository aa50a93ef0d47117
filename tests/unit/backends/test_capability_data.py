"""What every registered backend claims, as data: complete, closed words, explicit sets."""

import pytest

from heedful import registry
from heedful.backends.base import AttentionBackend, AttentionMetadata
from heedful.errors import BackendUnavailableError
from heedful.types import DTYPES, KV_CACHE_DTYPES, PLATFORMS, AttentionType, Device, SelectionRequest

NAMES = list(registry.BUILT_IN)
FEATURES = {"window", "alibi", "soft_cap", "sinks", "blocksparse", "attention_free", "lse", "graphs"}
GENERATIONS = {
    "cuda": {"7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"},
    "rocm": {"gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1151", "gfx1200", "gfx1201"},
    "tpu": {"v4", "v5e", "v5p", "v6e", "7x"},
}
ROWS = [(name, row) for name in NAMES for row in registry.load(name).CAPABILITIES]
LABELS = [f"{name}-{row.platform}-{row.variant}" for name, row in ROWS]
CLAIMED = [name for name in NAMES if getattr(registry.load(name), "not_built", "")]


@pytest.mark.parametrize(("name", "row"), ROWS, ids=LABELS)
def test_every_row_uses_the_closed_words(name, row):
    assert row.platform in PLATFORMS
    assert row.dtypes <= set(DTYPES)
    assert row.kv_cache_dtypes <= set(KV_CACHE_DTYPES)
    assert row.attn_types <= set(AttentionType)
    assert row.features <= FEATURES
    assert row.generations is None or row.generations <= GENERATIONS[row.platform]


@pytest.mark.parametrize(("name", "row"), ROWS, ids=LABELS)
def test_every_row_on_a_gpu_or_tpu_lists_its_generations(name, row):
    if row.platform in ("cuda", "rocm", "tpu") and name != "NO_ATTENTION":
        assert row.generations


@pytest.mark.parametrize(("name", "row"), ROWS, ids=LABELS)
def test_only_openvino_claims_the_u8_cache(name, row):
    # NO_ATTENTION has no cache, so that any word is the same to it
    assert name in ("OPENVINO", "NO_ATTENTION") or "u8" not in row.kv_cache_dtypes


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_is_one_row_of_a_platform(name):
    seen = [(row.platform, row.variant) for row in registry.load(name).CAPABILITIES]
    assert len(seen) == len(set(seen)) > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_class_is_whole(name):
    backend = registry.load(name)
    assert issubclass(backend, AttentionBackend)
    assert not backend.__abstractmethods__
    assert backend.get_metadata_cls() is AttentionMetadata
    assert backend.__doc__


FACTS = [
    # (backend, device, request) and whether it is claimed
    ("FLASH_ATTN", (9, 0), {"block_size": 256}, True),
    ("FLASH_ATTN", (8, 0), {"block_size": 16}, False),
    ("FLASH_ATTN", (8, 0), {"block_size": 128}, False),
    ("FLASH_ATTN", (7, 5), {"block_size": 256}, False),
    ("FLASH_ATTN", (8, 0), {"block_size": 256, "head_size": 256}, True),
    ("FLASH_ATTN", (8, 0), {"block_size": 256, "head_size": 264}, False),
    ("FLASH_ATTN", (8, 0), {"block_size": 256, "sinks": True}, False),
    ("FLASH_ATTN", (8, 0), {"block_size": 256, "kv_cache_dtype": "fp8"}, False),
    ("FLASH_ATTN", (9, 0), {"block_size": 16, "alibi": True}, False),
    ("XFORMERS", (8, 0), {"block_size": 64}, True),
    ("XFORMERS", (8, 0), {"block_size": 16}, False),
    ("XFORMERS", (7, 5), {"block_size": 64}, False),
    ("XFORMERS", (8, 0), {"block_size": 64, "dtype": "float32"}, False),
    ("XFORMERS", (8, 0), {"block_size": 64, "logits_soft_cap": 1.0}, False),
    ("XFORMERS", (8, 0), {"block_size": 64, "kv_cache_dtype": "fp8"}, False),
    ("FLASHINFER", (7, 5), {"dtype": "float16"}, True),
    ("FLASHINFER", (7, 5), {"dtype": "bfloat16"}, False),
    ("FLASHINFER", (8, 0), {"head_size": 96}, False),
    ("FLASHINFER", (8, 0), {"block_size": 1}, True),
    ("FLASHINFER", (8, 0), {"alibi": True}, False),
    ("TRITON_ATTN", (7, 5), {"head_size": 80, "sinks": True, "alibi": True, "logits_soft_cap": 1.0}, True),
    ("TRITON_ATTN", (8, 0), {"kv_cache_dtype": "fp8"}, False),
    ("TRITON_ATTN", (8, 9), {"kv_cache_dtype": "fp8"}, True),
    ("BLOCKSPARSE_FLASH_ATTN", (8, 0), {"is_blocksparse": True}, True),
    ("BLOCKSPARSE_FLASH_ATTN", (8, 0), {"is_blocksparse": True, "dtype": "float32"}, False),
    ("ROCM_FLASH", "gfx942", {"sinks": True}, True),
    ("ROCM_FLASH", "gfx1030", {}, False),
    ("PALLAS", "v5e", {"head_size": 80, "block_size": 8}, True),
    ("PALLAS", "v5e", {"head_size": 96}, True),
    ("PALLAS", "v5e", {"head_size": 100}, False),
    ("PALLAS", "v5e", {"head_size": 320}, False),
    ("PALLAS", "v5e", {"block_size": 24}, False),
    ("PALLAS", "v5e", {"kv_cache_dtype": "fp8"}, False),
    ("PALLAS", "v5e", {"attn_type": "encoder_decoder", "sinks": True}, True),
    ("PALLAS", "v3", {}, False),
    ("PALLAS", "v5e", {"dtype": "float16"}, False),
    ("IPEX", None, {"sliding_window": 8}, True),
    ("IPEX", None, {"alibi": True}, False),
    ("IPEX", None, {"kv_cache_dtype": "fp8"}, False),
    ("OPENVINO", None, {"block_size": 32, "sinks": True, "head_size_v": 64}, True),
    ("OPENVINO", None, {"block_size": 32, "kv_cache_dtype": "u8"}, True),
    ("OPENVINO", None, {"block_size": 32, "kv_cache_dtype": "fp8"}, False),
    ("OPENVINO", None, {"block_size": 32, "alibi": True, "sliding_window": 8}, True),
    ("OPENVINO", None, {"block_size": 32, "head_size": 33}, True),
    ("OPENVINO", None, {"block_size": 32, "head_size": 513}, False),
    ("OPENVINO", None, {"block_size": 32, "logits_soft_cap": 1.0}, False),
]
HOME = {"ROCM_FLASH": "rocm", "PALLAS": "tpu", "IPEX": "xpu", "OPENVINO": "openvino"}


@pytest.mark.parametrize(("name", "generation", "request_", "claimed"), FACTS)
def test_the_measured_limits_of_each_library_are_its_claims(name, generation, request_, claimed):
    key = "capability" if isinstance(generation, tuple) else "arch"
    device = Device(HOME.get(name, "cuda"), **{key: generation})
    request = SelectionRequest(**{"head_size": 128} | request_)
    assert (registry.load(name).unsupported_reasons(request, device) == []) is claimed


def test_flash_attns_triton_build_for_amd_claims_nothing_that_it_ignores():
    (row,) = (row for row in registry.load("ROCM_FLASH").CAPABILITIES if row.variant == "fa2-triton")
    assert row.features == {"lse"}
    assert AttentionType.DECODER not in row.attn_types


@pytest.mark.parametrize("name", CLAIMED)
def test_a_backend_without_code_refuses_to_be_built_and_still_tells_its_cache(name):
    backend = registry.load(name)
    with pytest.raises(BackendUnavailableError, match=f"{name} cannot be built.*choose another backend"):
        backend.get_impl_cls()
    assert backend.get_kv_cache_shape(7, 16, 2, 64) == (2, 7, 2, 16, 64)
    assert backend.get_kv_cache_shape(7, 16, 2, 64, head_size_v=32) == ((7, 2, 16, 64), (7, 2, 16, 32))


@pytest.mark.parametrize("name", CLAIMED)
def test_a_backend_without_code_still_moves_blocks(name):
    import torch

    backend = registry.load(name)
    cache = torch.arange(2 * 3 * 1 * 2 * 4, dtype=torch.float32).reshape(backend.get_kv_cache_shape(3, 2, 1, 4))
    keys, values = backend.kv_views(cache)
    assert keys.shape == values.shape == (3, 2, 1, 4)
    before = cache.clone()
    backend.copy_blocks([cache], torch.tensor([[0, 2]]))
    assert torch.equal(cache[:, 2], before[:, 0])
    assert torch.equal(cache[:, :2], before[:, :2])
