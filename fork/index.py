# SPDX-License-Identifier: Apache-2.0
"""What the package index has of upstream, through pip: releases, files, hashes, metadata.

The index is the one that pip is configured for; no host is named here. pip resolves
without installing (``--dry-run --report``), so a release is looked up from the index's own
metadata, without its wheel.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from fork import ForkError, fetch
from fork.pin import DEEP_GEMM_INIT, PLATFORMS, BasePin, Pin, WheelPin
from fork.tree import WheelTree

# Platform tags that upstream's CUDA wheels may carry: 2_28 today, later ones are tried.
_GLIBC = ("2_28", "2_31", "2_34", "2_35", "2_39")


class NotOnIndex(ForkError):
    """The index has no such release for these platforms."""


def releases(project: str = "vllm") -> list[Version]:
    """The project's final releases on the index, oldest first.

    Raises:
        ForkError: pip could not list them.
    """
    done = _pip("index", "versions", project)
    found = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    if done.returncode or found is None:
        raise ForkError(f"pip could not list the releases of {project}: {_last_line(done)}")
    return sorted(Version(text) for text in found.group(1).split(", "))


def base_pin(version: str) -> BasePin:
    """What UPSTREAM.toml would say of a release: its wheels, and what they require.

    The wheel of this machine's platform is fetched, for the DeepGEMM that it vendors.

    Raises:
        NotOnIndex: no such release, or not for every platform.
        ForkError: it requires FlashInfer, torch or transformers in a way that a pin
            cannot say, or pip failed.
    """
    found = {name: _resolve("vllm", version, name) for name in PLATFORMS}
    wheels = {name: wheel for name, (wheel, _) in found.items()}
    required = requirements(found[PLATFORMS[0]][1])
    tree = WheelTree(fetch.wheel("vllm", version, wheels.get(fetch.machine()) or wheels["x86_64"]))
    flashinfer = exact(required, "flashinfer-python")
    return BasePin(
        flashinfer=flashinfer,
        torch=exact(required, "torch"),
        transformers=str(required.get("transformers", "")),
        deep_gemm=deep_gemm_version(tree.read(DEEP_GEMM_INIT) or b""),
        wheels=wheels,
        flashinfer_wheel=flashinfer_wheel(flashinfer),
    )


def flashinfer_wheel(version: str) -> WheelPin:
    """FlashInfer's wheel, which is the same for every platform."""
    return _resolve("flashinfer-python", version, PLATFORMS[0])[0]


def with_base(the_pin: Pin, version: str, found: BasePin) -> Pin:
    """``the_pin`` with one more base."""
    return the_pin.model_copy(update={"bases": the_pin.bases | {version: found}})


def requirements(lines: Sequence[str]) -> dict[str, SpecifierSet]:
    """Unconditional requirements: project to versions."""
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): r.specifier for r in parsed if r.marker is None}


def exact(required: dict[str, SpecifierSet], project: str) -> str:
    """The one version of ``project`` that is required.

    Raises:
        ForkError: none is, or a range.
    """
    specifiers = list(required.get(project, ()))
    if len(specifiers) != 1 or specifiers[0].operator != "==":
        raise ForkError(
            f"the release requires {project}{required.get(project, ' not at all')}: a pin needs "
            "one exact version (==). Read its metadata, and write the pin by hand."
        )
    return specifiers[0].version


def deep_gemm_version(init: bytes) -> str:
    """The version that a vendored DeepGEMM gives itself; ``none`` where there is none."""
    found = re.search(rb"^__version__ = '([^']+)'", init, re.MULTILINE)
    return found.group(1).decode() if found else "none"


def _resolve(project: str, version: str, platform: str) -> tuple[WheelPin, list[str]]:
    """The wheel that pip would install on a platform, and the release's requirements."""
    try:
        Version(version)
    except InvalidVersion:
        raise NotOnIndex(f"{version!r} is not a version") from None
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = ["install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed"]
        command += ["--only-binary=:all:", "--target", folder, "--report", str(report)]
        for glibc in _GLIBC:
            command += ["--platform", f"manylinux_{glibc}_{platform}"]
        done = _pip(*command, f"{project}=={version}")
        if done.returncode or not report.is_file():
            kind = NotOnIndex if "No matching distribution" in done.stderr else ForkError
            raise kind(f"pip found no {project}=={version} for {platform}: {_last_line(done)}")
        [found] = json.loads(report.read_text())["install"]
    url, archive = found["download_info"]["url"], found["download_info"].get("archive_info", {})
    sha256 = archive.get("hashes", {}).get("sha256")
    if sha256 is None:
        raise ForkError(f"the index gives no SHA-256 for {project}=={version}: cannot pin it")
    name = unquote(Path(urlsplit(url).path).name)
    return WheelPin(name=name, sha256=sha256), found["metadata"].get("requires_dist", [])


def _pip(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def _last_line(done: subprocess.CompletedProcess) -> str:
    lines = [x for x in done.stderr.splitlines() if x.strip() and "WARNING" not in x]
    return lines[-1] if lines else "no such file"
