# SPDX-License-Identifier: Apache-2.0
"""The self-test's rules: every shape that serving will ask for, against what is taken.

Shapes come from vLLM's own layers, metadata builders and allocated caches
(sm120_kv_plan.py), limits from the libraries (sm120_kernel_limits.py).
"""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import vllm
import vllm.envs as envs
from vllm.models.deepseek_v41.nvidia.sm120_kernel_limits import (
    AttentionShape,
    FlashInferLimits,
    PageRule,
    deep_gemm_pages,
)
from vllm.models.deepseek_v41.nvidia.sm120_kv_plan import KVPlan
from vllm.models.deepseek_v41.nvidia.sm120_selftest_report import (
    Fact,
    Refusal,
    Report,
    Row,
)

_GATES = {
    "heads": "heads",
    "width": "swa_width",
    "page": "swa_page",
    "extra_page": "compressed_page",
}

_REMEDIES = {
    "heads": "use another --tensor-parallel-size",
    "swa_width": (
        "serve text only (--language-model-only; on vLLM 0.30 also "
        "--hf-overrides.vision_max_n_token 0), or use a newer base"
    ),
    "swa_page": "apply the fork's patch sm120_swa_page_block_size",
    "compressed_page": "apply the fork's patch sm120_compressed_page_states",
    "indexer_page": "apply the fork's patch sm120_compressed_page_states",
}

# vLLM's table has it where sm120_sparse_mla is applied.
_ROUTE_VARIABLE = "VLLM_SM120_SPARSE_MLA"

# FlashInfer's ceiling of a decode call in every release served, where it is not asked.
_DECODE_TOKENS = 64


class _Routed:
    """FlashInfer's rules, and who serves a shape.

    Args:
        mode: of ``VLLM_SM120_SPARSE_MLA``; None where this vLLM has FlashInfer alone.
        limits: FlashInfer's rules; None where they are not asked.
    """

    def __init__(self, mode: str | None, limits: FlashInferLimits | None) -> None:
        self.limits = limits
        self._routes = None
        if mode is not None:
            # The module that serving asks, too.
            from vllm.models.deepseek_v41.nvidia.sm120_sparse_mla_route import Routes

            self._routes = Routes(mode, limits)

    def of(self, shape: AttentionShape) -> tuple[str, Sequence[str], str | None]:
        """The route's name, what it refuses of a shape, and why not FlashInfer."""
        if self._routes is None:
            return "flashinfer", self.limits.refused(shape), None
        route = self._routes.of(shape)
        return route.name, route.refused, route.reason if route.name == "fork" else None


def token_counts(config: Any, decode_tokens: int) -> list[int]:
    """Token counts to try: 1, 8, the decode ceiling and one more, the CUDA graph sizes
    up to it, and the largest prefill chunk."""
    sizes = config.compilation_config.cudagraph_capture_sizes or []
    chunk = int(config.scheduler_config.max_num_batched_tokens)
    counts = {1, 8, decode_tokens, decode_tokens + 1, chunk}
    return sorted(counts | {int(n) for n in sizes if n <= decode_tokens})


def run(
    report: Report,
    plan: KVPlan,
    ranks: int,
    tokens: Sequence[int] | None,
    calls: Iterable[str],
) -> None:
    """Adds facts, rows and refusals to the report.

    Args:
        report: where they go.
        plan: what vLLM plans.
        ranks: tensor-parallel ranks.
        tokens: token counts, or None for ``token_counts``.
        calls: of ``sm120_selftest_report.CALLS``.
    """
    mode = getattr(envs, _ROUTE_VARIABLE, None)
    limits = None if mode == "fork" else FlashInferLimits()
    decode_tokens = _DECODE_TOKENS if limits is None else limits.decode_tokens
    tokens = tokens or token_counts(plan.config, decode_tokens)
    facts = report.facts
    facts["tokens"] = Fact(list(tokens), "options, or config and FlashInfer's ceiling")
    if limits is not None:
        facts["flashinfer"] = Fact(limits.library, "flashinfer.__version__")
        facts["decode_tokens"] = Fact(limits.decode_tokens, limits.source)
    facts["sparse_mla"] = Fact(mode or "flashinfer", _ROUTE_VARIABLE)
    if "attention" in calls:
        _attention(report, plan, _Routed(mode, limits), ranks, tokens)
    if "indexer" in calls:
        _indexer(report, plan, tokens)


def _layer(plan: KVPlan, layer: int) -> Any:
    return plan.layers[f"model.layers.{layer}.attn"]


def _states(plan: KVPlan, name: str) -> int:
    """States in a page, from the cache as it was allocated."""
    return int(plan.views[name].shape[-2])


def _kinds(plan: KVPlan) -> dict[str, list[int]]:
    """Layers by what their attention reads: the window alone, or more."""
    backbone = plan.config.model_config.hf_config.num_hidden_layers
    kinds: dict[str, list[int]] = {}
    for name in plan.layers:
        if not (found := re.fullmatch(r"model\.layers\.(\d+)\.attn", name)):
            continue
        layer = int(found.group(1))
        ratio = _layer(plan, layer).compress_ratio
        kind = f"ratio {ratio}" if ratio else "window only"
        kinds.setdefault(kind if layer < backbone else "DSpark draft", []).append(layer)
    return kinds


def _attention(
    report: Report,
    plan: KVPlan,
    routed: _Routed,
    ranks: int,
    tokens: Sequence[int],
) -> None:
    hf_config = plan.config.model_config.hf_config
    local = hf_config.num_attention_heads // ranks
    attn_cls = type(_layer(plan, 0))
    try:
        heads = attn_cls.get_padded_num_q_heads(local)
    except ValueError as error:
        report.refusals.append(
            Refusal("heads", f"{local} heads a rank: {error} {_REMEDIES['heads']}")
        )
        return
    builder = plan.builder("model.layers.0.attn.swa_cache")
    source = f"{type(builder).__name__}"
    facts = report.facts
    facts["heads"] = Fact(heads, f"{attn_cls.__name__}.get_padded_num_q_heads({local})")
    facts["window"] = Fact(builder.window_size, f"{source}.window_size")
    width = int(builder.prefill_index_width)
    facts["prefill_width"] = Fact(width, f"{source}.prefill_index_width")
    facts["index_topk"] = Fact(int(hf_config.index_topk), "hf_config.index_topk")
    for kind, layers in _kinds(plan).items():
        widths = [int(builder.window_size), width]
        if kind == "DSpark draft":
            widths = [int(builder.noncausal_index_width)]
            facts["draft_width"] = Fact(widths[0], f"{source}.noncausal_index_width")
        extra = _extra(plan, layers[0])
        page = _states(plan, f"model.layers.{layers[0]}.attn.swa_cache")
        for count in tokens:
            for topk in dict.fromkeys(widths):
                shape = AttentionShape(count, heads, topk, page, *extra)
                _add(report, routed, kind, layers, shape)


def _extra(plan: KVPlan, layer: int) -> tuple[int, int]:
    """Width and page of the compressed segment that a layer reads."""
    attention = _layer(plan, layer)
    if not attention.compress_ratio:
        return 0, 0
    topk = int(plan.config.model_config.hf_config.index_topk)
    return topk, _states(plan, attention.compressed_cache_prefix)


def _add(
    report: Report,
    routed: _Routed,
    kind: str,
    layers: list[int],
    shape: AttentionShape,
) -> None:
    route, refused, why = routed.of(shape)
    row = Row(
        layer_kind=kind,
        layers=layers,
        call="attention",
        tokens=shape.tokens,
        heads=shape.heads,
        topk=shape.width,
        page=shape.page,
        extra_topk=shape.extra_width,
        extra_page=shape.extra_page,
        states=shape.extra_page if shape.extra_width else shape.page,
        route=route,
        reason=why,
    )
    report.rows.append(row)
    if not refused:
        return
    library, which, source = "the fork's sparse MLA", "", "128 heads at most"
    if route == "flashinfer":
        limits = routed.limits
        library, source = limits.library, limits.source
        which = limits.route(shape).split()[1] + " "
    row.ok, row.gate = False, _GATES[refused[0]]
    reasons = []
    for name in refused:
        gate, value = _GATES[name], getattr(shape, name)
        reasons.append(f"{name.replace('_', ' ')} {value}")
        if gate not in {refusal.gate for refusal in report.refusals}:
            report.refusals.append(
                Refusal(
                    gate,
                    f"{_shown(layers)} ({kind}), {shape.tokens} tokens: "
                    f"{library} has no {which}kernel for "
                    f"{reasons[-1]} ({source}); {_REMEDIES[gate]}",
                )
            )
    row.reason = f"{library} has no kernel for {', '.join(reasons)}"


def _indexer(report: Report, plan: KVPlan, tokens: Sequence[int]) -> None:
    rule, assumed = deep_gemm_rule()
    report.facts["deep_gemm_pages"] = Fact(
        None if rule.pages is None else sorted(rule.pages), str(rule), assumed
    )
    heads = int(plan.config.model_config.hf_config.index_n_heads)
    ratios: dict[int, list[int]] = {}
    for name in plan.specs:
        if name.endswith(".indexer.k_cache"):
            layer = int(name.split(".")[2])
            ratios.setdefault(_layer(plan, layer).compress_ratio, []).append(layer)
    for ratio, layers in sorted(ratios.items(), reverse=True):
        states = _states(plan, f"model.layers.{layers[0]}.attn.indexer.k_cache")
        refused = rule.refuses(states)
        for count in tokens:
            report.rows.append(
                Row(
                    layer_kind=f"ratio {ratio}",
                    layers=layers,
                    call="indexer",
                    tokens=count,
                    heads=heads,
                    topk=0,
                    page=states,
                    extra_topk=0,
                    extra_page=0,
                    states=states,
                    route="DeepGEMM paged MQA logits",
                    ok=refused is None,
                    gate="indexer_page" if refused else None,
                    reason=refused,
                )
            )
        if refused:
            report.refusals.append(
                Refusal(
                    "indexer_page",
                    f"{_shown(layers)} (ratio {ratio}): found {states} states in an "
                    f"indexer page; {refused}; {_REMEDIES['indexer_page']}",
                )
            )


def deep_gemm_rule() -> tuple[PageRule, str | None]:
    """Pages of the FP8 indexer cache that the vendored DeepGEMM takes on SM120, and why
    that is assumed where its binary cannot be read."""
    folder = Path(vllm.__file__).parent / "third_party" / "deep_gemm"
    init = folder / "__init__.py"
    text = init.read_text(encoding="utf-8") if init.is_file() else ""
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    library = f"DeepGEMM {version.group(1) if version else '(version unknown)'}"
    for binary in sorted(folder.glob("_C*.so")):
        if rule := deep_gemm_pages(binary.read_bytes(), library):
            return rule, None
    # 64 is what every release served takes: facts measured on 0.30 to 0.33.
    why = f"no DeepGEMM extension with an assert on block_kv in {folder.name}/"
    return PageRule(library, frozenset({64}), "assumed"), why


def parallel_layout(report: Report, config: Any) -> None:
    """Stage boundaries of pipeline parallelism against the sharing spans.

    A layer reads the compressed cache of the latest KV source below it, and the indices
    of the latest index source: a stage that starts between a source and its readers has
    neither.
    """
    from vllm.distributed.utils import get_pp_indices

    stages = int(config.parallel_config.pipeline_parallel_size)
    hf_config = config.model_config.hf_config
    layers = int(hf_config.num_hidden_layers)
    partition = os.environ.get("VLLM_PP_LAYER_PARTITION")
    starts = [get_pp_indices(layers, rank, stages)[0] for rank in range(stages)]
    source = "vllm.distributed.utils.get_pp_indices"
    report.facts["stages"] = Fact(starts, f"{source}, partition {partition}")
    spans = {
        "KV": list(hf_config.kv_source_layer_ids),
        "index": list(hf_config.index_source_layer_ids),
    }
    for start in starts[1:]:
        for what, sources in spans.items():
            if start >= layers or not hf_config.compress_ratios[start]:
                continue
            source_layer = max(s for s in sources if s <= start)
            if source_layer == start:
                continue
            legal = sorted(set(spans["KV"]) & set(spans["index"]))
            report.refusals.append(
                Refusal(
                    "parallel_layout",
                    f"a pipeline stage starts at layer {start}, which reads the {what} "
                    f"source of layer {source_layer} on the stage before; start stages "
                    f"at {', '.join(map(str, legal))} (VLLM_PP_LAYER_PARTITION)",
                )
            )
            break


def _shown(layers: Sequence[int]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if len(layers) <= 4:
        return f"layers {', '.join(map(str, layers))}"
    return f"layers {layers[0]}, {layers[1]}, … {layers[-1]} ({len(layers)})"
