# SPDX-License-Identifier: Apache-2.0
"""The self-test's device rows: the calls that the rules allow, made on the GPU.

Each row's shape is run with random records at the planned strides: FlashInfer's DSv4
entry point or the fork's sparse MLA, as the row's route says, and DeepGEMM's paged MQA
logits, against the float64 reference, in a child process. Never run on SM12x so far:
the adapters to the two libraries are *source read*, the rest ran on a CPU with stand-in
kernels.
"""

from collections.abc import Callable
from typing import Any

from vllm.models.deepseek_v41.nvidia.sm120_child_process import DeviceCall, in_child
from vllm.models.deepseek_v41.nvidia.sm120_device_cases import (
    AttentionShape,
    IndexerShape,
)
from vllm.models.deepseek_v41.nvidia.sm120_device_kernels import (
    deep_gemm_kernel,
    flashinfer_kernel,
    fork_kernel,
)
from vllm.models.deepseek_v41.nvidia.sm120_selftest_report import (
    Fact,
    Refusal,
    Report,
    Row,
)

# With fewer tokens than kinds of rows each kind gets a call of its own.
_FEW_TOKENS = 8
_ONE_BY_ONE = ("full", "holes", "short")

# The gate that a wrong or failing call ends in.
_GATES = {"attention": "backend", "indexer": "indexer_page"}


def run(
    report: Report,
    plan: Any,
    device: str = "cuda",
    attention: Callable = flashinfer_kernel,
    indexer: Callable = deep_gemm_kernel,
    calls: Callable = in_child,
    fork: Callable = fork_kernel,
) -> None:
    """Makes every row's calls and writes what came of them into the row.

    Args:
        report: its rows that are ok so far are run.
        plan: what vLLM plans (strides).
        device: torch device.
        attention, indexer: make the kernels, in the child.
        calls: runs a list of DeviceCall and returns their results.
        fork: makes the kernel of attention rows whose route is ``fork``.
    """
    waiting: list[tuple[Row, DeviceCall]] = []
    for row in report.rows:
        if not row.ok:
            continue
        kernel = {"fork": fork, "flashinfer": attention}.get(row.route, indexer)
        for shape in _shapes(row, plan):
            waiting.append((row, DeviceCall(shape, kernel, device=device)))
    results = calls([call for _, call in waiting])
    for (row, _), result in zip(waiting, results, strict=True):
        if result.bound is not None:
            bound = Fact(result.bound.value, result.bound.source)
            of = "fork_attention" if row.route == "fork" else row.call
            report.facts[f"{of}_bound"] = bound
        norms = [n for n in (row.error_norm, result.error_norm) if n is not None]
        row.error_norm = max(norms) if norms else None
        if result.ok or not row.ok:
            continue
        row.ok, row.gate = False, _GATES[row.call]
        row.reason = f"{result.call}: {result.reason}"
        report.refusals.append(Refusal(row.gate, f"{device}: {row.reason}"))


def _shapes(row: Row, plan: Any) -> list[AttentionShape | IndexerShape]:
    layer = f"model.layers.{row.layers[0]}.attn"
    if row.call == "indexer":
        stride = _stride(plan, f"{layer}.indexer.k_cache")
        return [IndexerShape(row.tokens, row.heads, row.page, stride=stride)]
    extra_stride = 0
    if row.extra_topk:
        source = plan.layers[layer].compressed_cache_prefix
        extra_stride = _stride(plan, source)
    common = {
        "tokens": row.tokens,
        "heads": row.heads,
        "width": row.topk,
        "page": row.page,
        "extra_width": row.extra_topk,
        "extra_page": row.extra_page,
        "stride": _stride(plan, f"{layer}.swa_cache"),
        "extra_stride": extra_stride,
    }
    if row.tokens >= _FEW_TOKENS:
        return [AttentionShape(**common)]
    return [AttentionShape(**common, rows=(kind,)) for kind in _ONE_BY_ONE]


def _stride(plan: Any, name: str) -> int:
    """Bytes from one page of a cache to the next, as it was allocated."""
    view = plan.views[name]
    return int(view.stride(0) * view.element_size())
