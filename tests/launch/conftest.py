# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of the launcher.

``world`` is the real thing for the slow ones: four private sshd on 127.0.0.11 to .14,
podman with runc, a small image whose programs speak the self-test's protocol, and the
launcher installed by itself in an environment of its own, as on a control host. Needs root
on Debian; installs podman, runc, openssh and busybox through apt where they are missing.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from sm120_launch import engine, keys, launcher, runtime, transport
from sm120_launch.plan import Image, LaunchPlan, LocalTransport, Mount, RankPlan, SshTransport
from sm120_launch.process import Outcome

REPOSITORY = Path(__file__).parents[2]
STANDIN = Path(__file__).parent / "standin"
MODEL = "/models/v41"
KEY = keys.digest("the stand-in's recipe")
PLATFORM = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}.get(os.uname().machine, "")
SWITCHES = {"VLLM_USE_STANDIN": '1 "quoted"'}


def argv_of(rank: int, ranks: int = 4) -> tuple[str, ...]:
    """A text-only argv as a profile renders it."""
    headless = ("--headless",) if rank else ()
    return (
        *(MODEL, "--language-model-only", "--tensor-parallel-size", str(ranks)),
        *("--nnodes", str(ranks), "--node-rank", str(rank), "--master-addr", "127.0.0.11"),
        *headless,
    )


@pytest.fixture
def hangup():
    """SIGHUP as a terminal has it: under nohup it is ignored, which children inherit and no
    shell can trap."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def make_rank() -> Callable[..., RankPlan]:
    """One rank of a plan made by hand; keywords replace fields."""

    def make(number: int = 0, **changes: Any) -> RankPlan:
        argv = changes.pop("argv", argv_of(number))
        env = changes.pop("env", {"HOME": "/cache", **SWITCHES})
        fields: dict[str, Any] = {
            "rank": number,
            "profile": "p",
            "host": f"host{number + 1}",
            "transport": LocalTransport(),
            "runtime": "podman",
            "image": Image(name="localhost/x", digest=f"sha256:{'0' * 64}", platform=PLATFORM),
            "runtime_key": KEY,
            "argv": argv,
            "argv_sha256": keys.argv_sha256(argv),
            "env": env,
            "env_sha256": keys.env_sha256(env),
            "devices": (),
            "checkpoint": "/nowhere",
            "model": MODEL,
            "gate_timeout_s": 60,
            "start_timeout_s": 60,
            "ready_port": None if number else 8000,
        }
        return RankPlan(**{**fields, **changes})

    return make


@pytest.fixture
def make_plan(make_rank) -> Callable[..., LaunchPlan]:
    """A plan from ranks made by hand."""

    def make(*ranks: RankPlan, profile: str = "p") -> LaunchPlan:
        ranks = tuple(rank.model_copy(update={"profile": profile}) for rank in ranks)
        return LaunchPlan(
            profile=profile,
            profile_key="0" * 64,
            runtime_key=KEY,
            base="0.33.0",
            ranks=ranks or (make_rank(profile=profile),),
        )

    return make


COMMANDS = (
    "engines",
    "linger",
    "inspect_image",
    "cache",
    "gate",
    "port",
    "engine",
    "status",
    "ready",
    "logs",
    "stop",
    "cleanup",
)


class FakeHosts:
    """Answers every command; ``says[purpose, rank]`` replaces the answer of a good host.

    Attributes:
        running: (profile, rank, launch id, transport) of engines, as they really are.
    """

    def __init__(self):
        self.calls = []
        self.says = {}
        self.running = set()
        self.lock = threading.Lock()

    def run(self, where, argv, **more):
        purpose, rank, *rest = argv
        number = int(rank) if purpose == "stage" else rank.rank
        with self.lock:
            self.calls.append((purpose, number))
        said = self.says.get((purpose, number), self.says.get(purpose))
        if said is None:
            said = getattr(self, purpose, lambda rank, *rest: Outcome(0))
        return said(rank, *rest) if callable(said) else said

    def inspect_image(self, rank):
        return Outcome(0, stdout=f"{rank.image.digest} {rank.image.platform}\n".encode())

    def gate(self, rank, launch_id):
        report = (
            f'{{"schema":1,"runtime_key":"{rank.runtime_key}","argv_sha256":"{rank.argv_sha256}",'
            f'"env_sha256":"{rank.env_sha256}","complete":true,"level":"device",'
            '"verdict":"PASS","line":"SELFTEST PASS","gates":[],'
            '"rows":[{"ok":true,"error_norm":0.0}]}'
        )
        frame = "SELFTEST PASS\n\nSM120-REPORT {0}\n{1}\nSM120-END {0} 0\n"
        return Outcome(0, stdout=frame.format(launch_id, report).encode())

    def engine(self, rank, launch_id):
        self.running.add((rank.profile, rank.rank, launch_id, rank.transport))
        return Outcome(0)

    def engines(self, rank):
        mine = [r for r in self.running if (*r[:2], r[3]) == (*self.of(rank), rank.transport)]
        names = [f"sm120.{r[0]}.{r[2]}.r{r[1]}.engine\n" for r in sorted(mine, key=str)]
        return Outcome(0, stdout="".join(names).encode())

    def stop(self, rank, launch_id, purpose):
        self.running.discard((*self.of(rank), launch_id, rank.transport))
        return Outcome(0)

    def cleanup(self, rank):
        gone = {r for r in self.running if (*r[:2], r[3]) == (*self.of(rank), rank.transport)}
        self.running -= gone
        return Outcome(0)

    @staticmethod
    def of(rank):
        return rank.profile, rank.rank

    def status(self, rank, launch_id, purpose):
        return Outcome(0, stdout=b"running\n")

    def purposes(self):
        return [purpose for purpose, _ in self.calls]


@pytest.fixture
def fake_hosts(monkeypatch):
    """Commands as (purpose, rank, …), answered by FakeHosts."""
    found = FakeHosts()
    for purpose in COMMANDS:
        monkeypatch.setattr(
            runtime,
            f"{purpose}_command",
            lambda rank, *rest, purpose=purpose: [purpose, rank, *rest],
        )
    monkeypatch.setattr(transport, "run", found.run)
    monkeypatch.setattr(engine, "_LOOK_S", 0.01)
    monkeypatch.setattr(launcher, "_IN_FLIGHT_S", 0.0)
    return found


@contextlib.contextmanager
def _once(tmp_path_factory: pytest.TempPathFactory):
    """One test worker at a time."""
    shared = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent
    with open(shared / "set-up.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield shared


def _free_port() -> int:
    """A port that is free on all four addresses."""
    while True:
        with contextlib.ExitStack() as stack:
            port = 0
            try:
                for number in range(1, 5):
                    listening = stack.enter_context(socket.socket())
                    listening.bind((f"127.0.0.1{number}", port))
                    port = listening.getsockname()[1]
            except OSError:
                continue
            return port


@pytest.fixture(scope="session")
def debian(tmp_path_factory):
    """The system's packages that the slow tests use."""
    if os.geteuid() != 0:
        pytest.skip("needs root: containers by runc, sshd on ports of its own")
    programs = {"podman": "podman", "runc": "runc", "sshd": "openssh-server"}
    programs |= {"ssh": "openssh-client", "busybox": "busybox-static"}
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    with _once(tmp_path_factory):
        missing = [p for name, p in programs.items() if not shutil.which(name, path=path)]
        if missing:
            if not shutil.which("apt-get"):
                pytest.skip(f"needs {', '.join(missing)}, and there is no apt-get here")
            environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
            subprocess.run(["apt-get", "update", "-qq"], check=True, env=environment)
            subprocess.run(install, check=True, env=environment, stdout=subprocess.DEVNULL)
    os.makedirs("/run/sshd", exist_ok=True)


@pytest.fixture(scope="session")
def control(tmp_path_factory) -> Path:
    """A control host's environment: the launcher, its own dependencies and Ray."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("needs uv, to install the launcher by itself")
    with _once(tmp_path_factory) as shared:
        venv = shared / "control"
        if not (venv / "done").exists():
            source = shared / "launch"  # a build leaves files beside its sources
            ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
            shutil.copytree(REPOSITORY / "launch", source, ignore=ignored, dirs_exist_ok=True)
            subprocess.run([uv, "venv", "-q", "--python", sys.executable, venv], check=True)
            install = [uv, "pip", "install", "-q", "--python", venv / "bin/python"]
            subprocess.run([*install, f"{source}[ray]"], check=True)
            (venv / "done").touch()
    return venv


@dataclass
class Hosts:
    """Four hosts that are one machine: sshd, container engine, images.

    Attributes:
        servers: sshd by number, 1 to 4, as processes that may be looked into.
        environment: what every command here is run with.
        image: the stand-in's image.
    """

    root: Path
    environment: dict[str, str]
    port: int
    image: Image | None = None
    servers: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def known_hosts(self) -> Path:
        return self.root / "known_hosts"

    @property
    def identity(self) -> Path:
        return self.root / "identity"

    def podman(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(
            ["podman", *arguments], env=self.environment, capture_output=True, text=True
        )
        if check and done.returncode:
            raise RuntimeError(f"podman {' '.join(arguments)}: {done.stderr}")
        return done.stdout.strip()

    def ssh(self, number: int, **changes: Any) -> SshTransport:
        """How to reach host ``number``, 1 to 4."""
        fields = {
            "address": f"127.0.0.1{number}",
            "port": self.port,
            "known_hosts": str(self.known_hosts),
            "identity": str(self.identity),
        }
        return SshTransport(**{**fields, **changes})

    def build(self, name: str, files: Mapping[str, str | Path], path: str = "/bin") -> Image:
        """An image of busybox and ``files`` (path in the image to text or file)."""
        folder = self.root / "build" / name
        shutil.rmtree(folder, ignore_errors=True)
        for target, source in files.items():
            at = folder / "root" / target.lstrip("/")
            at.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(source, Path):
                shutil.copy(source, at)
            else:
                at.write_text(source)
                at.chmod(0o755)
        applets = folder / "root/bin"
        applets.mkdir(parents=True, exist_ok=True)
        shutil.copy(shutil.which("busybox"), applets / "busybox")
        listed = subprocess.run([applets / "busybox", "--list"], capture_output=True, text=True)
        for applet in listed.stdout.split():
            if not (applets / applet).exists():
                os.symlink("busybox", applets / applet)
        recipe = f'FROM scratch\nCOPY root /\nENV PATH={path}\nLABEL test="{name}"\n'
        (folder / "Containerfile").write_text(recipe)
        self.podman("build", "-q", "-t", f"localhost/{name}:latest", str(folder))
        digest = self.podman("image", "inspect", "--format", "{{.Digest}}", f"localhost/{name}")
        return Image(name=f"localhost/{name}", digest=digest, platform=PLATFORM)

    def standin(self, name: str, version: str = "1") -> Image:
        """An image of the stand-in; it knows its own name."""
        files = {
            "/usr/bin/python3": STANDIN / "python3",
            "/usr/bin/vllm": STANDIN / "vllm",
            "/runtime_key": KEY,
            "/image": f"{name}:{version}",
        }
        return self.build(name, files, "/usr/bin:/bin")


@pytest.fixture(scope="session")
def hosts(debian, tmp_path_factory):
    """Four private sshd and a container engine with a storage of its own."""
    root = tmp_path_factory.mktemp("hosts")
    (root / "containers.conf").write_text(
        '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\n'
        'netns = "none"\n[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\n'
        'events_logger = "file"\n'
    )
    (root / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{root}/graph"\nrunroot = "{root}/run"\n'
    )
    containers = {
        "CONTAINERS_CONF": str(root / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(root / "storage.conf"),
    }
    found = Hosts(root, {**os.environ, **containers}, _free_port())
    try:
        _start_servers(found, containers)
        found.image = found.standin("sm120-standin")
        yield found
    finally:
        for server in found.servers.values():
            server.terminate()
            server.wait()
        found.podman("rm", "--all", "--force", "--time", "0", check=False)
        found.podman("volume", "rm", "--all", "--force", check=False)
        found.podman("rmi", "--all", "--force", check=False)
        subprocess.run(["umount", "-q", str(root / "graph/overlay")], check=False)


def _start_servers(hosts: Hosts, environment: Mapping[str, str]) -> None:
    generate = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"]
    subprocess.run([*generate, hosts.identity], check=True)
    set_env = " ".join(f'"{name}={value}"' for name, value in environment.items())
    known = []
    for number in range(1, 5):
        address = f"127.0.0.1{number}"
        key = hosts.root / f"host{number}"
        subprocess.run([*generate, key], check=True)
        known.append(f"[{address}]:{hosts.port} {key.with_suffix('.pub').read_text()}")
        configuration = hosts.root / f"sshd{number}.conf"
        configuration.write_text(
            f"Port {hosts.port}\nListenAddress {address}\nHostKey {key}\nPidFile none\n"
            f"AuthorizedKeysFile {hosts.identity}.pub\nStrictModes no\nUsePAM no\n"
            f"PasswordAuthentication no\nAllowAgentForwarding no\nSetEnv {set_env}\n"
        )
        log = hosts.root / f"sshd{number}.log"
        command = ["/usr/sbin/sshd", "-D", "-f", str(configuration), "-E", str(log)]
        hosts.servers[number] = subprocess.Popen(command)
    hosts.known_hosts.write_text("".join(known))
    for number in hosts.servers:
        log = hosts.root / f"sshd{number}.log"
        deadline = time.monotonic() + 10
        while "listening" not in (log.read_text() if log.exists() else ""):
            if time.monotonic() > deadline:
                raise RuntimeError(f"sshd {number}: {log.read_text()}")
            time.sleep(0.02)


@dataclass
class World:
    """One profile on the four hosts, for one test; and what really happened there."""

    hosts: Hosts
    control: Path
    folder: Path
    profile: str
    make_rank: Callable[..., RankPlan]

    @property
    def receipts(self) -> Path:
        return self.folder / "receipts"

    @property
    def witness(self) -> Path:
        return self.folder / "witness"

    def rank(self, number: int, fault: str = "", **changes: Any) -> RankPlan:
        """Rank ``number`` on its host; its stand-in has ``fault``."""
        checkpoint = self.folder / f"checkpoint{number}"
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / "fault").write_text(fault)
        self.witness.mkdir(exist_ok=True)
        fields = {
            "profile": self.profile,
            "transport": self.hosts.ssh(number + 1),
            "image": self.hosts.image,
            "checkpoint": str(checkpoint),
            "mounts": (Mount(source=str(self.witness), target="/witness", read_only=False),),
            "cache_volume": f"cache-{self.profile}",
            "network": "none",
        }
        return self.make_rank(number, **{**fields, **changes})

    def plan(
        self,
        faults: Mapping[int, str] = MappingProxyType({}),
        ranks: int = 4,
        **changes: Any,
    ) -> LaunchPlan:
        """``ranks`` ranks; ``faults`` by rank, ``changes`` for all."""
        return self.plan_of(*(self.rank(n, faults.get(n, ""), **changes) for n in range(ranks)))

    def plan_of(self, *ranks: RankPlan) -> LaunchPlan:
        return LaunchPlan(
            profile=self.profile,
            profile_key="0" * 64,
            runtime_key=KEY,
            base="0.33.0",
            ranks=ranks,
        )

    def command(self, kind: str, plan: LaunchPlan, *more: str) -> list[str]:
        """The launcher's command line for this plan."""
        path = self.folder / "plan.json"
        path.write_text(plan.model_dump_json())
        receipts = ["--receipts", str(self.receipts), "--json"]
        return [str(self.control / "bin/sm120-launch"), kind, str(path), *receipts, *more]

    def run(self, kind: str, plan: LaunchPlan, *more: str) -> "subprocess.CompletedProcess[str]":
        """Runs the launcher to its end."""
        return subprocess.run(
            self.command(kind, plan, *more),
            env=self.hosts.environment,
            capture_output=True,
            text=True,
            timeout=800,
        )

    def kept(self) -> list[dict[str, Any]]:
        """All receipts, oldest first, as they lie on disk."""
        return [json.loads(path.read_text()) for path in sorted(self.receipts.glob("*.json"))]

    def witnessed(self, word: str) -> list[str]:
        """Image and argv of the runs of ``gate`` or ``engine`` that really took place."""
        log = self.witness / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line.partition(" ")[2] for line in lines if line.partition(" ")[0] == word]

    def started(self, command: list[str]) -> "subprocess.Popen[str]":
        """A command in the background; its output is in ``launcher.log``."""
        log = open(self.folder / "launcher.log", "w")  # noqa: SIM115 the child's
        with log:
            return subprocess.Popen(command, env=self.hosts.environment, stdout=log, stderr=log)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError((self.folder / "launcher.log").read_text()[-2000:])
            time.sleep(0.05)

    def containers(self) -> list[str]:
        """Names of this profile's containers, in whatever state."""
        names = self.hosts.podman("ps", "--all", "--format", "{{.Names}}").split()
        return sorted(name for name in names if f".{self.profile}." in name)


@pytest.fixture
def world(hosts, control, tmp_path, make_rank, request):
    """See World. Nothing of it is left after the test."""
    profile = "w" + keys.digest(request.node.nodeid)[:10]
    found = World(hosts, control, tmp_path, profile, make_rank)
    yield found
    for container in found.containers():
        hosts.podman("rm", "--force", "--time", "0", container, check=False)
