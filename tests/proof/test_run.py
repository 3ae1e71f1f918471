# SPDX-License-Identifier: Apache-2.0
"""Which processes a proof has and how they are run, with a shell script in the place of
Python, so that no engine starts."""

import argparse
import json
import os
import signal
import sys
import tarfile
import time
from pathlib import Path

import pytest

from proof import arms, report, run
from proof.engine import SETUPS
from proof.run import Job, Runner

ALL = list(SETUPS)


# --- which jobs --------------------------------------------------------------------


def test_a_comparison_runs_each_setups_own_arms():
    found = {(job.setup, job.arm) for job in run.jobs(list(arms.ARMS), ALL, local=False)}
    expected = {(name, arm) for name, setup in SETUPS.items() for arm in setup.arms}
    assert found == expected


def test_faults_are_planted_in_the_fork_first_as_it_is_and_in_units():
    jobs = run.jobs(list(arms.ARMS), ALL, local=False)
    planted = [job for job in jobs if job.faults]
    assert planted == jobs[: len(planted)]
    wanted = {name for name, setup in SETUPS.items() if setup.faults}
    assert {job.setup for job in planted} == wanted
    assert {job.arm for job in planted} == {"fork", "fork-units", "fork-sm120"}


def test_local_runs_the_fork_twice_everywhere():
    jobs = run.jobs(run.LOCAL, ALL, local=True)
    found = {setup: [job.arm for job in jobs if job.setup == setup] for setup in ALL}
    for name, setup in SETUPS.items():
        assert found[name] == (["fork", "fork-again"] if setup.loads else ["fork"])
    assert not any(arms.ARMS[job.arm].stock for job in jobs)


def test_chosen_arms_and_setups():
    jobs = run.jobs(["fork"], ["eager", "vision"], local=False)
    assert {job.name for job in jobs} == {"eager.fork", "vision.fork"}


def test_every_process_has_a_name_of_its_own():
    names = [job.name for job in run.jobs(list(arms.ARMS), ALL, local=False)]
    assert len(set(names)) == len(names)


# --- the environment ---------------------------------------------------------------


@pytest.fixture
def runner(tmp_path):
    """Makes a Runner, and ends what it left running."""
    made = []

    def make(site=None, stock=None, seconds=60.0):
        made.append(Runner(tmp_path / "work", site, stock, time.monotonic() + seconds))
        return made[-1]

    yield make
    for one in made:
        one.close()


def _path(runner, arm):
    path = runner.environment(Job(arm, "eager", False))["PYTHONPATH"]
    return path.split(os.pathsep)


@pytest.mark.parametrize("arm", arms.ARMS)
def test_upstreams_tree_comes_first_for_stock_alone(runner, monkeypatch, arm):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    site, stock = Path("/made/site"), Path("/made/stock")
    expected = [str(run.ROOT), str(site), "/mine"]
    if arm.startswith("stock"):
        expected.insert(1, str(stock))
    assert _path(runner(site, stock), arm) == expected


def test_local_has_the_environments_own_vllm(runner, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert _path(runner(), "fork") == [str(run.ROOT)]


@pytest.mark.parametrize("found, expected", [(None, "0"), (object(), None)])
def test_flashinfers_sampler_is_off_only_where_it_is_missing(runner, monkeypatch, found, expected):
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    find = run.importlib.util.find_spec
    look = lambda name, *more: found if name == "flashinfer" else find(name, *more)  # noqa: E731
    monkeypatch.setattr(run.importlib.util, "find_spec", look)
    made = runner().environment(Job("fork", "eager", False))
    assert made.get("VLLM_USE_FLASHINFER_SAMPLER") == expected
    assert made["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_a_cuda_home_that_is_set_stays(runner, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/my/cuda")
    assert runner().environment(Job("fork", "eager", False))["CUDA_HOME"] == "/my/cuda"


# --- processes ---------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Puts a shell script in the place of ``python -m proof.engine JOB OUT``.

    It notes its job's name and then does what the test says; ``$1`` is the job's file,
    ``$2`` the result's.
    """
    script, noted = tmp_path / "python", tmp_path / "noted.txt"
    noted.touch()

    def act(does):
        script.write_text(
            f'#!/bin/sh\n[ "$1 $2" = "-m proof.engine" ] || exit 9\nshift 2\n'
            f'name=$(basename "$1" .json)\necho "$name" >>"{noted}"\n{does}\n'
        )
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        return lambda: noted.read_text().split()

    return act


GOOD = 'echo "{}" >"$2"'


def test_a_job_is_told_what_to_do(runner, engine):
    engine('cp "$1" "$2"; pwd; echo "$PYTHONPATH"')
    one = runner()
    one.start(Job("fork", "eager", True))
    one.wait(1)
    job = json.loads(one.result(Job("fork", "eager", True)).read_text())
    checkpoints = str(one.work / "checkpoints")
    expected = {"name": "eager.fork", "arm": "fork", "setup": "eager", "faults": True}
    expected["speed"] = False
    assert job == {**expected, "checkpoint": checkpoints}
    log = (one.work / "logs" / "eager.fork.log").read_text().splitlines()
    assert log[0] == str(run.ROOT)
    assert log[1].startswith(str(run.ROOT))
    assert one.failed == []


def test_a_failing_job_is_told_with_the_end_of_its_log(runner, engine, capfd):
    engine(f'if [ "$name" = eager.fork ]; then seq 1 50; echo "no GPU" >&2; exit 3; fi\n{GOOD}')
    one = runner()
    for setup in ("eager", "graphs"):
        one.wait(1)
        one.start(Job("fork", setup, False))
    one.wait(1)
    said = capfd.readouterr().out
    assert "eager.fork: FAILED (3) in" in said
    lines = said.splitlines()
    assert "no GPU" in lines and "50" in lines and "30" not in lines
    assert "graphs.fork: done in" in said
    assert one.failed == ["eager.fork"]


def test_a_job_without_a_result_has_failed(runner, engine, capfd):
    engine("exit 0")
    one = runner()
    one.start(Job("fork", "eager", False))
    one.wait(1)
    assert one.failed == ["eager.fork"]
    assert "FAILED (0)" in capfd.readouterr().out


def test_so_many_run_side_by_side(runner, engine, tmp_path):
    engine(f'while [ ! -e "{tmp_path}/go" ]; do sleep 0.05; done; {GOOD}')
    one = runner()
    for setup in ("eager", "graphs"):
        one.wait(2)  # two may run, and fewer do
        one.start(Job("fork", setup, False))
    assert len(one.running) == 2
    (tmp_path / "go").touch()
    one.wait(1)
    assert not one.running and not one.failed


def _gone(pid):
    """Dead, even if nobody has asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _all_gone(pids, seconds=10):
    until = time.monotonic() + seconds
    while not all(map(_gone, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return all(map(_gone, pids))


STUCK = 'trap "" TERM INT; sleep 300 & echo $$ $! >"$2.pids"; wait; wait'


def _pids(runner, job):
    path = Path(f"{runner.result(job)}.pids")
    until = time.monotonic() + 20
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < until
        time.sleep(0.05)
    return [int(pid) for pid in path.read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("how", ["out of time", "closed"])
def test_a_job_is_ended_with_all_its_children(runner, engine, capfd, how):
    engine(STUCK)
    one = runner()
    job = Job("fork", "eager", False)
    one.start(job)
    pids = _pids(one, job)
    assert len(pids) == 2 and not any(map(_gone, pids))
    if how == "closed":
        one.close()
    else:
        one.until = time.monotonic()
        one.wait(1)
        assert one.failed == ["eager.fork"]
        assert f"FAILED ({-signal.SIGKILL})" in capfd.readouterr().out
    assert _all_gone(pids)
    assert os.getpgid(0) != pids[0]  # and not with us


# --- the whole ---------------------------------------------------------------------


@pytest.fixture
def proof(tmp_path, monkeypatch):
    """Runs run.run with no checkpoint and no report; both are noted."""
    noted = argparse.Namespace(variants=[], reports=[])

    def write(out, variants, jobs):
        noted.variants.append(variants)
        return {"layer-0": "ab", "words-4096": "cd"}

    def said(argv):
        noted.reports.append(argv)
        return 0

    monkeypatch.setattr(run.checkpoint, "write", write)
    monkeypatch.setattr(run.report, "main", said)

    def make(**more):
        args = {"work": tmp_path / "work", "site": None, "stock": None, "seconds": 600}
        args |= {"arms": ["stock", "fork"], "setups": ["no-replay", "engram"], "jobs": 2}
        args |= {"local": False, "out": None, "first": 0}
        return run.run(argparse.Namespace(**{**args, **more}))

    make.noted = noted
    return make


FOUR = ["no-replay.stock", "no-replay.fork", "engram.stock", "engram.fork"]


def test_a_whole_proof(proof, engine, tmp_path):
    noted = engine(GOOD)
    assert proof() == 0
    assert sorted(noted()) == sorted(FOUR)
    results = tmp_path / "work" / "results"
    assert {path.stem for path in results.glob("*.json")} == set(FOUR)
    assert proof.noted.reports == [[str(results)]]
    assert proof.noted.variants == [("text", "engram")]
    assert report.read_digests(results) == {"layer-0": "ab", "words-4096": "cd"}


def test_local_is_reported_as_local(proof, engine, tmp_path):
    engine(GOOD)
    assert proof(local=True, arms=list(run.LOCAL), setups=["vision"], jobs=1) == 0
    assert proof.noted.reports == [[str(tmp_path / "work" / "results"), "--local"]]


def test_a_run_goes_on_where_it_stopped(proof, engine, capfd):
    noted = engine(f'case "$name" in engram.*) exit 1;; esac; {GOOD}')
    assert proof() == 1
    assert sorted(noted()) == sorted(FOUR)
    assert "2 left: engram.stock, engram.fork; run again" in capfd.readouterr().out
    assert proof.noted.reports == []
    noted = engine(GOOD)
    assert proof() == 0
    assert sorted(noted()[4:]) == ["engram.fork", "engram.stock"]
    assert proof.noted.variants == [("text", "engram"), ("engram",)]
    assert len(proof.noted.reports) == 1


def test_what_is_complete_is_only_reported(proof, engine):
    noted = engine(GOOD)
    proof()
    proof()
    assert len(noted()) == 4
    assert len(proof.noted.variants) == 1 and len(proof.noted.reports) == 2


def test_digests_of_an_earlier_run_are_kept(proof, engine, monkeypatch, tmp_path):
    """A run that goes on writes fewer variants; the report wants all their shards."""
    noted = engine(f'case "$name" in engram.*) exit 1;; esac; {GOOD}')
    writes = iter([{"text-only": "ab", "layer-0": "cd"}, {"engram": "ef", "layer-0": "cd"}])
    monkeypatch.setattr(run.checkpoint, "write", lambda *_: next(writes))
    assert proof() == 1
    engine(GOOD)
    assert proof() == 0
    assert len(noted()) == 6
    found = report.read_digests(tmp_path / "work" / "results")
    assert found == {"text-only": "ab", "layer-0": "cd", "engram": "ef"}


def test_a_job_is_not_begun_when_time_is_nearly_over(proof, engine, capfd):
    noted = engine(GOOD)
    assert proof(seconds=30) == 1
    assert noted() == []
    assert "4 left" in capfd.readouterr().out


def test_results_and_logs_are_taken_along(proof, engine, tmp_path):
    engine(f'case "$name" in engram.*) echo broken; exit 1;; esac; {GOOD}')
    assert proof(out=tmp_path / "out") == 1
    with tarfile.open(tmp_path / "out" / "proof.tar.xz") as archive:
        names = set(archive.getnames())
        log = archive.extractfile("logs/engram.fork.log").read()
    assert "results/no-replay.fork.json" in names and "results/digests.txt" in names
    assert log == b"broken\n"


def test_an_interrupt_ends_what_runs(proof, engine, monkeypatch, tmp_path):
    engine(STUCK)
    job = Job("stock", "no-replay", False)

    def interrupted(self, most):
        if self.running:
            self.pids = _pids(self, job)
            seen.extend(self.pids)
            raise KeyboardInterrupt

    seen = []
    monkeypatch.setattr(Runner, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        proof()
    assert seen and _all_gone(seen)


# --- the command -------------------------------------------------------------------


def _main(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["proof.run", *map(str, argv)])
    with pytest.raises(SystemExit) as caught:
        run.main()
    return caught.value.code


def test_without_upstreams_tree_the_way_out_is_named(monkeypatch, tmp_path):
    said = _main(monkeypatch, "--stock", tmp_path / "none")
    assert said.startswith(f"error: no upstream tree in {tmp_path}/none.")
    assert "python -m proof.pack" in said and "--local" in said


def test_without_a_gpu_nothing_starts(monkeypatch, tmp_path):
    monkeypatch.setattr(run.shutil, "which", lambda _: None)
    monkeypatch.setattr(run, "run", lambda _: pytest.fail("started"))
    assert _main(monkeypatch, "--local", "--work", tmp_path).startswith("error: no NVIDIA GPU")


@pytest.mark.parametrize("local", [False, True])
def test_defaults(monkeypatch, tmp_path, local):
    given = []
    monkeypatch.setattr(run.shutil, "which", lambda _: "/bin/nvidia-smi")
    monkeypatch.setattr(run, "run", lambda args: given.append(args) or 0)
    option = ["--local"] if local else ["--stock", tmp_path]
    assert _main(monkeypatch, *option) == 0
    (args,) = given
    assert args.arms == (list(run.LOCAL) if local else list(arms.ARMS))
    assert args.setups == ALL
    assert args.stock == (None if local else tmp_path)
    assert args.jobs == (1 if local else 8)


@pytest.mark.parametrize("option", ["--arms", "--setups"])
def test_an_unknown_name_is_refused(monkeypatch, capsys, option):
    assert _main(monkeypatch, option, "nothing") == 2
    assert "invalid choice: 'nothing'" in capsys.readouterr().err
