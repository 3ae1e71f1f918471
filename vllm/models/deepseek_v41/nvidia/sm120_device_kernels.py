# SPDX-License-Identifier: Apache-2.0
"""What a kernel under test looks like, the library kernels in that form, their bounds.

The two adapters are source read only: no SM12x GPU was in this project's reach.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .sm120_packed_cache import index_view, record_view
from .sm120_reference import Segment


@dataclass(frozen=True)
class Bound:
    """The largest relative norm that a right kernel may have, and why."""

    value: float
    source: str


BF16_BOUND = Bound(
    1e-2,
    "bf16 probabilities and output round by 2**-9 each; FlashMLA and a Triton kernel "
    "had 2e-3 on an H200; five times that for the worst row",
)
FP8_BOUND = Bound(
    1e-1,
    "FlashInfer's SM120 kernels round the query's NoPE part and the probabilities to "
    "e4m3 (3 mantissa bits, 2.6 % each in the mean); emulated on random_case's inputs: "
    "5.2 % in the worst of 49,152 rows, doubled. Source read: not measured on SM12x",
)
INDEXER_BOUND = Bound(
    4e-3,
    "products of e4m3 are exact in fp32; 2**-8 allows for tensor cores that keep 13 "
    "bits of a sum. Source read: not measured on SM12x",
)


class AttentionKernel(Protocol):
    """Writes ``out`` in place, all of it, zeros where a row has no candidate.

    ``q`` and ``out`` bf16 ``[T, H, 512]``, contiguous; the other arguments as in
    ``AttentionCase``. Refuses what it does not take by raising.
    """

    name: str
    bound: Bound

    def __call__(
        self,
        q: torch.Tensor,
        window: Segment,
        compressed: Segment | None,
        sinks: torch.Tensor | None,
        scale: float,
        out: torch.Tensor,
    ) -> None: ...


class IndexerKernel(Protocol):
    """Returns logits ``[T, >= longest context]``, fp32, bf16 or float64.

    Arguments as in ``IndexerCase``. Columns at and past a row's context are not looked
    at. Refuses what it does not take by raising.
    """

    name: str
    bound: Bound

    def __call__(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        page: int,
        block_table: torch.Tensor,
        context_lengths: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class _Adapter:
    name: str
    bound: Bound
    call: Callable[..., Any] = field(repr=False)

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


def flashinfer_kernel() -> AttentionKernel:
    """FlashInfer's DSv4 sparse MLA, called as vLLM's SM120 attention layer calls it.

    Source read only: the call follows DeepseekV4FlashInferSM120Attention of vLLM 0.30
    to 0.33 (same keywords in all four) and never ran on SM12x here. Decode and prefill
    are the same call: FlashInfer takes its prefill route above 64 tokens.

    Raises:
        ImportError: no vLLM, or one without DeepSeek-V4.1.
    """
    from vllm.models.deepseek_v41.nvidia.flashinfer_sparse import (
        DeepseekV4FlashInferSM120Attention as Attention,
    )
    from vllm.utils.flashinfer import flashinfer_trtllm_batch_decode_sparse_mla_dsv4

    def view(segment: Segment) -> torch.Tensor:
        return Attention._as_sparse_cache(record_view(segment.cache, segment.page))

    def call(
        q: torch.Tensor,
        window: Segment,
        compressed: Segment | None,
        sinks: torch.Tensor | None,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        extra = compressed
        flashinfer_trtllm_batch_decode_sparse_mla_dsv4(
            query=q,
            swa_kv_cache=view(window),
            workspace_buffer=Attention._get_workspace(q.device),
            sparse_indices=window.indices,
            compressed_kv_cache=None if extra is None else view(extra),
            out=out,
            bmm1_scale=scale,
            sinks=sinks,
            kv_layout="NHD",
            swa_topk_lens=window.lengths,
            extra_sparse_indices=None if extra is None else extra.indices.unsqueeze(1),
            extra_sparse_topk_lens=None if extra is None else extra.lengths,
        )

    return _Adapter("FlashInfer DSv4", FP8_BOUND, call)


def fork_kernel() -> AttentionKernel:
    """The fork's own sparse MLA (patch sm120_sparse_mla), by itself: no FlashInfer.

    Raises:
        ImportError: a tree without that patch.
    """
    from .ops.sm120_sparse_mla import sparse_mla

    def call(
        q: torch.Tensor,
        window: Segment,
        compressed: Segment | None,
        sinks: torch.Tensor | None,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        extra = compressed
        sparse_mla(
            q,
            record_view(window.cache, window.page),
            window.indices,
            window.lengths,
            sinks,
            scale,
            out,
            extra_cache=None if extra is None else record_view(extra.cache, extra.page),
            extra_indices=None if extra is None else extra.indices,
            extra_lens=None if extra is None else extra.lengths,
        )

    return _Adapter("fork sparse MLA", BF16_BOUND, call)


def deep_gemm_kernel() -> IndexerKernel:
    """DeepGEMM's FP8 paged MQA logits, called as vLLM's indexer calls it on SM120.

    Source read only: the call follows SparseAttnIndexer and its metadata builder of
    vLLM 0.30 to 0.33 (one query row a request, no MX scales, which are SM100's) and
    never ran on SM12x here.

    Raises:
        ImportError: no vLLM.
    """
    from vllm.utils.deep_gemm import (
        fp8_fp4_paged_mqa_logits,
        get_paged_mqa_logits_metadata,
    )
    from vllm.utils.platform_utils import num_compute_units

    # 0.30 to 0.32 take clean_logits; the indexer gives False there.
    parameters = inspect.signature(fp8_fp4_paged_mqa_logits).parameters
    more = {"clean_logits": False} if "clean_logits" in parameters else {}

    def call(
        q: torch.Tensor,
        cache: torch.Tensor,
        page: int,
        block_table: torch.Tensor,
        context_lengths: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        lengths = context_lengths.unsqueeze(1)
        units = num_compute_units(q.device.index or 0)
        return fp8_fp4_paged_mqa_logits(
            (q.unsqueeze(1), None),
            index_view(cache, page).unsqueeze(-2),
            weights,
            lengths,
            block_table,
            get_paged_mqa_logits_metadata(lengths, page, units),
            max_model_len=block_table.shape[1] * page,
            **more,
        )

    return _Adapter("DeepGEMM paged MQA", INDEXER_BOUND, call)
