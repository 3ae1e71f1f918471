# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of the engine: a miniature tree, patches and a pin made by hand."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

import patches
from fork import patch, pin, record, series
from fork.tree import FolderTree

VERSION = "0.33.0"

FILES = {
    "vllm/__init__.py": "",
    "vllm/_version.py": f"__version__ = version = '{VERSION}'\n",
    "vllm/cache.py": (
        "from vllm.base import Base\n\n\n"
        "class Cache(Base):\n"
        "    size: int = 8\n\n"
        "    def __init__(self):\n"
        "        self.pages = Pages(width=32)  # größe\n"
    ),
    "vllm/worker/run.py": "def sizes():\n    return [128]\n",
    f"vllm-{VERSION}.dist-info/METADATA": f"Name: vllm\nVersion: {VERSION}\n",
}


@pytest.fixture
def tiny_files():
    """The miniature tree's files without RECORD: path to bytes."""
    return {path: text.encode() for path, text in FILES.items()}


@pytest.fixture
def write_tree(tiny_files):
    """Lays the miniature tree down in a folder; keyword ``files`` replaces the files."""

    def write(root, files=None):
        files = dict(tiny_files if files is None else files)
        folder = next((p.split("/")[0] for p in files if p.endswith("/METADATA")), None)
        if folder:
            lines = [record.line(path, data) + "\n" for path, data in files.items()]
            files[f"{folder}/RECORD"] = f"{''.join(lines)}{folder}/RECORD,,\n".encode()
        for path, data in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        return FolderTree(root)

    return write


@pytest.fixture
def snapshot():
    """Everything under a folder: files with their bytes, folders with None."""

    def snap(root):
        return {
            path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None
            for path in sorted(root.rglob("*"))
        }

    return snap


@pytest.fixture
def make_patch(tmp_path):
    """A patch on 0.33 from its edits, or from a whole tuple of variants."""

    def make(name, *edits, variants=None, bases=">=0.33,<0.34", **more):
        if variants is None:
            variants = (patch.Variant(bases, edits),) if edits else ()
        text = dict.fromkeys(("title", "why", "upstream", "retire", "test"), "x")
        return patch.Patch(name=name, variants=variants, **{"root": tmp_path, **text, **more})

    return make


@pytest.fixture
def use_series(monkeypatch):
    """Makes the given patches the series of this checkout."""

    def use(*members):
        by_name = {member.name: member for member in members}
        monkeypatch.setattr(patches, "SERIES", tuple(by_name))
        monkeypatch.setattr(series, "load", by_name.__getitem__)
        return list(members)

    return use


@pytest.fixture
def tiny_pin():
    """A pin that serves one base, every hash a repeated digit."""

    def wheel(name, digit):
        return pin.WheelPin(name=name, sha256=digit * 64)

    base = pin.BasePin(
        flashinfer="0.7",
        torch="2.14",
        transformers=">=5",
        deep_gemm="2.8",
        wheels={"x86_64": wheel("v-x.whl", "a"), "aarch64": wheel("v-a.whl", "b")},
        flashinfer_wheel=wheel("f.whl", "c"),
    )
    return pin.Pin(release=1, base=VERSION, bases={VERSION: base})


class Killed(BaseException):
    """What a kill looks like from inside: nothing catches it."""


@pytest.fixture
def killer(monkeypatch):
    """Dies at the n-th of all calls of the functions given, before or after it ran.

    ``with killer([(os, "replace"), …]) as k: k.arm(n); …`` raises ``k.Killed``.
    """

    @contextmanager
    def kill(functions):
        state = SimpleNamespace(left=0, Killed=Killed, after=False)

        def arm(count, after=False):
            state.left, state.after = count, after

        def wrap(original):
            def wrapped(*args, **kwargs):
                state.left -= 1
                if state.left == 0 and not state.after:
                    raise Killed
                try:
                    return original(*args, **kwargs)
                finally:
                    if state.left == 0 and state.after:
                        state.left = -1
                        raise Killed

            return wrapped

        state.arm = arm
        with monkeypatch.context() as patched:
            for owner, name in functions:
                patched.setattr(owner, name, wrap(getattr(owner, name)))
            yield state

    return kill
