# SPDX-License-Identifier: Apache-2.0
"""The series on another release of upstream: verdicts, and what the release itself does.

Text says where each edit stands; behaviour says which patches are still needed: the
self-test's cases and the release's own planning, stock, patched, and with one patch left out
(fork/trial.py). A form of upstream's that no patch lists shows in behaviour alone.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.version import Version

import patches
from fork import ForkError, fetch, geometry, index, recipe
from fork.edits import Edit, State
from fork.patch import Finding, Patch, Standing, Variant, Verdict, examine
from fork.pin import DEEP_GEMM_INIT, BasePin, Pin
from fork.tree import Tree, WheelTree, open_tree
from fork.trial import trial

SCHEMA = 1

_STATES = 64
"""States in every page of the fork's (sm120_page_geometry.py, STATES_PER_PAGE)."""

_ANY_SHAPE = "sm120_sparse_mla"

SAFE = "text-only safe"
"""The case that must pass once the series is applied (fork/probe.py)."""


class NotATree(ForkError):
    """What was given as a tree cannot be replayed on."""


def wheel_of(the_pin: Pin, version: str) -> tuple[WheelTree, BasePin]:
    """A release's wheel, and its pin: UPSTREAM.toml's, or else looked up on the index.

    Raises:
        index.NotOnIndex: no such release.
        ForkError: see ``fetch.wheel`` and ``index.base_pin``.
    """
    found = the_pin.bases.get(version) or index.base_pin(version)
    wheel = found.wheels.get(fetch.machine()) or found.wheels["x86_64"]
    return WheelTree(fetch.wheel("vllm", version, wheel)), found


def tree_at(path: Path, the_pin: Pin) -> tuple[Tree, BasePin]:
    """A nightly or a built source checkout, and what it requires.

    Raises:
        NotATree: nothing of the kind, no version, no one FlashInfer, or patched already.
    """
    try:
        tree = open_tree(path)
        _ = tree.base
        if tree.read(recipe.PATH) is not None:
            raise ForkError(f"{tree} carries the fork already. Give upstream's own tree.")
        return tree, _requires(tree, the_pin)
    except ForkError as error:
        raise NotATree(str(error)) from None


def _requires(tree: Tree, the_pin: Pin) -> BasePin:
    metadata = (tree.read(f"{tree.dist_info}/METADATA") if tree.dist_info else None) or b""
    lines = re.findall(r"^Requires-Dist: (.+)$", metadata.decode(), re.MULTILINE)
    listed = (tree.read("requirements/cuda.txt") or b"").decode()  # a source checkout
    lines += re.findall(r"^flashinfer-python==[^\s#]+", listed, re.MULTILINE)
    required = index.requirements(lines)
    flashinfer = index.exact(required, "flashinfer-python")
    known = {b.flashinfer: b.flashinfer_wheel for b in the_pin.bases.values()}
    return BasePin(
        flashinfer=flashinfer,
        torch=str(required.get("torch", "")),
        transformers=str(required.get("transformers", "")),
        deep_gemm=index.deep_gemm_version(tree.read(DEEP_GEMM_INIT) or b""),
        wheels={},
        flashinfer_wheel=known.get(flashinfer) or index.flashinfer_wheel(flashinfer),
    )


def replay(
    tree: Tree,
    base_pin: BasePin,
    members: Sequence[Patch],
    variants_of: str | None = None,
    run: bool = True,
    argv: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """One release's row of the rebase table.

    Args:
        tree: upstream as it is; never written.
        members: the series.
        variants_of: try the edits that are meant for this base, whatever ``tree`` is.
        run: also run the arms; False is text alone, which needs no vLLM.
        argv: what is planned; ``geometry.default_argv()`` if None.

    Returns:
        ``{"version", "tree", "flashinfer", "patches": [...], "stock", "patched",
        "problems": [...], "clean", "seconds"}``. ``patches`` has a row a member; arms are
        as ``Trial.arm`` gives them, null without ``run``.

    Raises:
        ForkError: a child died.
    """
    started = time.monotonic()
    tried = {m.name: _tried(m, tree.base, variants_of) for m in members}
    standings = {name: examine(member, tree, ours=False) for name, member in tried.items()}
    rows = [_row(m, tried[m.name], standings[m.name], tree, variants_of) for m in members]
    result: dict[str, Any] = {
        "version": tree.version,
        "tree": str(tree),
        "flashinfer": base_pin.flashinfer,
        "patches": rows,
        "stock": None,
        "patched": None,
    }
    drifted = [name for name, s in standings.items() if s.verdict is Verdict.DRIFT]
    problems = [f"{name} has drifted" for name in drifted]
    if run:
        fitting = [m for n, m in tried.items() if standings[n].verdict is Verdict.PENDING]
        with trial(tree, base_pin, argv or geometry.default_argv()) as arms:
            wanted = {"stock": [m for m in fitting if not m.variants], "patched": fitting}
            wanted |= {m.name: _others(m, fitting) for m in members if m.name not in patches.CHECKS}
            found = arms.arms(wanted, say)
        result |= {"stock": found["stock"], "patched": found["patched"]}
        # The kernel for every shape would pass what the other patches are needed for: they are
        # tried, and compared, without it.
        plain = found.get(_ANY_SHAPE, found["patched"])
        for row in rows:
            if (name := row["name"]) in found:
                patched = found["patched"] if name == _ANY_SHAPE else plain
                row["without"] = _without(row, found[name], found["stock"], patched)
        problems += _problems(result)
    result |= {"problems": problems, "clean": not problems}
    return result | {"seconds": round(time.monotonic() - started, 1)}


def _tried(member: Patch, base: Version, variants_of: str | None) -> Patch:
    """The patch with the one variant that is tried, declared for every base."""
    if not member.variants:
        return member
    variant = member.variant(Version(variants_of) if variants_of else base)
    if variant is None and variants_of:
        raise ForkError(f"{member.name} has no variant for base {variants_of}")
    edits = (variant or member.variants[-1]).edits
    return replace(member, variants=(Variant(">=0", edits),))


def _row(
    member: Patch, tried: Patch, standing: Standing, tree: Tree, variants_of: str | None
) -> dict[str, Any]:
    edits = tried.variants[0].edits if tried.variants else ()
    own = member.variant(tree.base)
    used = next((v.bases for v in member.variants if v.edits == edits), None)
    row: dict[str, Any] = {
        "name": member.name,
        "verdict": standing.verdict,
        "why": list(standing.why),
        "upstream": " ".join(member.upstream.split()),
        "variant": used,
        "declared": own is not None,
        "edits": [_edit(f, tree) for f in standing.findings],
        "without": None,
    }
    if variants_of and own is not None:
        row["followed"] = {
            "variant": own.bases,
            "added": [e.describe() for e in own.edits if e not in edits],
            "dropped": [e.describe() for e in edits if e not in own.edits],
        }
    return row


def _edit(finding: Finding, tree: Tree) -> dict[str, Any]:
    found = finding.found
    moved = finding.edit is not None and found.state is State.DRIFT
    return {
        "edit": finding.what,
        "state": found.state,
        "found": found.why,
        "now_in": _elsewhere(finding.edit, found.why, tree) if moved else [],
    }


def _elsewhere(edit: Edit, why: str, tree: Tree) -> list[str]:
    """Other files that define what an edit did not find in its own."""
    missing = re.search(r"class or function '(\w+)'.*found none|function '(\w+)', found none", why)
    name = (
        edit.scope.split(".")[0]
        if why == "no such file"
        else missing and (missing[1] or missing[2])
    )
    if not name:
        return []
    definition = re.compile(rb"^[ \t]*(?:class|def) " + name.encode() + rb"\b", re.MULTILINE)
    files = (n for n in tree.names() if n.endswith(".py") and n != edit.file)
    return [n for n in files if definition.search(tree.read(n) or b"")][:5]


def _others(member: Patch, fitting: Sequence[Patch]) -> list[Patch]:
    """Every member but this one, and but what would hide what upstream plans and what the
    libraries refuse: the start-up check and the kernel for every shape."""
    left_out = (member.name, "sm120_page_geometry_check", _ANY_SHAPE)
    return [m for m in fitting if m.name not in left_out]


def _without(
    row: dict[str, Any], without: dict[str, Any], stock: dict[str, Any], patched: dict[str, Any]
) -> dict[str, Any]:
    """Whether a patch is needed, by what this release does with the others alone."""
    fits = row["verdict"] == Verdict.PENDING
    reference = patched if fits else stock
    needed = _worse(without, patched if fits else None)
    plan, other = without["plan"], reference["plan"]
    if "error" not in plan and "error" not in other:
        cost, usual = plan["bytes_per_token"], other["bytes_per_token"]
        if cost > usual * 1.001:
            than = "with it" if fits else "stock"
            needed.append(f"{cost:.0f} B per token of context, {than} {usual:.0f}")
    return {
        "needed": bool(needed),
        "why": needed,
        # Legal or not, these are not the pages that the fork proves.
        "differs": [_page(r) for r in plan.get("specs", ()) if r["states"] != _STATES],
    }


def _worse(arm: dict[str, Any], reference: dict[str, Any] | None) -> list[str]:
    """What is wrong with an arm, beyond what is wrong with the reference."""
    wrong = []
    cases = arm["cases"]
    if "error" in cases:
        wrong.append(f"the self-test died: {cases['error']}")
    for name, case in cases.items() if "error" not in cases else ():
        known = reference["cases"].get(name, {}).get("gates", []) if reference else []
        if case["verdict"] != "PASS" and (name == SAFE or reference):
            more = sorted(set(case["gates"]) - set(known))
            if more or case["verdict"] == "NOT_RUN":
                wrong.append(f"{name}: {case['line']}")
    return wrong + _plan_problems(arm["plan"])


def _plan_problems(plan: dict[str, Any]) -> list[str]:
    if "error" in plan:
        return [f"vLLM plans nothing: {' '.join(plan['error'].split())[:1000]}"]
    refused = [f"{_page(r)}: {r['refused_by']}" for r in plan["specs"] if not r["legal"]]
    return refused + list(plan["problems"])


def _problems(result: dict[str, Any]) -> list[str]:
    """What must not slip through, whatever the text says."""
    ratios = result["stock"]["ratios"]
    if isinstance(ratios, dict):
        found = [f"which compress ratios it builds was not to be seen: {ratios['error']}"]
    else:
        found = [f"it builds layers of compress ratio {r}, unknown to the fork" for r in ratios]
    return found + [f"patched: {line}" for line in _worse(result["patched"], None)]


def _page(row: dict[str, Any]) -> str:
    return f"{row['layer_kind']}, ratio {row['tokens_per_state']}: {row['states']} states a page"
