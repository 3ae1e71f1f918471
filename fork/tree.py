# SPDX-License-Identifier: Apache-2.0
"""An upstream tree: a wheel file, an unpacked wheel, an installed environment, a checkout.

Paths inside a tree are as in a wheel, with forward slashes: ``vllm/config/vllm.py``.
"""

import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from email import message_from_bytes
from functools import cached_property
from pathlib import Path

from packaging.version import InvalidVersion, Version

from fork import ForkError, record, transaction

_VERSION_FILE = "vllm/_version.py"


class Tree:
    """What a patch sees of upstream: files by path, and the version."""

    def read(self, path: str) -> bytes | None:
        """The file's bytes, or None where there is no such file."""
        raise NotImplementedError

    def names(self) -> Iterator[str]:
        """Every file's path."""
        raise NotImplementedError

    @cached_property
    def dist_info(self) -> str | None:
        """The name of vLLM's dist-info folder, or None in a source checkout."""
        raise NotImplementedError

    @cached_property
    def version(self) -> str:
        """The version: from METADATA, else from ``vllm/_version.py``.

        Raises:
            ForkError: neither says one.
        """
        metadata = self.read(f"{self.dist_info}/METADATA") if self.dist_info else None
        if metadata and (found := message_from_bytes(metadata)["Version"]):
            return found
        text = (self.read(_VERSION_FILE) or b"").decode("utf-8", "replace")
        if found := re.search(r"^__version__ = .*?'([^'\n]+)'", text, re.MULTILINE):
            return found.group(1)
        raise ForkError(
            f"{self} says no version: neither a dist-info folder nor {_VERSION_FILE}. "
            "Give a wheel, an unpacked wheel, or the site-packages of an installed vLLM."
        )

    @property
    def base(self) -> Version:
        """The upstream release this tree is: its version without the local label."""
        try:
            return Version(Version(self.version).public)
        except InvalidVersion:
            raise ForkError(f"{self} has version {self.version!r}: not a version") from None


class WheelTree(Tree):
    """A wheel file, read in place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise ForkError(f"{path} is not a wheel: {error}") from None
        self._names = set(self._zip.namelist())

    def __str__(self) -> str:
        return str(self.path)

    def read(self, path: str) -> bytes | None:
        try:
            return self._zip.read(path) if path in self._names else None
        except (zipfile.BadZipFile, zlib.error) as error:
            raise ForkError(f"{self.path} is damaged: {path}: {error}") from None

    def names(self) -> Iterator[str]:
        return (name for name in self._zip.namelist() if not name.endswith("/"))

    @cached_property
    def dist_info(self) -> str | None:
        found = {n.split("/")[0] for n in self._names if n.endswith(".dist-info/METADATA")}
        return found.pop() if len(found) == 1 else None


class FolderTree(Tree):
    """A folder that holds ``vllm/``: unpacked, installed, or a source checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def read(self, path: str) -> bytes | None:
        file = self.root / path
        return file.read_bytes() if file.is_file() else None

    def names(self) -> Iterator[str]:
        for top in ["vllm", *filter(None, [self.dist_info])]:
            for file in sorted((self.root / top).rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    yield file.relative_to(self.root).as_posix()

    @cached_property
    def dist_info(self) -> str | None:
        found = sorted(self.root.glob("vllm-*.dist-info"))
        if len(found) > 1:
            raise ForkError(
                f"{self.root} holds {len(found)} dist-info folders of vLLM "
                f"({', '.join(x.name for x in found)}): remove all but one."
            )
        return found[0].name if found else None

    def write(self, changes: Mapping[str, bytes | None]) -> None:
        """Writes all of ``changes`` and what RECORD says of them, or nothing."""
        changes = {path: data for path, data in changes.items() if data != self.read(path)}
        if not changes:
            return
        listing = f"{self.dist_info}/RECORD"
        if self.dist_info and (old := self.read(listing)):
            changes[listing] = record.update(old, changes)
        transaction.write(self.root, changes)


class Overlay(Tree):
    """A tree with changes on top that are not written yet."""

    def __init__(self, under: Tree, changes: Mapping[str, bytes | None] | None = None) -> None:
        self.under = under
        self.changes = dict(changes or {})

    def __str__(self) -> str:
        return str(self.under)

    def read(self, path: str) -> bytes | None:
        return self.changes[path] if path in self.changes else self.under.read(path)

    def names(self) -> Iterator[str]:
        seen = set()
        for name in self.under.names():
            seen.add(name)
            if self.changes.get(name, b"") is not None:
                yield name
        yield from (n for n, data in self.changes.items() if data is not None and n not in seen)

    @cached_property
    def dist_info(self) -> str | None:
        return self.under.dist_info


def open_tree(path: Path | str) -> WheelTree | FolderTree:
    """The tree at ``path``: a wheel, a folder with ``vllm/`` in it, that ``vllm``
    folder itself, or a virtual environment.

    Raises:
        ForkError: nothing of the kind is there.
    """
    path = Path(path).expanduser()
    if path.is_file():
        return WheelTree(path)
    folders = [path, *sorted(path.glob("lib/python*/site-packages"))]
    if path.name == "vllm":
        folders.append(path.parent)
    for folder in folders:
        if (folder / "vllm" / "__init__.py").is_file():
            return FolderTree(folder.resolve())
    raise ForkError(
        f"{path} holds no vLLM. Give a wheel, an unpacked wheel, a virtual environment, "
        "its site-packages, or a source checkout."
    )
