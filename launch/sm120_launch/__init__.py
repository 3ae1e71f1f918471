# SPDX-License-Identifier: Apache-2.0
"""Starts a multi-rank vLLM once every rank's host, in the planned image, with that
rank's exact arguments, has passed the self-test. For a control host: no torch, no vLLM.

errors.py    a refusal: found, needed, remedy; exit codes
keys.py      recipe, runtime key, profile key, digests of argv and environment
requests.py  typed engine arguments, rendered in one form; conflicts.py says which clash
images.py    produced images: runtime key to digest; image_build.py makes one
profile.py   a profile in TOML: model, requests, ranks, hosts
toml.py      faults of a TOML file: file, key, remedy
plan.py      the plan: every rank's host, image, argv and environment
planning.py  from a profile to a plan
runtime.py   a rank's commands, for podman, docker and virtual environments
transport*.py  how commands reach a host: local, SSH, Ray; process.py bounds each
report.py    from what a gate printed to one verdict
gate.py      every rank's self-test at once
engine.py    every rank's start at once
launcher.py  a launch from intent to receipt; receipt.py keeps it, receipt_diff.py compares two
cli.py       plan, image; cli_launch.py gate, launch, stop, receipts; board.py the live table
"""

from sm120_launch.errors import LaunchError

__all__ = ["LaunchError"]
