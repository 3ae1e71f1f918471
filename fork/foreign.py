# SPDX-License-Identifier: Apache-2.0
"""A foreign member: a user's own unified diff, placed before the fork's patches.

    python -m fork apply PATH --foreign engram_a=a.diff --foreign engram_b=b.diff

Git applies it, with its own strictness: every context line must match. A patched tree
carries the diff (``FOLDER``), so that it can be checked and taken out without it.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.version import Version

import patches
from fork import ForkError, recipe
from fork.edits import State
from fork.git import GitError, git
from fork.patch import Standing, Verdict
from fork.tree import Overlay, Tree

FOLDER = "vllm/sm120_foreign"
"""Where a patched tree carries the foreign members' diffs."""

# Lines of a file's header between `diff --git` and its first hunk (git-diff(1)): a commit
# message may say anything, and stands before the first one or after a hunk.
_HEADER = (
    *(b"old mode ", b"new mode ", b"deleted file mode ", b"new file mode "),
    *(b"copy from ", b"copy to ", b"rename from ", b"rename to "),
    *(b"similarity index ", b"dissimilarity index ", b"index "),
)
_ESCAPE = re.compile(rb'\\([0-3][0-7]{2}|["\\abfnrtv])')
_ESCAPED = dict(zip(b'"\\abfnrtv', b'"\\\a\b\f\n\r\t\v', strict=True))


class DoesNotApply(Exception):
    """Git refuses the diff on this tree; the text says why, a line a reason."""


@dataclass(frozen=True)
class Foreign:
    """One foreign member.

    Attributes:
        name: its name in the recipe.
        data: the diff.
    """

    name: str
    data: bytes

    @property
    def carried(self) -> str:
        """Where a patched tree has the diff."""
        return f"{FOLDER}/{self.name}.diff"

    def digest(self, base: Version) -> str:
        """SHA-256 over ``{"diff": <SHA-256 of its bytes>}`` in canonical form: it is the
        same on every base. The form is documented in docs/recipe.md."""
        del base
        content = {"diff": hashlib.sha256(self.data).hexdigest()}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Every file that it reads or writes.

        Raises:
            ForkError: it is no unified diff, or touches what no wheel has.
        """
        with tempfile.TemporaryDirectory() as scratch:
            _init(Path(scratch))
            try:
                listing = git(Path(scratch), "apply", "--numstat", "-z", "-", stdin=self.data)
            except GitError as error:
                raise ForkError(
                    f"foreign member {self.name} is not a unified diff: {error.said}. "
                    "Make it with `git diff`."
                ) from None
        found = [entry.split(b"\t", 2)[2] for entry in listing.split(b"\0") if entry]
        found += _named(self.data, b"rename from ")
        if copied := _named(self.data, b"copy from "):
            raise ForkError(
                f"foreign member {self.name} copies {copied[0].decode(errors='replace')}, which "
                "git cannot undo. Make the diff without --find-copies."
            )
        paths = sorted({path.decode("utf-8", "surrogateescape") for path in found})
        ours = (recipe.PATH, f"{FOLDER}/")
        wrong = [
            p
            for p in paths
            if not p.startswith("vllm/") or p.startswith(ours) or ".." in p.split("/")
        ]
        if wrong:
            raise ForkError(
                f"foreign member {self.name} touches {', '.join(wrong[:3])}: only files that a "
                "wheel has under vllm/ can be edited. Give a diff of those alone, with git's "
                "a/ and b/ before the paths."
            )
        return tuple(paths)

    def changes(self, tree: Tree, to: State) -> dict[str, bytes | None]:
        """What it writes to bring ``tree`` to applied, or back to pending.

        Raises:
            DoesNotApply: it does not fit.
            ForkError: see ``paths``; or it makes links or executable files.
        """
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch)
            _init(root)
            for path in self.paths:
                if (data := tree.read(path)) is not None:
                    (root / path).parent.mkdir(parents=True, exist_ok=True)
                    (root / path).write_bytes(data)
            back = [] if to is State.APPLIED else ["--reverse"]
            try:
                git(root, "apply", "--whitespace=nowarn", *back, "-", stdin=self.data)
            except GitError as error:
                lines = [x.removeprefix("error: ") for x in error.said.splitlines()]
                raise DoesNotApply("\n".join(lines)) from None
            return {path: self._result(root / path) for path in self.paths}

    def _result(self, file: Path) -> bytes | None:
        if not file.is_symlink() and not file.exists():
            return None
        if file.is_symlink() or not file.is_file() or file.stat().st_mode & 0o111:
            raise ForkError(
                f"foreign member {self.name} makes {file.name} a link or executable: a wheel "
                "keeps contents alone. Give a diff without file modes other than 100644."
            )
        return file.read_bytes()

    def examine(self, tree: Tree, ours: bool) -> Standing:
        """The verdict on ``tree``, which has the members before it and none after it.

        Args:
            ours: whether the tree's recipe says that the fork applied it.
        """
        try:
            there = {to: self._fits(tree, to) for to in (State.APPLIED, State.PENDING)}
        except ForkError as error:
            return Standing(Verdict.DRIFT, (str(error),))
        if ours:
            why = there[State.PENDING]
            return Standing(Verdict.DRIFT if why else Verdict.APPLIED, why)
        if not there[State.APPLIED]:
            return Standing(Verdict.PENDING)
        if not there[State.PENDING]:
            reason = "the tree has its changes, and no recipe says that the fork made them"
            return Standing(Verdict.UPSTREAM, (reason,))
        return Standing(Verdict.DRIFT, there[State.APPLIED])

    def _fits(self, tree: Tree, to: State) -> tuple[str, ...]:
        """Why it cannot be brought there and back again; nothing where it can."""
        back = State.PENDING if to is State.APPLIED else State.APPLIED
        try:
            written = self.changes(tree, to)
            undone = self.changes(Overlay(tree, written), back)
        except DoesNotApply as error:
            return tuple(str(error).splitlines())
        lost = [path for path in self.paths if undone[path] != tree.read(path)]
        return tuple(f"{path}: undoing the diff gives other bytes" for path in lost)


def _named(diff: bytes, what: bytes) -> list[bytes]:
    """The paths that headers of the diff give after ``what``."""
    found, header = [], False
    for line in diff.split(b"\n"):
        header = line.startswith(b"diff --git ") or (header and line.startswith(_HEADER))
        if header and line.startswith(what):
            found.append(_unquoted(line.removeprefix(what).removesuffix(b"\r")))
    return found


def _unquoted(path: bytes) -> bytes:
    """A path as git quotes it where it has bytes other than plain ASCII's."""
    if not (len(path) > 1 and path.startswith(b'"') and path.endswith(b'"')):
        return path

    def byte(escape: "re.Match[bytes]") -> bytes:
        said = escape[1]
        return bytes([_ESCAPED[said[0]] if len(said) == 1 else int(said, 8)])

    return _ESCAPE.sub(byte, path[1:-1])


def _init(folder: Path) -> None:
    git(folder, "init", "--quiet", "--template=")


def load(given: Iterable[str]) -> list[Foreign]:
    """Foreign members from ``NAME=PATH`` each, in order.

    Raises:
        ForkError: not of that form, a name that is taken, no such file, or not a diff of
            files under vllm/.
    """
    found: list[Foreign] = []
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not re.fullmatch(r"[a-z0-9_]+", name):
            raise ForkError(
                f"--foreign {text!r}: give NAME=PATH, the name of small letters, digits and _."
            )
        if name in patches.SERIES or name in {f.name for f in found}:
            raise ForkError(f"--foreign {text!r}: the name {name} is taken. Give another.")
        try:
            found.append(Foreign(name, Path(path).expanduser().read_bytes()))
        except OSError as error:
            raise ForkError(f"--foreign {text!r}: {error.strerror}. Check the path.") from None
        _ = found[-1].paths
    return found


def carried_by(tree: Tree) -> list[Foreign]:
    """The foreign members that the tree's recipe lists, in order, from the tree itself.

    Raises:
        ForkError: one is not what the recipe lists.
    """
    found = recipe.carried_by(tree)
    out = []
    for member in found["recipe"]["members"] if found else ():
        data = tree.read(f"{FOLDER}/{member['name']}.diff")
        if data is None:
            continue
        out.append(Foreign(member["name"], data))
        if out[-1].digest(tree.base) != member["sha256"]:
            raise ForkError(
                f"{out[-1].carried} is not what the tree's recipe lists: install vLLM again."
            )
    return out


def label(members: Sequence[object]) -> str:
    """What a wheel's version says of foreign members: "" where there are none, else
    ``.f`` and 8 digits, so that two wheels of one name are one content."""
    found = [m.digest(Version("0")) for m in members if isinstance(m, Foreign)]
    return f".f{hashlib.sha256(' '.join(found).encode()).hexdigest()[:8]}" if found else ""
