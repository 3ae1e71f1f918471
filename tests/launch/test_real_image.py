# SPDX-License-Identifier: Apache-2.0
"""docker/Dockerfile, built by podman on a small base with this Python: what is in the image,
who runs it, its health check, and the fork's own wheel in it."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from email import message_from_bytes
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from fork import ROOT, pin, record, series, wheel
from sm120_launch import images
from tests.launch.conftest import KEY, STANDIN
from tests.launch.small_wheel import small_wheel

UID = "2000"
MACHINE = platform.machine()
TAG = f"cp38-abi3-linux_{MACHINE}"

SERVE = """\
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


def libraries(files):
    """What the dynamic loader loads for these files, by the path it asks for."""
    found = set()
    done = subprocess.run(["ldd", *files], capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if match := re.search(r"(/\S+) \(0x", line):
            found.add(match.group(1))
    return found


def python_files():
    """This interpreter, its standard library, pip and shared libraries: path in the image
    to path here."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    binary = Path(sys.executable).resolve()
    skipped = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib"}
    found = {}
    for folder in {stdlib, Path(sysconfig.get_path("platstdlib"))}:
        for path in folder.rglob("*"):
            within = path.relative_to(folder).parts
            if path.is_file() and not skipped & set(within) and "config-" not in within[0]:
                found[str(path)] = path
    pip = Path(find_spec("pip").origin).parent
    for path in pip.rglob("*.py*"):
        if "__pycache__" not in path.parts:
            found[str(stdlib / "pip" / path.relative_to(pip))] = path
    for path in (pip / "_vendor").rglob("*.pem"):
        found[str(stdlib / "pip" / path.relative_to(pip))] = path
    native = [binary, *(p for p in found.values() if p.suffix == ".so" or ".so." in p.name)]
    found |= {path: Path(path) for path in libraries(native)}
    return {**found, str(binary): binary}


@pytest.fixture(scope="module")
def base(hosts):
    """Busybox and this Python, nothing mounted: an image that runs by itself."""
    files = python_files() | {"/etc/passwd": "root:x:0:0:root:/root:/bin/sh\n"}
    files["/bin/python3"] = f'#!/bin/sh\nexec {Path(sys.executable).resolve()} "$@"\n'
    return hosts.build("python", files, "/bin:/usr/local/bin")


@pytest.fixture
def launch(hosts):
    """Runs ``sm120-launch image …``."""
    env = {**hosts.environment, "PYTHONPATH": str(ROOT / "launch"), "COLUMNS": "200"}

    def run(*arguments):
        command = [sys.executable, "-m", "sm120_launch.cli", "image", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)

    return run


def run_in(hosts, image, *command, options=()):
    """A program in the image, as the image's user."""
    return hosts.podman("run", "--rm", "--no-healthcheck", *options, image, *command)


def labels(hosts, image):
    return json.loads(hosts.podman("image", "inspect", image))[0]["Config"]["Labels"]


def sizes(text):
    """Of the line that `image build` prints, in MiB: all, over the base, the base's."""
    found = re.search(r"size: (\d+) MiB, (\d+) MiB over the base's (\d+) MiB", text)
    assert found, text[-2000:]
    return tuple(map(int, found.groups()))


@pytest.mark.slow
def test_the_image(hosts, base, launch, tmp_path):
    built = small_wheel(tmp_path / f"vllm-0.33.0+sm120.1-{TAG}.whl", tag=TAG)
    file = tmp_path / "images.toml"
    arguments = ["build", "--wheel", built, "--base", base.reference, "--images", file]
    done = launch(*arguments, "--name", "localhost/built", "--revision", "r1")
    assert done.returncode == 0, done.stderr[-3000:]
    (added,) = images.load(file)
    reference = added.image.reference
    assert done.stdout.strip() == reference
    whole, over, under = sizes(done.stderr)
    assert whole >= under > 10 and over < 20  # the wheel is small; pip's bytecode is not

    said = json.loads(run_in(hosts, reference, "cat", "/sm120-verified.json"))
    assert said["runtime_key"] == added.runtime_key
    found = labels(hosts, reference)
    assert found["sm120.runtime_key"] == added.runtime_key
    assert found["sm120.revision"] == found["org.opencontainers.image.revision"] == "r1"
    assert found["org.opencontainers.image.version"] == "0.33.0+sm120.1"
    assert found["sm120.base"] == found["org.opencontainers.image.base.name"] == base.reference
    assert found["org.opencontainers.image.licenses"] == "Apache-2.0"

    # Not root, at home in /cache; the installation is not the user's to write.
    who = (
        "import getpass, os; print(os.getuid(), os.getgid(), getpass.getuser(), os.environ['HOME'])"
    )
    assert run_in(hosts, reference, "python3", "-c", who) == f"{UID} 0 vllm /cache"
    write = (
        "import vllm, os; open('/cache/x', 'w'); open(os.path.dirname(vllm.__file__) + '/x', 'w')"
    )
    with pytest.raises(RuntimeError, match=r"PermissionError.*vllm/x"):
        run_in(hosts, reference, "python3", "-c", write)

    # As the launcher starts it: root filesystem read-only, the cache a volume.
    hosts.podman("volume", "create", "cache-built")
    box = ["--read-only", "--mount", "type=volume,source=cache-built,target=/cache"]
    for name in ("one", "two"):
        run_in(hosts, reference, "python3", "-c", f"open('/cache/{name}', 'x')", options=box)
    assert run_in(hosts, reference, "ls", "/cache", options=box).split() == ["one", "two"]

    # a wheel that is not what its recipe says ends the build, and adds no row, also where a
    # good one of that name and key was built before
    (tmp_path / "other").mkdir()
    broken = {"vllm/_version.py": b"__version__ = '0'\n"}
    arguments[2] = small_wheel(tmp_path / "other" / built.name, tag=TAG, **broken)
    done = launch(*arguments, "--name", "localhost/broken")
    assert done.returncode == 2 and "does not say" in done.stderr
    assert len(images.load(file)) == 1

    assert launch("check", "--images", file).returncode == 0
    again = tmp_path / "again.toml"
    assert launch("record", reference, "--images", again).returncode == 0
    assert images.load(again)[0].digest == added.digest
    hosts.podman("rmi", "--force", reference)
    assert launch("check", "--images", file).returncode == 1


@pytest.mark.slow
def test_health_check_of_a_running_container(hosts, base, launch, tmp_path):
    """By the image's own check, as podman's timer runs it."""
    built = small_wheel(tmp_path / f"vllm-0.33.0+sm120.1-{TAG}.whl", tag=TAG)
    file = tmp_path / "images.toml"
    arguments = ["build", "--wheel", built, "--base", base.reference, "--images", file]
    done = launch(*arguments, "--name", "localhost/health")
    assert done.returncode == 0, done.stderr[-3000:]
    reference = images.load(file)[0].image.reference
    (config,) = json.loads(hosts.podman("image", "inspect", reference))
    check = config["Healthcheck"]["Test"]
    assert check == ["CMD", "python3", "-I", "/sm120-health.py"]
    options = ["--detach", "--name", "health"]
    hosts.podman("run", *options, reference, "python3", "-c", SERVE)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                hosts.podman("healthcheck", "run", "health")
                break
            except RuntimeError as error:
                assert time.monotonic() < deadline, error
                time.sleep(0.2)
        with pytest.raises(RuntimeError, match="refused"):
            url = "SM120_HEALTH_URL=http://127.0.0.1:8001/health"
            hosts.podman("exec", "--env", url, "health", *check[1:])
    finally:
        hosts.podman("rm", "--force", "--time", "0", "health")


@pytest.mark.slow
def test_gate_and_engine_run_as_the_image_s_user(world, base, launch):
    """A launch with an image of docker/Dockerfile: what the gate left in the cache volume is
    there for the engine, and neither is root."""
    selftest = (STANDIN / "selftest.py").read_bytes()
    changes = {
        "vllm/models/deepseek_v41/nvidia/sm120_decode_shape_selftest.py": (
            b"open('/cache/compiled', 'x').close()\n" + selftest
        ),
        "vllm/entrypoints/cli/main.py": (
            f"import os\nassert os.getuid() == {UID} and os.path.exists('/cache/compiled')\n{SERVE}"
        ).encode(),
    }
    built = small_wheel(world.folder / f"vllm-0.33.0+sm120.1-{TAG}.whl", tag=TAG, **changes)
    file = world.folder / "images.toml"
    arguments = ["build", "--wheel", built, "--base", base.reference, "--images", file]
    done = launch(*arguments, "--name", "localhost/launched")
    assert done.returncode == 0, done.stderr[-3000:]
    env = {"HOME": "/cache", "STANDIN_KEY": KEY, "WITNESS": "/witness/log"}
    plan = world.plan(ranks=1, image=images.load(file)[0].image, env=env)
    world.witness.chmod(0o777)
    done = world.run("launch", plan)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [rank["verdict"] for rank in json.loads(done.stdout)["ranks"]] == ["PASS"]
    assert world.run("stop", plan).returncode == 0


@pytest.mark.slow
def test_the_other_architecture_as_far_as_no_program_runs(hosts, tmp_path):
    """What RUN does needs that architecture or its emulation; the stage that carries the
    wheels does not."""
    other = {"x86_64": "linux/arm64", "aarch64": "linux/amd64"}[MACHINE]
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/x.whl").write_bytes(b"x")
    for name in ("Dockerfile", "verify_installed.py", "health.py"):
        shutil.copy(ROOT / "docker" / name, tmp_path)
    command = ["build", "--quiet", "--platform", other, "--target", "wheels"]
    hosts.podman(*command, "--build-arg", "BASE=none", "-t", "localhost/other", str(tmp_path))
    (found,) = json.loads(hosts.podman("image", "inspect", "localhost/other"))
    assert f"{found['Os']}/{found['Architecture']}" == other


def fitting(requirement):
    """A version that a requirement takes."""
    tried = [s.version.removesuffix(".*") for s in requirement.specifier]
    tried += [f"{v}.1" for v in tried] + ["1"]
    return next(v for v in tried if requirement.specifier.contains(v, prereleases=True))


def stand_ins(built, folder):
    """Empty wheels for all that a wheel requires here: pip resolves them as it would the
    real ones, and the image stays small."""
    folder.mkdir()
    with zipfile.ZipFile(built) as file:
        name = next(n for n in file.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(file.read(name))
    for line in metadata.get_all("Requires-Dist"):
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, version = re.sub(r"[-_.]+", "_", requirement.name), fitting(requirement)
        extras = "".join(f"Provides-Extra: {extra}\n" for extra in requirement.extras)
        info = f"{name}-{version}.dist-info"
        text = f"Metadata-Version: 2.1\nName: {requirement.name}\nVersion: {version}\n{extras}"
        files = {
            f"{info}/METADATA": text.encode(),
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        lines = [record.line(n, data) for n, data in files.items()] + [f"{info}/RECORD,,", ""]
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
            for n, data in (files | {f"{info}/RECORD": "\n".join(lines).encode()}).items():
                file.writestr(n, data)
    return folder


@pytest.mark.bases
@pytest.mark.slow
def test_the_fork_s_own_wheel(hosts, base, launch, tmp_path):
    """The real wheel, every byte checked in the image; what it requires are stand-ins."""
    built = wheel.build(pin.load(), series.members(), tmp_path)
    file = tmp_path / "images.toml"
    arguments = ["build", "--wheel", built, "--base", base.reference, "--images", file]
    started = time.monotonic()
    done = launch(*arguments, "--wheels", stand_ins(built, tmp_path / "stand-ins"))
    assert done.returncode == 0, done.stderr[-3000:]
    seconds = time.monotonic() - started
    (added,) = images.load(file)
    whole, over, under = sizes(done.stderr)
    with zipfile.ZipFile(built) as archive:
        unpacked = sum(info.file_size for info in archive.infolist()) / 2**20
    assert abs(over - unpacked) < 0.1 * unpacked and whole == pytest.approx(under + over, abs=1)
    print(f"image: {whole} MiB, {over} MiB over the base, in {seconds:.1f} s")

    key = added.runtime_key
    found = labels(hosts, added.image.reference)
    assert found["sm120.runtime_key"] == key
    assert found["org.opencontainers.image.version"] == pin.load().fork_version()
    again = ["--runtime-key", key, "--out", "/cache/again.json"]
    mount = ["--volume", f"{ROOT}/docker/verify_installed.py:/verify.py:ro"]
    said = run_in(hosts, added.image.reference, "python3", "/verify.py", *again, options=mount)
    assert said.startswith(f"verified: vLLM {pin.load().fork_version()}, ")
    hosts.podman("rmi", "--force", added.image.reference)


@pytest.mark.bases
@pytest.mark.slow
def test_the_aarch64_wheel_as_installed(tmp_path):
    """No program of it can run on another machine; that an installer lays down every byte
    that verify_installed.py wants can be seen anywhere."""
    if (uv := shutil.which("uv")) is None:
        pytest.skip("needs uv, which installs for another platform")
    built = wheel.build(pin.load(), series.members(), tmp_path, platform="aarch64")
    site = tmp_path / "site"
    options = ["--no-deps", "--offline", "--python-platform", "aarch64-manylinux_2_28"]
    install = [uv, "pip", "install", "-q", "--python", sys.executable, *options]
    subprocess.run([*install, "--link-mode=copy", "--target", site, built], check=True)
    key = key_of(built)
    command = [sys.executable, ROOT / "docker/verify_installed.py", "--runtime-key", key]
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([*command, "--out", tmp_path / "v.json"], env=env, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    native = next((site / "vllm").glob("_C*.so")).read_bytes()[:20]
    assert native[:4] == b"\x7fELF" and int.from_bytes(native[18:20], "little") == 183  # AArch64
    assert Version(json.loads((tmp_path / "v.json").read_text())["version"]).local


def key_of(built):
    with zipfile.ZipFile(built) as file:
        return json.loads(file.read("vllm/sm120_recipe.json"))["runtime_key"]
