# SPDX-License-Identifier: Apache-2.0
"""Git, as it is on every machine: nothing of the user's configuration has a say."""

import os
import subprocess
from pathlib import Path

from fork import ForkError


class GitError(ForkError):
    """Git said no.

    Attributes:
        said: what it printed.
    """

    def __init__(self, command: str, said: str) -> None:
        self.said = said
        super().__init__(f"git {command} failed (git 2.29 or newer is needed): {said}")


def git(repository: Path, *arguments: str, stdin: bytes = b"") -> bytes:
    """Runs git in ``repository`` and returns what it printed.

    Raises:
        GitError: it failed.
        ForkError: there is no git.
    """
    # No home: no configuration, attributes or ignore rules of the user's. No GIT_…:
    # no other repository, author, date or diff option from the environment either.
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    clean |= {"HOME": os.devnull, "XDG_CONFIG_HOME": os.devnull, "LC_ALL": "C"}
    # GIT_DIR: no search, which refuses folders that a shared mount gives another owner.
    clean |= {"GIT_DIR": ".git", "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}
    try:
        done = subprocess.run(
            ["git", "-C", str(repository), *arguments], input=stdin, capture_output=True, env=clean
        )
    except FileNotFoundError:
        raise ForkError("git is not on PATH. Install git, 2.29 or newer.") from None
    if done.returncode:
        raise GitError(arguments[0], done.stderr.decode("utf-8", "replace").strip())
    return done.stdout
