# SPDX-License-Identifier: Apache-2.0
"""Whether a Ray cluster is the one that was planned.

Ray places the engine's workers on whatever nodes have GPUs, under each raylet's own Python
and environment: the gate speaks for them only where these are the ranks', as planned.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from sm120_launch import keys
from sm120_launch.plan import RankPlan, RayTransport
from sm120_launch.report import one_line, why
from sm120_launch.transport import SHORT_S


def differences(ranks: Sequence[RankPlan]) -> list[str]:
    """Asks each cluster of the ranks, all of which are reached by Ray. Returns what is not
    as planned, a line each."""
    from sm120_launch import transport_ray

    found = []
    for address in sorted({t.address for r in ranks if isinstance(t := r.transport, RayTransport)}):
        outcome = transport_ray.nodes(address, keys.ENVIRONMENT, SHORT_S)
        if outcome.ok:
            found += compare(ranks, json.loads(outcome.stdout))
        else:
            found.append(f"no answer from {address}: {why(outcome)}")
    return found


def compare(ranks: Sequence[RankPlan], nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """What of ``nodes`` (transport_ray.nodes) is not as planned, a line each."""
    planned = {r.transport.node: r for r in ranks if isinstance(r.transport, RayTransport)}
    live = {node["node"]: node for node in nodes}
    found = [
        f"node {name} has {node['gpus']} GPUs and is no rank's: make it one, or take it out"
        for name, node in live.items()
        if node["gpus"] and name not in planned
    ]
    for name, rank in planned.items():
        what = f"rank {rank.rank}'s node {name}"
        if (node := live.get(name)) is None:
            found.append(f"{what} is not alive")
            continue
        gpus = [d for d in rank.devices if not d.startswith("/dev/")]
        if node["gpus"] != len(gpus) and not any(d.endswith("=all") for d in gpus):
            found.append(f"{what} has {node['gpus']} GPUs in Ray, planned are {len(gpus)}")
        if rank.runtime != "venv":  # in a container: the plan warns that raylets are elsewhere
            continue
        if os.path.normpath(node["prefix"]) != os.path.normpath(rank.venv or ""):
            found.append(
                f"{what}: its raylet runs Python of {node['prefix']}, planned is {rank.venv}: "
                "start Ray there with the rank's"
            )
        wanted = keys.environment(rank.env)
        names = sorted(n for n in {*wanted, *node["env"]} if wanted.get(n) != node["env"].get(n))
        if names:
            found.append(
                f"{what}: its raylet's environment differs from the rank's in "
                f"{', '.join(names)}: set the same before `ray start`"
            )
    return [one_line(line) for line in found]
