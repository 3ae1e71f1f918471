# SPDX-License-Identifier: Apache-2.0
"""The self-test's device calls on whatever GPU is here, as a table.

    python3 -m vllm.models.deepseek_v41.nvidia.sm120_op_table \\
        --config config.json --tensor-parallel-size 4 [--calls hc_prenorm,topk] \\
        [--json PATH]

For other GPUs than SM12x: it shows that references and byte formats are those of the
real kernels, and which library a machine lacks. It is no self-test: it says nothing of
an argv, and its pages are 64 states. Exit status 0 if no call was wrong (a call that
cannot be made here is named and is not wrong), 1 if one was, 2 for bad arguments.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from .sm120_child_process import Call, DeviceCall, in_child
from .sm120_device_calls import CallResult
from .sm120_device_cases import IndexerShape
from .sm120_device_kernels import deep_gemm_kernel
from .sm120_kernel_caches import compared, count, folders
from .sm120_op_call import CANNOT, MEMORY_LIMIT, OpCall
from .sm120_op_plan import OP_CALLS, Figures, from_config, plan_ops
from .sm120_op_topk import TopK

_INDEXER = "indexer"


def table_calls(figures: Figures, wanted: Sequence[str], device: str) -> list[Call]:
    """The calls: ops, top-k also by the kernel that SM12x gets, and paged logits."""
    calls: list[Call] = []
    for op in plan_ops(figures, wanted):
        calls.append(OpCall(op, device=device))
        if isinstance(op, TopK) and op.backend == "auto":
            # Elsewhere "auto" may be another kernel than SM12x's.
            calls.append(OpCall(replace(op, backend="persistent"), device=device))
    if _INDEXER in wanted:
        # DeepGEMM's SM90 kernel gives the query after one without keys that one's
        # values, where both fall to one multiprocessor; its SM120 kernel does not.
        sm90 = torch.cuda.is_available()
        sm90 = sm90 and torch.cuda.get_device_capability(device)[0] == 9
        heads = figures.config.index_n_heads
        for cache in dict.fromkeys(figures.indexer.values()):
            for rows in (1, 8, 64):
                shape = IndexerShape(
                    rows, heads, cache.page, stride=cache.stride, empty=not sm90
                )
                calls.append(DeviceCall(shape, deep_gemm_kernel, device=device))
    return calls


def main(
    given: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
    run: Callable[..., list[CallResult]] = in_child,
) -> int:
    """Runs the calls and says what came of each. Returns the exit status."""
    names = (*OP_CALLS, _INDEXER)
    parser = argparse.ArgumentParser(prog="sm120_op_table", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", type=Path, required=True, help="a config.json")
    parser.add_argument("--tensor-parallel-size", type=int, default=4, metavar="N")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens")
    parser.add_argument("--calls", metavar="A,B", help=f"of {', '.join(names)}")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--limit", type=float, default=300, help="seconds a call")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args(given)
    wanted = options.calls.split(",") if options.calls else list(names)
    if unknown := set(wanted) - set(names):
        parser.error(f"unknown call {sorted(unknown)[0]!r}; of {', '.join(names)}")
    try:
        figures = from_config(
            options.config, options.tensor_parallel_size, options.max_model_len
        )
    except ValueError as error:
        parser.error(str(error))
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA GPU here; --device names another")
    calls = table_calls(figures, wanted, options.device)
    before, began = count(folders()), time.monotonic()
    results = run(calls, limit_s=options.limit, say=say)
    for line in lines(calls, results):
        say(line)
    say(compared(before, count(folders())))
    wrong = [r for r in results if not r.ok and not r.reason.startswith(CANNOT)]
    absent = sum(r.reason.startswith(CANNOT) for r in results)
    right = len(results) - len(wrong) - absent
    times = (sum(getattr(r, k) or 0.0 for r in results) for k in ("first_s", "rest_s"))
    say("first calls {:.0f} s, everything after them {:.0f} s".format(*times))
    say(
        f"{right} of {len(results)} calls right, {len(wrong)} wrong, {absent} cannot "
        f"be made here; {time.monotonic() - began:.0f} s in all"
    )
    if options.json:
        _write(options.json, results)
    return 1 if wrong else 0


def lines(calls: Sequence[Call], results: Sequence[CallResult]) -> list[str]:
    """One line a call: verdict, error and bound, seconds, memory, what was called."""
    head = ("", "error", "bound", "first s", "rest s", "MiB", "call")
    rows: list[tuple[str, ...]] = [head]
    for call, result in zip(calls, results, strict=True):
        said = "absent" if result.reason.startswith(CANNOT) else "WRONG"
        bound = result.bound.value if result.bound else None
        peak = None if result.peak_bytes is None else result.peak_bytes / (1 << 20)
        numbers = (result.error_norm, bound, result.first_s, result.rest_s, peak)
        shown = ("" if n is None else f"{n:.3g}" for n in numbers)
        what = str(call) + (f" -- {result.reason}" if result.reason else "")
        rows.append(("right" if result.ok else said, *shown, what))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    return [
        "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]


def _write(path: Path, results: Sequence[CallResult]) -> None:
    found: dict[str, Any] = {"schema": 1, "memory_limit": MEMORY_LIMIT}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["capability"] = list(torch.cuda.get_device_capability())
    found["torch"] = torch.__version__
    found["calls"] = [asdict(result) for result in results]
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


if __name__ == "__main__":
    sys.exit(main())
