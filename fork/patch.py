# SPDX-License-Identifier: Apache-2.0
"""A patch: edits of upstream files, new modules, and the verdict on a tree."""

import hashlib
import importlib
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fork import ROOT, ForkError
from fork.edits import Edit, Found, State, splice
from fork.source import NotUnderstood, parsed
from fork.tree import Tree


class Verdict(StrEnum):
    """Where a patch stands on a tree."""

    PENDING = "pending"
    """It applies."""
    APPLIED = "applied"
    """It is there."""
    UPSTREAM = "upstream"
    """Upstream has it, in our form or in one the patch accepts: retire it."""
    DRIFT = "drift"
    """Anything else: stop."""


@dataclass(frozen=True)
class Variant:
    """The edits for one range of bases.

    Attributes:
        bases: a PEP 440 specifier, for instance ``>=0.30,<0.32``.
        edits: all of them, in any order; each stands on its own.
    """

    bases: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Patch:
    """One member of the series.

    Attributes:
        name: the module's name under ``patches/``.
        title: the first line of its docstring, as a commit's subject.
        why: why it is needed.
        upstream: upstream's issues and proposals about the same thing.
        retire: when to remove it.
        test: the command that shows it works.
        variants: edits by range of bases. None means no edits: new modules only.
        modules: new files it brings, as paths in this checkout and in the tree.
        accepted: forms in which upstream may land the same; found, the verdict is
            ``upstream``.
    """

    name: str
    title: str
    why: str
    upstream: str
    retire: str
    test: str
    variants: tuple[Variant, ...] = ()
    modules: tuple[str, ...] = ()
    accepted: tuple[Variant, ...] = ()
    root: Path = field(default=ROOT, compare=False)

    def variant(self, base: Version) -> Variant | None:
        """The variant for ``base``. An empty variant where the patch has no edits."""
        if not self.variants:
            return Variant("", ())
        return _for(self.variants, base)

    def module_bytes(self, path: str) -> bytes:
        """The new module as this checkout has it."""
        return (self.root / path).read_bytes()

    def digest(self, base: Version) -> str:
        """SHA-256 over what the patch does to ``base``: its edits and new modules.

        Comments and docstrings of the patch module do not count; any byte of a new
        module does. The form is documented in docs/recipe.md.
        """
        variant = self.variant(base)
        content = {
            "edits": [edit.content() for edit in variant.edits] if variant else None,
            "modules": {p: _sha256(self.module_bytes(p)) for p in self.modules},
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return _sha256(text.encode("utf-8"))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _for(variants: tuple[Variant, ...], base: Version) -> Variant | None:
    found = [v for v in variants if SpecifierSet(v.bases).contains(base, prereleases=True)]
    if len(found) > 1:
        raise ValueError(f"two variants for {base}: {found[0].bases} and {found[1].bases}")
    return found[0] if found else None


@dataclass(frozen=True)
class Finding:
    """One edit or module of a patch, as found on a tree."""

    what: str
    found: Found
    edit: Edit | None = None


@dataclass(frozen=True)
class Standing:
    """A patch's verdict on a tree, and what led to it.

    Attributes:
        verdict: see ``Verdict``.
        why: for drift and upstream, one line a reason.
        findings: every edit and module.
    """

    verdict: Verdict
    why: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


def examine(patch: Patch, tree: Tree, ours: bool) -> Standing:
    """The verdict on ``tree``.

    Args:
        ours: whether the tree's recipe says that this fork applied the patch. The
            patch's form without it means that upstream landed the same.
    """
    variant = patch.variant(tree.base)
    if variant is None:
        declared = ", ".join(v.bases for v in patch.variants)
        reason = f"no variant for base {tree.base}; the patch declares {declared}"
        return _landed(patch, tree) or Standing(Verdict.DRIFT, (reason,))

    findings = [Finding(e.describe(), _find(tree, e), e) for e in variant.edits]
    findings += [Finding(f"{p}: new module", _module(patch, tree, p)) for p in patch.modules]
    states = {f.found.state for f in findings}
    parts = tuple(findings)
    if states == {State.PENDING}:
        return _landed(patch, tree) or Standing(Verdict.PENDING, (), parts)
    if states == {State.APPLIED}:
        if ours:
            return Standing(Verdict.APPLIED, (), parts)
        reason = "the tree has this patch's form, and no recipe says that the fork put it there"
        return Standing(Verdict.UPSTREAM, (reason,), parts)
    if landed := _landed(patch, tree):
        return landed
    drifted = [f for f in findings if f.found.state is State.DRIFT]
    why = [f"{f.what}: {f.found.why}" for f in drifted]
    if not drifted:
        why = ["half-landed:"] + [f"{f.what}: {f.found.state}" for f in findings]
    return Standing(Verdict.DRIFT, tuple(why), parts)


def _find(tree: Tree, edit: Edit) -> Found:
    data = tree.read(edit.file)
    if data is None:
        return Found(State.DRIFT, why="no such file")
    try:
        return edit.find(parsed(data))
    except NotUnderstood as error:
        return Found(State.DRIFT, why=f"its syntax is not understood: {error}")


def _module(patch: Patch, tree: Tree, path: str) -> Found:
    data = tree.read(path)
    if data is None:
        return Found(State.PENDING)
    if data == patch.module_bytes(path):
        return Found(State.APPLIED)
    return Found(State.DRIFT, why="a file of that name is there with other contents")


def _landed(patch: Patch, tree: Tree) -> Standing | None:
    for form in patch.accepted:
        if not SpecifierSet(form.bases).contains(tree.base, prereleases=True):
            continue
        if all(_find(tree, edit).state is State.APPLIED for edit in form.edits):
            reason = "; ".join(edit.describe() for edit in form.edits)
            return Standing(Verdict.UPSTREAM, (f"accepted form: {reason}",))
    return None


def changes(patch: Patch, tree: Tree, to: State) -> dict[str, bytes | None]:
    """What ``patch`` writes to bring ``tree`` to applied, or back to pending.

    Every result is checked: the edits are found in the wanted state, and undoing
    them gives the bytes that were there.

    Raises:
        ValueError: an edit of the patch cannot be undone, or two of them overlap:
            the patch itself is wrong.
    """
    variant = patch.variant(tree.base)
    assert variant is not None, "examine() comes first"
    out: dict[str, bytes | None] = {}
    for file in dict.fromkeys(edit.file for edit in variant.edits):
        data = tree.read(file)
        assert data is not None
        edits = [edit for edit in variant.edits if edit.file == file]
        new = _spliced(data, edits)
        states = {edit.find(parsed(new)).state for edit in edits}
        if states != {to} or _spliced(new, edits) != data:
            raise ValueError(f"{patch.name}: its edits of {file} cannot be undone")
        out[file] = new
    for path in patch.modules:
        out[path] = patch.module_bytes(path) if to is State.APPLIED else None
    return out


def _spliced(data: bytes, edits: list[Edit]) -> bytes:
    source = parsed(data)
    return splice(data, [s for edit in edits for s in edit.find(source).splices])


_SECTIONS = ("Why", "Upstream", "Retire", "Test")


def load(name: str) -> Patch:
    """The patch that module ``patches.<name>`` describes.

    The module's docstring has a title and the sections Why, Upstream, Retire and
    Test; the module may define ``VARIANTS``, ``MODULES`` and ``ACCEPTED``.

    Raises:
        ForkError: no such patch, or a section is missing.
    """
    if not re.fullmatch(r"[a-z0-9_]+", name) or not (ROOT / "patches" / f"{name}.py").is_file():
        raise ForkError(f"no patch is called {name!r}: see patches/__init__.py")
    module = importlib.import_module(f"patches.{name}")
    title, sections = _sections(inspect.getdoc(module) or "")
    missing = [s for s in _SECTIONS if not sections.get(s)]
    if missing:
        raise ForkError(f"patches/{name}.py: its docstring lacks {', '.join(missing)}")
    return Patch(
        name=name,
        title=title,
        why=sections["Why"],
        upstream=sections["Upstream"],
        retire=sections["Retire"],
        test=sections["Test"],
        variants=getattr(module, "VARIANTS", ()),
        modules=getattr(module, "MODULES", ()),
        accepted=getattr(module, "ACCEPTED", ()),
    )


def _sections(doc: str) -> tuple[str, Mapping[str, str]]:
    title, _, rest = doc.partition("\n")
    parts = re.split(rf"^({'|'.join(_SECTIONS)}): *", rest, flags=re.MULTILINE)
    return title.strip(), dict(zip(parts[1::2], (p.strip() for p in parts[2::2]), strict=True))
