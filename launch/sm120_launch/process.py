# SPDX-License-Identifier: Apache-2.0
"""One process, its output and its time bounded. Standard library only.

The ray transport sends this module to a cluster's nodes by value: it imports nothing of
this package.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

OUTPUT_LIMIT = 8 << 20
"""Bytes of one stream that are read. A report is some hundred kB."""

_CHUNK = 1 << 16
# How often a cancellation is looked at, in seconds.
_TICK = 0.2
# What ends with the process is read for so long: a child that left holds the pipe open.
_DRAIN_S = 2.0
# What has said its last line ends soon, or its end is lost: docker's client now and then
# does not hear that a container is gone.
_LINGER_S = 30.0


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        exit_code: the command's own, None where it did not end by itself.
        problem: None where the command ended by itself, else ``timed out``, ``oversized``,
            ``cancelled``, ``not started``, ``lingers`` (it said its last line and did not
            end) or ``lost`` (nothing is known about its end).
        detail: what is known about the problem, in one line.
        seconds: from the start to the end, wall clock.
    """

    exit_code: int | None
    stdout: bytes = b""
    stderr: bytes = b""
    problem: str | None = None
    detail: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.problem is None and self.exit_code == 0


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    limit: int = OUTPUT_LIMIT,
    env: Mapping[str, str] | None = None,
    cancelled: threading.Event | None = None,
    on_line: Callable[[str], None] | None = None,
    last_line: str | None = None,
) -> Outcome:
    """Runs ``argv`` in a process group of its own, which does not outlive this call
    unless the command ends by itself and leaves something behind.

    Args:
        timeout_s: seconds until the group is killed.
        limit: bytes a stream may have; at one more the group is killed.
        env: the environment, this process's own if None.
        cancelled: ends the command when set.
        on_line: is told the latest whole line of stdout or stderr, now and then.
        last_line: how the line of stdout begins after which nothing more is waited for but
            the end, and for that 30 s at most.
    """
    begun = time.monotonic()
    try:
        child = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if env is None else dict(env),
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return Outcome(None, problem="not started", detail=f"{argv[0]}: {error}")
    problem = None
    streams = {child.stdout: bytearray(), child.stderr: bytearray()}
    ended = said = None
    try:
        with selectors.DefaultSelector() as selector:
            for stream in streams:
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                now = time.monotonic()
                if now - begun > timeout_s:
                    problem = "timed out"
                elif cancelled is not None and cancelled.is_set():
                    problem = "cancelled"
                elif any(len(data) > limit for data in streams.values()):
                    problem = "oversized"
                elif said is not None and now - said > _LINGER_S:
                    problem = "lingers"
                if problem:
                    break
                if ended is None and child.poll() is not None:
                    ended = now
                if ended is not None and now - ended > _DRAIN_S:
                    break
                for key, _ in selector.select(_TICK):
                    data = os.read(key.fd, _CHUNK)
                    if not data:
                        selector.unregister(key.fileobj)
                        continue
                    streams[key.fileobj] += data
                    line = _latest(streams[key.fileobj])
                    if line and on_line:
                        on_line(line)
                    if last_line and key.fileobj is child.stdout and line.startswith(last_line):
                        said = time.monotonic()
            while problem is None and child.poll() is None:  # closed its output, still runs
                now = time.monotonic()
                if now - begun > timeout_s:
                    problem = "timed out"
                elif said is not None and now - said > _LINGER_S:
                    problem = "lingers"
                elif cancelled is not None and cancelled.is_set():
                    problem = "cancelled"
                time.sleep(_TICK / 4)
    finally:
        if problem or child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for stream in streams:
            stream.close()
    stdout, stderr = (bytes(data[:limit]) for data in streams.values())
    details = {
        "timed out": f"after {timeout_s:g} s",
        "oversized": f"more than {limit} bytes of output",
        "cancelled": "",
        "lingers": f"no end {_LINGER_S:g} s after its last line",
    }
    return Outcome(
        exit_code=None if problem else child.returncode,
        stdout=stdout,
        stderr=stderr,
        problem=problem,
        detail=details.get(problem or "", ""),
        seconds=time.monotonic() - begun,
    )


def run_plain(
    argv: Sequence[str], timeout_s: float, limit: int, last_line: str | None
) -> dict[str, object]:
    """``run``, as plain data: what a process without this package can send."""
    return vars(run(argv, timeout_s=timeout_s, limit=limit, last_line=last_line))


def about(prefixes: tuple[str, ...]) -> dict[str, object]:
    """The Python that runs this, and its environment's part that begins with ``prefixes``."""
    env = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    return {"prefix": sys.prefix, "env": env}


def _latest(data: bytearray) -> str:
    """The last whole line within the last 500 bytes."""
    end = data.rfind(b"\n")
    if end < 0:
        return ""
    start = max(data.rfind(b"\n", 0, end), end - 500)
    return data[start + 1 : end].decode("utf-8", "replace")
