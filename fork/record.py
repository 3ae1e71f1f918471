# SPDX-License-Identifier: Apache-2.0
"""RECORD: the installer's list of files and hashes, kept right under edits.

Lines keep their order and form, so undoing an edit gives back the same bytes.
"""

import base64
import csv
import hashlib
import io
from collections.abc import Iterator, Mapping


def digest(data: bytes) -> str:
    """The hash field of a RECORD line (PEP 376, urlsafe base64 without padding)."""
    raw = hashlib.sha256(data).digest()
    return "sha256=" + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def rows(record: bytes) -> Iterator[tuple[str, str, str]]:
    """(path, hash, size) of each line."""
    for row in csv.reader(io.StringIO(record.decode("utf-8"))):
        if row:
            yield row[0], row[1], row[2]


def line(path: str, data: bytes) -> str:
    """A RECORD line without its end, quoted where CSV needs it."""
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow([path, digest(data), len(data)])
    return out.getvalue()


def update(record: bytes, changes: Mapping[str, bytes | None]) -> bytes:
    """RECORD after ``changes``: path to its new bytes, or to None where removed.

    New paths go to the end, sorted.
    """
    text = record.decode("utf-8")
    end = "\r\n" if "\r\n" in text else "\n"
    lines = []
    known = set()
    for old in text.splitlines():
        path, hashed, *_ = [*next(csv.reader([old]), []), "", ""]
        known.add(path)
        # A line without a hash (RECORD itself, byte code) promises nothing: it stays.
        if path not in changes or (not hashed and changes[path] is not None):
            lines.append(old)
        elif (data := changes[path]) is not None:
            lines.append(line(path, data))
    for path in sorted(changes.keys() - known):
        if (data := changes[path]) is not None:
            lines.append(line(path, data))
    return (end.join(lines) + (end if text.endswith("\n") else "")).encode("utf-8")
