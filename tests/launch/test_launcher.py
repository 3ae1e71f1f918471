# SPDX-License-Identifier: Apache-2.0
"""A launch from intent to receipt, on hosts that are made up: what follows what, and what
stops it. tests/launch/test_faults.py has the same on real ones."""

import json
import re
import threading

import pytest

from sm120_launch import gate, planning, receipt, runtime
from sm120_launch.errors import LaunchError
from sm120_launch.launcher import Launch
from sm120_launch.plan import LaunchPlan, SshTransport
from sm120_launch.process import Outcome
from sm120_launch.receipt import Folder
from tests.launch.conftest import FakeHosts

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
        [[found], _] = folder.of("p")
        seen.append((found.result, found.stage))
        return OK

    hosts.says["cleanup"] = look
    launch(plan, folder)
    assert seen == [(None, "clean")] * 4


def test_gate_alone_starts_nothing(hosts, folder, plan):
    done = launch(plan, folder, "gate")
    assert done.result == "passed"
    assert set(hosts.purposes()) == {"linger", "inspect_image", "cache", "gate"}


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
    [[kept], _] = folder.of("p")
    assert (kept.result, kept.why) == ("failed", "ZeroDivisionError: division by zero")
    assert "engine" not in hosts.purposes()


def test_a_gate_that_did_not_end_is_ended_by_name(hosts, folder, plan):
    hosts.says["gate", 2] = NOT_A_PASS["lost"]
    hosts.says["stop", 2] = Outcome(None, problem="lost", detail="gone")
    done = launch(plan, folder)
    assert ("stop", 2) in hosts.calls and ("stop", 1) not in hosts.calls
    assert done.ranks[2].reason == "lost: gone; it could not be ended and may still run there"


def _lingers(hosts, folder, plan):
    def gate_(rank, launch_id):
        said = hosts.gate(rank, launch_id).stdout
        return Outcome(None, stdout=said, problem="lingers", detail="no end 30 s after")

    hosts.says["gate", 2] = gate_
    return launch(plan, folder)


def test_a_pass_whose_end_was_not_heard_is_ended_by_name(hosts, folder, plan):
    done = _lingers(hosts, folder, plan)
    assert done.result == "started" and ("stop", 2) in hosts.calls
    [warning] = [w for w in done.warnings if "rank 2" in w]
    assert "end was not heard" in warning


def test_a_pass_that_may_still_run_is_no_pass(hosts, folder, plan):
    hosts.says["stop", 2] = Outcome(None, problem="lost", detail="gone")
    done = _lingers(hosts, folder, plan)
    assert done.result == "refused" and done.ranks[2].verdict == "NO ANSWER"
    assert done.ranks[2].reason == "it passed; it could not be ended and may still run there"


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
    done = launch(make_plan(make_rank(start_timeout_s=1)), folder)
    assert done.why == "rank 0 on host1 was not up within 1 s (loading weights)"


def test_a_dropped_connection_while_loading_is_no_failure(hosts, folder, plan):
    silent = [Outcome(None, problem="lost")] * 3

    def status(rank, launch_id, purpose):
        return silent.pop() if silent else Outcome(0, stdout=b"running\n")

    hosts.says["status", 1] = status
    assert launch(plan, folder).result == "started"


def test_headless_ranks_wait_for_those_with_health(hosts, folder, plan):
    answers = [Outcome(1), Outcome(1)]
    hosts.says["ready", 0] = lambda rank, launch_id: answers.pop(0) if answers else OK
    assert launch(plan, folder).result == "started"
    assert answers == []


def test_somebody_else_answers_for_an_engine_that_ends(hosts, folder, plan):
    """/health answers at the first look, where the rank's own process is about to end."""
    looks = []

    def status(rank, launch_id, purpose):
        looks.append(rank.rank)
        return Outcome(0, stdout=b"running\n" if len(looks) == 1 else b"exited 1\n")

    hosts.says["status", 0] = status
    done = launch(plan, folder)
    assert done.result == "failed"
    assert "rank 0 on host1 did not stay up: exited 1" in done.why


def test_a_port_in_use_is_refused_before_the_start(hosts, folder, plan):
    hosts.says["port", 0] = Outcome(1, stderr=b"127.0.0.1 port 8000 is in use\n")
    done = launch(plan, folder)
    assert (done.result, done.stage) == ("refused", "stage")
    assert "port is not free: rank 0 on host1: exit 1: 127.0.0.1 port 8000 is in use" in done.why
    assert "engine" not in hosts.purposes()


def test_a_user_who_does_not_linger(hosts, folder, plan):
    hosts.says["linger", 1] = Outcome(1, stdout=b"me does not linger: loginctl enable-linger me\n")
    hosts.says["linger", 2] = Outcome(0, stdout=b"loginctl does not say\n")
    done = launch(plan, folder)
    assert done.result == "refused"
    assert done.ranks[1].reason == "me does not linger: loginctl enable-linger me"
    assert done.ranks[2].verdict == "PASS"
    assert "rank 2 on host3: loginctl does not say" in done.warnings


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
    assert set(hosts.purposes()) == {"engines"}
    assert len(folder.ids()) == 1
    gated = launch(plan, folder, "gate")
    assert gated.result == "passed" and not {"cleanup", "stop"} & set(hosts.purposes())


@pytest.mark.parametrize("kind", ["elsewhere", "refused between", "stop that failed"])
def test_a_running_engine_is_not_touched_whatever_receipts_say(hosts, folder, plan, tmp_path, kind):
    first = launch(plan, folder if kind != "elsewhere" else Folder(tmp_path / "other"))
    if kind == "refused between":
        hosts.says["engines"] = Outcome(None, problem="lost", detail="gone")
        refused = launch(plan, folder)
        assert refused.result == "refused"
        assert "rank 0 on host1 does not say whether its engine runs: lost: gone" in refused.why
        del hosts.says["engines"]
    if kind == "stop that failed":
        hosts.says["cleanup"] = Outcome(None, problem="lost")
        assert launch(plan, folder, "stop").result == "refused"
        del hosts.says["cleanup"]
    hosts.calls.clear()
    running = set(hosts.running)
    with pytest.raises(LaunchError, match=f"runs already, since launch {first.id}"):
        launch(plan, folder)
    assert hosts.running == running and len(running) == 4
    assert set(hosts.purposes()) == {"engines"}


def test_one_silent_host_is_no_answer(hosts, folder, plan):
    launch(plan, folder)
    hosts.running.clear()
    hosts.says["engines", 2] = Outcome(127, stderr=b"podman: not found\n")
    done = launch(plan, folder)
    assert done.result == "refused" and "rank 2 on host3 does not say" in done.why
    assert hosts.purposes().count("engine") == 4


def test_what_a_failed_launch_could_not_stop_is_removed_by_the_next(hosts, folder, plan):
    hosts.says["status", 2] = Outcome(0, stdout=b"absent\n")
    hosts.says["stop", 3] = Outcome(None, problem="lost")
    assert launch(plan, folder).result == "failed"
    assert [rank for _, rank, *_ in hosts.running] == [3]
    hosts.says.clear()
    assert launch(plan, folder).result == "started"
    assert len(hosts.running) == 4


def test_after_its_end_it_is_launched_again(hosts, folder, plan):
    launch(plan, folder)
    hosts.running.clear()
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


@pytest.fixture
def moved(make_plan, make_rank):
    """A plan of two ranks, and the same once its second rank has moved."""
    old, new = (make_rank(1, transport=SshTransport(address=name)) for name in ("old", "new"))
    return make_plan(make_rank(0), old), make_plan(make_rank(0), new)


def silent_where_old(rank):
    old = rank.transport.kind == "ssh" and rank.transport.address == "old"
    return Outcome(None, problem="lost", detail="gone") if old else OK


@pytest.mark.parametrize("ranks", [1, 2], ids=["removed", "moved"])
def test_stop_ends_what_was_started(hosts, folder, moved, ranks):
    before, after = moved
    first = launch(before, folder)
    after = after.model_copy(update={"ranks": after.ranks[:ranks]})
    done = launch(after, folder, "stop")
    assert (done.result, done.cleaned, hosts.running) == ("stopped", [first.id], set())
    assert [r.where for r in done.ranks[ranks:]] == ["ssh old:22"]
    calls = len(hosts.calls)
    assert launch(after, folder, "stop").result == "stopped"
    assert len(hosts.calls) - calls == ranks  # it is not asked again


def test_stop_says_so_where_the_old_host_is_silent(hosts, folder, moved):
    before, after = moved
    launch(before, folder)
    hosts.says["cleanup"] = silent_where_old
    done = launch(after, folder, "stop")
    assert done.result == "refused" and "rank 1 on host2: lost" in done.why


def test_launch_refuses_while_the_engine_runs_on_a_host_that_left(hosts, folder, moved):
    before, after = moved
    first = launch(before, folder)
    hosts.running = {r for r in hosts.running if r[1] == 1}
    with pytest.raises(LaunchError, match=f"since launch {first.id}: rank 1 on host2"):
        launch(after, folder)


def test_a_host_that_left_and_is_no_more_stops_no_launch(hosts, folder, moved):
    before, after = moved
    first = launch(before, folder)
    hosts.running.clear()

    hosts.says["engines"] = hosts.says["cleanup"] = silent_where_old
    done = launch(after, folder)
    assert (done.result, done.cleaned) == ("started", [])
    [warned] = [w for w in done.warnings if "rank 1 on ssh old:22" in w]
    assert first.id in warned and "look there" in warned


def test_stop_needs_no_whole_plan(hosts, folder, plan):
    launch(plan, folder)
    bare = [planning.to_end(r.rank, "p", r.host, r.transport, r.runtime) for r in plan.ranks]
    known = {"profile": "p", "profile_key": "", "runtime_key": "", "base": ""}
    done = launch(LaunchPlan.model_construct(**known, ranks=tuple(bare)), folder, "stop")
    assert (done.result, hosts.running) == ("stopped", set())


def test_a_damaged_receipt_stops_a_launch_alone(hosts, folder, plan, make_plan, make_rank):
    first = launch(plan, folder)
    path = folder.path / f"{first.id}.json"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 2'))
    with pytest.raises(LaunchError, match="is damaged"):
        launch(plan, folder)
    assert launch(plan, folder, "gate").result == "passed"
    done = launch(plan, folder, "stop")
    assert (done.result, hosts.running) == ("stopped", set())
    assert [w for w in done.warnings if first.id in w]
    other = make_plan(make_rank(), profile="other")
    assert launch(other, folder).result == "started"


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
    [[kept], _] = folder.of("p")
    assert kept.result is None
    started = stage == "end"
    assert ("engine" in hosts.purposes()) == started
    if started:
        assert [c for c in hosts.calls if c[0] == "stop"] == [("stop", n) for n in range(4)]


SECRET = 'hf_"abcdefgh'  # a report has it with a backslash


def test_secrets_are_not_kept(hosts, folder, make_plan, make_rank, monkeypatch):
    """A value that is passed by name is in no command; wherever an answer shows it, it is
    hidden: in outputs, verdicts, reports, engines' last words and warnings."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    told = []
    cut = "x" * (receipt.OUTPUT_HEAD - 9)  # outputs are cut in the midst of it

    def gate_says(rank, launch_id):
        done = FakeHosts.gate(hosts, rank, launch_id)
        warning = f'"warnings":[{json.dumps(SECRET)}]'.encode()
        report = done.stdout.replace(b'"gates"', warning + b',"gates"')
        return Outcome(0, stdout=report, stderr=f"{cut}{SECRET}{'x' * 10**5}".encode())

    ranks = [make_rank(n, pass_env=("HF_TOKEN",), staging=(("stage", "0"),)) for n in range(2)]
    hosts.says["gate", 0] = gate_says
    hosts.says["stage", 0] = Outcome(0, stderr=f"token {SECRET}\n".encode())
    hosts.says["linger", 0] = Outcome(0, stdout=f"warned of {SECRET}\n".encode())
    hosts.says["stop", 1] = Outcome(None, problem="lost", detail=f"no {SECRET}")
    hosts.says["status", 0] = Outcome(0, stdout=f"exited {SECRET}\n".encode())
    done = launch(make_plan(*ranks), folder, told=lambda rank, line: told.append(line))
    text = (folder.path / f"{done.id}.json").read_text()
    assert done.result == "failed"
    assert done.ranks[0].report["warnings"] == ["[HF_TOKEN]"]
    assert done.ranks[1].engine == "may still run: lost: no [HF_TOKEN]"
    for found in (text, done.text(), *told):
        assert "abcd" not in found
    assert "token [HF_TOKEN]" in text and "warned of [HF_TOKEN]" in text


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
    with pytest.raises(LaunchError, match="runtime_key is not the plan's"):
        gate.check(make_plan(zero, make_rank(1, runtime_key="1" * 64)))
    with pytest.raises(LaunchError, match="does not begin with its model"):
        gate.check(make_plan(make_rank(0, model="/models/other")))
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
