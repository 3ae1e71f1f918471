# SPDX-License-Identifier: Apache-2.0
"""Pins foreign members: a user's diffs below the fork's patches, all or nothing, by git's
own strictness, and their place in recipe and runtime key."""

import hashlib
import itertools
import json
import random
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fork import ForkError, cli, foreign, pin, recipe, series
from fork.edits import AddClassAttribute, SetKeyword, SetReturn
from fork.foreign import Foreign
from fork.patch import Verdict
from fork.tree import FolderTree, Overlay

CACHE, RUN = "vllm/cache.py", "vllm/worker/run.py"
RECORD = "vllm-0.33.0.dist-info/RECORD"
WIDTH = SetKeyword(CACHE, "Cache.__init__", call="Pages", keyword="width", old="32", new="64")
PAGE = AddClassAttribute(CACHE, "Cache", code="page: int = 64", after="size")
SIZES = SetReturn(RUN, "sizes", old="[128]", new="[64]")

# Each beside what the patches edit, so that its context is no longer there after them.
A = b"""\
diff --git a/vllm/cache.py b/vllm/cache.py
--- a/vllm/cache.py
+++ b/vllm/cache.py
@@ -5,4 +5,5 @@ class Cache(Base):
     size: int = 8
 
     def __init__(self):
+        self.store = open_store()
         self.pages = Pages(width=32)  # gr\xc3\xb6\xc3\x9fe
diff --git a/vllm/engram/store.py b/vllm/engram/store.py
new file mode 100644
--- /dev/null
+++ b/vllm/engram/store.py
@@ -0,0 +1,2 @@
+def open_store():
+    return 1
"""
# On top of A: its first hunk needs A's line.
B = b"""\
--- a/vllm/cache.py
+++ b/vllm/cache.py
@@ -6,4 +6,5 @@
 
     def __init__(self):
         self.store = open_store()
+        self.store.begin()
         self.pages = Pages(width=32)  # gr\xc3\xb6\xc3\x9fe
"""
DIFFS = [Foreign("engram_a", A), Foreign("engram_b", B)]


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    return folder


@pytest.fixture
def tree(write_tree, root):
    return write_tree(root)


@pytest.fixture
def ours(make_patch, use_series):
    return use_series(make_patch("p_cache", WIDTH, PAGE), make_patch("p_sizes", SIZES))


@pytest.fixture
def applied(tree, ours, tiny_pin):
    series.apply(tree, [*DIFFS, *ours], tiny_pin)
    return tree


def verdicts(tree, members):
    return {name: standing.verdict for name, standing in series.status(tree, members).items()}


def test_foreign_members_first_then_ours(tree, ours, tiny_pin, tiny_files):
    series_ = [*DIFFS, *ours]
    assert set(verdicts(tree, series_).values()) == {Verdict.PENDING}
    series.apply(tree, series_, tiny_pin)
    assert tree.read(CACHE) == tiny_files[CACHE].replace(
        b"int = 8\n", b"int = 8\n    page: int = 64\n"
    ).replace(b"width=32", b"width=64").replace(
        b"        self.pages", b"        self.store = open_store()\n        self.store.begin()\n"
        b"        self.pages"
    )  # fmt: skip
    assert tree.read("vllm/engram/store.py") == b"def open_store():\n    return 1\n"
    assert recipe.members_of(tree) == ["engram_a", "engram_b", "p_cache", "p_sizes"]
    assert tree.read("vllm/sm120_foreign/engram_a.diff") == A
    assert set(verdicts(tree, series_).values()) == {Verdict.APPLIED}
    assert series.check_record(tree) == []


def test_digest_and_runtime_key(applied, tiny_pin):
    """Typed by hand: the canonical form of the digest is {"diff":"<sha256 of the diff>"}."""
    found = recipe.carried_by(applied)["recipe"]["members"]
    for member, data in zip(found, (A, B), strict=False):
        text = '{"diff":"' + hashlib.sha256(data).hexdigest() + '"}'
        assert member["sha256"] == hashlib.sha256(text.encode()).hexdigest()


def test_stored_vector(tiny_pin):
    """sha256sum of texts that were typed: a change here changes keys that were published.

    {"diff":"7c4604…"} for the content "diff\\n", then the recipe
    {"base":{"deep_gemm":"2.8","flashinfer":"0.7","torch":"2.14","transformers":">=5",
    "version":"0.33.0","wheels":{"aarch64":"b…b","x86_64":"a…a"}},"members":[
    {"name":"engram_a","sha256":"…"}],"release":1,"schema":1}
    """
    member = Foreign("engram_a", b"diff\n")
    built = recipe.build(tiny_pin, [member])
    assert built["members"] == [{"name": "engram_a", "sha256": MEMBER}]
    assert recipe.runtime_key(built) == KEY


# printf '{"diff":"%s"}' $(printf 'diff\n' | sha256sum | cut -c1-64) | sha256sum
MEMBER = "ac9c181974e40f17be33b896df89aa1ef0ae33182dd7a7f05124ade3d6c38f4a"
KEY = "d356b3a2f62bbb81da09e141825be8f8e3aff9becde86e2d792fb557114dabe7"


def test_twice_is_once_and_revert_is_exact(tree, ours, tiny_pin, snapshot, root):
    before = snapshot(root)
    series.apply(tree, [*DIFFS, *ours], tiny_pin)
    after = snapshot(root)
    assert series.apply(FolderTree(root), [*DIFFS, *ours], tiny_pin) == []
    assert series.apply(FolderTree(root), ours, tiny_pin) == []  # the tree knows its own
    assert snapshot(root) == after
    series.revert(FolderTree(root), [*foreign.carried_by(tree), *ours], tiny_pin)
    assert snapshot(root) == before


def test_our_patches_come_and_go_above_them(applied, ours, tiny_pin, root, snapshot):
    after = snapshot(root)
    series.revert(applied, ours, tiny_pin)
    assert recipe.members_of(applied) == ["engram_a", "engram_b"]
    assert verdicts(applied, DIFFS) == dict.fromkeys(("engram_a", "engram_b"), Verdict.APPLIED)
    series.apply(applied, ours, tiny_pin)
    assert snapshot(root) == after


def broken(data, old, new):
    assert old in data
    return Foreign("engram_x", data.replace(old, new))


@pytest.mark.parametrize(
    "bad",
    [
        broken(A, b"     size: int = 8", b"     size: int = 9"),
        broken(A, b"     size: int = 8", b"      size: int = 8"),
        broken(A, b"def __init__(self):\n+", b"def __init__(self): \n+"),
        broken(A, b"# gr\xc3\xb6\xc3\x9fe", b"# gro\xc3\x9fe"),
        broken(A, b"b/vllm/engram/store.py", b"b/vllm/worker/run.py"),
        Foreign("engram_x", B),  # without A
    ],
    ids=["a figure", "indent", "white space", "one letter", "new file that is there", "no base"],
)
def test_no_fuzz_and_all_or_nothing(tree, ours, tiny_pin, root, snapshot, bad):
    before = snapshot(root)
    with pytest.raises(series.Drift, match="engram_x"):
        series.apply(tree, [DIFFS[0], bad, *ours] if bad.data != B else [bad, *ours], tiny_pin)
    assert snapshot(root) == before


def test_lines_above_may_have_moved(write_tree, root, tiny_files, ours, tiny_pin):
    """As git apply does: the whole context must match, its line number need not."""
    moved = tiny_files | {CACHE: b"# one\n# two\n" + tiny_files[CACHE]}
    tree = write_tree(root, moved)
    series.apply(tree, [*DIFFS, *ours], tiny_pin)
    assert b"self.store.begin()" in tree.read(CACHE)


def test_order_is_part_of_it(tree, ours, tiny_pin):
    with pytest.raises(series.Drift, match="engram_b"):
        series.apply(tree, [*reversed(DIFFS), *ours], tiny_pin)


def test_a_drifted_patch_of_ours_stops_them_too(tree, make_patch, use_series, tiny_pin, snapshot):
    drifted = use_series(make_patch("p_cache", SetReturn(RUN, "sizes", old="[1]", new="[2]")))
    before = snapshot(tree.root)
    with pytest.raises(series.Drift, match="p_cache"):
        series.apply(tree, [*DIFFS, *drifted], tiny_pin)
    assert snapshot(tree.root) == before


def test_found_without_a_recipe_is_upstreams(tree, ours, tiny_pin):
    written = DIFFS[0].changes(tree, foreign.State.APPLIED)
    found = Overlay(tree, written)
    assert verdicts(found, DIFFS[:1]) == {"engram_a": Verdict.UPSTREAM}
    landed = series.plan_apply(found, [*DIFFS, *ours], tiny_pin)
    names = [m["name"] for m in json.loads(landed[recipe.PATH])["recipe"]["members"]]
    assert names == ["engram_b", "p_cache", "p_sizes"]


def test_half_of_it_there_is_drift(tree, ours):
    written = DIFFS[0].changes(tree, foreign.State.APPLIED)
    for path in written:
        half = Overlay(tree, {path: written[path]})
        assert verdicts(half, DIFFS[:1]) == {"engram_a": Verdict.DRIFT}


@pytest.mark.parametrize("others", [DIFFS[:1], DIFFS[::-1], [Foreign("c", A)], []])
def test_other_ones_on_a_patched_tree_are_refused(
    tree, ours, tiny_pin, root, snapshot, others
):  # fmt: skip
    series.apply(tree, [*(others or DIFFS[:0]), *ours][-3:] if not others else ours, tiny_pin)
    before = snapshot(root)
    with pytest.raises(ForkError, match="Revert the tree"):
        series.apply(FolderTree(root), [*(others or DIFFS), *ours], tiny_pin)
    assert snapshot(root) == before


def test_verify(applied, ours, tiny_pin):
    assert series.verify(applied, [*DIFFS, *ours], tiny_pin) == []
    for others in ([], DIFFS[:1], DIFFS[::-1], [Foreign("engram_a", A + b"\n"), DIFFS[1]]):
        assert any("runtime key" in w for w in series.verify(applied, [*others, *ours], tiny_pin))


@pytest.mark.parametrize("path", [CACHE, "vllm/engram/store.py"])
def test_verify_finds_what_was_changed_since(applied, ours, tiny_pin, path):
    data = applied.read(path).replace(b"open_store()", b"open_store(0)")
    assert data != applied.read(path)
    found = series.verify(Overlay(applied, {path: data}), [*DIFFS, *ours], tiny_pin)
    assert any("engram" in line and "drift" in line for line in found)


def test_a_damaged_diff_is_drift_throughout(applied, ours, tiny_pin):
    damaged = Overlay(applied, {"vllm/sm120_foreign/engram_a.diff": A + b"\n"})
    assert set(verdicts(damaged, ours).values()) == {Verdict.DRIFT}
    with pytest.raises(series.Drift, match="engram_a"):
        series.plan_apply(damaged, ours, tiny_pin)


MESSAGE = b"""\
From 0123456789 Mon Sep 17 00:00:00 2001
Subject: a loader

copy from the old loader, then
rename from vllm/nothing.py
---
"""


def test_a_message_is_no_header():
    """What `git format-patch` writes around the diffs may say anything."""
    renamed = b"diff --git a/vllm/a.py b/vllm/b.py\nsimilarity index 100%\n"
    renamed += b"rename from vllm/a.py\nrename to vllm/b.py\n"
    changed = b"".join(MESSAGE + d + b"-- \n2.40\n\n" for d in (renamed, A))
    wanted = {"vllm/a.py", "vllm/b.py", CACHE, "vllm/engram/store.py"}
    assert set(Foreign("mine", changed).paths) == wanted
    hunk = A.replace(b"+def open_store():", b"+copy from x").replace(
        b"+    return 1", b"+rename from y"
    )
    assert set(Foreign("mine", hunk).paths) == {CACHE, "vllm/engram/store.py"}


def test_paths_that_git_quotes(tmp_path):
    odd = 'vllm/gr\u00f6\u00dfe "x"\\\ty.py'
    text = "".join(f"line {n} = {n}\n" for n in range(30)).encode()
    diff = git_diff(tmp_path / "repository", {odd: text}, {"vllm/new.py": text + b"x\n"})
    assert b'rename from "vllm/gr\\303' in diff
    assert Foreign("mine", diff).paths == tuple(sorted([odd, "vllm/new.py"]))


@pytest.mark.parametrize("kind", ["rename", "delete", "CRLF", "no newline", "like a header"])
def test_what_git_diff_makes(
    write_tree, tmp_path, root, tiny_files, ours, tiny_pin, snapshot, kind
):
    """The diff is git's own between two trees; applied it gives the second, reverted the
    first."""
    lines = "".join(f"line {n} = {n}\n" for n in range(30)).encode()
    old = tiny_files | {"vllm/old.py": lines}
    new = dict(old)
    match kind:
        case "rename":
            new["vllm/new.py"] = new.pop("vllm/old.py").replace(b"line 9 = 9", b"line 9 = 0")
        case "delete":
            del new["vllm/old.py"]
        case "CRLF":
            old["vllm/old.py"] = lines.replace(b"\n", b"\r\n")
            new["vllm/old.py"] = old["vllm/old.py"].replace(b"9 = 9", b"9 = 0")
        case "no newline":
            new["vllm/old.py"] = lines.rstrip()
        case "like a header":
            new["vllm/old.py"] = lines + b"-- \n++ b\n"
    diff = git_diff(tmp_path / "repository", old, new)
    assert ("rename from" in diff.decode()) == (kind == "rename")
    tree = write_tree(root, old)
    before = snapshot(root)
    member = Foreign("mine", diff)
    series.apply(tree, [member, *ours], tiny_pin)
    for path in ("vllm/old.py", "vllm/new.py"):
        assert tree.read(path) == new.get(path)
    series.revert(FolderTree(root), [member, *ours], tiny_pin)
    after = snapshot(root)
    # A file that was gone is listed last again: RECORD has its lines, in another order.
    assert lines_of(after.pop(RECORD)) == lines_of(before.pop(RECORD))
    assert after == before


def lines_of(data):
    return sorted(data.splitlines())


def git_diff(folder, old, new):
    def git(*arguments):
        config = ["-c", "core.autocrlf=false", "-c", "user.name=x", "-c", "user.email=x"]
        done = subprocess.run(
            ["git", *config, *arguments], cwd=folder, check=True, capture_output=True
        )
        return done.stdout

    folder.mkdir()
    git("init", "--quiet")
    for files in (old, new):
        for path in old:
            (folder / path).unlink(missing_ok=True)
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        git("add", "--all")
        git("commit", "--quiet", "--allow-empty", "--message", "x")
    return git("diff", "--find-renames", "HEAD~", "HEAD")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a unified diff"),
        (b"hello\n", "not a unified diff"),
        (A.replace(b"@@ -5,4 +5,5 @@", b"@@ -5,9 +5,10 @@"), "not a unified diff"),
        (
            b"diff --git a/vllm/a.py b/vllm/b.py\nsimilarity index 100%\n"
            b"copy from vllm/a.py\ncopy to vllm/b.py\n",
            "copies vllm/a.py",
        ),
        (A.replace(b"vllm/", b"csrc/"), "csrc/cache.py"),
        (A.replace(b"a/vllm", b"vllm").replace(b"b/vllm", b"vllm"), "a/ and b/"),
        (A.replace(b"vllm/engram/store.py", b"vllm/../../x.py"), "vllm/../../x.py"),
        (A.replace(b"engram/store.py", b"sm120_recipe.json"), "sm120_recipe.json"),
        (A.replace(b"engram/store.py", b"sm120_foreign/x.diff"), "sm120_foreign"),
    ],
)
def test_what_is_refused_before_a_tree_is_looked_at(tmp_path, data, words):
    (tmp_path / "x.diff").write_bytes(data)
    with pytest.raises(ForkError, match="mine") as refusal:
        foreign.load([f"mine={tmp_path / 'x.diff'}"])
    assert words in str(refusal.value)


@pytest.mark.parametrize("mode", [b"100755", b"120000"])
def test_modes_that_a_wheel_does_not_keep(tree, ours, tiny_pin, mode):
    member = Foreign("mine", A.replace(b"new file mode 100644", b"new file mode " + mode))
    with pytest.raises(ForkError, match=r"link or executable"):
        series.apply(tree, [member, *ours], tiny_pin)


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        (["a.diff"], "NAME=PATH"),
        (["A=a.diff"], "small letters"),
        (["=a.diff"], "NAME=PATH"),
        (["p_sizes=a.diff"], "taken"),
        (["a=nowhere.diff"], "Check the path"),
    ],
)
def test_bad_options(ours, tmp_path, monkeypatch, given_, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.diff").write_bytes(A)
    with pytest.raises(ForkError, match=words):
        foreign.load(given_)


def test_a_name_twice(ours, tmp_path):
    (tmp_path / "a.diff").write_bytes(A)
    with pytest.raises(ForkError, match="taken"):
        foreign.load([f"a={tmp_path / 'a.diff'}"] * 2)


def test_the_users_git_has_no_say(tree, ours, tiny_pin, tmp_path, monkeypatch):
    config = tmp_path / "config"
    config.write_text(
        "[core]\n\tautocrlf = true\n[apply]\n\twhitespace = fix\n\tignoreWhitespace = change\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    bad = broken(A, b"     size: int = 8", b"      size:  int = 8")
    with pytest.raises(series.Drift):
        series.apply(tree, [bad, *ours], tiny_pin)
    series.apply(tree, [*DIFFS, *ours], tiny_pin)
    assert b"\r" not in tree.read(CACHE)


def test_commands(tree, root, ours, tiny_pin, tmp_path, monkeypatch, capsys, snapshot):
    """apply, status, verify, recipe and revert, by the command line."""
    monkeypatch.setattr(pin, "load", lambda: tiny_pin)
    (tmp_path / "a.diff").write_bytes(A)
    (tmp_path / "b.diff").write_bytes(B)
    options = [f"--foreign=engram_{n}={tmp_path / n}.diff" for n in "ab"]

    def fork(*arguments):
        monkeypatch.setattr("sys.argv", ["fork", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            cli.main()
        return done.value.code or 0, capsys.readouterr().out

    before = snapshot(root)
    assert fork("status", root, *options)[0] == 0
    assert snapshot(root) == before
    code, said = fork("apply", root, *options)
    assert code == 0 and "vllm/engram/store.py" in said
    for more in ([], options):
        assert fork("verify", root, *more) == (0, "")
        code, said = fork("status", root, "--json", *more)
        rows = {n: r["verdict"] for n, r in json.loads(said)["patches"].items()}
        names = ["engram_a", "engram_b", "p_cache", "p_sizes"]
        assert (code, rows) == (0, dict.fromkeys(names, "applied"))
    assert fork("verify", root, *reversed(options))[0] == 1
    said = json.loads(fork("recipe", "--json", *options)[1])
    assert said["runtime_key"] == recipe.carried_by(FolderTree(root))["runtime_key"]
    assert fork("revert", root)[0] == 0
    assert snapshot(root) == before


def test_label():
    """Two wheels of one name are one content."""
    labels = [foreign.label(list(some)) for some in itertools.permutations(DIFFS)]
    labels += [foreign.label([d]) for d in DIFFS]
    assert len(set(labels)) == 4
    assert all(len(text) == 10 and text.startswith(".f") for text in labels)
    assert foreign.label([]) == ""


NAMES = st.text("abc_", min_size=1, max_size=3)
MEMBERS = st.lists(
    st.builds(Foreign, NAMES, st.binary(max_size=4)),
    min_size=1,
    max_size=4,
    unique_by=lambda m: m.name,
)
WHEEL = pin.WheelPin(name="v.whl", sha256="a" * 64)
PIN = pin.Pin(
    release=1,
    base="0.33.0",
    bases={
        "0.33.0": pin.BasePin(
            flashinfer="1", torch="2", transformers="3", deep_gemm="4",
            wheels={"x86_64": WHEEL, "aarch64": WHEEL}, flashinfer_wheel=WHEEL,
        )
    },
)  # fmt: skip


@settings(deadline=None, max_examples=100)
@given(MEMBERS, st.randoms(use_true_random=False))
def test_each_single_change_changes_the_runtime_key(members, chance: random.Random):
    def key(some, pin_=PIN):
        return recipe.runtime_key(recipe.build(pin_, some))

    keys = [key(members)]
    place = chance.randrange(len(members))
    for other in (
        Foreign(members[place].name, members[place].data + b"\0"),
        Foreign(members[place].name + "x", members[place].data),
    ):
        keys.append(key([*members[:place], other, *members[place + 1 :]]))
    keys.append(key([*members[:place], *members[place + 1 :]]))
    keys.append(key([*members, Foreign("zz", b"")]))
    if len(members) > 1:
        keys.append(key([*members[1:], members[0]]))
    base = PIN.bases["0.33.0"]
    for name in ("flashinfer", "torch", "transformers", "deep_gemm"):
        changed = base.model_copy(update={name: "9"})
        keys.append(key(members, PIN.model_copy(update={"bases": {"0.33.0": changed}})))
    keys.append(key(members, PIN.model_copy(update={"release": 2})))
    assert len(set(keys)) == len(keys)
    assert key(list(members)) == keys[0]
