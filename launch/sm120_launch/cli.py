# SPDX-License-Identifier: Apache-2.0
"""The command line. Exit codes: 0 done, 1 the gate or a start said no, 2 bad input."""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sm120_launch import cli_launch, planning, runtime
from sm120_launch import images as produced
from sm120_launch import profile as profiles
from sm120_launch.errors import EXIT_BAD_INPUT, EXIT_NO, LaunchError
from sm120_launch.image_build import Build

app = typer.Typer(
    name="sm120-launch",
    help="Starts vLLM for DeepSeek-V4.1 on SM12x hosts, once every rank's host, in the planned "
    "image and with that rank's exact arguments, has passed the self-test.\n\n"
    "A profile is a TOML file: docs/launching.md of the repository has its format and whole "
    "ones; `plan` shows what it comes to.\n\n"
    "Exit codes: 0 done, 1 the gate or a start said no, 2 bad input, or the environment lacks "
    "something.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
image_app = typer.Typer(no_args_is_help=True, help="Produced images: build, record, check.")
app.add_typer(image_app, name="image")
out = Console(emoji=False)
err = Console(stderr=True, emoji=False)

ProfilePath = Annotated[Path, typer.Argument(help="The profile, a TOML file.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ImagesFile = Annotated[Path, typer.Option("--images", help="The images file.")]
EngineName = Annotated[str, typer.Option("--engine", help="podman or docker.")]
_IMAGES = Path("images.toml")

cli_launch.register(
    app,
    lambda path: planning.plan(profiles.load(path)),
    lambda path: planning.to_stop(profiles.load(path)),
)


@app.command("plan")
def plan_command(profile: ProfilePath, as_json: Json = False) -> None:
    """Print each rank's exact argv and commands. Nothing is run, no host is asked.

    Commands are shown with launch id `plan`; a launch has one of its own.
    """
    plan = planning.plan(profiles.load(profile))
    if as_json:
        ranks = [
            {
                **rank.model_dump(mode="json"),
                "commands": {
                    "gate": runtime.gate_command(rank, "plan"),
                    "engine": runtime.engine_command(rank, "plan") if rank.starts_engine else None,
                },
            }
            for rank in plan.ranks
        ]
        print(json.dumps({**plan.model_dump(mode="json"), "ranks": ranks}, indent=1))
        return
    title = (
        f"{plan.profile}: vLLM {plan.base}, runtime key {plan.runtime_key[:16]}, "
        f"profile key {plan.profile_key[:16]}"
    )
    table = Table(title=title, title_justify="left")
    for column in ("rank", "host", "over", "runs", "image", "GPUs"):
        table.add_column(column, overflow="fold")
    for rank in plan.ranks:
        table.add_row(
            str(rank.rank),
            rank.host,
            rank.transport.kind,
            f"{rank.runtime}{'' if rank.starts_engine else ', gate only'}",
            rank.image.reference if rank.image else rank.venv or "",
            ", ".join(rank.devices) or "none",
        )
    out.print(table)
    for rank in plan.ranks:
        _section(f"rank {rank.rank}: vllm serve", shlex.join(rank.argv))
        _section("gate", shlex.join(runtime.gate_command(rank, "plan")))
        if rank.starts_engine:
            _section("engine", shlex.join(runtime.engine_command(rank, "plan")))
    for warning in plan.warnings:
        err.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)


def _section(head: str, text: str) -> None:
    out.print(f"[bold]{escape(head)}[/]", highlight=False)
    # As it can be pasted: no wrapping, no styling.
    print(text)


def _engine(name: str) -> produced.Engine:
    if name == "podman" or name == "docker":
        return name
    raise LaunchError(f"--engine {name}", "podman or docker")


@image_app.command("build")
def image_build(
    wheel: Annotated[Path, typer.Option(help="The fork's wheel (python -m fork wheel).")],
    base: Annotated[
        str, typer.Option(help="NAME@sha256:DIGEST with what the wheel requires, CUDA included.")
    ],
    engine: EngineName = "podman",
    name: Annotated[str, typer.Option(help="Repository name.")] = "localhost/vllm-sm120",
    images: ImagesFile = _IMAGES,
    wheels: Annotated[
        Path | None, typer.Option(help="A folder of wheels that the base image lacks.")
    ] = None,
    dockerfile: Annotated[Path, typer.Option(help="docker/Dockerfile of the checkout.")] = Path(
        "docker/Dockerfile"
    ),
    revision: Annotated[
        str | None, typer.Option(help="Source revision; git's if not given.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Passed on to `build`, for instance --isolation=…")
    ] = None,
    as_json: Json = False,
) -> None:
    """Build an image from a wheel, without network, and add its row to the images file.

    The image's platform is the wheel's. Prints its size, and how much that is over the base.
    """
    build = Build(
        engine=_engine(engine),
        base=base,
        wheel=wheel,
        name=name,
        dockerfile=dockerfile,
        revision=revision or _git_revision(dockerfile.parent),
        wheels=wheels,
        options=tuple(option or ()),
    )
    row = build.run(images, _stream)
    if sizes := build.sizes():
        base_mib, built_mib = (size / 2**20 for size in sizes)
        over = f"{built_mib - base_mib:.0f} MiB over the base's {base_mib:.0f} MiB"
        err.print(f"size: {built_mib:.0f} MiB, {over}", highlight=False, soft_wrap=True)
    _say_row(row, as_json)


@image_app.command("record")
def image_record(
    reference: Annotated[str, typer.Argument(help="An image that this host's engine has.")],
    engine: EngineName = "podman",
    images: ImagesFile = _IMAGES,
    as_json: Json = False,
) -> None:
    """Add a row for an image that is here already: pulled, or built elsewhere."""
    command = shlex.join(["sm120-launch", "image", "record", "--engine", engine, reference])
    row = produced.record(_engine(engine), reference, command)
    produced.append(images, row)
    _say_row(row, as_json)


@image_app.command("check")
def image_check(
    images: ImagesFile = _IMAGES,
    engine: Annotated[str | None, typer.Option(help="Only this engine's rows.")] = None,
    platform: Annotated[str | None, typer.Option(help="Only rows of this platform.")] = None,
    as_json: Json = False,
) -> None:
    """Whether this host's engines have the images that the rows name. Exit 1 if one lacks.

    Of rows with one key, platform and engine, the last counts.
    """
    if engine is not None:
        _engine(engine)
    latest = {(r.runtime_key, r.platform, r.engine): r for r in produced.load(images)}
    rows = [
        r for r in latest.values() if engine in (None, r.engine) and platform in (None, r.platform)
    ]
    if not rows:
        raise LaunchError(f"{images}: no row to check", "", "Build or record an image first.")
    found = [(row, produced.check(row)) for row in rows]
    if as_json:
        print(json.dumps([{**r.model_dump(), "wrong": wrong} for r, wrong in found], indent=1))
    else:
        table = Table()
        for column in ("runtime key", "platform", "engine", "image", "here"):
            table.add_column(column, overflow="fold")
        for row, wrong in found:
            here = f"[red]{escape(wrong)}[/]" if wrong else "[green]yes[/]"
            key, reference = row.runtime_key[:16], row.image.reference
            table.add_row(key, row.platform, row.engine, reference, here)
        out.print(table)
    if any(wrong for _, wrong in found):
        raise typer.Exit(EXIT_NO)


def _say_row(row: produced.Row, as_json: bool) -> None:
    print(json.dumps(row.model_dump(), indent=1) if as_json else row.image.reference)
    where = f"runtime key {row.runtime_key[:16]}, {row.platform}, {row.engine}"
    err.print(f"recorded: {where}", highlight=False, soft_wrap=True)


def _stream(command: Sequence[str]) -> int:
    err.print(escape(shlex.join(command)), highlight=False, soft_wrap=True)
    try:
        # What programs read from our standard output is the reference alone.
        return subprocess.run(command, stdout=sys.stderr, check=False).returncode
    except FileNotFoundError:
        raise LaunchError(f"{command[0]} is not on PATH", "", "Install it.") from None


def _git_revision(folder: Path) -> str:
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def main() -> None:
    """Runs the command; a refusal is one message and exit 2, not a traceback."""
    try:
        app()
    except LaunchError as error:
        _fail(str(error))
    except OSError as error:
        where = f": {error.filename}" if error.filename is not None else ""
        _fail(f"{error.strerror}{where}" if error.strerror else str(error))


def _fail(message: str) -> None:
    err.print(f"[red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main()
