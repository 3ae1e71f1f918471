# SPDX-License-Identifier: Apache-2.0
"""Pins produced images: the images file, what an engine must say, and a real build."""

import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fork import ROOT
from sm120_launch import LaunchError, images, runtime
from sm120_launch.cli import app
from sm120_launch.image_build import Build
from tests.launch.small_wheel import small_wheel

KEY, OTHER = "a" * 64, "b" * 64
DIGEST, NEWER = "sha256:" + "1" * 64, "sha256:" + "2" * 64
AT = "2026-11-30T12:00:00Z"


def row(**changes):
    fields = {
        "runtime_key": KEY,
        "platform": "linux/amd64",
        "engine": "podman",
        "name": "localhost/v",
        "digest": DIGEST,
        "made": AT,
        "command": "podman build --build-arg 'A=\"x\\y\"' .",
    }
    return images.Row(**fields | changes)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "images.toml"


def test_rows_read_back(path):
    assert images.load(path) == ()
    rows = [row(), row(runtime_key=OTHER, env={"VLLM_USE_X": 'a"b\\ü'}), row(digest=NEWER)]
    for one in rows:
        images.append(path, one)
    assert images.load(path) == tuple(rows)


def test_what_people_wrote_stays(path):
    path.write_text("# mine\nschema = 1  # first")
    images.append(path, row())
    assert path.read_text().startswith("# mine\nschema = 1  # first\n")
    assert images.load(path) == (row(),)


def test_the_last_row_of_a_key_platform_and_engine_counts(path):
    rows = [row(), row(digest=NEWER), row(platform="linux/arm64"), row(engine="docker")]
    assert images.find(rows, KEY, "linux/amd64", "podman", path).digest == NEWER
    assert images.find(rows, KEY, "linux/arm64", "podman", path).digest == DIGEST


@pytest.mark.parametrize(
    ("key", "platform", "engine"),
    [
        (OTHER, "linux/amd64", "podman"),
        (KEY, "linux/arm64", "podman"),
        (KEY, "linux/amd64", "docker"),
    ],
)
def test_no_row_says_the_command_that_builds_it(path, key, platform, engine):
    with pytest.raises(LaunchError) as refusal:
        images.find([row()], key, platform, engine, path, "dist/x.whl")
    said = str(refusal.value)
    assert f"image build --engine {engine} --images {path} --wheel dist/x.whl" in said
    assert key[:16] in said and f"on a {platform} host" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "schema: missing"),
        ("schema = 2", "schema"),
        ("schema = 1\n[[images]]\n", "images: no such key"),
        ("schema = 1\n[[image]]\nname = 'x'\n", "image.0.runtime_key: missing"),
        ("schema = 1\n[[image]\n", "not TOML"),
        ("schema = 1\n# größe", "not UTF-8"),
        (f"schema = 1\nx = {'[' * 9999}", "nested"),
    ],
)
def test_a_wrong_file_is_refused_and_left(path, text, words):
    path.write_text(text, encoding="latin-1")
    for act in (lambda: images.load(path), lambda: images.append(path, row())):
        with pytest.raises(LaunchError, match=words):
            act()
    assert path.read_text(encoding="latin-1") == text


def test_two_who_append_lose_no_row(path, monkeypatch):
    """The second waits until the first, stopped between reading and writing, is done."""
    reading, on, replace = threading.Event(), threading.Event(), os.replace

    def slow(source, target):
        if not reading.is_set():
            reading.set()
            on.wait(20)
        replace(source, target)

    monkeypatch.setattr(os, "replace", slow)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(images.append, path, row())
        assert reading.wait(20)
        two = pool.submit(images.append, path, row(digest=NEWER))
        assert not wait([two], 0.3).done
        on.set()
        one.result(20), two.result(20)
    assert [r.digest for r in images.load(path)] == [DIGEST, NEWER]


@pytest.mark.parametrize(
    "wrong",
    [
        {"digest": "latest"},
        {"digest": "sha256:" + "1" * 63},
        {"runtime_key": "a"},
        {"platform": "amd64"},
        {"engine": "runc"},
        {"command": "a\nb"},
    ],
)
def test_wrong_rows(wrong):
    with pytest.raises(ValueError):
        row(**wrong)


def engine(answers):
    """An engine that has the images of ``answers``: reference to what inspect prints."""

    def run(command):
        assert command[1:3] == ["image", "inspect"]
        found = answers.get(command[3])
        return SimpleNamespace(returncode=0 if found else 125, stdout=json.dumps([found]))

    return run


def inspected(**changes):
    fields = {
        "Digest": DIGEST,
        "RepoDigests": [f"localhost/v@{DIGEST}"],
        "Os": "linux",
        "Architecture": "amd64",
        "Config": {"Labels": {"sm120.runtime_key": KEY}, "Env": ["PATH=/bin", "VLLM_USE_X=1=2"]},
    }
    return fields | changes


HELD = {"VLLM_USE_X": "1=2"}


def test_record_takes_what_the_engine_says():
    for reference in ("localhost/v:tag", "localhost:5000/a/v"):
        made = images.record("podman", reference, "cmd", engine({reference: inspected()}))
        assert (made.runtime_key, made.digest, made.platform) == (KEY, DIGEST, "linux/amd64")
        assert made.env == HELD
        assert made.name == reference.removesuffix(":tag")


@pytest.mark.parametrize("reference", ["1" * 64, "sha256:" + "1" * 64, "1" * 12])
def test_record_by_id_takes_the_image_s_name(reference):
    """Nothing can be started from ``ID@digest``."""
    tagged = inspected(RepoTags=["<none>:<none>", "localhost:5000/a/v:tag"])
    made = images.record("podman", reference, "cmd", engine({reference: tagged}))
    assert made.name == "localhost:5000/a/v"
    bare = inspected(RepoTags=None, RepoDigests=None)
    with pytest.raises(LaunchError, match=f"podman tag {reference} NAME"):
        images.record("podman", reference, "cmd", engine({reference: bare}))
    hexadecimal = inspected(RepoTags=["localhost/other:1", "cafe:1"])  # a name like an ID
    assert images.record("podman", "cafe", "c", engine({"cafe": hexadecimal})).name == "cafe"


def test_record_refuses_what_it_cannot_vouch_for():
    plain = inspected(Config={"Labels": None, "Env": None})
    bare = inspected(RepoDigests=[])
    for name, found, words in (
        ("podman", None, "has no image"),
        ("podman", plain, "no label sm120.runtime_key"),
        ("docker", bare, "no digest"),
    ):
        with pytest.raises(LaunchError, match=words):
            images.record(name, "v", "cmd", engine({"v": found}))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (inspected(), None),
        (None, "does not have"),
        (inspected(Digest=NEWER, RepoDigests=[]), "podman has sha256:2"),
        (inspected(Architecture="arm64"), "platform is 'linux/arm64'"),
        (inspected(Config={"Labels": {"sm120.runtime_key": OTHER}, "Env": []}), "runtime key"),
        (inspected(Config={"Labels": {"sm120.runtime_key": KEY}, "Env": []}), "environment"),
    ],
)
def test_check(found, words):
    wrong = images.check(row(env=HELD), engine({f"localhost/v@{DIGEST}": found}))
    assert (wrong is None) if words is None else (words in wrong)


def test_size():
    def run(code, text):
        return lambda command: SimpleNamespace(returncode=code, stdout=text)

    assert images.size("podman", "v", run(0, "123\n")) == 123
    assert images.size("podman", "v", run(0, "")) is None
    assert images.size("podman", "v", run(125, "")) is None


def test_check_without_an_engine(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="not on PATH"):
        images.check(row())


@pytest.fixture
def wheel(tmp_path):
    """A small wheel that passes for the fork's."""
    return small_wheel(tmp_path / "vllm-0.33.0+sm120.1-py3-none-any.whl")


BASE = f"vllm/vllm-openai@{DIGEST}"
DOCKERFILE = ROOT / "docker/Dockerfile"


def build(wheel, **changes):
    fields = {"engine": "podman", "base": BASE, "wheel": wheel, "name": "localhost/v"}
    return Build(**fields | {"dockerfile": DOCKERFILE} | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base": "vllm/vllm-openai:v0.33.0"}, "A tag moves"),
        ({"base": f"--x@{DIGEST} y"}, "NAME@sha256"),
        ({"name": "Vllm"}, "lower case"),
        ({"dockerfile": Path("/nowhere/Dockerfile")}, "no such file"),
        ({"wheel": Path("/vllm-1-py3-none-any.whl")}, "a recipe"),
        ({"wheel": Path("/nowhere.whl")}, "not named as a wheel"),
    ],
)
def test_builds_that_cannot_be(wheel, path, changes, words):
    with pytest.raises(LaunchError, match=words):
        build(**{"wheel": wheel} | changes).run(path, lambda command: pytest.fail("started"))
    assert not path.exists()


def test_build_has_all_in_its_folder_and_no_network(wheel, path, tmp_path, monkeypatch):
    more = tmp_path / "more"
    more.mkdir()
    (more / "dep-1-py3-none-any.whl").write_bytes(b"dep")
    seen = {}

    def stream(command):
        folder = Path(command[-1])
        seen["files"] = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        seen["command"] = command
        return 0

    made = build(wheel, wheels=more, revision="r1", options=("--isolation=chroot",))
    key = made.recipe().runtime_key
    found = inspected(Config={"Labels": {"sm120.runtime_key": key, "sm120.revision": "r1"}})
    monkeypatch.setattr(images, "inspect", lambda *a: images.Inspected(
        (DIGEST,), "linux/amd64", (), found["Config"]["Labels"], {}))  # fmt: skip
    added = made.run(path, stream)
    assert seen["files"] == [
        "Dockerfile",
        "health.py",
        "verify_installed.py",
        "wheels/dep-1-py3-none-any.whl",
        f"wheels/{wheel.name}",
    ]
    command = seen["command"]
    assert command[command.index("--network") + 1] == "none"
    assert f"BASE={BASE}" in command and f"RUNTIME_KEY={key}" in command
    assert "VERSION=0.33.0+sm120.1" in command
    assert "--isolation=chroot" in command and "--platform" not in command
    assert command[command.index("--format") + 1] == "docker"  # which has health checks
    assert images.load(path) == (added,)
    assert (added.revision, added.name) == ("r1", "localhost/v")


@pytest.mark.parametrize(
    ("machine", "platform"), [("x86_64", "linux/amd64"), ("aarch64", "linux/arm64")]
)
def test_the_image_has_the_platform_of_its_wheel(path, tmp_path, monkeypatch, machine, platform):
    name = f"vllm-0.33.0+sm120.1-cp38-abi3-manylinux_2_28_{machine}.whl"
    made = build(small_wheel(tmp_path / name), engine="docker")
    command = made.command(".")
    assert command[command.index("--platform") + 1] == platform
    assert "--format" not in command  # docker has no such option
    monkeypatch.setattr("platform.machine", lambda: "aarch64" if machine == "x86_64" else "x86_64")
    with pytest.raises(LaunchError, match=f"The wheel is for {platform}, this machine is"):
        made.run(path, lambda command: 1)


def test_a_build_that_fails_adds_no_row(wheel, path):
    with pytest.raises(LaunchError, match="exit 7"):
        build(wheel).run(path, lambda command: 7)
    assert not path.exists()


def test_a_wrong_images_file_stops_before_the_build(wheel, path):
    path.write_text("schema = 2")
    with pytest.raises(LaunchError):
        build(wheel).run(path, lambda command: pytest.fail("started"))


def test_check_command(path, monkeypatch):
    runner = CliRunner()
    done = runner.invoke(app, ["image", "check", "--images", str(path)])
    assert isinstance(done.exception, LaunchError)
    images.append(path, row(digest=NEWER))
    images.append(path, row())
    images.append(path, row(engine="docker"))
    asked = []
    monkeypatch.setattr(images, "check", lambda r: asked.append(r) or None)
    done = runner.invoke(app, ["image", "check", "--images", str(path), "--engine", "podman"])
    assert (done.exit_code, asked) == (0, [row()])
    monkeypatch.setattr(images, "check", lambda r: "is not there")
    done = runner.invoke(app, ["image", "check", "--images", str(path), "--json"])
    assert done.exit_code == 1
    assert [r["wrong"] for r in json.loads(done.stdout)] == ["is not there"] * 2


# --- the check inside the image, run in a virtual environment


@pytest.fixture
def installed(tmp_path, wheel):
    """A virtual environment with the small wheel: (its Python, site-packages)."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("needs uv, to install a wheel")
    folder = tmp_path / "venv"
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, folder], check=True)
    python = folder / "bin/python3"
    command = [uv, "pip", "install", "-q", "--offline", "--python", python, "--link-mode=copy"]
    subprocess.run([*command, wheel], check=True)
    return python, next(folder.glob("lib/python*/site-packages"))


@pytest.mark.parametrize("module", [runtime.SELFTEST, runtime.SERVE[1]])
def test_verify_misses_what_gate_and_engine_run(installed, wheel, tmp_path, module):
    python, site = installed
    name = module.replace(".", "/") + ".py"
    (site / name).unlink()
    lines = (site / "vllm-0.33.0+sm120.1.dist-info/RECORD").read_text().splitlines(keepends=True)
    kept = "".join(line for line in lines if not line.startswith(name))  # a wheel without it
    (site / "vllm-0.33.0+sm120.1.dist-info/RECORD").write_text(kept)
    code, said = verify(python, build(wheel).recipe().runtime_key, tmp_path)
    assert code == 1 and f"{name}: missing" in said


def verify(python, key, tmp_path, path=None):
    script = ROOT / "docker/verify_installed.py"
    env = {**os.environ, "PATH": f"{Path(python).parent}:{path or os.environ['PATH']}"}
    command = [python, script, "--runtime-key", key, "--out", tmp_path / "verified.json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_verify_installed(installed, wheel, tmp_path):
    python, site = installed
    key = build(wheel).recipe().runtime_key
    assert verify(python, key, tmp_path)[0] == 0
    assert json.loads((tmp_path / "verified.json").read_text())["runtime_key"] == key
    (tmp_path / "verified.json").unlink()

    code, said = verify(python, OTHER, tmp_path)
    assert code == 1 and f"wanted {OTHER}" in said
    for name, words in (
        ("vllm/__init__.py", "its hash"),
        ("vllm/_version.py", "does not say 0.33.0+sm120.1"),
        ("vllm/sm120_recipe.json", "missing or damaged"),
    ):
        old = (site / name).read_bytes()
        (site / name).write_bytes(b"x = 1\n")
        code, said = verify(python, key, tmp_path)
        assert code == 1 and words in said and f"{name}: its hash" in said
        (site / name).write_bytes(old)
    (site / "vllm/__init__.py").unlink()
    assert "vllm/__init__.py: missing" in verify(python, key, tmp_path)[1]
    code, said = verify(python, key, tmp_path, path=tmp_path)
    assert code == 1 and "timeout: not on PATH" in said
    assert not (tmp_path / "verified.json").exists()


def test_verify_knows_the_tools_that_the_commands_call():
    spec = (ROOT / "docker/verify_installed.py").read_text()
    for tool in ("timeout", "mktemp", "head", "mkdir", "rm"):
        assert f'"{tool}"' in spec and tool in runtime._GATE
