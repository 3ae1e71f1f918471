# SPDX-License-Identifier: Apache-2.0
"""The gate: every rank's self-test at once, each on its own host, and one verdict each.

A gate's end is made sure of: its container has a time limit of its own, and whatever did
not end by itself is removed by name.
"""

import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from sm120_launch import keys, runtime
from sm120_launch.errors import LaunchError
from sm120_launch.plan import LaunchPlan, RankPlan
from sm120_launch.process import Outcome
from sm120_launch.report import Verdict, judge, last_line, one_line, why
from sm120_launch.transport import Call

# What the transport waits longer than the gate's own limit, in seconds: a container's start
# and end. The limit inside comes first and says more.
_GRACE_S = 45.0

# Bytes of the gate's standard output: a report, and as much again of the self-test's own.
_OUTPUT_LIMIT = 2 * runtime.REPORT_LIMIT

# `timeout -s KILL` ends with 128 + 9.
_KILLED = 137

Told = Callable[[str], None]
Ran = Callable[[str, Outcome], None]


def check_names(plan: LaunchPlan) -> None:
    """What names of files and containers are made of.

    Raises:
        LaunchError: the profile's name is none, or a rank is another profile's.
    """
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", plan.profile):
        raise LaunchError(
            f"profile name {plan.profile!r}", "letters a-z, digits and single dashes", "Rename it"
        )
    for rank in plan.ranks:
        if rank.profile != plan.profile:
            raise _edited(f"rank {rank.rank} is of profile {rank.profile}, not {plan.profile}")


def check(plan: LaunchPlan) -> None:
    """Two ranks that are one: the gate would answer for a rank that nobody asked.

    Raises:
        LaunchError: a number or an engine's argv is there twice, there is no rank, or the
            plan was edited.
    """
    check_names(plan)
    if not plan.ranks:
        raise LaunchError(f"profile {plan.profile} has no rank", "at least one")
    number, count = Counter(rank.rank for rank in plan.ranks).most_common(1)[0]
    if count > 1:
        raise LaunchError(
            f"rank {number} is there {count} times in profile {plan.profile}",
            "each rank once",
            "Number the ranks 0, 1, 2, …",
        )
    engines: dict[str, int] = {}
    for rank in plan.ranks:
        if keys.argv_sha256(rank.argv) != rank.argv_sha256:
            raise _edited(f"rank {rank.rank}'s argv_sha256 is not its argv's")
        if rank.runtime_key != plan.runtime_key:
            raise _edited(f"rank {rank.rank}'s runtime_key is not the plan's")
        if rank.argv[:1] != (rank.model,):
            raise _edited(f"rank {rank.rank}'s argv does not begin with its model, {rank.model}")
        if not rank.starts_engine:
            continue
        if (other := engines.setdefault(rank.argv_sha256, rank.rank)) != rank.rank:
            raise LaunchError(
                f"ranks {other} and {rank.rank} of profile {plan.profile} have the same argv",
                "a --node-rank of its own for each",
                "Number the ranks 0, 1, 2, …",
            )


def _edited(found: str) -> LaunchError:
    remedy = "Make it again: sm120-launch plan PROFILE --json"
    return LaunchError(found, "a plan as it was made", remedy)


def run(
    rank: RankPlan,
    launch_id: str,
    *,
    call: Call,
    cancelled: threading.Event,
    told: Told = lambda line: None,
    warned: Told = lambda line: None,
    ran: Ran = lambda purpose, outcome: None,
) -> Verdict:
    """The gate of one rank. Raises nothing.

    Args:
        call: runs a command on a host, as transport.run does.
        cancelled: gives up when set.
        warned: hears what does not stop a launch.
        told: hears what the rank is at, in one line.
        ran: gets every command's outcome.
    """
    if (command := runtime.linger_command(rank)) is not None:
        said = call(rank.transport, command, cancelled=cancelled)
        ran("linger", said)
        if said.exit_code == 1:
            return Verdict(label="NO ANSWER", reason=last_line(said.stdout))
        if said.ok and (line := last_line(said.stdout)):
            warned(line)
    told("image")
    found = call(rank.transport, runtime.inspect_image_command(rank), cancelled=cancelled)
    ran("image", found)
    if not found.ok:
        return Verdict(label="NO ANSWER", reason=_no_image(rank, found))
    if rank.image and rank.image.platform not in (said := one_line(found.stdout)):
        reason = f"the host has the image for {said}, planned is {rank.image.platform}"
        return Verdict(label="NO ANSWER", reason=reason)
    if (command := runtime.cache_command(rank)) is not None:
        made = call(rank.transport, command, cancelled=cancelled)
        ran("cache volume", made)
        if not made.ok:
            return Verdict(label="NO ANSWER", reason=f"no cache volume: {why(made)}")
    told("self-test")
    outcome = call(
        rank.transport,
        runtime.gate_command(rank, launch_id),
        timeout_s=rank.gate_timeout_s + _GRACE_S,
        limit=_OUTPUT_LIMIT,
        cancelled=cancelled,
        on_line=lambda line: told(f"self-test: {one_line(line)}"),
        last_line=f"{runtime.END_MARK} {launch_id} ",
    )
    verdict = _judge(outcome, rank, launch_id)
    if verdict.report is None:
        ran("gate", outcome)
    else:  # the report is kept by itself
        own = outcome.stdout.partition(f"\n{runtime.REPORT_MARK} {launch_id}\n".encode())[0]
        ran("gate", replace(outcome, stdout=own))
    if outcome.problem or outcome.exit_code not in (0, 1, 2):
        told("ending the self-test")
        stopped = call(rank.transport, runtime.stop_command(rank, launch_id, "gate"))
        ran("stop gate", stopped)
        if not stopped.ok:
            verdict.label = "NO ANSWER" if verdict.passed else verdict.label
            verdict.reason = (
                f"{verdict.reason or 'it passed'}; it could not be ended and may still run there"
            )
        elif outcome.problem == "lingers":
            warned(f"the self-test's end was not heard in time ({outcome.detail}); it was ended")
    return verdict


def _judge(outcome: Outcome, rank: RankPlan, launch_id: str) -> Verdict:
    limit = rank.gate_timeout_s
    if outcome.seconds < limit:
        return judge(outcome, rank, launch_id)
    if outcome.exit_code == _KILLED:
        return Verdict(label="NO ANSWER", reason=f"timed out: no end within {limit} s")
    verdict = judge(outcome, rank, launch_id)
    if outcome.problem and not verdict.passed:
        verdict.reason += f"; its {limit} s had passed"
    return verdict


def _no_image(rank: RankPlan, found: Outcome) -> str:
    if found.problem:
        return why(found)
    said = last_line(found.stderr)
    if rank.image is None:
        return one_line(f"no Python in {rank.venv} ({said})")
    return one_line(f"the host's {rank.runtime} does not have {rank.image.reference} ({said})")
