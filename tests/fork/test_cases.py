# SPDX-License-Identifier: Apache-2.0
"""Every case in tests/cases ends in its verdict, on the real tree of its base."""

import importlib.util
import json
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest

from fork import fetch, geometry, pin, probe, series
from tests.v41_names import checkpoint_names

CASES = [
    json.loads(path.read_text())
    for path in sorted((Path(__file__).parent.parent / "cases").glob("*.json"))
]

MEMBERS = {
    "unpatched": [probe.SELFTEST],
    "swa-member-only": ["sm120_swa_page_block_size", probe.SELFTEST],
    "patched": None,
}

pytestmark = [
    pytest.mark.needs_vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="vLLM's dependencies are not installed"
    ),
]


def _request(case):
    options = ["--rules-only", "--capability", case["capability"]]
    if "tokens" in case:
        options += ["--tokens", ",".join(map(str, case["tokens"]))]
    if "calls" in case:
        options += ["--calls", ",".join(case["calls"])]
    return [*options, "--", *(a.replace("$CHECKPOINT", str(geometry.MODEL)) for a in case["argv"])]


def _groups():
    """Cases by base and tree: one process each."""

    def key(case):
        return case["base"], case["tree"]

    for (base, tree), cases in groupby(sorted(CASES, key=key), key):
        marks = () if base == pin.load().base else pytest.mark.bases
        yield pytest.param(base, tree, list(cases), id=f"{base} {tree}", marks=marks)


@pytest.mark.parametrize("base, tree, cases", _groups())
def test_cases(base, tree, cases, monkeypatch):
    monkeypatch.setenv("VLLM_SM120_SPARSE_MLA", "flashinfer")
    found = probe.reports(
        pin.load(), base, series.members(MEMBERS[tree]), [_request(c) for c in cases]
    )
    for case, report in zip(cases, found, strict=True):
        wanted = case["expect"]
        said = f"{case['id']} ({case['why']}):\n{report['output']}"
        if wanted["verdict"] == "ANY":
            assert report["verdict"] in ("PASS", "FAIL", "NOT_RUN"), said
        else:
            assert report["verdict"] == wanted["verdict"], said
        if "gates" in wanted:
            assert report["gates"] == wanted["gates"], said
        assert set(wanted.get("warnings", ())) <= set(report["warnings"]), said
        if "heads" in wanted:
            rows = [row for row in report["rows"] if row["call"] == "attention"]
            assert {row["heads"] for row in rows} == {wanted["heads"]}, said
        assert report["output"].rstrip().splitlines()[-1] == report["line"], said
        assert report["exit"] == {"PASS": 0, "FAIL": 1, "NOT_RUN": 2}[report["verdict"]]


def test_there_are_cases():
    assert {case["base"] for case in CASES} >= {"0.30.0", "0.31.0", "0.33.0"}
    assert fetch.machine()  # the platform whose wheels the trees come from


@pytest.mark.bases
def test_four_arms_on_0_30():
    """At tokens 1, 8 and 64, attention alone, with the page fix alone: what was seen on
    real SM120 ranks."""
    rows = probe.run(
        pin.load(),
        ["0.30.0"],
        geometry.default_argv(),
        [
            "--rules-only",
            "--capability",
            "12.0",
            "--tokens",
            "1,8,64",
            "--calls",
            "attention",
        ],
        ["sm120_swa_page_block_size"],
    )
    found = {
        (r["tree"], r["modality"]): (r["report"]["verdict"], r["report"]["gates"]) for r in rows
    }
    assert found == {
        ("unpatched", "multimodal"): ("FAIL", ["swa_page", "swa_width"]),
        ("unpatched", "text-only"): ("FAIL", ["swa_page"]),
        ("unpatched", "text-only safe"): ("FAIL", ["swa_page"]),
        ("patched", "multimodal"): ("FAIL", ["swa_width"]),
        ("patched", "text-only"): ("PASS", []),
        ("patched", "text-only safe"): ("PASS", []),
    }


@pytest.mark.bases
def test_0_30_takes_images_by_the_forks_kernel(monkeypatch):
    """The width that FlashInfer 0.6.18 refuses is served, and the rows say by whom."""
    monkeypatch.delenv("VLLM_SM120_SPARSE_MLA", raising=False)
    request = ["--rules-only", "--capability", "12.0", "--", *geometry.default_argv()]
    [report] = probe.reports(pin.load(), "0.30.0", series.members(None), [request])
    assert (report["verdict"], report["complete"]) == ("PASS", True), report["output"]
    rows = [row for row in report["rows"] if row["call"] == "attention"]
    assert {row["topk"] for row in rows} == {128, 1152}
    for row in rows:
        assert row["route"] == ("fork" if row["topk"] == 1152 else "flashinfer")
        assert (row["reason"] is None) == (row["topk"] == 128)
        assert row["topk"] == 128 or "kernel for width 1152" in row["reason"]


@pytest.mark.bases
@pytest.mark.parametrize("base", ["0.31.0", "0.32.0", "0.33.0"])
def test_full_scope_passes_patched(base):
    """The whole series at full scope, in every modality; unpatched fails."""
    rows = probe.run(
        pin.load(), [base], geometry.default_argv(), ["--rules-only", "--capability", "12.0"]
    )
    found = {(r["tree"], r["report"]["verdict"], r["report"]["complete"]) for r in rows}
    assert found == {("unpatched", "FAIL", True), ("patched", "PASS", True)}


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint's config.json and index, with 16 experts a layer instead of 384."""
    config = json.loads((geometry.MODEL / "config.json").read_text())
    config["text_config"] |= {"n_routed_experts": 16, "dspark_n_routed_experts": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = checkpoint_names(SimpleNamespace(**config["text_config"]))
    index = {"metadata": {}, "weight_map": dict.fromkeys(sorted(names), "one.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


@pytest.mark.parametrize(
    "base",
    [
        pytest.param(base, marks=() if base == pin.load().base else pytest.mark.bases)
        for base in pin.load().bases
    ],
)
def test_weights(checkpoint, base):
    """`vision_n_layers 0` leaves tensors of the checkpoint homeless; the safe text-only
    form and multimodal keep every parameter."""
    argv = [str(checkpoint), *geometry.default_argv()[1:]]
    options = ["--rules-only", "--capability", "12.0", "--calls", "indexer", "--tokens", "1"]
    arms = probe.modalities(base)
    found = probe.reports(
        pin.load(),
        base,
        series.members(None),
        [[*options, "--", *argv, *more] for more in arms.values()],
    )
    gates = {name: report["gates"] for name, report in zip(arms, found, strict=True)}
    assert gates == {"multimodal": [], "text-only": ["weights"], "text-only safe": []}
    said = found[1]["output"]
    assert "ffn.gate.bias_vl" in said and "--language-model-only" in said
    assert ("vision_max_n_token 0" in said) == (base == "0.30.0")
    assert all("weights_unchecked" not in report["warnings"] for report in found)
