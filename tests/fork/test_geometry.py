# SPDX-License-Identifier: Apache-2.0
"""Pins the geometry that vLLM plans on every base, stock and patched, and the making of
the trees it is planned on.

The expected figures are those of the facts, sections A (specs), E (what is refused) and
F, way A (64 states everywhere): measured apart from this code.
"""

import importlib.util
import io
import os
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from fork import ForkError, geometry, pin, recipe, rules, series
from fork.edits import SetReturn
from fork.geometry_table import show
from fork.tree import FolderTree, WheelTree

BASES = list(pin.load().bases)
RUN = "vllm/worker/run.py"

_missing = [n for n in ("torch", "transformers") if importlib.util.find_spec(n) is None]


SIZES = {"stock": (None, 128), "patched": (None, 64, 128, 256, 96)}
"""The values of --block-size that are planned on a tree; None is the option left out."""

IN_UNITS = ("0.32.0", "0.33.0")
"""Bases whose planner can lay out kernel-page units; the others have way A alone."""

STOCK = {
    ("swa", 1): (32, 32, 19008, 40),
    ("main", 2): (128, 64, 37440, [2, 8, 14]),
    ("main", 1): (128, 128, 74880, [20]),
    ("indexer", 2): (128, 64, 8640, [2, 8, 14]),
    ("indexer", 1): (128, 128, 17280, [20]),
}
"""Facts, section A. Kind and ratio: block in tokens, states, bytes padded to 576, layers."""

SPEC_BLOCKS = {
    ("swa", 1): (64, 64, 37440, 40),
    ("main", 2): (128, 64, 37440, [2, 8, 14]),
    ("main", 1): (64, 64, 37440, [20]),
    ("indexer", 2): (128, 64, 8640, [2, 8, 14]),
    ("indexer", 1): (64, 64, 8640, [20]),
}
"""Facts, section F, way A: a block of 64 states whatever the ratio."""

UNITS = {
    ("swa", 1): (64, 64, 37440, 40),
    ("main", 2): (128, 64, 37440, [2, 8, 14]),
    ("main", 1): (128, 64, 74880, [20]),
    ("indexer", 2): (128, 64, 8640, [2, 8, 14]),
    ("indexer", 1): (128, 64, 17280, [20]),
}
"""Facts, layout.md: stock's blocks, 64 states a page."""

WAY_A = (17, 138240, 3240, 128, 896)  # 414720 B per 128 tokens
STOCK_COST = (9, 230400, 1800, 128, 896)
WIDE_BLOCKS = (6, 460800, 1800, 256, 768)
"""Groups, block stride, bytes a token, prefix hits: step, and of 1000 in 1003."""


def table(plan):
    """A plan in the form of STOCK."""
    return {
        (row["layer_kind"], row["tokens_per_state"]): (
            row["block"],
            row["states"],
            row["page_bytes"],
            len(row["layers"]) if row["layer_kind"] == "swa" else row["layers"],
        )
        for row in plan["specs"]
    }


def totals(plan):
    """Groups, block stride, bytes a token, and prefix hits: step, and of 1000 in 1003."""
    names = ("block_stride", "bytes_per_token", "prefix_hit_tokens", "prefix_hit_1000_1003")
    return (len(plan["groups"]), *(plan[name] for name in names))


def refused(tree):
    return {(r["layer_kind"], r["tokens_per_state"]) for r in tree["specs"] if r["refused_by"]}


@pytest.mark.bases
@pytest.mark.needs_vllm
@pytest.mark.skipif(
    bool(_missing), reason=f"planning needs vLLM's dependencies; missing: {', '.join(_missing)}"
)
@pytest.mark.parametrize("base", BASES)
def test_geometry(base, monkeypatch):
    """One test a base: importing vLLM takes half a minute, so all sizes share a process."""
    plans, trees, plan_really = {}, [], geometry.plan

    def plan_every_size(tree, argvs, *more):
        trees.append(tree)
        name = tree.name.partition("-")[0]
        assert argvs == [geometry.default_argv()]
        asked = [geometry.default_argv(size) for size in SIZES[name]]
        plans[name] = dict(zip(SIZES[name], plan_really(tree, asked, *more), strict=True))
        return [plans[name][None]]

    monkeypatch.setattr(geometry, "plan", plan_every_size)
    result = geometry.measure(pin.load(), series.members(), base)
    assert (result["base"], result["capability"]) == (base, "12.0")

    if base in IN_UNITS:
        tree = next(t for t in trees if t.name.startswith("patched"))
        asked = [geometry.default_argv(size) for size in SIZES["patched"]]
        found = plan_really(tree, asked, layout="spec-blocks")
        plans["spec-blocks"] = dict(zip(SIZES["patched"], found, strict=True))
        units = plans.pop("patched")
        refused_sizes = {size: units.pop(size) for size in (64, 96)}
        assert table(units[None]) == table(units[128]) == UNITS
        assert totals(units[None]) == totals(units[128]) == STOCK_COST
        assert totals(units[256]) == WIDE_BLOCKS
        assert {row["states"] for row in units[256]["specs"]} == {64}
        assert {plan["layout"] for plan in units.values()} == {"kernel-page-units"}
        assert [plan["problems"] for plan in units.values()] == [[]] * 3
    else:
        plans["spec-blocks"] = plans.pop("patched")
        refused_sizes = {}
    refused_sizes |= {"96 in spec blocks": plans["spec-blocks"].pop(96)}
    for name, form, sums in [
        ("stock", STOCK, (6, 230400, 1800, 128, 896)),
        ("spec-blocks", SPEC_BLOCKS, WAY_A),
    ]:
        assert {p.get("error") for p in plans[name].values()} == {None}
        assert {s: table(p) for s, p in plans[name].items()} == dict.fromkeys(plans[name], form)
        assert {s: totals(p) for s, p in plans[name].items()} == dict.fromkeys(plans[name], sums)
        assert {plan["layout"] for plan in plans[name].values()} == {name}
        assert [plan["problems"] for plan in plans[name].values()] == [[]] * len(plans[name])

    for refusal in refused_sizes.values():
        assert set(refusal) == {"error"}
        [line] = refusal["error"].splitlines()
        assert "--block-size" in line and "64 states" in line

    # Facts, section E.
    stock = {("swa", 1), ("main", 1), ("indexer", 1)}
    assert refused(result["trees"]["stock"]) == ({("indexer", 1)} if base == "0.33.0" else stock)
    assert refused(result["trees"]["patched"]) == set()


# Everyday: the trees, a child that dies, and the tables.


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("SM120_FORK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class TestMadeOnce:
    def test_made_once(self, cached):
        def make(folder):
            (folder / "f").write_text(f"{len(made)}")
            made.append(folder)

        made = []
        folder = geometry.made_once("t", make)
        assert geometry.made_once("t", make) == folder == cached / "trees" / "t"
        assert len(made) == 1 and (folder / "f").read_text() == "0"
        assert list(folder.parent.iterdir()) == [folder]

    @pytest.mark.parametrize("error", [ForkError, KeyboardInterrupt])
    def test_a_maker_that_dies_leaves_nothing(self, cached, error):
        def make(folder):
            (folder / "half").write_text("x")
            raise error

        with pytest.raises(error):
            geometry.made_once("t", make)
        assert list((cached / "trees").iterdir()) == []
        assert list(geometry.made_once("t", lambda f: None).iterdir()) == []

    def test_of_two_makers_the_first_stands(self, cached):
        def inner(folder):
            (folder / "by").write_text("inner")

        def outer(folder):
            (folder / "by").write_text("outer")
            geometry.made_once("t", inner)

        folder = geometry.made_once("t", outer)
        assert (folder / "by").read_text() == "inner"
        assert list(folder.parent.iterdir()) == [folder]

    def test_an_error_of_the_rename_is_not_hidden(self, cached, monkeypatch):
        def full(*_):
            raise OSError("no space")

        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="no space"):
            geometry.made_once("t", lambda f: None)
        assert list((cached / "trees").iterdir()) == []


DEEP_GEMM = "vllm/third_party/deep_gemm/_C_extension.abi3.so"


@pytest.fixture
def small_wheel(tmp_path, write_tree):
    """The miniature tree as a wheel in a cache folder, with a native file."""
    tree = write_tree(tmp_path / "laid")
    path = tmp_path / "0123456789abcdef" / "v.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        for name in tree.names():
            archive.writestr(name, tree.read(name))
        archive.writestr("vllm/_C.so", b"\x7fELF")
        archive.writestr(DEEP_GEMM, b"\x7fELF")
    return WheelTree(path)


@pytest.fixture
def small_series(make_patch, use_series, tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/new.py").write_bytes(b"NEW = 1\n")
    edit = SetReturn(RUN, "sizes", old="[128]", new="[64]")
    return use_series(make_patch("p_run", edit, modules=("vllm/new.py",)))


class TestTrees:
    def test_stock_is_the_wheel_without_native_files(self, cached, small_wheel, tiny_files):
        folder = geometry.stock_tree(small_wheel)
        assert folder.name == "stock-0.33.0-0123456789abcdef"
        files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
        # DeepGEMM's extension stays: its assert strings are read.
        assert files == {*tiny_files, "vllm-0.33.0.dist-info/RECORD", DEEP_GEMM}

    def test_patched_does_not_write_through_to_stock(
        self, cached, small_wheel, small_series, tiny_pin, snapshot
    ):
        stock = geometry.stock_tree(small_wheel)
        before = snapshot(stock)
        patched = geometry.patched_tree(small_wheel, small_series, tiny_pin)
        assert snapshot(stock) == before
        assert (patched / RUN).read_bytes() == b"def sizes():\n    return [64]\n"
        assert (patched / "vllm/new.py").read_bytes() == b"NEW = 1\n"
        changed = {p for p, d in snapshot(patched).items() if before.get(p, ...) != d}
        assert changed == {RUN, "vllm/new.py", recipe.PATH, "vllm-0.33.0.dist-info/RECORD"}
        assert series.verify(FolderTree(patched), small_series, tiny_pin) == []
        # What does not differ takes no second place on disk.
        kept = patched / "vllm/cache.py"
        assert kept.samefile(stock / "vllm/cache.py") and not kept.is_symlink()

    def test_patched_is_made_again_for_another_recipe(
        self, cached, small_wheel, small_series, make_patch, use_series, tiny_pin
    ):
        first = geometry.patched_tree(small_wheel, small_series, tiny_pin)
        assert geometry.patched_tree(small_wheel, small_series, tiny_pin) == first
        other = use_series(make_patch("p_run", SetReturn(RUN, "sizes", old="[128]", new="[32]")))
        second = geometry.patched_tree(small_wheel, other, tiny_pin)
        assert second != first
        assert (first / RUN).read_bytes() == b"def sizes():\n    return [64]\n"
        assert (second / RUN).read_bytes() == b"def sizes():\n    return [32]\n"

    def test_drift_leaves_no_patched_tree(self, cached, small_wheel, make_patch, tiny_pin):
        drifted = make_patch("p_run", SetReturn(RUN, "sizes", old="[256]", new="[64]"))
        with pytest.raises(series.Drift):
            geometry.patched_tree(small_wheel, [drifted], tiny_pin)
        assert [p.name for p in (cached / "trees").iterdir()] == ["stock-0.33.0-0123456789abcdef"]


def test_a_child_that_dies_is_one_error_with_its_last_lines(tmp_path):
    """A tree whose vLLM cannot be imported."""
    package = tmp_path / "tree-x" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('no such luck')\n")
    with pytest.raises(ForkError, match=r"(?s)tree-x died.*RuntimeError: no such luck"):
        geometry.plan(package.parent, [geometry.default_argv()])


def test_no_dependencies(cached, monkeypatch, tiny_pin):
    def version(project):
        raise geometry.metadata.PackageNotFoundError(project)

    monkeypatch.setattr(geometry.metadata, "version", version)
    with pytest.raises(ForkError, match=r"torch.*build\.sh"):
        geometry.measure(tiny_pin, [])
    assert not cached.exists()


@pytest.mark.parametrize("size", [None, 96])
def test_default_argv(size):
    argv = geometry.default_argv(size)
    assert (Path(argv[0]) / "config.json").is_file()
    assert argv[1:5] == ["--tensor-parallel-size", "4", "--kv-cache-dtype", "fp8"]
    assert ("--block-size" in argv) is (size is not None)
    assert size is None or argv[-2:] == ["--block-size", "96"]


def row(kind, states, refused_by=None, **more):
    return {
        "layer_kind": kind,
        "layers": [2, 8, 14],
        "tokens_per_state": 2,
        "block": 2 * states,
        "page_bytes": 37440,
        "kernel_block": 2 * states,
        "states": states,
        "legal": refused_by is None,
        "refused_by": refused_by,
        **more,
    }


def plan_of(*specs):
    return {
        "specs": list(specs),
        "groups": [{}] * 17,
        "block_stride": 138240,
        "bytes_per_token": 3240.0,
        "prefix_hit_tokens": 128,
    }


def shown(stock, patched, argv=("model", "--block-size", "64"), rule="R takes 64 (table)"):
    console = Console(record=True, width=300, file=io.StringIO())
    show(
        {
            "base": "0.31.0",
            "capability": "12.0",
            "argv": list(argv),
            "rules": {"main": rule},
            "trees": {"stock": stock, "patched": patched},
        },
        console,
    )
    return console.export_text()


class TestShow:
    def test_states_and_totals(self):
        text = shown(plan_of(row("main", 777)), plan_of(row("swa", 64, layers=list(range(40)))))
        [main] = [x for x in text.splitlines() if x.startswith("│") and "compressed KV" in x]
        [swa] = [x for x in text.splitlines() if x.startswith("│") and "sliding window" in x]
        cells = [c.strip() for c in main.strip("│").split("│")]
        assert cells[1:] == ["2, 8, 14", "2", "1554", "37440 B", "1554", "777", "yes"]
        assert "40 layers" in swa and "64" in swa
        assert text.count("17 KV groups, block stride 138240 B, 3240 B per token") == 2
        assert "0.31.0" in text and "12.0" in text and "--block-size 64" in text
        assert "compressed KV: R takes 64 (table)" in text

    def test_refusal_says_by_whom(self):
        text = shown(plan_of(row("main", 128, "F takes 2 or 64 (s['x'])")), plan_of())
        assert "no: F takes 2 or 64 (s['x'])" in text

    def test_a_tree_that_vllm_refuses(self):
        text = shown({"error": "ValueError: what 64"}, plan_of(row("main", 64)))
        assert "stock: vLLM refuses to plan this: ValueError: what 64" in text
        assert "compressed KV" in text

    @pytest.mark.parametrize("words", ["use [block] sizes", "no [/such] size"])
    def test_brackets_are_shown_as_they_are(self, words):
        """Not taken for the console's markup."""
        refused = row("main", 128, words)
        text = shown({"error": words}, plan_of(refused), ["m", "--x", words], rule=words)
        assert text.count(words) == 4


RULES = {
    "swa": rules.PageRule("F", frozenset({64}), "s"),
    "main": rules.PageRule("F", None, "s"),
    "indexer": rules.PageRule("D", frozenset({32, 64}), "s"),
}


class TestJudged:
    @pytest.mark.parametrize(
        ("kind", "states", "legal"),
        [("swa", 64, True), ("swa", 32, False), ("main", 128, True), ("indexer", 128, False)],
    )
    def test_each_page_by_its_own_rule(self, kind, states, legal):
        [got] = geometry.judged(plan_of(row(kind, states, "?")), RULES)["specs"]
        assert got["legal"] is legal
        assert got["refused_by"] == (None if legal else str(RULES[kind]))

    def test_an_error_stays(self):
        assert geometry.judged({"error": "x"}, RULES) == {"error": "x"}
