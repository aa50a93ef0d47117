"""Stand-ins for the libraries behind IPEX: their signatures to the letter, their meaning and their traps.

They compute in float64. ``tests/unit/backends/test_ipex.py`` runs on the real library where it can be imported and
then holds these signatures against it. Where a real operator ends the process or answers garbage, these raise.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from heedful.reference import reference_attention


def _whole(x):
    assert x.is_contiguous(), f"rows of strides {x.stride()}"


def _numbers(*tensors):
    for tensor in tensors:
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


def _pages(cache, tables, i, length):
    """[length, num_kv_heads, size] of a cache as views [num_blocks, block_size, num_kv_heads, size]."""
    count = -(-length // cache.shape[1])
    blocks = tables[i, :count].long()
    assert ((blocks >= 0) & (blocks < len(cache))).all()
    return cache[blocks].flatten(0, 1)[:length]


def _attend(output, query, caches, tables, query_starts, key_lens, *, scale, causal, window, soft_cap):
    ends = query_starts.tolist()
    for i, length in enumerate(key_lens.tolist()):
        rows = slice(ends[i], ends[i + 1])
        key, value = (_pages(cache, tables, i, length) for cache in caches)
        counts = torch.tensor([0, rows.stop - rows.start]), torch.tensor([0, length])
        rules = {"scale": scale, "causal": causal, "sliding_window": window, "logits_soft_cap": soft_cap}
        output[rows] = reference_attention(query[rows], key, value, *counts, **rules)[0].to(output.dtype)


class _PagedAttention:
    """layout: that of the real one's caches."""

    layout = "HND"

    @classmethod
    def _views(cls, *caches):
        if cls.layout == "NHD":
            for cache in caches:
                _whole(cache)
            return caches
        key, value = caches
        assert key.stride() == value.stride()
        assert key.stride()[2:] == (key.shape[3], 1)
        return tuple(cache.transpose(1, 2) for cache in caches)

    @classmethod
    def reshape_and_cache(
        cls,
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        kv_cache_dtype="auto",
        k_scale=1.0,
        v_scale=1.0,
    ):
        _numbers(slot_mapping)
        assert (slot_mapping >= 0).all()
        assert kv_cache_dtype == "auto"
        for x, view in zip((key, value), cls._views(key_cache, value_cache), strict=True):
            _whole(x)
            slots = slot_mapping.long()
            view[slots // view.shape[1], slots % view.shape[1]] = x

    @classmethod
    def single_query_cached_kv_attention(
        cls,
        output,
        query,
        key_cache,
        value_cache,
        head_mapping,
        scale,
        block_tables,
        context_lens,
        block_size,
        max_context_len,
        alibi_slopes,
        window_size=-1,
        k_scale=1.0,
        v_scale=1.0,
        softcap=-1.0,
    ):
        assert cls.layout == "HND", "on XPU it drops the window, and K has a layout of its own"
        _whole(query)
        _whole(output)
        _numbers(head_mapping, block_tables, context_lens)
        group = query.shape[1] // key_cache.shape[1]
        assert head_mapping.tolist() == [head // group for head in range(query.shape[1])]
        assert block_size == key_cache.shape[2]
        assert 128 % block_size == 0
        assert max_context_len >= context_lens.max()
        assert len(query) == len(context_lens)
        assert alibi_slopes is None
        if window_size > 0 and softcap > 0:
            raise RuntimeError("Expected !(window_size > 0 && use_softcap == true) to be true, but got false.")
        window, cap = (x if x > 0 else None for x in (window_size, softcap))
        starts = torch.arange(len(query) + 1)
        rules = {"scale": scale, "causal": True, "window": window, "soft_cap": cap}
        _attend(output, query, cls._views(key_cache, value_cache), block_tables, starts, context_lens, **rules)

    @classmethod
    def flash_attn_varlen_func(
        cls,
        output,
        query,
        key_cache,
        value_cache,
        cu_seqlens_q,
        cu_seqlens_kv,
        max_seqlen_q,
        max_seqlen_kv,
        scale,
        is_cusal,
        block_tables,
        alibi_slopes,
        window_size_left=-1,
        window_size_right=-1,
        kv_cache_dtype="auto",
        k_scale=1.0,
        v_scale=1.0,
        softcap=-1.0,
    ):
        if alibi_slopes is not None:
            raise RuntimeError("alibi_slopes is not supported for flash_attn_varlen yet")
        _whole(query)
        _whole(output)
        _numbers(cu_seqlens_q, cu_seqlens_kv, block_tables)
        queries, keys = cu_seqlens_q.diff(), cu_seqlens_kv.diff()
        assert queries.max() <= max_seqlen_q
        assert keys.max() <= max_seqlen_kv
        assert (keys > 0).all()
        assert window_size_right == (0 if is_cusal and window_size_left >= 0 else window_size_left)
        window = window_size_left + 1 if window_size_left > 0 else None  # 0 is no window at all
        rules = {"scale": scale, "causal": is_cusal, "window": window, "soft_cap": softcap if softcap > 0 else None}
        _attend(output, query, cls._views(key_cache, value_cache), block_tables, cu_seqlens_q, keys, **rules)


class _PagedAttentionOnXpu(_PagedAttention):
    layout = "NHD"

    @classmethod
    def reshape_and_cache(cls, *arguments):
        raise AssertionError("on XPU K has a layout of its own here")


def _library(version, paged):
    modules = SimpleNamespace(PagedAttention=paged)
    return SimpleNamespace(__version__=version, llm=SimpleNamespace(modules=modules))


IPEX_ON_CPU = _library("2.8.0+cpu", _PagedAttention)
IPEX_ON_XPU = _library("2.8.10+xpu", _PagedAttentionOnXpu)


def _varlen(
    q,
    k,
    v,
    max_seqlen_q,
    cu_seqlens_q,
    max_seqlen_k,
    cu_seqlens_k=None,
    seqused_k=None,
    q_v=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=None,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    return_softmax_lse=False,
    out=None,
    scheduler_metadata=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    num_splits=0,
    fa_version=2,
    s_aux=None,
    num_splits_kv=None,
    is_mix_batch=True,
    host_kv_lens=None,
):
    assert causal
    assert softcap == 0.0
    _whole(q)
    _whole(out)
    _numbers(cu_seqlens_q, seqused_k, block_table)
    assert cu_seqlens_q.diff().max() <= max_seqlen_q
    assert seqused_k.max() <= max_seqlen_k
    assert k.stride() == v.stride()
    assert k.stride(3) == 1
    assert k.stride(0) % k.stride(1) == 0
    left, right = window_size
    assert right == (0 if left >= 0 else -1)
    rules = {"scale": softmax_scale, "causal": True, "window": left + 1 if left >= 0 else None, "soft_cap": None}
    _attend(out, q, (k, v), block_table, cu_seqlens_q, seqused_k, **rules)
    return out


XPU_KERNELS = SimpleNamespace(flash_attn_varlen_func=_varlen)
