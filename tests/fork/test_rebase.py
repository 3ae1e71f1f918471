# SPDX-License-Identifier: Apache-2.0
"""Pins the rebase of a miniature tree: verdicts, arms, what is needed, and the command."""

import io
import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

import patches
from fork import ForkError, cli, fetch, follow, index, pin, rebase, recipe
from fork.edits import SetKeyword, SetReturn
from fork.patch import Variant

CACHE, RUN = "vllm/cache.py", "vllm/worker/run.py"
KEYWORD = SetKeyword(CACHE, "Cache.__init__", call="Pages", keyword="width", old="32", new="64")
SIZES = SetReturn(RUN, "sizes", old="[128]", new="[64]")
WRONG = SetReturn(RUN, "sizes", old="[256]", new="[64]")
GONE = SetReturn("vllm/gone.py", "sizes", old="1", new="2")


@pytest.fixture
def tree(tmp_path, write_tree):
    (tmp_path / "site").mkdir()
    return write_tree(tmp_path / "site")


@pytest.fixture
def base(tiny_pin):
    return tiny_pin.bases["0.33.0"]


def good(states=64, legal=True, cost=1800.0, problems=()):
    spec = {
        "layer_kind": "main",
        "tokens_per_state": 1,
        "states": states,
        "legal": legal,
        "refused_by": None if legal else "DeepGEMM takes 64",
    }
    return {"specs": [spec], "bytes_per_token": cost, "problems": list(problems), "groups": [1]}


def arm(verdict="PASS", gates=(), plan=None, ratios=(), safe=None):
    def case(verdict):
        line = f"RULES {verdict}" + (f": {', '.join(gates)}" if verdict == "FAIL" else "")
        return {"verdict": verdict, "gates": list(gates), "line": line}

    cases = {"multimodal": case(verdict), rebase.SAFE: case(safe or verdict)}
    return {"cases": cases, "plan": plan or good(), "ratios": list(ratios)}


BAD = arm("FAIL", ["indexer_page"], good(128, legal=False))


@pytest.fixture
def arms(monkeypatch):
    """Arms by the names of their members; ``asked`` are those that were run."""
    fake = SimpleNamespace(found={}, default=arm(), asked=[])

    @contextmanager
    def trial(tree, base_pin, argv):
        def run(wanted, say):
            names = {n: tuple(m.name for m in members) for n, members in wanted.items()}
            fake.asked.append(names)
            return {n: fake.found.get(key, fake.default) for n, key in names.items()}

        yield SimpleNamespace(arms=run)

    monkeypatch.setattr(rebase, "trial", trial)
    return fake


def plain(done):
    """The output without boxes, white space as one blank."""
    return " ".join(done.output.replace("│", " ").split())


def rows(found):
    return {row["name"]: row for row in found["patches"]}


class TestText:
    def test_every_drifted_edit_is_named(self, tree, base, make_patch):
        member = make_patch("a", WRONG, GONE, KEYWORD)
        found = rebase.replay(tree, base, [member], run=False)
        states = [(e["edit"].split(",")[0], e["state"]) for e in rows(found)["a"]["edits"]]
        assert states == [(RUN, "drift"), ("vllm/gone.py", "drift"), (CACHE, "pending")]
        assert found["problems"] == ["a has drifted"] and not found["clean"]
        assert rows(found)["a"]["edits"][1]["now_in"] == [RUN]

    def test_clean(self, tree, base, make_patch):
        found = rebase.replay(tree, base, [make_patch("a", KEYWORD)], run=False)
        assert found["clean"] and found["problems"] == [] and found["patched"] is None
        assert found["version"] == "0.33.0"

    def test_a_release_without_a_variant_tries_the_newest(self, tree, base, make_patch):
        old = (Variant(">=0.30,<0.31", (WRONG,)), Variant(">=0.31,<0.33", (SIZES,)))
        row = rows(rebase.replay(tree, base, [make_patch("a", variants=old)], run=False))["a"]
        assert (row["verdict"], row["declared"], row["variant"]) == (
            "pending",
            False,
            ">=0.31,<0.33",
        )

    def test_variants_of_another_base(self, tree, base, make_patch):
        both = (Variant(">=0.30,<0.31", (WRONG, KEYWORD)), Variant(">=0.33", (SIZES, KEYWORD)))
        member = make_patch("a", variants=both)
        assert rows(rebase.replay(tree, base, [member], run=False))["a"]["verdict"] == "pending"
        row = rows(rebase.replay(tree, base, [member], "0.30.0", run=False))["a"]
        assert row["verdict"] == "drift" and row["variant"] == ">=0.30,<0.31"
        assert row["followed"] == {
            "variant": ">=0.33",
            "added": [SIZES.describe()],
            "dropped": [WRONG.describe()],
        }
        with pytest.raises(ForkError, match=r"a has no variant for base 0\.31"):
            rebase.replay(tree, base, [member], "0.31.0", run=False)

    def test_the_given_tree_is_never_written(self, tree, base, make_patch, arms, snapshot):
        before = snapshot(tree.root)
        rebase.replay(tree, base, [make_patch("a", KEYWORD)])
        assert snapshot(tree.root) == before


class TestArms:
    def test_which_are_run(self, tree, base, make_patch, arms, monkeypatch):
        monkeypatch.setattr(patches, "CHECKS", ("sm120_page_geometry_check", "test"))
        members = [
            make_patch("a", KEYWORD),
            make_patch("b", SIZES),
            make_patch("drifted", WRONG),
            make_patch("sm120_page_geometry_check", SetReturn(RUN, "sizes", "[128]", "[1]")),
            make_patch("test"),
        ]
        rebase.replay(tree, base, members)
        assert arms.asked == [
            {
                "stock": (),
                "patched": ("a", "b", "sm120_page_geometry_check"),
                "a": ("b",),
                "b": ("a",),
                "drifted": ("a", "b"),
            }
        ]

    @pytest.mark.parametrize(
        ("without", "needed"),
        [
            (arm(), []),
            (BAD, ["multimodal: RULES FAIL: indexer_page", "DeepGEMM takes 64"]),
            (arm(plan=good(cost=3240.0)), ["3240 B per token of context, with it 1800"]),
            (arm(plan={"error": "ValueError: no  block"}), ["plans nothing: ValueError: no block"]),
            (arm(plan=good(problems=["overlap"])), ["overlap"]),
            (arm("NOT_RUN"), ["multimodal: RULES NOT_RUN"]),
            (arm() | {"cases": {"error": "ImportError"}}, ["the self-test died: ImportError"]),
        ],
    )
    def test_what_is_needed(self, tree, base, make_patch, arms, without, needed):
        arms.found = {("b",): without}
        found = rebase.replay(tree, base, [make_patch("a", KEYWORD), make_patch("b", SIZES)])
        got = rows(found)["a"]["without"]
        assert got["needed"] == bool(needed)
        assert all(any(text in why for why in got["why"]) for text in needed), got
        assert found["clean"]

    def test_what_fails_with_it_too_needs_it_not(self, tree, base, make_patch, arms):
        """A case that the whole series does not mend says nothing about one patch."""
        arms.default = arm("FAIL", ["swa_width"], safe="PASS")
        found = rebase.replay(tree, base, [make_patch("a", KEYWORD), make_patch("b", SIZES)])
        assert not rows(found)["a"]["without"]["needed"] and found["clean"]

    def test_landed_in_another_form(self, tree, base, make_patch, arms):
        """Drift as text, and every case passes: not needed, and its other pages are told."""
        arms.default = arm(plan=good(32))
        found = rebase.replay(tree, base, [make_patch("a", WRONG)])
        got = rows(found)["a"]
        assert got["verdict"] == "drift" and not got["without"]["needed"]
        assert got["without"]["differs"] == ["main, ratio 1: 32 states a page"]
        assert found["problems"] == ["a has drifted"]

    def test_a_drifted_patch_is_needed_where_the_rest_fails(self, tree, base, make_patch, arms):
        arms.default = BAD
        got = rows(rebase.replay(tree, base, [make_patch("a", WRONG)]))["a"]["without"]
        assert got["needed"]

    @pytest.mark.parametrize(
        ("patched", "words"),
        [
            (BAD, "patched: text-only safe: RULES FAIL: indexer_page"),
            (arm(plan={"error": "PageGeometryError: x"}), "PageGeometryError"),
            (arm(plan=good(problems=["overlap"])), "patched: overlap"),
        ],
    )
    def test_a_patched_tree_that_is_wrong_is_not_clean(
        self, tree, base, make_patch, arms, patched, words
    ):
        arms.found = {("a",): patched}
        found = rebase.replay(tree, base, [make_patch("a", KEYWORD)])
        assert not found["clean"] and words in "\n".join(found["problems"])

    @pytest.mark.parametrize(("ratios", "words"), [([4], "ratio 4"), ({"error": "x"}, "x")])
    def test_a_new_ratio_is_not_clean(self, tree, base, make_patch, arms, ratios, words):
        arms.found = {(): arm() | {"ratios": ratios}}
        found = rebase.replay(tree, base, [make_patch("a", KEYWORD)])
        assert not found["clean"] and words in found["problems"][0]


class TestCommand:
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch, tiny_pin, use_series, make_patch, arms):
        self.said = io.StringIO()
        monkeypatch.setattr(cli, "err", Console(file=self.said, width=500))
        monkeypatch.setattr(cli, "out", Console(width=500))
        monkeypatch.setattr(pin, "load", lambda: tiny_pin)
        self.use, self.make = use_series, make_patch
        use_series(make_patch("a", KEYWORD))

    def run(self, *arguments):
        command = ["rebase", *map(str, arguments)]
        return CliRunner().invoke(cli.app, command, catch_exceptions=False)

    @pytest.fixture
    def released(self, monkeypatch, tree, base):
        monkeypatch.setattr(rebase, "wheel_of", lambda the_pin, version: (tree, base))

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["0.33.0", "--latest"],
            ["--latest", "--tree", "."],
            ["--tree", ".", "--write"],
            ["0.33.0", "--write", "--text-only"],
            ["0.33.0", "--write", "--variants-of", "0.33.0"],
            ["0.33.0", "--variants-of", "0.1"],
            ["--tree", "/nowhere"],
        ],
    )
    def test_bad_input_is_2(self, arguments):
        done = self.run(*arguments)
        assert done.exit_code == 2 and "Usage" in done.output

    def test_not_on_the_index_is_2(self, monkeypatch):
        def nothing(version):
            raise index.NotOnIndex(f"no {version}")

        monkeypatch.setattr(index, "base_pin", nothing)
        done = self.run("0.99.0")
        assert done.exit_code == 2 and "no 0.99.0" in done.output

    def test_a_patched_tree_is_2(self, tree):
        tree.write({recipe.PATH: b"{}"})
        done = self.run("--tree", tree.root)
        assert done.exit_code == 2 and "carries the fork already" in plain(done)

    def test_clean_is_0_and_drift_is_1(self, released, tmp_path):
        done = self.run("0.33.0", "--json", tmp_path / "r.json")
        assert done.exit_code == 0 and "pending" in done.stdout and "clean" in done.stdout
        found = json.loads((tmp_path / "r.json").read_text())
        assert found["schema"] == 1 and found["releases"][0]["clean"]
        self.use(self.make("a", WRONG, GONE))
        done = self.run("0.33.0")
        assert done.exit_code == 1 and "drift 2 of 2" in done.stdout
        assert "'[128]', expected '[256]'" in done.stdout and "no such file" in done.stdout
        assert json.loads(self.run("0.33.0", "--json", "-").stdout)["releases"][0]["problems"]

    def test_latest(self, released, monkeypatch):
        monkeypatch.setattr(index, "releases", lambda: ["0.32.0", "0.33.0"])
        asked = []
        real = rebase.wheel_of
        monkeypatch.setattr(rebase, "wheel_of", lambda p, v: asked.append(v) or real(p, v))
        assert self.run("--latest").exit_code == 0
        assert asked == ["0.33.0"]

    def test_tree(self, tree, monkeypatch):
        needs = "Requires-Dist: flashinfer-python==0.7\n"
        metadata = f"{tree.dist_info}/METADATA"
        tree.write({metadata: tree.read(metadata) + needs.encode()})
        assert self.run("--tree", tree.root, "--text-only").exit_code == 0
        tree.write({metadata: tree.read(metadata).replace(b"==0.7", b">=0.7")})
        done = self.run("--tree", tree.root)
        assert done.exit_code == 2 and "one exact version" in plain(done)

    def test_write(self, released, monkeypatch):
        asked = []

        def write(root, the_pin, found, results):
            asked.append((list(found), [r["version"] for r in results]))
            return ["UPSTREAM.toml"]

        monkeypatch.setattr(follow, "write", write)
        assert self.run("0.33.0", "--write").exit_code == 0
        assert asked == [(["0.33.0"], ["0.33.0"])]
        assert "written: UPSTREAM.toml" in self.said.getvalue()

    def test_write_is_refused_on_drift(self, released):
        self.use(self.make("a", WRONG))
        with pytest.raises(ForkError, match=r"(?s)nothing was written.*a has drifted"):
            self.run("0.33.0", "--write")

    def test_known_releases_are_not_looked_up(self, monkeypatch, tiny_pin, tree):
        monkeypatch.setattr(fetch, "wheel", lambda *_: tree)
        monkeypatch.setattr(rebase, "WheelTree", lambda given: given)
        monkeypatch.setattr(fetch, "machine", lambda: "x86_64")
        assert rebase.wheel_of(tiny_pin, "0.33.0") == (tree, tiny_pin.bases["0.33.0"])
