# SPDX-License-Identifier: Apache-2.0
"""The series for upstream: what is in it, that `git am` gives what apply gives, and refusals."""

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

import patches
from fork import ForkError, fetch, pin, proposal, recipe, series
from fork.edits import SetKeyword, SetReturn
from fork.tree import FolderTree, Overlay

TEST = "v1/test_pages.py"
TEST_BYTES = b"def test_pages():\n    assert True\n"
RESULTS = proposal.Results("0.33.0", "2 failed, 1 passed", "3 passed")


def git(folder, *arguments):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    identity = {"GIT_AUTHOR_NAME": "A Person", "GIT_AUTHOR_EMAIL": "person@example.org"}
    identity |= {"GIT_COMMITTER_NAME": "A Person", "GIT_COMMITTER_EMAIL": "person@example.org"}
    identity |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    command = ["git", "-C", str(folder), *map(str, arguments)]
    done = subprocess.run(command, env=environment | identity, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def repository(folder):
    git(folder, "init", "-q")
    git(folder, "add", "--force", "--all")
    git(folder, "commit", "-q", "-m", "upstream")
    return folder


def contents(folder):
    """Every file but git's own, which git tidies up in the background."""
    found = {}
    for top, folders, names in os.walk(folder):
        if ".git" in folders:
            folders.remove(".git")
        for path in (Path(top) / name for name in names):
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


@pytest.fixture
def tree(tmp_path, tiny_files):
    """Sources as upstream's checkout has them: no dist-info."""
    for path, data in tiny_files.items():
        if path.startswith("vllm/"):
            (tmp_path / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "tree" / path).write_bytes(data)
    return FolderTree(tmp_path / "tree")


@pytest.fixture
def small(tmp_path, monkeypatch, make_patch, use_series, tree):
    """Two fixes and one more member; the proposal's own tests are a stand-in."""
    edit = SetKeyword(
        "vllm/cache.py", "Cache.__init__", call="Pages", keyword="width", old="32", new="64"
    )
    chosen = use_series(
        make_patch("fix_a", edit, title="[Attention] a: pages"),
        make_patch(
            "fix_b",
            SetReturn("vllm/worker/run.py", "sizes", old="[128]", new="[64]"),
            title="[Attention] b: sizes",
        ),
        make_patch("other", SetReturn("vllm/worker/run.py", "sizes", old="[64]", new="[1]")),
    )
    monkeypatch.setattr(proposal, "PROPOSED", ("fix_a", "fix_b"))
    monkeypatch.setattr(proposal, "PROPOSED_TESTS", (TEST,))
    monkeypatch.setattr(proposal, "KEPT", {"other": "it is another thing"})
    monkeypatch.setattr(proposal, "TESTS", tmp_path / "tests")
    (tmp_path / "tests" / TEST).parent.mkdir(parents=True)
    (tmp_path / "tests" / TEST).write_bytes(TEST_BYTES)
    monkeypatch.setattr(proposal, "sources", lambda the_pin, base=None: tree)
    monkeypatch.setattr(proposal, "run_tests", lambda *a: RESULTS)
    return chosen[:2]


def test_git_am_gives_what_apply_gives_and_the_tests(small, tree, tmp_path, tiny_pin):
    *files, cover = proposal.export(tiny_pin, tmp_path / "out")
    assert sorted((tmp_path / "out").iterdir()) == [*files, cover]
    there = repository(shutil.copytree(tree.root, tmp_path / "there"))
    git(there, "am", "-q", *files)
    series.apply(tree, small, tiny_pin)
    applied = contents(tree.root)
    del applied[recipe.PATH]
    assert contents(there) == applied | {f"tests/{TEST}": TEST_BYTES}


def test_a_commit_a_fix_then_the_tests(small, tmp_path, tiny_pin):
    *files, cover = proposal.export(tiny_pin, tmp_path / "out")
    titles = ["[Bugfix][Attention] a: pages", "[Bugfix][Attention] b: sizes", "[Test][Attention] "]
    for number, (file, title) in enumerate(zip(files, titles, strict=True), 1):
        text = file.read_text()
        assert f"Subject: [PATCH {number}/3] {title}" in text
        for line in ("Purpose: ", f"Test plan: pytest tests/{TEST}", "Test result: "):
            assert f"\n{line}" in text
        assert "2 failed, 1 passed" in text and "3 passed" in text
        assert "Signed-off-by" not in text
    text = cover.read_text()
    for said in ("#56509", "#57292", "--signoff", "`other`: it is another thing", "3 passed"):
        assert said in text


def test_the_person_signs_off_as_the_cover_letter_says(small, tree, tmp_path, tiny_pin):
    *files, cover = proposal.export(tiny_pin, tmp_path / "out")
    there = repository(shutil.copytree(tree.root, tmp_path / "there"))
    am, rebase = (
        line.strip() for line in cover.read_text().splitlines() if line.startswith("    git ")
    )
    assert am == "git am --keep-non-patch --signoff DIR/*.patch"
    git(there, "am", "-q", "--keep-non-patch", "--signoff", *files)
    assert rebase == "git rebase HEAD~N --exec 'git commit --amend --no-edit --reset-author'"
    amend = "git commit -q --amend --no-edit --reset-author"
    git(there, "rebase", "-q", "HEAD~3", "--exec", amend)
    log = git(there, "log", "-3", "--format=%an <%ae>%n%s%n%b")
    assert log.count("A Person <person@example.org>\n[") == 3
    assert log.count("Signed-off-by: A Person <person@example.org>") == 3
    assert "example.invalid" not in log


def test_tests_not_run_are_not_said_to_pass(small, tmp_path, tiny_pin):
    *files, cover = proposal.export(tiny_pin, tmp_path / "out", test=False)
    for file in (*files, cover):
        assert "not run when this was exported" in file.read_text()
        assert "passed" not in file.read_text().partition("diff --git")[0]


@pytest.mark.parametrize("name", ["0001-x.patch", proposal.COVER])
def test_refuses_a_folder_in_use(small, tmp_path, tiny_pin, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(ForkError, match=r"already"):
        proposal.export(tiny_pin, tmp_path / "out")
    assert contents(tmp_path / "out") == {name: b"mine"}


def test_nothing_is_written_where_a_fix_has_landed_or_drifted(
    small, tree, tmp_path, tiny_pin, monkeypatch
):
    run = tree.read("vllm/worker/run.py")
    for new, words in ((b"[64]", "fix_b: not pending"), (b"[32]", r"fix_b: .*\[32\]")):
        landed = Overlay(tree, {"vllm/worker/run.py": run.replace(b"[128]", new)})
        monkeypatch.setattr(proposal, "sources", lambda the_pin, base=None, t=landed: t)
        with pytest.raises(ForkError, match=words):
            proposal.export(tiny_pin, tmp_path / "out")
    taken = Overlay(tree, {f"tests/{TEST}": b""})
    monkeypatch.setattr(proposal, "sources", lambda the_pin, base=None: taken)
    with pytest.raises(ForkError, match="rename the fork's test"):
        proposal.export(tiny_pin, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("without", "fixed", "words"),
    [
        ((0, "3 passed"), (0, "3 passed"), "do not fail on vLLM 0.33.0 as it is"),
        ((1, "2 failed"), (1, "1 failed, 2 passed"), "do not pass with the series: 1 failed"),
        ((1, "2 failed"), (5, "no tests ran"), "do not pass with the series"),
        ((1, "2 failed, 1 passed"), (0, "3 passed"), None),
    ],
)
def test_results_must_tell_the_two_apart(tiny_pin, monkeypatch, without, fixed, words):
    said = iter([without, fixed])
    monkeypatch.setattr(proposal, "run_on", lambda path: next(said))
    monkeypatch.setattr(fetch, "upstream_wheel", lambda *a: "wheel")
    monkeypatch.setattr(proposal, "WheelTree", lambda path: path)
    for name in ("need_dependencies", "stock_tree", "patched_tree"):
        monkeypatch.setattr(proposal.geometry, name, lambda *a: None)
    monkeypatch.setattr(proposal.geometry, "flashinfer_overlay", lambda base_pin: [])
    if words:
        with pytest.raises(ForkError, match=words):
            proposal.run_tests(tiny_pin, [])
    else:
        assert proposal.run_tests(tiny_pin, []) == RESULTS


def test_every_member_is_proposed_or_kept_for_a_reason():
    assert sorted([*proposal.PROPOSED, *proposal.KEPT]) == sorted(patches.SERIES)
    assert all((proposal.TESTS / name).is_file() for name in proposal.PROPOSED_TESTS)


def test_sources(tiny_pin, tmp_path, monkeypatch, tree):
    """The source distribution, unpacked; where none is pinned, the wheel."""
    archive = tmp_path / "wheels" / "digest" / "vllm-0.33.0.tar.gz"
    archive.parent.mkdir(parents=True)
    (tree.root / "tests").mkdir()
    with tarfile.open(archive, "w:gz") as file:
        file.add(tree.root, "vllm-0.33.0")
    monkeypatch.setenv("SM120_FORK_CACHE", str(tmp_path))
    monkeypatch.setattr(fetch, "upstream_sdist", lambda *a: archive)
    found = proposal.sources(tiny_pin)
    assert contents(found.root) == contents(tree.root) and found.version == "0.33.0"
    monkeypatch.setattr(fetch, "upstream_sdist", lambda *a: None)
    monkeypatch.setattr(fetch, "upstream_wheel", lambda *a: "the wheel")
    monkeypatch.setattr(proposal, "WheelTree", lambda path: path)
    assert proposal.sources(tiny_pin) == "the wheel"


@pytest.mark.bases
def test_git_am_on_the_real_sources_equals_apply(tmp_path):
    """On the pinned release's source distribution, its tests included."""
    the_pin = pin.load()
    tree = proposal.sources(the_pin)
    assert tree.version == the_pin.base and (tree.root / "tests/v1/attention").is_dir()
    *files, _ = proposal.export(the_pin, tmp_path / "out", test=False)
    there = repository(shutil.copytree(tree.root, tmp_path / "there"))
    git(there, "am", "-q", *files)
    applied = FolderTree(shutil.copytree(tree.root, tmp_path / "applied"))
    written = series.apply(applied, series.members(proposal.PROPOSED), the_pin)
    (applied.root / recipe.PATH).unlink()
    assert written and contents(there) == contents(applied.root) | proposal.tests()


@pytest.mark.bases
@pytest.mark.slow
def test_the_real_tests_fail_without_the_series_and_pass_with_it():
    chosen = series.members(proposal.PROPOSED)
    found = proposal.run_tests(pin.load(), chosen)
    assert "failed" in found.without and found.fixed.endswith(" passed")
