# SPDX-License-Identifier: Apache-2.0
"""Pins a rank's commands: the box of gate and engine, and, run for real with a stand-in
virtual environment, the gate's frame, its time limit, and that nothing is left behind."""

import contextlib
import http.server
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from sm120_launch import runtime
from sm120_launch.plan import Image, LocalTransport, Mount, RankPlan, SshTransport

DIGEST = "sha256:" + "7" * 64
ARGV = ("/models/V4.1", "--hf-overrides.a", '"x y"', "$HOME;'", "--", "-m")


@pytest.fixture
def rank():
    """A rank in podman; changes by keyword."""

    def make(**changes):
        fields = {
            "rank": 2,
            "profile": "p",
            "host": "h",
            "transport": LocalTransport(),
            "runtime": "podman",
            "image": Image(name="localhost/v", digest=DIGEST, platform="linux/amd64"),
            "runtime_key": "k",
            "argv": ARGV,
            "argv_sha256": "a",
            "env": {"HOME": "/cache", "A": "1 2"},
            "env_sha256": "e",
            "devices": ("0", "1"),
            "checkpoint": "/data/V4.1",
            "model": "/models/V4.1",
            "cache_volume": "sm120-cache-7",
            "gate_timeout_s": 60,
        }
        return RankPlan(**fields | changes)

    return make


def option(command, flag):
    """Every value that follows ``flag``."""
    return [command[n + 1] for n, word in enumerate(command) if word == flag]


@pytest.mark.parametrize("engine", ["podman", "docker"])
def test_gate_and_engine_get_the_same_box(rank, engine):
    """All but name, network, and what is run."""
    made = rank(
        runtime=engine,
        pass_env=("HF_TOKEN",),
        mounts=(Mount(source="/s", target="/t"), Mount(source="/u", target="/w", read_only=False)),
        ipc="private",
        shm_size="16g",
        memlock=-1,
    )
    gate, serve = runtime.gate_command(made, "l1"), runtime.engine_command(made, "l1")
    for command, purpose, network in ((gate, "gate", "none"), (serve, "engine", "host")):
        assert command[:2] == [engine, "run"]
        assert option(command, "--name") == [f"sm120.p.l1.r2.{purpose}"]
        assert option(command, "--network") == [network]
        assert option(command, "--mount") == [
            "type=volume,source=sm120-cache-7,target=/cache",
            "type=bind,source=/data/V4.1,target=/models/V4.1,readonly",
            "type=bind,source=/s,target=/t,readonly",
            "type=bind,source=/u,target=/w",
        ]
        assert option(command, "--env") == ["A=1 2", "HOME=/cache", "HF_TOKEN"]
        assert option(command, "--ulimit") == ["memlock=-1:-1"]
        assert option(command, "--shm-size") == ["16g"]
        assert "--read-only" in command and "--no-healthcheck" in command
        assert option(command, "--pull") == ["never"]
        assert f"localhost/v@{DIGEST}" in command
        assert not any("latest" in word for word in command)
    same = [
        {w for w in c if w.startswith(("--mount", "type=", "A=", "--device"))}
        for c in (gate, serve)
    ]
    assert same[0] == same[1]
    assert tuple(gate[-len(ARGV) :]) == ARGV
    assert tuple(serve[-len(ARGV) :]) == ARGV
    assert tuple(serve[-len(ARGV) - 3 : -len(ARGV)]) == runtime.SERVE
    assert option(serve, "--entrypoint") == ["python3"]
    assert "--rm" in gate and "--rm" not in serve and "--detach" in serve


def test_devices_fail_loudly_where_there_are_none(rank):
    """podman's --gpus does nothing, in silence, on a host without a GPU."""
    podman = runtime.gate_command(rank(devices=("0", "/dev/infiniband/x")), "l")
    assert option(podman, "--device") == ["nvidia.com/gpu=0", "/dev/infiniband/x"]
    assert "--gpus" not in podman
    docker = runtime.gate_command(rank(runtime="docker", devices=("0", "1", "/dev/x")), "l")
    assert option(docker, "--gpus") == ['"device=0,1"']
    assert option(docker, "--device") == ["/dev/x"]
    none = runtime.gate_command(rank(devices=()), "l")
    assert "--device" not in none and "--gpus" not in none


def test_the_gate_ends_by_itself(rank):
    podman = runtime.gate_command(rank(), "l")
    assert option(podman, "--timeout") == ["70"]
    assert option(podman, "sh")[0] == "l" and "timeout -s KILL" in podman[podman.index("-c") + 1]


def test_ipc_and_gate_network(rank):
    made = rank(ipc="host", gate_network="host")
    gate = runtime.gate_command(made, "l")
    assert option(gate, "--ipc") == ["host"] and option(gate, "--network") == ["host"]


@pytest.mark.parametrize("bad", ["", "A", "a b", "a;b", "-a", "a-", "a.b", "ü"])
def test_launch_ids(rank, bad):
    with pytest.raises(ValueError, match="launch id"):
        runtime.name(rank(), bad, "gate")


def test_names_of_other_launches_and_ranks_differ(rank):
    made = {
        runtime.name(rank(profile=p, rank=r), launch, purpose)
        for p in ("a", "a-b")
        for r in (0, 1)
        for launch in ("x", "b-x")
        for purpose in ("gate", "engine")
    }
    assert len(made) == 16


def test_image_is_asked_for_by_digest(rank):
    for engine in ("podman", "docker"):
        command = runtime.inspect_image_command(rank(runtime=engine))
        assert command[0] == engine and command[-1] == f"localhost/v@{DIGEST}"


SELFTEST = """\
import json, os, subprocess, sys, time
path = sys.argv[sys.argv.index("--json") + 1]
argv = sys.argv[sys.argv.index("--") + 1 :]
with open(path, "w") as file:
    json.dump({"argv": argv, "env": dict(os.environ), "stdin": sys.stdin.read()}, file)
mode = os.environ.get("MODE")
if mode == "hang":
    subprocess.Popen(["setsid", "sleep", "600"], stdout=2, stderr=2)
    time.sleep(600)
if mode == "none":
    os.unlink(path)
if mode == "huge":
    open(path, "w").write("x" * (9 << 20))
print("SM120-END l1 0")
sys.stdout.write("SELFTEST PASS")
sys.exit(int(os.environ.get("EXIT", "0")))
"""
SERVE = """\
import os, subprocess, sys
print("serving by", sys.prefix, "in", os.listdir(), *sys.argv[1:], flush=True)
if os.environ.get("FAIL"):
    sys.exit(3)
subprocess.Popen(["setsid", "sleep", "600"])
os.execvp("sleep", ["sleep", "600"])
"""


@pytest.fixture
def venv(tmp_path, monkeypatch):
    """A virtual environment whose self-test and ``vllm`` are stand-ins."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("VLLM_USE_LEAKED", "1")
    monkeypatch.setenv("HF_TOKEN", "secret")
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for name, text in ((runtime.SELFTEST, SELFTEST), (runtime.SERVE[1], SERVE)):
        module = site.joinpath(*name.split(".")).with_suffix(".py")
        module.parent.mkdir(parents=True)
        module.write_text(text)
    (folder / "bin/vllm").write_text("#!/bin/false\n")  # another environment's, say
    (folder / "bin/vllm").chmod(0o755)
    return str(folder)


@pytest.fixture
def in_venv(rank, venv):
    own = f"p{uuid.uuid4().hex[:8]}"  # other tests run beside this one

    def make(**changes):
        fields = {"runtime": "venv", "venv": venv, "image": None, "cache_volume": None}
        fields["profile"] = own
        return rank(**fields | {"env": {"A": "1 2"}} | changes)

    yield make
    for number in (0, 2):  # whatever a failed test left
        run(runtime.cleanup_command(make(rank=number)))


def run(command):
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=60
    )
    return done.returncode, done.stdout


def framed(text, launch="l1"):
    """The self-test's output, its report and the exit status that the frame says."""
    said, _, rest = text.rpartition(f"\nSM120-REPORT {launch}\n")
    report, _, end = rest.rpartition(f"\nSM120-END {launch} ")
    return said, report, end.strip()


def test_gate_in_a_venv(in_venv):
    code, text = run(runtime.gate_command(in_venv(pass_env=("HF_TOKEN",)), "l1"))
    said, report, end = framed(text)
    found = json.loads(report)
    assert (code, end) == (0, "0")
    assert said.splitlines() == ["SM120-END l1 0", "SELFTEST PASS"]
    assert tuple(found["argv"]) == ARGV  # as they are, whatever a shell would make of them
    assert found["stdin"] == ""
    env = found["env"]
    assert (env["A"], env["CUDA_VISIBLE_DEVICES"], env["HF_TOKEN"]) == ("1 2", "0,1", "secret")
    assert "VLLM_USE_LEAKED" not in env
    assert "secret" not in " ".join(runtime.gate_command(in_venv(pass_env=("HF_TOKEN",)), "l1"))
    _, text = run(runtime.gate_command(in_venv(), "l1"))
    assert "HF_TOKEN" not in json.loads(framed(text)[1])["env"]


@pytest.mark.parametrize("status", [1, 2, 77])
def test_the_exit_status_is_the_selftests(in_venv, status):
    code, text = run(runtime.gate_command(in_venv(env={"EXIT": str(status)}), "l1"))
    assert (code, framed(text)[2]) == (status, str(status))


def test_no_report_and_one_too_long(in_venv):
    assert framed(run(runtime.gate_command(in_venv(env={"MODE": "none"}), "l1"))[1])[1] == ""
    cut = framed(run(runtime.gate_command(in_venv(env={"MODE": "huge"}), "l1"))[1])[1]
    assert len(cut) == runtime.REPORT_LIMIT


def test_time_limit_and_what_escaped_it(in_venv):
    """A child in a session of its own outlives the limit; stop finds it."""
    made = in_venv(env={"MODE": "hang"}, gate_timeout_s=1)
    began = time.monotonic()
    code, text = run(runtime.gate_command(made, "l1"))
    assert (code, framed(text)[2]) == (137, "137")
    assert time.monotonic() - began < 20
    assert run(runtime.status_command(made, "l1", "gate")) == (0, "running\n")
    assert run(runtime.stop_command(made, "l1", "gate"))[0] == 0
    assert run(runtime.status_command(made, "l1", "gate")) == (0, "absent\n")


def wait_for(command, wanted):
    for _ in range(100):
        if run(command)[1] == wanted:
            return
        time.sleep(0.1)
    raise AssertionError(run(command))


def test_engine_in_a_venv(in_venv, venv):
    made, other = in_venv(), in_venv(rank=0)
    status = runtime.status_command(made, "l1", "engine")
    assert run(status) == (0, "absent\n")
    assert run(runtime.engine_command(made, "l1"))[0] == 0
    wait_for(status, "running\n")
    said = f"serving by {venv} in ['{runtime.name(made, 'l1', 'engine')}.log'] serve "
    wait_for(runtime.logs_command(made, "l1", "engine"), said + " ".join(ARGV) + "\n")
    # another rank, launch or profile is none of it
    for not_this in (
        runtime.stop_command(other, "l1", "engine"),
        runtime.stop_command(made, "l2", "engine"),
        runtime.cleanup_command(other),
        runtime.cleanup_command(in_venv(profile=f"{made.profile}-x")),
    ):
        assert run(not_this)[0] == 0
    assert run(status) == (0, "running\n")
    # a later launch cleans up, also what left its session
    assert run(runtime.cleanup_command(made))[0] == 0
    assert run(status) == (0, "absent\n")


TITLED = """\
import signal, subprocess, sys
sys.path.append(sys.argv[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
import setproctitle
setproctitle.setproctitle(sys.argv[2] + "x" * 4000)
print("titled", flush=True)
signal.pause()
"""


def test_a_titled_worker_is_found(in_venv, venv):
    """setproctitle, which vLLM uses, writes over the environment that /proc shows."""
    made = in_venv()
    title = f"VLLM::Worker_{made.profile}"
    found = Path(pytest.importorskip("setproctitle").__file__)
    package = str(found.parent if found.name != "__init__.py" else found.parent.parent)
    site = next(Path(venv).glob("lib/python*/site-packages"))
    (site / "titled.py").write_text(TITLED)
    module = site.joinpath(*runtime.SERVE[1].split(".")).with_suffix(".py")
    module.write_text(
        "import subprocess, sys\n"
        f"command = [sys.executable, '-m', 'titled', {package!r}, {title!r}]\n"
        "subprocess.Popen(command, start_new_session=True)\n"
    )
    run(runtime.engine_command(made, "l1"))
    wait_for(runtime.logs_command(made, "l1", "engine"), "titled\n")
    status = runtime.status_command(made, "l1", "engine")
    assert run(status) == (0, "running\n")  # although the first process has ended
    assert run(runtime.engines_command(made))[1] == f"{runtime.name(made, 'l1', 'engine')}\n"
    assert processes(title) == 1
    assert run(runtime.stop_command(made, "l1", "engine"))[0] == 0
    assert processes(title) == 0


def processes(title):
    """How many have a title that begins so."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += path.read_bytes().startswith(title.encode())
    return found


def test_engines_that_run(in_venv):
    """Of whatever launch; another rank, profile or a gate is none of them."""
    made = in_venv()
    asked = runtime.engines_command(made)
    assert run(asked) == (0, "")
    for launch in ("l1", "l2"):
        run(runtime.engine_command(made, launch))
    gate = subprocess.Popen(
        runtime.gate_command(in_venv(env={"MODE": "hang"}), "l3"), stdout=subprocess.DEVNULL
    )
    wait_for(runtime.status_command(made, "l3", "gate"), "running\n")
    names = [runtime.name(made, launch, "engine") for launch in ("l1", "l2")]
    wait_for(asked, "".join(f"{name}\n" for name in names))
    for other in (in_venv(rank=0), in_venv(profile=f"{made.profile}-x")):
        assert run(runtime.engines_command(other)) == (0, "")
    run(runtime.stop_command(made, "l1", "engine"))
    assert run(asked) == (0, f"{names[1]}\n")
    run(runtime.cleanup_command(made))
    gate.wait(20)
    assert run(asked) == (0, "")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo sm120.p.l1.r2.engine; echo sm120.p.l2.r2.gate", (0, "sm120.p.l1.r2.engine\n")),
        ("echo sm120.p.l1.r2.gate", (0, "")),
        (":", (0, "")),
        ("exit 125", (125, "")),  # not known is not none
    ],
)
def test_engines_that_run_in_containers(rank, tmp_path, monkeypatch, script, said):
    engine = tmp_path / "podman"
    asked = "ps --filter label=sm120.rank=p/2 --format {{.Names}}"
    engine.write_text(f'#!/bin/sh\n[ "$*" = "{asked}" ] || exit 9\n{script}\n')
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert run(runtime.engines_command(rank())) == said
    monkeypatch.setenv("PATH", "/nowhere")
    assert run(runtime.engines_command(rank()))[0] == 127


def test_who_answers_on_the_port(in_venv, rank):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        asked = runtime.port_command(in_venv(ready_port=port), "l1")
        assert run(asked)[0] == 0
        other.listen()
        assert run(asked)[0] == 1
        elsewhere = in_venv(ready_port=port, ready_host="127.0.0.77")
        assert run(runtime.port_command(elsewhere, "l1"))[0] == 0
    assert runtime.port_command(rank(), "l1") is None
    assert runtime.port_command(rank(ready_port=8000, network="none"), "l1") is None
    box = runtime.port_command(rank(ready_port=8000), "l1")
    assert option(box, "--network") == ["host"] and option(box, "--entrypoint") == ["python3"]
    assert box[-2:] == ["127.0.0.1", "8000"] and "--rm" in box


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()


class SixServer(http.server.HTTPServer):
    address_family = socket.AF_INET6


@pytest.mark.parametrize(
    ("kind", "host"), [(http.server.HTTPServer, "127.0.0.5"), (SixServer, "::1")]
)
def test_health_is_asked_for_where_the_engine_answers(in_venv, kind, host):
    try:
        server = kind((host, 0), Health)
    except OSError:
        pytest.skip(f"no {host} here")
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made = in_venv(ready_port=server.server_port, ready_host=host)
        assert run(runtime.ready_command(made, "l1"))[0] == 0
        other = in_venv(ready_port=server.server_port, ready_host="127.0.0.6")
        assert run(runtime.ready_command(other, "l1"))[0] != 0
        server.shutdown()


@pytest.mark.parametrize(
    ("uid", "loginctl", "code", "word"),
    [
        (0, "echo Linger=no", 0, ""),
        (1000, "echo Linger=yes", 0, ""),
        (1000, "echo Linger=no", 1, "loginctl enable-linger somebody"),
        (1000, "exit 1", 0, "does not say"),
        (1000, None, 0, "does not say"),
    ],
)
def test_containers_that_would_end_with_the_login(
    rank, tmp_path, monkeypatch, uid, loginctl, code, word
):
    made = rank(transport=SshTransport(address="h"))
    programs = {"id": f'[ "$1" = -u ] && echo {uid} || echo somebody'}
    if loginctl is not None:
        programs["loginctl"] = f'[ "$*" = "show-user somebody -p Linger" ] || exit 9\n{loginctl}'
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found, said = run(runtime.linger_command(made))
    assert found == code and word in said and bool(said) == bool(word)


def test_what_outlives_a_login_is_not_asked_about(rank):
    ssh = SshTransport(address="h")
    assert runtime.linger_command(rank()) is None
    assert runtime.linger_command(rank(runtime="docker", transport=ssh)) is None


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP])
def test_a_gate_that_is_cancelled_leaves_no_folder(in_venv, tmp_path, monkeypatch, hangup, end):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    made = in_venv(env={"MODE": "hang"})
    gate = subprocess.Popen(runtime.gate_command(made, "l1"), stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob("tmp/*/report")):
        assert gate.poll() is None
        time.sleep(0.05)
    if end == signal.SIGTERM:
        assert run(runtime.stop_command(made, "l1", "gate"))[0] == 0
    else:  # the connection was cut
        gate.send_signal(end)
    assert gate.wait(20) == 143
    assert list(tmp_path.glob("tmp/*")) == []


def test_engine_that_fails(in_venv):
    made = in_venv(env={"FAIL": "1"})
    run(runtime.engine_command(made, "l1"))
    wait_for(runtime.status_command(made, "l1", "engine"), "exited 3\n")
    assert run(runtime.logs_command(made, "l1", "engine"))[1].startswith("serving")
    assert run(runtime.stop_command(made, "l1", "engine"))[0] == 0
    assert run(runtime.status_command(made, "l1", "engine")) == (0, "absent\n")


def test_the_venv_is_asked_for(in_venv, venv):
    assert run(runtime.inspect_image_command(in_venv()))[0] == 0
    shutil.rmtree(venv)
    with pytest.raises(FileNotFoundError):
        run(runtime.inspect_image_command(in_venv()))


@pytest.mark.parametrize("purpose", ["status", "stop"])
def test_a_missing_engine_is_not_taken_for_a_missing_container(rank, purpose, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    made = {"status": runtime.status_command, "stop": runtime.stop_command}[purpose]
    assert run(made(rank(), "l1", "engine"))[0] == 127


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("running 0", "running"),
        ("paused 0", "running"),
        ("exited 3", "exited 3"),
        ("stopped 137", "exited 137"),
        ("created 126", "exited 126"),  # it never started
        ("dead 1", "exited 1"),
        ("", "absent"),
    ],
)
def test_states_of_a_container(rank, tmp_path, monkeypatch, state, said):
    """An engine that answers ``container inspect`` so."""
    engine = tmp_path / "podman"
    engine.write_text(f'#!/bin/sh\n[ -n "{state}" ] && echo "{state}"\n')
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert run(runtime.status_command(rank(), "l1", "engine")) == (0, f"{said}\n")
