# SPDX-License-Identifier: Apache-2.0
"""The delta as git sees it: a unified diff, a branch, a format-patch series.

    diff(tree, series)            one diff of the whole series
    branch(tree, series, folder)  a repository: upstream, then one commit a patch
    export(tree, series, folder)  0001-….patch, 0002-….patch, …

Git makes all three, so a diff here is git's own. The same tree and series give the
same bytes and commit ids, whatever the user's git is configured to do. The recipe
(vllm/sm120_recipe.json) is in none of them: it belongs to patched trees.
"""

import os
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from fork import ForkError, recipe
from fork.git import git
from fork.patch import Patch
from fork.series import Changes
from fork.series import steps as series_steps
from fork.tree import Tree

UPSTREAM = "upstream"
"""The branch that holds the tree as it was given."""

SM120 = "sm120"
"""The branch that holds the series on top of it."""

_TEXT = (".py", ".pyi", ".json", ".toml", ".txt", ".md", ".cu", ".cuh", ".h", ".cpp", ".jinja")
# Nobody's name and the first second of 2000: a commit id depends on both.
_IDENTITY = b"vLLM for SM12x <sm120@example.invalid> 946684800 +0000"
# Git shortens ids by the size of the repository; and `patch` does not know copies.
_DIFF = ("--full-index", "--no-renames")


def diff(tree: Tree, series: Sequence[Patch]) -> str:
    """What ``series`` does to ``tree``, as one unified diff; "" where that is nothing.

    For ``git apply`` and ``patch -p1``. Line ends are the files' own: write the text
    with ``newline=""``.

    Raises:
        Drift: any patch has drifted.
        ForkError: git is missing or failed.
    """
    steps, _ = series_steps(tree, series)
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch)
        _build(repository, tree, _touched(steps), _commits(steps))
        return git(repository, "diff-tree", "-p", *_DIFF, UPSTREAM, SM120).decode("utf-8")


def branch(tree: Tree, series: Sequence[Patch], folder: Path) -> list[str]:
    """Makes ``folder`` a git repository: the text files of ``tree``, then each patch.

    Branch ``upstream`` is the tree as it was given, without native libraries; branch
    ``sm120``, checked out, has one commit more for each patch that is pending on it.

    Returns:
        The commit ids of ``sm120``, upstream's first.

    Raises:
        Drift: any patch has drifted.
        ForkError: ``folder`` is there and not empty, or git is missing or failed;
            ``folder`` is as it was.
    """
    folder = folder.expanduser().resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ForkError(f"{folder} is not empty. Give a folder that is, or that does not exist.")
    steps, _ = series_steps(tree, series)
    texts = (n for n in tree.names() if n.startswith("vllm/") and n.endswith(_TEXT))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".sm120-", dir=folder.parent) as scratch:
        repository = Path(scratch) / "repository"
        repository.mkdir()
        _build(repository, tree, [*texts, *_touched(steps)], _commits(steps))
        # For what the user does here later: some upstream files have CRLF line ends.
        git(repository, "config", "core.autocrlf", "false")
        git(repository, "read-tree", "--reset", "-u", SM120)
        ids = git(repository, "rev-list", "--reverse", SM120).decode().split()
        os.rename(repository, folder)
    return ids


def export(tree: Tree, series: Sequence[Patch], folder: Path) -> list[Path]:
    """Writes ``git format-patch`` of the branch into ``folder``, one file a patch.

    They apply with ``git am`` to any repository that has the files they touch as
    ``tree`` has them. ``git am`` drops the subject's ``[Attention]`` unless told
    ``--keep-non-patch``, and cannot edit a file with CRLF line ends unless told
    ``--keep-cr``.

    Returns:
        The files, in order.

    Raises:
        Drift: any patch has drifted.
        ForkError: ``folder`` is a file or holds patches already, or git is missing or
            failed. Nothing was written.
    """
    ready(folder)
    steps, _ = series_steps(tree, series)
    return write(folder, format_patch(tree, _commits(steps)))


def ready(folder: Path) -> None:
    """Raises ForkError where ``folder`` is a file or holds patches already."""
    folder = folder.expanduser()
    if folder.exists() and not folder.is_dir():
        raise ForkError(f"{folder} is a file. Give a folder.")
    if any(folder.glob("*.patch")):
        raise ForkError(f"{folder} holds patches already. Give a folder without *.patch files.")


def format_patch(tree: Tree, commits: Sequence[tuple[str, Changes]]) -> dict[str, bytes]:
    """``git format-patch`` of commits on top of ``tree``: file name to bytes, in order.

    Args:
        commits: message and what it writes, each.
    """
    paths = [path for _, written in commits for path in written]
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch)
        _build(repository, tree, paths, commits)
        options = ("--quiet", "--zero-commit", "--no-signature", "--numbered", *_DIFF)
        git(repository, "format-patch", *options, "-o", "out", f"{UPSTREAM}..{SM120}")
        return {p.name: p.read_bytes() for p in sorted(repository.glob("out/*.patch"))}


def write(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Writes ``files`` into ``folder``, which is made; returns their paths."""
    folder = folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in files]


def _touched(steps: Sequence[tuple[Patch, Changes]]) -> list[str]:
    return [path for _, written in steps for path in written]


def _commits(steps: Sequence[tuple[Patch, Changes]]) -> list[tuple[str, Changes]]:
    return [(_message(patch), written) for patch, written in steps]


def _build(
    repository: Path,
    tree: Tree,
    paths: Iterable[str],
    commits: Sequence[tuple[str, Changes]],
) -> None:
    """Makes the two branches, upstream with those of ``paths`` that ``tree`` has.

    By fast-import: it reads no working tree, so no hook, filter or line-end rule of
    the user's has a say, and the whole of vLLM takes seconds.
    """
    git(repository, "init", "--quiet", "--template=", "--object-format=sha1", "-b", SM120)
    stream = b"".join(_stream(tree, paths, commits))
    git(repository, "fast-import", "--quiet", "--done", "--date-format=raw", stdin=stream)


def _stream(
    tree: Tree, paths: Iterable[str], commits: Sequence[tuple[str, Changes]]
) -> Iterator[bytes]:
    found = {p: tree.read(p) for p in dict.fromkeys(paths) if p != recipe.PATH}
    given = {path: data for path, data in found.items() if data is not None}
    title = f"vLLM {tree.version}\n\nText files only, as the tree has them.\n"
    yield from _commit(UPSTREAM, title, given)
    yield f"reset refs/heads/{SM120}\nfrom refs/heads/{UPSTREAM}\n\n".encode()
    for message, written in commits:
        yield from _commit(SM120, message, written)
    yield b"done\n"


def _commit(name: str, message: str, written: Changes) -> Iterator[bytes]:
    yield b"commit refs/heads/%b\n" % name.encode()
    yield b"author %b\ncommitter %b\n" % (_IDENTITY, _IDENTITY)
    yield _data(message.encode("utf-8"))
    for path, data in written.items():
        if data is None:
            yield b"D %b\n" % path.encode("utf-8")
        else:
            yield b"M 100644 inline %b\n" % path.encode("utf-8")
            yield _data(data)


def _data(data: bytes) -> bytes:
    return b"data %d\n%b\n" % (len(data), data)


def _message(patch: Patch) -> str:
    """The patch's docstring as a commit message; its sections read as git trailers."""
    sections = {
        "Why": patch.why,
        "Upstream": patch.upstream,
        "Retire": patch.retire,
        "Test": patch.test,
    }
    wrap = textwrap.TextWrapper(
        width=72, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    lines = [wrap.fill(f"{name}: {' '.join(text.split())}") for name, text in sections.items()]
    return "\n".join([patch.title, "", *lines, ""])
