# SPDX-License-Identifier: Apache-2.0
"""A profile: what to serve, with which build, on which hosts. One TOML file.

    load(path)     the profile, checked; refusals name file, key and remedy
    plan(profile)  what it comes to, with the recipe and the images file it names

Paths in a profile are relative to its folder. docs/launching.md has whole ones.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, field_validator, model_validator

from sm120_launch import images, keys, requests
from sm120_launch.errors import LaunchError
from sm120_launch.plan import LaunchPlan, Mount, RankPlan, Strict, Transport
from sm120_launch.requests import AnyRequest, Context, Modality, Parallel, Server
from sm120_launch.runtime import CACHE
from sm120_launch.toml import explain, read_toml

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=48)]
# A comma would end a field of --mount; a colon one of PATH.
Absolute = Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f,:]*$")]
Value = Annotated[str, StringConstraints(pattern=r"^[^\x00\n\r]*$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Device = Annotated[
    str, StringConstraints(pattern=r"^(\d+|[a-z0-9.-]+\.[a-z]+/[a-z0-9]+=[\w:.-]+|/dev/[\w/.-]+)$")
]

_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_KEY|ACCESS_KEY)S?$", re.I)
_RESERVED = {
    "HOME": "the launcher sets it to the cache volume",
    "CUDA_VISIBLE_DEVICES": "name the GPUs under 'devices'",
    "SM120_LAUNCH": "the launcher finds its processes by it",
    "SM120_LAUNCH_RANK": "the launcher finds its processes by it",
}
_DEFAULT_PORT = 8000  # vLLM's own


class MountSpec(Mount):
    """A further mount."""

    source: Absolute
    target: Absolute


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
    mounts: tuple[MountSpec, ...] = ()
    network: Literal["host", "none"] = "host"
    gate_network: Literal["host", "none"] = "none"
    ipc: Literal["host", "private"] = "private"
    shm_size: Annotated[str, StringConstraints(pattern=r"^\d+[bkmg]?$")] | None = None
    memlock: int | None = Field(default=None, ge=-1)
    gate_timeout_s: int = Field(default=900, gt=0, le=86400)
    start_timeout_s: int = Field(default=3600, gt=0, le=86400)
    staging: tuple[Annotated[tuple[str, ...], Field(min_length=1)], ...] = ()

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
        """A path that the profile names."""
        return self.path.parent / Path(name).expanduser()

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


def plan(profile: Profile) -> LaunchPlan:
    """What a profile comes to.

    Raises:
        LaunchError: requests contradict each other, ranks and layout do not fit, there is
            no recipe, or no image for a rank.
    """
    recipe = keys.load_recipe(profile.beside(profile.recipe))
    major, minor = (int(part) for part in recipe.base.split(".")[:2])
    base = (major, minor)
    if found := requests.conflicts(profile.requests, Context(base)):
        raise LaunchError(f"{profile.path}: requests:\n  " + "\n  ".join(found))
    specs = _numbered(profile)
    _check_layout(profile, specs)
    where = profile.beside(profile.images)
    rows = images.load(where) if any(s.runtime != "venv" for s in specs) else ()
    ranks = tuple(
        _rank(profile, number, spec, Context(base, number), recipe.runtime_key, rows, where)
        for number, spec in enumerate(specs)
    )
    return LaunchPlan(
        profile=profile.name,
        profile_key=keys.profile_key(profile.model, requests.contents(profile.requests)),
        runtime_key=recipe.runtime_key,
        base=recipe.base,
        ranks=ranks,
        warnings=tuple(_warnings(profile, specs)),
    )


def _numbered(profile: Profile) -> list[RankSpec]:
    """The ranks in the order of their numbers, which must be 0, 1, 2, …"""
    numbers = [n if s.rank is None else s.rank for n, s in enumerate(profile.ranks)]
    for place, number in enumerate(numbers):
        if numbers.index(number) != place:
            raise LaunchError(
                f"{profile.path}: ranks.{place}.rank: {number} is ranks.{numbers.index(number)}'s",
                "every rank once",
                "Give another number, or leave 'rank' out throughout.",
            )
    if missing := set(range(len(numbers))) - set(numbers):
        raise LaunchError(
            f"{profile.path}: ranks: {sorted(numbers)}",
            f"0 to {len(numbers) - 1}",
            f"There is no rank {min(missing)}.",
        )
    return [
        spec for _, spec in sorted(zip(numbers, profile.ranks, strict=True), key=lambda p: p[0])
    ]


def _check_layout(profile: Profile, specs: list[RankSpec]) -> None:
    path, layout = profile.path, profile.parallel
    for number, spec in enumerate(specs):
        if spec.runtime == "venv" and spec.checkpoint not in (None, profile.model):
            raise LaunchError(
                f"{path}: ranks.{number}.checkpoint: {spec.checkpoint}, not {profile.model}",
                "the argv's own path, since nothing is mounted for a virtual environment",
                "Drop 'checkpoint'.",
            )
    with_ray = [s.transport.kind == "ray" for s in specs]
    if any(with_ray) != all(with_ray) or any(with_ray) != (layout.executor == "ray"):
        raise LaunchError(
            f"{path}: ranks with transport ray: {sum(with_ray)} of {len(specs)}, "
            f"requests.parallel.executor: {layout.executor or 'not given'}",
            "ray for all and executor 'ray', or neither",
            "With Ray the first rank is the driver, and the others are the nodes it uses.",
        )
    if not any(with_ray) and len(specs) != (layout.nnodes or 1):
        raise LaunchError(
            f"{path}: {len(specs)} ranks, requests.parallel.nnodes: {layout.nnodes or 1}",
            "as many ranks as nodes",
            "A rank is one `vllm serve`, with all the GPUs that it uses.",
        )
    counts = [s.gpus for s in specs]
    if all(counts):  # no devices at all is allowed: the self-test then says NOT RUN
        total = sum(n or 0 for n in counts)
        each = layout.gpus // (layout.nnodes or 1)
        wrong = [n for n, count in enumerate(counts) if count != each]
        if any(with_ray) and total != layout.gpus:
            raise LaunchError(
                f"{path}: ranks name {total} GPUs, tensor × pipeline is {layout.gpus}",
                "as many GPUs as the layout uses",
                "Change 'devices', or the layout.",
            )
        if not any(with_ray) and wrong:
            raise LaunchError(
                f"{path}: ranks.{wrong[0]}.devices: {counts[wrong[0]]} GPUs",
                f"{each}, the rank's share of tensor × pipeline = {layout.gpus}",
                "Change 'devices', or the layout.",
            )
    seen: dict[tuple[str, str], int] = {}
    for number, spec in enumerate(specs):
        for device in (d for d in spec.devices if not d.startswith("/dev/")):
            first = seen.setdefault((_host(spec), device), number)
            if first != number:
                raise LaunchError(
                    f"{path}: ranks.{number}.devices: {device} of {_host(spec)} is rank {first}'s",
                    "a GPU to belong to one rank",
                    "Change 'devices'.",
                )


def _host(spec: RankSpec) -> str:
    match spec.transport.kind:
        case "ssh":
            # A port of its own may be a machine of its own, behind one address.
            port = spec.transport.port
            return spec.transport.address + ("" if port == 22 else f":{port}")
        case "ray":
            return spec.transport.node
        case _:
            return "local"


def _rank(
    profile: Profile,
    number: int,
    spec: RankSpec,
    context: Context,
    runtime_key: str,
    rows: tuple[images.Row, ...],
    where: Path,
) -> RankPlan:
    image = cache = None
    env = {**spec.env, **{f"NCCL_{k.removeprefix('NCCL_')}": v for k, v in spec.nccl.items()}}
    planned_env = dict(env)
    if spec.runtime != "venv":
        build = profile.beside(profile.recipe)
        wheel = build if build.suffix == ".whl" else "WHEEL"
        row = images.find(rows, runtime_key, spec.platform, spec.runtime, where, wheel)
        image = row.image
        cache = f"sm120-cache-{row.digest.removeprefix('sha256:')[:16]}"
        env["HOME"] = CACHE
        planned_env = {**row.env, **env}
    # The driver's argv is what Ray's workers run too: the gate asks about it on every node.
    with_ray = spec.transport.kind == "ray"
    argv = [
        profile.model,
        *requests.render(profile.requests, Context(context.base, 0 if with_ray else number)),
    ]
    starts = not with_ray or number == 0
    server = requests.by_kind(profile.requests).get("server")
    port = server.port if isinstance(server, Server) else None
    transport = spec.transport
    if transport.kind == "ssh":
        files = {n: getattr(transport, n) for n in ("known_hosts", "identity")}
        found = {n: str(profile.beside(f).resolve()) for n, f in files.items() if f}
        transport = transport.model_copy(update=found)
    return RankPlan(
        rank=number,
        profile=profile.name,
        host=spec.host or _host(spec),
        transport=transport,
        runtime=spec.runtime,
        image=image,
        venv=spec.venv,
        runtime_key=runtime_key,
        argv=tuple(argv),
        argv_sha256=keys.argv_sha256(argv),
        env=dict(sorted(env.items())),
        pass_env=spec.pass_env,
        env_sha256=keys.env_sha256(planned_env),
        starts_engine=starts,
        devices=spec.devices,
        checkpoint=spec.checkpoint or profile.model,
        model=profile.model,
        mounts=tuple(Mount(**m.model_dump()) for m in spec.mounts),
        network=spec.network,
        gate_network=spec.gate_network,
        ipc=spec.ipc,
        shm_size=spec.shm_size,
        memlock=spec.memlock,
        cache_volume=cache,
        gate_timeout_s=spec.gate_timeout_s,
        start_timeout_s=spec.start_timeout_s,
        staging=spec.staging,
        ready_port=(port or _DEFAULT_PORT) if number == 0 else None,
    )


def _warnings(profile: Profile, specs: list[RankSpec]) -> list[str]:
    out = requests.warnings(profile.requests)
    modality = requests.by_kind(profile.requests).get("modality")
    if not isinstance(modality, Modality):
        out.append("no modality is asked for: vLLM serves images too, and loads the vision tower")
    if any(not s.devices for s in specs):
        out.append("a rank has no devices: its self-test will end in NOT RUN, and stop the launch")
    if any(s.transport.kind == "ray" and s.runtime != "venv" for s in specs):
        out.append(
            "Ray's workers run where the raylets run: the gate's image speaks for them only if "
            "the raylets run in the same image"
        )
    if any(s.gate_network == "host" for s in specs):
        out.append("a rank's gate has the host's network, which the self-test does not need")
    return out
