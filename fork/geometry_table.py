# SPDX-License-Identifier: Apache-2.0
"""The geometry as tables, for people."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_KINDS = {"swa": "sliding window", "main": "compressed KV", "indexer": "indexer K"}


def show(result: dict[str, Any], console: Console) -> None:
    """Prints what fork.geometry.measure found."""
    argv = " ".join(result["argv"][1:])
    console.print(
        f"vLLM {result['base']}, capability {result['capability']}, {escape(argv)}\n"
        "Level of evidence: planned and allocated by vLLM on a CPU; legality by the "
        "libraries' own rules. No SM12x kernel ran.\n"
    )
    for name, plan in result["trees"].items():
        if "error" in plan:
            console.print(f"[bold]{name}[/]: vLLM refuses to plan this: {escape(plan['error'])}\n")
        else:
            _show_tree(name, plan, console)
    for kind, rule in result["rules"].items():
        console.print(f"{_KINDS[kind]}: {escape(rule)}", highlight=False)


def _show_tree(name: str, plan: dict[str, Any], console: Console) -> None:
    table = Table(title=f"[bold]{name}[/]", title_justify="left")
    table.add_column("cache")
    for column in ("layers", "tokens a state", "block", "page, padded", "kernel block"):
        table.add_column(column, justify="right")
    table.add_column("states a page", justify="right", style="bold")
    table.add_column("legal on SM12x", overflow="fold")
    for row in plan["specs"]:
        layers = row["layers"]
        shown = ", ".join(map(str, layers)) if len(layers) < 5 else f"{len(layers)} layers"
        table.add_row(
            _KINDS[row["layer_kind"]],
            shown,
            str(row["tokens_per_state"]),
            str(row["block"]),
            f"{row['page_bytes']} B",
            str(row["kernel_block"]),
            str(row["states"]),
            "[green]yes[/]" if row["legal"] else f"[red]no[/]: {escape(row['refused_by'])}",
        )
    console.print(table)
    for problem in plan.get("problems", ()):
        console.print(f"[red]wrong:[/] {escape(problem)}", highlight=False)
    console.print(
        f"KV layout {plan.get('layout', 'stock')}: {len(plan['groups'])} KV groups, "
        f"block stride {plan['block_stride']} B, "
        f"{plan['bytes_per_token']:.0f} B per token of context, "
        f"prefix hits every {plan['prefix_hit_tokens']} tokens\n",
        highlight=False,
    )
