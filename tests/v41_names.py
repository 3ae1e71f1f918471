# SPDX-License-Identifier: Apache-2.0
"""Tensor names of a DeepSeek-V4.1 checkpoint, written by hand from vLLM's loader (level of
evidence: source read; the real index was not to be had)."""


def checkpoint_names(hf_config, vision_layers: int = 32) -> set[str]:
    """Names of a V4.1 checkpoint, as DeepSeek spells them, for a config's layers.

    Stacked parameters are separate here (wq_a and wkv, w1 and w3, wkv and wgate), scales
    end in ``.scale``, the draft is ``mtp.*``.
    """
    c = hf_config

    def quantized(*names):
        return [f"{name}.{kind}" for name in names for kind in ("weight", "scale")]

    def block(prefix: str, experts: int) -> list[str]:
        hc = [f"hc_{part}_{kind}" for part in ("attn", "ffn") for kind in ("fn", "base", "scale")]
        names = ["attn_norm.weight", "ffn_norm.weight", *hc]
        names += ["attn.attn_sink", "attn.q_norm.weight", "attn.kv_norm.weight"]
        names += quantized(*(f"attn.{name}" for name in ("wq_a", "wkv", "wq_b", "wo_a", "wo_b")))
        names += ["ffn.gate.weight", "ffn.gate.bias", "ffn.gate.bias_vl"]
        names += quantized(*(f"ffn.shared_experts.w{i}" for i in (1, 2, 3)))
        names += quantized(*(f"ffn.experts.{e}.w{i}" for e in range(experts) for i in (1, 2, 3)))
        return [f"{prefix}.{name}" for name in names]

    names = ["embed.weight", "norm.weight", "head.weight"]
    for layer in range(c.num_hidden_layers):
        prefix = f"layers.{layer}"
        names += block(prefix, c.n_routed_experts)
        if layer in c.kv_source_layer_ids:
            # Ratio 1 pools single tokens and has no gate.
            pooled = ("wkv", "wgate", "norm") if c.compress_ratios[layer] > 1 else ("wkv", "norm")
            names += [f"{prefix}.attn.compressor.{n}.weight" for n in pooled]
            names += [f"{prefix}.attn.indexer.{n}.weight" for n in ("wk", "k_norm")]
        if layer in c.index_source_layer_ids:
            names += quantized(f"{prefix}.attn.indexer.wq_b")
            names.append(f"{prefix}.attn.indexer.weights_proj.weight")
        if layer in c.engram_layer_ids:
            names += quantized(f"{prefix}.engram.embed", f"{prefix}.engram.wkv")
            names += [f"{prefix}.engram.q_weight", f"{prefix}.engram.k_weight"]

    drafts = c.num_nextn_predict_layers
    for stage in range(drafts):
        names += block(f"mtp.{stage}", c.dspark_n_routed_experts)
    names += [*quantized("mtp.0.main_proj"), "mtp.0.main_norm.weight"]
    last = f"mtp.{drafts - 1}"
    names += [f"{last}.norm.weight", f"{last}.confidence_head.proj.weight"]
    names += [f"{last}.markov_head.{n}.weight" for n in ("embed", "head")]

    names += ["image_start", "image_end", "image_newline", "vision.norm.weight"]
    names += [f"vision.patch_embed.proj.{n}" for n in ("weight", "bias")]
    names += [f"aligner.w{i}.{n}" for i in (1, 2) for n in ("weight", "bias")]
    for layer in range(vision_layers):
        prefix = f"vision.blocks.{layer}"
        names += [f"{prefix}.attn.{n}.{k}" for n in ("wqkv", "wo") for k in ("weight", "bias")]
        names += [f"{prefix}.{n}.weight" for n in ("norm1", "norm2", "mlp.w1", "mlp.w2")]
    return set(names)
