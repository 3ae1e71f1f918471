# SPDX-License-Identifier: Apache-2.0
"""Pins what is read from the package index, and what is said where it has nothing."""

import json
import subprocess
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.version import Version

from fork import ForkError, fetch, index, pin

SHA = "a" * 64
REQUIRES = [
    "flashinfer-python==0.7.2.post1",
    "torch==2.14.0",
    "transformers<5.21.0,>=5.16.1",
    'torch==9.9; extra == "other"',
]


@pytest.fixture
def pip(monkeypatch):
    """A pip whose index is ``has``: what it says of (project, platform)."""

    fake = SimpleNamespace(
        requires=REQUIRES,
        versions="0.10.0, 0.9.2",
        error="ERROR: No matching distribution found for x\n",
        commands=[],
    )

    def run(command, **options):
        fake.commands.append(command)
        if "versions" in command:
            said = f"vllm\nAvailable versions: {fake.versions}\n" if fake.versions else ""
            return subprocess.CompletedProcess(command, not said, said, fake.error)
        project = command[-1].split("==")[0]
        tags = [b for a, b in pairwise(command) if a == "--platform"]
        platform = {tag.removeprefix("manylinux_").split("_", 2)[2] for tag in tags}
        found = fake.has.get((project, *platform))
        if found is None:
            return subprocess.CompletedProcess(command, 1, "", fake.error)
        name, hashes = found
        item = {
            "download_info": {
                "url": f"https://index.invalid/packages/{name}#x",
                "archive_info": {"hashes": hashes},
            },
            "metadata": {"requires_dist": fake.requires},
        }
        report = Path(command[command.index("--report") + 1])
        report.write_text(json.dumps({"install": [item]}))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    fake.has = {
        ("vllm", "x86_64"): ("vllm-0.34.0-cp38-abi3-manylinux_2_28_x86_64.whl", {"sha256": SHA}),
        ("vllm", "aarch64"): ("vllm-0.34.0%2Bx.whl", {"sha256": "b" * 64}),
        ("flashinfer-python", "x86_64"): ("flashinfer.whl", {"sha256": "c" * 64}),
    }
    return fake


@pytest.fixture
def wheel(monkeypatch):
    """The wheel that is fetched: DeepGEMM's version in it."""
    data = {pin.DEEP_GEMM_INIT: b"__version__ = '2.8.1'\n"}
    asked = []
    monkeypatch.setattr(fetch, "wheel", lambda *args: asked.append(args))
    monkeypatch.setattr(fetch, "machine", lambda: "x86_64")
    monkeypatch.setattr(index, "WheelTree", lambda _: type("T", (), {"read": data.get}))
    return asked


def test_releases_are_sorted_as_versions(pip):
    assert index.releases() == [Version("0.9.2"), Version("0.10.0")]


def test_no_releases(pip):
    pip.versions = ""
    with pytest.raises(ForkError, match=r"could not list the releases of vllm.*No matching"):
        index.releases()


def test_a_release(pip, wheel):
    found = index.base_pin("0.34.0")
    assert found.wheels["x86_64"].sha256 == SHA
    assert found.wheels["x86_64"].name == "vllm-0.34.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    assert found.wheels["aarch64"].name == "vllm-0.34.0+x.whl"
    assert (found.flashinfer, found.torch) == ("0.7.2.post1", "2.14.0")
    assert found.transformers == "<5.21.0,>=5.16.1"
    assert (found.deep_gemm, found.flashinfer_wheel.sha256) == ("2.8.1", "c" * 64)
    assert wheel == [("vllm", "0.34.0", found.wheels["x86_64"])]
    assert all("--dry-run" in c and "--no-deps" in c for c in pip.commands)


@pytest.mark.parametrize("missing", ["x86_64", "aarch64"])
def test_a_platform_without_a_wheel(pip, wheel, missing):
    del pip.has["vllm", missing]
    with pytest.raises(index.NotOnIndex, match=rf"vllm==0\.34\.0 for {missing}"):
        index.base_pin("0.34.0")


def test_another_failure_is_no_bad_input(pip, wheel):
    pip.has, pip.error = {}, "ERROR: no network\n"
    with pytest.raises(ForkError, match="no network") as caught:
        index.base_pin("0.34.0")
    assert not isinstance(caught.value, index.NotOnIndex)


@pytest.mark.parametrize("text", ["newest", "0.34.*", ">=0.34", "-r /etc/passwd"])
def test_not_a_version(pip, text):
    with pytest.raises(index.NotOnIndex, match="not a version"):
        index.base_pin(text)
    assert pip.commands == []


def test_no_hash(pip, wheel):
    pip.has["vllm", "x86_64"] = ("vllm.whl", {})
    with pytest.raises(ForkError, match="no SHA-256"):
        index.base_pin("0.34.0")


@pytest.mark.parametrize("said", [[], ["flashinfer-python>=0.7"]])
def test_no_exact_flashinfer(pip, wheel, said):
    pip.requires = [*said, *REQUIRES[1:]]
    with pytest.raises(ForkError, match=r"flashinfer-python.*one exact version"):
        index.base_pin("0.34.0")


@pytest.mark.bases
def test_the_index_says_what_the_pin_says():
    """The real index, through the real pip."""
    the_pin = pin.load()
    assert index.base_pin(the_pin.base) == the_pin.bases[the_pin.base]
    assert Version(the_pin.base) in index.releases()
