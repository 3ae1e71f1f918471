# SPDX-License-Identifier: Apache-2.0
"""Runs device calls in a child process: a crash or a hang is a result, not an end.

A CUDA error that kills the context, a signal or a hang fails the call that was running
then, by name; the calls after it run in a fresh child::

    calls = [DeviceCall(shape, flashinfer_kernel) for shape in shapes]
    results = in_child(calls, limit_s=300)
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from .sm120_device_calls import CallResult, failed, run_attention, run_indexer
from .sm120_device_cases import AttentionShape, IndexerShape, random_case
from .sm120_device_kernels import AttentionKernel, IndexerKernel
from .sm120_op_call import CANNOT, FIRST_ENDED, REPEATS, OpCall

# A child that was killed while a driver call hangs may never be reaped.
_REAP_S = 10.0
# How often a call that takes long is mentioned.
_SAY_S = 15.0


@dataclass(frozen=True)
class DeviceCall:
    """One call to make in a child. Everything in it must be picklable.

    Attributes:
        shape: what to make a random case of.
        kernel: makes the kernel, in the child: a function at a module's top level.
        seed: of the case.
        device: torch device.
        name: how results name the call; empty: kernel and shape.
    """

    shape: AttentionShape | IndexerShape
    kernel: Callable[[], AttentionKernel | IndexerKernel]
    seed: int = 0
    device: str = "cuda"
    name: str = ""

    def __str__(self) -> str:
        kind = "indexer" if isinstance(self.shape, IndexerShape) else "attention"
        made_by = getattr(self.kernel, "__name__", str(self.kernel))
        return self.name or f"{made_by}: {kind}, {self.shape}"

    def run(self, tell: Callable[[str], None]) -> CallResult:
        """Makes the call, in the child."""
        case = random_case(self.shape, self.seed, self.device)
        kernel: Any = self.kernel()
        if isinstance(self.shape, IndexerShape):
            result = run_indexer(case, kernel, REPEATS)
        else:
            result = run_attention(case, kernel)
        return replace(result, call=self.name) if self.name else result


Call = DeviceCall | OpCall


def in_child(
    calls: Sequence[Call],
    limit_s: float = 600.0,
    start_s: float = 300.0,
    method: str = "spawn",
    after_first_s: float = 120.0,
    say: Callable[[str], None] = lambda _: None,
) -> list[CallResult]:
    """Makes the calls in order, in one child as long as it lives.

    Results come back as each call ends. What the child prints goes to a file, whose
    last line joins the reason of a call that ended the child.

    Args:
        calls: the calls.
        limit_s: seconds that one call may take; compiling at first use counts.
        after_first_s: seconds that an op may take once its first call has ended.
        say: gets a line for each op's result, and while a call takes long.
        start_s: seconds for a child to start and import: vLLM took 20 to 150 s on two
            busy cores.
        method: of multiprocessing. ``spawn`` works whatever the parent has done with
            CUDA; ``forkserver`` and ``fork`` save imports and need a parent without it.

    Returns:
        One result for each call, in order. Bounded in time by
        ``len(calls) * (limit_s + start_s + 20)`` seconds.
    """
    results: list[CallResult] = []
    while len(results) < len(calls):
        rest = calls[len(results) :]
        done, reason = _one_child(rest, (limit_s, after_first_s), start_s, method, say)
        results += done
        if len(done) < len(rest) and reason:
            results.append(failed(str(rest[len(done)]), reason))
    return results


def _one_child(
    calls: Sequence[Call],
    limits_s: tuple[float, float],
    start_s: float,
    method: str,
    say: Callable[[str], None],
) -> tuple[list[CallResult], str]:
    """Results until the child ended, and why it did; "" where it ended by itself."""
    context = multiprocessing.get_context(method)
    receive, send = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="sm120-selftest-") as folder:
        output = os.path.join(folder, "output")
        child = context.Process(
            target=_child_main, args=(send, list(calls), output), daemon=True
        )
        results: list[CallResult] = []
        try:
            child.start()
            send.close()  # so that the child's end is the only one left to close
            _receive(receive, start_s, "the child did not start")
            while len(results) < len(calls):
                waits_for = calls[len(results)]
                message = _wait(receive, str(waits_for), limits_s[0], say)
                if message == FIRST_ENDED:
                    message = _receive(receive, limits_s[1], "hung: no result")
                if message is None:
                    break
                results.append(message)
                if isinstance(waits_for, OpCall):
                    say(_line(message))
            child.join(_REAP_S)
            return results, ""
        except TimeoutError as error:
            return results, f"{error}; it was stopped"
        except EOFError:
            child.join(_REAP_S)
            return results, f"crashed: {_ending(child.exitcode)}{_last_line(output)}"
        finally:
            receive.close()
            _stop(child)


def _line(result: CallResult) -> str:
    if not result.ok:
        said = "absent" if result.reason.startswith(CANNOT) else "wrong"
        return f"{said}: {result.call}: {result.reason}"
    times = f"first call {result.first_s:.1f} s, the rest {result.rest_s:.1f} s"
    return f"right: {result.call}: error {result.error_norm:.2g}; {times}"


def _wait(
    connection: Connection, call: str, limit_s: float, say: Callable[[str], None]
) -> Any:
    """Receives; says every 15 seconds that it still waits."""
    waited = 0.0
    while waited + _SAY_S < limit_s and not connection.poll(_SAY_S):
        waited += _SAY_S
        say(f"{call}: compiling or running for {waited:g} s (at most {limit_s:g} s)")
    return _receive(connection, limit_s - waited, "hung: no result", limit_s)


def _receive(
    connection: Connection, limit_s: float, otherwise: str, named_s: float = 0.0
) -> Any:
    if not connection.poll(limit_s):
        raise TimeoutError(f"{otherwise} in {named_s or limit_s:g} s")
    try:
        return connection.recv()
    except OSError as error:  # a message that the child did not finish
        raise EOFError from error


def _child_main(send: Connection, calls: list[Call], output: str) -> None:
    """Sends "started", then a result a call, before an op's result ``FIRST_ENDED``;
    None where the device is lost."""
    os.setsid()  # so that compilers it starts can be stopped with it
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    send.send("started")
    for call in calls:
        try:
            result = call.run(send.send)
        except Exception as error:
            result = failed(str(call), error)
        send.send(result)
        if not result.ok and not _device_lives(call.device):
            send.send(None)
            break
    send.close()


def _device_lives(device: str) -> bool:
    """False after an error that no later CUDA call of this process survives."""
    try:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
    except Exception:
        return False
    return True


def _ending(exit_code: int | None) -> str:
    if exit_code is None:
        return "it closed its pipe and did not end"
    if exit_code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit status {exit_code}"


def _last_line(output: str) -> str:
    with contextlib.suppress(OSError), open(output, errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
        if lines:
            return f"; it last printed: {lines[-1][:300]}"
    return ""


def _stop(child: Any) -> None:
    """Kills a child that still runs, and what it started."""
    if child.pid is None or not child.is_alive():
        return
    try:
        os.killpg(child.pid, signal.SIGKILL)  # its own group, since it called setsid
    except (ProcessLookupError, PermissionError):
        child.kill()
    child.join(_REAP_S)
