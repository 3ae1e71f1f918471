# SPDX-License-Identifier: Apache-2.0
"""The fault table: whatever goes wrong on some rank, no rank is started, and the receipt
says which rank it was and why. Witnesses on the hosts, not the launcher, say what ran."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from sm120_launch.plan import Mount

pytestmark = pytest.mark.slow

KILLED = Path(__file__).parent / "killed.py"

# What the stand-in does on one rank: the verdict, and what its reason says.
SELFTEST = {
    "fail": ("FAIL", "SELFTEST FAIL: indexer_page"),
    "not_run": ("NOT RUN", "no GPU here"),
    "no_checkpoint": ("NOT RUN", "no config.json"),
    "rules_only": ("NO ANSWER", "last line is 'RULES PASS'"),
    "rules_report": ("NO ANSWER", "level 'rules'"),
    "incomplete": ("NO ANSWER", "complete False"),
    "other_key": ("NO ANSWER", "runtime_key"),
    "other_argv": ("NO ANSWER", "argv_sha256"),
    "other_env": ("NO ANSWER", "env_sha256"),
    "other_schema": ("NO ANSWER", "schema"),
    "failing_row": ("NO ANSWER", "row that failed"),
    "unrun_row": ("NO ANSWER", "was not run"),
    "no_rows": ("NO ANSWER", "no row"),
    "report_says_fail": ("NO ANSWER", "verdict 'FAIL'"),
    "pass_exits_1": ("NO ANSWER", "exit 1"),
    "pass_exits_2": ("NO ANSWER", "exit 2"),
    "pass_in_the_middle": ("NO ANSWER", "last line is 'all is well'"),
    "pass_with_blanks": ("NO ANSWER", "last line"),
    "pass_coloured": ("NO ANSWER", "last line"),
    "fails_with_exit_0": ("NO ANSWER", "last line"),
    "forged_frame": None,  # is no fault: the frame of another launch is plain output
    "hangs": ("NO ANSWER", "timed out"),
    "ignores_term": ("NO ANSWER", "timed out"),
    "slow_output": ("NO ANSWER", "timed out"),
    "says_pass_then_hangs": ("NO ANSWER", "timed out"),
    "flood": ("NO ANSWER", "oversized"),
    "flood_stderr": ("NO ANSWER", "oversized"),
    "long_line": ("NO ANSWER", "oversized"),
    "garbage": ("NO ANSWER", "last line"),
    "garbage_before": None,  # neither are bytes in lines before the verdict
    "silent": ("NO ANSWER", "last line"),
    "crash": ("NO ANSWER", "exit 139"),
    "no_report": ("NO ANSWER", "no report"),
    "garbled_report": ("NO ANSWER", "not JSON"),
    "half_report": ("NO ANSWER", "not JSON"),
    "big_report": ("NO ANSWER", "not JSON"),
    "two_keys": ("NO ANSWER", "a key twice"),
    "escapes": None,
}
FAULTS = {name: expected for name, expected in SELFTEST.items() if expected}
HARMLESS = [name for name, expected in SELFTEST.items() if expected is None]
LIMITED = {"hangs", "ignores_term", "slow_output", "says_pass_then_hangs"}


def nothing_started(world, done, code=1):
    """Asserts it, and that there is one whole receipt. Returns the receipt."""
    assert world.witnessed("engine") == [], done.stdout + done.stderr
    assert world.containers() == []
    assert done.returncode == code, done.stdout + done.stderr
    [kept] = world.kept()
    assert kept["result"] in ("refused", "failed", "cancelled")
    assert kept["ended"]
    return kept


@pytest.mark.parametrize("fault", FAULTS)
def test_selftest(world, fault):
    label, reason = FAULTS[fault]
    rank = list(FAULTS).index(fault) % 2
    changes = {"gate_timeout_s": 3} if fault in LIMITED else {}
    good = world.plan(ranks=2).ranks
    ranks = [world.rank(n, fault, **changes) if n == rank else good[n] for n in range(2)]
    begun = time.monotonic()
    done = world.run("launch", world.plan_of(*ranks))
    assert time.monotonic() - begun < 100  # the stand-in would hang for 600
    kept = nothing_started(world, done)
    found = kept["ranks"][rank]
    assert (found["verdict"], reason in found["reason"]) == (label, True), found["reason"]
    assert {r["verdict"] for r in kept["ranks"] if r["rank"] != rank} == {"PASS"}
    assert f"rank {rank} on host{rank + 1}" in kept["why"]
    assert len(world.witnessed("gate")) == 2
    assert os.path.getsize(world.receipts / f"{kept['id']}.json") < 1 << 20


def test_harmless(world):
    """Odd output before a true verdict stops nothing, and no escape code is kept."""
    done = world.run("gate", world.plan(dict(enumerate(HARMLESS))))
    assert done.returncode == 0, done.stdout + done.stderr
    [kept] = world.kept()
    for rank in kept["ranks"]:
        for command in rank["commands"]:
            text = command["stdout"] + command["stderr"]
            assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    assert world.containers() == []


def _one_rank(world, number, **changes):
    """Rank ``number`` with the changes, and one good rank."""
    good = 1 if number == 0 else 0
    return world.plan_of(
        *sorted((world.rank(good), world.rank(number, **changes)), key=lambda r: r.rank)
    )


def wrong_host_key(world):
    wrong = world.folder / "known_hosts"
    lines = world.hosts.known_hosts.read_text().splitlines()
    other = lines[0].split(maxsplit=1)[1]
    wrong.write_text(f"[127.0.0.13]:{world.hosts.port} {other}\n")
    return _one_rank(world, 2, transport=world.hosts.ssh(3, known_hosts=str(wrong)))


def unknown_host_key(world):
    (world.folder / "known_hosts").touch()
    known = str(world.folder / "known_hosts")
    return _one_rank(world, 1, transport=world.hosts.ssh(2, known_hosts=known))


def wrong_identity(world):
    key = world.folder / "identity"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    return _one_rank(world, 3, transport=world.hosts.ssh(4, identity=str(key)))


def host_down(world):
    return _one_rank(world, 0, transport=world.hosts.ssh(9))


def image_missing(world):
    digest = f"sha256:{'1' * 64}"
    return _one_rank(world, 3, image=world.hosts.image.model_copy(update={"digest": digest}))


def image_changed(world):
    """The tag is there and means another image than when the plan was made."""
    name = f"swap-{world.profile}"
    planned = world.hosts.standin(name)
    plan = _one_rank(world, 1, image=planned)
    changed = world.hosts.standin(name, "2")
    assert changed.digest != planned.digest
    world.hosts.podman("image", "prune", "--force")
    return plan


def image_for_another_platform(world):
    image = world.hosts.image.model_copy(update={"platform": "linux/s390x"})
    return _one_rank(world, 2, image=image)


def checkpoint_missing(world):
    return _one_rank(world, 2, checkpoint="/no/such/checkpoint")


def no_selftest_in_image(world):
    image = world.hosts.build("sm120-empty", {"/image": "empty"})
    return _one_rank(world, 0, image=image)


ENVIRONMENT = {
    wrong_host_key: "Host key verification failed",
    unknown_host_key: "Host key verification failed",
    wrong_identity: "Permission denied",
    host_down: "lost",
    image_missing: "does not have",
    image_changed: "does not have",
    image_for_another_platform: "planned is linux/s390x",
    checkpoint_missing: "no such file or directory",
    no_selftest_in_image: "exit 127",
}


@pytest.mark.parametrize(
    "make, reason", ENVIRONMENT.items(), ids=lambda x: getattr(x, "__name__", "")
)
def test_environment(world, make, reason):
    kept = nothing_started(world, world.run("launch", make(world)))
    assert reason.lower() in kept["why"].lower()


def _session_of(server):
    """The sshd processes that serve connections of one server, by parent."""
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(server.pid)], capture_output=True)
    return [int(pid) for pid in done.stdout.split()]


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP], ids=["cut", "silent"])
def test_connection_lost(world, kind):
    """While rank 2's self-test runs: the connection ends, or only falls silent."""
    launcher = world.started(world.command("launch", world.plan({2: "hangs"})))
    world.wait_for(lambda: len(world.witnessed("gate")) == 4)
    sessions = _session_of(world.hosts.servers[3])
    assert sessions
    for pid in sessions:
        os.kill(pid, kind)
    try:
        assert launcher.wait(120) == 1
    finally:
        for pid in sessions:
            os.kill(pid, signal.SIGKILL) if kind is signal.SIGSTOP else None
    [kept] = world.kept()
    assert kept["ranks"][2]["reason"].startswith("lost")
    assert world.witnessed("engine") == []
    assert world.containers() == []


def test_duplicate_rank(world):
    plan = world.plan()
    twice = world.plan_of(*plan.ranks[:3], plan.ranks[1])
    done = world.run("launch", twice)
    assert done.returncode == 2
    assert "rank 1 is there 2 times" in done.stderr
    assert world.witnessed("gate") == []


def test_plan_that_was_edited(world):
    plan = world.plan()
    argv = (*plan.ranks[0].argv, "--enforce-eager")
    ranks = (plan.ranks[0].model_copy(update={"argv": argv}), *plan.ranks[1:])
    done = world.run("launch", world.plan_of(*ranks))
    assert (done.returncode, world.witnessed("gate")) == (2, [])
    assert "argv_sha256" in done.stderr


def test_staging_fails(world):
    plan = world.plan()
    failing = (("sh", "-c", "echo no tables >&2; exit 7"),)
    ranks = [r.model_copy(update={"staging": failing}) if r.rank == 2 else r for r in plan.ranks]
    kept = nothing_started(world, world.run("launch", world.plan_of(*ranks)))
    assert kept["why"] == "staging for rank 2 on host3: exit 7: no tables"


@pytest.mark.parametrize(
    "rank, fault, why",
    [
        (0, "engine_exits", "exited 3 (CUDA out of memory)"),
        (1, "engine_exits", "exited 3 (CUDA out of memory)"),
        (0, "engine_exits_late", "exited 1 (NCCL timeout)"),
        (1, "engine_exits_late", "exited 1 (NCCL timeout)"),
        (0, "engine_never_up", "was not up within 3 s"),
    ],
)
def test_start_fails(world, rank, fault, why):
    """The others are stopped, the receipt has the rank's last words."""
    faults = {0: "engine_never_up", rank: fault}  # rank 1 is done once rank 0 is up
    limit = 3 if fault == "engine_never_up" else 60
    done = world.run("launch", world.plan(faults, ranks=2, start_timeout_s=limit))
    assert done.returncode == 1
    assert len(world.witnessed("engine")) == 2
    assert world.containers() == []
    [kept] = world.kept()
    assert kept["result"] == "failed"
    assert f"rank {rank} on host{rank + 1}" in kept["why"]
    assert why in kept["why"]
    assert [r["engine"] for r in kept["ranks"]] == ["stopped"] * 2


def test_second_command_waits_its_turn(world):
    plan = world.plan({0: "slow_pass"}, ranks=2)
    first = world.started(world.command("launch", plan))
    world.wait_for(lambda: len(world.witnessed("gate")) > 0)
    second = world.run("launch", plan)
    assert second.returncode == 2
    assert "another command works on profile" in second.stderr
    assert first.wait(120) == 0
    assert len(world.witnessed("gate")) == len(world.witnessed("engine")) == 2
    assert len(world.kept()) == 1


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_cancelled(world, kind):
    """A signal ends a launch in order: containers gone, receipt whole."""
    launcher = world.started(world.command("launch", world.plan({1: "hangs"}, ranks=2)))
    world.wait_for(lambda: len(world.witnessed("gate")) == 2)
    launcher.send_signal(kind)
    assert launcher.wait(120) == 1
    [kept] = world.kept()
    assert kept["result"] == "cancelled"
    assert world.witnessed("engine") == []
    assert world.containers() == []


# Points of a kill -9, and the stage that the receipt is left at. The first kind dies by
# itself at a function's call (killed.py), the second is killed from outside, at work.
BY_ITSELF = {
    "clean": "clean",
    "gate": "gate",
    "staging": "stage",
    "start": "start",
    "end": "start",
    "rename:2": "clean",  # of the first rewrite but one, before it is renamed
    "sync:5": "clean",  # in the middle of a rewrite
}


@pytest.mark.parametrize("point", BY_ITSELF)
def test_killed_at(world, point):
    world.command("launch", world.plan(ranks=2))
    python, script = world.control / "bin/python", KILLED
    files = [world.folder / "plan.json", world.receipts]
    killed = world.started([str(x) for x in (python, script, point, *files)])
    assert killed.wait(120) == -signal.SIGKILL
    after_kill(world, BY_ITSELF[point], engines=2 if point == "end" else 0)


AT_WORK = {"gate": "hangs", "stage": "", "start": "engine_never_up"}


@pytest.mark.parametrize("stage", AT_WORK)
def test_killed_while(world, stage):
    plan = world.plan(dict.fromkeys(range(2), AT_WORK[stage]), ranks=2)
    staged = world.folder / "staged"
    if stage == "stage":
        command = ("sh", "-c", 'echo >>"$1"; sleep 2', "sh", str(staged))
        ranks = [rank.model_copy(update={"staging": (command,)}) for rank in plan.ranks]
        plan = world.plan_of(*ranks)
    launcher = world.started(world.command("launch", plan))
    at_work = {
        "gate": lambda: len(world.witnessed("gate")) == 2,
        "stage": lambda: staged.exists() and len(staged.read_text()) == 2,
        "start": lambda: len(world.witnessed("engine")) == 2,
    }
    world.wait_for(at_work[stage])
    launcher.kill()
    launcher.wait()
    after_kill(world, stage, engines=2 if stage == "start" else 0)


def after_kill(world, stage, engines):
    """The intent stays; the next launch says so, removes what was left, and starts."""
    [left] = world.kept()
    path = world.receipts / f"{left['id']}.json"
    before = path.read_bytes()
    assert (left["result"], left["stage"]) == (None, stage)
    assert len(world.witnessed("engine")) == engines
    done = world.run("launch", world.plan(ranks=2))
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = world.kept()
    assert path.read_bytes() == before
    assert second["result"] == "started"
    assert second["interrupted"] == second["cleaned"] == [first["id"]]
    assert len(world.witnessed("engine")) == engines + 2
    names = world.containers()
    assert len(names) == 2 and all(f".{second['id']}." in name for name in names)


@pytest.fixture
def small_disk(world):
    """A file system of 256 KiB for receipts."""
    disk = world.folder / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def _on_small_disk(world, small_disk, plan):
    command = world.command("launch", plan)
    command[command.index("--receipts") + 1] = str(small_disk / "receipts")
    environment = world.hosts.environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def _fill(disk):
    with open(disk / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass


def test_disk_full_before(world, small_disk):
    """Without an intent nothing is run at all."""
    (small_disk / "receipts").mkdir()
    _fill(small_disk)
    done = _on_small_disk(world, small_disk, world.plan())
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert world.witnessed("gate") == []


def test_disk_full_while_staging(world, small_disk):
    plan = world.plan()
    full = (("sh", "-c", f"dd if=/dev/zero of={small_disk}/filler bs=4k; true"),)
    ranks = [r.model_copy(update={"staging": full}) if r.rank == 1 else r for r in plan.ranks]
    done = _on_small_disk(world, small_disk, world.plan_of(*ranks))
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert world.witnessed("engine") == []
    _still_there(small_disk, "stage")


def test_disk_full_at_the_end(world, small_disk):
    """Started and cannot be recorded as started: stopped again, the intent stays."""
    plan = world.plan()
    mounts = (*plan.ranks[0].mounts, Mount(source=str(small_disk), target="/full", read_only=False))
    first = world.rank(0, "engine_fills_disk", mounts=mounts)
    done = _on_small_disk(world, small_disk, world.plan_of(first, *plan.ranks[1:]))
    assert done.returncode == 2
    assert "the ranks were stopped again" in done.stderr
    assert world.containers() == []
    _still_there(small_disk, "start")


def _still_there(disk, stage):
    [path] = (disk / "receipts").glob("*.json")
    text = path.read_text()
    assert f'"stage": "{stage}"' in text and '"result": null' in text
