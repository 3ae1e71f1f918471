# SPDX-License-Identifier: Apache-2.0
"""CPU time of the KV cache manager and of metadata builds: stock, way A, kernel-page units.

    python -m benchmarks.kv_layout [--base V] [--runs N] [--requests N]

All arms run the same random trace, in turn, in processes of their own.
"""

import argparse
import statistics
from typing import Any

from fork import ROOT, fetch, geometry, pin, series
from fork.tree import WheelTree

ARMS = {"stock": None, "spec-blocks": "spec-blocks", "kernel-page-units": "kernel-page-units"}


def run(base: str, requests: int, metadata: bool = True) -> dict[str, dict[str, Any]]:
    """One round: what benchmarks/kv_layout_trace.py measured in each arm."""
    wheel = WheelTree(fetch.upstream_wheel(pin.load(), base))
    patched = geometry.patched_tree(wheel, series.members(), pin.load())
    request = {"requests": requests, "blocks": 100_000, "metadata": metadata}
    out = {}
    for name, layout in ARMS.items():
        tree = patched if layout else geometry.stock_tree(wheel)
        environment = {"TRITON_INTERPRET": "1"} | (
            {"VLLM_SM120_KV_LAYOUT": layout} if layout else {}
        )
        module = "benchmarks.kv_layout_trace"
        out[name] = geometry.answer(module, request, [tree, ROOT], environment)
    return out


def figures(result: dict[str, Any]) -> dict[str, float]:
    """The times of one arm in one round, in µs."""
    traces = {("hits" if t["caching"] else "no hits"): t["us_per_step"] for t in result["traces"]}
    builds = result["metadata_us"][0]
    return {
        "manager, a step, prefix caching": traces["hits"],
        "manager, a step, without": traces["no hits"],
        "metadata, 16 decodes": builds["decode"],
        "metadata, a prefill of 2048": builds["prefill"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default=pin.load().base)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=400)
    args = parser.parse_args()
    rounds = []
    for _ in range(args.runs):
        results = run(args.base, args.requests)
        hits = {name: result["traces"][0]["hits"] for name, result in results.items()}
        assert all(found == hits["stock"] for found in hits.values()), "hits differ"
        rounds.append({name: figures(result) for name, result in results.items()})
    for what in rounds[0]["stock"]:
        line = [f"{what:34}"]
        for arm in ARMS:
            value = statistics.median(r[arm][what] for r in rounds)
            ratio = statistics.median(r[arm][what] / r["stock"][what] for r in rounds)
            line.append(f"{arm} {value:7.0f} us ({ratio:.2f} x stock)")
        print("  ".join(line))


if __name__ == "__main__":
    main()
