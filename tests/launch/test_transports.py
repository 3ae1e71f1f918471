# SPDX-License-Identifier: Apache-2.0
"""One call to a host: outcomes, bounds of time and output, and what ssh is told."""

import importlib.util
import os
import shlex
import threading
import time
from pathlib import Path

import pytest

from sm120_launch import process, transport, transport_ssh
from sm120_launch.plan import LocalTransport, RayTransport, SshTransport

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


def test_killed_by_a_signal():
    assert sh("kill -SEGV $$").exit_code == -11


def test_process_travels_alone():
    """The Ray transport sends it to nodes that do not have this package."""
    text = Path(process.__file__).read_text(encoding="utf-8")
    assert "sm120_launch" not in text
    plain = process.run_plain(["/bin/sh", "-c", "exit 3"], 10.0, 1000)
    assert process.Outcome(**plain).exit_code == 3


SSH = SshTransport(
    address="spark-1", port=2222, user="me", known_hosts="/k h/%", identity="/keys/id"
)


def test_ssh_options():
    command = transport_ssh.command(SSH, ["echo", "a b", "$HOME", "'"])
    assert command[:3] == ["ssh", "-T", "-n"]
    options = {command[n + 1] for n, word in enumerate(command) if word == "-o"}
    assert {"StrictHostKeyChecking=yes", "ForwardAgent=no", "BatchMode=yes"} <= options
    assert {"ClearAllForwardings=yes", "UpdateHostKeys=no", "ForwardX11=no"} <= options
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
def test_ssh_status(ssh_is, script, problem, detail):
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
