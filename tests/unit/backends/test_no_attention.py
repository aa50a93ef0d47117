"""NO_ATTENTION needs no memory, does nothing to a cache, and refuses to attend."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from heedful.backends.no_attention import NoAttentionBackend
from heedful.errors import UnknownArgumentError, UnsupportedError
from heedful.types import PLATFORMS, Device, SelectionRequest


@pytest.mark.parametrize("platform", PLATFORMS)
def test_it_answers_attention_free_requests_on_every_platform_and_no_other(platform):
    free = SelectionRequest(head_size=0, num_heads=0, is_attention_free=True)
    assert NoAttentionBackend.unsupported_reasons(free, Device(platform)) == []
    reasons = NoAttentionBackend.unsupported_reasons(SelectionRequest(head_size=64), Device(platform))
    assert "ATTENTION_FREE" in {str(reason.code) for reason in reasons}


def test_its_cache_takes_no_memory_and_no_operation_touches_it():
    cache = torch.empty(NoAttentionBackend.get_kv_cache_shape(100, 16, 0, 0))
    assert cache.numel() == 0
    pairs = torch.tensor([[0, 1]])
    NoAttentionBackend.copy_blocks([cache], pairs)
    NoAttentionBackend.swap_blocks(cache, cache, pairs)
    assert [view.numel() for view in NoAttentionBackend.kv_views(cache)] == [0, 0]
    assert [view.numel() for view in NoAttentionBackend.kv_views((cache, cache))] == [0, 0]


def test_its_layer_can_be_built_and_refuses_to_attend():
    layer = NoAttentionBackend.get_impl_cls()(num_heads=0, head_size=0, scale=1.0)
    nothing = torch.empty(0, 0, 0)
    with pytest.raises(UnsupportedError, match="nothing to attend with") as caught:
        layer.forward(nothing, nothing, nothing, torch.empty(0), None)
    assert [str(reason.code) for reason in caught.value.reasons] == ["ATTENTION_FREE"]


def test_a_layer_that_attends_is_refused_when_it_is_built():
    with pytest.raises(UnsupportedError, match="NO_ATTENTION cannot serve"):
        NoAttentionBackend.get_impl_cls()(num_heads=4, head_size=64, scale=1.0)


def test_an_unknown_keyword_is_an_error():
    with pytest.raises(UnknownArgumentError, match="head_sizee"):
        NoAttentionBackend.get_impl_cls()(num_heads=0, head_size=0, scale=1.0, head_sizee=1)


def test_the_class_is_known_without_torch():
    code = (
        "import sys; from heedful.backends.no_attention import NoAttentionBackend as B; "
        "B.get_impl_cls(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
