# SPDX-License-Identifier: Apache-2.0
"""Packs an installed fork and its stock files for a GPU machine without network.

    python -m proof.pack [--site SITE] [--out .gpu] [--limit-mib 61]

The machine has PyTorch with CUDA, Triton and transformers (of a Python that
``--python-version`` names) and takes so many MiB a copy: OUT/1, OUT/2 … each hold what
fits and an ``unpack.sh``. What is left out there is not needed on SM90: FlashInfer,
CuTe DSL, FlashAttention (a stand-in answers "absent"), rejected by name if called.
"""

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from fork import fetch, geometry, pin
from fork.tree import WheelTree

LIMIT_MIB = 61

CARRIED = Path(__file__).with_name("carried.txt")
"""Names of distributions whose wheels are carried along."""

_TAGS = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 26, 24, 17, 5)]
_TAGS += ["manylinux2014_x86_64", "manylinux1_x86_64"]

_NATIVE = (
    ("vllm/_C_stable_libtorch.abi3.so",),
    ("vllm/_moe_C_stable_libtorch.abi3.so",),
    (
        "vllm/third_party/deep_gemm",
        "vllm/_flashmla_C.abi3.so",
        "vllm/_flashmla_extension_C.abi3.so",
        "vllm/cumem_allocator.abi3.so",
        "vllm/spinloop.abi3.so",
        "vllm/fs_io_C.abi3.so",
    ),
    ("tilelang",),
)
"""Native parts, each an archive of its own."""

_ABSENT = """\
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise RuntimeError(name + " was not packed for this machine")

    return absent


def is_fa_version_supported(*args, **kwargs):
    return False


def fa_version_unsupported_reason(*args, **kwargs):
    return "absent"
"""

_UNPACK = """\
set -e
site=${SITE:-$HOME/engine-site}
mkdir -p "$site"
cd "$(dirname "$0")"
for archive in *.tar.xz; do
  [ ! -e "$archive" ] || tar -xJf "$archive" -C "$site"
done
if ls ./*.whl >/dev/null 2>&1; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \\
    --target "$site" ./*.whl
fi
# Upstream's tree beside the fork's: the same files but for those that the fork changed.
if [ -e "$site/sm120-stock.tar" ] && [ -e "$site/vllm/__init__.py" ]; then
  stock=${STOCK:-$HOME/engine-stock}
  rm -rf "$stock"
  mkdir -p "$stock"
  cp -al "$site/vllm" "$stock/vllm"
  tar -xf "$site/sm120-stock.tar" -C "$stock" --unlink-first
  while read -r name; do [ -z "$name" ] || rm -f "$stock/$name"; done <"$stock/sm120-added.txt"
fi
"""


@dataclasses.dataclass(frozen=True)
class Piece:
    path: Path
    size: int


def stock_files(stock: Path, installed: Path) -> tuple[list[str], list[str]]:
    """How an installed fork differs from upstream's tree.

    Returns:
        Files of upstream's that the fork changed, and files that only the fork has;
        relative, below ``vllm/``.
    """
    changed, added = [], []
    for file in sorted((installed / "vllm").rglob("*")):
        name = file.relative_to(installed)
        if not file.is_file() or "__pycache__" in name.parts or file.suffix == ".so":
            continue
        upstream = stock / name
        if not upstream.exists():
            if file.suffix == ".py" or file.name.startswith("sm120"):
                added.append(str(name))
        elif upstream.read_bytes() != file.read_bytes():
            changed.append(str(name))
    return changed, added


def archive(site: Path, out: Path, names: Iterable[str], exclude: Iterable[str] = ()) -> None:
    """A tar.xz of ``names`` below ``site``."""
    command = ["tar", "-C", str(site), "--exclude=__pycache__"]
    command += [f"--exclude={pattern}" for pattern in exclude]
    with out.open("wb") as file:
        tar = subprocess.Popen([*command, "-cf", "-", *names], stdout=subprocess.PIPE)
        subprocess.run(["xz", "-T0", "-6"], stdin=tar.stdout, stdout=file, check=True)
        if tar.wait():
            raise SystemExit(f"error: tar failed for {', '.join(names)}")


def wheels(names: Iterable[str], site: Path, out: Path, python_version: str) -> None:
    """Wheels of the installed versions, for another Python."""
    have = {
        found.metadata["Name"].lower().replace("_", "-").replace(".", "-"): found.version
        for found in metadata.distributions(path=[str(site)])
    }
    tag = "cp" + python_version.replace(".", "")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(out)]
    command += ["--only-binary=:all:", "--python-version", python_version, "--implementation", "cp"]
    for abi in (tag, "abi3", "none"):
        command += ["--abi", abi]
    for platform in _TAGS:
        command += ["--platform", platform]
    for name in names:
        if name not in have:
            print(f"note: {name} is not installed here, left out", file=sys.stderr)
        elif subprocess.run([*command, f"{name}=={have[name]}"], capture_output=True).returncode:
            print(f"note: no wheel of {name} {have[name]} for {python_version}", file=sys.stderr)


def share_out(pieces: Iterable[Piece], limit: int) -> list[list[Piece]]:
    """Pieces into as few folders of ``limit`` bytes as first-fit finds, the first with
    the largest pieces.

    Raises:
        ValueError: a piece alone is larger than ``limit``.
    """
    folders: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda p: (-p.size, p.path.name)):
        if piece.size > limit:
            raise ValueError(
                f"{piece.path.name} has {piece.size >> 20} MiB, more than the {limit >> 20} that "
                "one copy takes; raise --limit-mib or split the piece in proof/pack.py"
            )
        for folder in folders:
            if sum(p.size for p in folder) + piece.size <= limit:
                folder.append(piece)
                break
        else:
            folders.append([piece])
    return folders


def pack(site: Path, out: Path, limit: int, python_version: str) -> list[Path]:
    """Makes the folders; returns them in the order in which they are unpacked."""
    if not (site / "vllm" / "sm120_recipe.json").is_file():
        raise SystemExit(f"error: {site} has no fork installed; run ./build.sh --tests first")
    the_pin = pin.load()
    stock = geometry.stock_tree(WheelTree(fetch.upstream_wheel(the_pin)))
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        made = Path(scratch)
        changed, added = stock_files(stock, site)
        staged = made / "stage"
        staged.mkdir()
        (staged / "sm120-added.txt").write_text("\n".join(added) + "\n")
        tar = ["tar", "-cf", staged / "sm120-stock.tar", "-C", staged, "sm120-added.txt"]
        subprocess.run([*tar, "-C", stock, *changed], check=True)
        absent = staged / "vllm" / "vllm_flash_attn"
        absent.mkdir(parents=True)
        (absent / "__init__.py").write_text(_ABSENT)
        archive(staged, made / "stock.tar.xz", ["sm120-stock.tar", "vllm"])
        info = next(path.name for path in site.glob("vllm-*.dist-info"))
        skip = ["vllm/*.so", "vllm/third_party/deep_gemm", "vllm/vllm_flash_attn", "vllm/vllm-rs"]
        print("python files", file=sys.stderr)
        archive(site, made / "python.tar.xz", ["vllm", info], skip)
        for names in _NATIVE:
            title = Path(names[0]).name.split(".")[0]
            print(title, file=sys.stderr)
            more = [path.name for path in site.glob(f"{names[0]}-*.dist-info")]
            archive(site, made / f"{title}.tar.xz", [*names, *more])
        print("dependencies", file=sys.stderr)
        names = [line for line in CARRIED.read_text().split("\n") if line and line[0] != "#"]
        wheels(names, site, made, python_version)
        found = [p for p in made.iterdir() if p.is_file()]
        folders = share_out([Piece(p, p.stat().st_size) for p in found], limit)
        shutil.rmtree(out, ignore_errors=True)
        for number, pieces in enumerate(folders, 1):
            folder = out / str(number)
            folder.mkdir(parents=True)
            (folder / "unpack.sh").write_text(_UNPACK)
            for piece in pieces:
                os.replace(piece.path, folder / piece.path.name)
    return [out / str(number) for number in range(1, len(folders) + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m proof.pack", description=(__doc__ or "").splitlines()[0]
    )
    site = Path(sys.prefix) / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    parser.add_argument("--site", type=Path, default=site)
    parser.add_argument("--out", type=Path, default=Path(".gpu"))
    parser.add_argument("--limit-mib", type=int, default=LIMIT_MIB)
    parser.add_argument("--python-version", default="3.12")
    args = parser.parse_args()
    out = args.out.resolve()
    try:
        folders = pack(args.site, out, args.limit_mib << 20, args.python_version)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    print("On the GPU machine, one copy and one command after the other:")
    for folder in folders:
        size = sum(path.stat().st_size for path in folder.iterdir())
        name = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
        print(f"  copy {name} ({size / (1 << 20):.0f} MiB), then: bash {name}/unpack.sh")
    print("  then: python3 -m proof.run")


if __name__ == "__main__":
    main()
