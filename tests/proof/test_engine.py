# SPDX-License-Identifier: Apache-2.0
"""What the engine's process does around the engine, with a stand-in for it."""

import contextlib
import json
import sys
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from proof import engine, scenarios
from proof.faults import FAULTS, Fault
from proof.scenarios import Row


class Engine:
    """Answers every scenario with one number; a planted fault changes it."""

    made: ClassVar[list] = []

    def __init__(self, checkpoint, setup):
        self.checkpoint, self.setup = checkpoint, setup
        self.preemptions, self.value, self.forgot = 0, -1.0, 0
        Engine.made.append(self)

    def forget(self):
        self.forgot += 1


@pytest.fixture
def stand_in(monkeypatch):
    Engine.made = []
    monkeypatch.setattr(engine, "Engine", Engine)
    monkeypatch.setattr(engine, "_about", lambda made, seconds: {"gpu": "none"})
    monkeypatch.setattr(
        scenarios,
        "SCENARIOS",
        {n: lambda e, n=n: [Row(n, "r", "prompt", 0, [e.value])] for n in scenarios.SCENARIOS},
    )
    monkeypatch.setitem(engine.arms.ARMS, "fork", engine.arms.ARMS["stock"])

    @contextlib.contextmanager
    def plant(made):
        made.value = -7.0
        yield
        made.value = -1.0

    planted = tuple(Fault(f.name, f.scenario, plant, f.variant) for f in FAULTS)
    monkeypatch.setattr(engine, "FAULTS", planted)


def _job(setup, **more):
    return {"name": "x", "arm": "fork", "setup": setup, "checkpoint": "/tiny", **more}


def _runs(result):
    return [(r["scenario"], r["fault"], r["repeat"]) for r in result["runs"]]


def test_every_scenario_is_asked_as_often_as_the_setup_says(stand_in):
    setup = engine.SETUPS["graphs"]
    result = engine.run(_job("graphs"))
    expected = [(s, None, n) for n in range(setup.repeats) for s in setup.scenarios]
    assert _runs(result) == expected
    assert result["variant"] == "text" and result["failed"] is None
    assert json.loads(json.dumps(result)) == result


@pytest.mark.parametrize("setup", ["eager", "dspark"])
def test_faults_are_planted_after_the_questions_and_undone(stand_in, setup):
    result = engine.run(_job(setup, faults=True))
    runs, chosen = result["runs"], engine.SETUPS[setup]
    faulty = [run for run in runs if run["fault"]]
    wanted = [(f.name, f.scenario) for f in FAULTS if f.variant == chosen.variant]
    assert [(run["fault"], run["scenario"]) for run in faulty] == wanted
    assert all(run["rows"][0]["logprobs"] == [-7.0] for run in faulty)
    # The last question shows that nothing stayed.
    assert _runs(result)[-1] == (chosen.scenarios[0], None, chosen.repeats)
    assert runs[-1]["rows"][0]["logprobs"] == [-1.0]
    # What a fault leaves in the prefix cache must not answer anything.
    (made,) = Engine.made
    assert made.forgot == 2 * len(faulty)


def test_an_error_in_a_scenario_is_kept_and_the_next_one_asked(stand_in):
    def broken(_):
        raise KeyError("no")

    scenarios.SCENARIOS["decode"] = broken
    result = engine.run(_job("graphs"))
    errors = {run["scenario"]: run["error"] for run in result["runs"]}
    assert errors == {"decode": "KeyError: 'no'", "warm": None, "mixed": None, "preempted": None}


def test_a_setup_that_does_not_load_says_why(stand_in, monkeypatch):
    def refuse(*_):
        raise ValueError("no home for bias_vl")

    monkeypatch.setattr(engine, "Engine", refuse)
    result = engine.run(_job("no-vision-layers"))
    assert result["failed"] == "ValueError: no home for bias_vl"
    assert result["runs"] == []
    with pytest.raises(ValueError, match="no home"):
        engine.run(_job("graphs"))


def test_the_callers_name_of_a_request():
    assert engine.Engine._outer("7-0123abcd") == "7"
    assert engine.Engine._outer("a-b-0123abcd") == "a-b"
    assert engine.Engine._outer("7") == "7"


def test_a_picture_depends_on_its_size_alone():
    pytest.importorskip("PIL")
    one, other = (np.asarray(engine._picture(side)) for side in (160, 160))
    assert one.shape == (160, 160, 3) and one.dtype == np.uint8
    assert (one == other).all()
    assert 100 < one.mean() < 155 and one.std() > 60
    assert not (np.asarray(engine._picture(224))[:160, :160] == one).all()


def _output(values, tokens, cached):
    """vLLM's: a dictionary a position, the imposed token first; None has no context."""
    answer = [
        None if v is None else {t: SimpleNamespace(logprob=v)}
        for t, v in zip(tokens, values, strict=True)
    ]
    return SimpleNamespace(
        num_cached_tokens=cached,
        prompt_logprobs=answer,
        outputs=[SimpleNamespace(logprobs=answer)],
    )


def _rows(request, output):
    return engine.Engine._rows(SimpleNamespace(), "decode", request, output)


def test_rows_of_a_prompt():
    request = scenarios.Request("r", (5, 6, 7, 8), since=1)
    (row,) = _rows(request, _output([None, -1.0, -2.0, -3.0], request.prompt, None))
    assert row == Row("decode", "r", "prompt", 0, [-2.0, -3.0])


def test_rows_of_a_continuation():
    request = scenarios.Request("r", (5, 6), forced=(7, 8))
    (row,) = _rows(request, _output([-1.0, -2.0], (7, 8), 64))
    assert row == Row("decode", "r", "forced", 64, [-1.0, -2.0])


@pytest.mark.parametrize("said", [(7, 9), (7,), (7, 8, 9)])
def test_a_continuation_that_was_not_imposed_is_an_error(said):
    request = scenarios.Request("r", (5, 6), forced=(7, 8))
    with pytest.raises(RuntimeError, match="decode/r: the continuation was not imposed"):
        _rows(request, _output([-1.0] * len(said), said, 0))


class Exited(BaseException):
    pass


def _main(monkeypatch, tmp_path, job):
    """proof.engine's main; returns its exit code and the files that it left."""

    def leave(code):
        raise Exited(code)

    path, out = tmp_path / "job.json", tmp_path / "results" / "out.json"
    out.parent.mkdir()
    path.write_text(json.dumps(job))
    monkeypatch.setattr(sys, "argv", ["proof.engine", str(path), str(out)])
    monkeypatch.setattr(engine.os, "_exit", leave)
    with pytest.raises(Exited) as caught:
        engine.main()
    return caught.value.args[0], {p.name: p.read_text() for p in out.parent.iterdir()}


def test_a_process_writes_its_result(stand_in, monkeypatch, tmp_path):
    code, files = _main(monkeypatch, tmp_path, _job("graphs"))
    assert code == 0
    assert files.keys() == {"out.json"}
    assert json.loads(files["out.json"])["setup"] == "graphs"


def test_a_process_that_fails_leaves_no_result(stand_in, monkeypatch, tmp_path, capsys):
    assert _main(monkeypatch, tmp_path, _job("not a set-up")) == (1, {})
    assert "KeyError: 'not a set-up'" in capsys.readouterr().err
