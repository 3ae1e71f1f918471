# SPDX-License-Identifier: Apache-2.0
"""What a profile comes to: every rank's host, image, argv and environment, exactly.

A plan is plain data: no file is read and nothing is run to use it.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

# What ends up in command lines, of a profile or of a plan that somebody edited.
# A comma would end a field of --mount; a colon one of PATH.
Absolute = Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f,:]*$")]
Address = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9:][A-Za-z0-9._:%-]*$")]
Value = Annotated[str, StringConstraints(pattern=r"^[^\x00\n\r]*$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Device = Annotated[
    str, StringConstraints(pattern=r"^(\d+|[a-z0-9.-]+\.[a-z]+/[a-z0-9]+=[\w:.-]+|/dev/[\w/.-]+)$")
]
Size = Annotated[str, StringConstraints(pattern=r"^\d+[bkmg]?$")]
Volume = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Seconds = Annotated[int, Field(gt=0, le=86400)]
Command = Annotated[tuple[str, ...], Field(min_length=1)]


class Strict(BaseModel):
    """Frozen; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LocalTransport(Strict):
    """Commands run on the control host itself."""

    kind: Literal["local"] = "local"


class SshTransport(Strict):
    """Commands run over SSH. Host keys are always checked; no agent is forwarded.

    Attributes:
        address: host name or address.
        port: of sshd.
        user: login name; OpenSSH's own choice if None.
        known_hosts: file with the host's key; the user's own if None.
        identity: private key file; OpenSSH's own choice if None.
    """

    kind: Literal["ssh"] = "ssh"
    address: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:%-]*$")]
    port: int = Field(default=22, ge=1, le=65535)
    user: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")] | None = None
    known_hosts: str | None = None
    identity: str | None = None


class RayTransport(Strict):
    """Commands run as a task pinned to one node of an existing Ray cluster.

    Attributes:
        address: the cluster, as ``ray.init(address=…)`` takes it.
        node: the node's IP address, as ``ray.nodes()`` says it (NodeManagerAddress).
    """

    kind: Literal["ray"] = "ray"
    address: str
    node: str


Transport = Annotated[LocalTransport | SshTransport | RayTransport, Field(discriminator="kind")]


class Image(Strict):
    """A produced image.

    Attributes:
        name: repository name without tag or digest.
        digest: ``sha256:`` and 64 hex digits, as the host's engine knows it.
        platform: ``linux/amd64`` or ``linux/arm64``.
    """

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$")]
    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    platform: str

    @property
    def reference(self) -> str:
        """``name@sha256:…``: what containers are started from."""
        return f"{self.name}@{self.digest}"


class Mount(Strict):
    """A folder or file of the host in the container."""

    source: Absolute
    target: Absolute
    read_only: bool = True


class RankPlan(Strict):
    """One rank: a ``vllm serve`` process, or (Ray) a node that the gate covers.

    Attributes:
        rank: 0-based, unique in the plan.
        profile: the profile's name.
        host: a name for people; unique names are not needed.
        transport: how commands reach the host.
        runtime: what runs them there.
        image: the image, for podman and docker.
        venv: the virtual environment's folder on the host, for venv.
        runtime_key: the planned recipe's; the report must say the same.
        argv: what follows ``vllm serve``.
        argv_sha256: as the self-test writes it.
        env: what gate and engine get, the cache folder's settings included.
        pass_env: names whose values come from the host's own environment (secrets);
            none of them is in ``env_sha256``.
        env_sha256: as the self-test writes it: of the image's and ``env``'s part that
            changes what runs.
        starts_engine: False for a Ray node that the driver's engine uses.
        devices: GPU numbers (``"0"``), CDI names or device files.
        checkpoint: the checkpoint on the host; mounted read-only at ``model``.
        model: the argv's model path.
        mounts: further mounts.
        network: of the engine.
        gate_network: of the gate.
        ipc: ``host`` or ``private``.
        shm_size: ``16g``; only with private ipc.
        memlock: bytes that may be locked; -1 is no limit.
        cache_volume: name of the volume (or, for venv, None) for compiled kernels.
        gate_timeout_s: after which the gate's container is ended.
        start_timeout_s: after which a start counts as failed.
        staging: commands to run on the host after every gate has passed.
        ready_host: address of the engine's /health, from the host or container itself.
        ready_port: its port; None for headless ranks.
    """

    rank: int
    profile: str
    host: str
    transport: Transport
    runtime: Literal["podman", "docker", "venv"]
    image: Image | None = None
    venv: Absolute | None = None
    runtime_key: str
    argv: tuple[str, ...]
    argv_sha256: str
    env: dict[Variable, Value]
    pass_env: tuple[Variable, ...] = ()
    env_sha256: str
    starts_engine: bool = True
    devices: tuple[Device, ...]
    checkpoint: Absolute
    model: Absolute
    mounts: tuple[Mount, ...] = ()
    network: Literal["host", "none"] = "host"
    gate_network: Literal["host", "none"] = "none"
    ipc: Literal["host", "private"] = "private"
    shm_size: Size | None = None
    memlock: int | None = Field(default=None, ge=-1)
    cache_volume: Volume | None = None
    gate_timeout_s: Seconds = 900
    start_timeout_s: Seconds = 3600
    staging: tuple[Command, ...] = ()
    ready_host: Address = "127.0.0.1"
    ready_port: int | None = Field(default=None, ge=1, le=65535)

    @model_validator(mode="after")
    def _whole(self):
        venv = self.runtime == "venv"
        if (self.venv is not None) != venv or (self.image is None) != venv:
            needed = "venv and no image" if venv else "an image and no venv"
            raise ValueError(f"runtime {self.runtime} needs {needed}")
        return self


class LaunchPlan(Strict):
    """All ranks of one launch.

    Attributes:
        profile: the profile's name.
        profile_key: digest of what is asked of the engine.
        runtime_key: digest of the recipe.
        base: the upstream release.
        ranks: in order of their number.
        warnings: what the operator should know; none stops a launch.
    """

    profile: str
    profile_key: str
    runtime_key: str
    base: str
    ranks: tuple[RankPlan, ...]
    warnings: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _starts(self):
        if self.ranks and not any(rank.starts_engine for rank in self.ranks):
            raise ValueError("no rank starts an engine: one needs starts_engine true")
        return self
