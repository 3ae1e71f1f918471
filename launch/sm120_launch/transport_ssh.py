# SPDX-License-Identifier: Apache-2.0
"""Commands over SSH, by OpenSSH's own client: the operator's configuration, jump hosts
and keys work as they do by hand, except for what must not be left to it.
"""

import shlex
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from sm120_launch import process
from sm120_launch.plan import SshTransport
from sm120_launch.process import Outcome

# Host keys are checked and never learned; nothing is forwarded; no question is asked; a
# peer that is gone is noticed within 15 to 20 s.
_OPTIONS = (
    "BatchMode=yes",
    "StrictHostKeyChecking=yes",
    "UpdateHostKeys=no",
    "NoHostAuthenticationForLocalhost=no",
    "ForwardAgent=no",
    "ForwardX11=no",
    "GSSAPIDelegateCredentials=no",
    "Tunnel=no",
    "ClearAllForwardings=yes",
    "PermitLocalCommand=no",
    "ControlMaster=no",
    "ControlPath=none",
    "RequestTTY=no",
    "ConnectTimeout=15",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "LogLevel=ERROR",
)

# ssh's own exit status where the connection failed (ssh(1), EXIT STATUS). A remote command
# may return it too (podman does at its --timeout): nobody can tell, so it counts as lost.
_SSH_FAILED = 255


def command(transport: SshTransport, argv: Sequence[str]) -> list[str]:
    """The ssh command that runs ``argv`` on the host."""
    given = ["ssh", "-T", "-n"]
    for option in _OPTIONS:
        given += ["-o", option]
    if transport.known_hosts is not None:
        given += ["-o", f"UserKnownHostsFile={_quoted(transport.known_hosts)}"]
        given += ["-o", "GlobalKnownHostsFile=none"]
    if transport.identity is not None:
        given += ["-o", f"IdentityFile={_quoted(transport.identity)}", "-o", "IdentitiesOnly=yes"]
    given += ["-p", str(transport.port)]
    if transport.user is not None:
        given += ["-l", transport.user]
    return [*given, "--", transport.address, shlex.join(argv)]


def _quoted(path: str) -> str:
    """As ssh_config takes a path with blanks; ``%`` begins a token there."""
    return '"' + path.replace("%", "%%") + '"'


def run(
    transport: SshTransport,
    argv: Sequence[str],
    *,
    timeout_s: float,
    limit: int,
    cancelled: threading.Event | None = None,
    on_line: Callable[[str], None] | None = None,
    last_line: str | None = None,
) -> Outcome:
    """See transport.run. An exit status of 255 means that the connection failed or ended."""
    done = process.run(
        command(transport, argv),
        timeout_s=timeout_s,
        limit=limit,
        cancelled=cancelled,
        on_line=on_line,
        last_line=last_line,
    )
    if done.problem == "not started":
        return replace(done, detail=f"{done.detail}; install OpenSSH's client")
    if done.problem is None and done.exit_code is not None and done.exit_code < 0:
        why = f"ssh died of signal {-done.exit_code}"
        return replace(done, exit_code=None, problem="lost", detail=why)
    if done.problem is None and done.exit_code == _SSH_FAILED:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        why = said[-1][:300] if said else "ssh ended with status 255"
        return replace(done, exit_code=None, problem="lost", detail=why)
    return done
