# SPDX-License-Identifier: Apache-2.0
"""Builds the image of one wheel of the fork, without network, and adds its row."""

import os
import platform
import re
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm120_launch import images, keys
from sm120_launch.errors import LaunchError

BASE = re.compile(r"^[^\s@]+@sha256:[0-9a-f]{64}$")

PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
"""Machine, as in a wheel's file name, to an image's platform."""

BESIDE = ("verify_installed.py", "health.py")
"""What docker/Dockerfile copies from its own folder."""


@dataclass(frozen=True)
class Build:
    """An image build.

    Attributes:
        engine: podman or docker.
        base: ``name@sha256:…``: Python, CUDA toolkit and what the wheel requires.
        wheel: the fork's.
        name: repository name of the result.
        dockerfile: docker/Dockerfile of the checkout; ``BESIDE`` beside it.
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
        for path in self._sources():
            if not path.is_file():
                raise LaunchError(
                    f"{path}: no such file", "the fork's docker folder", "Name it by --dockerfile."
                )
        if not re.fullmatch(r"vllm-[^-]+(-[^-]+){3}\.whl", self.wheel.name):
            raise LaunchError(
                f"{self.wheel}: not named as a wheel of vLLM",
                "vllm-VERSION-….whl",
                "Give what `python -m fork wheel` made, under its own name.",
            )
        return keys.load_recipe(self.wheel)

    def _sources(self) -> list[Path]:
        return [self.dockerfile, *(self.dockerfile.with_name(name) for name in BESIDE)]

    @property
    def platform(self) -> str | None:
        """The image's, which is the wheel's; None for a wheel of any."""
        tag = self.wheel.name.removesuffix(".whl").rsplit("-", 1)[-1]
        return next((p for machine, p in PLATFORMS.items() if tag.endswith(machine)), None)

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
            "VERSION": self.wheel.name.split("-")[1],
        }
        # podman's cache does not see what RUN mounts: another wheel of that name and key would
        # give the old image.
        out = [self.engine, "build", "--no-cache", "--network", "none"]
        out += ["--file", f"{context}/Dockerfile"]
        out += ["--platform", self.platform] if self.platform else []
        if self.engine == "podman":  # its own format has no health check
            out += ["--format", "docker"]
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
            for path in self._sources():
                (context / path.name).write_bytes(path.read_bytes())
            os.replace(context / self.dockerfile.name, context / "Dockerfile")
            if status := stream(self.command(folder)):
                raise LaunchError(
                    f"{self.engine} build failed (exit {status})", "", self._after_failure()
                )
        row = images.record(self.engine, self.tag, shlex.join(self.command(".")))
        if row.runtime_key != self.recipe().runtime_key:
            raise LaunchError(
                f"{self.tag} has runtime key {row.runtime_key[:16]}", "the wheel's", "Build again."
            )
        images.append(table, row)
        return row

    def _after_failure(self) -> str:
        here = PLATFORMS.get(platform.machine())
        if self.platform in (None, here):
            return "Its output is above."
        return (
            f"Its output is above. The wheel is for {self.platform}, this machine is {here}: build "
            "on a host of that kind, or with emulation (qemu-user with binfmt_misc)."
        )

    def sizes(self) -> tuple[int, int] | None:
        """Bytes of the base image and of the built one; None where the engine does not say."""
        base = images.size(self.engine, self.base)
        built = images.size(self.engine, self.tag)
        return None if base is None or built is None else (base, built)


def _link(source: Path, target: Path) -> None:
    """A wheel is a third of a GiB: linked where that works, else copied."""
    try:
        os.link(source, target)
    except OSError:
        target.write_bytes(source.read_bytes())
