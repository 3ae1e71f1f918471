# SPDX-License-Identifier: Apache-2.0
"""Starts a multi-rank vLLM once every rank's host, in the planned image, with that
rank's exact arguments, has passed the self-test. For a control host: no torch, no vLLM.

errors.py    a refusal: found, needed, remedy
keys.py      recipe, runtime key, profile key, digests of argv and environment
requests.py  typed engine arguments, rendered in one form
images.py    produced images: runtime key to digest
profile.py   a profile in TOML: model, requests, ranks, hosts
plan.py      what a profile comes to: each rank's argv, environment, image
runtime.py   a rank's commands, for podman, docker and virtual environments
cli.py       sm120-launch
"""

from sm120_launch.errors import LaunchError

__all__ = ["LaunchError"]
