"""The libraries behind IPEX, each brought to one form: pages in, attention out. None of them checks what it is handed.

A page that lies otherwise than an operator expects, a slot below 0 or a block that is not there ends the process, or
gives a wrong answer. So pages are handed over in the one layout that each operator reads, and everything else was
checked on the host before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from heedful import libraries
from heedful.backends.ipex import IPEX, XPU_KERNELS
from heedful.errors import BackendUnavailableError, BadInputError
from heedful.types import Missing

if TYPE_CHECKING:
    from torch import Tensor

    from heedful.backends.capabilities import Capability

    Views = tuple[Tensor, Tensor]
    """(K, V) as strided views [num_blocks, block_size, num_kv_heads, size]."""

INT32_MAX = 2**31 - 1
PARTITION = 128
"""Keys that the decode operator takes at a time; it reads past a table whose pages do not divide this."""


@dataclass(frozen=True)
class Rules:
    """What one layer does to its scores. window: 2 or more, or None; soft_cap: positive, or None."""

    scale: float
    window: int | None
    soft_cap: float | None


@dataclass(frozen=True)
class Part:
    """Sequences that one operator serves in one call.

    rows: their query rows. tables int32 [seqs, pages], numbers of blocks; query_starts, key_starts int32 [seqs + 1],
    key_lens int32 [seqs], all on the query's device; most_queries, most_keys: of one sequence.
    """

    rows: slice | Tensor
    tables: Tensor
    query_starts: Tensor
    key_starts: Tensor
    key_lens: Tensor
    most_queries: int
    most_keys: int
    causal: bool


class Library(ABC):
    """One library on one kind of device. row: the capability row that says what it is asked for."""

    row: ClassVar[Capability]

    @abstractmethod
    def pages(self, views: Views) -> Views | None:
        """The cache as the operators read it, without a copy; None where it lies otherwise."""

    @abstractmethod
    def packed(self, views: Views, blocks: Tensor) -> Views:
        """A copy of some blocks that the operators can read."""

    @abstractmethod
    def varlen(self, query: Tensor, pages: Views, part: Part, rules: Rules, output: Tensor) -> None:
        """Attention of any number of queries a sequence; query and output [rows, num_heads, size], contiguous."""

    @abstractmethod
    def takes_single(self, rules: Rules, block_size: int) -> bool:
        """Whether sequences of one query have an operator of their own, ``single``, that is right here."""

    @abstractmethod
    def single(self, query: Tensor, pages: Views, part: Part, rules: Rules, output: Tensor) -> None:
        """The same as varlen for sequences of one query each."""

    @abstractmethod
    def write(self, key: Tensor, value: Tensor, pages: Views, slots: Tensor) -> bool:
        """Store K and V [tokens, num_kv_heads, size] at slots int64, all 0 or more; False where it has no operator."""


class IpexOnCpu(Library):
    """The CPU build of intel-extension-for-pytorch. Pages [num_blocks, num_kv_heads, block_size, size]."""

    row = IPEX

    def __init__(self, ipex: Any) -> None:
        self._paged = ipex.llm.modules.PagedAttention

    def pages(self, views: Views) -> Views | None:
        """See Library. One set of strides serves both K and V, and a head's rows must lie one after another."""
        key, value = (view.transpose(1, 2) for view in views)
        side_by_side = key.stride()[2:] == (key.shape[3], 1)
        return (key, value) if side_by_side and key.stride() == value.stride() else None

    def packed(self, views: Views, blocks: Tensor) -> Views:
        """See Library."""
        key, value = (view.index_select(0, blocks).transpose(1, 2).contiguous() for view in views)
        return key, value

    def varlen(self, query: Tensor, pages: Views, part: Part, rules: Rules, output: Tensor) -> None:
        """See Library."""
        _ipex_varlen(self._paged, query, pages, part, rules, output)

    def takes_single(self, rules: Rules, block_size: int) -> bool:
        """See Library. With a window and a soft cap together the operator raises."""
        return PARTITION % block_size == 0 and (rules.window is None or rules.soft_cap is None)

    def single(self, query: Tensor, pages: Views, part: Part, rules: Rules, output: Tensor) -> None:
        """See Library. Here a window of W means W keys."""
        heads = pages[0].shape[1]
        mapping = torch.arange(heads, dtype=torch.int32).repeat_interleave(query.shape[1] // heads)
        self._paged.single_query_cached_kv_attention(
            output,
            query,
            *pages,
            mapping,
            rules.scale,
            part.tables,
            part.key_lens,
            pages[0].shape[2],
            part.most_keys,
            None,
            -1 if rules.window is None else min(rules.window, INT32_MAX),
            1.0,
            1.0,
            -1.0 if rules.soft_cap is None else rules.soft_cap,
        )

    def write(self, key: Tensor, value: Tensor, pages: Views, slots: Tensor) -> bool:
        """See Library. The operator narrows slots to 32 bits, so that it is not asked for a cache with more of them."""
        if pages[0].shape[0] * pages[0].shape[2] > INT32_MAX:
            return False
        self._paged.reshape_and_cache(key.contiguous(), value.contiguous(), *pages, slots.int(), "auto", 1.0, 1.0)
        return True


class _OneOperator(Library):
    """A library whose one operator serves any number of queries; K and V are written by torch."""

    def takes_single(self, *_: object) -> bool:
        """See Library."""
        return False

    def single(self, *_: object) -> None:
        """See Library. Never asked, because takes_single says no."""
        raise AssertionError(f"{type(self).__name__} has no operator for single queries")

    def write(self, *_: object) -> bool:
        """See Library."""
        return False

    def packed(self, views: Views, blocks: Tensor) -> Views:
        """See Library."""
        key, value = (view.index_select(0, blocks).contiguous() for view in views)
        return key, value


class IpexOnXpu(_OneOperator):
    """The XPU build of intel-extension-for-pytorch. Pages [num_blocks, block_size, num_kv_heads, size], copied.

    Its decode operator drops the window and has a K layout of its own, so that all goes by flash_attn_varlen_func.
    """

    row = IPEX

    def __init__(self, ipex: Any) -> None:
        self._paged = ipex.llm.modules.PagedAttention

    def pages(self, views: Views) -> Views | None:
        """See Library."""
        key, value = views
        return views if key.is_contiguous() and value.is_contiguous() else None

    def varlen(self, query: Tensor, pages: Views, part: Part, rules: Rules, output: Tensor) -> None:
        """See Library."""
        _ipex_varlen(self._paged, query, pages, part, rules, output)


def _ipex_varlen(paged: Any, query: Tensor, pages: Views, part: Part, rules: Rules, output: Tensor) -> None:
    """Here a window of W to the left means W keys beside the token itself, and 0 means no window at all."""
    left = -1 if rules.window is None else min(rules.window, INT32_MAX) - 1
    paged.flash_attn_varlen_func(
        output,
        query,
        *pages,
        part.query_starts,
        part.key_starts,
        part.most_queries,
        part.most_keys,
        rules.scale,
        part.causal,
        part.tables,
        None,
        left,
        0 if part.causal and left >= 0 else left,
        "auto",
        1.0,
        1.0,
        -1.0 if rules.soft_cap is None else rules.soft_cap,
    )


class XpuKernels(_OneOperator):
    """vllm-xpu-kernels. Pages [num_blocks, block_size, num_kv_heads, size] of any strides that divide each other."""

    row = XPU_KERNELS

    def __init__(self, kernels: Any) -> None:
        self._varlen = kernels.flash_attn_varlen_func

    def pages(self, views: Views) -> Views | None:
        """See Library. The kernel counts a page's stride in tokens."""
        even = all(view.stride(3) == 1 and view.stride(0) % view.stride(1) == 0 for view in views)
        return views if even and views[0].stride() == views[1].stride() else None

    def varlen(self, query: Tensor, pages: Views, part: Part, rules: Rules, output: Tensor) -> None:
        """See Library. Here a window is [keys to the left, keys to the right] beside the token itself."""
        left = -1 if rules.window is None else min(rules.window, INT32_MAX) - 1
        self._varlen(
            query,
            *pages,
            max_seqlen_q=part.most_queries,
            cu_seqlens_q=part.query_starts,
            max_seqlen_k=part.most_keys,
            seqused_k=part.key_lens,
            softmax_scale=rules.scale,
            causal=part.causal,
            window_size=[left, 0 if left >= 0 else -1],
            block_table=part.tables,
            out=output,
        )


def require_one() -> None:
    """Raise BackendUnavailableError where no library of the backend can be imported."""
    ipex, kernels = _imported()
    if isinstance(ipex, Missing) and isinstance(kernels, Missing):
        raise BackendUnavailableError(_neither(ipex, kernels))


@lru_cache(maxsize=8)
def library_for(device: str) -> Library:
    """The library for tensors on that kind of device (cpu, xpu); its XPU build before vllm-xpu-kernels."""
    ipex, kernels = _imported()
    on_xpu = not isinstance(ipex, Missing) and "xpu" in str(getattr(ipex, "__version__", ""))
    if device == "cpu" and not isinstance(ipex, Missing) and not on_xpu:
        _settle(ipex)
        return IpexOnCpu(ipex)
    if device == "xpu" and on_xpu:
        return IpexOnXpu(ipex)
    if device == "xpu" and not isinstance(kernels, Missing):
        return XpuKernels(kernels)
    if device not in ("cpu", "xpu"):
        raise BadInputError(f"IPEX computes on xpu and, with its CPU build, on the CPU, but query is on {device}")
    if isinstance(ipex, Missing):
        raise BackendUnavailableError(_neither(ipex, kernels))
    raise BackendUnavailableError(
        f"intel-extension-for-pytorch {ipex.__version__} is here, which does not compute on {device}; move the tensors "
        "to the device that it was built for, or install the other build"
    )


def _imported() -> tuple[Any, Any]:
    ipex, kernels = (libraries.import_once(row.libraries[0]) for row in (IPEX, XPU_KERNELS))
    if isinstance(kernels, Missing):
        return ipex, kernels
    return ipex, libraries.import_once(XPU_KERNELS.libraries[0].partition(".")[0])


def _settle(ipex: Any) -> None:
    """Its table of operators is filled by the first call, and not safely from two threads."""
    paged = ipex.llm.modules.PagedAttention
    one = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    paged.reshape_and_cache(one[0], one[0], one.clone(), one.clone(), torch.zeros(1, dtype=torch.int32))


def _neither(ipex: Any, kernels: Any) -> str:
    """kernels: the library or why it is missing."""
    other = kernels.cause if isinstance(kernels, Missing) else "it computes on xpu only"
    return (
        f"IPEX cannot be built: intel_extension_for_pytorch: {ipex.cause}; vllm_xpu_kernels: {other}. "
        "pip install torch==2.8.0 intel-extension-for-pytorch==2.8.0 in an environment of its own"
    )
