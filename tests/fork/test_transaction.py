# SPDX-License-Identifier: Apache-2.0
"""Pins that a write killed at any step leaves, after recovery, the old tree or the new one."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fork import ROOT
from fork.transaction import STAGE, interrupted, recover, write

OLD = {
    "vllm/a.py": b"a = 1\n",
    "vllm/b.py": b"b = 1\n",
    "vllm/sub/gone.py": b"gone = 1\n",
    "vllm/stays.py": b"stays = 1\n",
    "dist/RECORD": b"record 1\n",
}
# One file of each kind: replaced, removed with its folder, new in new folders (two in one).
CHANGES = {
    "vllm/a.py": b"a = 2\n",
    "vllm/b.py": b"b = 2\n",
    "vllm/sub/gone.py": None,
    "vllm/new/deep/c.py": b"c = 2\n",
    "vllm/new/deep/d.py": b"d = 2\n",
    "vllm/beside.py": b"beside = 2\n",
    "dist/RECORD": b"record 2\n",
}
NEW = {path: data for path, data in (OLD | CHANGES).items() if data is not None}

# Everything by which the module changes the disk.
STEPS = [
    (os, "replace"),
    (os, "mkdir"),
    (os, "unlink"),
    (os, "rmdir"),
    (shutil, "copy2"),
    (shutil, "copymode"),
    (shutil, "rmtree"),
    (Path, "write_bytes"),
    (Path, "write_text"),
]


def lay_down(root):
    for path, data in OLD.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def with_folders(files):
    """The files as a snapshot shows them: their folders are in it, as None."""
    folders = {str(p): None for f in files for p in Path(f).parents if str(p) != "."}
    return folders | files


@pytest.fixture
def killed_write(tmp_path, killer):
    """Kills a write at its n-th step, n from 1 on: yields (n, folder) until one completes."""

    def runs(after):
        with killer(STEPS) as kill:
            for number in range(1, 1000):
                kill.arm(0)
                root = tmp_path / f"{after}-{number}"
                lay_down(root)
                kill.arm(number, after)
                try:
                    write(root, CHANGES)
                except kill.Killed:
                    kill.arm(0)
                    yield number, root
                else:
                    return

    return runs


def test_write(tmp_path, snapshot):
    lay_down(tmp_path)
    write(tmp_path, CHANGES)
    assert snapshot(tmp_path) == with_folders(NEW)
    assert not interrupted(tmp_path)
    assert recover(tmp_path) is False
    assert snapshot(tmp_path) == with_folders(NEW)


@pytest.mark.parametrize("after", [False, True], ids=["before the step", "after the step"])
def test_killed_at_every_step(killed_write, snapshot, after):
    outcomes = []
    for number, root in killed_write(after):
        promised = (root / STAGE / "journal.json").exists()
        begun = interrupted(root)
        assert recover(root) is begun
        found = snapshot(root)
        assert found in (with_folders(OLD), with_folders(NEW)), number
        outcomes.append(found == with_folders(NEW))
        if promised:
            assert not outcomes[-1], "a journal means that the old files come back"
        assert not interrupted(root)
        assert recover(root) is False
        assert snapshot(root) == found
    # More steps than files; old at first, new at the end, and never back again.
    assert len(outcomes) > 2 * len(CHANGES)
    assert outcomes == sorted(outcomes)
    assert outcomes[0] is False and outcomes[-1] is True


@pytest.mark.parametrize("kind", ["write_bytes", "copy2"])
def test_killed_inside_a_copy(tmp_path, monkeypatch, snapshot, kind):
    """The file was half written when the kill came."""
    owner = Path if kind == "write_bytes" else shutil

    def half(source, target):
        """Of ``copy2(source, target)`` or ``Path.write_bytes(source, data)``."""
        with open(source if kind == "write_bytes" else target, "wb") as file:
            file.write(b"a =")
        raise KeyboardInterrupt

    lay_down(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(owner, kind, half)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, CHANGES)
    assert interrupted(tmp_path)
    recover(tmp_path)
    assert snapshot(tmp_path) == with_folders(OLD)


def test_killed_inside_the_removal_of_the_stage(tmp_path, monkeypatch, snapshot):
    def half(stage):
        next(f for f in sorted(Path(stage).rglob("*")) if f.is_file()).unlink()
        raise KeyboardInterrupt

    lay_down(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", half)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, CHANGES)
    assert recover(tmp_path) is True
    assert snapshot(tmp_path) == with_folders(NEW)


@pytest.mark.parametrize("after", [False, True], ids=["before the step", "after the step"])
def test_recovery_killed_at_every_step(killed_write, tmp_path, snapshot, killer, after):
    # The write's kill with the most to put back: the last one whose journal was there.
    *_, half_written = (
        root for _, root in killed_write(True) if (root / STAGE / "journal.json").exists()
    )
    kills = 0
    with killer(STEPS) as kill:
        for number in range(1, 1000):
            kill.arm(0)
            root = tmp_path / f"recovery-{number}"
            shutil.copytree(half_written, root)
            kill.arm(number, after)
            try:
                recover(root)
            except kill.Killed:
                kills += 1
                kill.arm(0)
                recover(root)
            assert snapshot(root) == with_folders(OLD), number
            assert recover(root) is False
            if kills < number:
                break
    assert kills > len(CHANGES)


def test_the_next_write_recovers_first(killed_write, snapshot):
    for _, root in killed_write(False):
        write(root, {"vllm/stays.py": b"stays = 3\n"})
        stayed = {"vllm/stays.py": b"stays = 3\n"}
        assert snapshot(root) in (with_folders(OLD | stayed), with_folders(NEW | stayed))


def test_kill_9_half_way(tmp_path, snapshot):
    """A real one: a process that replaces a file every 50 ms, killed after the third."""
    root, signs = tmp_path / "tree", tmp_path / "signs"
    lay_down(root)
    signs.mkdir()
    script = f"""
import os, time
from pathlib import Path
from fork import transaction
real = os.replace
def slow(source, target):
    real(source, target)
    (Path({str(signs)!r}) / Path(target).name).touch()
    time.sleep(0.05 if len(os.listdir({str(signs)!r})) < 4 else 60)
os.replace = slow
transaction.write(Path({str(root)!r}), {CHANGES!r})
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    try:
        deadline = time.monotonic() + 30
        while len(list(signs.iterdir())) < 4 and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(list(signs.iterdir())) == 4  # the journal and three files
    between = {path: data for path, data in snapshot(root).items() if not path.startswith(STAGE)}
    assert between not in (with_folders(OLD), with_folders(NEW))
    assert interrupted(root)
    assert recover(root) is True
    assert snapshot(root) == with_folders(OLD)


def test_replaces_by_rename_and_keeps_the_mode(tmp_path):
    lay_down(tmp_path)
    target = tmp_path / "vllm/a.py"
    target.chmod(0o604)
    os.link(target, tmp_path / "link")
    write(tmp_path, CHANGES)
    assert (tmp_path / "link").read_bytes() == OLD["vllm/a.py"]
    assert target.read_bytes() == CHANGES["vllm/a.py"]
    assert target.stat().st_mode & 0o777 == 0o604


def test_recovery_keeps_mode_and_time(tmp_path, killer):
    lay_down(tmp_path)
    target = tmp_path / "vllm/a.py"
    target.chmod(0o604)
    os.utime(target, ns=(10**18, 10**18))
    with killer([(os, "replace")]) as kill, pytest.raises(kill.Killed):
        kill.arm(len(NEW), after=True)
        write(tmp_path, CHANGES)
    assert target.read_bytes() == CHANGES["vllm/a.py"]
    recover(tmp_path)
    assert (target.stat().st_mode & 0o777, target.stat().st_mtime_ns) == (0o604, 10**18)


def test_removal_takes_bytecode_and_empty_folders_only(tmp_path, snapshot):
    lay_down(tmp_path)
    cache = tmp_path / "vllm/__pycache__"
    cache.mkdir()
    (cache / "a.cpython-311.pyc").write_bytes(b"x")
    (cache / "ab.cpython-311.pyc").write_bytes(b"x")
    write(tmp_path, {"vllm/a.py": None, "vllm/sub/gone.py": None})
    left = {p: d for p, d in OLD.items() if p not in ("vllm/a.py", "vllm/sub/gone.py")}
    assert snapshot(tmp_path) == with_folders(left | {"vllm/__pycache__/ab.cpython-311.pyc": b"x"})


@pytest.mark.parametrize("path", ["vllm/nothing.py", "vllm/no/folder.py"])
def test_removal_of_what_is_not_there_is_a_no_op(tmp_path, snapshot, path):
    lay_down(tmp_path)
    write(tmp_path, {path: None})
    assert snapshot(tmp_path) == with_folders(OLD)
