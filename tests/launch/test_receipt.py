# SPDX-License-Identifier: Apache-2.0
"""Receipts: written first, whole at every moment, never in place of another."""

import errno
import json
import multiprocessing
import os

import pytest

from sm120_launch import receipt
from sm120_launch.errors import LaunchError
from sm120_launch.receipt import Folder, Receipt


@pytest.fixture
def folder(tmp_path):
    found = Folder(tmp_path / "receipts")
    with found.lock("p"):
        pass  # makes it
    return found


def make(**changes):
    fields = {"kind": "launch", "profile": "p", "profile_key": "k", "runtime_key": "r"}
    return Receipt(**{"id": receipt.new_id(), "begun": receipt.now(), **fields, **changes})


def test_round_trip(folder):
    made = make(warnings=["größe \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")])
    folder.create(made)
    assert folder.read(made.id) == made
    assert json.loads((folder.path / f"{made.id}.json").read_text())["schema"] == 1
    assert folder.ids() == [made.id]


def test_only_the_user_may_read(folder):
    made = make()
    folder.create(made)
    assert (folder.path.stat().st_mode & 0o077, os.stat(folder.path).st_mode & 0o700) == (0, 0o700)
    assert (folder.path / f"{made.id}.json").stat().st_mode & 0o077 == 0


def test_a_receipt_is_not_replaced_by_another(folder):
    made = make()
    folder.create(made)
    before = (folder.path / f"{made.id}.json").read_bytes()
    with pytest.raises(LaunchError):
        folder.create(make(id=made.id, profile="other"))
    assert (folder.path / f"{made.id}.json").read_bytes() == before


@pytest.mark.parametrize("call", ["fsync", "replace", "link"])
def test_a_failed_write_leaves_what_was_there(folder, monkeypatch, call):
    made = make()
    if call != "link":
        folder.create(made)
    before = {path: path.read_bytes() for path in folder.path.glob("*.json")}

    def fail(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(LaunchError, match=r"No space left on device.*--receipts"):
        (folder.create if call == "link" else folder.update)(made)
    assert {path: path.read_bytes() for path in folder.path.glob("*.json")} == before
    assert not list(folder.path.glob(".receipt-*"))


def test_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="cannot be kept"), Folder(tmp_path / "file/x").lock("p"):
        pass


def _hold(path, held, go):
    with Folder(path).lock("p"):
        held.set()
        go.wait(30)


def test_lock_is_let_go_by_a_kill(folder):
    context = multiprocessing.get_context("spawn")
    held, go = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(folder.path, held, go))
    other.start()
    assert held.wait(30)
    with pytest.raises(LaunchError, match="another command works on profile p"), folder.lock("p"):
        pass
    assert folder.is_locked("p") and not folder.is_locked("q")
    with folder.lock("q"):
        pass
    other.kill()
    other.join()
    assert not folder.is_locked("p")
    with folder.lock("p"):
        pass


@pytest.mark.parametrize("bad", ["../../etc/passwd", "x", "", "20261130-200000-000000-00000g"])
def test_names_are_ids(folder, bad):
    with pytest.raises(LaunchError, match="no receipt"):
        folder.read(bad)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2}', "\udcff"])
def test_damaged(folder, text):
    made = make()
    path = folder.path / f"{made.id}.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(LaunchError, match="is damaged"):
        folder.read(made.id)


def test_interrupted_until_cleaned():
    left, other = make(id="20260101-000000-000000-000001"), make(id="20260101-000000-000000-000002")
    done = make(result="refused", cleaned=[left.id])
    assert receipt.interrupted([left, other]) == [left, other]
    assert receipt.interrupted([left, done, other]) == [other]


def test_not_cleaned():
    def launched(engine, **changes):
        known = {"rank": 0, "host": "h", "where": "this host", "runtime": "venv", "image": None}
        known |= {"argv": [], "argv_sha256": "", "env_sha256": "", "env": [], "engine": engine}
        return make(**{"ranks": [receipt.RankRecord(**known)], "result": "started", **changes})

    started, stuck = launched("started"), launched("may still run: lost", result="failed")
    ended, gate = launched("stopped", result="failed"), make(kind="gate", result="passed")
    left, refused = make(), launched(None, result="refused")
    assert receipt.not_cleaned([started, stuck, ended, gate, left, refused]) == [
        started,
        stuck,
        left,
    ]
    stopped = make(kind="stop", result="stopped", cleaned=[started.id, left.id])
    assert receipt.not_cleaned([started, stuck, left, stopped]) == [stuck]


def test_of_passes_over_what_it_cannot_read(folder):
    """Others' receipts are no matter; one that may be the profile's own is told."""
    mine, others = make(), make(profile="q")
    for found in (mine, others):
        folder.create(found)
    newer, empty, broken = (receipt.new_id() for _ in range(3))
    (folder.path / f"{newer}.json").write_text('{"schema": 9, "profile": "p"}')
    (folder.path / f"{empty}.json").touch()
    (folder.path / f"{broken}.json").write_text('{"schema": 1, "profile": "q", ')
    found, damaged = folder.of("p")
    assert found == [mine]
    assert [newer in str(error) or empty in str(error) for error in damaged] == [True] * 2
    found, damaged = folder.of("r")
    assert found == [] and empty in str(damaged[0]) and len(damaged) == 1


def test_outputs_are_bounded_from_both_ends():
    head, tail = receipt.OUTPUT_HEAD, receipt.OUTPUT_TAIL
    assert receipt.bounded("x" * (head + tail)) == "x" * (head + tail)
    shown = receipt.bounded(b"a" * head + b"m" * 1000 + b"z" * tail)
    assert shown == f"{'a' * head}\n[… 1000 characters left out …]\n{'z' * tail}"
    assert receipt.bounded(b"\x1b[31mx\x1b[0m") == "x"


def test_reports_are_kept_within_bounds():
    deep = {}
    for _ in range(500):
        deep = {"x": deep}
    wide = {"rows": list(range(10**5)), "text": "\x1b[2J" + "y" * 10**5, "n": float("nan")}
    for found in (deep, wide, {"\ud800": "\ud800"}):
        text = json.dumps(receipt.kept(found), ensure_ascii=False)
        assert len(text.encode("utf-8")) < 1 << 20 and "\x1b" not in text
