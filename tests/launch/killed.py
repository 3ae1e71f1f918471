# SPDX-License-Identifier: Apache-2.0
"""The launcher, killed by itself at one exact point, as kill -9 does it.

    python killed.py POINT PLAN RECEIPTS

POINT is ``NAME`` or ``NAME:N``: a function of ``POINTS``, at its N-th call.
"""

import os
import signal
import sys
from pathlib import Path

from sm120_launch import engine, launcher
from sm120_launch.plan import LaunchPlan
from sm120_launch.receipt import Folder

POINTS = {
    "clean": (launcher.Launch, "_clean"),
    "gate": (launcher.Launch, "_gate"),
    "staging": (launcher.Launch, "_run_staging"),
    "start": (engine, "start"),
    "end": (launcher.Launch, "_end"),
    "rename": (os, "replace"),
    "sync": (os, "fsync"),
}


def main(point: str, plan: str, receipts: str) -> None:
    name, _, count = point.partition(":")
    owner, attribute = POINTS[name]
    original = getattr(owner, attribute)
    left = int(count or 1)

    def die(*arguments, **keywords):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **keywords)

    setattr(owner, attribute, die)
    found = LaunchPlan.model_validate_json(Path(plan).read_text())
    launcher.Launch(found, Folder(Path(receipts)), "launch").run()


if __name__ == "__main__":
    main(*sys.argv[1:])
