# SPDX-License-Identifier: Apache-2.0
"""The rebase table, for people: patch by release, then what each release's row rests on."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_COLOURS = {"pending": "yellow", "applied": "green", "upstream": "cyan", "drift": "red"}


def show(result: dict[str, Any], console: Console) -> None:
    """Prints what ``python -m fork rebase`` found."""
    releases = result["releases"]
    title = "the series on other releases"
    if result["variants_of"]:
        title += f", with the edits of {result['variants_of']} alone"
    table = Table(title=title, title_justify="left")
    table.add_column("patch")
    for release in releases:
        table.add_column(release["version"])
    for rows in zip(*(release["patches"] for release in releases), strict=True):
        table.add_row(rows[0]["name"], *(_cell(row) for row in rows))
    for arm in ("stock", "patched"):
        cells = [_arm(release[arm]) for release in releases]
        if any(cells):
            table.add_row(arm, *cells)
    console.print(table)
    if releases[0]["patched"]:
        console.print(
            "Level of evidence: planned by each release on this CPU; the libraries' own rules."
        )
    for release in releases:
        _release(release, console)


def _cell(row: dict[str, Any]) -> str:
    cell = f"[{_COLOURS[row['verdict']]}]{row['verdict']}[/]"
    edits = [e for e in row["edits"] if not e["edit"].endswith(": new module")]
    if moved := sum(e["state"] == "drift" for e in edits):
        cell += f" {moved} of {len(edits)}"
    if not row["declared"] and row["variant"]:
        cell += f", tried {row['variant']}"
    if row["without"]:
        cell += "\nneeded" if row["without"]["needed"] else "\n[cyan]not needed, by rule[/]"
    return cell


def _arm(arm: dict[str, Any] | None) -> str:
    if arm is None:
        return ""
    if "error" in arm["cases"]:
        return "[red]the self-test died[/]"
    cases = [f"{name}: {case['line']}" for name, case in arm["cases"].items()]
    plan = arm["plan"]
    if "error" in plan:
        return escape("\n".join([*cases, "vLLM plans nothing"]))
    kinds: dict[str, list[str]] = {}
    for row in plan["specs"]:
        mark = "" if row["legal"] else "!"
        kinds.setdefault(row["layer_kind"], []).append(f"{row['states']}{mark}")
    pages = ", ".join(f"{kind} {'/'.join(states)}" for kind, states in kinds.items())
    cost = f"{plan['bytes_per_token']:.0f} B a token, {len(plan['groups'])} groups"
    return escape("\n".join([*cases, pages, cost]))


def _release(release: dict[str, Any], console: Console) -> None:
    lines = []
    for row in release["patches"]:
        lines += [f"{row['name']}: {row['verdict']}: {why}" for why in _why(row)]
        lines += _without(row)
        if (followed := row.get("followed")) and (followed["added"] or followed["dropped"]):
            lines.append(
                f"{row['name']}: followed by the variant for {followed['variant']}: "
                f"{len(followed['added'])} edits new, {len(followed['dropped'])} gone (--json)"
            )
    lines += [f"PROBLEM: {problem}" for problem in release["problems"]]
    head = f"\nvLLM {release['version']}, FlashInfer {release['flashinfer']}"
    console.print(f"{head}: {'clean' if release['clean'] else 'NOT clean'}, {release['seconds']} s")
    for line in lines:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _why(row: dict[str, Any]) -> list[str]:
    """Every drifted edit with what was found, or else the verdict's own reasons."""
    found = [
        f"{edit['edit']}: {edit['found']}" + _now_in(edit["now_in"])
        for edit in row["edits"]
        if edit["state"] == "drift"
    ]
    return found or row["why"]


def _now_in(files: list[str]) -> str:
    return f" (now in {', '.join(files)}?)" if files else ""


def _without(row: dict[str, Any]) -> list[str]:
    without = row["without"]
    if not without:
        return []
    name = f"without {row['name']}"
    if without["needed"]:
        return [f"{name}: {why}" for why in without["why"]]
    differs = "; ".join(without["differs"]) or "64 states everywhere"
    return [f"{name}: every case passes, and no byte more a token. Its pages: {differs}"]
