# SPDX-License-Identifier: Apache-2.0
"""The delta as git sees it: what it applies to, what it gives, and that it is the same twice."""

import os
import subprocess
from pathlib import Path

import pytest

from fork import ForkError, fetch, history, pin, recipe, series
from fork.edits import Assigns as A
from fork.edits import InsertAfter, SetValue
from fork.patch import Patch, Variant
from fork.tree import FolderTree, Overlay, Tree, WheelTree

BASE = "0.33.0"
FILES = {
    "vllm/__init__.py": b"",
    "vllm/_version.py": b"__version__ = version = '0.33.0'\n",
    "vllm/a.py": b"".join(b"x%d = %d\n" % (n, n) for n in range(40)),
    "vllm/crlf.py": b"first = 1\r\nsecond = 2\r\n",
    "vllm/no_new_line.txt": "naïve".encode(),
    "vllm/csrc/k.cuh": b"#pragma once\n",
    "vllm/_C.abi3.so": b"\x7fELF\0",
    "vllm/py.typed": b"",
}
MODULE = "vllm/new/sm120_module.py"
MODULE_BYTES = "# é\nvalue = 'no new line at the end'".encode()

HOSTILE = """
[user]
    name = Someone Else
    email = else@example.invalid
[core]
    autocrlf = true
    safecrlf = true
    hooksPath = {home}/hooks
    abbrev = 4
    quotePath = false
[commit]
    gpgsign = true
    template = {home}/template
[init]
    defaultBranch = other
    templateDir = {home}/template.d
[gpg]
    program = false
[diff]
    noprefix = true
    mnemonicPrefix = true
    external = false
    context = 9
    algorithm = patience
    orderFile = {home}/order
[format]
    attach = boundary
    subjectPrefix = RFC
    signature = someone
    signOff = true
    numbered = false
    thread = true
[color]
    ui = always
[i18n]
    commitEncoding = latin-1
"""


def patch(root: Path, name: str, *edits, modules=()) -> Patch:
    return Patch(
        name=name,
        title=f"[Attention] {name}: naïve",
        why="a reason that is longer than one line of a commit message may be, so that it\n"
        "    is wrapped and indented",
        upstream="vllm-project/vllm#1 (report)",
        retire="never",
        test=f"pytest tests/test_{name}.py",
        variants=(Variant(">=0.30", edits),) if edits else (),
        modules=modules,
        root=root,
    )


@pytest.fixture
def tree(tmp_path: Path) -> FolderTree:
    return FolderTree(write(tmp_path / "tree", FILES))


@pytest.fixture
def members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Patch]:
    """Two patches of one file and a new module."""
    root = write(tmp_path / "checkout", {MODULE: MODULE_BYTES})
    found = [
        patch(root, "one", SetValue("vllm/a.py", "", target="x3", old="3", new="33")),
        patch(
            root,
            "two",
            InsertAfter("vllm/a.py", "", anchor=A("x3"), code="y = 'é'"),
            SetValue("vllm/a.py", "", target="x30", old="30", new="300"),
            modules=(MODULE,),
        ),
    ]
    # The recipe names members by their modules under patches/: these have none.
    monkeypatch.setattr(series, "members", lambda names=None: found)
    return found


def write(root: Path, files: dict[str, bytes]) -> Path:
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def planned(tree: Tree, members: list[Patch]) -> dict[str, bytes | None]:
    """What ``plan_apply`` writes, less the recipe."""
    plan = series.plan_apply(tree, members, pin.load())
    return {path: data for path, data in plan.items() if path != recipe.PATH}


def contents(root: Path) -> dict[str, bytes]:
    """Every file under ``root`` but git's own."""
    files = (p for p in sorted(root.rglob("*")) if p.is_file())
    named = {p.relative_to(root).as_posix(): p.read_bytes() for p in files}
    return {n: data for n, data in named.items() if not n.startswith(".git/")}


def git(folder: Path, *arguments: str, stdin: bytes = b"") -> str:
    """git as a user without any configuration runs it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    clean |= {"HOME": os.devnull, "XDG_CONFIG_HOME": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    identity = ["-c", "user.name=T", "-c", "user.email=t@example.invalid"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, env=clean)
    assert done.returncode == 0, (arguments, done.stderr.decode())
    return done.stdout.decode()


def repository_of(folder: Path, tree: Tree, paths) -> Path:
    """A user's own repository with those files of ``tree``."""
    folder.mkdir()
    git(folder, "init", "--quiet")
    write(folder, {p: data for p in paths if (data := tree.read(p)) is not None})
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "pristine", "--allow-empty")
    return folder


class TestDiff:
    @pytest.mark.parametrize("tool", [["git", "apply"], ["patch", "-p1", "--fuzz=0", "--silent"]])
    def test_applies_and_gives_what_apply_gives(self, tree, members, tmp_path, tool):
        text = history.diff(tree, members)
        target = write(tmp_path / "target", FILES)
        # Outside any repository: git apply would resolve paths from its root.
        away = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path)}
        subprocess.run(tool, cwd=target, input=text.encode(), check=True, env=away)
        assert contents(target) == FILES | planned(tree, members)

    def test_is_one_git_diff_of_the_whole(self, tree, members):
        text = history.diff(tree, members)
        headers = [x for x in text.splitlines() if x.startswith(("diff", "new", "---", "+++"))]
        assert headers == [
            "diff --git a/vllm/a.py b/vllm/a.py",
            "--- a/vllm/a.py",
            "+++ b/vllm/a.py",
            f"diff --git a/{MODULE} b/{MODULE}",
            "new file mode 100644",
            "--- /dev/null",
            f"+++ b/{MODULE}",
        ]
        assert recipe.PATH not in text

    def test_keeps_crlf(self, tree, tmp_path, members):
        members[:] = [
            patch(tmp_path, "c", SetValue("vllm/crlf.py", "", target="second", old="2", new="3"))
        ]
        assert "-second = 2\r\n+second = 3\r\n" in history.diff(tree, members)

    def test_of_nothing_is_empty(self, tree, members):
        assert history.diff(tree, []) == ""
        patched = Overlay(tree, series.plan_apply(tree, members, pin.load()))
        assert history.diff(patched, members) == ""


class TestBranch:
    def test_one_commit_of_upstream_then_one_a_patch(self, tree, members, tmp_path):
        folder = tmp_path / "deep" / "repository"
        ids = history.branch(tree, members, folder)
        assert len(ids) == 3
        assert git(folder, "rev-list", "--reverse", "sm120").split() == ids
        assert git(folder, "rev-parse", "upstream", "HEAD").split() == [ids[0], ids[2]]
        assert git(folder, "symbolic-ref", "HEAD") == "refs/heads/sm120\n"
        assert git(folder, "status", "--porcelain") == ""
        changed = [git(folder, "show", "--name-only", "--format=", x).split() for x in ids[1:]]
        assert changed == [["vllm/a.py"], ["vllm/a.py", MODULE]]

    def test_holds_text_files_byte_for_byte(self, tree, members, tmp_path):
        history.branch(tree, members, tmp_path / "b")
        text = {n: d for n, d in FILES.items() if not n.endswith((".so", ".typed"))}
        assert contents(tmp_path / "b") == text | planned(tree, members)
        git(tmp_path / "b", "checkout", "--quiet", "upstream")
        assert contents(tmp_path / "b") == text

    def test_messages_are_the_docstrings(self, tree, members, tmp_path):
        ids = history.branch(tree, members, tmp_path / "b")
        assert git(tmp_path / "b", "show", "--no-patch", "--format=%B", ids[1]).strip() == (
            "[Attention] one: naïve\n"
            "\n"
            "Why: a reason that is longer than one line of a commit message may be,\n"
            "    so that it is wrapped and indented\n"
            "Upstream: vllm-project/vllm#1 (report)\n"
            "Retire: never\n"
            "Test: pytest tests/test_one.py"
        )
        trailer = "--format=%(trailers:key=Test,valueonly)"
        shown = git(tmp_path / "b", "show", "--no-patch", trailer, ids[2])
        assert shown.strip() == "pytest tests/test_two.py"

    def test_skips_what_is_applied_and_leaves_the_recipe_out(self, tree, members, tmp_path):
        tree.write(series.plan_apply(tree, members, pin.load()))
        assert len(history.branch(tree, members, tmp_path / "b")) == 1
        assert recipe.PATH not in contents(tmp_path / "b")

    def test_skips_what_landed_upstream(self, tree, members, tmp_path):
        landed = Overlay(tree, {"vllm/a.py": FILES["vllm/a.py"].replace(b"x3 = 3\n", b"x3 = 33\n")})
        ids = history.branch(landed, members, tmp_path / "b")
        titles = git(tmp_path / "b", "log", "--reverse", "--format=%s").splitlines()
        assert titles == ["vLLM 0.33.0", members[1].title]
        assert len(ids) == 2

    def test_takes_an_empty_folder(self, tree, members, tmp_path):
        (tmp_path / "b").mkdir()
        assert len(history.branch(tree, members, tmp_path / "b")) == 3

    def test_refuses_a_folder_in_use(self, tree, members, tmp_path):
        folder = write(tmp_path / "b", {"mine": b"1"})
        before = sorted(tmp_path.iterdir())
        with pytest.raises(ForkError, match="not empty"):
            history.branch(tree, members, folder)
        assert contents(folder) == {"mine": b"1"}
        assert sorted(tmp_path.iterdir()) == before


class TestExport:
    def test_git_am_gives_what_apply_gives(self, tree, members, tmp_path):
        files = history.export(tree, members, tmp_path / "out")
        assert [f.name for f in files] == [
            "0001-Attention-one-na-ve.patch",
            "0002-Attention-two-na-ve.patch",
        ]
        assert sorted((tmp_path / "out").iterdir()) == files
        # No commit of this repository, which nobody else has, is named.
        assert all(f.read_text().startswith(f"From {'0' * 40} ") for f in files)
        target = repository_of(tmp_path / "target", tree, FILES)
        git(target, "am", "--quiet", *map(str, files))
        assert contents(target) == FILES | planned(tree, members)

    def test_git_am_gives_the_branch_and_its_messages(self, tree, members, tmp_path):
        files = history.export(tree, members, tmp_path / "out")
        made = tmp_path / "b"
        history.branch(tree, members, made)
        target = tmp_path / "target"
        git(tmp_path, "clone", "--quiet", "--branch", "upstream", str(made), str(target))
        git(target, "am", "--quiet", "--keep-non-patch", *map(str, files))
        form = "--format=%T %an %ae %ai%n%B"
        assert git(target, "log", form) == git(made, "log", form, "sm120")

    def test_edits_of_crlf_files_apply_with_keep_cr(self, tree, members, tmp_path):
        members[:] = [
            patch(tmp_path, "c", SetValue("vllm/crlf.py", "", target="second", old="2", new="3"))
        ]
        files = history.export(tree, members, tmp_path / "out")
        target = repository_of(tmp_path / "target", tree, FILES)
        git(target, "am", "--quiet", "--keep-cr", *map(str, files))
        assert (target / "vllm/crlf.py").read_bytes() == b"first = 1\r\nsecond = 3\r\n"

    @pytest.mark.parametrize("existing", ["out/0007-mine.patch", "out"])
    def test_refuses_a_folder_with_patches_or_a_file(self, tree, members, tmp_path, existing):
        write(tmp_path, {existing: b"mine"})
        before = contents(tmp_path)
        with pytest.raises(ForkError, match=r"holds patches already|is a file"):
            history.export(tree, members, tmp_path / "out")
        assert contents(tmp_path) == before

    def test_leaves_other_files_alone(self, tree, members, tmp_path):
        write(tmp_path, {"out/notes.txt": b"mine"})
        history.export(tree, members, tmp_path / "out")
        assert (tmp_path / "out/notes.txt").read_bytes() == b"mine"


def everything(tree: Tree, members: list[Patch], folder: Path) -> tuple:
    """All that this module makes of a tree."""
    return (
        history.diff(tree, members),
        history.branch(tree, members, folder / "b"),
        [(f.name, f.read_bytes()) for f in history.export(tree, members, folder / "e")],
        contents(folder / "b"),
    )


def test_the_same_twice(tree, members, tmp_path):
    first = everything(tree, members, tmp_path / "1")
    assert everything(tree, members, tmp_path / "2") == first


def test_the_users_git_changes_nothing(tree, members, tmp_path, monkeypatch):
    plain = everything(tree, members, tmp_path / "plain")

    home = tmp_path / "home"
    hook = f"#!/bin/sh\ntouch {home}/ran\nexit 1\n"
    hooks = ("pre-commit", "commit-msg", "post-commit", "reference-transaction", "post-checkout")
    attributes = b"* text eol=crlf ident\n*.py -diff\n"
    files = {f"hooks/{name}": hook.encode() for name in hooks}
    files |= {f"template.d/hooks/{name}": hook.encode() for name in hooks}
    files |= {".gitconfig": HOSTILE.format(home=home).encode(), "order": b"vllm/new/*\n"}
    files |= {"template": b"template\n", ".config/git/attributes": attributes}
    files |= {"template.d/info/attributes": attributes, ".config/git/ignore": b"*\n"}
    write(home, files)
    for file in home.glob("**/hooks/*"):
        file.chmod(0o755)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    for name, value in {
        "GIT_CONFIG_GLOBAL": str(home / ".gitconfig"),
        "GIT_DIR": str(tmp_path / "elsewhere"),
        "GIT_WORK_TREE": str(tmp_path),
        "GIT_TEMPLATE_DIR": str(home / "template.d"),
        "GIT_DIFF_OPTS": "--unified=0",
        "GIT_EXTERNAL_DIFF": "false",
        "GIT_AUTHOR_DATE": "2020-01-01T00:00:00Z",
        "GIT_COMMITTER_EMAIL": "else@example.invalid",
        "GIT_DEFAULT_HASH": "sha256",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.autocrlf",
        "GIT_CONFIG_VALUE_0": "true",
    }.items():
        monkeypatch.setenv(name, value)

    assert everything(tree, members, tmp_path / "hostile") == plain
    assert not (home / "ran").exists()
    assert not (tmp_path / "elsewhere").exists()


def test_drift_leaves_nothing(tree, members, tmp_path):
    (tree.root / "vllm/a.py").write_bytes(FILES["vllm/a.py"].replace(b"x30 = 30", b"x30 = 31"))
    before = sorted(tmp_path.rglob("*"))
    for make in (history.branch, history.export):
        with pytest.raises(series.Drift, match=r"two: .*x30 is '31', expected '30'"):
            make(tree, members, tmp_path / "deep" / "out")
    with pytest.raises(series.Drift):
        history.diff(tree, members)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_half_written_tree_is_drift(tree, members, tmp_path):
    (tree.root / ".sm120-stage").mkdir()
    with pytest.raises(series.Drift, match="half written"):
        history.diff(tree, members)


def test_without_git(tree, members, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    for make in (history.branch, history.export):
        with pytest.raises(ForkError, match="Install git"):
            make(tree, members, tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.bases
def test_the_real_series_on_the_real_wheel(tmp_path):
    tree = WheelTree(fetch.upstream_wheel(pin.load(), BASE))
    members = series.members()
    plan = planned(tree, members)
    made, out = tmp_path / "b", tmp_path / "out"
    assert len(history.branch(tree, members, made)) == 1 + len(members)

    files = history.export(tree, members, out)
    assert len(files) == len(members)
    git(made, "checkout", "--quiet", "upstream")
    pristine = contents(made)
    assert all(pristine[n] == tree.read(n) for n in pristine)
    git(made, "apply", "--check", stdin=history.diff(tree, members).encode())
    git(made, "am", "--quiet", *map(str, files))
    assert contents(made) == pristine | plan
    assert git(made, "diff", "HEAD", "sm120") == ""
