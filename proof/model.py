# SPDX-License-Identifier: Apache-2.0
"""The tiny DeepSeek-V4.1: its configurations and the table of its tensors.

Widths, heads, record formats and quantization are V4.1's own, since kernels select by
them; only depth, experts, vocabulary and tables are small. The six layers cover what
V4.1 has: window only (0, 1), ratio 2 (2, 3), ratio 1 (4, 5), two KV sources (2, 4), an
index source that owns no KV (5), which reads the candidates that layer 4 publishes.

Tensor names and shapes: vLLM's loader (level of evidence: source read; the proof's runs
load them through it, tests/proof compares them with vLLM's own parameter names).
"""

import copy
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

VARIANTS = ("text", "engram", "dspark", "vision")

HIDDEN = 5120
HEAD_DIM = 512
Q_LORA = 1280
O_LORA = 1024
HEADS = 64
GROUPS = 8
MOE = 2304
STREAMS = 4
"""hc_mult: hyper-connection streams."""
EXPERTS = 16
DRAFT_EXPERTS = 8
DRAFTS = 3
LAYERS = 6
KV_SOURCES = {2: 2, 4: 1}
"""Layer to its compress ratio."""
INDEX_SOURCES = (2, 4, 5)
INDEX_HEADS = 32
INDEX_DIM = 128
KNOWN = INDEX_DIM
"""Dimensions of the latent that the indexer sees, without position (RoPE is on the last 64)."""
WORDS = 4096
"""Vocabulary of the text variants."""
IMAGE_TOKEN = 129264
"""Id of an image position: vLLM takes no other (deepseek_v41/common/mm_preprocess.py)."""
IMAGE_WORDS = 129280
"""Vocabulary of the vision variant, V4.1's own, so that IMAGE_TOKEN lies inside."""
ENGRAM_LAYER = 1
ENGRAM_ROWS = 110_000
"""More than the 24 primes above ENGRAM_WORDS need (100,776)."""
ENGRAM_WORDS = 4096
ENGRAM_DIM = 256
NGRAM_COLUMNS = 3 * 8
"""(max_ngram_size - 1) * n_heads."""
COMPRESSED_WORDS = 3072
"""The last quarter of the vocabulary spells the third quarter in capitals."""
KEY = 1.5
"""Norm of keys, which are the values too."""
VISION_DIM = 256
VISION_MLP = 512
VISION_LAYERS = 2
PATCH = 14
DOWNSAMPLE = 3
BLOCK = 32
"""Rows and columns that share one UE8M0 scale."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint.

    Attributes:
        name: as DeepSeek spells it.
        shape: in elements; for ``fp4``, of the packed bytes (two values each).
        kind: ``bf16``, ``f32``, ``fp8`` (e4m3), ``fp4`` (two e2m1 a byte), ``e8m0``, or
            ``eye``: bf16 with ones on the diagonal.
        spread: standard deviation of the values; for ``e8m0``, of the values that the
            scales belong to.
        middle: mean of the values.
        shared: rows that come from another stream; None where all are the tensor's own.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    spread: float = 0.0
    middle: float = 0.0
    shared: "Shared | None" = None


@dataclasses.dataclass(frozen=True)
class Shared:
    """Rows of a query projection that all heads have in common, and the indexer too.

    In a trained model the indexer chooses what attention looks at, so that which of two
    equal scores it takes last hardly matters. Random weights would make that choice a
    coin's, and every rounding visible. Here all heads share the rows of the first KNOWN
    dimensions, those that the indexer's keys are made of, and these count most.

    Attributes:
        name: the stream of bits that the rows come from.
        head: rows of one head.
        rows: how many of them, the first, are shared.
        louder: powers of two by which they are larger.
    """

    name: str
    head: int
    rows: int
    louder: int = 0


def config(variant: str) -> dict[str, Any]:
    """config.json of a variant, in the nested form that DeepSeek's checkpoints have."""
    if variant not in VARIANTS:
        raise ValueError(f"{variant!r} is not a variant; one of {', '.join(VARIANTS)}")
    made = copy.deepcopy(_CONFIG)
    text = made["text_config"]
    if variant == "engram":
        text["engram_layer_ids"] = [ENGRAM_LAYER]
        text["engram_num_embeddings"] = [ENGRAM_ROWS]
    if variant == "dspark":
        text["num_nextn_predict_layers"] = DRAFTS
        text["dspark_target_layer_ids"] = [3, 4, 5]
    if variant == "vision":
        text["vocab_size"] = IMAGE_WORDS
    return made


def tensors(variant: str) -> dict[str, list[Tensor]]:
    """Shard name to its tensors. Variants share the shards that are equal."""
    words = config(variant)["text_config"]["vocab_size"]
    shards = {f"layer-{layer}": list(_layer(layer)) for layer in range(LAYERS)}
    shards[f"words-{words}"] = [
        Tensor("embed.weight", (words, HIDDEN), "bf16", 3.0, 1.0),
        Tensor("head.weight", (words, HIDDEN), "bf16", 2 / math.sqrt(HIDDEN)),
        _norm("norm.weight", HIDDEN),
    ]
    shards["vision"] = list(_vision())
    if variant == "engram":
        shards["engram"] = list(_engram())
    if variant == "dspark":
        for stage in range(DRAFTS):
            shards[f"draft-{stage}"] = list(_draft(stage))
    return shards


def _norm(name: str, width: int, middle: float = 1.0) -> Tensor:
    return Tensor(name, (width,), "bf16", middle / 7, middle)


def _quantized(
    name: str, rows: int, columns: int, gain: float = 1.0, shared: Shared | None = None
) -> Iterator[Tensor]:
    """An MXFP8 matrix that keeps the scale of its input, times ``gain``."""
    spread = gain / math.sqrt(columns)
    yield Tensor(f"{name}.weight", (rows, columns), "fp8", spread, shared=shared)
    if shared:
        shared = dataclasses.replace(shared, head=shared.head // BLOCK, rows=shared.rows // BLOCK)
    shape = (-(-rows // BLOCK), columns // BLOCK)
    yield Tensor(f"{name}.scale", shape, "e8m0", spread, shared=shared)


def _expert(name: str, rows: int, columns: int, gain: float) -> Iterator[Tensor]:
    spread = gain / math.sqrt(columns)
    yield Tensor(f"{name}.weight", (rows, columns // 2), "fp4", spread)
    yield Tensor(f"{name}.scale", (rows, columns // BLOCK), "e8m0", spread)


def _block(prefix: str, experts: int) -> Iterator[Tensor]:
    """What every decoder layer has, the draft's too."""
    for part in ("attn", "ffn"):
        streams = STREAMS * HIDDEN
        mixes = STREAMS * (2 + STREAMS)
        yield Tensor(f"{prefix}.hc_{part}_fn", (mixes, streams), "f32", 1 / math.sqrt(streams))
        yield Tensor(f"{prefix}.hc_{part}_base", (mixes,), "f32", 0.6)
        yield Tensor(f"{prefix}.hc_{part}_scale", (3,), "f32", 0.1, 1.0)
        yield _norm(f"{prefix}.{part}_norm.weight", HIDDEN)
    attn = f"{prefix}.attn"
    # Scores q.k / sqrt(512) then spread by about 3: a few tokens dominate, as in a
    # trained model, so that a wrong record shows.
    yield _norm(f"{attn}.kv_norm.weight", HEAD_DIM, KEY)
    yield _norm(f"{attn}.q_norm.weight", Q_LORA)
    # Log-sum-exp of such scores over a window is about 9.
    yield Tensor(f"{attn}.attn_sink", (HEADS,), "f32", 1.0, 9.0)
    yield from _quantized(f"{attn}.wq_a", Q_LORA, HIDDEN)
    yield from _quantized(f"{attn}.wkv", HEAD_DIM, HIDDEN)
    yield from _quantized(f"{attn}.wq_b", HEADS * HEAD_DIM, Q_LORA, shared=_known(prefix, HEAD_DIM))
    yield from _quantized(f"{attn}.wo_a", GROUPS * O_LORA, HEADS * HEAD_DIM // GROUPS)
    yield from _quantized(f"{attn}.wo_b", HIDDEN, GROUPS * O_LORA, 2.0)
    ffn = f"{prefix}.ffn"
    yield Tensor(f"{ffn}.gate.weight", (experts, HIDDEN), "bf16", 2 / math.sqrt(HIDDEN))
    yield Tensor(f"{ffn}.gate.bias", (experts,), "f32", 0.1)
    yield Tensor(f"{ffn}.gate.bias_vl", (experts,), "f32", 0.5)
    for name, kind in (("shared_experts", _quantized), ("experts", _expert)):
        owners = [name] if kind is _quantized else [f"{name}.{e}" for e in range(experts)]
        for owner in owners:
            yield from kind(f"{ffn}.{owner}.w1", MOE, HIDDEN, 1.5)
            yield from kind(f"{ffn}.{owner}.w3", MOE, HIDDEN, 1.5)
            yield from kind(f"{ffn}.{owner}.w2", HIDDEN, MOE, 2.0)


def _layer(layer: int) -> Iterator[Tensor]:
    prefix = f"layers.{layer}"
    yield from _block(prefix, EXPERTS)
    ratio = KV_SOURCES.get(layer)
    if ratio is not None:
        owner = f"{prefix}.attn.compressor"
        # Ratio 1 pools single tokens: no gate.
        for name in ("wkv", "wgate")[:ratio]:
            yield Tensor(
                f"{owner}.{name}.weight", (HEAD_DIM, HIDDEN), "bf16", 1 / math.sqrt(HIDDEN)
            )
        yield _norm(f"{owner}.norm.weight", HEAD_DIM, KEY)
        owner = f"{prefix}.attn.indexer"
        yield Tensor(f"{owner}.wk.weight", (INDEX_DIM, HEAD_DIM), "eye", 0.01)
        yield _norm(f"{owner}.k_norm.weight", INDEX_DIM)
    if layer in INDEX_SOURCES:
        owner = f"{prefix}.attn.indexer"
        shared = _known(prefix, INDEX_DIM)
        yield from _quantized(f"{owner}.wq_b", INDEX_HEADS * INDEX_DIM, Q_LORA, shared=shared)
        # Positive for nearly every token, since embeddings have a mean.
        spread = 0.3 / math.sqrt(HIDDEN)
        shape = (INDEX_HEADS, HIDDEN)
        yield Tensor(f"{owner}.weights_proj.weight", shape, "bf16", spread, 3 * spread)


def _known(prefix: str, head: int) -> Shared:
    return Shared(f"{prefix}.known", head, KNOWN, louder=2)


def _engram() -> Iterator[Tensor]:
    owner = f"layers.{ENGRAM_LAYER}.engram"
    yield Tensor(f"{owner}.embed.weight", (ENGRAM_ROWS, ENGRAM_DIM), "fp8", 1.0)
    yield Tensor(f"{owner}.embed.scale", (ENGRAM_ROWS, ENGRAM_DIM // BLOCK), "e8m0", 1.0)
    columns = NGRAM_COLUMNS * ENGRAM_DIM
    yield from _quantized(f"{owner}.wkv", (STREAMS + 1) * HIDDEN, columns, 3.0)
    for name in ("q_weight", "k_weight"):
        yield Tensor(f"{owner}.{name}", (STREAMS, HIDDEN), "bf16", 1 / 7, 1.0)


def _draft(stage: int) -> Iterator[Tensor]:
    prefix = f"mtp.{stage}"
    yield from _block(prefix, DRAFT_EXPERTS)
    if stage == 0:
        yield from _quantized(f"{prefix}.main_proj", HIDDEN, 3 * HIDDEN)
        yield _norm(f"{prefix}.main_norm.weight", HIDDEN)
    if stage == DRAFTS - 1:
        yield _norm(f"{prefix}.norm.weight", HIDDEN)
        yield Tensor(f"{prefix}.markov_head.embed.weight", (WORDS, 256), "bf16", 1.0)
        yield Tensor(f"{prefix}.markov_head.head.weight", (WORDS, 256), "bf16", 1 / 16)
        width = HIDDEN + 256
        yield Tensor(
            f"{prefix}.confidence_head.proj.weight", (1, width), "bf16", 1 / math.sqrt(width)
        )


def _vision() -> Iterator[Tensor]:
    for name in ("image_start", "image_end", "image_newline"):
        yield Tensor(name, (HIDDEN,), "bf16", 3.0)
    yield from _linear("vision.patch_embed.proj", VISION_DIM, 3 * PATCH**2)
    for layer in range(VISION_LAYERS):
        prefix = f"vision.blocks.{layer}"
        yield _norm(f"{prefix}.norm1.weight", VISION_DIM)
        yield from _linear(f"{prefix}.attn.wqkv", 3 * VISION_DIM, VISION_DIM)
        yield from _linear(f"{prefix}.attn.wo", VISION_DIM, VISION_DIM)
        yield _norm(f"{prefix}.norm2.weight", VISION_DIM)
        yield from _linear(f"{prefix}.mlp.w1", 2 * VISION_MLP, VISION_DIM, bias=False)
        yield from _linear(f"{prefix}.mlp.w2", VISION_DIM, VISION_MLP, bias=False)
    yield _norm("vision.norm.weight", VISION_DIM)
    yield from _linear("aligner.w1", HIDDEN, VISION_DIM * DOWNSAMPLE**2)
    yield from _linear("aligner.w2", HIDDEN, HIDDEN, gain=5.0)


def _linear(
    name: str, rows: int, columns: int, gain: float = 1.0, bias: bool = True
) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (rows, columns), "bf16", gain / math.sqrt(columns))
    if bias:
        yield Tensor(f"{name}.bias", (rows,), "bf16", 0.1)


_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "image_token_id": IMAGE_TOKEN,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [BLOCK, BLOCK],
        "expert_dtype": "fp4",
    },
    "text_config": {
        "model_type": "deepseek_v41_text",
        "vocab_size": WORDS,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": MOE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "qk_rope_head_dim": 64,
        "q_lora_rank": Q_LORA,
        "o_lora_rank": O_LORA,
        "o_groups": GROUPS,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "max_position_embeddings": 65536,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 4096,
        },
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 128,
        "compress_ratios": [0, 0, 2, 2, 1, 1],
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": list(KV_SOURCES),
        "index_source_layer_ids": list(INDEX_SOURCES),
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": 512,
        "candidate_source_layer_id": 4,
        # 128 blocks of 8 are 1024 positions: they bind in prompts longer than that.
        "candidate_topk_blocks": 128,
        "candidate_block_size": 8,
        "hc_mult": STREAMS,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": ENGRAM_WORDS,
        "engram_n_heads": 8,
        "engram_head_dim": ENGRAM_DIM,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": COMPRESSED_WORDS,
        "num_nextn_predict_layers": 0,
        "dspark_block_size": 5,
        "dspark_noise_token_id": WORDS - 1,
        "dspark_target_layer_ids": [],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": DRAFT_EXPERTS,
        "dspark_num_experts_per_tok": 3,
    },
    "vision_config": {
        "num_hidden_layers": VISION_LAYERS,
        "hidden_size": VISION_DIM,
        "num_attention_heads": 4,
        "intermediate_size": VISION_MLP,
        "patch_size": PATCH,
        "downsample_ratio": DOWNSAMPLE,
        "max_image_tokens": 256,
        "min_pixels": 64 * 64,
    },
}
