# SPDX-License-Identifier: Apache-2.0
"""Produced images: which image holds which build of the fork.

A row is added when an image was built or recorded, and never changed: for one runtime
key, platform and engine the last row counts. Digests are what the engine itself says.

    [[image]]
    runtime_key = "d92a17bc…"
    platform = "linux/arm64"
    engine = "podman"
    name = "localhost/vllm-sm120"
    digest = "sha256:…"
    made = "2026-11-30T12:00:00Z"
    command = "sm120-launch image build …"
"""

import contextlib
import fcntl
import json
import os
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError

from sm120_launch import keys
from sm120_launch.errors import LaunchError
from sm120_launch.plan import Image, Strict
from sm120_launch.toml import explain, read_toml

Engine = Literal["podman", "docker"]
Key = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Line = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$")]

# An image's ID, whole or its beginning.
_ID = re.compile(r"(sha256:)?[0-9a-f]+")

LABEL_KEY = "sm120.runtime_key"
LABEL_REVISION = "sm120.revision"


class Row(Strict):
    """One produced image.

    Attributes:
        runtime_key: of the build that it holds.
        platform: ``linux/amd64`` or ``linux/arm64``.
        engine: whose digest it is.
        name: repository name without tag.
        digest: of the manifest.
        made: when, UTC.
        command: by which command.
        revision: of the source.
        env: what the image itself sets of the environment that changes what runs.
    """

    runtime_key: Key
    platform: Literal["linux/amd64", "linux/arm64"]
    engine: Engine
    name: Line
    digest: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
    made: Line
    command: Line
    revision: Line = "unknown"
    env: dict[str, Line] = Field(default_factory=dict)

    @property
    def image(self) -> Image:
        return Image(name=self.name, digest=self.digest, platform=self.platform)


class _File(Strict):
    schema_: Literal[1] = Field(alias="schema")
    image: tuple[Row, ...] = ()


def load(path: Path) -> tuple[Row, ...]:
    """The rows of an images file; none where there is no file yet.

    Raises:
        LaunchError: it is not TOML, or a row is not right; names file, key and remedy.
    """
    if not path.exists():
        return ()
    return _parse(path, read_toml(path))


def _parse(path: Path, found: dict[str, Any]) -> tuple[Row, ...]:
    try:
        return _File.model_validate(found).image
    except ValidationError as error:
        raise explain(path, error) from None


def find(
    rows: Sequence[Row],
    runtime_key: str,
    platform: str,
    engine: str,
    where: Path | str,
    wheel: Path | str = "WHEEL",
) -> Row:
    """The last row for a key, platform and engine.

    Raises:
        LaunchError: there is none; says the command that builds it.
    """
    fits = [
        r for r in rows if (r.runtime_key, r.platform, r.engine) == (runtime_key, platform, engine)
    ]
    if fits:
        return fits[-1]
    others = [r for r in rows if r.runtime_key == runtime_key]
    have = ", ".join(sorted({f"{r.platform} with {r.engine}" for r in others})) or "none"
    raise LaunchError(
        f"{where}: no image of runtime key {runtime_key[:16]} for {platform} with {engine} "
        f"(of this key: {have})",
        "a produced image",
        f"Build it on a {platform} host: sm120-launch image build --engine {engine} "
        f"--images {where} --wheel {wheel} --base NAME@sha256:DIGEST",
    )


def append(path: Path, row: Row) -> None:
    """Adds a row. What is in the file stays, comments too; it is never half written.

    Raises:
        LaunchError: the file there is not right.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        _append(path, row)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Nobody else appends here: between reading and writing, a row would be lost."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # file systems without locks (NFS: not on folders)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _append(path: Path, row: Row) -> None:
    load(path)  # refuses what is not right, before anything else
    old = path.read_text(encoding="utf-8") if path.exists() else "schema = 1\n"
    lines = ["", "[[image]]"]
    for name, value in row.model_dump(exclude={"env"}).items():
        lines.append(f"{name} = {_quoted(value)}")
    if row.env:
        inner = ", ".join(f"{k} = {_quoted(v)}" for k, v in sorted(row.env.items()))
        lines.append(f"env = {{ {inner} }}")
    text = old + ("" if old.endswith("\n") else "\n") + "\n".join(lines) + "\n"
    rows = _parse(path, tomllib.loads(text))
    assert rows[-1] == row, "a row reads back as it was written"
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a basic string of TOML too


@dataclass(frozen=True)
class Inspected:
    """What an engine says of an image that it has.

    Attributes:
        digests: of its manifest, by which it can be started. Docker's older image store
            gives none to an image that was never pushed or pulled.
        platform: ``linux/amd64`` or ``linux/arm64``.
        names: of the image on this host, without tag or digest.
        labels: the image's.
        env: the image's own environment.
    """

    digests: tuple[str, ...]
    platform: str
    names: tuple[str, ...]
    labels: dict[str, str]
    env: dict[str, str]


Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def _run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LaunchError(
            f"{command[0]} is not on PATH", "a container engine", "Install it, or name another."
        ) from None


def inspect(engine: Engine, reference: str, run: Run = _run) -> Inspected | None:
    """What this host's engine has under a name, ``name@digest`` or id; None if nothing.

    Raises:
        LaunchError: the engine is not installed, or its answer is not understood.
    """
    done = run([engine, "image", "inspect", reference])
    if done.returncode:
        return None
    try:
        found = json.loads(done.stdout)[0]
        config = found.get("Config") or {}
        named = [*(found.get("RepoTags") or []), *(found.get("RepoDigests") or [])]
        digests = [d.rsplit("@", 1)[1] for d in found.get("RepoDigests") or [] if "@" in d]
        if engine == "podman":
            digests = [found["Digest"], *digests]
        return Inspected(
            tuple(dict.fromkeys(digests)),
            f"{found['Os']}/{found['Architecture']}",
            tuple(dict.fromkeys(bare_name(n) for n in named if "<none>" not in n)),
            dict(config.get("Labels") or {}),
            dict(entry.split("=", 1) for entry in config.get("Env") or [] if "=" in entry),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise LaunchError(
            f"{engine} image inspect {reference}: not understood", "its JSON", "Update the engine."
        ) from None


def size(engine: Engine, reference: str, run: Run = _run) -> int | None:
    """Bytes of an image that this host's engine has, all layers; None where it does not say."""
    done = run([engine, "image", "inspect", "--format", "{{.Size}}", reference])
    text = done.stdout.strip()
    return int(text) if done.returncode == 0 and text.isdecimal() else None


def record(engine: Engine, reference: str, command: str, run: Run = _run) -> Row:
    """A row for an image that this host's engine has.

    Raises:
        LaunchError: it has no such image, or the image does not say its runtime key.
    """
    found = inspect(engine, reference, run)
    if found is None:
        raise LaunchError(
            f"{engine} has no image {reference}", "an image of this host", "Build or pull it."
        )
    if not found.digests:
        raise LaunchError(
            f"{engine} gives {reference} no digest",
            "one that containers can be started by",
            "Push it to a registry and `sm120-launch image record` it, use docker's containerd "
            "image store, or use podman.",
        )
    name = bare_name(reference)
    if name not in found.names and _ID.fullmatch(reference):
        if not found.names:
            raise LaunchError(
                f"{engine} has image {reference} without a name",
                "a name that containers can be started by",
                f"{engine} tag {reference} NAME",
            )
        name = found.names[0]
    key = found.labels.get(LABEL_KEY, "")
    if not re.fullmatch("[0-9a-f]{64}", key):
        raise LaunchError(
            f"{reference} has no label {LABEL_KEY}",
            "an image made from docker/Dockerfile",
            "Build it with `sm120-launch image build`.",
        )
    fields = {
        "runtime_key": key,
        "platform": found.platform,
        "engine": engine,
        "name": name,
        "digest": found.digests[0],
        "made": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": command,
        "revision": found.labels.get(LABEL_REVISION) or "unknown",
        "env": keys.environment(found.env),
    }
    try:
        return Row.model_validate(fields)
    except ValidationError as error:
        raise explain(Path(reference), error) from None


def bare_name(reference: str) -> str:
    """``localhost:5000/a/b`` of ``localhost:5000/a/b:tag@sha256:…``."""
    name = reference.split("@", 1)[0]
    head, _, last = name.rpartition("/")
    return f"{head}/{last.split(':', 1)[0]}" if head else last.split(":", 1)[0]


def check(row: Row, run: Run = _run) -> str | None:
    """What is wrong with a row on this host, or None: its engine must have the digest, on
    the platform, labelled with the key, with the environment that the row says."""
    found = inspect(row.engine, row.image.reference, run)
    if found is None:
        return f"{row.engine} does not have {row.image.reference}"
    if row.digest not in found.digests:
        return f"{row.engine} has {found.digests[0]} under {row.image.reference}"
    wrong = [
        f"{what} is {have!r}, the row says {said!r}"
        for what, have, said in (
            ("platform", found.platform, row.platform),
            ("runtime key", found.labels.get(LABEL_KEY), row.runtime_key),
            ("environment", keys.environment(found.env), row.env),
        )
        if have != said
    ]
    return "; ".join(wrong) or None
