# SPDX-License-Identifier: Apache-2.0
"""Starts every rank's engine at once and watches until all are up, or one is not.

A rank is up when its /health answers; a headless rank when it still runs once the others
are up. Somebody else may answer in the place of an engine that is about to end, so all are
looked at once more. A rank that ends, or is late, is a failure of all.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from sm120_launch import runtime
from sm120_launch.plan import RankPlan
from sm120_launch.process import Outcome
from sm120_launch.report import last_line, one_line, why
from sm120_launch.transport import Call

# Seconds between two looks at the ranks.
_LOOK_S = 1.0
# Looks in a row that may go unanswered (a dropped connection) before a rank counts as lost.
_PATIENCE = 3

Told = Callable[[RankPlan, str], None]
Ran = Callable[[RankPlan, str, Outcome], None]


class StartFailed(Exception):
    """Not every rank came up: which, where and why, in one line."""


def start(
    ranks: Sequence[RankPlan],
    launch_id: str,
    *,
    call: Call,
    cancelled: threading.Event,
    told: Told,
    ran: Ran,
) -> None:
    """Starts the engines and returns once all are up. What was started runs on when this
    raises: ``stop`` ends it.

    Args:
        call: runs a command on a host, as transport.run does.
        cancelled: gives up when set.
        told: hears what a rank is at.
        ran: gets the outcome of every command that decided something.

    Raises:
        StartFailed: a rank did not start, ended, cannot be asked, or was late.
    """

    def begin(rank: RankPlan) -> Outcome:
        told(rank, "starting")
        command = runtime.engine_command(rank, launch_id)
        # Not cancelled halfway: what is begun must be there to be ended.
        outcome = call(rank.transport, command)
        ran(rank, "start", outcome)
        return outcome

    def look(rank: RankPlan) -> tuple[Outcome, bool]:
        """How the rank is, and whether its /health answers."""
        status = call(rank.transport, runtime.status_command(rank, launch_id, "engine"))
        command = runtime.ready_command(rank, launch_id)
        if command is None or not _runs(status):
            return status, False
        return status, call(rank.transport, command).ok

    def fail(rank: RankPlan, what: str) -> StartFailed:
        command = runtime.logs_command(rank, launch_id, "engine")
        logs = call(rank.transport, command)
        ran(rank, "logs", logs)
        said = last_line(logs.stderr) or last_line(logs.stdout)
        end = f" ({said})" if said and logs.ok else ""
        return StartFailed(one_line(f"rank {rank.rank} on {rank.host} {what}{end}"))

    begun = time.monotonic()
    silent = dict.fromkeys((rank.rank for rank in ranks), 0)
    with ThreadPoolExecutor(len(ranks)) as pool:
        for rank, outcome in zip(ranks, pool.map(begin, ranks), strict=True):
            if not outcome.ok:
                what = f"did not start: {why(outcome)}"
                raise StartFailed(one_line(f"rank {rank.rank} on {rank.host} {what}"))
        settled = False
        while True:
            waiting = False
            for rank, (status, up) in zip(ranks, pool.map(look, ranks), strict=True):
                silent[rank.rank] = 0 if status.ok else silent[rank.rank] + 1
                if silent[rank.rank] > _PATIENCE:
                    ran(rank, "status", status)
                    raise fail(rank, f"cannot be asked: {why(status)}")
                if status.ok and not _runs(status):
                    raise fail(rank, f"did not stay up: {one_line(status.stdout)}")
                if not up and (rank.ready_port is not None or not status.ok):
                    waiting = True
                told(rank, "up" if up else "running")
            if settled and not waiting:
                return
            settled = not waiting
            late = [r for r in ranks if time.monotonic() - begun > r.start_timeout_s]
            if late:
                raise fail(late[0], f"was not up within {late[0].start_timeout_s} s")
            if cancelled.wait(_LOOK_S):
                raise StartFailed("cancelled")


def _runs(status: Outcome) -> bool:
    return status.ok and one_line(status.stdout) == "running"
