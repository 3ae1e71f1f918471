# SPDX-License-Identifier: Apache-2.0
"""The ordered series of patches on a tree: status, apply, revert, verify.

A user's own diffs (fork/foreign.py) come before the fork's patches, in their order.
"""

from collections.abc import Sequence

import patches
from fork import ForkError, foreign, patch, recipe, record, transaction
from fork.edits import State
from fork.foreign import Foreign
from fork.patch import Patch, Standing, Verdict, load
from fork.pin import Pin
from fork.tree import FolderTree, Overlay, Tree

Member = Patch | Foreign
"""What a series is made of."""


def members(names: Sequence[str] | None = None) -> list[Patch]:
    """The series in its order, or those of it that are named.

    Raises:
        ForkError: a name is not in the series.
    """
    unknown = set(names or ()) - set(patches.SERIES)
    if unknown:
        raise ForkError(
            f"not in the series: {', '.join(sorted(unknown))}. Members: {', '.join(patches.SERIES)}"
        )
    return [load(name) for name in patches.SERIES if names is None or name in names]


def examine(member: Member, tree: Tree, ours: bool) -> Standing:
    """The member's verdict on ``tree``: see ``patch.examine`` and ``Foreign.examine``."""
    if isinstance(member, Foreign):
        return member.examine(tree, ours)
    return patch.examine(member, tree, ours)


def changes(member: Member, tree: Tree, to: State) -> "Changes":
    """What the member writes to bring ``tree`` to applied, or back to pending."""
    if isinstance(member, Foreign):
        return member.changes(tree, to)
    return patch.changes(member, tree, to)


def status(tree: Tree, series: Sequence[Member]) -> dict[str, Standing]:
    """Each patch's standing on ``tree`` as it is.

    A tree that a killed run left half written is drift throughout, and so is one whose
    recipe cannot be read: it would not tell what the fork applied. What comes after
    pending foreign members is judged as if they were applied.
    """
    if why := _unreadable(tree):
        return {member.name: Standing(Verdict.DRIFT, (why,)) for member in series}
    ours, views, overlay = recipe.members_of(tree), _views(tree), Overlay(tree)
    standings = {}
    for member in series:
        view = views.get(member.name, overlay)
        standings[member.name] = examine(member, view, member.name in ours)
        pending = standings[member.name].verdict is Verdict.PENDING
        if isinstance(member, Foreign) and pending:
            overlay.changes |= member.changes(overlay, State.APPLIED)
    return standings


def _views(tree: Tree) -> dict[str, Tree]:
    """For each foreign member that ``tree`` carries, the tree without what came after it:
    a diff's context may have been edited since."""
    diffs = {member.name: member for member in foreign.carried_by(tree)}
    views: dict[str, Tree] = {}
    overlay = Overlay(tree)
    for name in reversed(recipe.members_of(tree) if diffs else []):
        member = diffs.get(name) or load(name)
        if name in diffs:
            views[name] = Overlay(tree, overlay.changes)
        if examine(member, overlay, ours=True).verdict is not Verdict.APPLIED:
            break
        overlay.changes |= changes(member, overlay, State.PENDING)
    return views


def _unreadable(tree: Tree) -> str | None:
    """Why no verdict on the tree can be trusted, or None."""
    if isinstance(tree, FolderTree) and transaction.interrupted(tree.root):
        return "a killed apply or revert left this tree half written: run either to roll back"
    if tree.read(recipe.PATH) is not None and recipe.carried_by(tree) is None:
        return f"{recipe.PATH} is damaged: install vLLM again"
    try:
        foreign.carried_by(tree)
    except ForkError as error:
        return str(error)
    return None


class Drift(ForkError):
    """At least one patch does not fit the tree. Nothing was written."""

    def __init__(self, tree: Tree, standings: dict[str, Standing]) -> None:
        lines = [f"{tree} (vLLM {tree.version}) has drifted; nothing was changed."]
        for name, standing in standings.items():
            if standing.verdict is Verdict.DRIFT:
                lines += [f"  {name}: {reason}" for reason in standing.why]
        lines.append("Compare with the base that the patch declares (CONTRIBUTING, 'Drift').")
        super().__init__("\n".join(lines))


Changes = dict[str, bytes | None]
"""What a step writes: path to new bytes, or to None where the file goes."""


def steps(
    tree: Tree, series: Sequence[Member], to: State = State.APPLIED
) -> tuple[list[tuple[Member, Changes]], dict[str, Standing]]:
    """Each patch that is to be written and its changes, on top of those before it.

    Args:
        to: APPLIED takes the pending patches in order, PENDING the applied ones back
            to front.

    Returns:
        The steps, and every patch's standing before its step.

    Raises:
        Drift: any patch has drifted, or the tree cannot be trusted (``status``).
        ValueError: two patches of the series move each other's edits.
    """
    if _unreadable(tree):
        raise Drift(tree, status(tree, series))
    applies = to is State.APPLIED
    overlay = Overlay(tree)
    ours, views = recipe.members_of(tree), _views(tree) if applies else {}
    standings: dict[str, Standing] = {}
    found: list[tuple[Member, Changes]] = []
    for member in series if applies else reversed(series):
        view = views.get(member.name, overlay)
        standing = standings[member.name] = examine(member, view, member.name in ours)
        if standing.verdict is (Verdict.PENDING if applies else Verdict.APPLIED):
            found.append((member, changes(member, overlay, to)))
            overlay.changes |= found[-1][1]
    if any(s.verdict is Verdict.DRIFT for s in standings.values()):
        raise Drift(tree, standings)
    reached = Verdict.APPLIED if applies else Verdict.PENDING
    for member, _ in found:
        if isinstance(member, Foreign):  # later members may edit a diff's context
            continue
        if examine(member, overlay, ours=applies).verdict is not reached:
            raise ValueError(f"{member.name}: another patch of the series moves its edits")
    return found, standings


def plan_apply(tree: Tree, series: Sequence[Member], pin: Pin) -> Changes:
    """What applying ``series`` writes, recipe included. Nothing is written.

    Patches that are applied, or landed upstream, are left alone. Foreign members that
    the tree carries stay where the series has none.

    Raises:
        Drift: see ``steps``.
        ForkError: the tree is patched, with other foreign members.
    """
    series = _with_carried(tree, series)
    found, standings = steps(tree, series)
    landed = {n for n, s in standings.items() if s.verdict is Verdict.UPSTREAM}
    listed = _ordered(tree, [m for m in series if m.name not in landed], recipe.members_of(tree))
    diffs = {m.carried: m.data for m in listed if isinstance(m, Foreign)}
    return _merged(found) | diffs | {recipe.PATH: _document(pin, listed, tree)}


def plan_revert(tree: Tree, series: Sequence[Member], pin: Pin) -> Changes:
    """What taking ``series`` out again writes. Nothing is written.

    Raises:
        Drift: see ``steps``.
    """
    found, _ = steps(tree, series, State.PENDING)
    gone = {member.name for member in series}
    left = _ordered(tree, [], [n for n in recipe.members_of(tree) if n not in gone])
    diffs = {m.carried: None for m, _ in found if isinstance(m, Foreign)}
    return _merged(found) | diffs | {recipe.PATH: _document(pin, left, tree) if left else None}


def _with_carried(tree: Tree, series: Sequence[Member]) -> list[Member]:
    """``series`` with the tree's own foreign members where it has none.

    Raises:
        ForkError: it has others, and the tree is patched: they would have to go below
            what is there.
    """
    if _unreadable(tree):
        return list(series)  # steps() says so
    given = [member for member in series if isinstance(member, Foreign)]
    there = foreign.carried_by(tree)
    if given and given != there and recipe.members_of(tree):
        names = ", ".join(m.name for m in there) or "none"
        raise ForkError(
            f"{tree} is patched with other foreign members (it has {names}); the given ones go "
            "below the fork's patches. Revert the tree, then apply again."
        )
    return list(series) if given else [*there, *series]


def _merged(found: list[tuple[Member, Changes]]) -> Changes:
    return {path: data for _, written in found for path, data in written.items()}


def _ordered(tree: Tree, given: Sequence[Member], named: Sequence[str]) -> list[Member]:
    """``given`` and the members named, in the series' order; others come before it."""
    known: dict[str, Member] = {member.name: member for member in given}
    diffs = {member.name: member for member in foreign.carried_by(tree)}
    for name in named:
        if name not in known:
            known[name] = diffs.get(name) or load(name)
    place = {name: n for n, name in enumerate(patches.SERIES)}
    return sorted(known.values(), key=lambda m: place.get(m.name, -1))


def _document(pin: Pin, listed: Sequence[Member], tree: Tree) -> bytes:
    return recipe.document(recipe.build(pin, listed, str(tree.base)))


def apply(tree: FolderTree, series: Sequence[Member], pin: Pin) -> list[str]:
    """Applies ``series`` to a folder, all of it or nothing. Returns the paths written."""
    return _write(tree, plan_apply, series, pin)


def revert(tree: FolderTree, series: Sequence[Member], pin: Pin) -> list[str]:
    """Takes ``series`` out of a folder again. Returns the paths written."""
    return _write(tree, plan_revert, series, pin)


def _write(tree: FolderTree, plan, series: Sequence[Member], pin: Pin) -> list[str]:
    pin.of(str(tree.base))
    if tree.version != str(tree.base):
        raise ForkError(
            f"{tree} is vLLM {tree.version}, a built wheel of the fork: its version and "
            f"licence files differ too. Install another wheel instead: vllm=={tree.base}."
        )
    transaction.recover(tree.root)
    written = {p: d for p, d in plan(tree, series, pin).items() if d != tree.read(p)}
    tree.write(written)
    return sorted(written)


def verify(tree: Tree, series: Sequence[Member], pin: Pin) -> list[str]:
    """What is wrong with a tree that should carry the whole series; empty if nothing.

    Every patch applied, the recipe the one of this checkout, RECORD right for every
    file it gives a hash for, and one version in METADATA, folder name and _version.py.
    """
    wrong = []
    for name, standing in status(tree, series).items():
        if standing.verdict is not Verdict.APPLIED:
            wrong.append(f"{name}: {standing.verdict}" + "".join(f"; {w}" for w in standing.why))
    built = recipe.build(pin, series, str(tree.base))
    carried = recipe.carried_by(tree)
    if carried is None:
        wrong.append(f"{recipe.PATH}: missing or damaged")
    elif carried["runtime_key"] != recipe.runtime_key(built):
        wrong.append(
            f"{recipe.PATH}: runtime key {carried['runtime_key'][:16]}, "
            f"this checkout makes {recipe.runtime_key(built)[:16]}"
        )
    if tree.dist_info is None:
        return wrong
    if tree.dist_info != f"vllm-{tree.version}.dist-info":
        wrong.append(f"{tree.dist_info}: METADATA says version {tree.version}")
    if f"'{tree.version}'" not in (tree.read("vllm/_version.py") or b"").decode():
        wrong.append(f"vllm/_version.py: does not say {tree.version}")
    wrong += check_record(tree)
    return wrong


def check_record(tree: Tree) -> list[str]:
    """Files that RECORD lists with another hash or size, or that are missing."""
    listing = tree.read(f"{tree.dist_info}/RECORD")
    if listing is None:
        return ["RECORD: missing"]
    wrong = []
    for path, digest, size in record.rows(listing):
        if not digest:
            continue
        data = tree.read(path)
        if data is None:
            wrong.append(f"{path}: in RECORD, not in the tree")
        elif digest != record.digest(data) or size != str(len(data)):
            wrong.append(f"{path}: its hash or size is not the one in RECORD")
    return wrong
