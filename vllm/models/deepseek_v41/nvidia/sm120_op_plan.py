# SPDX-License-Identifier: Apache-2.0
"""Which ops are called at which shapes: from the model's config and the rank's layout.

| call | what | shapes |
|---|---|---|
| `hc_prenorm` | DeepGEMM's TF32 projection | 1, 65, 200 rows; 1, 4, 16 splits |
| `hc_fused` | TileLang's post and pre of a sublayer | 4, 32, 33 tokens |
| `mxfp8` | every dense layer through vLLM's kernel and quantiser | 1, 129 rows |
| `experts` | DeepGEMM's FP8 x FP4, both GEMMs, some unchosen | 1, 65 tokens |
| `kv_insert` | queries rotated, keys rotated, quantised, written | 1, 65 tokens |
| `compressor` | pooling, norm, ring, insert; each ratio | 19 tokens |
| `indexer_store` | indexer keys; each ratio | 65 tokens |
| `prefill_logits` | gather, DeepGEMM's MQA logits; each ratio | 1, 200 rows |
| `topk` | decode top-k up to the longest row | 1, 5, 9 rows |
| `candidates` | candidate blocks and their mask | 1, 9 rows |
| `sampler` | top-k and top-p | 64 rows |

`attention` and `indexer` (paged MQA logits) are rows of the rules, called as they are.
All but `sampler`, which is random, and `attention` are repeated: 20 calls on the same
inputs agree to the bit, or it is a race.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .sm120_op_cache import Compressor, IndexerStore, KVInsert
from .sm120_op_call import Op
from .sm120_op_gemm import ACTIVATION_GROUP, Experts, Mxfp8Linear
from .sm120_op_hyper import HyperFused, Prenorm
from .sm120_op_logits import PrefillLogits
from .sm120_op_sampler import Sampler
from .sm120_op_topk import Candidates, TopK

OPS: tuple[type[Op], ...] = (
    Prenorm,
    HyperFused,
    Mxfp8Linear,
    Experts,
    KVInsert,
    Compressor,
    IndexerStore,
    PrefillLogits,
    TopK,
    Candidates,
    Sampler,
)
OP_CALLS: tuple[str, ...] = tuple(op.name for op in OPS)

# A page where no plan says another: what every DeepGEMM takes on SM120.
_PAGE = 64
# Keys of a prefill request; some pages and a part of one.
_KEYS = 1500
# Rows of top-k: one, and around the four and eight that its kernel groups.
_TOPK_ROWS = (1, 5, 9)
# Compressed positions around which top-k kernels change what they do.
_TOPK_WIDTHS = (4096, 32768, 98304)


@dataclass(frozen=True)
class Cache:
    """States in a page, and bytes from one block to the next (0: the page's own)."""

    page: int = _PAGE
    stride: int = 0


@dataclass(frozen=True)
class Figures:
    """What the shapes follow from.

    Attributes:
        config: the model's text config.
        ranks: tensor-parallel ranks.
        max_model_len: tokens.
        padded_heads: query heads that attention is handed on a rank.
        window: sliding-window cache.
        compressed, indexer: by compression ratio.
        capacity: rows of a request's compressor ring.
        expert_parallel: experts are whole on a rank.
        draft: a DSpark draft is served.
        topk_backend: vLLM's sparse_indexer_topk_backend.
        deep_gemm_experts: vLLM would run the experts by DeepGEMM.
    """

    config: Any
    ranks: int
    max_model_len: int
    padded_heads: int
    window: Cache = Cache()
    compressed: dict[int, Cache] = field(default_factory=dict)
    indexer: dict[int, Cache] = field(default_factory=dict)
    capacity: int = 8
    expert_parallel: bool = False
    draft: bool = False
    topk_backend: str = "auto"
    deep_gemm_experts: bool = True


def from_config(
    path: Path, ranks: int, max_model_len: int | None = None, draft: bool = True
) -> Figures:
    """From a checkpoint's config.json alone; pages of 64 states, adjacent.

    Raises:
        ValueError: the file is not DeepSeek-V4.1's, or its heads do not divide.
    """
    try:
        text = json.loads(path.read_text(encoding="utf-8"))
        config = SimpleNamespace(**text.get("text_config", text))
        heads = config.num_attention_heads
        ratios = sorted({r for r in config.compress_ratios if r})
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} is no config.json of DeepSeek-V4.1: {error}"
        ) from None
    if ranks < 1 or heads % ranks:
        raise ValueError(f"{heads} heads do not divide by {ranks} ranks; choose others")
    return Figures(
        config,
        ranks,
        max_model_len or config.max_position_embeddings,
        max(heads // ranks, 16),
        compressed={ratio: Cache() for ratio in ratios},
        indexer={ratio: Cache() for ratio in ratios},
        draft=draft,
    )


def from_plan(plan: Any, padded_heads: int) -> Figures:
    """From what vLLM plans (``sm120_kv_plan.KVPlan``)."""
    vllm_config = plan.config
    config = vllm_config.model_config.hf_config
    compressed, indexer, capacity = {}, {}, 8
    for name, layer in plan.layers.items():
        ratio = int(getattr(layer, "compress_ratio", 0) or 0)
        if name.endswith(".attn") and ratio:
            source = layer.compressed_cache_prefix
            compressed.setdefault(ratio, _cache(plan, source))
            key = f"{source}.indexer.k_cache"
            if key in plan.views:
                indexer.setdefault(ratio, _cache(plan, key))
        if name.endswith(".state_cache"):
            capacity = int(layer.block_size)
    parallel = vllm_config.parallel_config
    kernels = getattr(vllm_config, "kernel_config", None)
    return Figures(
        config,
        int(parallel.tensor_parallel_size),
        int(vllm_config.model_config.max_model_len),
        padded_heads,
        _cache(plan, "model.layers.0.attn.swa_cache"),
        compressed,
        indexer,
        capacity,
        bool(parallel.enable_expert_parallel),
        "dspark" in str(getattr(vllm_config.speculative_config, "method", "")),
        str(getattr(kernels, "sparse_indexer_topk_backend", "auto")),
        _deep_gemm_experts(str(getattr(kernels, "moe_backend", "auto"))),
    )


def _cache(plan: Any, name: str) -> Cache:
    view = plan.views[name]
    return Cache(int(view.shape[-2]), int(view.stride(0) * view.element_size()))


def _deep_gemm_experts(backend: str) -> bool:
    from vllm.model_executor.layers.fused_moe.experts import deep_gemm_moe

    experts = getattr(deep_gemm_moe, "DeepGemmFP4Experts", None)
    if experts is None or backend not in ("auto", "deep_gemm"):
        return False
    return bool(experts._supports_current_device())


def plan_ops(figures: Figures, calls: Collection[str] | None = None) -> list[Op]:
    """The ops to call, in an order in which what most probably fails comes first.

    Args:
        figures: the model and the rank.
        calls: names of ``OP_CALLS``; None: all.
    """
    ops = [
        *_hyper(figures),
        *_experts(figures),
        *_logits(figures),
        *_dense(figures),
        *_writers(figures),
        *_choice(figures),
        Sampler(64, figures.config.vocab_size),
    ]
    # Caches of both ratios may be alike: each shape once.
    return [op for op in dict.fromkeys(ops) if calls is None or op.name in calls]


def _hyper(figures: Figures) -> list[Op]:
    config = figures.config
    streams, hidden = config.hc_mult, config.hidden_size
    outputs = streams * (streams + 2)
    ops: list[Op] = [
        Prenorm(rows, streams * hidden, outputs, splits)
        for rows in (1, 65, 200)
        for splits in (1, 4, 16)
    ]
    # The first layer projects the embedding itself, its streams being alike.
    ops.append(Prenorm(65, hidden, outputs, 4))
    ops += [
        HyperFused(
            tokens,
            hidden,
            streams,
            config.hc_sinkhorn_iters,
            config.hc_eps,
            config.rms_norm_eps,
        )
        for tokens in (4, 32, 33)
    ]
    return ops


def _experts(figures: Figures) -> list[Op]:
    if not figures.deep_gemm_experts:
        return []
    config = figures.config
    shards = 1 if figures.expert_parallel else figures.ranks
    inner = -(-config.moe_intermediate_size // shards // ACTIVATION_GROUP)
    top = config.num_experts_per_tok
    return [
        Experts(tokens, top, 2 * top + 1, config.hidden_size, inner * ACTIVATION_GROUP)
        for tokens in (1, 65)
    ]


def _dense(figures: Figures) -> list[Op]:
    config, ranks = figures.config, figures.ranks
    hidden, latent = config.hidden_size, config.q_lora_rank
    heads = config.num_attention_heads // ranks
    shared = config.moe_intermediate_size * config.n_shared_experts // ranks
    layers = {
        "fused_wqa_wkv": (latent + config.head_dim, hidden),
        "wq_b": (heads * config.head_dim, latent),
        "wo_b": (hidden, config.o_groups * config.o_lora_rank // ranks),
        "indexer.wq_b": (config.index_n_heads * config.index_head_dim, latent),
        "shared gate_up": (2 * shared, hidden),
        "shared down": (hidden, shared),
    }
    if getattr(config, "engram_layer_ids", None):
        columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        width = columns * config.engram_head_dim
        layers["engram.wkv"] = (hidden * (config.hc_mult + 1) // ranks, width)
    if figures.draft:
        targets = len(config.dspark_target_layer_ids)
        layers["main_proj"] = (hidden, hidden * targets)
    return [
        Mxfp8Linear(layer, tokens, *shape)
        for layer, shape in layers.items()
        for tokens in (1, 129)
    ]


def _writers(figures: Figures) -> list[Op]:
    config, window = figures.config, figures.window
    heads = config.num_attention_heads // figures.ranks
    eps = config.rms_norm_eps
    ops: list[Op] = [
        KVInsert(tokens, heads, figures.padded_heads, window.page, window.stride, eps)
        for tokens in (1, 65)
    ]
    for ratio, cache in sorted(figures.compressed.items()):
        where = (cache.page, cache.stride)
        ops.append(Compressor(19, ratio, *where, figures.capacity, eps))
    for ratio, cache in sorted(figures.indexer.items()):
        ops.append(IndexerStore(65, ratio, cache.page, cache.stride, eps))
    return ops


def _logits(figures: Figures) -> list[Op]:
    return [
        PrefillLogits(
            rows, figures.config.index_n_heads, cache.page, _KEYS, cache.stride
        )
        for _, cache in sorted(figures.indexer.items())
        for rows in (1, 200)
    ]


def _choice(figures: Figures) -> list[Op]:
    config = figures.config
    width = figures.max_model_len // max(1, min(figures.indexer, default=1))
    widths = sorted({*(n for n in _TOPK_WIDTHS if n < width), width})
    ops: list[Op] = [
        TopK(rows, width, longest, config.index_topk, figures.topk_backend)
        for longest in widths
        for rows in _TOPK_ROWS
    ]
    if getattr(config, "candidate_topk_blocks", 0):
        blocks = (config.candidate_topk_blocks, config.candidate_block_size)
        ops += [Candidates(rows, width, width, *blocks) for rows in (1, 9)]
    return ops
