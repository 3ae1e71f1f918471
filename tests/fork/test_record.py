# SPDX-License-Identifier: Apache-2.0
"""Pins RECORD under edits: order, quoting and line ends stay, undoing gives the same bytes."""

import base64
import csv
import hashlib
import io

import pytest

from fork import record

# printf 'x = 1\n' | openssl dgst -sha256 -binary | basenc --base64url | tr -d =
X1 = "sha256=nia_NpkRxFwkPGhBR7I_yeHc_PJX0pmhxjIBam_NM_Q"

LISTING = """\
vllm/b.py,sha256=bbb,1
"vllm/a,with comma.py",sha256=aaa,2
"vllm/a ""quoted"".py",sha256=qqq,3
vllm/größe.py,sha256=ggg,4
vllm/a.py,sha256=aaa,5
v-1.dist-info/RECORD,,
"""


def listing(newline):
    return LISTING.replace("\n", newline).encode()


@pytest.mark.parametrize(
    ("data", "digest"),
    [(b"x = 1\n", X1), (b"", "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU")],
)
def test_digest(data, digest):
    assert record.digest(data) == digest


@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_rows(newline):
    assert list(record.rows(listing(newline))) == [
        ("vllm/b.py", "sha256=bbb", "1"),
        ("vllm/a,with comma.py", "sha256=aaa", "2"),
        ('vllm/a "quoted".py', "sha256=qqq", "3"),
        ("vllm/größe.py", "sha256=ggg", "4"),
        ("vllm/a.py", "sha256=aaa", "5"),
        ("v-1.dist-info/RECORD", "", ""),
    ]


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("vllm/x.py", "vllm/x.py"),
        ("vllm/a,b.py", '"vllm/a,b.py"'),
        ('vllm/"x".py', '"vllm/""x"".py"'),
        ("vllm/ü 漢.py", "vllm/ü 漢.py"),
    ],
)
def test_line_quotes_where_needed(path, shown):
    assert record.line(path, b"x = 1\n") == f"{shown},{X1},6"
    assert next(csv.reader(io.StringIO(record.line(path, b"x = 1\n")))) == [path, X1, "6"]


@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_update_keeps_order_and_every_other_line(newline):
    changes = {
        "vllm/z.py": b"x = 1\n",
        "vllm/a,with comma.py": b"x = 1\n",
        "vllm/a.py": None,
        "vllm/n,ew.py": b"",
        "vllm/never there.py": None,
    }
    expected = (
        LISTING.replace('comma.py",sha256=aaa,2', f'comma.py",{X1},6').replace(
            "vllm/a.py,sha256=aaa,5\n", ""
        )
        + '"vllm/n,ew.py",sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n'
        + f"vllm/z.py,{X1},6\n"
    )
    updated = record.update(listing(newline), changes)
    assert updated.decode() == expected.replace("\n", newline)


def real(files, newline, last):
    """A RECORD that lists files as an installer writes it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator=newline)
    for path, data in files.items():
        writer.writerow((path, record.digest(data), len(data)))
    writer.writerow(("v-1.dist-info/RECORD", "", ""))
    text = out.getvalue()
    return (text if last else text.removesuffix(newline)).encode()


FILES = {"vllm/b.py": b"b", "vllm/a, c.py": b"ac", "vllm/a.py": b"a"}


@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("last", [True, False], ids=["ended", "last line not ended"])
@pytest.mark.parametrize(
    "changes",
    [
        {"vllm/b.py": b"other"},
        {"vllm/a, c.py": b"other", "vllm/new.py": b"new"},
        {"vllm/n, ew.py": b"new", "vllm/0.py": b"new"},
        {},
    ],
    ids=["changed", "changed and new", "new", "nothing"],
)
def test_update_and_back_gives_the_same_bytes(newline, last, changes):
    pristine = real(FILES, newline, last)
    updated = record.update(pristine, changes)
    assert (updated != pristine) == bool(changes)
    back = {path: FILES.get(path) for path in changes}
    assert record.update(updated, back) == pristine


def test_a_line_without_hash_comes_back_as_it_was():
    pristine = b"vllm/a.py,,\nv-1.dist-info/RECORD,,\n"
    updated = record.update(pristine, {"vllm/a.py": b"new"})
    assert record.update(updated, {"vllm/a.py": b"a"}) == pristine


def test_blank_lines_do_no_harm():
    blank = b"vllm/a.py,sha256=aaa,5\n\nv-1.dist-info/RECORD,,\n"
    assert len(list(record.rows(blank))) == 2
    updated = record.update(blank, {"vllm/a.py": b"x = 1\n"})
    assert next(record.rows(updated)) == ("vllm/a.py", X1, "6")


def test_hash_is_of_the_bytes():
    data = "größe\r\n".encode()
    raw = record.digest(data).removeprefix("sha256=")
    assert "=" not in raw
    assert base64.urlsafe_b64decode(raw + "=") == hashlib.sha256(data).digest()
