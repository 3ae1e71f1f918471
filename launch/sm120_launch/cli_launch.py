# SPDX-License-Identifier: Apache-2.0
"""The commands that reach hosts: gate, launch, stop, and the receipts of all three.

Exit codes: 0 passed or started, 1 the gate or a start said no, 2 bad input, or the
environment lacks something.
"""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sm120_launch import receipt
from sm120_launch.board import Board
from sm120_launch.errors import EXIT_DONE, EXIT_NO, LaunchError
from sm120_launch.launcher import Launch, signals
from sm120_launch.plan import LaunchPlan
from sm120_launch.receipt import Folder, Receipt
from sm120_launch.receipt_diff import differences
from sm120_launch.report import plain

out = Console(emoji=False)
err = Console(stderr=True, emoji=False)

Load = Callable[[Path], LaunchPlan]
"""Reads a profile into a plan."""

Profile = Annotated[
    Path,
    typer.Argument(help="A profile in TOML, or (.json) a plan as `plan --json` printed it."),
]
Receipts = Annotated[
    Path | None,
    typer.Option(
        help="Folder of receipts; default: ~/.local/state/sm120-launch/receipts.",
        envvar=receipt.FOLDER_VARIABLE,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the receipt as JSON.")]

_RESULTS = {
    "passed": "green",
    "started": "green",
    "stopped": "green",
    "cancelled": "yellow",
    "refused": "red",
    "failed": "red",
}


def register(app: typer.Typer, load: Load, load_to_stop: Load) -> None:
    """Adds the commands to ``app``. ``load`` reads a profile; ``load_to_stop`` only as much
    of it as stopping needs."""

    def run(
        kind: Literal["gate", "launch", "stop"],
        profile: Path,
        receipts: Path | None,
        as_json: bool,
    ) -> None:
        plan = _plan(profile, load_to_stop if kind == "stop" else load)
        cancelled = threading.Event()
        folder = Folder(receipts or receipt.default_folder())
        with signals(cancelled), Board(plan, err) as board:
            launch = Launch(plan, folder, kind, cancelled=cancelled, told=board.told)
            done = launch.run()
        if as_json:
            typer.echo(done.text(), nl=False)
        else:
            _say(done, folder)
        raise typer.Exit(EXIT_DONE if done.result in ("passed", "started", "stopped") else EXIT_NO)

    @app.command()
    def gate(
        profile: Profile,
        receipts: Receipts = None,
        as_json: Json = False,
    ) -> None:
        """Runs the self-test of every rank, on its host, in its image; starts nothing.

        Exit codes: 0 every rank passed, 1 one did not, 2 bad input or environment.
        """
        run("gate", profile, receipts, as_json)

    @app.command()
    def launch(
        profile: Profile,
        receipts: Receipts = None,
        as_json: Json = False,
    ) -> None:
        """Gates every rank; only if all pass, stages and starts them.

        Returns once every engine is up; they run on. One that does not come up stops all.
        Exit codes: 0 started, 1 the gate or a start said no, 2 bad input or environment.
        """
        run("launch", profile, receipts, as_json)

    @app.command()
    def stop(
        profile: Profile,
        receipts: Receipts = None,
        as_json: Json = False,
    ) -> None:
        """Ends and removes whatever any launch of this profile left running.

        On the profile's ranks, and on those of its launches that receipts tell of; recipe
        and images are not needed.
        Exit codes: 0 nothing of it is left, 1 some host could not be reached, 2 bad input.
        """
        run("stop", profile, receipts, as_json)

    listing = typer.Typer(
        help="What was launched, gated and stopped, and how it ended.", invoke_without_command=True
    )
    app.add_typer(listing, name="receipts")

    @listing.callback()
    def receipts_(
        context: typer.Context,
        receipts: Receipts = None,
        as_json: Json = False,
    ) -> None:
        """Lists the receipts, oldest first; `receipts show ID` prints one."""
        context.obj = receipts
        if context.invoked_subcommand is not None:
            return
        _list(Folder(receipts or receipt.default_folder()), as_json)

    @listing.command()
    def show(
        context: typer.Context,
        receipt_id: Annotated[str, typer.Argument(metavar="ID")],
        receipts: Receipts = None,
        as_json: Json = False,
    ) -> None:
        """Prints one receipt."""
        folder = Folder(receipts or context.obj or receipt.default_folder())
        found = folder.read(receipt_id)
        if as_json:
            typer.echo(found.text(), nl=False)
            return
        _say(found, folder)
        for record in found.ranks:
            for command in record.commands:
                for stream in (command.stdout, command.stderr):
                    if stream.strip():
                        title = f"rank {record.rank} on {record.host}, {command.purpose}"
                        out.print(f"\n[bold]{escape(title)}[/]", highlight=False)
                        out.print(escape(stream.rstrip()), highlight=False, soft_wrap=True)

    @listing.command()
    def diff(
        context: typer.Context,
        left: Annotated[str, typer.Argument(metavar="ID")],
        right: Annotated[str, typer.Argument(metavar="ID")],
        receipts: Receipts = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Compares which implementation each op selected, and the facts, rank by rank.

        Exit codes: 0 the same, 1 they differ, 2 bad input.
        """
        folder = Folder(receipts or context.obj or receipt.default_folder())
        found = differences(folder.read(left), folder.read(right))
        if as_json:
            typer.echo(json.dumps([one.model_dump() for one in found], indent=1))
        elif not found:
            out.print("the same")
        else:
            table = Table()
            table.add_column("rank", justify="right")
            for name in ("what", left, right):
                table.add_column(name, overflow="fold")
            for one in found:
                row = (one.what, one.left, one.right)
                table.add_row(str(one.rank), *(escape(plain(text)) for text in row))
            out.print(table)
        raise typer.Exit(EXIT_NO if found else EXIT_DONE)


def _plan(path: Path, load: Load) -> LaunchPlan:
    if path.suffix != ".json":
        return load(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for rank in found["ranks"]:
            rank.pop("commands", None)  # `plan --json` prints them for people
        return LaunchPlan.model_validate_json(json.dumps(found))
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}", "a profile or a plan") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise LaunchError(
            f"{path} is no plan: {what}",
            "what `sm120-launch plan PROFILE --json` prints",
            "Make it again",
        ) from None


def _state(found: Receipt, folder: Folder, newest: str | None) -> str:
    if found.result is not None:
        return found.result
    if found.id == newest and folder.is_locked(found.profile):
        return "running"
    return "interrupted"


def _list(folder: Folder, as_json: bool) -> None:
    found, damaged = [], {}
    for receipt_id in folder.ids():
        try:
            found.append(folder.read(receipt_id))
        except LaunchError as error:
            damaged[receipt_id] = str(error)
    newest = {receipt.profile: receipt.id for receipt in found}
    states = {r.id: _state(r, folder, newest[r.profile]) for r in found}
    if as_json:
        rows = [
            {
                "id": r.id,
                "kind": r.kind,
                "profile": r.profile,
                "state": states[r.id],
                "stage": r.stage,
                "why": r.why,
                "pid": r.pid,
                "control_host": r.control_host,
            }
            for r in found
        ]
        rows += [{"id": name, "state": "damaged", "why": why} for name, why in damaged.items()]
        typer.echo(json.dumps({"schema": receipt.SCHEMA, "receipts": rows}, indent=1))
        return
    table = Table()
    for name in ("id", "kind", "profile", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("why", overflow="fold")
    for r in found:
        state = states[r.id]
        colour = _RESULTS.get(state, "yellow")
        why = r.why
        if state == "interrupted":
            why = f"at stage {r.stage}; the launcher was killed"
        elif state == "running":
            why = f"at stage {r.stage}, process {r.pid} on {r.control_host}"
        table.add_row(r.id, r.kind, escape(r.profile), f"[{colour}]{state}[/]", escape(why))
    for name, why in damaged.items():
        table.add_row(name, "", "", "[yellow]damaged[/]", escape(why))
    out.print(table)


def _say(done: Receipt, folder: Folder) -> None:
    for interrupted in done.interrupted:
        left = (
            "removed" if interrupted in done.cleaned else "still there: launch or stop removes it"
        )
        text = f"{interrupted} was interrupted, its launcher killed; what it left is {left}."
        out.print(escape(text), style="yellow", highlight=False, soft_wrap=True)
    for warning in done.warnings:
        out.print(escape(f"warning: {warning}"), highlight=False, soft_wrap=True)
    table = Table()
    table.add_column("rank", justify="right")
    table.add_column("host", overflow="fold")
    table.add_column("self-test", no_wrap=True)
    table.add_column("s", justify="right")
    table.add_column("why", overflow="fold")
    for record in done.ranks:
        seconds = "" if record.gate_seconds is None else f"{record.gate_seconds:.1f}"
        warned = (record.report or {}).get("warnings") or []
        warnings = f"warnings: {', '.join(map(str, warned))}" if warned else ""
        why = "; ".join(x for x in (record.reason, record.engine, warnings) if x)
        table.add_row(
            str(record.rank), escape(record.host), record.verdict or "", seconds, escape(why)
        )
    out.print(table)
    result = done.result or f"no end (stage {done.stage})"
    colour = _RESULTS.get(result, "yellow")
    why = f": {done.why}" if done.why else ""
    out.print(f"[{colour}]{result}[/]{escape(why)}", highlight=False, soft_wrap=True)
    path = folder.path / f"{done.id}.json"
    out.print(escape(f"receipt {path}"), highlight=False, soft_wrap=True)
