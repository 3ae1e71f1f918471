# SPDX-License-Identifier: Apache-2.0
"""Time to build the patched wheel, beside unpack, edit and pack with the wheel package.

    python -m benchmarks.wheel_build [--base V] [--runs N]

Both start from the upstream wheel in the cache and end with a wheel on disk. The peer is
`wheel unpack`, `fork apply`, `wheel pack`; it recompresses every native library.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fork import ROOT, fetch, pin


def _run(*command: str) -> None:
    subprocess.run([sys.executable, "-m", *command], check=True, cwd=ROOT, capture_output=True)


def ours(base: str, folder: Path) -> None:
    """`fork wheel`."""
    _run("fork", "wheel", "--base", base, "--out", str(folder))


def peer(base: str, folder: Path) -> None:
    """Unpack, edit in place, pack."""
    source = fetch.upstream_wheel(pin.load(), base)
    _run("wheel", "unpack", "--dest", str(folder), str(source))
    unpacked = next(folder.glob("vllm-*"))
    _run("fork", "apply", str(unpacked))
    _run("wheel", "pack", "--dest-dir", str(folder), str(unpacked))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default=pin.load().base)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    fetch.upstream_wheel(pin.load(), args.base)
    seconds: dict[str, list[float]] = {"fork wheel": [], "unpack, apply, pack": []}
    for _ in range(args.runs):  # in turn, so that a slow minute hits both
        for name, build in zip(seconds, (ours, peer), strict=True):
            with tempfile.TemporaryDirectory() as folder:
                start = time.perf_counter()
                build(args.base, Path(folder))
                seconds[name].append(time.perf_counter() - start)
    for name, found in seconds.items():
        print(
            f"{name:22} {statistics.median(found):6.1f} s  ({min(found):.1f} to {max(found):.1f})"
        )
    fast, slow = seconds.values()
    ratios = [a / b for a, b in zip(fast, slow, strict=True)]
    print(f"{'ratio, pair by pair':22} {statistics.median(ratios):6.2f}    ({args.runs} runs)")


if __name__ == "__main__":
    main()
