# SPDX-License-Identifier: Apache-2.0
"""A rank's commands on its host, as argument lists. Pure: nothing is run or read.

Names derive from profile, launch, rank and purpose, and containers carry labels, so
that a later run finds and removes what an earlier one left.

The gate's standard output is framed, so that nothing the self-test prints can pass for
its report or its end, and a cut connection cannot pass for an end::

    <the self-test's own output; its last line is the verdict>
    SM120-REPORT <launch id>
    <the report, one JSON object>
    SM120-END <launch id> <the self-test's exit status>
"""

from typing import Literal

from sm120_launch.plan import RankPlan

Purpose = Literal["gate", "engine"]

SELFTEST = "vllm.models.deepseek_v41.nvidia.sm120_decode_shape_selftest"
REPORT_MARK = "SM120-REPORT"
END_MARK = "SM120-END"
REPORT_LIMIT = 8 << 20
"""Bytes of a report that are passed on; a longer one is cut, and so is no JSON."""


def name(rank: RankPlan, launch_id: str, purpose: Purpose) -> str:
    """The container's name: ``sm120-<profile>-<launch id>-r<rank>-<purpose>``."""
    raise NotImplementedError


def gate_command(rank: RankPlan, launch_id: str) -> list[str]:
    """Runs the self-test over the rank's argv, in the foreground, for at most
    ``gate_timeout_s``; exits with the self-test's status. Output: see above."""
    raise NotImplementedError


def engine_command(rank: RankPlan, launch_id: str) -> list[str]:
    """Starts ``vllm serve`` in the background and returns at once; prints an id."""
    raise NotImplementedError


def status_command(rank: RankPlan, launch_id: str, purpose: Purpose) -> list[str]:
    """Prints ``running``, ``exited <status>`` or ``absent`` as its only line."""
    raise NotImplementedError


def logs_command(rank: RankPlan, launch_id: str, purpose: Purpose, lines: int = 200) -> list[str]:
    """Prints the last lines of a background process, both streams."""
    raise NotImplementedError


def stop_command(rank: RankPlan, launch_id: str, purpose: Purpose) -> list[str]:
    """Ends and removes it, whatever state it is in; exit 0 where it is not there."""
    raise NotImplementedError


def cleanup_command(rank: RankPlan) -> list[str]:
    """Ends and removes everything that any launch of this profile left for this rank."""
    raise NotImplementedError


def inspect_image_command(rank: RankPlan) -> list[str]:
    """Exit 0 where the host's engine has the planned image by digest (venv: where the
    virtual environment's Python is there); prints what it found."""
    raise NotImplementedError
