# SPDX-License-Identifier: Apache-2.0
"""A launch from intent to receipt, on hosts that are made up: what follows what, and what
stops it. tests/launch/test_faults.py has the same on real ones."""

import re
import threading

import pytest

from sm120_launch import gate, receipt, runtime
from sm120_launch.errors import LaunchError
from sm120_launch.launcher import Launch
from sm120_launch.plan import SshTransport
from sm120_launch.process import Outcome
from sm120_launch.receipt import Folder

OK = Outcome(0)


@pytest.fixture
def hosts(fake_hosts):
    return fake_hosts


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "receipts")


@pytest.fixture
def plan(make_plan, make_rank):
    """Four ranks, each with a staging command."""
    return make_plan(*(make_rank(n, staging=(("stage", str(n)),)) for n in range(4)))


def launch(plan, folder, kind="launch", **more):
    return Launch(plan, folder, kind, **more).run()


def test_gate_then_stage_then_start(hosts, folder, plan):
    done = launch(plan, folder)
    assert (done.result, done.why, done.stage) == ("started", "", "start")
    first = {p: hosts.purposes().index(p) for p in ("cleanup", "gate", "stage", "engine")}
    for before, after in (("cleanup", "gate"), ("gate", "stage"), ("stage", "engine")):
        assert max(n for n, p in enumerate(hosts.purposes()) if p == before) < first[after]
    assert [r.verdict for r in done.ranks] == ["PASS"] * 4
    assert [r.engine for r in done.ranks] == ["started"] * 4
    assert folder.read(done.id) == done


def test_the_intent_is_on_disk_before_anything_is_run(hosts, folder, plan):
    seen = []

    def look(rank):
        [found] = folder.of("p")
        seen.append((found.result, found.stage))
        return OK

    hosts.says["cleanup"] = look
    launch(plan, folder)
    assert seen == [(None, "clean")] * 4


def test_gate_alone_starts_nothing(hosts, folder, plan):
    done = launch(plan, folder, "gate")
    assert done.result == "passed"
    assert set(hosts.purposes()) == {"inspect_image", "cache", "gate"}


NOT_A_PASS = {
    "fail": Outcome(1, stdout=b"SELFTEST FAIL: heads\n"),
    "lost": Outcome(None, problem="lost", detail="gone"),
    "late": Outcome(137, seconds=61.0),
    "silent": Outcome(0),
    "raises": lambda rank, launch_id: 1 / 0,
}


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("kind", [k for k in NOT_A_PASS if k != "raises"])
def test_one_no_stops_all(hosts, folder, plan, rank, kind):
    hosts.says["gate", rank] = NOT_A_PASS[kind]
    done = launch(plan, folder)
    assert done.result == "refused"
    assert f"rank {rank} on host{rank + 1}" in done.why
    assert not {"stage", "engine"} & set(hosts.purposes())
    assert [r.verdict for r in done.ranks].count("PASS") == 3


def test_an_error_of_the_launcher_is_in_the_receipt(hosts, folder, plan):
    hosts.says["gate", 1] = NOT_A_PASS["raises"]
    with pytest.raises(ZeroDivisionError):
        launch(plan, folder)
    [kept] = folder.of("p")
    assert (kept.result, kept.why) == ("failed", "ZeroDivisionError: division by zero")
    assert "engine" not in hosts.purposes()


def test_a_gate_that_did_not_end_is_ended_by_name(hosts, folder, plan):
    hosts.says["gate", 2] = NOT_A_PASS["lost"]
    hosts.says["stop", 2] = Outcome(None, problem="lost", detail="gone")
    done = launch(plan, folder)
    assert ("stop", 2) in hosts.calls and ("stop", 1) not in hosts.calls
    assert done.ranks[2].reason == "lost: gone; it could not be ended and may still run there"


def test_late_gate_says_so(hosts, folder, plan):
    hosts.says["gate", 0] = NOT_A_PASS["late"]
    assert launch(plan, folder).ranks[0].reason == "timed out: no end within 60 s"


def test_image_that_the_host_does_not_have(hosts, folder, plan):
    hosts.says["inspect_image", 3] = Outcome(125, stderr=b"Error: no such image\n")
    done = launch(plan, folder)
    assert "does not have localhost/x@sha256:" in done.ranks[3].reason
    assert ("gate", 3) not in hosts.calls and ("gate", 0) in hosts.calls


def test_image_for_another_platform(hosts, folder, plan):
    hosts.says["inspect_image", 0] = Outcome(0, stdout=b"sha256:0 linux/s390x\n")
    assert "linux/s390x" in launch(plan, folder).ranks[0].reason


def test_staging_that_fails(hosts, folder, plan):
    hosts.says["stage", 2] = Outcome(7, stderr=b"no tables\n")
    done = launch(plan, folder)
    assert (done.result, done.why) == ("failed", "staging for rank 2 on host3: exit 7: no tables")
    assert "engine" not in hosts.purposes()


@pytest.mark.parametrize(
    "purpose, said, why",
    [
        ("engine", Outcome(125, stderr=b"no device\n"), "did not start: exit 125: no device"),
        ("status", Outcome(0, stdout=b"exited 3\n"), "did not stay up: exited 3 (out of memory)"),
        ("status", Outcome(0, stdout=b"absent\n"), "did not stay up: absent (out of memory)"),
        ("status", Outcome(None, problem="lost", detail="gone"), "cannot be asked: lost: gone"),
    ],
)
def test_a_rank_that_does_not_start_stops_all(hosts, folder, plan, purpose, said, why):
    hosts.says[purpose, 2] = said
    hosts.says["logs"] = Outcome(0, stdout=b"...\nout of memory\n")
    hosts.says["ready"] = Outcome(1)
    done = launch(plan, folder)
    assert done.result == "failed"
    assert f"rank 2 on host3 {why}" in done.why
    assert [call for call in hosts.calls if call[0] == "stop"] == [("stop", n) for n in range(4)]
    assert [r.engine for r in done.ranks] == ["stopped"] * 4


def test_a_rank_that_is_late(hosts, folder, make_plan, make_rank):
    hosts.says["ready"] = Outcome(1)
    hosts.says["logs"] = Outcome(0, stdout=b"loading weights\n")
    done = launch(make_plan(make_rank(start_timeout_s=0)), folder)
    assert done.why == "rank 0 on host1 was not up within 0 s (loading weights)"


def test_a_dropped_connection_while_loading_is_no_failure(hosts, folder, plan):
    silent = [Outcome(None, problem="lost")] * 3

    def status(rank, launch_id, purpose):
        return silent.pop() if silent else Outcome(0, stdout=b"running\n")

    hosts.says["status", 1] = status
    assert launch(plan, folder).result == "started"


def test_headless_ranks_wait_for_those_with_health(hosts, folder, plan):
    answers = [Outcome(1), Outcome(1), OK]
    hosts.says["ready", 0] = lambda rank, launch_id: answers.pop(0)
    assert launch(plan, folder).result == "started"
    assert answers == []


def test_what_could_not_be_stopped_is_said(hosts, folder, plan):
    hosts.says["engine", 0] = Outcome(125)
    hosts.says["stop", 3] = Outcome(None, problem="lost", detail="gone")
    done = launch(plan, folder)
    assert done.why.endswith("; rank 3 on host4 may still run: lost: gone")


def test_ray_nodes_are_gated_and_not_started(hosts, folder, make_plan, make_rank):
    ranks = [make_rank(0), make_rank(1, argv=make_rank(0).argv, starts_engine=False)]
    done = launch(make_plan(*ranks), folder)
    assert done.result == "started"
    assert {("gate", 0), ("gate", 1), ("engine", 0)} <= set(hosts.calls)
    assert ("engine", 1) not in hosts.calls


def test_cancelled_between_stages(hosts, folder, plan):
    cancelled = threading.Event()

    def last(rank):
        cancelled.set()
        return OK

    hosts.says["stage", 3] = last
    done = launch(plan, folder, cancelled=cancelled)
    assert (done.result, done.stage) == ("cancelled", "stage")
    assert "engine" not in hosts.purposes()


def test_a_running_engine_is_not_touched(hosts, folder, plan):
    first = launch(plan, folder)
    hosts.calls.clear()
    with pytest.raises(LaunchError, match=f"runs already, since launch {first.id}.*stop PROFILE"):
        launch(plan, folder)
    assert set(hosts.purposes()) == {"status"}
    assert len(folder.ids()) == 1
    gated = launch(plan, folder, "gate")
    assert gated.result == "passed" and not {"cleanup", "stop"} & set(hosts.purposes())


def test_after_its_end_it_is_launched_again(hosts, folder, plan):
    launch(plan, folder)
    hosts.says["status"] = Outcome(0, stdout=b"absent\n")
    assert launch(plan, folder).result == "failed"  # status: absent
    del hosts.says["status"]
    assert launch(plan, folder).result == "started"


def test_stop_removes_and_says_what_it_could_not(hosts, folder, plan):
    launch(plan, folder)
    assert launch(plan, folder, "stop").result == "stopped"
    hosts.says["cleanup", 1] = Outcome(None, problem="lost", detail="gone")
    done = launch(plan, folder, "stop")
    assert done.result == "refused" and "rank 1 on host2: lost: gone" in done.why


def interrupted(folder, plan, stage):
    with folder.lock("p"):
        left = Launch(plan, folder, "launch").receipt
        left.stage = stage
        folder.create(left)
    return left.id


def test_an_interrupted_launch_is_told_and_cleaned_once(hosts, folder, plan):
    left = interrupted(folder, plan, "start")
    gated = launch(plan, folder, "gate")
    assert (gated.interrupted, gated.cleaned) == ([left], [])
    assert ("stop", 0) in hosts.calls and "cleanup" not in hosts.purposes()
    done = launch(plan, folder)
    assert done.interrupted == done.cleaned == [left]
    assert launch(plan, folder, "gate").interrupted == []


def test_a_gate_cleans_after_a_gate(hosts, folder, plan):
    left = interrupted(folder, plan, "gate")
    assert launch(plan, folder, "gate").cleaned == [left]


def test_hosts_that_left_the_profile_are_named(hosts, folder, plan, make_rank, make_plan):
    gone = make_rank(4, transport=SshTransport(address="old"))
    interrupted(folder, make_plan(*plan.ranks, gone), "start")
    done = launch(plan, folder)
    assert [w for w in done.warnings if "rank 4 on ssh old:22" in w and "look there" in w]


@pytest.mark.parametrize("stage", ["clean", "gate", "stage", "start", "end"])
def test_a_receipt_that_cannot_be_written_starts_nothing(hosts, folder, plan, monkeypatch, stage):
    update = folder.update

    def full(found):
        if (found.stage if found.result is None else "end") == stage:
            raise LaunchError("no space left")
        update(found)

    monkeypatch.setattr(folder, "update", full)
    with pytest.raises(LaunchError, match="no space left"):
        launch(plan, folder)
    [kept] = folder.of("p")
    assert kept.result is None
    started = stage == "end"
    assert ("engine" in hosts.purposes()) == started
    if started:
        assert [c for c in hosts.calls if c[0] == "stop"] == [("stop", n) for n in range(4)]


def test_secrets_are_not_kept(hosts, folder, make_plan, make_rank, monkeypatch):
    """A value that is passed by name is in no command; an output that shows it is cleaned."""
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    plan = make_plan(make_rank(pass_env=("HF_TOKEN",), staging=(("stage", "0"),)))
    hosts.says["stage", 0] = Outcome(1, stderr=b"token hf_abcdefgh\n")
    done = launch(plan, folder)
    text = (folder.path / f"{done.id}.json").read_text()
    assert "hf_abcdefgh" not in text and "token [HF_TOKEN]" in text


def test_check(make_plan, make_rank):
    zero, one = make_rank(0), make_rank(1)
    gate.check(make_plan(zero, one))
    with pytest.raises(LaunchError, match="rank 1 is there 2 times"):
        gate.check(make_plan(zero, one, one))
    with pytest.raises(LaunchError, match="have the same argv"):
        gate.check(make_plan(zero, make_rank(1, argv=zero.argv)))
    with pytest.raises(LaunchError, match="argv_sha256"):
        gate.check(make_plan(zero.model_copy(update={"argv": ("x",)})))
    with pytest.raises(LaunchError, match="has no rank"):
        gate.check(make_plan(zero).model_copy(update={"ranks": ()}))
    for name in ("../x", "a b", ""):
        with pytest.raises(LaunchError, match="profile"):
            gate.check(make_plan(zero, profile=name))
    other = one.model_copy(update={"profile": "q"})
    with pytest.raises(LaunchError, match="rank 1"):
        gate.check(make_plan(zero).model_copy(update={"ranks": (zero, other)}))


def test_ids_sort_by_time_and_name_containers():
    first, second = receipt.new_id(), receipt.new_id()
    assert first < second
    assert re.fullmatch(runtime.LAUNCH_ID, first)
