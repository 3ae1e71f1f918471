# SPDX-License-Identifier: Apache-2.0
"""Which implementation vLLM selects for each op of a start and a step.

The installed tree is asked, there is no table here: layers of the rank's model say
which kernel they took when they were built (sm120_rank_model.py), functions that choose
at every call are called with tensors that hold nothing. An op whose choice cannot be
asked for says ``assumed`` and why. What refuses is gate ``ops``, what falls to an
emulation is a warning with its cost.
"""

import contextlib
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from vllm import envs
from vllm.models.deepseek_v41.nvidia.sm120_kv_plan import call
from vllm.models.deepseek_v41.nvidia.sm120_rank_model import (
    RankModel,
    asking,
    deep_gemm_assumed,
)
from vllm.models.deepseek_v41.nvidia.sm120_selftest_report import Refusal, Report, Row
from vllm.platforms import current_platform

# Ops that have one implementation, which every SM12x start takes: the module that calls
# it, and the name by which it does. Looked for in the installed source.
_V41 = "vllm.models.deepseek_v41"
_WITHOUT_CHOICE = {
    "kv_insert": (
        f"{_V41}.attention",
        "_C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
    ),
    "compressor_insert": (
        f"{_V41}.common.ops.fused_compress_quant_cache",
        "triton.jit",
    ),
    "indexer_store": (f"{_V41}.common.ops.indexer_k_store", "triton.jit"),
    "prefill_gather": (
        "vllm.model_executor.layers.sparse_attn_indexer",
        "cp_gather_indexer_k_quant_cache",
    ),
    "prefill_logits": (
        "vllm.model_executor.layers.sparse_attn_indexer",
        "fp8_fp4_mqa_logits",
    ),
    "prefill_topk": (
        "vllm.model_executor.layers.sparse_attn_indexer",
        "top_k_per_row_prefill",
    ),
    "decode_logits": (
        "vllm.model_executor.layers.sparse_attn_indexer",
        "fp8_fp4_paged_mqa_logits",
    ),
    "sparse_attention": (
        f"{_V41}.nvidia.flashinfer_sparse",
        "trtllm_batch_decode_sparse_mla_dsv4",
    ),
    "engram_hash": (f"{_V41}.common.engram", "_hash_ids_kernel"),
    "engram_lookup": (f"{_V41}.common.engram", "_engram_lookup_kernel"),
    "router_warmup": (
        "vllm.model_executor.warmup.kernel_warmup",
        "_warmup_ll_bf16_router_gemm",
    ),
}

# Query tokens that take different kernels: ops.md's shapes around the fused mHC's 32.
_MHC_TOKENS = (4, 32, 33)

# Rows of a decode step: one request, and more than a cooperative top-k takes (64).
_TOPK_ROWS = (1, 65)


@dataclass(frozen=True)
class Choice:
    """What is selected for one op.

    Attributes:
        op: its name, the row's ``call``.
        route: the implementation.
        kind: which layers, in words.
        layers: which layers, by number; empty for the whole model.
        tokens: query tokens, where the choice depends on them.
        refused: why nothing can run it.
        cost: what it costs, for an emulation.
        assumed: why vLLM could not be asked.
    """

    op: str
    route: str
    kind: str = "all"
    layers: tuple[int, ...] = ()
    tokens: int = 0
    refused: str | None = None
    cost: str | None = None
    assumed: str | None = None


class _Chosen(Exception):
    """A stand-in kernel was called: the name that it stands for."""


def choices(ranks: list[RankModel], capability: tuple[int, int] | None) -> list[Choice]:
    """Every op's implementation. To be called ``as_target`` of the capability.

    Args:
        ranks: the models, one a pipeline stage.
        capability: a hypothetical target, or None on the real one.
    """
    found: dict[tuple, Choice] = {}
    with contextlib.suppress(ImportError):
        # Before a GPU stands in, which FlashInfer would ask while it is imported.
        importlib.import_module("flashinfer")
    for rank in ranks:
        with asking(rank, capability):
            for op, ask in _ASKED.items():
                try:
                    answers = list(ask(rank, capability))
                except Exception as error:
                    said = " ".join(str(error).split())[:160]
                    why = f"cannot be asked here: {type(error).__name__}: {said}"
                    answers = [Choice(op, "unknown", assumed=why)]
                for one in answers:
                    key = (one.op, one.route, one.kind, one.tokens)
                    if key in found:
                        layers = {*found[key].layers, *one.layers}
                        one = Choice(**{**vars(one), "layers": tuple(sorted(layers))})
                    found[key] = one
    for rank in ranks:
        for why in rank.refused:
            refusal = Choice("kernels", "none", refused=why)
            found[("refused", why)] = refusal
    for op, (module, name) in _WITHOUT_CHOICE.items():
        found[(op,)] = _without_choice(op, module, name)
    return list(found.values())


def add(report: Report, found: list[Choice]) -> None:
    """Rows, refusals and the warning about emulations."""
    costs = []
    for one in found:
        why = one.refused or (f"assumed: {one.assumed}" if one.assumed else one.cost)
        report.selection.append(
            Row(
                layer_kind=one.kind,
                layers=list(one.layers),
                call=one.op,
                tokens=one.tokens,
                heads=0,
                topk=0,
                page=0,
                extra_topk=0,
                extra_page=0,
                states=0,
                route=one.route,
                ok=one.refused is None,
                gate="ops" if one.refused else None,
                reason=why,
                selection=True,
            )
        )
        if one.refused:
            report.refusals.append(Refusal("ops", f"{one.op}: {one.refused}"))
        if one.cost:
            costs.append(f"{one.op} ({one.kind}): {one.cost}")
    if costs:
        report.warnings["emulation"] = "; ".join(costs)


# --- What layers say ---------------------------------------------------------------


def _attention(rank: RankModel, _: Any) -> Iterator[Choice]:
    for layer, attention in _attentions(rank):
        kind = _kind(rank, layer)
        name = type(attention).__name__
        backend = attention.get_attn_backend().get_name()
        yield Choice("attention_class", f"{name} ({backend})", kind, (layer,))
        record = f"{attention.kv_cache_dtype}, {_record_bytes(attention)} B"
        yield Choice("kv_record", record, kind, (layer,))
        fused = attention._can_fuse_query_quant
        norm = "fused_q_kv_rmsnorm_quant" if fused else "fused_q_kv_rmsnorm"
        yield Choice("q_kv_norm", norm, kind, (layer,))
        if (compressor := attention.compressor) is not None:
            yield Choice("compressor", type(compressor).__name__, kind, (layer,))


def _record_bytes(attention: nn.Module) -> Any:
    for name in ("swa_bytes_per_token", "kv_bytes_per_token"):
        if hasattr(attention, name):
            return getattr(attention, name)
    return "?"


def _indexer(rank: RankModel, _: Any) -> Iterator[Choice]:
    assumed = deep_gemm_assumed()
    for layer, attention in _attentions(rank):
        if (indexer := attention.indexer) is None:
            continue
        cache = "MXFP4" if indexer.use_fp4_kv else "FP8"
        route = f"{type(indexer.indexer_op).__name__}, DeepGEMM, {cache} cache"
        kind = _kind(rank, layer)
        yield Choice("indexer_op", route, kind, (layer,), assumed=assumed)


def _linears(rank: RankModel, _: Any) -> Iterator[Choice]:
    for name, module in rank.modules():
        method = getattr(module, "quant_method", None)
        kernel = getattr(method, "kernel", None)
        weight = getattr(module, "weight", None)
        if kernel is None or isinstance(kernel, mock.MagicMock) or weight is None:
            continue
        if getattr(module, "is_bmm", False):
            yield from _grouped_linear(rank, name, module)
            continue
        yield _linear(rank, name, module, type(kernel).__name__)


def _grouped_linear(rank: RankModel, name: str, module: nn.Module) -> Iterator[Choice]:
    """As its quantization method chooses once more when the weights are loaded."""
    from vllm.model_executor.layers.quantization import modelopt

    try:
        kernel = call(
            modelopt.init_mxfp8_linear_kernel,
            weight_shape=tuple(module.weight.shape),
            bmm_batch_size=module.bmm_batch_size,
        )
    except (ValueError, NotImplementedError) as error:
        said = " ".join(str(error).split())
        advice = ""
        if rank.config.kernel_config.linear_backend != "auto":
            chosen = rank.config.kernel_config.linear_backend
            advice = f" Leave --linear-backend {chosen} out"
        found = _linear(rank, name, module, "none")
        yield Choice(**{**vars(found), "refused": said + advice})
        return
    yield _linear(rank, name, module, type(kernel).__name__)


def _linear(rank: RankModel, name: str, module: nn.Module, kernel: str) -> Choice:
    layer = _layer_of(rank, name)
    op = re.sub(r".*layers\.\d+\.|^draft\.(model\.)?", "", name)
    rows, columns = module.weight.shape[-2:]
    cost = refused = None
    if kernel.startswith("Emulation"):
        size = rows * columns / 2**20
        cost = (
            f"{kernel} dequantises {rows}x{columns} to BF16 once, when it is loaded: "
            f"{size:.0f} MiB more a layer, and no FP8 speed"
        )
        if not envs.VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD:
            cost = None
            if getattr(module, "is_bmm", False):
                refused = (
                    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD=0 keeps the weight in FP8 "
                    "with two dimensions, and the output projection then hands it to "
                    "DeepGEMM's fp8_einsum, which takes three; unset it"
                )
            else:
                cost = f"{kernel} dequantises {rows}x{columns} in every step"
    return Choice(
        f"linear {op}",
        f"{kernel} {rows}x{columns}",
        _kind(rank, layer),
        () if layer is None else (layer,),
        refused=refused,
        cost=cost,
    )


def _experts(rank: RankModel, _: Any) -> Iterator[Choice]:
    for name, module in rank.modules():
        method = getattr(module, "quant_method", None)
        backend = getattr(method, "mxfp4_backend", None)
        backend = backend or getattr(method, "fp8_backend", None)
        if backend is None or "experts" not in name:
            continue
        layer = _layer_of(rank, name)
        chosen = getattr(method, "experts_cls", None)
        route = f"{getattr(backend, 'name', backend)}"
        route += f" ({chosen.__name__})" if chosen is not None else ""
        cost = refused = None
        if "EMULATION" in route:
            cost = f"{route} dequantises the experts in every step, many times slower"
        if "DEEPGEMM" in route and not envs.VLLM_USE_DEEP_GEMM_E8M0:
            refused = (
                "VLLM_USE_DEEP_GEMM_E8M0=0 makes FP32 scales, and DeepGEMM's SM120 "
                "experts assert packed E8M0 ones while weights are loaded (not "
                "disable_ue8m0_cast); unset it, or use --moe-backend marlin"
            )
        layers = () if layer is None else (layer,)
        kind = _kind(rank, layer)
        yield Choice("experts", route, kind, layers, refused=refused, cost=cost)


def _router(rank: RankModel, _: Any) -> Iterator[Choice]:
    for name, module in rank.modules():
        if type(module).__name__ != "GateLinear":
            continue
        layer = _layer_of(rank, name)
        tiers = [
            tier.removeprefix("allow_")
            for tier, allowed in sorted(vars(module).items())
            if tier.startswith("allow_") and allowed is True
        ]
        route = ", ".join(tiers) or "torch linear"
        layers = () if layer is None else (layer,)
        yield Choice("router", route, _kind(rank, layer), layers)


def _engram(rank: RankModel, _: Any) -> Iterator[Choice]:
    for name, module in rank.modules():
        if not hasattr(module, "cpu_offload") or "engram" not in name:
            continue
        layer = _layer_of(rank, name)
        where = "pinned host memory" if module.cpu_offload else "GPU memory"
        route = f"{type(module).__name__}, {where}"
        if getattr(module, "peer_rows", 0):
            route += ", peer reads"
        layers = () if layer is None else (layer,)
        yield Choice("engram_table", route, _kind(rank, layer), layers)


def _vision(rank: RankModel, capability: tuple[int, int] | None) -> Iterator[Choice]:
    for name, module in rank.modules():
        backend = getattr(module, "attn_backend", None)
        if not backend or "vision" not in name:
            continue
        first = current_platform.get_supported_vit_attn_backends()[0]
        if capability is None or backend == first:
            yield Choice("vision_attention", backend.name)
            return
        why = (
            f"vLLM's first choice cannot be imported without a driver; {backend.name} "
            "is what it takes then"
        )
        yield Choice("vision_attention", first.name, assumed=why)
        return


# --- What functions say at a call --------------------------------------------------


def _quantizer(rank: RankModel, _: Any) -> Iterator[Choice]:
    from vllm.model_executor.layers.quantization.utils import mxfp8_utils

    flashinfer = importlib.import_module("flashinfer")
    x = torch.empty(2, 64, dtype=torch.bfloat16, device="meta")

    def native(*_: Any, **__: Any) -> None:
        raise _Chosen("torch, several kernels")

    def library(*_: Any, **given: Any) -> None:
        raise _Chosen(f"FlashInfer mxfp8_quantize, {given.get('backend', 'default')}")

    with (
        mock.patch.object(flashinfer, "mxfp8_quantize", library),
        mock.patch.object(mxfp8_utils, "_mxfp8_e4m3_quantize_torch", native),
    ):
        try:
            mxfp8_utils._mxfp8_e4m3_quantize_impl(x, True)
        except _Chosen as chosen:
            yield Choice("mxfp8_quantize", str(chosen))


def _topk(rank: RankModel, _: Any) -> Iterator[Choice]:
    from vllm.model_executor.layers.indexer_topk import SparseIndexerTopk

    config = rank.config
    topk = SparseIndexerTopk()
    width = int(config.model_config.hf_config.index_topk)
    for rows in _TOPK_ROWS:
        logits = torch.empty(rows, config.model_config.max_model_len, device="meta")
        try:
            route = topk.resolve_backend(logits, width, rows)
        except RuntimeError as error:
            yield Choice("decode_topk", "none", tokens=rows, refused=str(error))
            continue
        yield Choice("decode_topk", f"{route}_topk", tokens=rows)


def _candidates(rank: RankModel, _: Any) -> Iterator[Choice]:
    from vllm.model_executor.kernels.attention.dsa import candidate_blocks

    asked = getattr(candidate_blocks, "has_deep_select", None)
    if asked is None:
        asked = lambda: "deep_select" in inspect.getsource(candidate_blocks)  # noqa: E731
    yield Choice("candidate_blocks", "DeepSelect" if asked() else "Triton, torch.topk")


def _mhc(rank: RankModel, _: Any) -> Iterator[Choice]:
    from vllm.model_executor.kernels.mhc import tilelang
    from vllm.models.deepseek_v41.nvidia import model

    hf_config = rank.config.model_config.hf_config
    streams, hidden = int(hf_config.hc_mult), int(hf_config.hidden_size)
    mixes = streams * (streams + 2)
    eps = (1e-6, 1e-6, 1e-6, 2.0, int(hf_config.hc_sinkhorn_iters))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    for tokens in _MHC_TOKENS:
        residual = empty(tokens, streams, hidden, dtype=torch.bfloat16)
        weights = empty(mixes, streams * hidden), empty(3), empty(mixes)
        norm = {
            "pre_mix": empty(tokens, streams),
            "norm_weight": empty(hidden, dtype=torch.bfloat16),
            "norm_eps": 1e-6,
        }
        x = empty(tokens, hidden, dtype=torch.bfloat16)
        post = empty(tokens, streams, 1), empty(tokens, streams, streams)
        pre = tilelang.mhc_pre_delayed_tilelang
        route = _first_kernel(partial(pre, residual, *weights, *eps, **norm))
        yield Choice("mhc_pre", route, tokens=tokens)
        shifted = partial(model.mhc_shifted_post_pre, x, residual, *post)
        route = _first_kernel(partial(shifted, *weights, *eps, **norm))
        yield Choice("mhc_post_pre", route, tokens=tokens)


def _first_kernel(called: Callable) -> str:
    """Names of the hyper-connection kernels that a call makes, up to the GEMM."""
    from vllm.model_executor.kernels.mhc import tilelang_kernels
    from vllm.utils import deep_gemm

    before: list[str] = []

    def post(*_: Any, **__: Any) -> None:
        before.append("TileLang post")

    def ends(name: str) -> Callable:
        def end(*given: Any, **__: Any) -> None:
            splits = given[-1] if name.startswith("DeepGEMM") else None
            raise _Chosen(f"{name}, {splits} splits" if splits else name)

        return end

    stand_ins = {
        (deep_gemm, "tf32_hc_prenorm_gemm"): ends("DeepGEMM tf32_hc_prenorm_gemm"),
        (deep_gemm, "mega_mhc"): ends("DeepGEMM mega_mhc"),
        (tilelang_kernels, "_HC_PRENORM_GEMM_TILELANG_KERNEL"): ends(
            "TileLang prenorm GEMM"
        ),
        (tilelang_kernels, "_MHC_FUSED_TILELANG_KERNEL"): ends("TileLang fused"),
        (tilelang_kernels, "_MHC_POST_TILELANG_KERNEL"): post,
    }
    with contextlib.ExitStack() as stack:
        for (module, name), stand_in in stand_ins.items():
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, stand_in))
        try:
            called()
        except _Chosen as chosen:
            return " + ".join([*before, str(chosen)])
    raise RuntimeError("none of the kernels it knows was called")


def _sampler(rank: RankModel, capability: tuple[int, int] | None) -> Iterator[Choice]:
    from vllm.v1.sample.ops import topk_topp_sampler as sampler

    with contextlib.ExitStack() as stack:
        toolchain = "_flashinfer_jit_unsupported_reason"
        if capability is not None and hasattr(sampler, toolchain):
            stack.enter_context(mock.patch.object(sampler, toolchain, lambda *_: None))
        try:
            supported = sampler.flashinfer_sampler_supported()
        except RuntimeError as error:
            yield Choice("sampler", "none", refused=str(error))
            return
    yield Choice("sampler", "FlashInfer top-k/top-p" if supported else "torch")


def _specialized(rank: RankModel, _: Any) -> Iterator[Choice]:
    extra = getattr(rank.config, "additional_config", None)
    asked = extra.get("decode_backend", "auto") if isinstance(extra, dict) else "auto"
    if asked == "auto":
        yield Choice("decode_backend", "stock")
        return
    from vllm.models.deepseek_v41.nvidia import specialized_decode

    missing = "; ".join(specialized_decode.unsupported(rank.config))
    refused = f"decode_backend {asked} needs {missing}" if missing else None
    yield Choice("decode_backend", asked, refused=refused)


def _all_reduce(
    rank: RankModel, capability: tuple[int, int] | None
) -> Iterator[Choice]:
    parallel = rank.config.parallel_config
    if parallel.tensor_parallel_size == 1:
        yield Choice("all_reduce", "none, one rank")
        return
    why = "decided between the ranks, by which GPUs reach each other"
    off = parallel.disable_custom_all_reduce or parallel.tensor_parallel_size > 2
    route = "NCCL" if off else "custom all-reduce or NCCL"
    yield Choice("all_reduce", route, assumed=why)


_ASKED: dict[str, Callable] = {
    "attention_class": _attention,
    "indexer_op": _indexer,
    "linear": _linears,
    "experts": _experts,
    "router": _router,
    "engram_table": _engram,
    "vision_attention": _vision,
    "mxfp8_quantize": _quantizer,
    "decode_topk": _topk,
    "candidate_blocks": _candidates,
    "mhc": _mhc,
    "sampler": _sampler,
    "decode_backend": _specialized,
    "all_reduce": _all_reduce,
}


def _without_choice(op: str, module: str, name: str) -> Choice:
    try:
        source = inspect.getsource(importlib.import_module(module))
    except (ImportError, OSError) as error:
        return Choice(op, "unknown", assumed=f"{module}: {type(error).__name__}")
    bare = name.rpartition(".")[2] if name.startswith("_C.") else name
    if bare not in source:
        return Choice(op, "unknown", assumed=f"{module} does not name {bare}")
    route = "Triton" if name == "triton.jit" else name
    return Choice(op, route, assumed=f"no choice to ask for; named in {module}")


def _attentions(rank: RankModel) -> Iterator[tuple[int, Any]]:
    for name, module in rank.modules():
        if hasattr(module, "padded_heads") and hasattr(module, "compress_ratio"):
            layer = _layer_of(rank, name)
            if layer is not None:
                yield layer, module


def _layer_of(rank: RankModel, name: str) -> int | None:
    """A module's layer; drafts follow the backbone."""
    if not (found := re.search(r"layers\.(\d+)\.", name + ".")):
        return None
    layer = int(found.group(1))
    backbone = int(rank.config.model_config.hf_config.num_hidden_layers)
    below = name.startswith("draft.") and layer < backbone
    return layer + backbone if below else layer


def _kind(rank: RankModel, layer: int | None) -> str:
    backbone = int(rank.config.model_config.hf_config.num_hidden_layers)
    if layer is None:
        return "all"
    return "DSpark draft" if layer >= backbone else "backbone"
