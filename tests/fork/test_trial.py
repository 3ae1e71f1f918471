# SPDX-License-Identifier: Apache-2.0
"""Pins the arms: what each tree has when it is asked, what is asked, and what is left behind."""

import zipfile

import pytest

from fork import ForkError, geometry, rules
from fork.edits import SetReturn
from fork.tree import WheelTree
from fork.trial import UNKNOWN_RATIOS, trial

RUN = "vllm/worker/run.py"
PAGES = rules.PageRule("FlashInfer", frozenset({64}), "here")
SPEC = {"layer_kind": "main", "tokens_per_state": 1, "states": 64}


@pytest.fixture
def tree(tmp_path, write_tree):
    (tmp_path / "site").mkdir()
    return write_tree(tmp_path / "site")


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Stands for the child process: ``asked`` is what it saw, ``answer`` what it says."""
    monkeypatch.setenv("SM120_FORK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(geometry, "need_dependencies", lambda: None)
    monkeypatch.setattr(geometry, "flashinfer_overlay", lambda base_pin: [])

    class Child:
        def __init__(self):
            self.asked, self.dies = {}, ()
            self.answer = {
                "reports": [{"verdict": "PASS", "gates": [], "line": "RULES PASS"}] * 3,
                "plan": {"specs": [dict(SPEC)], "problems": []},
                "rules": dict.fromkeys(("swa", "main"), PAGES.to_json()),
                "ratios": [],
            }

        def __call__(self, module, request, path):
            text = (path[0] / RUN).read_text()
            self.asked[text] = request
            if text in self.dies:
                raise ForkError("the child died")
            return self.answer

    fake = Child()
    monkeypatch.setattr(geometry, "answer", fake)
    return fake


PATCHED = "def sizes():\n    return [64]\n"
STOCK = "def sizes():\n    return [128]\n"


@pytest.fixture
def patch(make_patch):
    return make_patch("a", SetReturn(RUN, "sizes", old="[128]", new="[64]"))


def ask(tree, base_pin, **wanted):
    with trial(tree, base_pin, ["model", "--x"]) as arms:
        return arms.arms(wanted, lambda _: None)


@pytest.fixture
def base(tiny_pin):
    return tiny_pin.bases["0.33.0"]


def test_each_arm_has_its_members(tree, base, child, patch, snapshot, tmp_path):
    before = snapshot(tree.root)
    found = ask(tree, base, stock=[], patched=[patch], again=[patch])
    assert set(child.asked) == {STOCK, PATCHED}
    assert found["again"] == found["patched"]
    assert found["stock"]["cases"]["multimodal"] == {
        "verdict": "PASS",
        "gates": [],
        "line": "RULES PASS",
    }
    assert found["stock"]["plan"]["specs"][0]["legal"]
    assert snapshot(tree.root) == before
    assert list((tmp_path / "cache" / "trees").iterdir()) == []


def test_what_is_asked(tree, base, child, patch):
    ask(tree, base, stock=[], patched=[patch])
    request = child.asked[STOCK]
    assert request["argv"] == ["model", "--x"] and request["ratios"] == UNKNOWN_RATIOS
    assert child.asked[PATCHED]["ratios"] == []
    first, *_ = request["requests"]
    assert first == ["--rules-only", "--capability", "12.0", "--", "model", "--x"]
    assert len(request["requests"]) == 3


def test_one_arm_that_dies_is_a_finding(tree, base, child, patch):
    child.dies = (PATCHED,)
    found = ask(tree, base, stock=[], patched=[patch])
    died = {"error": "the child died"}
    assert found["patched"] == {"cases": died, "plan": died, "ratios": died}
    assert "error" not in found["stock"]["cases"]


def test_parts_that_died(tree, base, child):
    child.answer |= {"reports": {"error": "ImportError: x"}, "rules": {"error": "no rules"}}
    found = ask(tree, base, stock=[])["stock"]
    assert found["cases"] == {"error": "ImportError: x"}
    assert found["plan"] == {"error": "FlashInfer gave no rules: no rules"}


@pytest.mark.parametrize(("states", "legal"), [(64, True), (32, False)])
def test_an_indexer_without_deep_gemm_is_assumed(tree, base, child, states, legal):
    """A source checkout has no binary to read the rule from, and says so."""
    child.answer["plan"]["specs"] = [SPEC | {"layer_kind": "indexer", "states": states}]
    [spec] = ask(tree, base, stock=[])["stock"]["plan"]["specs"]
    assert spec["legal"] is legal
    assert legal or "assumed: none in this tree" in spec["refused_by"]


def test_two_wheels_of_one_folder_are_not_taken_for_one(base, child, tiny_files, tmp_path):
    """A nightly's wheel lies anywhere: only the cache's folders are named by a hash."""
    for text in ("def sizes():\n    return [1]\n", "def sizes():\n    return [2]\n"):
        path = tmp_path / "downloads" / "vllm.whl"
        path.parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(path, "w") as wheel:
            for name, data in (tiny_files | {RUN: text.encode()}).items():
                wheel.writestr(name, data)
        ask(WheelTree(path), base, stock=[])
    assert len(child.asked) == 2
