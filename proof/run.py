# SPDX-License-Identifier: Apache-2.0
"""Runs the engine proof: every arm and set-up that has no result yet, then the report.

    python -m proof.run                 stock against fork, on a machine that can start both
    python -m proof.run --local         the fork alone, on your own SM12x machine
    python -m proof.report FOLDER       the table and the plot again

Results lie in ``--work`` (default ``.proof``), one file an engine process; a run that was
cut off goes on where it stopped.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import arms, checkpoint, report
from .engine import SETUPS
from .faults import FAULTS

ROOT = Path(__file__).resolve().parents[1]

LOCAL = ("fork", "fork-again")

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # faults are planted in the engine's process
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}

_START_SECONDS = 60
"""A job is not begun when less than this is left of ``--seconds``."""


@dataclasses.dataclass
class Job:
    """One engine process; with ``speed`` it is timed (:mod:`proof.speed`), and asked
    nothing else."""

    arm: str
    setup: str
    faults: bool
    speed: bool = False

    @property
    def name(self) -> str:
        return f"{self.setup}.{self.arm}" + (".speed" if self.speed else "")


def jobs(names: Sequence[str], setups: Sequence[str], local: bool) -> list[Job]:
    """The processes of a proof, those with faults first: they take longest."""
    found = []
    for setup in setups:
        for arm in names:
            chosen = SETUPS[setup]
            if (arm in chosen.arms or local) and (chosen.loads or arm == names[0]):
                planted = chosen.faults and any(arm in fault.arms for fault in FAULTS)
                found.append(Job(arm, setup, faults=planted))
    return sorted(found, key=lambda job: not job.faults)


class Runner:
    """Runs jobs side by side, each in a process group of its own."""

    def __init__(self, work: Path, site: Path | None, stock: Path | None, until: float) -> None:
        self.work, self.site, self.stock, self.until = work, site, stock, until
        self.running: dict[subprocess.Popen, tuple[Job, float]] = {}
        self.failed: list[str] = []
        for folder in ("results", "logs", "jobs"):
            (work / folder).mkdir(parents=True, exist_ok=True)

    def result(self, job: Job) -> Path:
        return self.work / "results" / f"{job.name}.json"

    def start(self, job: Job) -> None:
        record = self.work / "jobs" / f"{job.name}.json"
        content = {**dataclasses.asdict(job), "name": job.name}
        content["checkpoint"] = str(self.work / "checkpoints")
        record.write_text(json.dumps(content))
        command = [sys.executable, "-m", "proof.engine", str(record), str(self.result(job))]
        with (self.work / "logs" / f"{job.name}.log").open("w") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment(job),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running[process] = (job, time.monotonic())
        print(f"{job.name}: started", flush=True)

    def environment(self, job: Job) -> dict[str, str]:
        path = [str(ROOT)]
        if arms.ARMS[job.arm].stock and self.stock:
            path.append(str(self.stock))
        if self.site:
            path.append(str(self.site))
        if os.environ.get("PYTHONPATH"):
            path.append(os.environ["PYTHONPATH"])
        made = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path)}
        if Path("/usr/local/cuda").is_dir():
            made.setdefault("CUDA_HOME", "/usr/local/cuda")
        if importlib.util.find_spec("flashinfer") is None:
            made["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        return made

    def wait(self, most: int) -> None:
        """Until fewer than ``most`` run; ends those that are over time."""
        while len(self.running) >= most:
            for process, (job, begun) in list(self.running.items()):
                if process.poll() is not None:
                    del self.running[process]
                    self._ended(job, process.returncode, time.monotonic() - begun)
                elif time.monotonic() > self.until:
                    self._kill(process)
            if len(self.running) >= most:
                time.sleep(0.3)

    def _ended(self, job: Job, code: int, seconds: float) -> None:
        good = code == 0 and self.result(job).exists()
        print(
            f"{job.name}: {'done' if good else f'FAILED ({code})'} in {seconds:.0f} s", flush=True
        )
        if not good:
            self.failed.append(job.name)
            log = (self.work / "logs" / f"{job.name}.log").read_text(errors="replace")
            print("\n".join(log.splitlines()[-12:]), flush=True)

    def _kill(self, process: subprocess.Popen) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for process in self.running:
            self._kill(process)


def missing(runner: Runner, wanted: list[Job]) -> list[Job]:
    return [job for job in wanted if not runner.result(job).exists()]


def run(args: argparse.Namespace) -> int:
    """Runs what is missing; returns the exit code."""
    until = time.monotonic() + args.seconds
    runner = Runner(args.work.resolve(), args.site, args.stock, until)
    wanted = jobs(args.arms, args.setups, args.local)
    todo = missing(runner, wanted)
    if todo:
        variants = tuple(dict.fromkeys(SETUPS[job.setup].variant for job in todo))
        begun = time.monotonic()
        digests = checkpoint.write(
            runner.work / "checkpoints", variants, min(8, os.cpu_count() or 1)
        )
        print(f"checkpoints ready after {time.monotonic() - begun:.0f} s", flush=True)
        report.add_digests(runner.work / "results", digests)
    try:
        for job in todo:
            runner.wait(args.jobs)
            if time.monotonic() + _START_SECONDS > until:
                break
            runner.start(job)
        runner.wait(1)
    finally:
        runner.close()
    left = missing(runner, wanted)
    if args.out:
        _take_along(runner.work, args.out)
    if left:
        print(f"{len(left)} left: {', '.join(job.name for job in left)}; run again", flush=True)
        return 1
    return report.main([str(runner.work / "results"), *(["--local"] if args.local else [])])


def _take_along(work: Path, out: Path) -> None:
    """Results and logs as one archive, for a machine that keeps nothing."""
    import tarfile

    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out / "proof.tar.xz", "w:xz") as archive:
        for folder in ("results", "logs"):
            archive.add(work / folder, folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m proof.run",
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    home = Path.home()
    parser.add_argument("--local", action="store_true", help="the installed fork alone")
    parser.add_argument("--work", type=Path, default=Path(".proof"), help="results, checkpoints")
    parser.add_argument("--jobs", type=int, help="engines at once (default 8; 1 with --local)")
    parser.add_argument("--seconds", type=float, default=24 * 3600, help="stop after so long")
    parser.add_argument("--arms", nargs="+", choices=arms.ARMS)
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--out", type=Path, help="leave proof.tar.xz there too")
    parser.add_argument("--site", type=Path, default=home / "engine-site", help="the fork's vllm")
    parser.add_argument("--stock", type=Path, default=home / "engine-stock", help="upstream's vllm")
    args = parser.parse_args()
    if args.local or not args.stock.is_dir():
        if not args.local:
            sys.exit(
                f"error: no upstream tree in {args.stock}. Unpack what python -m proof.pack made "
                "(proof/README.md), or compare the installed fork with itself: --local"
            )
        args.site = args.stock = None
    args.arms = args.arms or list(LOCAL if args.local else arms.ARMS)
    args.jobs = args.jobs or (1 if args.local else 8)
    if shutil.which("nvidia-smi") is None:
        sys.exit("error: no NVIDIA GPU here (no nvidia-smi)")
    sys.exit(run(args))


if __name__ == "__main__":
    main()
