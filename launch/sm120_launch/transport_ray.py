# SPDX-License-Identifier: Apache-2.0
"""Commands as tasks pinned to nodes of an existing Ray cluster.

The nodes need Ray and nothing of this package: process.py travels with the task. Ray is
an optional dependency (`pip install 'sm120-launch[ray]'`).
"""

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from sm120_launch import process
from sm120_launch.plan import RayTransport
from sm120_launch.process import Outcome

# What a task may take beyond its command: to be scheduled, sent there and back.
_EXTRA_S = 30.0
_TICK = 0.2

_connecting = threading.Lock()
_connected: str | None = None


def _connect(address: str) -> Any:
    """Ray, connected to the cluster; once a process.

    Raises:
        RuntimeError: no Ray here, no such cluster, or connected to another one.
    """
    global _connected
    with _connecting:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise RuntimeError(
                "ray is not installed here: pip install 'sm120-launch[ray]'"
            ) from None
        if _connected is None:
            try:
                ray.init(
                    address=address,
                    log_to_driver=False,
                    logging_level="ERROR",
                    namespace="sm120-launch",
                )
            except Exception as error:
                raise RuntimeError(f"no Ray cluster at {address}: {error}") from None
            _connected = address
        elif _connected != address:
            raise RuntimeError(f"a launch has one Ray cluster, found {_connected} and {address}")
        return ray


def _node_id(ray: Any, address: str) -> str:
    alive = [n for n in ray.nodes() if n["Alive"]]
    found = [n["NodeID"] for n in alive if n["NodeManagerAddress"] == address]
    if len(found) != 1:
        have = ", ".join(sorted(n["NodeManagerAddress"] for n in alive))
        raise RuntimeError(f"{len(found)} live nodes at {address}; the cluster has {have}")
    return found[0]


def run(
    transport: RayTransport,
    argv: Sequence[str],
    *,
    timeout_s: float,
    limit: int,
    cancelled: threading.Event | None = None,
) -> Outcome:
    """See transport.run. Takes none of the cluster's resources."""
    begun = time.monotonic()

    def failed(problem: str, detail: str) -> Outcome:
        line = " ".join(detail.split())[:300]
        return Outcome(None, problem=problem, detail=line, seconds=time.monotonic() - begun)

    try:
        ray = _connect(transport.address)
        node = _node_id(ray, transport.node)
    except Exception as error:
        return failed("lost", str(error))
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    try:
        cloudpickle.register_pickle_by_value(process)
        pinned = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(num_cpus=0, max_retries=0)(process.run_plain)
        ref = task.options(scheduling_strategy=pinned).remote(list(argv), timeout_s, limit)
        while True:
            ready, _ = ray.wait([ref], timeout=_TICK)
            if ready:
                return Outcome(**ray.get(ref))
            late = time.monotonic() - begun > timeout_s + _EXTRA_S
            if late or (cancelled is not None and cancelled.is_set()):
                ray.cancel(ref)
                return failed(
                    "timed out" if late else "cancelled", "the task did not end" if late else ""
                )
    except Exception as error:
        return failed("lost", f"{type(error).__name__}: {error}")
