# SPDX-License-Identifier: Apache-2.0
"""Packing and unpacking, on a toy fork; unpack.sh is run by bash."""

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proof import pack
from proof.pack import Piece

SIZES = st.lists(st.integers(0, 100), max_size=30)


def _pieces(sizes):
    return [Piece(Path(f"{number}.tar.xz"), size) for number, size in enumerate(sizes)]


@given(SIZES)
def test_nothing_is_lost_and_no_folder_is_too_large(sizes):
    pieces = _pieces(sizes)
    folders = pack.share_out(pieces, 100)
    shared = [piece for folder in folders for piece in folder]
    assert sorted(shared, key=str) == sorted(pieces, key=str)
    assert all(folder and sum(piece.size for piece in folder) <= 100 for folder in folders)
    # First-fit: no two folders would fit into one.
    totals = sorted(sum(piece.size for piece in folder) for folder in folders)
    assert len(totals) < 2 or totals[0] + totals[1] > 100


@given(SIZES, st.randoms())
def test_the_order_of_pieces_does_not_matter(sizes, shuffler):
    pieces = _pieces(sizes)
    other = pieces.copy()
    shuffler.shuffle(other)
    assert pack.share_out(pieces, 100) == pack.share_out(other, 100)


@given(SIZES, st.integers(101, 1000))
def test_a_piece_that_is_too_large_is_named(sizes, large):
    pieces = [*_pieces(sizes), Piece(Path("tilelang.tar.xz"), large)]
    with pytest.raises(ValueError, match=r"^tilelang\.tar\.xz has .* raise --limit-mib or"):
        pack.share_out(pieces, 100)


def test_the_message_names_both_sizes():
    with pytest.raises(ValueError, match="has 90 MiB, more than the 62 that one copy takes"):
        pack.share_out([Piece(Path("a"), 90 << 20)], 62 << 20)


# --- a toy fork --------------------------------------------------------------------

UPSTREAM = {
    "vllm/__init__.py": "upstream\n",
    "vllm/same.py": "same\n",
    "vllm/changed.py": "upstream\n",
    "vllm/config/model.json": "{}\n",
    "vllm/config/changed.json": "{}\n",
    "vllm/deep/er/changed.py": "upstream\n",
}
FORK = {
    **UPSTREAM,
    "vllm/changed.py": "fork\n",
    "vllm/config/changed.json": '{"fork": 1}\n',
    "vllm/deep/er/changed.py": "fork\n",
    "vllm/added.py": "fork\n",
    "vllm/deep/sm120_more.py": "fork\n",
    "vllm/deep/sm120_table.json": "{}\n",
    "vllm/sm120_recipe.json": "{}\n",
    "vllm/__pycache__/changed.cpython-312.pyc": "compiled\n",
    "vllm/made-by-build.txt": "neither\n",
}
NATIVE = [
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/third_party/deep_gemm/_C.so",
    "vllm/_flashmla_C.abi3.so",
    "vllm/_flashmla_extension_C.abi3.so",
    "vllm/cumem_allocator.abi3.so",
    "vllm/spinloop.abi3.so",
    "vllm/fs_io_C.abi3.so",
    "tilelang/__init__.py",
]
ADDED = [
    "vllm/added.py",
    "vllm/deep/sm120_more.py",
    "vllm/deep/sm120_table.json",
    "vllm/sm120_recipe.json",
]
CHANGED = ["vllm/changed.py", "vllm/config/changed.json", "vllm/deep/er/changed.py"]


def _write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _files(root):
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def trees(tmp_path):
    """Upstream's sources and an installed fork with native parts."""
    stock, site = tmp_path / "stock", tmp_path / "site-packages"
    _write(stock, UPSTREAM)
    noise = random.Random(0)
    # The archive of several files is not much larger than those of one.
    large = {*NATIVE[:2], NATIVE[-1]}
    native = {name: noise.randbytes(5000 if name in large else 1000) for name in NATIVE}
    _write(site, {**FORK, **native, "vllm-0.33.0.dist-info/METADATA": "Name: vllm\n"})
    _write(site, {"tilelang-0.1.dist-info/METADATA": "Name: tilelang\n"})
    _write(site, {"vllm/vllm_flash_attn/__init__.py": "import cuda\n"})
    _write(stock, {"vllm/vllm_flash_attn/__init__.py": "import cuda\n"})
    return stock, site


def test_stock_files(trees):
    assert pack.stock_files(*trees) == (CHANGED, ADDED)


def test_stock_files_of_an_unpatched_install(trees):
    stock, _ = trees
    assert pack.stock_files(stock, stock) == ([], [])


@pytest.fixture
def packed(trees, tmp_path, monkeypatch):
    """Packs the toy fork by pack.pack itself; only the network is left out."""
    stock, site = trees
    monkeypatch.setattr(pack.fetch, "upstream_wheel", lambda _: None)
    monkeypatch.setattr(pack, "WheelTree", lambda _: None)
    monkeypatch.setattr(pack.geometry, "stock_tree", lambda _: stock)
    monkeypatch.setattr(pack, "wheels", lambda *_: None)

    def make(limit):
        return pack.pack(site, tmp_path / "out", limit, "3.12")

    return make


def _unpack(folder, home, **more):
    home.mkdir(exist_ok=True)
    env = {"HOME": str(home), "PATH": os.environ["PATH"], **more}
    subprocess.run(["bash", str(folder / "unpack.sh")], env=env, cwd=home, check=True)


def _check(site, stock):
    ours, theirs = _files(site), _files(stock)
    for name, content in FORK.items():
        if "__pycache__" not in name:
            assert ours[name] == content.encode()
    for name, content in UPSTREAM.items():
        assert theirs[name] == content.encode(), name
    assert not theirs.keys() & set(ADDED)
    native = {name for name in NATIVE if name.startswith("vllm/")}
    assert native <= theirs.keys()
    assert set(NATIVE) <= ours.keys()
    for tree in (ours, theirs):
        assert b"was not packed for this machine" in tree["vllm/vllm_flash_attn/__init__.py"]
        assert not any("__pycache__" in name for name in tree)


def _other_orders(folders):
    yield folders[::-1]
    yield folders[1:] + folders[:1]
    yield [*folders, *folders]


def test_unpacking_in_any_order_and_twice_gives_the_same(packed, tmp_path):
    folders = packed(7_500)
    assert len(folders) >= 3
    homes = [tmp_path / "home"]
    for folder in folders:
        _unpack(folder, homes[0])
    site, stock = homes[0] / "engine-site", homes[0] / "engine-stock"
    _check(site, stock)
    for number, order in enumerate(_other_orders(folders)):
        home = tmp_path / f"home{number}"
        for folder in order:
            _unpack(folder, home)
        assert _files(home / "engine-site") == _files(site)
        assert _files(home / "engine-stock") == _files(stock)


def test_site_and_stock_lie_where_they_are_told(packed, tmp_path):
    (folder,) = packed(1 << 20)
    home = tmp_path / "home"
    site, stock = tmp_path / "elsewhere site", tmp_path / "elsewhere stock"
    _unpack(folder, home, SITE=str(site), STOCK=str(stock))
    _check(site, stock)
    assert list(home.iterdir()) == []


def test_files_that_do_not_differ_take_no_room(packed, tmp_path):
    (folder,) = packed(1 << 20)
    _unpack(folder, tmp_path / "home")
    site, stock = tmp_path / "home/engine-site", tmp_path / "home/engine-stock"
    for name in ("vllm/same.py", NATIVE[0]):
        assert (site / name).samefile(stock / name)
    for name in CHANGED:
        assert not (site / name).samefile(stock / name)


def test_no_folder_is_larger_than_the_limit(packed):
    for folder in packed(7_500):
        assert sum(p.stat().st_size for p in folder.iterdir() if p.name != "unpack.sh") <= 7_500


def test_packing_again_replaces_what_was_packed(packed, tmp_path):
    packed(7_500)
    (folder,) = packed(1 << 20)
    assert list((tmp_path / "out").iterdir()) == [folder]


def test_a_limit_that_nothing_fits_leaves_what_was_packed(packed, tmp_path):
    packed(1 << 20)
    before = _files(tmp_path / "out")
    with pytest.raises(ValueError, match="raise --limit-mib"):
        packed(100)
    assert _files(tmp_path / "out") == before


def test_without_a_fork_nothing_is_packed(trees, tmp_path):
    stock, _ = trees
    with pytest.raises(SystemExit, match=r"has no fork installed; run \./build\.sh --tests"):
        pack.pack(stock, tmp_path / "out", 1, "3.12")
    assert not (tmp_path / "out").exists()


def test_the_stand_in_for_flash_attention_answers_absent(tmp_path):
    scope: dict = {}
    exec(pack._ABSENT, scope)
    assert scope["is_fa_version_supported"](3) is False
    with pytest.raises(RuntimeError, match="flash_attn_varlen_func was not packed"):
        scope["__getattr__"]("flash_attn_varlen_func")(1, x=2)
    with pytest.raises(AttributeError):
        scope["__getattr__"]("__path__")


def test_the_list_of_wheels_names_each_once():
    names = [line for line in pack.CARRIED.read_text().splitlines() if line and line[0] != "#"]
    assert len(names) == len(set(names)) > 10
    assert all(name == name.lower() and "_" not in name for name in names)


def test_tools_that_packing_needs_are_named_where_missing(packed, monkeypatch, tmp_path):
    """A failing tar is no whole archive."""
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "tar").write_text("#!/bin/sh\nexit 2\n")
    (broken / "tar").chmod(0o755)
    for tool in ("xz", "sh"):
        os.symlink(shutil.which(tool), broken / tool)
    monkeypatch.setenv("PATH", str(broken))
    with pytest.raises((SystemExit, subprocess.CalledProcessError)):
        packed(1 << 20)
    assert not (tmp_path / "out").exists()
