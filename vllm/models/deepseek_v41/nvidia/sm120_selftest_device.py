# SPDX-License-Identifier: Apache-2.0
"""The self-test's device rows: the calls that the rules allow, made on the GPU.

Each row's shape is run with random records at the planned strides: FlashInfer's DSv4
entry point or the fork's sparse MLA, as the row's route says, and DeepGEMM's paged MQA
logits, against the float64 reference, in a child process. Never run on SM12x so far:
the adapters to the two libraries are *source read*, the rest ran on a CPU with stand-in
kernels.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from vllm.models.deepseek_v41.nvidia.sm120_child_process import DeviceCall, in_child
from vllm.models.deepseek_v41.nvidia.sm120_device_calls import CallResult
from vllm.models.deepseek_v41.nvidia.sm120_device_cases import (
    AttentionShape,
    IndexerShape,
)
from vllm.models.deepseek_v41.nvidia.sm120_device_kernels import (
    deep_gemm_kernel,
    flashinfer_kernel,
    fork_kernel,
)
from vllm.models.deepseek_v41.nvidia.sm120_kernel_caches import (
    compared,
    count,
    folders,
)
from vllm.models.deepseek_v41.nvidia.sm120_op_call import Op, OpCall
from vllm.models.deepseek_v41.nvidia.sm120_op_plan import from_plan, plan_ops
from vllm.models.deepseek_v41.nvidia.sm120_selftest_report import (
    Fact,
    Refusal,
    Report,
    Row,
)

# With fewer tokens than kinds of rows each kind gets a call of its own.
_FEW_TOKENS = 8
_ONE_BY_ONE = ("full", "holes", "short")

# The gate that a wrong or failing call ends in; of ops it is ``ops``.
_GATES = {"attention": "backend", "indexer": "indexer_page"}


def run(
    report: Report,
    plan: Any,
    device: str = "cuda",
    attention: Callable = flashinfer_kernel,
    indexer: Callable = deep_gemm_kernel,
    calls: Callable = in_child,
    fork: Callable = fork_kernel,
    ops: Sequence[tuple[Row, Op]] = (),
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Makes every row's calls and writes what came of them into the row.

    Args:
        report: its rows that are ok so far are run.
        plan: what vLLM plans (strides).
        device: torch device.
        attention, indexer: make the kernels, in the child.
        calls: runs a list of calls and returns their results.
        fork: makes the kernel of attention rows whose route is ``fork``.
        ops: rows of ops (``op_rows``), called before the others.
        say: gets lines about progress.
    """
    before = count(folders())
    waiting: list[tuple[Row, DeviceCall | OpCall]] = [
        (row, OpCall(op, device=device)) for row, op in ops if row.ok
    ]
    for row in report.rows:
        if not row.ok or row.call not in _GATES:
            continue
        kernel = {"fork": fork, "flashinfer": attention}.get(row.route, indexer)
        for shape in _shapes(row, plan):
            waiting.append((row, DeviceCall(shape, kernel, device=device)))
    results = calls([call for _, call in waiting], say=say)
    _tell(report, results, before, say)
    for (row, _), result in zip(waiting, results, strict=True):
        if result.bound is not None:
            bound = Fact(result.bound.value, result.bound.source)
            of = "fork_attention" if row.route == "fork" else row.call
            report.facts[f"{of}_bound"] = bound
        norms = [n for n in (row.error_norm, result.error_norm) if n is not None]
        row.error_norm = max(norms) if norms else None
        if result.ok or not row.ok:
            continue
        row.ok, row.gate = False, _GATES.get(row.call, "ops")
        row.reason = f"{result.call}: {result.reason}"
        report.refusals.append(Refusal(row.gate, f"{device}: {row.reason}"))


def op_rows(
    report: Report, plan: Any, wanted: Collection[str] | None
) -> list[tuple[Row, Op]]:
    """Adds a row to the report for each op that the model calls, and returns them.

    Args:
        report: has the padded heads among its facts, if attention has any.
        plan: what vLLM plans.
        wanted: calls that were asked for; None: all.
    """
    heads = report.facts.get("heads")
    if heads is None:  # refused, and said so, or attention was not asked for
        local = plan.config.model_config.hf_config.num_attention_heads
        local //= int(plan.config.parallel_config.tensor_parallel_size)
        attn_cls = type(plan.layers["model.layers.0.attn"])
        try:
            padded = int(attn_cls.get_padded_num_q_heads(local))
        except ValueError:
            return []
    else:
        padded = int(heads.value)
    found = []
    for op in plan_ops(from_plan(plan, padded), wanted):
        row = Row(
            layer_kind="op",
            layers=[],
            call=op.name,
            tokens=op.tokens,
            heads=int(getattr(op, "heads", 0)),
            topk=int(getattr(op, "k", 0)) if op.name == "topk" else 0,
            page=int(getattr(op, "page", 0)),
            extra_topk=0,
            extra_page=0,
            states=int(getattr(op, "page", 0)),
            route=f"{op.entry}: {op}",
        )
        report.rows.append(row)
        found.append((row, op))
    stated: dict[str, int] = {}
    for _, op in found:
        stated[op.name] = max(op.gpu_bytes(), stated.get(op.name, 0))
    report.facts["ops_memory"] = Fact(stated, "gpu_bytes of the largest call each")
    return found


def _tell(
    report: Report,
    results: Sequence[CallResult],
    before: dict[str, int],
    say: Callable[[str], None],
) -> None:
    """Times, memory and what was compiled, as facts and in a line or two."""
    timed = [r for r in results if r.first_s is not None and r.rest_s is not None]
    after = count(folders())
    line = compared(before, after)
    say(line)
    report.facts["kernel_caches"] = Fact(
        {name: [before[name], after[name]] for name in before}, line
    )
    if not timed:
        return
    first, rest = (sum(getattr(r, k) for r in timed) for k in ("first_s", "rest_s"))
    report.facts["ops_first_calls_s"] = Fact(round(first, 1), "first calls, compiling")
    report.facts["ops_rest_s"] = Fact(round(rest, 1), "everything after first calls")
    peaks = [r.peak_bytes for r in timed if r.peak_bytes is not None]
    if peaks:
        report.facts["ops_peak_bytes"] = Fact(max(peaks), "torch.cuda, of one call")
    say(f"{len(timed)} calls of ops: first {first:.0f} s, the rest {rest:.0f} s")


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
