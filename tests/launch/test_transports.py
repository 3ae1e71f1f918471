# SPDX-License-Identifier: Apache-2.0
"""One call to a host: outcomes, bounds of time and output, and what ssh is told."""

import importlib.util
import json
import os
import shlex
import sys
import threading
import time
from pathlib import Path

import pytest

from sm120_launch import cluster, process, transport, transport_ray, transport_ssh
from sm120_launch.launcher import Launch
from sm120_launch.plan import LocalTransport, RayTransport, SshTransport
from sm120_launch.receipt import Folder

LOCAL = LocalTransport()


def sh(script, **more):
    return transport.run(LOCAL, ["/bin/sh", "-c", script], **more)


def test_streams_and_status():
    done = sh("echo out; echo err >&2; exit 7")
    assert (done.exit_code, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
    assert done.problem is None and not done.ok
    assert sh("true").ok


def test_nothing_is_read_from_standard_input():
    assert sh("cat").stdout == b""


def test_program_missing():
    done = transport.run(LOCAL, ["/no/such/program"])
    assert done.problem == "not started" and "No such file" in done.detail
    assert transport.run(LOCAL, ["sh\0"]).problem == "not started"


def test_time_limit_ends_the_whole_group(tmp_path):
    begun = time.monotonic()
    mark = tmp_path / "alive"
    done = sh(f"(sleep 1.5; touch {mark}) & sleep 60", timeout_s=0.5)
    assert (done.problem, done.exit_code) == ("timed out", None)
    assert time.monotonic() - begun < 30
    time.sleep(1.5)
    assert not mark.exists()


@pytest.mark.parametrize("stream", ["1", "2"])
def test_output_limit(stream):
    begun = time.monotonic()
    done = sh(f"yes >&{stream}", limit=100_000)
    assert (done.problem, done.exit_code) == ("oversized", None)
    assert max(len(done.stdout), len(done.stderr)) == 100_000
    assert time.monotonic() - begun < 30


def test_exactly_the_limit_is_allowed():
    assert len(sh("head -c 100000 /dev/zero", limit=100_000).stdout) == 100_000
    assert sh("head -c 100001 /dev/zero", limit=100_000).problem == "oversized"


def test_cancelled():
    cancelled = threading.Event()
    threading.Timer(0.3, cancelled.set).start()
    begun = time.monotonic()
    assert sh("sleep 60", cancelled=cancelled).problem == "cancelled"
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("script", ["exec >&- 2>&-; sleep 60", "trap '' TERM; sleep 60"])
def test_closed_output_is_no_end(script):
    assert sh(script, timeout_s=0.5).problem == "timed out"


def test_a_child_that_holds_the_pipe_is_not_waited_for():
    begun = time.monotonic()
    done = sh("sleep 60 & echo begun")
    assert (done.exit_code, done.stdout) == (0, b"begun\n")
    assert time.monotonic() - begun < 30


def test_lines_are_told():
    told = []
    sh("echo one; sleep 0.3; printf 'two\\nhal'; sleep 0.3; echo f", on_line=told.append)
    assert told[0] == "one" and told[-1] == "half" and "hal" not in told


@pytest.mark.parametrize("then", ["sleep 60", "exec >&- 2>&-; sleep 60", "sleep 60 & wait"])
def test_an_end_that_is_not_heard_of(monkeypatch, then):
    """A container's client that hangs after everything was said."""
    monkeypatch.setattr(process, "_LINGER_S", 0.5)
    begun = time.monotonic()
    done = sh(f"echo report; echo 'END 1 0'; {then}", last_line="END 1 ")
    assert (done.problem, done.exit_code) == ("lingers", None)
    assert done.stdout == b"report\nEND 1 0\n" and time.monotonic() - begun < 30


def test_an_end_that_comes_in_time(monkeypatch):
    assert sh("echo 'END 1 0'; sleep 0.5; exit 4", last_line="END 1 ").exit_code == 4
    monkeypatch.setattr(process, "_LINGER_S", 0.5)
    late = "echo 'END 1' >&2; echo ' END 1 0'; echo 'END 2 0'; sleep 1.5; exit 4"
    assert sh(late, last_line="END 1 ").exit_code == 4


def test_killed_by_a_signal():
    assert sh("kill -SEGV $$").exit_code == -11


def test_process_travels_alone():
    """The Ray transport sends it to nodes that do not have this package."""
    text = Path(process.__file__).read_text(encoding="utf-8")
    assert "sm120_launch" not in text
    plain = process.run_plain(["/bin/sh", "-c", "exit 3"], 10.0, 1000, None)
    assert process.Outcome(**plain).exit_code == 3


def test_about(monkeypatch):
    monkeypatch.setenv("VLLM_USE_X", "1")
    monkeypatch.setenv("HF_TOKEN", "secret")
    said = process.about(("VLLM_USE_", "DG_"))
    assert (said["prefix"], said["env"].get("VLLM_USE_X")) == (sys.prefix, "1")
    assert "HF_TOKEN" not in said["env"]


def ray_rank(make_rank, number, **changes):
    fields = {
        "transport": RayTransport(address="head:6379", node=f"10.0.0.{number}"),
        "runtime": "venv",
        "venv": "/opt/v",
        "image": None,
        "devices": ("0", "1"),
        "env": {"VLLM_USE_X": "1", "NCCL_DEBUG": "INFO"},
    }
    return make_rank(number, **{**fields, **changes})


def ray_node(number, **changes):
    env = {"VLLM_USE_X": "1"}
    return {"node": f"10.0.0.{number}", "gpus": 2, "prefix": "/opt/v", "env": env, **changes}


def test_the_planned_cluster(make_rank):
    ranks = [ray_rank(make_rank, n) for n in range(2)]
    head = ray_node(9, gpus=0, prefix="/usr", env={})
    assert cluster.compare(ranks, [ray_node(0), ray_node(1), head]) == []
    box = {"runtime": "podman", "venv": None, "image": make_rank().image}
    boxed = ray_rank(make_rank, 0, **box, devices=("nvidia.com/gpu=all", "/dev/fuse"))
    assert cluster.compare([boxed], [ray_node(0, prefix="/usr", env={})]) == []


@pytest.mark.parametrize(
    "change, said",
    [
        ({"node": "10.0.0.7"}, ["node 10.0.0.7 has 2 GPUs and is no rank's", "is not alive"]),
        ({"gpus": 8}, ["rank 1's node 10.0.0.1 has 8 GPUs in Ray, planned are 2"]),
        ({"prefix": "/opt/old"}, ["raylet runs Python of /opt/old, planned is /opt/v"]),
        ({"env": {}}, ["environment differs from the rank's in VLLM_USE_X"]),
        ({"env": {"VLLM_USE_X": "0"}}, ["environment differs from the rank's in VLLM_USE_X"]),
        (
            {"env": {"VLLM_USE_X": "1", "DG_Y": "1"}},
            ["environment differs from the rank's in DG_Y"],
        ),
    ],
)
def test_another_cluster(make_rank, change, said):
    ranks = [ray_rank(make_rank, n) for n in range(2)]
    found = cluster.compare(ranks, [ray_node(0), ray_node(1, **change)])
    assert [x in line for line, x in zip(found, said, strict=True)] == [True] * len(said)


def test_cluster_is_asked_before_gate_and_start(
    fake_hosts, make_rank, make_plan, monkeypatch, tmp_path
):
    plan = make_plan(ray_rank(make_rank, 0), ray_rank(make_rank, 1, starts_engine=False))
    answers = [[ray_node(0), ray_node(1)], [ray_node(0), ray_node(1), ray_node(2)]]

    def nodes(address, prefixes, timeout_s):
        assert address == "head:6379" and "DG_" in prefixes
        found = answers.pop(0)
        return process.Outcome(0, stdout=json.dumps(found).encode())

    monkeypatch.setattr(transport_ray, "nodes", nodes)
    monkeypatch.setattr(fake_hosts, "inspect_image", lambda rank: process.Outcome(0))
    done = Launch(plan, Folder(tmp_path), "launch").run()
    assert answers == [] and "gate" in fake_hosts.purposes()
    assert "engine" not in fake_hosts.purposes()
    assert done.result == "refused" and "node 10.0.0.2 has 2 GPUs and is no rank's" in done.why
    monkeypatch.setattr(transport_ray, "nodes", lambda *a: process.Outcome(None, problem="lost"))
    fake_hosts.calls.clear()
    done = Launch(plan, Folder(tmp_path), "gate").run()
    assert done.result == "refused" and "no answer from head:6379: lost" in done.why
    assert "gate" not in fake_hosts.purposes()


SSH = SshTransport(
    address="spark-1", port=2222, user="me", known_hosts="/k h/%", identity="/keys/id"
)


def test_ssh_options():
    command = transport_ssh.command(SSH, ["echo", "a b", "$HOME", "'"])
    assert command[:3] == ["ssh", "-T", "-n"]
    options = {command[n + 1] for n, word in enumerate(command) if word == "-o"}
    assert {"StrictHostKeyChecking=yes", "ForwardAgent=no", "BatchMode=yes"} <= options
    assert {"ClearAllForwardings=yes", "UpdateHostKeys=no", "ForwardX11=no"} <= options
    assert {"GSSAPIDelegateCredentials=no", "Tunnel=no"} <= options
    assert "NoHostAuthenticationForLocalhost=no" in options
    assert 'UserKnownHostsFile="/k h/%%"' in options
    assert command[-3:-1] == ["--", "spark-1"]
    assert shlex.split(command[-1]) == ["echo", "a b", "$HOME", "'"]
    assert command[command.index("-p") + 1] == "2222" and command[command.index("-l") + 1] == "me"


def test_ssh_without_settings_is_the_operators_own():
    command = transport_ssh.command(SshTransport(address="host"), ["true"])
    assert not [word for word in command if "KnownHosts" in word or "Identity" in word]


@pytest.fixture
def ssh_is(tmp_path, monkeypatch):
    """Makes ``ssh`` a script."""

    def be(script):
        (tmp_path / "ssh").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return be


@pytest.mark.parametrize(
    "script, problem, detail",
    [
        (
            "echo Host key verification failed. >&2; exit 255",
            "lost",
            "Host key verification failed.",
        ),
        ("exit 255", "lost", "ssh ended with status 255"),
        ("kill -HUP $$", "lost", "ssh died of signal 1"),
        ("exit 3", None, ""),
    ],
)
def test_ssh_status(ssh_is, hangup, script, problem, detail):
    ssh_is(script)
    done = transport.run(SSH, ["true"])
    assert (done.problem, done.detail) == (problem, detail)
    assert done.exit_code == (None if problem else 3)


def test_ssh_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = transport.run(SSH, ["true"])
    assert done.problem == "not started" and "install OpenSSH's client" in done.detail


def test_where():
    assert transport.where(SSH) == "ssh me@spark-1:2222"
    assert transport.where(LOCAL) == "this host"
    assert transport.where(RayTransport(address="a:1", node="10.0.0.1")) == "ray node 10.0.0.1"


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_ray_is_missing():
    """Said as a lost host, with the remedy."""
    done = transport.run(RayTransport(address="127.0.0.11:1", node="127.0.0.11"), ["true"])
    assert done.problem == "lost" and "pip install 'sm120-launch[ray]'" in done.detail
