# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of the engine's attention classes, side by side.

    python -m proof.speed [--arms ARM …] [--work DIR] [--out DIR]

Each arm's engine runs alone on the GPU, one after the other, with CUDA graphs: FlashMLA's class
in upstream's tree, the same class on SM12x's pages, and SM12x's own class with the fork's
kernel. Six layers and dummy experts: the share of attention is not a full model's, so read
the ratios of one run and nothing else. Needs what :mod:`proof.run` needs.
"""

import argparse
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from . import arms, checkpoint, scenarios
from .engine import SETUPS
from .run import Job, Runner, _take_along
from .scenarios import Request

SETUP = "graphs"
"""The set-up whose engine is timed: CUDA graphs of up to 8 tokens."""

COMPARED = ("stock", "fork-units", "fork-sm120")

REPEATS = 5

PROMPT = 2048
STEPS = 128
"""Tokens of a prompt, and decoded tokens of each request."""


def measured(engine: Any) -> dict[str, float]:
    """Tokens a second: of prompts, of one request decoding, and of eight together."""
    found: dict[str, list[float]] = {"prompt": [], "decode 1": [], "decode 8": []}
    for repeat in range(REPEATS + 1):  # the first warms up
        for name, times in found.items():
            taken = _once(engine, name, repeat)
            if repeat:
                times.append(taken)
    return {name: round(statistics.median(times), 1) for name, times in found.items()}


def _once(engine: Any, name: str, repeat: int) -> float:
    """Tokens a second of one go, with prompts that nothing has seen."""
    engine.forget()
    requests = 8 if name == "decode 8" else 1
    prompt = PROMPT if name == "prompt" else 256
    steps = 1 if name == "prompt" else STEPS
    every = [
        Request(
            f"{name}, {number}",
            scenarios.tokens(f"speed prompt {repeat} {number}", prompt),
            scenarios.tokens(f"speed answer {repeat} {number}", steps),
        )
        for number in range(requests)
    ]
    without = 0.0
    if steps > 1:
        # The same prompts alone, to be taken off.
        alone = [Request(r.name, r.prompt, r.forced[:1]) for r in every]
        without = _seconds(engine, alone)
        engine.forget()
    taken = _seconds(engine, every) - without
    return requests * (prompt if steps == 1 else steps - 1) / taken


def _seconds(engine: Any, requests: list[Request]) -> float:
    start = time.perf_counter()
    engine.run("speed", requests)
    return time.perf_counter() - start


def table(results: dict[str, dict[str, Any]]) -> str:
    """Arms side by side; ratios to the first."""
    first = next(iter(results.values()))["speed"]
    lines = [f"{'tokens a second':14}{'class':38}" + "".join(f"{name:>20}" for name in first)]
    for arm, result in results.items():
        cells = "".join(
            f"{value:12.0f} ({value / first[name]:.2f})" for name, value in result["speed"].items()
        )
        lines.append(f"{arm:14} {result['attention']:38}{cells}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m proof.speed",
        description=(__doc__ or "").split("\n\n")[0],
    )
    home = Path.home()
    parser.add_argument("--arms", nargs="+", choices=arms.ARMS, default=list(COMPARED))
    parser.add_argument("--work", type=Path, default=Path(".proof"))
    parser.add_argument("--seconds", type=float, default=3600, help="stop after so long")
    parser.add_argument("--out", type=Path, help="leave proof.tar.xz there too")
    parser.add_argument("--site", type=Path, default=home / "engine-site")
    parser.add_argument("--stock", type=Path, default=home / "engine-stock")
    args = parser.parse_args()
    if shutil.which("nvidia-smi") is None:
        sys.exit("error: no NVIDIA GPU here (no nvidia-smi)")
    if not args.stock.is_dir():
        sys.exit(f"error: no upstream tree in {args.stock} (proof/README.md says how to unpack)")
    until = time.monotonic() + args.seconds
    runner = Runner(args.work.resolve(), args.site, args.stock, until)
    checkpoint.write(runner.work / "checkpoints", (SETUPS[SETUP].variant,), 8)
    jobs = [Job(arm, SETUP, faults=False, speed=True) for arm in args.arms]
    try:
        for job in jobs:
            runner.start(job)
            runner.wait(1)
    finally:
        runner.close()
    results = {}
    for job in jobs:
        if runner.result(job).exists():
            results[job.arm] = json.loads(runner.result(job).read_text())
            # Beside the proof's results, it would be read as one.
            runner.result(job).replace(runner.work / f"{job.name}.json")
    if results:
        text = table(results)
        print(text)
        (runner.work / "results" / "speed.txt").write_text(text + "\n")
    if args.out:
        _take_along(runner.work, args.out)
    sys.exit(1 if runner.failed or len(results) < len(jobs) else 0)


if __name__ == "__main__":
    main()
