# SPDX-License-Identifier: Apache-2.0
"""The whole path on real containers and real SSH: gate, stage, start, receipt."""

import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from fork import geometry
from sm120_launch.plan import LocalTransport, Mount, RayTransport
from tests.launch.conftest import KEY, STANDIN, SWITCHES, argv_of

pytestmark = pytest.mark.slow


def test_gate_stage_start_receipt(world):
    """Every rank's own argv is gated in that rank's image, then all are staged and started."""
    plan = world.plan()
    staged = world.folder / "staged"
    script = ("sh", "-c", 'echo "$1" >>"$2"', "sh")
    ranks = [
        rank.model_copy(update={"staging": ((*script, str(rank.rank), str(staged)),)})
        for rank in plan.ranks
    ]
    plan = world.plan_of(*ranks)
    done = world.run("launch", plan)
    assert done.returncode == 0, done.stdout + done.stderr
    argvs = sorted("sm120-standin:1 " + " ".join(rank.argv) for rank in plan.ranks)
    assert sorted(world.witnessed("gate")) == argvs
    assert sorted(world.witnessed("engine")) == argvs
    assert sorted(staged.read_text().split()) == ["0", "1", "2", "3"]
    assert len(world.containers()) == 4
    [kept] = world.kept()
    assert kept == json.loads(done.stdout)
    assert (kept["kind"], kept["result"]) == ("launch", "started")
    assert [rank["verdict"] for rank in kept["ranks"]] == ["PASS"] * 4
    assert [tuple(rank["argv"]) for rank in kept["ranks"]] == [rank.argv for rank in plan.ranks]
    assert [rank["report"]["argv_sha256"] for rank in kept["ranks"]] == [
        rank.argv_sha256 for rank in plan.ranks
    ]
    elsewhere = ["--receipts", str(world.folder / "elsewhere")]
    for more in ([], elsewhere):
        again = world.run("launch", plan, *more)
        assert again.returncode == 2
        assert f"runs already, since launch {kept['id']}" in again.stderr
        assert len(world.containers()) == 4
    stopped = world.run("stop", world.plan_of(*plan.ranks[:3]))  # the fourth has left since
    assert stopped.returncode == 0
    assert world.containers() == []
    assert [kept["result"] for kept in world.kept()] == ["started", "stopped"]


def test_each_rank_in_its_own_image(world):
    """The gate runs each rank's own engine argv in that rank's image, and so does the engine."""
    images = [world.hosts.standin(f"sm120-standin-{letter}") for letter in "ab"]
    plan = world.plan_of(*(world.rank(n, image=images[n % 2]) for n in range(4)))
    assert world.run("launch", plan).returncode == 0
    ran = [f"sm120-standin-{'ab'[r.rank % 2]}:1 {' '.join(r.argv)}" for r in plan.ranks]
    assert sorted(world.witnessed("gate")) == sorted(world.witnessed("engine")) == sorted(ran)


LOOK = """\
#!/bin/sh
write() { (echo x >"$1") 2>/dev/null; echo "$1 $?"; }
write /x; write /models/v41/x; write /cache/from-gate; write /tmp/x
ls /sys/class/net
env
exit 9
"""


def test_the_gate_is_a_closed_box(world):
    """Root and checkpoint are read-only, there is no network, the cache volume is shared
    with the engine, and the environment is the planned one."""
    image = world.hosts.build("sm120-look", {"/usr/bin/python3": LOOK}, "/usr/bin:/bin")
    plan = world.plan_of(world.rank(0, image=image, pass_env=("NOT_THERE",)))
    assert world.run("gate", plan).returncode == 1
    [rank] = world.kept()[0]["ranks"]
    [said] = [c["stdout"] for c in rank["commands"] if c["purpose"] == "gate"]
    lines = said.splitlines()
    assert {"/x 1", "/models/v41/x 1", "/cache/from-gate 0", "/tmp/x 0"} <= set(lines)
    assert lines[lines.index("/tmp/x 0") + 1] == "lo"
    assert 'VLLM_USE_STANDIN=1 "quoted"' in lines and "HOME=/cache" in lines
    assert not [line for line in lines if line.lower().startswith(("http_proxy", "https_proxy"))]
    volume = world.hosts.podman(
        "volume", "inspect", "-f", "{{.Mountpoint}}", plan.ranks[0].cache_volume
    )
    assert os.listdir(volume) == ["from-gate"]


def test_the_time_limit_holds_without_a_launcher(world):
    """kill -9 of the launcher: the containers' own limit ends them."""
    plan = world.plan(dict.fromkeys(range(4), "ignores_term"), gate_timeout_s=4)
    launcher = world.started(world.command("gate", plan))
    world.wait_for(lambda: len(world.witnessed("gate")) == 4)
    launcher.kill()
    launcher.wait()
    assert len(world.containers()) == 4
    world.wait_for(lambda: world.containers() == [], 90)


def test_four_ranks_take_the_time_of_the_slowest(world, record_property):
    """Each self-test takes 3 s, and each of four ends only if all four are at work at once."""
    seconds = {}
    for ranks, fault in ((1, "slow_pass"), (4, "meets_three")):
        faults = dict.fromkeys(range(ranks), fault)
        begun = time.monotonic()
        assert world.run("gate", world.plan(faults, ranks)).returncode == 0
        seconds[ranks] = time.monotonic() - begun
    slowest = max(rank["gate_seconds"] for rank in world.kept()[-1]["ranks"])
    record_property("seconds", {"one": seconds[1], "four": seconds[4], "slowest": slowest})
    print(f"one {seconds[1]:.2f} s, four {seconds[4]:.2f} s, slowest of them {slowest:.2f} s")


def test_a_port_that_is_in_use(world):
    """Somebody answers where the engine would, on the host's own network: nothing is started.
    Once the port is free, the engine comes up there."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        argv = (*argv_of(0, 1), "--port", str(port))
        plan = world.plan_of(world.rank(0, argv=argv, network="host", ready_port=port))
        refused = world.run("launch", plan)
    assert refused.returncode == 1, refused.stdout + refused.stderr
    assert f"127.0.0.1 port {port} is in use" in world.kept()[0]["why"]
    assert world.witnessed("engine") == world.containers() == []
    done = world.run("launch", plan)
    assert done.returncode == 0, done.stdout + done.stderr
    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
    assert world.run("stop", plan).returncode == 0


VLLM = (
    importlib.util.find_spec("torch") is not None and importlib.util.find_spec("vllm") is not None
)
needs_vllm = pytest.mark.skipif(not VLLM, reason="vLLM is not installed here: ./build.sh --tests")


def _real(world):
    """Rank fields with which the container runs this environment's own vLLM, read-only."""
    python = f'#!/bin/sh\nexec {sys.prefix}/bin/python "$@"\n'
    image = world.hosts.build("sm120-real", {"/real/python3": python}, "/real:/bin")
    folders = {sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64"}
    mounts = [Mount(source=os.path.realpath(f), target=f) for f in sorted(folders)]
    fields = {"image": image, "checkpoint": str(geometry.MODEL), "mounts": tuple(mounts)}
    return {**fields, "gate_timeout_s": 500}  # each imports vLLM, all at once


def _asked_and_not_run(world, done, plan):
    """Each rank's real self-test was asked its own question, and had no GPU to answer."""
    assert done.returncode == 1, done.stdout + done.stderr
    [kept] = world.kept()
    assert kept["result"] == "refused"
    for record, rank in zip(kept["ranks"], plan.ranks, strict=True):
        assert record["verdict"] == "NOT RUN", record
        assert record["reason"].startswith("SELFTEST NOT RUN: no GPU here")
        assert record["gates"] == ["device"]
        assert record["report"]["argv_sha256"] == rank.argv_sha256
        assert record["report"]["env_sha256"] == rank.env_sha256
        assert record["engine"] is None
    assert world.containers() == []


@needs_vllm
def test_real_selftest_over_ssh(world):
    fields = _real(world)
    plan = world.plan_of(*(world.rank(n, **fields) for n in range(4)))
    _asked_and_not_run(world, world.run("launch", plan), plan)


@needs_vllm
def test_real_selftest_here_in_a_virtual_environment(world):
    fields = {"transport": LocalTransport(), "runtime": "venv", "venv": sys.prefix, "image": None}
    fields |= {"mounts": (), "cache_volume": None, "network": "host", "gate_timeout_s": 500}
    argv = (str(geometry.MODEL), *argv_of(0, 1)[1:])
    plan = world.plan_of(world.rank(0, argv=argv, model=argv[0], env=SWITCHES, **fields))
    _asked_and_not_run(world, world.run("launch", plan), plan)


def test_virtual_environment_from_gate_to_stop(world):
    """Transport local, runtime venv, with a /health that is really asked. Its console script
    is another environment's, as in one that was copied."""
    venv = world.folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    [site] = venv.glob("lib/python*/site-packages")
    module = site / "vllm/models/deepseek_v41/nvidia/sm120_decode_shape_selftest.py"
    module.parent.mkdir(parents=True)
    serve = site / "vllm/entrypoints/cli/main.py"
    serve.parent.mkdir(parents=True)
    for package in (module.parents[n] for n in range(4)):
        (package / "__init__.py").touch()  # else a checkout's own vllm/ comes first
    shutil.copy(STANDIN / "selftest.py", module)
    shutil.copy(STANDIN / "serve.py", serve)
    script = venv / "bin/vllm"
    script.write_text("#!/bin/false\n")
    script.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = world.rank(0)
    argv = (*argv_of(0, 1), "--port", str(port))
    fields = {"transport": LocalTransport(), "runtime": "venv", "venv": str(venv), "image": None}
    fields |= {"mounts": (), "cache_volume": None, "ready_port": port, "argv": argv}
    env = {"WITNESS": str(world.witness / "log"), "STANDIN_KEY": KEY, **SWITCHES}
    rank = world.rank(0, env=env, **fields)
    plan = world.plan_of(rank)
    done = world.run("launch", plan)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [f"venv {' '.join(argv)}"]
    assert world.witnessed("gate") == world.witnessed("engine") == ran
    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
    assert world.run("stop", plan).returncode == 0
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()


@pytest.mark.skipif(shutil.which("docker") is None, reason="the docker command is not here")
@pytest.mark.parametrize("client", ["docker", "deaf"])
def test_docker(world, client):
    """The docker command, answered by podman's service: there is no daemon of its own. The
    service now and then does not tell docker's client of a container's end: `deaf` never
    hears of one."""
    socket_ = f"unix://{world.folder}/podman.sock"
    service = subprocess.Popen(
        ["podman", "system", "service", "--time", "0", socket_], env=world.hosts.environment
    )
    environment = {**world.hosts.environment, "DOCKER_HOST": socket_}
    if client == "deaf":
        deaf = world.folder / "bin/docker"
        deaf.parent.mkdir()
        deaf.write_text(
            "#!/bin/sh\n"
            f'{shutil.which("docker")} "$@"; status=$?\n'
            'case "$*" in "run --name "*.gate\\ *) sleep 600 ;; esac\n'
            "exit $status\n"
        )
        deaf.chmod(0o755)
        environment["PATH"] = f"{deaf.parent}:{environment['PATH']}"
    world.hosts = dataclasses.replace(world.hosts, environment=environment)
    try:
        world.wait_for((world.folder / "podman.sock").exists)
        fields = {"runtime": "docker", "transport": LocalTransport(), "gate_timeout_s": 20}
        plan = world.plan(ranks=2, **fields)
        done = world.run("launch", plan)
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(world.witnessed("gate")) == len(world.witnessed("engine")) == 2
        assert len(world.containers()) == 2
        assert world.run("stop", plan).returncode == 0
        assert world.containers() == []
        refused = world.run("launch", world.plan({1: "fail"}, ranks=2, **fields))
        assert refused.returncode == 1
        assert len(world.witnessed("engine")) == 2
    finally:
        service.terminate()
        service.wait()


@pytest.fixture(scope="module")
def cluster(hosts, control):
    """A Ray cluster of four nodes; {"address", "raylets": {address: process number}}."""
    command = [control / "bin/python", Path(__file__).parent / "cluster.py"]
    environment = {**hosts.environment, "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        lines = iter(process.stdout.readline, "")
        yield json.loads(next(line for line in lines if line.startswith('{"address"')))
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _on_ray(world, cluster, argv, faults=None, **fields):
    """One driver argv, gated on every node; the first node runs the engine."""
    return world.plan_of(
        *(
            world.rank(
                n,
                (faults or {}).get(n, ""),
                argv=argv,
                starts_engine=n == 0,
                transport=RayTransport(address=cluster["address"], node=f"127.0.0.1{n + 1}"),
                **fields,
            )
            for n in range(4)
        )
    )


@needs_vllm
def test_real_selftest_over_ray(world, cluster):
    fields = _real(world)
    plan = _on_ray(world, cluster, argv_of(0, 1), **fields)
    _asked_and_not_run(world, world.run("launch", plan), plan)


def test_ray(world, cluster):
    """The whole path over a cluster; then a node dies while its self-test runs. Last of
    the cluster's tests."""
    argv = (*argv_of(0, 1), "--distributed-executor-backend", "ray")
    plan = _on_ray(world, cluster, argv)
    done = world.run("launch", plan)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = f"sm120-standin:1 {' '.join(argv)}"
    assert world.witnessed("gate") == [ran] * 4
    assert world.witnessed("engine") == [ran]
    assert world.run("stop", plan).returncode == 0
    assert world.containers() == []

    hanging = _on_ray(world, cluster, argv, {3: "hangs"}, gate_timeout_s=8)
    launcher = world.started(world.command("launch", hanging))
    world.wait_for(lambda: len(world.witnessed("gate")) == 8)
    os.kill(cluster["raylets"]["127.0.0.14"], signal.SIGKILL)
    assert launcher.wait(120) == 1
    lost = world.kept()[-1]["ranks"][3]
    assert lost["verdict"] == "NO ANSWER"
    assert "could not be ended and may still run there" in lost["reason"]
    assert len(world.witnessed("engine")) == 1
    world.wait_for(lambda: world.containers() == [], 90)  # its own limit ends it
