# SPDX-License-Identifier: Apache-2.0
"""A wheel or source distribution by name, version and hash, through pip, kept in the
user's cache."""

import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import platformdirs

from fork import ForkError
from fork.pin import BasePin, Pin, WheelPin

_CHUNK = 1 << 22


def cache_dir() -> Path:
    """``$SM120_FORK_CACHE``, else the user's cache folder for ``vllm-sm120``."""
    override = os.environ.get("SM120_FORK_CACHE")
    return Path(override or platformdirs.user_cache_dir("vllm-sm120")).expanduser()


def machine() -> str:
    """This machine's platform, as in wheel names."""
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(
        platform.machine().lower(), platform.machine().lower()
    )


def sha256(path: Path) -> str:
    """The file's SHA-256, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def upstream_wheel(pin: Pin, base: str | None = None, target: str | None = None) -> Path:
    """The upstream wheel of ``base`` for ``target`` (this machine if None), in the cache.

    Raises:
        ForkError: unknown base or platform, no network and no cached file, wrong hash.
    """
    version, base_pin = pin.of(base)
    target = target or machine()
    if target not in base_pin.wheels:
        raise ForkError(
            f"no upstream wheel is pinned for platform {target!r}. "
            f"Pinned: {', '.join(base_pin.wheels)}. Choose one with --platform."
        )
    return wheel("vllm", version, base_pin.wheels[target])


def upstream_sdist(pin: Pin, base: str | None = None) -> Path | None:
    """The upstream source distribution of ``base``, in the cache; None where none is pinned.

    Raises:
        ForkError: unknown base, no network and no cached file, wrong hash.
    """
    version, base_pin = pin.of(base)
    return wheel("vllm", version, base_pin.sdist) if base_pin.sdist else None


def flashinfer_wheel(base_pin: BasePin) -> Path:
    """The FlashInfer wheel that a base pins, in the cache."""
    return wheel("flashinfer-python", base_pin.flashinfer, base_pin.flashinfer_wheel)


def wheel(project: str, version: str, pin: WheelPin) -> Path:
    """The pinned file, from the cache or from the package index.

    The file gets its final name only after its hash was checked, so a killed
    download never leaves a file that passes for whole.

    Raises:
        ForkError: pip failed, or the file's hash is not the pinned one.
    """
    folder = cache_dir() / "wheels" / pin.sha256[:16]
    path = folder / pin.name
    checked = folder / "checked"
    if path.is_file() and checked.is_file() and checked.read_text() == _stamp(path):
        return path
    if path.is_file():
        _check(path, pin)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="partial-", dir=folder) as partial:
            downloaded = _pip_download(project, version, pin, Path(partial))
            _check(downloaded, pin)
            os.replace(downloaded, path)
    # Hashing 336 MB takes a second: remember size and time of the file checked.
    checked.write_text(_stamp(path))
    return path


def _stamp(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns}"


def _check(path: Path, pin: WheelPin) -> None:
    found = sha256(path)
    if found != pin.sha256:
        path.unlink(missing_ok=True)
        raise ForkError(
            f"{pin.name} has sha256 {found}, the pin says {pin.sha256}. The file was "
            "removed; run again, and if it recurs, the index serves another file."
        )


# In place of the backend that a source distribution names: pip asks it for metadata even
# where it only downloads, and the real one would run upstream's setup.py for that.
_NO_BUILD = """\
import pathlib

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = pathlib.Path(folder) / "{name}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\\nName: {project}\\nVersion: {version}\\n"
    )
    return info.name
"""


def _pip_download(project: str, version: str, pin: WheelPin, folder: Path) -> Path:
    # The hash in the requirement makes pip refuse any other file, before us.
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{project}=={version} --hash=sha256:{pin.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-cache-dir", "--require-hashes"]
    command += ["--disable-pip-version-check", "--dest", str(folder)]
    environment = dict(os.environ)
    if pin.name.endswith(".whl"):
        command += ["--only-binary=:all:"]
        tag = pin.name.removesuffix(".whl").rsplit("-", 1)[-1]
        command += ["--platform", tag] if tag != "any" else []
    else:
        command += ["--no-binary=:all:", "--no-build-isolation", "--use-pep517"]
        backend = folder / "no-build" / "setuptools"
        backend.mkdir(parents=True)
        (backend / "__init__.py").touch()
        name = f"{project}-{version}"
        text = _NO_BUILD.format(name=name, project=project, version=version)
        (backend / "build_meta.py").write_text(text)
        environment["PYTHONPATH"] = str(backend.parent)
    command += ["--requirement", str(requirement)]
    print(f"fetching {pin.name}", file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    path = folder / pin.name
    if done.returncode or not path.is_file():
        lines = [x for x in done.stderr.splitlines() if x.strip() and "WARNING" not in x]
        raise ForkError(
            f"pip could not fetch {project}=={version} ({pin.name}): "
            f"{lines[-1] if lines else 'no such file'}. Check the package index, or put "
            f"the file at {path.parent.parent / pin.name}."
        )
    return path
