# SPDX-License-Identifier: Apache-2.0
"""Answers kept from one machine and read on another."""

import json

import numpy as np
import pytest

from proof import compare, engine, model, run, stored

DIGESTS = {
    shard: f"{number:064x}"
    for variant in model.VARIANTS
    for number, shard in enumerate(model.tensors(variant))
}


def _values(seed, count=300):
    return np.linspace(-9, -1, count) + np.random.default_rng(seed).normal(0, 0.05, count)


def _runs(seed, scenarios=("decode",), shift=0.0):
    return [
        {"scenario": scenario, "answers": [(0, _values(seed + i) + shift), (64, [-1.0])]}
        for i in range(2)
        for scenario in scenarios
    ]


@pytest.fixture
def expected(result_folder, tmp_path, monkeypatch):
    """Stored answers of the set-up ``eager``; the folder."""
    folder = tmp_path / "expected"
    monkeypatch.setattr(stored, "FOLDER", folder)
    result_folder.add("stock", "eager", _runs(1, ("decode", "warm")))
    result_folder.add("stock-again", "eager", _runs(3, ("decode", "warm")))
    results = compare.load(result_folder.folder)
    stored.store(compare.table(results), results, DIGESTS, folder)
    for path in result_folder.folder.glob("*.json"):
        path.unlink()
    return folder


def _against(result_folder, digests=DIGESTS, most=engine.arms.OTHER_KERNEL):
    return stored.against(compare.load(result_folder.folder), "fork", digests, most)


def test_what_is_kept(expected):
    (path,) = expected.iterdir()
    kept = json.loads(path.read_text())
    assert path.name == "eager.json"
    assert kept["vllm"] == "0.33.0" and kept["gpu"] == "Testing GPU"
    assert set(kept["checkpoint"]) == set(model.tensors("text"))
    assert list(kept["scenarios"]) == ["decode", "warm"]
    found = kept["scenarios"]["decode"]
    assert found["hits"] == [0, 64]
    assert len(found["noise"]) == len(compare.QUANTILES)
    # One run, both requests; a hundredth of the noise is lost at most.
    assert np.allclose(found["logprobs"], [*_values(1), -1.0], atol=1e-4)


@pytest.mark.parametrize("shift, verdict", [(0, "same"), (5, "differs")])
def test_an_arm_beside_the_stored_answers(result_folder, expected, shift, verdict):
    result_folder.add("fork", "eager", _runs(11, ("decode", "warm"), shift))
    result_folder.add("fork-again", "eager", _runs(13, ("decode",), 9))
    lines = _against(result_folder)
    assert [line.scenario for line in lines] == ["decode", "warm"]
    for line in lines:
        assert line.compared == "fork and Testing GPU"
        assert line.verdict == verdict
        assert line.hits == line.wanted == (0, 64)
        assert len(line.differences) == 2 * line.positions == 2 * 301


def test_another_kernel_is_allowed_more_than_an_arm(result_folder, expected):
    """Three times the noise at every position."""
    loud = [{"answers": [(0, _values(1) + 0.2), (64, [-1.0])]}]
    result_folder.add("fork", "eager", loud)
    (line,) = _against(result_folder)
    assert 2.5 < line.excess < engine.arms.OTHER_KERNEL
    assert line.verdict == "same"


def test_another_checkpoint_is_an_error(result_folder, expected):
    result_folder.add("fork", "eager", _runs(11))
    other = {**DIGESTS, "layer-3": "f" * 64}
    with pytest.raises(ValueError, match=r"eager: the checkpoint written here is not the one"):
        _against(result_folder, other)
    # A shard that the variant does not have may differ.
    assert _against(result_folder, {**DIGESTS, "engram": "f" * 64})


def test_a_setup_without_stored_answers_is_left_out(result_folder, expected):
    result_folder.add("fork", "graphs", _runs(11))
    assert _against(result_folder) == []


def test_a_scenario_without_stored_answers_is_an_error(result_folder, expected):
    """Where the stored proof had an error in it."""
    result_folder.add("fork", "eager", _runs(11, ("mixed",)))
    with pytest.raises(ValueError, match="mixed"):
        _against(result_folder)


def test_other_positions_are_an_error(result_folder, expected):
    result_folder.add("fork", "eager", [{"answers": [_values(1)]}])
    with pytest.raises(ValueError, match=r"runs of \[300, 301\] positions"):
        _against(result_folder)


def test_a_complete_proof_stores_what_local_asks_for(result_folder, tmp_path, monkeypatch):
    """Every set-up that --local runs has answers of stock's, its own or another's."""
    monkeypatch.setattr(stored, "FOLDER", tmp_path / "expected")

    def write(jobs):
        for path in result_folder.folder.glob("*.json"):
            path.unlink()
        for job in jobs:
            setup = engine.SETUPS[job.setup]
            runs = _runs(1, setup.scenarios) if setup.loads else []
            more = {"variant": setup.variant, "like": setup.like}
            result_folder.add(job.arm, job.setup, runs, **more)
        return compare.load(result_folder.folder)

    results = write(run.jobs(list(engine.arms.ARMS), list(engine.SETUPS), local=False))
    stored.store(compare.table(results), results, DIGESTS, stored.FOLDER)
    results = write(run.jobs(run.LOCAL, list(engine.SETUPS), local=True))
    lines = stored.against(results, "fork", DIGESTS, engine.arms.OTHER_KERNEL)
    asked = {(r.setup, s) for r in results if r.arm == "fork" for s in r.scenarios()}
    assert {(line.setup, line.scenario) for line in lines} == asked
    assert {line.verdict for line in lines} == {"same"}


def test_another_kernel_rounds_where_stock_repeats_itself(result_folder, tmp_path, monkeypatch):
    """Stored answers of a scenario without noise: measured by the noise of ``short``. And what
    is stored as noise is stock's own, whatever arm stood beside it."""
    folder = tmp_path / "expected"
    monkeypatch.setattr(stored, "FOLDER", folder)
    few = {"scenario": "few", "answers": [(0, np.linspace(-9, -1, 300))]}
    for number, arm in enumerate(("stock", "stock-again", "fork-sm120")):
        result_folder.add(arm, "eager", [*_runs(1 + 2 * number, ("short",)), few, few])
    results = compare.load(result_folder.folder)
    stored.store(compare.table(results), results, DIGESTS, folder)
    kept = json.loads((folder / "eager.json").read_text())["scenarios"]
    assert kept["few"]["noise"] == [0, 0, 0] != kept["short"]["noise"]
    rounded = np.linspace(-9, -1, 300) + np.random.default_rng(5).normal(0, 0.07, 300)
    runs = [{"scenario": "few", "answers": [(0, rounded)]}, *_runs(11, ("short",))]
    result_folder.add("fork", "eager", runs)
    assert {line.scenario: line.verdict for line in _against(result_folder)} == {
        "few": "same",
        "short": "same",
    }
