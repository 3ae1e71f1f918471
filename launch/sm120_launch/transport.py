# SPDX-License-Identifier: Apache-2.0
"""How commands reach a rank's host: one call, whatever lies between.

transport_ssh.py and transport_ray.py hold the two that leave this host.
"""

import threading
from collections.abc import Callable, Sequence

from sm120_launch import process
from sm120_launch.plan import LocalTransport, RayTransport, SshTransport, Transport
from sm120_launch.process import Outcome

Call = Callable[..., Outcome]
"""``run``, or what stands before it."""

SHORT_S = 120.0
"""Seconds for a command that only asks or removes something; `podman rm` waits 10 s."""


def run(
    transport: Transport,
    argv: Sequence[str],
    *,
    timeout_s: float = SHORT_S,
    limit: int = process.OUTPUT_LIMIT,
    cancelled: threading.Event | None = None,
    on_line: Callable[[str], None] | None = None,
    last_line: str | None = None,
) -> Outcome:
    """Runs ``argv`` on the host and waits for its end, however that comes about.

    What runs on the host may outlive this call where ``Outcome.problem`` is set: end it
    by name. ``on_line`` hears nothing over Ray until the end. Raises nothing.

    Args:
        argv: the command, as exec takes it.
        timeout_s: seconds, wall clock.
        limit: bytes of one stream.
        cancelled: gives up when set.
        on_line: is told the latest line of output, now and then.
        last_line: see process.run.
    """
    match transport:
        case LocalTransport():
            return process.run(
                argv,
                timeout_s=timeout_s,
                limit=limit,
                cancelled=cancelled,
                on_line=on_line,
                last_line=last_line,
            )
        case SshTransport():
            from sm120_launch import transport_ssh

            return transport_ssh.run(
                transport,
                argv,
                timeout_s=timeout_s,
                limit=limit,
                cancelled=cancelled,
                on_line=on_line,
                last_line=last_line,
            )
        case RayTransport():
            from sm120_launch import transport_ray

            return transport_ray.run(
                transport,
                argv,
                timeout_s=timeout_s,
                limit=limit,
                cancelled=cancelled,
                last_line=last_line,
            )


def where(transport: Transport) -> str:
    """The host, for people: what a message names."""
    match transport:
        case SshTransport():
            user = f"{transport.user}@" if transport.user else ""
            return f"ssh {user}{transport.address}:{transport.port}"
        case RayTransport():
            return f"ray node {transport.node}"
    return "this host"
