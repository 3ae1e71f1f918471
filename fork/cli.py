# SPDX-License-Identifier: Apache-2.0
"""The command line. Exit codes: 0 done and right, 1 something is wrong, 2 bad arguments."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.table import Table

import patches
from fork import ForkError, cli_rebase, fetch, foreign, pin, recipe, series, wheel
from fork.patch import Standing, Verdict
from fork.tree import FolderTree, Tree, WheelTree, open_tree

app = typer.Typer(
    name="fork",
    help="vLLM for DeepSeek-V4.1 on SM12x: edits the pinned upstream wheel, and shows what "
    "that changes. Upstream's wheel is fetched by name, version and hash into the cache "
    "($SM120_FORK_CACHE, else the user's cache folder).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console(emoji=False)
err = Console(stderr=True, emoji=False)

Base = Annotated[str | None, typer.Option(help="Upstream release; the pin's default if not given.")]
Where = Annotated[
    Path, typer.Argument(help="An unpacked wheel, a virtual environment, or a source checkout.")
]
Members = Annotated[
    str | None, typer.Option(help="Comma-separated members of the series; all if not given.")
]
Plot = Annotated[
    Path | None, typer.Option("--plot", help="Draw it here (png, svg, pdf); needs matplotlib.")
]
ForeignDiffs = Annotated[
    list[str] | None,
    typer.Option(
        "--foreign",
        metavar="NAME=PATH",
        help="A unified diff of your own, placed before the fork's patches; repeat for more, in "
        "their order.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_COLOURS = {
    Verdict.PENDING: "yellow",
    Verdict.APPLIED: "green",
    Verdict.UPSTREAM: "cyan",
    Verdict.DRIFT: "red",
}


def _names(members: str | None) -> list[str] | None:
    return [name.strip() for name in members.split(",")] if members else None


def _chosen(members: str | None, diffs: list[str] | None = None) -> list[series.Member]:
    return [*foreign.load(diffs or ()), *series.members(_names(members))]


def _chosen_or_carried(
    tree: Tree, members: str | None, diffs: list[str] | None
) -> list[series.Member]:
    """With the tree's own foreign members, where it carries some and none are given."""
    chosen = _chosen(members, diffs)
    if diffs or members is not None:
        return chosen
    try:
        return [*foreign.carried_by(tree), *chosen]
    except ForkError:
        return chosen  # status and verify say that the tree is damaged


def _folder(path: Path) -> FolderTree:
    tree = open_tree(path)
    if isinstance(tree, WheelTree):
        raise ForkError(f"{path} is a wheel: unpack or install it first, or use `fork wheel`.")
    return tree


def _upstream(base: str | None) -> WheelTree:
    return WheelTree(fetch.upstream_wheel(pin.load(), base))


def _tree(path: Path | None, base: str | None) -> Tree:
    if path is not None and base is not None:
        raise ForkError("give a PATH or --base, not both")
    return open_tree(path) if path else _upstream(base)


def _table(tree: Tree, standings: dict[str, Standing]) -> None:
    out.print(escape(f"{tree} (vLLM {tree.version})"), highlight=False, soft_wrap=True)
    table = Table()
    table.add_column("patch")
    table.add_column("verdict")
    table.add_column("why", overflow="fold")
    for name, standing in standings.items():
        colour = _COLOURS[standing.verdict]
        table.add_row(name, f"[{colour}]{standing.verdict}[/]", escape("\n".join(standing.why)))
    out.print(table)


@app.command()
def status(
    path: Annotated[
        Path | None, typer.Argument(help="A wheel, folder or environment to look at.")
    ] = None,
    base: Base = None,
    members: Members = None,
    diffs: ForeignDiffs = None,
    as_json: Json = False,
) -> None:
    """Where each patch stands: pending, applied, upstream or drift (exit 1)."""
    tree = _tree(path, base)
    standings = series.status(tree, _chosen_or_carried(tree, members, diffs))
    if as_json:
        rows = {n: {"verdict": s.verdict, "why": s.why} for n, s in standings.items()}
        print(json.dumps({"tree": str(tree), "version": tree.version, "patches": rows}))
    else:
        _table(tree, standings)
    if any(s.verdict is Verdict.DRIFT for s in standings.values()):
        raise typer.Exit(1)


@app.command()
def apply(path: Where, members: Members = None, diffs: ForeignDiffs = None) -> None:
    """Edit an unpacked or installed vLLM in place: every patch, or nothing.

    RECORD is kept right, so the installer's own check and uninstall still work.
    """
    tree = _folder(path)
    _say_written(series.apply(tree, _chosen(members, diffs), pin.load()), "applied")


@app.command()
def revert(path: Where, members: Members = None) -> None:
    """Undo apply: the pristine bytes again. Foreign members go with the whole series."""
    tree = _folder(path)
    chosen = _chosen_or_carried(tree, members, None)
    _say_written(series.revert(tree, chosen, pin.load()), "reverted")


def _say_written(written: list[str], done: str) -> None:
    for name in written:
        print(name)
    err.print(f"{done}: {len(written)} files" if written else "nothing to do")


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="A built wheel, or a patched tree.")],
    diffs: ForeignDiffs = None,
) -> None:
    """Check a patched wheel or tree: every patch applied, the recipe this checkout's,
    RECORD and version right. Exit 1 and one line a fault otherwise.

    Foreign members are the tree's own, unless --foreign says which they must be."""
    tree = open_tree(path)
    wrong = series.verify(tree, _chosen_or_carried(tree, None, diffs), pin.load())
    for line in wrong:
        print(line)
    if wrong:
        raise typer.Exit(1)
    err.print(f"[green]verified[/] {escape(str(tree))}: vLLM {tree.version}")


@app.command()
def diff(base: Base = None, members: Members = None) -> None:
    """Print the delta as one unified diff (for git apply or patch -p1)."""
    from fork import history

    text = history.diff(_upstream(base), _chosen(members))
    sys.stdout.buffer.write(text.encode("utf-8"))


@app.command()
def branch(
    folder: Annotated[Path, typer.Argument(help="A folder to make; must be empty or absent.")],
    base: Base = None,
    members: Members = None,
) -> None:
    """Make a git repository: one commit of upstream, then one a patch."""
    from fork import history

    for commit in history.branch(_upstream(base), _chosen(members), folder):
        print(commit)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Where the .patch files go.")],
    base: Base = None,
    members: Members = None,
    upstream: Annotated[
        bool, typer.Option("--upstream", help="The bug fix alone, for a person to submit.")
    ] = False,
    test: Annotated[
        bool, typer.Option("--tests/--no-tests", help="With --upstream: run its tests first.")
    ] = True,
) -> None:
    """Write a format-patch series: why, upstream reference and test command in each.

    Apply it with `git am --keep-non-patch` to upstream's own tree. With --upstream: the fixes,
    their tests and a cover letter, in upstream's form.
    """
    from fork import history, proposal

    if upstream:
        if members:
            raise typer.BadParameter("--upstream has its own members (fork/proposal.py)")
        with err.status("starting") as spinner:
            written = proposal.export(pin.load(), folder, base, test, say=spinner.update)
    else:
        written = history.export(_upstream(base), _chosen(members), folder)
    for path in written:
        print(path)


@app.command("wheel")
def wheel_command(
    base: Base = None,
    platform: Annotated[
        str | None, typer.Option(help="x86_64, aarch64 or all; this machine's if not given.")
    ] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Where the wheel goes.")] = Path("dist"),
    diffs: ForeignDiffs = None,
) -> None:
    """Build the patched wheel, vllm-<base>+sm120.<n>, and print its path.

    With foreign members the version ends in .f and 8 digits of their content.
    """
    members = _chosen(None, diffs)
    targets = list(pin.PLATFORMS) if platform == "all" else [platform]
    for target in targets:
        source = fetch.upstream_wheel(pin.load(), base, target)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        with Progress(*columns, console=err, transient=True) as progress:
            task = progress.add_task(f"packing {source.name}", total=source.stat().st_size)
            path = wheel.build(
                pin.load(),
                members,
                out_dir,
                base,
                target,
                lambda count, task=task, bar=progress: bar.advance(task, count),
            )
        print(path)


@app.command("recipe")
def recipe_command(
    base: Base = None,
    members: Members = None,
    diffs: ForeignDiffs = None,
    as_json: Json = False,
) -> None:
    """Print what the fork is made of, and its runtime key."""
    built = recipe.build(pin.load(), _chosen(members, diffs), base)
    if as_json:
        sys.stdout.buffer.write(recipe.document(built))
        return
    table = Table(title=f"runtime key {recipe.runtime_key(built)}", title_justify="left")
    table.add_column("part")
    table.add_column("pin", overflow="fold")
    table.add_row("base", f"vLLM {built['base']['version']}, fork release {built['release']}")
    for name in ("flashinfer", "torch", "transformers", "deep_gemm"):
        table.add_row(name, built["base"][name])
    for member in built["members"]:
        table.add_row(member["name"], member["sha256"])
    out.print(table)


@app.command()
def geometry(
    base: Base = None,
    block_size: Annotated[
        int | None, typer.Option(help="As --block-size of vllm serve would be.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the result here; '-' is standard output.")
    ] = None,
    plot: Plot = None,
) -> None:
    """Show pages and states that vLLM itself plans, stock and patched, on this CPU.

    Exit 1 where a patched page is one that no SM12x kernel takes or finds, or vLLM refuses
    to plan. VLLM_SM120_KV_LAYOUT chooses the patched tree's layout, as it does when serving.
    """
    from fork import geometry as module
    from fork.geometry_table import show

    with err.status("starting") as spinner:
        result = module.measure(
            pin.load(),
            series.members(),
            base,
            module.default_argv(block_size),
            say=spinner.update,
        )
    give(result, json_path, show)
    if plot is not None:
        from fork import plots

        plots.block(result, plot)
    patched = result["trees"]["patched"]
    if "error" in patched or patched.get("problems"):
        raise typer.Exit(1)
    if not all(row["legal"] for row in patched["specs"]):
        raise typer.Exit(1)


def give(result: dict, json_path: Path | None, show: Callable[[dict, Console], None]) -> None:
    """Writes JSON where it is asked for, and shows a table unless it went to stdout."""
    if json_path is not None:
        text = json.dumps(result, indent=1) + "\n"
        if str(json_path) == "-":
            print(text, end="")
        else:
            _write_beside(json_path, text)
    if str(json_path) != "-":
        show(result, out)


@app.command(context_settings={"ignore_unknown_options": True})
def capacity(
    memory_gib: Annotated[
        float,
        typer.Option(
            help="KV cache memory of one rank, in GiB: what vLLM logs as available KV cache memory."
        ),
    ],
    argv: Annotated[
        list[str] | None,
        typer.Argument(help="After --, what follows `vllm serve`; a V4.1 at TP 4 if not given."),
    ] = None,
    base: Base = None,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens of the requests to count, comma-separated.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the result here; '-' is standard output.")
    ] = None,
    plot: Plot = None,
) -> None:
    """How many tokens and requests fit: stock, and both layouts of the patched tree.

    By vLLM's own planner and cache manager, on this CPU. Releases before 0.32 have no
    kernel-page-units. Exit 1 where vLLM plans none of the patched layouts.
    """
    from fork import capacity as module
    from fork import geometry as trees

    try:
        asked = [int(x) for x in lengths.split(",")] if lengths else module.LENGTHS
    except ValueError:
        raise typer.BadParameter(f"{lengths!r}: whole numbers, comma-separated") from None
    with err.status("starting") as spinner:
        result = module.measure(
            pin.load(),
            series.members(),
            argv or trees.default_argv(),
            memory_gib,
            base,
            asked,
            say=spinner.update,
        )
    give(result, json_path, module.show)
    if plot is not None:
        from fork import plots

        plots.capacity(result, plot)
    if all("error" in found for name, found in result["layouts"].items() if name != "stock"):
        raise typer.Exit(1)


@app.command(context_settings={"ignore_unknown_options": True})
def probe(
    argv: Annotated[
        list[str] | None,
        typer.Argument(help="After --, what follows `vllm serve`; a V4.1 at TP 4 if not given."),
    ] = None,
    base: Base = None,
    all_bases: Annotated[bool, typer.Option("--all-bases", help="Every base served.")] = False,
    members: Members = None,
    tokens: Annotated[str | None, typer.Option(help="Token counts, comma-separated.")] = None,
    calls: Annotated[
        str | None, typer.Option(help="attention, indexer; both if not given.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all reports here.")
    ] = None,
    rules_only: Annotated[
        bool, typer.Option("--rules-only", help="The libraries' rules: always, for now.")
    ] = True,
) -> None:
    """Run the self-test unpatched and patched, multimodal and text-only, and compare.

    Exit 1 where a patched, safe arm does not pass.
    """
    from fork import geometry as module
    from fork import probe as arms

    del rules_only  # the level there is
    the_pin = pin.load()
    bases = list(the_pin.bases) if all_bases else [the_pin.of(base)[0]]
    options = ["--rules-only", "--capability", "12.0"]
    options += ["--tokens", tokens] if tokens else []
    options += ["--calls", calls] if calls else []
    with err.status(f"probing {', '.join(bases)}"):
        rows = arms.run(the_pin, bases, argv or module.default_argv(), options, _names(members))
    if json_path is not None:
        _write_beside(json_path, json.dumps({"schema": 1, "arms": rows}, indent=1) + "\n")
    table = Table()
    for column in ("base", "tree", "modality", "verdict"):
        table.add_column(column)
    for row in rows:
        line = escape(row["report"]["line"])
        colour = {"PASS": "green", "FAIL": "red"}.get(row["report"]["verdict"], "yellow")
        table.add_row(row["base"], row["tree"], row["modality"], f"[{colour}]{line}[/]")
    out.print(table)
    safe = [r for r in rows if r["tree"] == "patched" and r["modality"] == "text-only safe"]
    if any(row["report"]["verdict"] != "PASS" for row in safe):
        raise typer.Exit(1)


def _write_beside(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    os.replace(beside, path)


@app.command("patches")
def patches_command(
    diagram: Annotated[
        bool, typer.Option("--diagram", help="Print a Mermaid flowchart of what each edits.")
    ] = False,
    base: Base = None,
) -> None:
    """List the series: each patch, why, and when to retire it."""
    if diagram:
        from fork import overview

        print(overview.mermaid(series.members(), pin.load().of(base)[0]))
        return
    for name in patches.SERIES:
        patch = series.load(name)
        title, retire = escape(patch.title), escape(patch.retire)
        out.print(f"[bold]{name}[/]\n  {title}\n  [dim]Retire:[/] {retire}\n")


app.command()(cli_rebase.rebase)


def main() -> None:
    """Runs the command; a refusal is one message and exit 1, not a traceback."""
    try:
        app()
    except ForkError as error:
        _fail(str(error))
    except OSError as error:
        where = f": {error.filename}" if error.filename is not None else ""
        _fail(f"{error.strerror}{where}" if error.strerror else str(error))


def _fail(message: str) -> None:
    err.print(f"[red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(1)
