# SPDX-License-Identifier: Apache-2.0
"""Pins the series on a miniature tree: all or nothing, twice is once, revert is exact."""

import os

import pytest

from fork import ForkError, recipe, series
from fork.edits import AddClassAttribute, Assigns, InsertAfter, SetKeyword, SetReturn
from fork.patch import Verdict
from fork.transaction import STAGE
from fork.tree import FolderTree

CACHE, RUN, NEW = "vllm/cache.py", "vllm/worker/run.py", "vllm/added/deep/new.py"
RECORD = "vllm-0.33.0.dist-info/RECORD"

WIDTH = SetKeyword(
    CACHE, "Cache.__init__", call="Pages", keyword="width", old="32", new="self.page"
)
PAGE = AddClassAttribute(CACHE, "Cache", code="page: int = 64", after="size")
SIZES = SetReturn(RUN, "sizes", old="[128]", new="[64]")
DRIFTED = SetReturn(RUN, "sizes", old="[256]", new="[64]")


@pytest.fixture
def root(tmp_path):
    """The tree's folder; ``tmp_path`` is the checkout."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    return folder


@pytest.fixture
def tree(write_tree, root):
    return write_tree(root)


@pytest.fixture
def members(make_patch, use_series, tmp_path):
    """Three patches: one of two edits and a new module, one on the same file, one more."""
    (tmp_path / NEW).parent.mkdir(parents=True)
    (tmp_path / NEW).write_bytes(b"NEW = 1\n")
    return use_series(
        make_patch("p_width", WIDTH, modules=(NEW,)),
        make_patch("p_page", PAGE),
        make_patch("p_sizes", SIZES),
    )


def verdicts(tree, members):
    return {standing.verdict for standing in series.status(tree, members).values()}


def test_apply_writes_every_change(tree, root, members, tiny_pin, tiny_files):
    assert verdicts(tree, members) == {Verdict.PENDING}
    written = series.apply(tree, members, tiny_pin)
    assert written == sorted([CACHE, RUN, NEW, recipe.PATH])
    assert (root / CACHE).read_bytes() == tiny_files[CACHE].replace(
        b"int = 8\n", b"int = 8\n    page: int = 64\n"
    ).replace(b"width=32", b"width=self.page")
    assert (root / RUN).read_bytes() == b"def sizes():\n    return [64]\n"
    assert (root / NEW).read_bytes() == b"NEW = 1\n"
    assert verdicts(tree, members) == {Verdict.APPLIED}
    assert series.verify(tree, members, tiny_pin) == []


def test_apply_keeps_record_right(tree, root, members, tiny_pin):
    before = (root / RECORD).read_text().splitlines()
    series.apply(tree, members, tiny_pin)
    assert series.check_record(tree) == []
    after = (root / RECORD).read_text().splitlines()
    paths = [line.split(",")[0] for line in after]
    assert paths == [line.split(",")[0] for line in before] + [NEW, recipe.PATH]
    changed = {a.split(",")[0] for a, b in zip(after, before, strict=False) if a != b}
    assert changed == {CACHE, RUN}


def test_apply_twice_is_a_no_op(tree, root, members, tiny_pin, snapshot):
    series.apply(tree, members, tiny_pin)
    once = snapshot(root)
    times = {path: (root / path).stat().st_mtime_ns for path in once}
    assert series.apply(tree, members, tiny_pin) == []
    assert snapshot(root) == once
    assert {path: (root / path).stat().st_mtime_ns for path in once} == times


def test_revert_restores_every_byte(tree, root, members, tiny_pin, snapshot):
    pristine = snapshot(root)
    series.apply(tree, members, tiny_pin)
    assert snapshot(root) != pristine
    assert series.revert(tree, members, tiny_pin) == sorted([CACHE, RUN, NEW, recipe.PATH])
    assert snapshot(root) == pristine
    assert series.revert(tree, members, tiny_pin) == []
    assert snapshot(root) == pristine


def test_revert_takes_the_new_modules_bytecode_along(tree, root, members, tiny_pin, snapshot):
    pristine = snapshot(root)
    series.apply(tree, members, tiny_pin)
    cache = (root / NEW).parent / "__pycache__"
    cache.mkdir()
    (cache / "new.cpython-311.pyc").write_bytes(b"compiled")
    series.revert(tree, members, tiny_pin)
    assert snapshot(root) == pristine


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("do", [series.apply, series.revert])
def test_one_drifted_patch_of_three_stops_all(
    tree, root, members, make_patch, use_series, tiny_pin, snapshot, at, do
):
    if do is series.revert:
        series.apply(tree, members, tiny_pin)
        (root / RUN).write_bytes(b"def sizes():\n    return [1]\n")
    drifted = make_patch("p_drifted", DRIFTED)
    before = snapshot(root)
    with pytest.raises(series.Drift) as caught:
        do(tree, use_series(*members[:at], drifted, *members[at + 1 :]), tiny_pin)
    assert snapshot(root) == before
    text = str(caught.value)
    assert "p_drifted" in text and RUN in text and "[256]" in text
    assert str(root) in text and "0.33.0" in text


def test_drift_lists_every_drifted_patch(tree, make_patch, tiny_pin):
    two = [make_patch("one", DRIFTED), make_patch("two", DRIFTED), make_patch("good", PAGE)]
    with pytest.raises(series.Drift) as caught:
        series.apply(tree, two, tiny_pin)
    text = str(caught.value)
    assert "one: " in text and "two: " in text and "good: " not in text


def test_members_can_come_and_go_one_at_a_time(tree, root, members, tiny_pin, snapshot):
    pristine = snapshot(root)
    series.apply(tree, members, tiny_pin)
    whole = snapshot(root)
    series.revert(tree, [members[1]], tiny_pin)
    assert recipe.members_of(tree) == ["p_width", "p_sizes"]
    assert (root / CACHE).read_text().count("page: int") == 0
    assert {n: s.verdict for n, s in series.status(tree, members).items()} == {
        "p_width": Verdict.APPLIED,
        "p_page": Verdict.PENDING,
        "p_sizes": Verdict.APPLIED,
    }
    series.apply(tree, [members[1]], tiny_pin)
    assert snapshot(root) == whole
    for member in (members[2], members[0], members[1]):
        series.revert(tree, [member], tiny_pin)
    assert snapshot(root) == pristine


def test_two_patches_at_one_anchor(tree, root, make_patch, use_series, tiny_pin, snapshot):
    """Each fits alone. Together they are applied so that status says so, or refused."""
    two = use_series(
        *(
            make_patch(f"p_{name}", InsertAfter(CACHE, "Cache", Assigns("size"), f"{name} = 1"))
            for name in ("one", "two")
        )
    )
    pristine = snapshot(root)
    try:
        series.apply(tree, two, tiny_pin)
    except (ForkError, ValueError):
        assert snapshot(root) == pristine
    else:
        assert verdicts(tree, two) == {Verdict.APPLIED}
        series.revert(tree, two, tiny_pin)
        assert snapshot(root) == pristine


def test_members_are_listed_in_series_order_foreign_ones_first(tree, members, make_patch, tiny_pin):
    foreign = make_patch("p_foreign", AddClassAttribute(CACHE, "Cache", "a = 1", after="size"))
    series.apply(tree, [members[2], foreign, members[0]], tiny_pin)
    assert recipe.members_of(tree) == ["p_foreign", "p_width", "p_sizes"]


def test_landed_upstream_is_left_alone(tree, root, members, tiny_pin):
    (root / RUN).write_bytes(b"def sizes():\n    return [64]\n")
    series.apply(tree, members, tiny_pin)
    assert recipe.members_of(tree) == ["p_width", "p_page"]
    assert series.status(tree, members)["p_sizes"].verdict is Verdict.UPSTREAM
    series.revert(tree, members, tiny_pin)
    assert (root / RUN).read_bytes() == b"def sizes():\n    return [64]\n"


@pytest.mark.parametrize(
    "damage",
    [b"{}", b"not json", b'{"runtime_key": "0", "recipe": {"members": []}}'],
    ids=["empty", "not JSON", "wrong key"],
)
def test_damaged_recipe_is_not_taken_for_none(tree, root, members, tiny_pin, snapshot, damage):
    """Revert may refuse or restore, but not drop the recipe and leave the edits."""
    pristine = snapshot(root)
    series.apply(tree, members, tiny_pin)
    (root / recipe.PATH).write_bytes(damage)
    damaged = snapshot(root)
    try:
        series.revert(tree, members, tiny_pin)
    except ForkError:
        assert snapshot(root) == damaged
    else:
        assert snapshot(root) == pristine


def test_hard_linked_files_are_not_written_through(tree, root, members, tiny_pin, tmp_path):
    """As where an installer links files from its cache."""
    cache = tmp_path / "cache"
    cache.mkdir()
    linked = {path: cache / str(i) for i, path in enumerate([CACHE, RUN, RECORD])}
    for path, link in linked.items():
        os.link(root / path, link)
    before = {path: link.read_bytes() for path, link in linked.items()}
    series.apply(tree, members, tiny_pin)
    assert all((root / p).read_bytes() != before[p] for p in linked)
    assert {path: link.read_bytes() for path, link in linked.items()} == before
    series.revert(tree, members, tiny_pin)
    assert {path: link.read_bytes() for path, link in linked.items()} == before


def test_file_modes_stay(tree, root, members, tiny_pin):
    (root / CACHE).chmod(0o640)
    series.apply(tree, members, tiny_pin)
    assert (root / CACHE).stat().st_mode & 0o777 == 0o640


def test_source_checkout_has_no_record(write_tree, root, members, tiny_pin, tiny_files, snapshot):
    tree = write_tree(root, {p: d for p, d in tiny_files.items() if p.startswith("vllm/")})
    pristine = snapshot(root)
    series.apply(tree, members, tiny_pin)
    assert verdicts(tree, members) == {Verdict.APPLIED}
    assert series.verify(tree, members, tiny_pin) == []
    series.revert(tree, members, tiny_pin)
    assert snapshot(root) == pristine


def test_built_wheel_is_refused(write_tree, root, members, tiny_pin, tiny_files, snapshot):
    built = {
        path.replace("0.33.0", "0.33.0+sm120.1"): data.replace(b"0.33.0", b"0.33.0+sm120.1")
        for path, data in tiny_files.items()
    }
    tree = write_tree(root, built)
    before = snapshot(root)
    for do in (series.apply, series.revert):
        with pytest.raises(ForkError, match=r"0\.33\.0\+sm120\.1.*vllm==0\.33\.0"):
            do(tree, members, tiny_pin)
    assert snapshot(root) == before


def test_base_that_is_not_served_is_refused(
    write_tree, root, members, tiny_pin, tiny_files, snapshot
):
    files = {
        path.replace("0.33.0", "0.34.0"): data.replace(b"0.33.0", b"0.34.0")
        for path, data in tiny_files.items()
    }
    tree = write_tree(root, files)
    before = snapshot(root)
    with pytest.raises(ForkError, match=r"0\.34\.0 is not served.*0\.33\.0"):
        series.apply(tree, members, tiny_pin)
    assert snapshot(root) == before


def test_tree_left_half_written_is_drift_until_the_next_run(
    tree, root, members, tiny_pin, snapshot, killer
):
    pristine = snapshot(root)
    with killer([(os, "replace")]) as kill, pytest.raises(kill.Killed):
        kill.arm(3)
        series.apply(tree, members, tiny_pin)
    assert (root / STAGE).exists()
    for standing in series.status(tree, members).values():
        assert standing.verdict is Verdict.DRIFT
        assert "killed" in standing.why[0]
    with pytest.raises(series.Drift, match="killed"):
        series.plan_apply(tree, members, tiny_pin)
    series.apply(tree, members, tiny_pin)
    assert verdicts(tree, members) == {Verdict.APPLIED}
    series.revert(tree, members, tiny_pin)
    assert snapshot(root) == pristine


def test_verify_on_a_stock_tree(tree, members, tiny_pin):
    problems = series.verify(tree, members, tiny_pin)
    assert [p for p in problems if "pending" in p] == [
        "p_width: pending",
        "p_page: pending",
        "p_sizes: pending",
    ]
    assert any(p.startswith(recipe.PATH) and "missing" in p for p in problems)


def edit_file(path, old, new):
    def damage(root):
        data = (root / path).read_bytes()
        assert old in data
        (root / path).write_bytes(data.replace(old, new))

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (edit_file("vllm/__init__.py", b"", b"x = 1\n"), ["vllm/__init__.py", "RECORD"]),
        (
            lambda root: (root / "vllm/__init__.py").unlink(),
            ["vllm/__init__.py", "not in the tree"],
        ),
        (edit_file(RECORD, b"vllm/cache.py,sha256=", b"vllm/cache.py,sha256=A"), [CACHE, "RECORD"]),
        (lambda root: (root / RECORD).unlink(), ["RECORD", "missing"]),
        (edit_file("vllm/_version.py", b"0.33.0", b"0.32.0"), ["_version.py", "0.33.0"]),
        (edit_file(recipe.PATH, b"p_page", b"p_pagf"), [recipe.PATH, "damaged"]),
        (lambda root: (root / NEW).write_bytes(b"NEW = 2\n"), ["p_width", "drift", NEW]),
        (
            lambda root: (root / "vllm-0.33.0.dist-info").rename(root / "vllm-0.33.1.dist-info"),
            ["vllm-0.33.1.dist-info", "0.33.0"],
        ),
    ],
    ids=["edited", "removed", "hash", "RECORD", "version", "recipe", "module", "folder"],
)
def test_verify_finds_damage(tree, root, members, tiny_pin, damage, words):
    series.apply(tree, members, tiny_pin)
    damage(root)
    problems = series.verify(FolderTree(root), members, tiny_pin)
    assert any(all(word in problem for word in words) for problem in problems), problems


def test_verify_compares_the_recipe_with_this_checkout(tree, members, tiny_pin):
    series.apply(tree, members, tiny_pin)
    other = tiny_pin.model_copy(update={"release": 2})
    [problem] = series.verify(tree, members, other)
    assert "runtime key" in problem


def test_members_come_in_series_order(members):
    assert series.members() == members
    assert series.members(["p_sizes", "p_width"]) == [members[0], members[2]]
    assert series.members([]) == []
    with pytest.raises(ForkError, match=r"not in the series: p_x.*p_width, p_page, p_sizes"):
        series.members(["p_x", "p_page"])
