# SPDX-License-Identifier: Apache-2.0
"""From a profile to a plan: which image, argv and environment each rank gets."""

from collections.abc import Sequence

from sm120_launch import conflicts, images, keys, requests
from sm120_launch.errors import LaunchError
from sm120_launch.images import Row
from sm120_launch.plan import LaunchPlan, RankPlan, SshTransport, Transport
from sm120_launch.profile import Profile, RankSpec
from sm120_launch.requests import Context, Modality, Server
from sm120_launch.runtime import CACHE

DEFAULT_PORT = 8000
"""Of vLLM's API server."""

_ANY = (None, "0.0.0.0", "::")
"""Hosts of the API server with which it answers on 127.0.0.1 too (vLLM's default is the
first; Linux gives ``::`` both families)."""


def plan(profile: Profile) -> LaunchPlan:
    """What a profile comes to.

    Raises:
        LaunchError: requests contradict each other, ranks and layout do not fit, there is
            no recipe, or no image for a rank.
    """
    recipe = keys.load_recipe(profile.beside(profile.recipe))
    major, minor = (int(part) for part in recipe.base.split(".")[:2])
    base = (major, minor)
    if found := conflicts.conflicts(profile.requests, Context(base)):
        raise LaunchError(f"{profile.path}: requests:\n  " + "\n  ".join(found))
    specs = _numbered(profile)
    _check_venvs(profile, specs)
    _check_layout(profile, specs)
    _check_gpus(profile, specs)
    rows = _rows(profile, specs, recipe.runtime_key)
    ranks = tuple(
        _rank(profile, number, spec, base, recipe.runtime_key, row)
        for number, (spec, row) in enumerate(zip(specs, rows, strict=True))
    )
    return LaunchPlan(
        profile=profile.name,
        profile_key=keys.profile_key(profile.model, requests.contents(profile.requests)),
        runtime_key=recipe.runtime_key,
        base=recipe.base,
        ranks=ranks,
        warnings=tuple(_warnings(profile, specs)),
    )


def to_stop(profile: Profile) -> LaunchPlan:
    """Enough of a plan to end what runs: needs neither recipe nor images."""
    ranks = (
        to_end(number, profile.name, spec.host or _host(spec), transport, spec.runtime)
        for number, spec in enumerate(_numbered(profile))
        for transport in [_with_files(profile, spec.transport)]
    )
    return LaunchPlan.model_construct(
        profile=profile.name, profile_key="", runtime_key="", base="", ranks=tuple(ranks)
    )


def to_end(number: int, profile: str, host: str, transport: Transport, runtime: str) -> RankPlan:
    """Enough of a rank to ask for its processes and to end them."""
    known = {"rank": number, "profile": profile, "host": host}
    empty = {"runtime_key": "", "argv": (), "argv_sha256": "", "env": {}, "env_sha256": ""}
    empty |= {"devices": (), "checkpoint": "", "model": ""}
    return RankPlan.model_construct(**known, **empty, transport=transport, runtime=runtime)


def _rows(profile: Profile, specs: Sequence[RankSpec], key: str) -> list[Row | None]:
    """Each rank's image; None for a virtual environment."""
    if all(spec.runtime == "venv" for spec in specs):
        return [None] * len(specs)
    where, build = profile.beside(profile.images), profile.beside(profile.recipe)
    rows, wheel = images.load(where), build if build.suffix == ".whl" else "WHEEL"
    return [
        None
        if spec.runtime == "venv"
        else images.find(rows, key, spec.platform, spec.runtime, where, wheel)
        for spec in specs
    ]


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


def _check_venvs(profile: Profile, specs: Sequence[RankSpec]) -> None:
    for number, spec in enumerate(specs):
        if spec.runtime == "venv" and spec.checkpoint not in (None, profile.model):
            raise LaunchError(
                f"{profile.path}: ranks.{number}.checkpoint: {spec.checkpoint}, "
                f"not {profile.model}",
                "the argv's own path, since nothing is mounted for a virtual environment",
                "Drop 'checkpoint'.",
            )


def _check_layout(profile: Profile, specs: Sequence[RankSpec]) -> None:
    """As many ranks as the layout has; Ray for all of them or none."""
    path, layout = profile.path, profile.parallel
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


def _check_gpus(profile: Profile, specs: Sequence[RankSpec]) -> None:
    """Every GPU of the layout once. A rank without devices is let through: its self-test
    ends in NOT RUN."""
    path, layout = profile.path, profile.parallel
    counts = [s.gpus for s in specs]
    if layout.executor == "ray":
        if all(counts) and sum(filter(None, counts)) != layout.gpus:
            raise LaunchError(
                f"{path}: ranks name {sum(filter(None, counts))} GPUs, "
                f"tensor × pipeline is {layout.gpus}",
                "as many GPUs as the layout uses",
                "Change 'devices', or the layout.",
            )
    else:
        each = layout.gpus // (layout.nnodes or 1)
        for number, count in enumerate(counts):
            if count and count != each:
                raise LaunchError(
                    f"{path}: ranks.{number}.devices: {count} GPUs",
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
    profile: Profile, number: int, spec: RankSpec, base: tuple[int, int], key: str, row: Row | None
) -> RankPlan:
    nccl = {f"NCCL_{k.removeprefix('NCCL_')}": v for k, v in spec.nccl.items()}
    env = {**spec.env, **nccl, **({"HOME": CACHE} if row else {})}
    # With Ray all nodes run the driver's argv: the gate asks about it on each.
    with_ray = spec.transport.kind == "ray"
    context = Context(base, 0 if with_ray else number)
    argv = [profile.model, *requests.render(profile.requests, context)]
    server = requests.by_kind(profile.requests).get("server")
    host, port = (server.host, server.port) if isinstance(server, Server) else (None, None)
    return RankPlan(
        rank=number,
        profile=profile.name,
        host=spec.host or _host(spec),
        transport=_with_files(profile, spec.transport),
        runtime=spec.runtime,
        image=row.image if row else None,
        venv=spec.venv,
        runtime_key=key,
        argv=tuple(argv),
        argv_sha256=keys.argv_sha256(argv),
        env=dict(sorted(env.items())),
        pass_env=spec.pass_env,
        env_sha256=keys.env_sha256({**(row.env if row else {}), **env}),
        starts_engine=number == 0 or not with_ray,
        devices=spec.devices,
        checkpoint=spec.checkpoint or profile.model,
        model=profile.model,
        mounts=spec.mounts,
        network=spec.network,
        gate_network=spec.gate_network,
        ipc=spec.ipc,
        shm_size=spec.shm_size,
        memlock=spec.memlock,
        cache_volume=f"sm120-cache-{row.digest.removeprefix('sha256:')[:16]}" if row else None,
        gate_timeout_s=spec.gate_timeout_s,
        start_timeout_s=spec.start_timeout_s,
        staging=spec.staging,
        ready_host="127.0.0.1" if host in _ANY else host,
        ready_port=(port or DEFAULT_PORT) if number == 0 else None,
    )


def _with_files(profile: Profile, transport: Transport) -> Transport:
    """SSH's files, relative to the profile's folder."""
    if not isinstance(transport, SshTransport):
        return transport
    files = {"known_hosts": transport.known_hosts, "identity": transport.identity}
    found = {name: str(profile.beside(file).resolve()) for name, file in files.items() if file}
    return transport.model_copy(update=found)


def _warnings(profile: Profile, specs: Sequence[RankSpec]) -> list[str]:
    out = conflicts.warnings(profile.requests)
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
