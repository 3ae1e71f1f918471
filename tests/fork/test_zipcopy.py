# SPDX-License-Identifier: Apache-2.0
"""Pins the zip copier: untouched members bit for bit, the result from the input alone."""

import gc
import random
import struct
import sys
import zipfile
import zlib
from contextlib import suppress

import pytest

from fork import zipcopy

DATE = (2026, 11, 1, 9, 43, 0)
OLDER = (2020, 2, 3, 4, 5, 6)
TEXT = b"some text, repeated. " * 200
NOISE = random.Random(0).randbytes(5000)

MEMBERS = {
    "pkg/": (b"", zipfile.ZIP_STORED, 0o40755 << 16 | 0x10),
    "pkg/z.py": (TEXT, zipfile.ZIP_DEFLATED, 0o100644 << 16),
    "pkg/_C.so": (NOISE, zipfile.ZIP_DEFLATED, 0o100755 << 16),
    "pkg/plain": (TEXT, zipfile.ZIP_STORED, 0),
    "pkg/größe-日本.py": (b"x = 1\n", zipfile.ZIP_DEFLATED, 0o100600 << 16),
    "a.bz2": (TEXT, zipfile.ZIP_BZIP2, 0o100644 << 16),
    "empty": (b"", zipfile.ZIP_DEFLATED, 0o100644 << 16),
}


def write_zip(path, members=MEMBERS):
    """A zip of ``{name: (data, method, external attributes)}``."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, (data, method, attributes) in members.items():
            info = zipfile.ZipInfo(name, OLDER)
            info.compress_type, info.external_attr = method, attributes
            archive.writestr(info, data)
    return path


@pytest.fixture
def source(tmp_path):
    return write_zip(tmp_path / "source.zip")


@pytest.fixture
def rewrite(tmp_path):
    """Rewrites a zip and returns the new file, which zipfile finds whole."""

    def run(source, replaced=(), date_time=DATE, **options):
        target = tmp_path / "target.zip"
        with target.open("wb") as file:
            zipcopy.rewrite(source, file, dict(replaced), date_time, **options)
        with zipfile.ZipFile(target) as archive:
            assert archive.testzip() is None
        return target

    return run


def raw(path):
    """Per member in order: all that the directory says except where the member lies, and
    the member's own bytes, header and compressed data."""
    data, found = path.read_bytes(), {}
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            start = info.header_offset
            name, extra = struct.unpack("<HH", data[start + 26 : start + 30])
            end = start + 30 + name + extra + info.compress_size
            said = {n: getattr(info, n) for n in info.__slots__ if hasattr(info, n)}
            for name in ("header_offset", "orig_filename", "_raw_time", "_end_offset"):
                said.pop(name, None)
            found[info.filename] = (said, data[start:end])
    return found


def read(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_untouched_members_are_copied_bit_for_bit(source, rewrite):
    target = rewrite(source)
    assert raw(target) == raw(source)
    assert list(raw(target)) == list(MEMBERS)
    assert read(target) == {name: data for name, (data, _, _) in MEMBERS.items()}


def test_a_member_compressed_otherwise_stays_so(tmp_path, rewrite):
    """Bytes that this zlib would not make: another level than zipfile's own."""
    source = tmp_path / "source.zip"
    with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("fast", TEXT + NOISE)
    with zipfile.ZipFile(tmp_path / "slow.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("fast", TEXT + NOISE)
    fast = raw(source)["fast"][1]
    assert raw(tmp_path / "slow.zip")["fast"][1] != fast
    assert raw(rewrite(source, {"new": b""}))["fast"][1] == fast


def test_replaced_removed_added(source, rewrite):
    replaced = {
        "pkg/z.py": b"new\n",
        "pkg/plain": None,
        "b/added": b"B",
        "c": b"",
        "0": b"",
        "B": b"",
        "a/added": TEXT,
    }
    target = rewrite(source, replaced | {"never there": None})
    want = {n: data for n, (data, _, _) in MEMBERS.items() if n != "pkg/plain"}
    want |= {n: data for n, data in replaced.items() if data is not None}
    assert read(target) == want
    # Replaced where they were, the new ones last and sorted.
    kept = [n for n in MEMBERS if n != "pkg/plain"]
    assert list(raw(target)) == [*kept, "0", "B", "a/added", "b/added", "c"]
    untouched = MEMBERS.keys() - replaced
    assert {n: raw(target)[n] for n in untouched} == {n: raw(source)[n] for n in untouched}


def test_new_members_are_stored_plain_files(source, rewrite):
    with zipfile.ZipFile(rewrite(source, {"pkg/_C.so": TEXT, "new": TEXT})) as archive:
        for name in ("pkg/_C.so", "new"):
            info = archive.getinfo(name)
            assert (info.compress_type, info.compress_size) == (zipfile.ZIP_STORED, len(TEXT))
            assert info.date_time == DATE
            assert (info.create_system, info.external_attr >> 16) == (3, 0o100644)
            assert (info.flag_bits, info.extra, info.comment) == (0, b"", b"")


def test_result_does_not_depend_on_zlib(source, rewrite, monkeypatch):
    """Where deflate is broken, the same bytes come out: nothing is compressed anew."""
    before = rewrite(source, {"pkg/z.py": TEXT, "new": TEXT}).read_bytes()

    def broken(*_):
        raise AssertionError("compressed something")

    monkeypatch.setattr(zlib, "compressobj", broken)
    assert rewrite(source, {"pkg/z.py": TEXT, "new": TEXT}).read_bytes() == before


def test_equal_input_gives_equal_bytes(source, rewrite, monkeypatch):
    forth = {"b": b"1", "a": b"2", "pkg/z.py": None}
    first = rewrite(source, forth).read_bytes()
    monkeypatch.setattr("time.time", lambda: 0.0)
    monkeypatch.setattr("sys.platform", "win32")
    assert rewrite(source, dict(reversed(forth.items()))).read_bytes() == first
    assert rewrite(source, forth, (2026, 11, 1, 9, 43, 2)).read_bytes() != first


def test_rewriting_back_and_forth(source, rewrite, tmp_path):
    """A rewritten zip is a source like any other."""
    once = rewrite(source, {"new": TEXT}).rename(tmp_path / "once.zip")
    back = rewrite(once, {"new": None})
    assert raw(back) == raw(source)
    assert back.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("members", [{}, {"only": (TEXT, zipfile.ZIP_DEFLATED, 0)}])
def test_from_nothing_and_to_nothing(tmp_path, rewrite, members):
    source = write_zip(tmp_path / "source.zip", members)
    assert read(rewrite(source, dict.fromkeys(members))) == {}
    assert read(rewrite(source, {"only": b"1"})) == {"only": b"1"}


def test_member_larger_than_a_chunk(tmp_path, rewrite):
    data = random.Random(1).randbytes((4 << 20) + 7)
    kept = (data, zipfile.ZIP_STORED, 0)
    source = write_zip(tmp_path / "source.zip", {"big": kept, "deflated": kept, "last": kept})
    counts = []
    target = rewrite(source, {"deflated": data[:9]}, progress=counts.append)
    assert raw(target)["big"] == raw(source)["big"]
    assert raw(target)["last"] == raw(source)["last"]
    assert read(target)["deflated"] == data[:9]
    # Two members, each in more than one step and more than its data: the header counts.
    assert len(counts) == 4
    assert sum(counts) == 2 * len(data) + 2 * 30 + len("big") + len("last")


def test_progress_sums_to_the_bytes_copied(source, rewrite):
    counts = []
    rewrite(source, progress=counts.append)
    with zipfile.ZipFile(source) as archive:
        assert sum(counts) == archive.start_dir  # all before the directory
    counts.clear()
    rewrite(source, dict.fromkeys(MEMBERS, b"x"), progress=counts.append)
    assert sum(counts) == 0


def test_extra_fields_and_comments_are_kept(tmp_path, rewrite):
    source = tmp_path / "source.zip"
    with zipfile.ZipFile(source, "w") as archive:
        info = zipfile.ZipInfo("f", OLDER)
        info.extra, info.comment = struct.pack("<HHL", 0x7075, 4, 9), b"a comment"
        archive.writestr(info, TEXT)
    target = rewrite(source, {"new": b""})
    assert raw(target)["f"] == raw(source)["f"]


def test_zip_behind_other_bytes(source, rewrite):
    """As a self-extracting archive: offsets count from where the zip begins."""
    members = raw(source)
    source.write_bytes(b"#!/bin/sh\n" * 9 + source.read_bytes())
    assert raw(rewrite(source)) == members


# Sources that cannot be copied.


def directory(data):
    """Where the central directory begins."""
    return data.index(b"PK\x01\x02")


def cut(data):
    return data[: len(data) // 2]


def no_end(data):
    return data[:-10]


def signature(data):
    return b"PK\x03\x05" + data[4:]


def offset_near_the_end(data):
    """The directory says that the first member lies where no header fits."""
    at = directory(data) + 42
    return data[:at] + struct.pack("<L", len(data) - 10) + data[at + 4 :]


def size_beyond_the_end(data):
    at = directory(data) + 20
    return data[:at] + struct.pack("<L", len(data) + 1) + data[at + 4 :]


def not_a_zip(data):
    return b"x" * 100


def nothing(data):
    return b""


DAMAGES = [
    cut,
    no_end,
    signature,
    offset_near_the_end,
    size_beyond_the_end,
    not_a_zip,
    nothing,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_source(tmp_path, rewrite, damage):
    source = write_zip(tmp_path / "source.zip", {"f": (TEXT, zipfile.ZIP_STORED, 0)})
    source.write_bytes(damage(source.read_bytes()))
    with pytest.raises(zipfile.BadZipFile):
        rewrite(source, {"new": b"1"})


def test_data_descriptor_is_refused(tmp_path, rewrite):
    class Unseekable:
        """What makes zipfile write sizes behind the data."""

        def __init__(self, file):
            self.write, self.flush = file.write, file.flush

    source = tmp_path / "source.zip"
    with source.open("wb") as file, zipfile.ZipFile(Unseekable(file), "w") as archive:
        archive.writestr("streamed", TEXT)
    assert read(source) == {"streamed": TEXT}
    with pytest.raises(zipfile.BadZipFile, match="streamed"):
        rewrite(source)
    # Not where it is replaced: nothing of it is copied.
    assert read(rewrite(source, {"streamed": b"1"})) == {"streamed": b"1"}


def test_a_name_in_the_old_encoding(tmp_path, rewrite):
    """Without the UTF-8 flag a name is in code page 437; wheels have none of these."""

    class Old(zipfile.ZipInfo):
        def _encodeFilenameFlags(self):
            return self.filename.encode("cp437"), self.flag_bits & ~0x800

    source = tmp_path / "source.zip"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr(Old("größe", OLDER), TEXT)
    assert read(source) == {"größe": TEXT}
    try:
        target = rewrite(source)
    except zipfile.BadZipFile as error:
        assert "größe" in str(error)
    else:
        assert read(target) == {"größe": TEXT}


def test_a_failure_is_quiet(source, tmp_path, monkeypatch):
    """Nothing is written behind the caller's back once the caller closed the file."""

    def interrupted(_):
        raise KeyboardInterrupt

    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with (tmp_path / "target.zip").open("wb") as file, suppress(KeyboardInterrupt):
        zipcopy.rewrite(source, file, {}, DATE, interrupted)
        pytest.fail("went on")
    gc.collect()
    assert [str(u.exc_value) for u in unraisable] == []


def test_source_is_left_alone(source, rewrite):
    before = source.read_bytes()
    rewrite(source, {"pkg/z.py": b"new", "new": b"1"})
    assert source.read_bytes() == before
