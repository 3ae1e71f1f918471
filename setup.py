# SPDX-License-Identifier: Apache-2.0
"""``pip wheel . --no-deps`` and ``pip install .``: the patched vLLM.

Nothing is compiled here. setuptools asks for metadata and for a wheel; both come from
the pinned upstream wheel, edited (fork/wheel.py).
"""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.dist_info import dist_info
from setuptools.command.editable_wheel import editable_wheel

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fork import ForkError, pin, series, wheel

PIN = pin.load()


class PatchedWheel(bdist_wheel):
    """The wheel that ``python -m fork wheel`` builds."""

    def run(self) -> None:
        path = wheel.build(PIN, series.members(), Path(self.dist_dir))
        self.distribution.dist_files.append(("bdist_wheel", "any", str(path)))


class PatchedMetadata(dist_info):
    """The metadata of that wheel: dependencies are upstream's."""

    def run(self) -> None:
        super().run()  # makes the folders that setuptools looks for
        (Path(self.dist_info_dir) / "METADATA").write_bytes(wheel.metadata(PIN))


class NoEditable(editable_wheel):
    """An editable install would need upstream's sources here."""

    def run(self) -> None:
        raise ForkError(
            "an editable install is not possible: upstream's code is not in this repository. "
            "Use `pip install .`, or edit an installed vLLM with `python -m fork apply`."
        )


setup(
    version=PIN.fork_version(),
    packages=[],
    cmdclass={
        "bdist_wheel": PatchedWheel,
        "dist_info": PatchedMetadata,
        "editable_wheel": NoEditable,
    },
)
