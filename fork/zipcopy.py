# SPDX-License-Identifier: Apache-2.0
"""A zip made from another: most members copied as compressed, a few written anew.

The zipfile module can only recompress, which costs half a minute on a wheel of
336 MB and makes the bytes depend on the zlib in use. Here an untouched member is
copied bit for bit, and a new one is stored uncompressed: the result depends on the
input alone.
"""

import copy
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Signature, then after 22 bytes the lengths of name and extra field (APPNOTE 4.3.7)."""

_DESCRIPTOR = 0x08
"""General-purpose bit 3: sizes follow the data, not the header."""

_CHUNK = 1 << 22

FILE_MODE = 0o100644 << 16
"""Regular file, rw-r--r--, in the external attributes' high half."""


def rewrite(
    source: Path,
    target: BinaryIO,
    replaced: Mapping[str, bytes | None],
    date_time: tuple[int, int, int, int, int, int],
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Writes ``source`` to ``target`` with some members replaced.

    Args:
        source: a zip file.
        target: a binary file open for writing, empty.
        replaced: name to new content, or to None to leave the member out. Names that
            ``source`` lacks come last, sorted.
        date_time: of the members written anew.
        progress: called with the number of bytes copied.

    Raises:
        zipfile.BadZipFile: a local header is damaged, or uses a data descriptor.
    """
    with zipfile.ZipFile(source) as old, source.open("rb") as raw:
        new = zipfile.ZipFile(target, "w", zipfile.ZIP_STORED, allowZip64=True)
        try:
            _fill(new, old, raw, replaced, date_time, progress)
        except BaseException:
            new._didModify = False  # else closing writes a directory of what is there
            raise
        finally:
            new.close()


def _fill(new, old, raw, replaced, date_time, progress) -> None:
    names = set()
    for info in old.infolist():
        names.add(info.filename)
        if info.filename not in replaced:
            _copy(raw, info, new, progress)
        elif (data := replaced[info.filename]) is not None:
            _store(new, info.filename, data, date_time)
    for name in sorted(replaced.keys() - names):
        if (data := replaced[name]) is not None:
            _store(new, name, data, date_time)


def _store(new: zipfile.ZipFile, name: str, data: bytes, date_time) -> None:
    info = zipfile.ZipInfo(name, date_time)
    info.create_system = 3  # Unix, whatever this runs on
    info.external_attr = FILE_MODE
    new.writestr(info, data)


def _copy(raw: BinaryIO, info: zipfile.ZipInfo, new: zipfile.ZipFile, progress) -> None:
    raw.seek(info.header_offset)
    header = raw.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size:
        raise zipfile.BadZipFile(f"{info.filename}: the file ends early")
    signature, name, extra = _LOCAL_HEADER.unpack(header)
    if signature != b"PK\x03\x04" or info.flag_bits & _DESCRIPTOR:
        raise zipfile.BadZipFile(f"{info.filename}: a local header this cannot copy")
    left = _LOCAL_HEADER.size + name + extra + info.compress_size
    raw.seek(info.header_offset)
    # ZipFile keeps the directory it will write in these attributes.
    entry = copy.copy(info)
    entry.header_offset = new.fp.tell()
    while left:
        chunk = raw.read(min(left, _CHUNK))
        if not chunk:
            raise zipfile.BadZipFile(f"{info.filename}: the file ends early")
        new.fp.write(chunk)
        left -= len(chunk)
        progress(len(chunk))
    new.filelist.append(entry)
    new.NameToInfo[entry.filename] = entry
    new.start_dir = new.fp.tell()
    new._didModify = True
