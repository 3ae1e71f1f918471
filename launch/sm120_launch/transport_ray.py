# SPDX-License-Identifier: Apache-2.0
"""Commands as tasks pinned to nodes of an existing Ray cluster.

The nodes need Ray and nothing of this package: process.py travels with the task. Ray is
an optional dependency (`pip install 'sm120-launch[ray]'`).

Ray runs in a process of its own: it ends the process that uses it when the cluster's head
has been gone for a minute, and a receipt has to be completed even then.
"""

import atexit
import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from sm120_launch import process
from sm120_launch.plan import RayTransport
from sm120_launch.process import Outcome

# What a task may take beyond its command's time: Ray to connect, the task to be scheduled.
_EXTRA_S = 60.0
# Ray itself tries for minutes to reach a cluster that is not there.
_CONNECT_S = 40.0
_END_S = 5.0
_TICK = 0.2

_clients: dict[str, "_Client"] = {}
_clients_lock = threading.Lock()


def run(
    transport: RayTransport,
    argv: Sequence[str],
    *,
    timeout_s: float,
    limit: int,
    cancelled: threading.Event | None = None,
    last_line: str | None = None,
) -> Outcome:
    """See transport.run. Takes none of the cluster's resources."""
    arguments = (list(argv), timeout_s, limit, last_line)
    client = _client(transport.address)
    return client.run(_ask, (transport.node, arguments), timeout_s, cancelled)


def nodes(address: str, prefixes: tuple[str, ...], timeout_s: float) -> Outcome:
    """The cluster as it is. Standard output: a JSON list of the live nodes, each with
    ``node`` (address), ``gpus`` and, of a Python process that its raylet started, ``prefix``
    and the environment's part that begins with ``prefixes`` (``env``)."""
    return _client(address).run(_look, (prefixes, timeout_s), timeout_s, None)


def _client(address: str) -> "_Client":
    with _clients_lock:
        client = _clients.get(address)
        if client is None or not client.alive:
            client = _clients[address] = _Client(address)
    return client


class _Client:
    """The process that is connected to one cluster, seen from the launcher."""

    def __init__(self, address: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (address, theirs)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        self._address = address
        theirs.close()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[threading.Event, list[Outcome]]] = {}
        self.alive = True
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self._end)

    def _end(self) -> None:
        """In order: a signal would make Ray print where it was."""
        with self._lock, contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(_END_S)

    def run(
        self,
        what: Callable[..., dict[str, Any]],
        arguments: tuple[Any, ...],
        timeout_s: float,
        cancelled: threading.Event | None,
    ) -> Outcome:
        """``what`` of Ray and the arguments, as it answers there: an Outcome's fields."""
        begun = time.monotonic()
        answered, answer = threading.Event(), []
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = answered, answer
            try:
                self._pipe.send((number, what, arguments))
            except OSError:
                self._lose()
        while not answered.wait(_TICK):
            seconds = time.monotonic() - begun
            if cancelled is not None and cancelled.is_set():
                return Outcome(None, problem="cancelled", seconds=seconds)
            if seconds > timeout_s + _EXTRA_S:
                late = "the task did not end"
                return Outcome(None, problem="timed out", detail=late, seconds=seconds)
        return answer[0]

    def _listen(self) -> None:
        while True:
            try:
                number, outcome = self._pipe.recv()
            except (EOFError, OSError):
                with self._lock:
                    self._lose()
                return
            with self._lock:
                answered, answer = self._waiting.pop(number)
                answer.append(outcome)
                answered.set()

    def _lose(self) -> None:
        self.alive = False
        for answered, answer in self._waiting.values():
            answer.append(_lost(f"no Ray cluster at {self._address}, or its head is gone"))
            answered.set()
        self._waiting.clear()


def _serve(address: str, pipe: Connection) -> None:
    """In the process of its own: answers each request from a thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends this process itself
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    late = threading.Timer(_CONNECT_S, os._exit, [1])
    late.daemon = True
    late.start()
    try:
        ray, failure = _connect(address), ""
    except Exception as error:
        ray, failure = None, str(error)
    late.cancel()
    sending = threading.Lock()

    def answer(number: int, what: Callable[..., dict[str, Any]], arguments: Any) -> None:
        begun = time.monotonic()
        try:
            outcome = Outcome(**what(ray, *arguments)) if ray else _lost(failure)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            outcome = _lost(said, time.monotonic() - begun)
        with sending, contextlib.suppress(OSError):
            pipe.send((number, outcome))

    while True:
        try:
            request = pipe.recv()
        except (EOFError, OSError):
            request = None  # the launcher is gone
        if request is None:
            os._exit(0)
        threading.Thread(target=answer, args=request, daemon=True).start()


def _connect(address: str) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise RuntimeError(
            "ray is not installed here: pip install 'sm120-launch[ray]', in the cluster's version"
        ) from None
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        raise RuntimeError(f"no Ray cluster at {address}: {error}") from None
    return ray


def _ask(ray: Any, node: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    alive = [n for n in ray.nodes() if n["Alive"]]
    found = [n["NodeID"] for n in alive if n["NodeManagerAddress"] == node]
    if len(found) != 1:
        have = ", ".join(sorted(n["NodeManagerAddress"] for n in alive))
        raise LookupError(f"{len(found)} live nodes at {node}; the cluster has {have}")
    return ray.get(_task(ray, process.run_plain, found[0]).remote(*arguments))


def _look(ray: Any, prefixes: tuple[str, ...], timeout_s: float) -> dict[str, Any]:
    alive = [n for n in ray.nodes() if n["Alive"]]
    asked = [_task(ray, process.about, n["NodeID"]).remote(prefixes) for n in alive]
    about = ray.get(asked, timeout=timeout_s)
    found = [
        {"node": n["NodeManagerAddress"], "gpus": int(n["Resources"].get("GPU", 0)), **said}
        for n, said in zip(alive, about, strict=True)
    ]
    return {"exit_code": 0, "stdout": json.dumps(found).encode()}


def _task(ray: Any, function: Callable[..., Any], node_id: str) -> Any:
    """A function of process.py, to run on one node and no other."""
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    cloudpickle.register_pickle_by_value(process)
    pinned = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(function).options(scheduling_strategy=pinned)


def _lost(detail: str, seconds: float = 0.0) -> Outcome:
    line = " ".join(detail.split())[:300]
    return Outcome(None, problem="lost", detail=line, seconds=seconds)
