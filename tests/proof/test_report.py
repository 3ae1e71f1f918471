# SPDX-License-Identifier: Apache-2.0
"""The report: exit codes, the sentence, the table and the files it writes."""

import importlib.util
import json

import numpy as np
import pytest

from proof import model, report, stored


def _values(seed, count=400):
    draw = np.random.default_rng(seed)
    return np.linspace(-9, -1, count) + draw.normal(0, 0.05, count)


def _runs(seed, shift=0.0, cached=64, **more):
    return [{"answers": [(cached, _values(seed + i) + shift)], **more} for i in range(2)]


@pytest.fixture
def proof(result_folder):
    """A complete proof that holds, with one planted fault."""
    result_folder.add("stock", "eager", _runs(1))
    result_folder.add("stock-again", "eager", _runs(3))
    planted = _runs(7, shift=3.0, fault="slot_one_page_off")[:1]
    result_folder.add("fork", "eager", [*_runs(5), *planted])
    digests = "".join(f"{'ab' * 32} {shard}\n" for shard in model.tensors("text"))
    (result_folder.folder / report.DIGESTS).write_text(digests)
    return result_folder


def _main(proof, *more):
    return report.main([str(proof.folder), *map(str, more)])


def _said(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_a_proof_that_holds(proof, capsys):
    assert _main(proof) == 0
    said = _said(capsys)
    assert said.endswith("PROOF HOLDS: every arm within noise, 1 planted faults found")
    for word in ("stock itself", "fork", "slot_one_page_off", "found", "same", "400", "64"):
        assert word in said


def test_an_arm_that_differs(proof, capsys):
    proof.add("fork", "eager", _runs(5, shift=1.0))
    assert _main(proof) == 1
    assert "PROOF FAILS: differs: fork in eager/decode" in _said(capsys)


def test_a_fault_that_is_missed(proof, capsys):
    proof.add("fork", "eager", [*_runs(5), *_runs(7, fault="slot_one_page_off")])
    assert _main(proof) == 1
    assert "PROOF FAILS: blind to: slot_one_page_off in eager/decode" in _said(capsys)


def test_other_prefix_hits(proof, capsys):
    proof.add("fork", "eager", _runs(5, cached=0))
    assert _main(proof) == 1
    assert "PROOF FAILS: other prefix hits: fork in eager/decode" in _said(capsys)


def test_pages_of_another_size_may_hit_elsewhere(proof, capsys):
    proof.add("fork-pages", "eager", _runs(9, cached=0))
    assert _main(proof) == 0
    assert "fork-pages" in _said(capsys)


def test_a_scenario_that_failed(proof, capsys):
    proof.add("fork", "eager", [*_runs(5), {"scenario": "warm", "error": "RuntimeError: no"}])
    assert _main(proof) == 1
    said = _said(capsys)
    assert "failed: eager, fork, warm: RuntimeError: no" in said
    assert "PROOF FAILS: 1 scenarios failed" in said


def test_everything_at_once_is_one_sentence(proof, capsys):
    proof.add("fork", "eager", _runs(5, shift=1.0, cached=0))
    proof.add("fork-pages", "eager", [{"error": "x"}, {"error": "y"}])
    assert _main(proof) == 1
    expected = "differs: fork in eager/decode; other prefix hits: fork in eager/decode"
    assert f"PROOF FAILS: {expected}; 2 scenarios failed" in _said(capsys)


def test_a_setup_that_does_not_load_is_told(proof, capsys):
    proof.add("stock", "no-vision-layers", [], failed="ValueError: no bias_vl")
    assert _main(proof) == 0
    assert "no-vision-layers (stock) does not load: ValueError: no bias_vl" in _said(capsys)


def test_no_results(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 2
    assert "error: no results in" in capsys.readouterr().out


def test_a_broken_result(proof, capsys):
    (proof.folder / "graphs.fork.json").write_text("{")
    assert _main(proof) == 2
    said = _said(capsys)
    assert "graphs.fork.json: not a result" in said and "delete it and run again" in said


def test_no_digests(proof, capsys):
    (proof.folder / report.DIGESTS).unlink()
    assert _main(proof) == 2
    assert "python -m proof.run writes it" in _said(capsys)


def test_results_that_cannot_be_compared(proof, capsys):
    proof.add("fork", "eager", [{"answers": [_values(5, 399)]}])
    assert _main(proof) == 2
    assert "runs of [399, 400] positions" in _said(capsys)


def test_without_the_reference_there_is_nothing_to_report(result_folder, capsys):
    result_folder.add("fork", "eager", _runs(5))
    (result_folder.folder / report.DIGESTS).write_text("")
    assert _main(result_folder) == 2


def _no_constant(name):
    raise AssertionError(f"{name} is not JSON")


def test_the_table_for_a_program(proof, tmp_path):
    broken = _values(5)
    broken[:100] = np.nan
    proof.add("fork", "eager", [{"answers": [(64, broken)]}])
    out = tmp_path / "table.json"
    assert _main(proof, "--json", out) == 1
    lines = json.loads(out.read_text(), parse_constant=_no_constant)
    assert [line["compared"] for line in lines] == ["stock itself", "fork"]
    fork = lines[1]
    assert fork["verdict"] == "differs"
    assert fork["excess"] is None
    median, most, all_but = fork["quantiles"]
    assert 0 < median < 0.2 and most is None and all_but is None
    assert fork["hits"] == fork["wanted"] == [64]
    assert fork["positions"] == 400
    assert "differences" not in fork


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib")
def test_the_plot(proof, tmp_path):
    out = tmp_path / "plot.png"
    assert _main(proof, "--plot", out) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_digests_are_read_as_they_were_written(tmp_path):
    (tmp_path / report.DIGESTS).write_text("ab layer-0\ncd words-4096\n")
    assert report.read_digests(tmp_path) == {"layer-0": "ab", "words-4096": "cd"}
    (tmp_path / report.DIGESTS).write_text("ab\n")
    with pytest.raises(ValueError, match=r"digests\.txt"):
        report.read_digests(tmp_path)


def test_store_keeps_the_answers_for_local(proof, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stored, "FOLDER", tmp_path / "expected")
    assert _main(proof, "--store") == 0
    proof.add("fork-again", "eager", _runs(9))
    assert _main(proof, "--local") == 0
    assert "fork and Testing GPU" in _said(capsys)


def test_local_without_stored_answers(tmp_path, monkeypatch, result_folder, capsys):
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    for arm in ("fork", "fork-again"):
        result_folder.add(arm, "eager", _runs(9))
    report.add_digests(result_folder.folder, {"any": "0"})
    assert report.main([str(result_folder.folder), "--local"]) == 2
    assert "nothing to compare" in _said(capsys)


def test_help_names_the_exit_codes(capsys):
    with pytest.raises(SystemExit) as caught:
        report.main(["--help"])
    assert caught.value.code == 0
    assert "Exit code 0: the proof holds; 1: it does not; 2:" in _said(capsys)
