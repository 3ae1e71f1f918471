# SPDX-License-Identifier: Apache-2.0
"""Drawings of what ``geometry`` and ``capacity`` measured. Needs matplotlib."""

import os
from pathlib import Path
from typing import Any

from fork import ForkError

_COLOURS = {"main": "#4477aa", "indexer": "#ee8866", "swa": "#44bb99", "ring": "#bbbbbb"}
_WORDS = {
    "main": "compressed KV",
    "indexer": "indexer K",
    "swa": "sliding window",
    "ring": "compressor ring",
}


def _figure(*size: float) -> Any:
    """A figure that needs no display."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ForkError(
            "a plot needs matplotlib, which this environment lacks. Install it: "
            "uv pip install --group plot"
        ) from None
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> None:
    """Beside the target, then renamed. The suffix is the format: png, svg, pdf."""
    beside = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        figure.savefig(beside, dpi=150)
        os.replace(beside, path)
    except ValueError as error:  # an unknown format
        raise ForkError(f"{path}: {error}") from None
    finally:
        beside.unlink(missing_ok=True)


def block(result: dict[str, Any], path: Path) -> None:
    """A KV cache block to scale, each kind of KV cache group a row, stock above patched.

    Args:
        result: what geometry.measure found.

    Raises:
        ForkError: no matplotlib, an unknown format, or no tree that was planned.
    """
    trees = {name: plan for name, plan in result["trees"].items() if "error" not in plan}
    if not trees:
        raise ForkError("nothing was planned, so there is nothing to draw")
    figure = _figure(14, 1.2 + 2.1 * len(trees))
    axes = figure.subplots(len(trees), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, plan) in zip(axes, trees.items(), strict=True):
        _draw_tree(axis, name, plan)
    from matplotlib.patches import Patch

    handles = [Patch(color=_COLOURS[kind], label=word) for kind, word in _WORDS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    figure.suptitle(f"One KV cache block of DeepSeek-V4.1, vLLM {result['base']}")
    _save(figure, path)


def _draw_tree(axis: Any, name: str, plan: dict[str, Any]) -> None:
    size = plan["block_stride"]
    rows = _rows(plan["groups"])
    for y, (_, group) in enumerate(reversed(rows)):
        axis.barh(y, size, height=0.7, color="none", edgecolor="black", linewidth=0.6)
        for place in group["places"]:
            for page in range(place["pages"]):
                start = place["offset"] + page * place["stride"]
                axis.barh(
                    y,
                    place["page_bytes"],
                    left=start,
                    height=0.7,
                    color=_COLOURS[place["kind"]],
                    edgecolor="white",
                    linewidth=0.5,
                )
                if place["page_bytes"] > size / 40:
                    layer = place["name"].split(".")[2]
                    text = layer if place["pages"] == 1 else f"{layer}:{page}"
                    axis.text(start + place["page_bytes"] / 2, y, text, ha="center", va="center")
    axis.set_yticks(range(len(rows)), [label for label, _ in reversed(rows)])
    axis.set_title(
        f"{name} ({plan['layout']}): {size} B, {len(plan['groups'])} groups, "
        f"{plan['bytes_per_token']:.0f} B per token of context",
        loc="left",
    )
    axis.set_xlabel("bytes")


def _rows(groups: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """One group of each kind, and how many there are of it."""
    found: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        kinds = {place["kind"] for place in group["places"]}
        kind = "compressed" if kinds & {"main", "indexer"} else kinds.pop()
        found.setdefault(kind, []).append(group)
    order = {"compressed": 0, "swa": 1, "ring": 2}
    return [
        (f"{'window' if kind == 'swa' else kind} × {len(found[kind])}", found[kind][0])
        for kind in sorted(found, key=order.__getitem__)
    ]


def capacity(result: dict[str, Any], path: Path) -> None:
    """Tokens of context in one request, and requests at once, each layout a bar.

    Args:
        result: what capacity.measure found.

    Raises:
        ForkError: as ``block``.
    """
    good = {n: r for n, r in result["layouts"].items() if "error" not in r}
    if not good:
        raise ForkError("nothing was planned, so there is nothing to draw")
    lengths = list(next(iter(good.values()))["requests"])
    figure = _figure(3.2 * (1 + len(lengths)), 4)
    axes = figure.subplots(1, 1 + len(lengths), squeeze=False)[0]
    charts = [("tokens of context, one request", [r["tokens"] for r in good.values()])]
    for length in lengths:
        title = f"requests of {int(length):,} tokens"
        charts.append((title, [r["requests"][length] for r in good.values()]))
    for axis, (title, values) in zip(axes, charts, strict=True):
        bars = axis.bar(range(len(good)), values, color=list(_COLOURS.values())[: len(good)])
        axis.bar_label(bars, [f"{v:,}" for v in values])
        axis.set_xticks(range(len(good)), list(good), rotation=20)
        axis.set_title(title)
    figure.suptitle(f"vLLM {result['base']}, {result['memory_gib']:g} GiB of KV cache a rank")
    _save(figure, path)
