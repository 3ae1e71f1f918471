# SPDX-License-Identifier: Apache-2.0
"""Pins the wheel cache, with a pip that is faked: only a checked file gets its final name."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fork import ForkError, fetch, pin

CONTENT = b"a wheel's bytes"
NAME = "pkg-1.0-cp38-abi3-manylinux_2_28_x86_64.whl"
PIN = pin.WheelPin(name=NAME, sha256=hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache: the folder of PIN's wheel in it."""
    monkeypatch.setenv("SM120_FORK_CACHE", str(tmp_path))
    return tmp_path / "wheels" / PIN.sha256[:16]


@pytest.fixture
def pip(monkeypatch):
    """A pip that writes ``content`` and returns ``code``; ``calls`` are its commands."""
    real = subprocess.run
    fake = SimpleNamespace(
        real=real, run=None, content=CONTENT, code=0, error="", calls=[], requirement="", dies=False
    )

    def run(command, **options):
        fake.calls.append(command)
        if fake.run:
            return fake.run(command, **options)
        folder = Path(command[command.index("--dest") + 1])
        fake.requirement = Path(command[command.index("--requirement") + 1]).read_text()
        if fake.content is not None:
            (folder / NAME).write_bytes(fake.content)
        if fake.dies:
            raise KeyboardInterrupt
        return subprocess.CompletedProcess(command, fake.code, "", fake.error)

    monkeypatch.setattr(subprocess, "run", run)
    return fake


def get():
    return fetch.wheel("pkg", "1.0", PIN)


def test_fetched_once_then_from_the_cache(cache, pip):
    path = get()
    assert path == cache / NAME
    assert path.read_bytes() == CONTENT
    assert len(pip.calls) == 1
    assert get() == path
    assert len(pip.calls) == 1
    assert {p.name for p in cache.iterdir()} == {NAME, "checked"}


def test_pip_is_asked_for_that_file_only(cache, pip):
    get()
    [command] = pip.calls
    assert command[1:4] == ["-m", "pip", "download"]
    assert pip.requirement.split() == ["pkg==1.0", f"--hash=sha256:{PIN.sha256}"]
    assert {"--no-deps", "--require-hashes", "--only-binary=:all:"} <= set(command)
    assert command[command.index("--platform") + 1] == "manylinux_2_28_x86_64"


def test_pure_wheel_needs_no_platform(cache, pip):
    pure = pin.WheelPin(name="pkg-1.0-py3-none-any.whl", sha256=PIN.sha256)
    pip.content = None
    with pytest.raises(ForkError):
        fetch.wheel("pkg", "1.0", pure)
    assert "--platform" not in pip.calls[0]


def test_a_source_distribution_is_fetched_without_running_its_setup(cache, pip, tmp_path):
    """pip asks for metadata: ours answers, by the interface of PEP 517."""
    sdist = pin.WheelPin(name="pkg-1.0.tar.gz", sha256=PIN.sha256)
    seen = {}

    def look(command, **options):
        code = (
            "from setuptools import build_meta as b; print(b.prepare_metadata_for_build_wheel('.'))"
        )
        seen["said"] = real([sys.executable, "-c", code], capture_output=True, text=True,
                            cwd=tmp_path, env=options["env"]).stdout  # fmt: skip
        (Path(command[command.index("--dest") + 1]) / sdist.name).write_bytes(CONTENT)
        return subprocess.CompletedProcess(command, 0, "", "")

    real, pip.run = pip.real, look
    assert fetch.wheel("pkg", "1.0", sdist).name == sdist.name
    [command] = pip.calls
    assert {"--no-binary=:all:", "--no-build-isolation", "--require-hashes"} <= set(command)
    assert "--platform" not in command
    assert seen["said"].strip() == "pkg-1.0.dist-info"
    text = (tmp_path / "pkg-1.0.dist-info/METADATA").read_text()
    assert {"Name: pkg", "Version: 1.0"} <= set(text.splitlines())


def test_a_file_put_there_by_hand_is_checked_and_used(cache, pip):
    cache.mkdir(parents=True)
    (cache / NAME).write_bytes(CONTENT)
    assert get().read_bytes() == CONTENT
    assert pip.calls == []


def test_another_file_is_refused_and_not_kept(cache, pip):
    pip.content = b"another wheel"
    with pytest.raises(ForkError) as caught:
        get()
    assert hashlib.sha256(b"another wheel").hexdigest() in str(caught.value)
    assert PIN.sha256 in str(caught.value)
    assert list(cache.iterdir()) == []
    pip.content = CONTENT
    assert get().read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "code", "error", "words"),
    [
        (None, 1, "ERROR: first\nERROR: No matching distribution\n", "No matching distribution"),
        (None, 1, "ERROR: offline\nWARNING: update pip\n\n", "offline"),
        (None, 0, "", "no such file"),
        (CONTENT, 1, "ERROR: late\n", "late"),
    ],
)
def test_pip_failed(cache, pip, content, code, error, words):
    pip.content, pip.code, pip.error = content, code, error
    with pytest.raises(ForkError) as caught:
        get()
    assert "pkg==1.0" in str(caught.value) and words in str(caught.value)
    assert str(cache / NAME) in str(caught.value)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("content", [CONTENT[:4], CONTENT], ids=["half", "whole, unchecked"])
def test_killed_download_leaves_nothing_that_passes_for_whole(cache, pip, content):
    pip.content, pip.dies = content, True
    with pytest.raises(KeyboardInterrupt):
        get()
    assert not (cache / NAME).exists()
    assert not (cache / "checked").exists()
    pip.content, pip.dies = CONTENT, False
    assert get().read_bytes() == CONTENT


def test_killed_between_the_rename_and_the_note(cache, pip, monkeypatch, killer):
    with killer([(Path, "write_text")]) as kill, pytest.raises(kill.Killed):
        kill.arm(2)  # the first is pip's requirement
        get()
    assert (cache / NAME).exists()
    assert get().read_bytes() == CONTENT
    assert len(pip.calls) == 1


def test_rubbish_of_a_killed_download_is_not_taken(cache, pip):
    """As ``kill -9`` leaves it: the partial folder stays."""
    (cache / "partial-x").mkdir(parents=True)
    (cache / "partial-x" / NAME).write_bytes(CONTENT[:3])
    assert get().read_bytes() == CONTENT


@pytest.mark.parametrize(
    "damaged", [b"", CONTENT[:-1], CONTENT.upper()], ids=["empty", "cut", "same size"]
)
def test_damaged_file_is_noticed_and_removed(cache, pip, damaged):
    path = get()
    stat = path.stat()
    path.write_bytes(damaged)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    with pytest.raises(ForkError, match=r"sha256.*removed; run again"):
        get()
    assert not path.exists()
    assert get().read_bytes() == CONTENT
    assert len(pip.calls) == 2


def test_touched_file_is_hashed_again_once(cache, pip, monkeypatch):
    path = get()
    os.utime(path, ns=(1, 1))
    hashed = []
    real = fetch.sha256
    monkeypatch.setattr(fetch, "sha256", lambda p: hashed.append(p) or real(p))
    assert get() == get() == path
    assert hashed == [path]
    assert len(pip.calls) == 1


def test_upstream_wheel_is_the_platform_s(cache, pip, tiny_pin, monkeypatch):
    asked = []
    monkeypatch.setattr(fetch, "wheel", lambda *args: asked.append(args) or Path("x"))
    wheels = tiny_pin.bases["0.33.0"].wheels
    fetch.upstream_wheel(tiny_pin, target="aarch64")
    monkeypatch.setattr(fetch.platform, "machine", lambda: "AMD64")
    fetch.upstream_wheel(tiny_pin, "0.33.0")
    assert asked == [("vllm", "0.33.0", wheels["aarch64"]), ("vllm", "0.33.0", wheels["x86_64"])]


def test_upstream_wheel_refuses_other_platforms_and_bases(tiny_pin):
    with pytest.raises(ForkError, match=r"'riscv64'.*x86_64, aarch64.*--platform"):
        fetch.upstream_wheel(tiny_pin, target="riscv64")
    with pytest.raises(ForkError, match=r"0\.1 is not served"):
        fetch.upstream_wheel(tiny_pin, "0.1")


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("SM120_FORK_CACHE", "~/wheels")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.cache_dir() == tmp_path / "wheels"
    monkeypatch.delenv("SM120_FORK_CACHE")
    assert fetch.cache_dir().name == "vllm-sm120"


def test_sha256_of_a_file_larger_than_a_chunk(tmp_path):
    data = b"0123456789abcdef" * (1 << 19)  # 8 MiB, two chunks
    (tmp_path / "f").write_bytes(data + b"!")
    assert fetch.sha256(tmp_path / "f") == hashlib.sha256(data + b"!").hexdigest()
