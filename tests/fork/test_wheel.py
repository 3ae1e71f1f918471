# SPDX-License-Identifier: Apache-2.0
"""Pins the patched wheel: right in every field, whole or absent, the same bytes each time.

First on a miniature upstream wheel, then on the real one, then as pip and uv see it.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.tags import parse_tag
from packaging.utils import parse_wheel_filename
from wheel.wheelfile import WheelFile

from fork import ROOT, ForkError, fetch, foreign, pin, recipe, record, series, wheel, zipcopy
from fork.edits import SetKeyword, SetReturn
from fork.tree import FolderTree, WheelTree, open_tree

NAME = "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl"
ARM = NAME.replace("x86_64", "aarch64")
INFO, NEW_INFO = "vllm-0.33.0.dist-info", "vllm-0.33.0+sm120.7.dist-info"
NEW_NAME = "vllm-0.33.0+sm120.7-cp38-abi3-manylinux_2_28_x86_64.whl"
CACHE, RUN, NEW = "vllm/cache.py", "vllm/worker/run.py", "vllm/added/new.py"
NATIVE = "vllm/_C.abi3.so"
OLDER, NEWEST = (2026, 11, 1, 9, 43, 0), (2026, 11, 1, 9, 43, 8)

FILES = {
    "vllm/__init__.py": b"",
    "vllm/_version.py": (
        b"# generated\n"
        b"__all__ = ['__version__', '__version_tuple__', 'version', 'version_tuple']\n\n"
        b"version: str\n"
        b"__version__: str\n"
        b"__version_tuple__: tuple[int | str, ...]\n"
        b"version_tuple: tuple[int | str, ...]\n\n"
        b"__version__ = version = '0.33.0'\n"
        b"__version_tuple__ = version_tuple = (0, 33, 0)\n\n"
        b"__commit_id__ = commit_id = 'g0123456'\n"
    ),
    CACHE: b"class Cache:\n    def __init__(self):\n        self.pages = Pages(width=32)\n",
    RUN: b"def sizes():\n    return [128]\n",
    NATIVE: b"\x7fELF" + hashlib.sha512(b"native").digest() * 40,
    pin.DEEP_GEMM_INIT: b"__version__ = '2.8'\n",
    f"{INFO}/METADATA": (
        b"Metadata-Version: 2.4\nName: vllm\nVersion: 0.33.0\nLicense-Expression: Apache-2.0\n"
        b"License-File: LICENSE\nRequires-Dist: flashinfer-python==0.7\n"
        b"Requires-Dist: torch==2.14\nRequires-Dist: transformers>=5\n\n"
        b"# vLLM\n\nVersion: the newest. gr\xc3\xb6\xc3\x9fe\n"
    ),
    f"{INFO}/WHEEL": (
        b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: false\nTag: cp38-abi3-linux_x86_64\n\n"
    ),
    f"{INFO}/entry_points.txt": b"[console_scripts]\nvllm = vllm:main\n",
    f"{INFO}/licenses/LICENSE": b"Apache License\n",
}


def write_wheel(path, files):
    """An upstream wheel: RECORD last and right, everything deflated."""
    lines = [record.line(name, data) for name, data in files.items()] + [f"{INFO}/RECORD,,", ""]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (files | {f"{INFO}/RECORD": "\n".join(lines).encode()}).items():
            info = zipfile.ZipInfo(name, NEWEST if name.endswith("WHEEL") else OLDER)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(info, data)


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """Puts upstream wheels into an empty cache and returns their pin, release 7.

    Keyword ``files`` are changes of ``FILES``; others are the pin's figures.
    """

    def make(files=None, **figures):
        monkeypatch.setenv("SM120_FORK_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(fetch, "machine", lambda: "x86_64")
        pins = {}
        for platform, name in (("x86_64", NAME), ("aarch64", ARM)):
            write_wheel(tmp_path / name, FILES | (files or {}))
            digest = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
            folder = tmp_path / "cache" / "wheels" / digest[:16]
            folder.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).rename(folder / name)
            pins[platform] = pin.WheelPin(name=name, sha256=digest)
        known = {"flashinfer": "0.7", "torch": "2.14", "transformers": ">=5", "deep_gemm": "2.8"}
        base = pin.BasePin(
            wheels=pins,
            flashinfer_wheel=pin.WheelPin(name="f.whl", sha256="c" * 64),
            **(known | figures),
        )
        return pin.Pin(release=7, base="0.33.0", bases={"0.33.0": base})

    return make


@pytest.fixture
def members(make_patch, use_series, tmp_path):
    """Two patches: an edit and a new module, and one more edit."""
    (tmp_path / NEW).parent.mkdir(parents=True)
    (tmp_path / NEW).write_bytes(b"NEW = 1\n")
    width = SetKeyword(CACHE, "Cache.__init__", call="Pages", keyword="width", old="32", new="64")
    sizes = SetReturn(RUN, "sizes", old="[128]", new="[64]")
    return use_series(make_patch("p_width", width, modules=(NEW,)), make_patch("p_sizes", sizes))


@pytest.fixture
def dist(tmp_path):
    """Where wheels go. Not there yet."""
    return tmp_path / "made" / "dist"


@pytest.fixture
def built(upstream, members, dist):
    return wheel.build(upstream(), members, dist)


def contents(path):
    """Every member, read through what checks each against RECORD."""
    with WheelFile(path) as file:
        return {info.filename: file.read(info) for info in file.infolist()}


def test_one_version_everywhere(built, dist):
    files = contents(built)
    assert built == dist / NEW_NAME
    assert list(dist.iterdir()) == [built]
    assert {name.split("/")[0] for name in files} == {"vllm", NEW_INFO}
    assert message_from_bytes(files[f"{NEW_INFO}/METADATA"])["Version"] == "0.33.0+sm120.7"
    names = {}
    exec(files["vllm/_version.py"], names)
    assert names["__version__"] == names["version"] == "0.33.0+sm120.7"
    assert names["__version_tuple__"] == names["version_tuple"] == (0, 33, 0, "sm120.7")
    assert names["commit_id"] == "g0123456"


@pytest.mark.parametrize("platform", ["x86_64", "aarch64"])
def test_the_tag_inside_is_the_file_names(upstream, members, dist, platform):
    path = wheel.build(upstream(), members, dist, platform=platform)
    [tag] = message_from_bytes(contents(path)[f"{NEW_INFO}/WHEEL"]).get_all("Tag")
    assert parse_tag(tag) == parse_wheel_filename(path.name)[3]
    assert tag == f"cp38-abi3-manylinux_2_28_{platform}"
    assert files_of(path)[f"{NEW_INFO}/WHEEL"] == FILES[f"{INFO}/WHEEL"].replace(
        b"cp38-abi3-linux_x86_64", tag.encode()
    )


def files_of(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_record_lists_every_member_once_and_right(built):
    files = contents(built)
    rows = list(record.rows(files[f"{NEW_INFO}/RECORD"]))
    assert sorted(path for path, _, _ in rows) == sorted(files)
    for path, digest, size in rows:
        if path == f"{NEW_INFO}/RECORD":
            assert (digest, size) == ("", "")
        else:
            assert (digest, size) == (record.digest(files[path]), str(len(files[path])))


def test_what_differs_from_upstream_and_nothing_else(built, members):
    files = contents(built)
    kept = {p: d for p, d in FILES.items() if not p.startswith(INFO)}
    assert files.pop("vllm/_version.py") != kept.pop("vllm/_version.py")
    carried = json.loads(files.pop(recipe.PATH))["recipe"]
    assert [m["name"] for m in carried["members"]] == ["p_width", "p_sizes"]
    want = kept | {
        CACHE: kept[CACHE].replace(b"32", b"64"),
        RUN: kept[RUN].replace(b"128", b"64"),
        NEW: b"NEW = 1\n",
        f"{NEW_INFO}/entry_points.txt": FILES[f"{INFO}/entry_points.txt"],
        f"{NEW_INFO}/licenses/LICENSE": FILES[f"{INFO}/licenses/LICENSE"],
        f"{NEW_INFO}/METADATA": FILES[f"{INFO}/METADATA"]
        .replace(b"\nVersion: 0.33.0\n", b"\nVersion: 0.33.0+sm120.7\n")
        .replace(b"License-File: LICENSE\n", b"License-File: LICENSE\nLicense-File: NOTICE\n"),
    }
    others = {f"{NEW_INFO}/{name}" for name in ("WHEEL", "RECORD", "licenses/NOTICE")}
    assert files.keys() - want.keys() == others
    assert {p: files[p] for p in want} == want


def test_native_files_are_copied_as_compressed(built, upstream):
    source = fetch.upstream_wheel(upstream())
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(built) as new:
        was, now = old.getinfo(NATIVE), new.getinfo(NATIVE)
        assert was.compress_size < was.file_size  # it is compressed
        for field in ("CRC", "compress_size", "compress_type", "external_attr", "date_time"):
            assert getattr(now, field) == getattr(was, field)
        assert new.read(NATIVE) == FILES[NATIVE]


def test_new_members_have_upstreams_newest_date(built):
    with zipfile.ZipFile(built) as archive:
        dates = {info.filename: info.date_time for info in archive.infolist()}
    assert {dates[p] for p in (CACHE, RUN, NEW, recipe.PATH, f"{NEW_INFO}/METADATA")} == {NEWEST}
    assert dates[NATIVE] == OLDER


def test_notice_lists_what_was_changed_and_added(built, upstream):
    files = contents(built)
    text = files[f"{NEW_INFO}/licenses/NOTICE"].decode()
    blocks = dict(block.split(":\n", 1) for block in text.split("\n\n") if ":\n  " in block)
    package = {p: d for p, d in files.items() if p.startswith("vllm/")}
    assert {title: block.split() for title, block in blocks.items()} == {
        "Changed": sorted(p for p, d in package.items() if FILES.get(p, d) != d),
        "Added": sorted(package.keys() - FILES.keys()),
    }
    source = fetch.upstream_wheel(upstream())
    for part in (NAME, fetch.sha256(source), "0.33.0+sm120.7", "Apache License, Version 2.0"):
        assert part in text


def test_every_license_file_is_there(built):
    files = contents(built)
    named = message_from_bytes(files[f"{NEW_INFO}/METADATA"]).get_all("License-File")
    assert named == ["LICENSE", "NOTICE"]
    assert {f"{NEW_INFO}/licenses/{name}" for name in named} <= files.keys()


def test_twice_gives_the_same_bytes(built, upstream, members, dist, monkeypatch):
    first = built.read_bytes()
    built.write_bytes(b"an older build")
    monkeypatch.setattr("time.time", lambda: 1e9)
    old = os.umask(0o077)
    try:
        assert wheel.build(upstream(), members, dist, "0.33.0", "x86_64") == built
    finally:
        os.umask(old)
    assert built.read_bytes() == first
    assert built.stat().st_mode & 0o777 == 0o644
    assert list(dist.iterdir()) == [built]


def test_metadata_alone_is_the_wheels(built, upstream):
    assert wheel.metadata(upstream()) == contents(built)[f"{NEW_INFO}/METADATA"]


def test_progress_counts_up_to_less_than_the_source(upstream, members, dist):
    counts = []
    the_pin = upstream()
    wheel.build(the_pin, members, dist, progress=counts.append)
    size = fetch.upstream_wheel(the_pin).stat().st_size
    assert len(FILES[NATIVE]) // 10 < sum(counts) < size


def test_foreign_members_are_in_the_wheel_and_its_version(upstream, members, dist):
    """Two builds of one version would be two contents of one file name."""
    old, new = FILES[CACHE].splitlines()[0], b"class Cache:  # mine"
    rest = b"".join(b" %b\n" % line for line in FILES[CACHE].splitlines()[1:])
    diff = b"--- a/%b\n+++ b/%b\n@@ -1,3 +1,3 @@\n-%b\n+%b\n" % (*[CACHE.encode()] * 2, old, new)
    mine = foreign.Foreign("mine", diff + rest)
    the_pin = upstream()
    path = wheel.build(the_pin, [mine, *members], dist)
    version = "0.33.0+sm120.7" + foreign.label([mine])
    assert path.name == NEW_NAME.replace("0.33.0+sm120.7", version)
    tree = WheelTree(path)
    assert tree.version == version
    assert tree.read(CACHE).startswith(new)
    assert recipe.members_of(tree) == ["mine", *(m.name for m in members)]
    assert wheel.check(path, [mine, *members], the_pin) == []
    assert wheel.check(path, members, the_pin) != []


def test_check_passes_the_wheel_and_sees_damage(built, upstream, members, tmp_path):
    the_pin = upstream()
    assert wheel.check(built, members, the_pin) == []
    damaged = tmp_path / NEW_NAME
    with damaged.open("wb") as file:
        zipcopy.rewrite(built, file, {RUN: FILES[RUN], NATIVE: None}, (2026, 1, 1, 0, 0, 0))
    assert {line.split(":")[0] for line in wheel.check(damaged, members, the_pin)} == {
        "p_sizes",
        RUN,
        NATIVE,
    }


def test_check_of_a_file_with_a_flipped_bit(built, upstream, members):
    """A fault that is reported like any other, not an exception of zipfile's."""
    the_pin = upstream()
    with zipfile.ZipFile(built) as archive:
        at = archive.getinfo(NATIVE).header_offset + 30 + len(NATIVE) + 40
    data = bytearray(built.read_bytes())
    data[at] ^= 1
    built.write_bytes(data)
    try:
        lines = wheel.check(built, members, the_pin)
    except ForkError as error:
        lines = [str(error)]
    assert any(NATIVE in line for line in lines)


# Nothing is left where a build does not end well.


@pytest.mark.parametrize("at", [1, 2])
def test_killed_while_packing(upstream, members, dist, at):
    def killed(count):
        counts.append(count)
        if len(counts) == at:
            raise KeyboardInterrupt

    counts = []
    with pytest.raises(KeyboardInterrupt):
        wheel.build(upstream(), members, dist, progress=killed)
    assert list(dist.iterdir()) == []


@pytest.mark.parametrize("name", ["chmod", "replace"])
def test_killed_at_the_end_keeps_the_older_wheel(upstream, members, dist, killer, name):
    the_pin = upstream()
    fetch.upstream_wheel(the_pin)
    dist.mkdir(parents=True)
    (dist / NEW_NAME).write_bytes(b"an older build")
    with killer([(os, name)]) as kill, pytest.raises(kill.Killed):
        kill.arm(1)
        wheel.build(the_pin, members, dist)
    assert [p.name for p in dist.iterdir()] == [NEW_NAME]
    assert (dist / NEW_NAME).read_bytes() == b"an older build"


@pytest.mark.parametrize(
    ("figure", "value"),
    [("flashinfer", "0.6"), ("torch", "2.13"), ("transformers", ">=6"), ("deep_gemm", "2.9")],
)
def test_pin_that_disagrees(upstream, members, dist, figure, value):
    with pytest.raises(ForkError, match=rf"disagrees.*{figure}: .*{value}"):
        wheel.build(upstream(**{figure: value}), members, dist)
    assert not dist.exists()


def test_drift(upstream, members, dist):
    with pytest.raises(series.Drift, match=r"p_sizes: .*\[256\]"):
        wheel.build(upstream({RUN: b"def sizes():\n    return [256]\n"}), members, dist)
    assert not dist.exists()


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (f"{INFO}/WHEEL", b"Tag: ", b"Tags: "),
        (f"{INFO}/WHEEL", b"Tag: ", b"Tag: cp38-abi3-any\nTag: "),
        (f"{INFO}/METADATA", b"License-File: LICENSE\n", b""),
        (f"{INFO}/METADATA", b"Version: 0.33.0\n", b"Version: 0.33\n"),
        ("vllm/_version.py", b"(0, 33, 0)", b"(0, 33, 1)"),
        ("vllm/_version.py", b"'0.33.0'", b"'0.33.0.dev1'"),
        ("vllm/_version.py", FILES["vllm/_version.py"], b"def get(): ...\n"),
    ],
    ids=["no tag", "two tags", "no licence", "version", "tuple", "dev", "other form"],
)
def test_upstream_files_of_another_form(upstream, members, dist, path, old, new):
    files = {path: FILES[path].replace(old, new)}
    assert files[path] != FILES[path]
    with pytest.raises(ForkError):
        wheel.build(upstream(files), members, dist)
    assert not dist.exists()


@pytest.mark.parametrize(
    ("base", "platform", "words"),
    [
        (None, "riscv64", r"'riscv64'.*x86_64, aarch64"),
        ("0.1", None, r"0\.1 is not served.*0\.33\.0"),
    ],
)
def test_not_served(upstream, members, dist, base, platform, words):
    with pytest.raises(ForkError, match=words):
        wheel.build(upstream(), members, dist, base, platform)
    assert not dist.exists()


# The real wheels.


@pytest.mark.bases
@pytest.mark.parametrize("base", list(pin.load().bases))
def test_pin_agrees_with_the_wheel(base):
    tree = WheelTree(fetch.upstream_wheel(pin.load(), base))
    wheel.check_pin(tree, pin.load().of(base)[1])
    assert tree.version == base


@pytest.fixture(scope="module")
def room():
    """A folder for gigabytes: gone afterwards, unlike tmp_path."""
    with tempfile.TemporaryDirectory(prefix="sm120-wheel-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def real(room):
    """The patched wheel of the default base, and upstream's."""
    built = wheel.build(pin.load(), series.members(), room / "dist")
    return built, fetch.upstream_wheel(pin.load())


def on_the_real_wheel(function):
    """One worker for all, so that the wheel is built once."""
    return pytest.mark.bases(pytest.mark.xdist_group("real-wheel")(function))


def slow(function):
    return pytest.mark.slow(on_the_real_wheel(function))


@on_the_real_wheel
def test_real_wheel_verifies(real):
    built, _ = real
    assert wheel.check(built, series.members(), pin.load()) == []
    with WheelFile(built) as file:
        for info in file.infolist():
            with file.open(info) as member:
                while member.read(1 << 20):
                    pass
        listed = {path for path, _, _ in record.rows(file.read(file.record_path))}
        assert listed == set(file.namelist())


@on_the_real_wheel
def test_real_wheel_differs_only_where_it_should(real):
    built, source = real
    tree = WheelTree(source)
    edited = {e.file for p in series.members() for e in p.variant(tree.base).edits}
    edited |= {"vllm/_version.py"}
    edited |= {f"dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD")}
    added = {m for p in series.members() for m in p.modules}
    added |= {recipe.PATH, "dist-info/licenses/NOTICE"}

    def infos(path):
        with zipfile.ZipFile(path) as archive:
            named = (
                (re.sub(r"^vllm-[^/]*\.dist-info/", "dist-info/", i.filename), i)
                for i in archive.infolist()
            )
            return dict(named)

    was, now = infos(source), infos(built)
    assert now.keys() - was.keys() == added
    assert was.keys() - now.keys() == set()
    assert {n for n, i in was.items() if now[n].CRC != i.CRC} == edited
    fields = ("compress_size", "file_size", "compress_type", "external_attr", "date_time")
    for name in was.keys() - edited:
        if not name.startswith("dist-info/"):  # these are stored anew under the new name
            same = [getattr(now[name], f) == getattr(was[name], f) for f in fields]
            assert all(same), name


# As pip and uv see it. Each step costs many seconds.


def run(*command, ok=True, **options):
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **{"cwd": ROOT, **options},
    )
    if ok:
        assert done.returncode == 0, done.stdout
    return done


def fork(*arguments, **options):
    return run(sys.executable, "-m", "fork", *arguments, **options)


@pytest.fixture(scope="module")
def clone(room):
    """A fresh clone of what this checkout has committed."""
    if run("git", "rev-parse", "--git-dir", ok=False).returncode:
        pytest.skip("not a git checkout: nothing to clone")
    run("git", "clone", "--quiet", ROOT, room / "clone")
    return room / "clone"


def environment(folder):
    """A bare virtual environment: its folder and its site-packages."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    [site] = folder.glob("lib/python*/site-packages")
    return folder, site


def pip(folder, *arguments, **options):
    python = folder / "bin" / "python"
    return run(sys.executable, "-m", "pip", "--python", python, *arguments, **options)


@slow
def test_pip_builds_the_same_wheel(clone, room):
    """From a clone, in pip's isolated build environment: needs the package index."""
    run(sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "-w", room / "pip", cwd=clone)
    fork("wheel", "--out", room / "fork", cwd=clone)
    [by_pip], [by_fork] = (room / "pip").iterdir(), (room / "fork").iterdir()
    assert by_pip.name == by_fork.name
    assert fetch.sha256(by_pip) == fetch.sha256(by_fork)


@slow
def test_editable_install_says_what_to_do_instead(clone, room):
    folder, site = environment(room / "editable")
    before = listing(site)
    done = pip(folder, "install", "--no-deps", "-e", ".", ok=False, cwd=clone)
    assert done.returncode != 0
    assert "an editable install is not possible" in done.stdout
    assert "python -m fork apply" in done.stdout
    assert listing(site) == before


def listing(folder):
    """Every file below, by digest, without byte code."""
    return {
        path.relative_to(folder).as_posix(): fetch.sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def everything(folder):
    """Every path below, byte code and folders included; not uv's lock on the environment."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")} - {".lock"}


class Installer:
    """pip or uv, on a virtual environment of its own."""

    def __init__(self, name, room):
        self.name, self.cache = name, room / "uv-cache"
        self.folder, self.site = environment(room / f"venv-{name}")
        self.bare = everything(self.folder)

    def __call__(self, *arguments):
        if self.name == "pip":
            yes = ["--yes"] if arguments[0] == "uninstall" else ["--no-compile"]
            return pip(self.folder, arguments[0], *yes, *arguments[1:])
        python = ["--python", self.folder / "bin" / "python"]
        options = {"env": os.environ | {"UV_CACHE_DIR": str(self.cache)}}
        return run("uv", "pip", arguments[0], *python, *arguments[1:], **options)

    def compile(self):
        """Byte code where the fork works, as a first import leaves it."""
        for part in ("models/deepseek_v41", "v1/attention/backends/mla", "config"):
            run(sys.executable, "-m", "compileall", "-q", self.site / "vllm" / part)
        assert list(self.site.rglob("sm120_page_geometry*.pyc"))


def _works(*command):
    found = shutil.which(command[0])
    return found is not None and not subprocess.run(command, capture_output=True).returncode


@pytest.fixture(params=["pip", "uv"])
def installer(request):
    if request.param == "uv" and not _works("uv", "--version"):
        pytest.skip("no uv on PATH that runs")
    if (
        request.param == "pip"
        and run(sys.executable, "-m", "pip", "--version", ok=False).returncode
    ):
        pytest.skip("this environment has no pip")
    with tempfile.TemporaryDirectory(prefix="sm120-venv-") as folder:
        yield Installer(request.param, Path(folder))


@slow
def test_installed_wheel(real, installer):
    built, _ = real
    installer("install", "--no-deps", built)
    installer.compile()
    status = json.loads(fork("status", "--json", installer.folder).stdout)
    assert {row["verdict"] for row in status["patches"].values()} == {"applied"}
    assert status["version"] == pin.load().fork_version()
    fork("verify", installer.folder)
    installer("uninstall", "vllm")
    assert everything(installer.folder) == installer.bare


@slow
def test_installed_upstream_edited_in_place(real, installer):
    _, source = real
    installer("install", "--no-deps", source)
    pristine, cached = listing(installer.folder), listing(installer.cache)
    fork("apply", installer.folder)
    tree = open_tree(installer.folder)
    assert tree.root == installer.site.resolve()
    assert series.check_record(tree) == []
    fork("verify", installer.folder)
    installer.compile()
    fork("revert", installer.folder)
    assert listing(installer.folder) == pristine
    assert not list(installer.site.rglob("sm120_*.pyc"))
    fork("apply", installer.folder)
    assert listing(installer.folder) != pristine
    installer.compile()
    assert series.check_record(FolderTree(installer.site)) == []
    # What uv hard-links from its cache is not written through.
    assert listing(installer.cache) == cached
    installer("uninstall", "vllm")
    assert everything(installer.folder) == installer.bare
