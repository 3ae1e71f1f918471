# SPDX-License-Identifier: Apache-2.0
"""What fits into the KV cache of a launch: stock, and the patched tree's layouts.

Level of evidence: *planned*, by vLLM's own planner and cache manager on a CPU. Blocks and
bytes are what is counted; nothing depends on max_model_len.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fork import ForkError, fetch, geometry, pin
from fork.patch import Patch
from fork.tree import WheelTree

SCHEMA = 1
LENGTHS = (8 * 1024, 32 * 1024, 128 * 1024)
"""Tokens of the requests that are counted, where the user names none."""

LAYOUTS = {"stock": None, "spec-blocks": "spec-blocks", "kernel-page-units": "kernel-page-units"}
"""What is measured: the name, and the patched tree's VLLM_SM120_KV_LAYOUT."""


def measure(
    the_pin: pin.Pin,
    members: Sequence[Patch],
    argv: Sequence[str],
    memory_gib: float,
    base: str | None = None,
    lengths: Sequence[int] = LENGTHS,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The capacity of ``argv`` in every layout.

    Args:
        memory_gib: KV cache memory of one rank, in GiB: what vLLM logs as available.

    Returns:
        ``{"schema", "base", "argv", "memory_gib", "layouts": {name: …}}``; a layout that
        vLLM refuses has ``{"error": message}``.

    Raises:
        ForkError: memory or a length is not positive; see geometry.measure.
    """
    if not memory_gib > 0 or not lengths or min(lengths) < 1:
        raise ForkError("memory and lengths must be positive")
    argv = absolute(argv)
    version, _ = the_pin.of(base)
    geometry.need_dependencies()
    wheel = WheelTree(fetch.upstream_wheel(the_pin, version))
    say(f"unpacking vLLM {version}")
    stock = geometry.stock_tree(wheel)
    patched = geometry.patched_tree(wheel, members, the_pin)
    asked = {"memory_bytes": int(memory_gib * (1 << 30)), "lengths": list(lengths)}

    def plan(name: str, layout: str | None) -> dict[str, Any]:
        tree = patched if layout else stock
        return geometry.plan(tree, [list(argv)], (12, 0), layout, **asked)[0]

    say(f"planning {len(LAYOUTS)} layouts on vLLM {version}, on this CPU")
    with ThreadPoolExecutor(max_workers=2) as pool:
        waiting = {name: pool.submit(plan, name, layout) for name, layout in LAYOUTS.items()}
        layouts = {name: found.result() for name, found in waiting.items()}
    return {
        "schema": SCHEMA,
        "base": version,
        "argv": argv,
        "memory_gib": memory_gib,
        "layouts": layouts,
    }


def absolute(argv: Sequence[str]) -> list[str]:
    """The argv with the checkpoint's folder as an absolute path: vLLM plans elsewhere."""
    return [str(Path(a).resolve()) if (Path(a) / "config.json").is_file() else a for a in argv]


def show(result: dict[str, Any], console: Console) -> None:
    """Prints what ``measure`` found."""
    console.print(
        f"vLLM {result['base']}, {escape(' '.join(result['argv'][1:]))}\n"
        f"{result['memory_gib']:g} GiB of KV cache a rank. Level of evidence: planned by vLLM "
        "on a CPU. stock has pages that SM12x kernels refuse.\n",
        highlight=False,
    )
    good = {n: r for n, r in result["layouts"].items() if "error" not in r}
    table = Table()
    table.add_column("")
    for name in good:
        table.add_column(name, justify="right")
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("blocks", lambda r: f"{r['blocks']:,}"),
        ("bytes a block, by stage", lambda r: ", ".join(f"{b:,}" for b in r["block_bytes"])),
        ("context blocks for 128 tokens", lambda r: f"{r['context_blocks_per_128_tokens']:g}"),
        (
            "context bytes a token, by stage",
            lambda r: ", ".join(
                f"{r['context_blocks_per_128_tokens'] * b / 128:,.0f}" for b in r["block_bytes"]
            ),
        ),
        ("window blocks a request", lambda r: f"{r['request_blocks']['window']}"),
        (
            "the same while prefilling",
            lambda r: f"{r['request_blocks']['window_while_prefilling']}",
        ),
        ("ring blocks a request", lambda r: f"{r['request_blocks']['ring']}"),
        ("tokens of context, one request", lambda r: f"{r['tokens']:,}"),
    ]
    for label, cell in rows:
        table.add_row(label, *(cell(r) for r in good.values()))
    for length in next(iter(good.values()), {"requests": {}})["requests"]:
        counts = (f"{r['requests'][length]:,}" for r in good.values())
        table.add_row(f"requests of {int(length):,} tokens at once", *counts)
    if good:
        console.print(table)
    for name, found in result["layouts"].items():
        if "error" in found:
            console.print(f"{name}: vLLM refuses to plan this: {escape(found['error'])}")
