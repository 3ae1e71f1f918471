# SPDX-License-Identifier: Apache-2.0
"""A profile: what to serve, with which build, on which hosts. One TOML file.

Paths in it are relative to its folder. docs/launching.md has whole ones. What it comes to,
with the recipe and the images file that it names: planning.py.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, field_validator, model_validator

from sm120_launch import keys, requests
from sm120_launch.conflicts import has_login
from sm120_launch.errors import LaunchError
from sm120_launch.plan import (
    Absolute,
    Command,
    Device,
    Mount,
    Seconds,
    Size,
    Strict,
    Transport,
    Value,
    Variable,
)
from sm120_launch.requests import AnyRequest, Parallel
from sm120_launch.toml import explain, read_toml

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=48)]

_SECRET = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(API|ACCESS|PRIVATE|SECRET)_?KEY)S?$",
    re.IGNORECASE,
)
_RESERVED = {
    "HOME": "the launcher sets it to the cache volume",
    "CUDA_VISIBLE_DEVICES": "name the GPUs under 'devices'",
    "SM120_LAUNCH": "the launcher finds its processes by it",
    "SM120_LAUNCH_RANK": "the launcher finds its processes by it",
}


class RankSpec(Strict):
    """One rank of a profile; ``[defaults]`` gives what ranks share.

    Attributes:
        rank: its number; its place in the list if not given.
        checkpoint: the model's folder on the host; the argv's path if not given.
        nccl: ``NCCL_…`` settings, without the prefix.
        The rest: see ``RankPlan``.
    """

    rank: int | None = Field(default=None, ge=0)
    host: str | None = None
    transport: Transport
    runtime: Literal["podman", "docker", "venv"]
    platform: Literal["linux/amd64", "linux/arm64"] = "linux/amd64"
    venv: Absolute | None = None
    devices: tuple[Device, ...]
    checkpoint: Absolute | None = None
    env: dict[Variable, Value] = Field(default_factory=dict)
    pass_env: tuple[Variable, ...] = ()
    nccl: dict[Variable, Value] = Field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    network: Literal["host", "none"] = "host"
    gate_network: Literal["host", "none"] = "none"
    ipc: Literal["host", "private"] = "private"
    shm_size: Size | None = None
    memlock: int | None = Field(default=None, ge=-1)
    gate_timeout_s: Seconds = 900
    start_timeout_s: Seconds = 3600
    staging: tuple[Command, ...] = ()

    @field_validator("devices", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        ok = isinstance(value, list | tuple)
        return [str(v) if type(v) is int else v for v in value] if ok else value

    @field_validator("env")
    @classmethod
    def _no_secret(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if name in _RESERVED:
                raise ValueError(f"{name} is not the profile's to set: {_RESERVED[name]}")
            if _SECRET.search(name):
                raise ValueError(
                    f"{name} looks like a secret, and would be in command lines and receipts: "
                    "set it on the host, and list it under pass_env"
                )
            if has_login(env[name]):
                raise ValueError(
                    f"{name} has a URL with a login, which would be in command lines and "
                    "receipts: set it on the host, and list it under pass_env"
                )
        return env

    @field_validator("pass_env")
    @classmethod
    def _no_switch(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if switches := sorted(keys.environment(dict.fromkeys(names, ""))):
            raise ValueError(f"{switches[0]} changes what runs: give its value under 'env'")
        if reserved := sorted(set(names) & set(_RESERVED)):
            raise ValueError(f"{reserved[0]} is not to be passed on: {_RESERVED[reserved[0]]}")
        return names

    @model_validator(mode="after")
    def _fits(self):
        if (self.runtime == "venv") != (self.venv is not None):
            raise ValueError("runtime venv needs key 'venv' (its folder), the others none")
        if self.ipc == "host" and self.shm_size is not None:
            raise ValueError("shm_size is for ipc 'private': with 'host' it is the host's own")
        if self.runtime == "venv":
            files = [d for d in self.devices if not d.isdecimal()]
            if files:
                raise ValueError(f"device {files[0]!r}: runtime venv takes GPU numbers alone")
            given = [n for n in ("mounts", "ipc", "shm_size", "memlock", "network", "gate_network")
                     if n in self.model_fields_set]  # fmt: skip
            if given:
                raise ValueError(f"{given[0]} is for containers: runtime venv has none")
        if twice := {d for d in self.devices if self.devices.count(d) > 1}:
            raise ValueError(f"device {min(twice)} is named twice")
        return self

    @property
    def gpus(self) -> int | None:
        """GPUs of this rank, where the devices say so: None with a CDI name of all."""
        names = [d for d in self.devices if not d.startswith("/dev/")]
        return None if any(d.endswith("=all") for d in names) else len(names)


class Profile(Strict):
    """A profile as written, ``[defaults]`` merged into its ranks.

    Attributes:
        name: names containers and receipts.
        recipe: the build: a wheel of the fork, or its recipe's file.
        images: the images file; need not exist where every rank is a venv.
        model: the argv's model path; the checkpoint is mounted there.
        requests: what is asked of the engine.
        ranks: who runs it.
    """

    schema_: Literal[1] = Field(alias="schema")
    name: Name
    recipe: str
    images: str = "images.toml"
    model: Absolute
    requests: tuple[AnyRequest, ...] = ()
    ranks: tuple[RankSpec, ...] = Field(min_length=1)
    path: Path = Field(exclude=True)

    def beside(self, name: str) -> Path:
        """A path that the profile names.

        Raises:
            LaunchError: it begins with ``~`` and the name of nobody.
        """
        try:
            return self.path.parent / Path(name).expanduser()
        except RuntimeError:
            raise LaunchError(
                f"{self.path}: {name}: no home folder", "a path", "Give it without '~'."
            ) from None

    @property
    def parallel(self) -> Parallel:
        """The layout: one GPU if none was asked for."""
        found = requests.by_kind(self.requests).get("parallel")
        return found if isinstance(found, Parallel) else Parallel(tensor=1)


def load(path: Path) -> Profile:
    """Reads a profile.

    Raises:
        LaunchError: a key is missing, unknown or wrong; names file, key and remedy.
    """
    found = read_toml(path)
    if "path" in found:  # a field, but not a key
        raise LaunchError(f"{path}:\n  path: no such key; remove it")
    defaults = found.pop("defaults", {})
    ranks = found.get("ranks")
    if not isinstance(defaults, dict) or "rank" in defaults:
        raise LaunchError(
            f"{path}: defaults: {'rank' if isinstance(defaults, dict) else 'not a table'}",
            "a table of what ranks share",
            "A rank's number is its own.",
        )
    if isinstance(ranks, list):
        found["ranks"] = [_merged(defaults, r) if isinstance(r, dict) else r for r in ranks]
    try:
        return Profile.model_validate({**found, "path": path})
    except ValidationError as error:
        known = {*Profile.model_fields, *RankSpec.model_fields, "schema", "defaults"}
        raise explain(path, error, known - {"path", "schema_"}) from None


def _merged(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """``own`` over ``defaults``; tables of settings are merged, everything else replaced."""
    out = {**defaults, **own}
    for table in ("env", "nccl"):
        if isinstance(defaults.get(table), dict) and isinstance(own.get(table), dict):
            out[table] = {**defaults[table], **own[table]}
    return out
