# SPDX-License-Identifier: Apache-2.0
"""Builds the image of one wheel of the fork, without network, and adds its row."""

import os
import re
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm120_launch import images, keys
from sm120_launch.errors import LaunchError

BASE = re.compile(r"^[^\s@]+@sha256:[0-9a-f]{64}$")


@dataclass(frozen=True)
class Build:
    """An image build.

    Attributes:
        engine: podman or docker.
        base: ``name@sha256:…``: Python, CUDA toolkit and what the wheel requires.
        wheel: the fork's.
        name: repository name of the result.
        dockerfile: docker/Dockerfile of the checkout; verify_installed.py beside it.
        revision: of the source, for the label.
        wheels: a folder of further wheels that the base image lacks, or None.
        options: passed on to ``build``, for instance ``--isolation=chroot``.
    """

    engine: images.Engine
    base: str
    wheel: Path
    name: str
    dockerfile: Path
    revision: str = "unknown"
    wheels: Path | None = None
    options: tuple[str, ...] = ()

    def recipe(self) -> keys.Recipe:
        """The wheel's recipe.

        Raises:
            LaunchError: the base is not given by digest, a file is missing, or the wheel
                carries no recipe.
        """
        if not BASE.match(self.base):
            raise LaunchError(
                f"base image {self.base!r}", "NAME@sha256:DIGEST", "A tag moves: give its digest."
            )
        if not re.fullmatch(r"[a-z0-9]+([._/:-]+[a-z0-9]+)*", self.name):
            raise LaunchError(
                f"image name {self.name!r}", "a repository name in lower case", "Give another."
            )
        for path in (self.dockerfile, self.dockerfile.with_name("verify_installed.py")):
            if not path.is_file():
                raise LaunchError(
                    f"{path}: no such file", "the fork's docker folder", "Name it by --dockerfile."
                )
        return keys.load_recipe(self.wheel)

    @property
    def tag(self) -> str:
        return f"{self.name}:{self.recipe().runtime_key[:16]}"

    def command(self, context: str) -> list[str]:
        """The build in folder ``context``. It has no network: all comes from there and
        from the base image."""
        arguments = {
            "BASE": self.base,
            "RUNTIME_KEY": self.recipe().runtime_key,
            "REVISION": self.revision,
            "WHEEL": self.wheel.name,
        }
        out = [self.engine, "build", "--network", "none", "--file", f"{context}/Dockerfile"]
        for key, value in arguments.items():
            out += ["--build-arg", f"{key}={value}"]
        return [*out, *self.options, "--tag", self.tag, context]

    def run(self, table: Path, stream: Callable[[Sequence[str]], int]) -> images.Row:
        """Builds, and adds the row to the images file.

        Args:
            table: the images file.
            stream: runs a command with its output shown; returns its exit status.

        Raises:
            LaunchError: see ``recipe``; or the build failed.
        """
        images.load(table)  # before half an hour of building
        self.recipe()
        with tempfile.TemporaryDirectory(prefix="sm120-image-") as folder:
            context = Path(folder)
            (context / "wheels").mkdir()
            more = sorted(self.wheels.glob("*.whl")) if self.wheels else []
            for wheel in [*more, self.wheel]:
                _link(wheel, context / "wheels" / wheel.name)
            for path in (self.dockerfile, self.dockerfile.with_name("verify_installed.py")):
                (context / path.name).write_bytes(path.read_bytes())
            os.replace(context / self.dockerfile.name, context / "Dockerfile")
            if status := stream(self.command(folder)):
                raise LaunchError(
                    f"{self.engine} build failed (exit {status})", "", "Its output is above."
                )
        row = images.record(self.engine, self.tag, shlex.join(self.command(".")))
        if row.runtime_key != self.recipe().runtime_key:
            raise LaunchError(
                f"{self.tag} has runtime key {row.runtime_key[:16]}", "the wheel's", "Build again."
            )
        images.append(table, row)
        return row


def _link(source: Path, target: Path) -> None:
    """A wheel is a third of a GiB: linked where that works, else copied."""
    try:
        os.link(source, target)
    except OSError:
        target.write_bytes(source.read_bytes())
