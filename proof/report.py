# SPDX-License-Identifier: Apache-2.0
"""The proof's table, plot and JSON from a folder of results.

python -m proof.report FOLDER [--plot FILE.png] [--json FILE.json] [--local]
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from . import arms, compare, stored
from .compare import Line

DIGESTS = "digests.txt"
"""In the folder of results: the checkpoint's shards, as sha256sum prints them."""


def verdict(lines: list[Line], errors: list[str]) -> tuple[bool, str]:
    """Whether the proof holds, and the sentence that says so.

    It holds if every arm lies within noise and answers as often from the prefix cache as
    it should, every fault is found, and nothing failed.
    """
    strict = {name for name, arm in arms.ARMS.items() if arm.same_hits}
    wrong = {
        "differs": [line for line in lines if line.verdict == "differs"],
        "blind to": [line for line in lines if line.verdict == "missed"],
        "other prefix hits": [
            line for line in lines if line.compared in strict and line.hits != line.wanted
        ],
    }
    parts = [
        f"{title}: " + ", ".join(f"{x.compared} in {x.setup}/{x.scenario}" for x in found)
        for title, found in wrong.items()
        if found
    ]
    if errors:
        parts.append(f"{len(errors)} scenarios failed")
    faults = sum(line.verdict == "found" for line in lines)
    good = f"PROOF HOLDS: every arm within noise, {faults} planted faults found"
    if blind := [line.compared for line in lines if line.verdict == "blind"]:
        good += f"; blind to {', '.join(blind)} (proof/README.md)"
    return not parts, "PROOF FAILS: " + "; ".join(parts) if parts else good


def show(lines: list[Line], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("set-up", "scenario", "compared"):
        table.add_column(title, no_wrap=True)
    for title in ("positions", "median", "90 %", "99 %", "excess"):
        table.add_column(title, no_wrap=True, justify="right")
    table.add_column("")
    table.add_column("prefix hits", no_wrap=True)
    last: tuple[str, str] | None = None
    for line in lines:
        place = (line.setup, line.scenario)
        named = (*place, str(line.positions)) if place != last else ("", "", "")
        last = place
        styles = {"differs": "bold red", "missed": "bold red", "found": "green", "blind": "yellow"}
        style = styles.get(line.verdict)
        table.add_row(
            *named[:2],
            line.compared,
            named[2],
            *(f"{value:.4f}" for value in line.quantiles),
            "" if line.verdict == "-" else f"{line.excess:.2f}",
            line.verdict,
            " ".join(map(str, line.hits)) if any(line.hits) else "",
            style=style,
        )
    console.print(table)


def plot(lines: list[Line], path: Path) -> None:
    """One panel a scenario: what share of positions differs by more than so much."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    places = list(dict.fromkeys((line.setup, line.scenario) for line in lines))
    columns = 4
    rows = -(-len(places) // columns)
    size = (4 * columns, 2.6 * rows)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False
    )
    for axis in axes.flat[len(places) :]:
        axis.set_visible(False)
    looks = {
        "-": ("black", "-", 2.0),
        "found": ("tab:red", "-", 0.9),
        "blind": ("tab:orange", ":", 2),
        "missed": ("tab:red", ":", 2),
    }
    for axis, place in zip(axes.flat, places, strict=False):
        for line in lines:
            if (line.setup, line.scenario) == place:
                values = np.sort(np.maximum(line.differences, 1e-4))
                share = 1 - np.arange(len(values)) / len(values)
                color, dash, width = looks.get(line.verdict, (None, "--", 1.4))
                axis.plot(values, share, dash, color=color, lw=width, label=line.compared)
        axis.set_title(" / ".join(place), fontsize=9)
        axis.set_xscale("log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)
    figure.supxlabel("|difference of log-probability|, nats")
    figure.supylabel("share of positions that differ by more")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def read_digests(folder: Path) -> dict[str, str]:
    """Shard to digest."""
    try:
        pairs = (line.split() for line in (folder / DIGESTS).read_text().splitlines())
        return {name: value for value, name in pairs}
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / DIGESTS}: {error}; python -m proof.run writes it") from None


def add_digests(folder: Path, digests: dict[str, str]) -> None:
    """Adds shards to the folder's list; those of earlier runs stay."""
    if (folder / DIGESTS).exists():
        digests = {**read_digests(folder), **digests}
    listed = "".join(f"{value} {name}\n" for name, value in sorted(digests.items()))
    (folder / DIGESTS).write_text(listed)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m proof.report",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="Exit code 0: the proof holds; 1: it does not; 2: there is nothing to report.",
    )
    parser.add_argument("folder", type=Path, help="where proof.run leaves its results")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="needs matplotlib")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the table for a program")
    parser.add_argument(
        "--local",
        action="store_true",
        help="the fork against itself and against the stored answers of an H200",
    )
    parser.add_argument("--store", action="store_true", help="keep stock's answers in expected/")
    args = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 150)

    def refuse(error: ValueError) -> int:
        console.print(f"error: {error}", style="red", markup=False)
        return 2

    try:
        results = compare.load(args.folder)
        if not results:
            raise ValueError(f"no results in {args.folder}; python -m proof.run makes them")
    except ValueError as error:
        return refuse(error)
    errors = [error for result in results for error in result.errors()]
    for error in errors:
        console.print(f"failed: {error}", style="red", markup=False)
    for result in results:
        if not result.record["runs"]:
            said = (
                f"does not load: {result.record['failed']}" if result.record["failed"] else "loads"
            )
            console.print(f"{result.setup} ({result.arm}) {said}", markup=False)
    try:
        reference = "fork" if args.local else "stock"
        lines = compare.table(results, reference)
        digests = read_digests(args.folder)
        if args.local:
            lines += stored.against(results, "fork", digests, arms.OTHER_KERNEL)
        if all(line.verdict == "-" for line in lines):
            raise ValueError(
                f"nothing to compare in {args.folder}: no arm beside {reference}; "
                "python -m proof.run makes them"
            )
    except ValueError as error:
        return refuse(error)
    show(lines, console)
    if args.json:
        content = [line.summary() for line in lines]
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    if args.plot:
        plot(lines, args.plot)
    if args.store:
        stored.store(lines, results, digests, stored.FOLDER)
    good, text = verdict(lines, errors)
    console.print(text, markup=False)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
