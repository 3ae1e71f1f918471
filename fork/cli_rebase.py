# SPDX-License-Identifier: Apache-2.0
"""``python -m fork rebase``."""

from pathlib import Path
from typing import Annotated

import typer

from fork import ROOT, index, pin, series


def rebase(
    versions: Annotated[
        list[str] | None, typer.Argument(help="Releases of upstream, e.g. 0.34.0.")
    ] = None,
    latest: Annotated[
        bool, typer.Option("--latest", help="The newest release that the package index has.")
    ] = False,
    tree: Annotated[
        Path | None,
        typer.Option(help="A nightly's wheel, an unpacked one, or a built source checkout."),
    ] = None,
    variants_of: Annotated[
        str | None,
        typer.Option(
            metavar="BASE", help="Try the edits meant for this base: what has changed since."
        ),
    ] = None,
    text_only: Annotated[
        bool, typer.Option("--text-only", help="Verdicts alone, in seconds: nothing is run.")
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the result here; '-' is standard output.")
    ] = None,
    write: Annotated[
        bool,
        typer.Option(
            "--write",
            help="Move the pin, hashes and ranges of bases, and note it in CHANGELOG.md. "
            "Refused, with nothing written, where a release is not clean.",
        ),
    ] = False,
) -> None:
    """Replay the series on other releases, in scratch copies, and say what has changed.

    For each patch the verdict, edit by edit; what that release plans and what the
    self-test's cases say, stock and patched; and which patches it no longer needs, by
    leaving each out. Exit 0: all clean. 1: drift, an unknown kind of cache or compress
    ratio, a case that does not pass, or refused. 2: bad input.
    """
    from fork import cli, follow, rebase, rebase_table

    if sum([bool(versions), latest, tree is not None]) != 1:
        raise typer.BadParameter("give releases, or --latest, or --tree: one of the three")
    if write and (tree is not None or variants_of is not None or text_only):
        raise typer.BadParameter(
            "--write is for releases of the index, with their own edits, all of it run"
        )
    the_pin = pin.load()
    if variants_of is not None and variants_of not in the_pin.bases:
        raise typer.BadParameter(f"--variants-of {variants_of}: one of {', '.join(the_pin.bases)}")
    results, found = [], {}
    with cli.err.status("asking the package index") as spinner:
        if latest:
            versions = [str(index.releases()[-1])]
        for version in dict.fromkeys(versions or [None]):
            try:
                if version is None:
                    upstream, base = rebase.tree_at(tree, the_pin)
                else:
                    upstream, base = rebase.wheel_of(the_pin, version)
                    found[upstream.version] = base
            except (index.NotOnIndex, rebase.NotATree) as error:
                raise typer.BadParameter(str(error)) from None
            spinner.update(f"replaying on {version or tree}")
            run = not text_only
            results.append(
                rebase.replay(
                    upstream, base, series.members(), variants_of, run, say=spinner.update
                )
            )
    result = {"schema": rebase.SCHEMA, "variants_of": variants_of, "releases": results}
    cli.give(result, json_path, rebase_table.show)
    if write:
        for path in follow.write(ROOT, the_pin, found, results):
            cli.err.print(f"written: {path}")
    if not all(release["clean"] for release in results):
        raise typer.Exit(1)
