# SPDX-License-Identifier: Apache-2.0
"""Tokens a second: what is asked and how it is counted, with a stand-in for the engine."""

import json

import pytest

from proof import arms, engine, run, speed


class Engine:
    """Takes a microsecond a prompt token and a millisecond a step, on a clock of its own."""

    def __init__(self, monkeypatch):
        self.now, self.forgotten, self.asked = 0.0, 0, []
        monkeypatch.setattr(speed.time, "perf_counter", lambda: self.now)

    def forget(self):
        self.forgotten += 1

    def run(self, scenario, requests):
        self.asked.append(requests)
        self.now += sum(len(r.prompt) for r in requests) * 1e-6
        self.now += (max(len(r.forced) for r in requests) - 1) * 1e-3


def test_rates(monkeypatch):
    made = Engine(monkeypatch)
    found = speed.measured(made)
    assert found["prompt"] == pytest.approx(1e6, rel=1e-3)
    # A step gives each request one token; prompts are taken off.
    assert found["decode 1"] == pytest.approx(1000, rel=1e-3)
    assert found["decode 8"] == pytest.approx(8000, rel=1e-3)


def test_nothing_is_answered_from_the_prefix_cache(monkeypatch):
    made = Engine(monkeypatch)
    speed.measured(made)
    assert made.forgotten == len(made.asked)
    longest = max(len(r.prompt) + len(r.forced) for asked in made.asked for r in asked)
    assert longest < 8192


def test_an_engine_that_is_timed_is_asked_nothing_else(monkeypatch):
    monkeypatch.setattr(engine, "Engine", lambda *args: "engine")
    monkeypatch.setattr(engine, "_about", lambda made, seconds: {"attention": "A"})
    monkeypatch.setattr(speed, "measured", lambda made: {"prompt": 1.0})
    monkeypatch.setitem(engine.arms.ARMS, "fork", engine.arms.ARMS["stock"])
    job = run.Job("fork", "graphs", False, speed=True)
    assert job.name == "graphs.fork.speed" != run.Job("fork", "graphs", False).name
    given = {**vars(job), "name": job.name, "checkpoint": "/tiny"}
    result = engine.run(given)
    assert result["speed"] == {"prompt": 1.0} and result["runs"] == []
    assert json.loads(json.dumps(result)) == result


def test_table():
    results = {
        "stock": {"attention": "FlashMLA", "speed": {"prompt": 1000.0, "decode 1": 50.0}},
        "fork-sm120": {"attention": "SM120", "speed": {"prompt": 500.0, "decode 1": 75.0}},
    }
    lines = speed.table(results).splitlines()
    assert "500 (0.50)" in lines[2] and "75 (1.50)" in lines[2] and "SM120" in lines[2]


def test_the_arms_that_are_compared_are_of_the_set_up():
    assert set(speed.COMPARED) <= arms.ARMS.keys()
    assert set(speed.COMPARED) <= set(engine.SETUPS[speed.SETUP].arms)
