# SPDX-License-Identifier: Apache-2.0
"""Refusals, and the exit codes of the command."""

EXIT_DONE = 0
"""Passed, started, or nothing to say against it."""
EXIT_NO = 1
"""The gate or a start said no."""
EXIT_BAD_INPUT = 2
"""Bad input, or the environment lacks something."""


class LaunchError(Exception):
    """A refusal that a user can act on.

    Args:
        found: what is there, and where: file and key, host, image.
        needed: what would be right.
        remedy: what to do.
    """

    def __init__(self, found: str, needed: str = "", remedy: str = "") -> None:
        self.found, self.needed, self.remedy = found, needed, remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        text = self.found
        text += f"; needed: {self.needed}" if self.needed else ""
        return f"{text}. {self.remedy}" if self.remedy else text
