# SPDX-License-Identifier: Apache-2.0
"""Pins what counts as an upstream tree, its version, and the refusals of ``open_tree``."""

import zipfile

import pytest
from packaging.version import Version

from fork import ForkError
from fork.tree import FolderTree, Overlay, WheelTree, open_tree


@pytest.fixture
def wheel(tmp_path, tiny_files):
    """The miniature tree as a wheel, a folder's own entry in it."""

    def build(files=None, name="vllm-0.33.0-py3-none-any.whl"):
        with zipfile.ZipFile(tmp_path / name, "w") as out:
            out.writestr("vllm/", b"")
            for path, data in (tiny_files if files is None else files).items():
                out.writestr(path, data)
        return tmp_path / name

    return build


# Where the tree is laid down below a folder, and what a user may give.
LAYOUTS = {
    "unpacked wheel": ("", ""),
    "site-packages": ("lib/python3.11/site-packages", "lib/python3.11/site-packages"),
    "virtual environment": ("lib/python3.12/site-packages", ""),
    "vllm folder": ("some/where", "some/where/vllm"),
    "checkout called vllm": ("vllm", "vllm"),
    "vllm folder in a checkout called vllm": ("vllm", "vllm/vllm"),
}


@pytest.mark.parametrize(("laid", "given"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("kind", [str, lambda path: path], ids=["str", "Path"])
def test_open_folder(write_tree, tmp_path, laid, given, kind):
    write_tree(tmp_path / laid)
    tree = open_tree(kind(tmp_path / given))
    assert isinstance(tree, FolderTree)
    assert tree.root == (tmp_path / laid).resolve()
    assert (tree.version, tree.dist_info) == ("0.33.0", "vllm-0.33.0.dist-info")


def test_open_home(write_tree, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_tree(tmp_path / "env")
    assert open_tree("~/env").version == "0.33.0"


def test_open_wheel(wheel, tiny_files):
    tree = open_tree(wheel())
    assert isinstance(tree, WheelTree)
    assert (tree.version, tree.dist_info) == ("0.33.0", "vllm-0.33.0.dist-info")
    assert sorted(tree.names()) == sorted(tiny_files)
    assert {path: tree.read(path) for path in tree.names()} == tiny_files
    assert tree.read("vllm/nothing.py") is None


def test_open_source_checkout(write_tree, tmp_path, tiny_files):
    write_tree(tmp_path, {p: d for p, d in tiny_files.items() if p.startswith("vllm/")})
    tree = open_tree(tmp_path)
    assert tree.dist_info is None
    assert tree.version == "0.33.0"


@pytest.mark.parametrize("given", ["", "nothing/there", "vllm"])
def test_open_nothing_says_what_to_give(tmp_path, given):
    with pytest.raises(ForkError) as caught:
        open_tree(tmp_path / given)
    text = str(caught.value)
    assert str(tmp_path / given) in text
    assert all(word in text for word in ("wheel", "virtual environment", "site-packages"))


def test_open_a_folder_whose_vllm_has_no_init(tmp_path):
    """As this checkout: new modules only."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/new.py").write_text("")
    with pytest.raises(ForkError, match="holds no vLLM"):
        open_tree(tmp_path)


@pytest.mark.parametrize("data", [b"", b"no zip", b"PK\x03\x04 broken"])
def test_open_a_file_that_is_no_wheel(tmp_path, data):
    (tmp_path / "x.whl").write_bytes(data)
    with pytest.raises(ForkError, match=r"x\.whl is not a wheel"):
        open_tree(tmp_path / "x.whl")


def test_two_dist_info_folders(write_tree, tmp_path):
    tree = write_tree(tmp_path)
    (tmp_path / "vllm-0.32.0.dist-info").mkdir()
    with pytest.raises(ForkError) as caught:
        _ = tree.version
    text = str(caught.value)
    assert "vllm-0.32.0.dist-info" in text and "vllm-0.33.0.dist-info" in text
    assert "remove" in text


def test_dist_info_of_another_project_does_not_count(write_tree, tmp_path):
    tree = write_tree(tmp_path)
    for name in ("vllm_extra-1.dist-info", "torch-2.dist-info"):
        (tmp_path / name).mkdir()
    assert tree.dist_info == "vllm-0.33.0.dist-info"


@pytest.mark.parametrize(
    ("version", "base"),
    [
        ("0.33.0", "0.33.0"),
        ("0.33.0+sm120.1", "0.33.0"),
        ("0.33.1rc2+cu130", "0.33.1rc2"),
        ("0.33", "0.33.0"),
    ],
)
def test_base_is_the_version_without_its_local_label(
    write_tree, tmp_path, tiny_files, version, base
):
    files = {
        p.replace("0.33.0", version): d.replace(b"0.33.0", version.encode())
        for p, d in tiny_files.items()
    }
    tree = write_tree(tmp_path, files)
    assert tree.version == version
    assert tree.base == Version(base)


def test_metadata_wins_over_the_version_file(write_tree, tmp_path, tiny_files):
    files = tiny_files | {"vllm/_version.py": b"__version__ = version = '0.1'\n"}
    assert write_tree(tmp_path, files).version == "0.33.0"


def test_version_file_of_a_source_checkout(write_tree, tmp_path):
    """More quotes follow the version, as setuptools-scm writes it."""
    text = b"""version: str\n__version__: str\n
__version__ = version = '0.33.0'
__version_tuple__ = version_tuple = (0, 33, 0)

__commit_id__ = commit_id = 'g0123456'
"""
    files = {"vllm/__init__.py": b"", "vllm/_version.py": text}
    assert write_tree(tmp_path, files).version == "0.33.0"


@pytest.mark.parametrize("text", [None, b"", b"version = '1'\n", b"# __version__ = '1'\n"])
def test_no_version(write_tree, tmp_path, text):
    files = {"vllm/__init__.py": b""} | ({"vllm/_version.py": text} if text is not None else {})
    with pytest.raises(ForkError, match=r"says no version.*Give a wheel"):
        _ = write_tree(tmp_path, files).version


def test_malformed_version(write_tree, tmp_path):
    files = {"vllm/__init__.py": b"", "vllm/_version.py": b"__version__ = 'dev-x'\n"}
    with pytest.raises(ForkError, match="'dev-x': not a version"):
        _ = write_tree(tmp_path, files).base


def test_names_are_the_files_of_vllm_and_its_dist_info(write_tree, tmp_path, tiny_files):
    tree = write_tree(tmp_path)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/a.py").write_text("")
    (tmp_path / "vllm/__pycache__").mkdir()
    (tmp_path / "vllm/__pycache__/a.pyc").write_text("")
    assert sorted(tree.names()) == sorted([*tiny_files, "vllm-0.33.0.dist-info/RECORD"])


def test_overlay(write_tree, tmp_path):
    under = write_tree(tmp_path)
    over = Overlay(under, {"vllm/cache.py": None, "vllm/new.py": b"n", "vllm/__init__.py": b"i"})
    assert over.read("vllm/cache.py") is None
    assert over.read("vllm/new.py") == b"n"
    assert over.read("vllm/__init__.py") == b"i"
    assert over.read("vllm/worker/run.py") == under.read("vllm/worker/run.py")
    assert set(over.names()) == set(under.names()) - {"vllm/cache.py"} | {"vllm/new.py"}
    assert len(list(over.names())) == len(set(over.names()))
    assert (over.version, over.base, str(over)) == ("0.33.0", Version("0.33.0"), str(tmp_path))
    assert (tmp_path / "vllm/cache.py").exists()


def test_write_changes_record_with_the_files(write_tree, tmp_path, tiny_files, snapshot):
    tree = write_tree(tmp_path)
    before = snapshot(tmp_path)
    tree.write({"vllm/new.py": b"n", "vllm/cache.py": None, "vllm/__init__.py": b""})
    lines = (tree.read("vllm-0.33.0.dist-info/RECORD") or b"").decode().splitlines()
    old = before["vllm-0.33.0.dist-info/RECORD"].decode().splitlines()
    kept = [line for line in old if not line.startswith("vllm/cache.py,")]
    assert lines[:-1] == kept
    assert lines[-1].startswith("vllm/new.py,sha256=") and lines[-1].endswith(",1")
    tree.write({"vllm/new.py": None, "vllm/cache.py": tiny_files["vllm/cache.py"]})
    files = {p: d for p, d in snapshot(tmp_path).items() if "RECORD" not in p}
    assert files == {p: d for p, d in before.items() if "RECORD" not in p}


def test_write_of_nothing_new_touches_nothing(write_tree, tmp_path, tiny_files):
    tree = write_tree(tmp_path)
    times = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    tree.write({"vllm/cache.py": tiny_files["vllm/cache.py"], "vllm/nothing.py": None})
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == times
