# SPDX-License-Identifier: Apache-2.0
"""One launch from intent to receipt: clean up, gate, stage, start.

Every stage is on disk before it begins. Nothing is staged or started unless every rank
has passed, and a receipt is completed however the launch ends.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Literal, TypeVar

from sm120_launch import engine, gate, receipt, runtime, transport
from sm120_launch.errors import LaunchError
from sm120_launch.plan import LaunchPlan, LocalTransport, RankPlan
from sm120_launch.process import Outcome
from sm120_launch.receipt import Command, Folder, RankRecord, Receipt, Result, Stage
from sm120_launch.report import why as why_not

T = TypeVar("T")

# A start whose connection was lost may still be on its way there; seconds to let it arrive,
# so that ending it by name finds it.
_IN_FLIGHT_S = 3.0


class Stop(Exception):
    """Ends a launch early, with a result and why."""

    def __init__(self, result: Result, why: str) -> None:
        super().__init__(why)
        self.result: Result = result
        self.why = why


class Launch:
    """One launch, gate or stop of a plan.

    Args:
        plan: what to run.
        folder: where its receipt goes.
        kind: how far to go.
        cancelled: set from outside (a signal), it ends the launch in order.
        told: hears what a rank is at: rank, one line.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        folder: Folder,
        kind: Literal["gate", "launch", "stop"],
        *,
        cancelled: threading.Event | None = None,
        told: Callable[[RankPlan, str], None] = lambda rank, line: None,
    ) -> None:
        gate.check(plan)
        self.plan = plan
        self.folder = folder
        self.cancelled = cancelled or threading.Event()
        self._tell = told
        self._lock = threading.Lock()
        self._secrets = _local_secrets(plan)
        self.receipt = Receipt(
            id=receipt.new_id(),
            kind=kind,
            profile=plan.profile,
            profile_key=plan.profile_key,
            runtime_key=plan.runtime_key,
            base=plan.base,
            warnings=list(plan.warnings),
            control_host=receipt.control_host(),
            pid=os.getpid(),
            begun=receipt.now(),
            ranks=[_record(rank) for rank in plan.ranks],
        )

    @property
    def id(self) -> str:
        return self.receipt.id

    def run(self) -> Receipt:
        """Runs it and returns the completed receipt.

        Raises:
            LaunchError: nothing was run (another command works on the profile, its engine
                runs, no receipt can be written), or the receipt could not be completed.
        """
        with self.folder.lock(self.plan.profile):
            before = self.folder.of(self.plan.profile)
            if self.receipt.kind == "launch":
                self._refuse_running(receipt.running(before))
            left = receipt.interrupted(before)
            self.receipt.interrupted = [found.id for found in left]
            self.folder.create(self.receipt)
            try:
                result, why = self._run(left), ""
            except Stop as stop:
                result, why = stop.result, stop.why
            except LaunchError:
                self._stop_engines()
                raise
            except BaseException as error:
                self._stop_engines()
                self._end("failed", f"{type(error).__name__}: {error}")
                raise
            self._end(result, why)
            return self.receipt

    def _run(self, left: list[Receipt]) -> Result:
        self._stage("clean")
        self._clean(left)
        if self.receipt.kind == "stop":
            return "stopped"
        self._stage("gate")
        self._gate()
        if self.receipt.kind == "gate":
            return "passed"
        self._stage("stage")
        self._run_staging()
        self._stage("start")
        self._start()
        return "started"

    def _stage(self, stage: Stage) -> None:
        if self.cancelled.is_set():
            raise Stop("cancelled", f"before {stage}")
        self.receipt.stage = stage
        self.folder.update(self.receipt)

    def _end(self, result: Result, why: str) -> None:
        if self.cancelled.is_set() and result in ("refused", "failed"):
            result, why = "cancelled", why or "by a signal"
        self.receipt.result = result
        self.receipt.why = self._hide(why)
        self.receipt.ended = receipt.now()
        try:
            self.folder.update(self.receipt)
        except LaunchError as error:
            if result == "started":
                self._stop_engines()
                raise LaunchError(
                    f"{error.found}; the ranks were stopped again", error.needed, error.remedy
                ) from None
            raise

    def _refuse_running(self, last: Receipt | None) -> None:
        """Refuses while the profile's engine runs."""
        if last is None:
            return

        def runs(rank: RankPlan) -> bool:
            command = runtime.status_command(rank, last.id, "engine")
            return transport.run(rank.transport, command).stdout.strip() == b"running"

        if any(self._on_all(runs, self._engines())):
            raise LaunchError(
                f"profile {self.plan.profile} runs already, since launch {last.id}",
                "no engine of this profile",
                "sm120-launch stop PROFILE ends it",
            )

    def _clean(self, left: list[Receipt]) -> None:
        """Removes what earlier launches left; a gate alone touches no engine."""

        def clean(rank: RankPlan) -> str:
            self._told(rank, "cleaning up")
            commands = [runtime.cleanup_command(rank)]
            if self.receipt.kind == "gate":
                commands = [runtime.stop_command(rank, found.id, "gate") for found in left]
            for command in commands:
                outcome = transport.run(rank.transport, command, cancelled=self.cancelled)
                if not outcome.ok:
                    self._ran(rank, "clean", outcome)
                    return f"rank {rank.rank} on {rank.host}: {why_not(outcome)}"
            return ""

        failed = [why for why in self._on_all(clean, self.plan.ranks) if why]
        if failed:
            raise Stop("refused", f"what earlier launches left cannot be removed: {failed[0]}")
        if self.receipt.kind == "gate":
            left = [found for found in left if found.stage != "start"]
        self.receipt.cleaned = [found.id for found in left]
        here = {(record.rank, record.where) for record in self.receipt.ranks}
        for found in left:
            for gone in {(record.rank, record.where) for record in found.ranks} - here:
                self.receipt.warnings.append(
                    f"{found.id} was interrupted and had rank {gone[0]} on {gone[1]}, which is not "
                    "in this plan: look there"
                )

    def _gate(self) -> None:
        def one(rank: RankPlan) -> bool:
            begun = time.monotonic()
            verdict = gate.run(
                rank,
                self.id,
                cancelled=self.cancelled,
                told=lambda line: self._told(rank, line),
                ran=lambda purpose, outcome: self._ran(rank, purpose, outcome),
            )
            record = self._record_of(rank)
            record.verdict, record.reason = verdict.label, self._hide(verdict.reason)
            record.gates = [receipt.kept(name) for name in verdict.gates]
            record.report = receipt.kept(verdict.report)
            record.gate_seconds = round(time.monotonic() - begun, 3)
            self._told(rank, f"{verdict.label} {verdict.reason}".strip())
            return verdict.passed

        passed = self._on_all(one, self.plan.ranks)
        if not all(passed):
            first = next(r for r in self.receipt.ranks if r.verdict != "PASS")
            why = f"rank {first.rank} on {first.host}: {first.verdict}, {first.reason}"
            raise Stop("refused", f"{passed.count(False)} of {len(passed)} did not pass; {why}")

    def _run_staging(self) -> None:
        def stage(rank: RankPlan) -> str:
            for command in rank.staging:
                self._told(rank, "staging")
                outcome = transport.run(
                    rank.transport,
                    command,
                    timeout_s=rank.start_timeout_s,
                    cancelled=self.cancelled,
                    on_line=lambda line: self._told(rank, f"staging: {line}"),
                )
                self._ran(rank, "stage", outcome)
                if not outcome.ok:
                    return f"staging for rank {rank.rank} on {rank.host}: {why_not(outcome)}"
            return ""

        failed = [why for why in self._on_all(stage, self.plan.ranks) if why]
        if failed:
            raise Stop("failed", failed[0])

    def _start(self) -> None:
        engines = self._engines()
        try:
            engine.start(
                engines,
                self.id,
                cancelled=self.cancelled,
                told=self._told,
                ran=self._ran,
            )
            for rank in engines:
                self._record_of(rank).engine = "started"
        except engine.StartFailed as error:
            raise Stop("failed", f"{error}{self._stop_engines()}") from None

    def _stop_engines(self) -> str:
        """Ends every rank that this launch may have started. Returns what could not be."""
        if self.receipt.stage != "start":
            return ""

        def stop(rank: RankPlan) -> str:
            self._told(rank, "stopping")
            record = self._record_of(rank)
            if any(c.purpose == "start" and c.problem for c in record.commands):
                time.sleep(_IN_FLIGHT_S)
            command = runtime.stop_command(rank, self.id, "engine")
            outcome = transport.run(rank.transport, command)
            self._ran(rank, "stop", outcome)
            record.engine = "stopped" if outcome.ok else f"may still run: {why_not(outcome)}"
            self._told(rank, record.engine)
            return "" if outcome.ok else f"; rank {rank.rank} on {rank.host} {record.engine}"

        return "".join(self._on_all(stop, self._engines()))

    def _engines(self) -> list[RankPlan]:
        return [rank for rank in self.plan.ranks if rank.starts_engine]

    def _on_all(self, one: Callable[[RankPlan], T], ranks: Sequence[RankPlan]) -> list[T]:
        """``one`` of each rank, all at once. Signals are seen while it waits."""
        with ThreadPoolExecutor(max(1, len(ranks))) as pool:
            running = [pool.submit(one, rank) for rank in ranks]
            while wait(running, timeout=0.2).not_done:
                pass
            return [future.result() for future in running]

    def _record_of(self, rank: RankPlan) -> RankRecord:
        return self.receipt.ranks[self.plan.ranks.index(rank)]

    def _told(self, rank: RankPlan, line: str) -> None:
        self._tell(rank, self._hide(line))

    def _ran(self, rank: RankPlan, purpose: str, outcome: Outcome) -> None:
        record = Command(
            purpose=purpose,
            exit_code=outcome.exit_code,
            problem=outcome.problem,
            detail=self._hide(receipt.bounded(outcome.detail)),
            seconds=round(outcome.seconds, 3),
            stdout=self._hide(receipt.bounded(outcome.stdout)),
            stderr=self._hide(receipt.bounded(outcome.stderr)),
        )
        with self._lock:
            self._record_of(rank).commands.append(record)

    def _hide(self, text: str) -> str:
        for name, value in self._secrets.items():
            text = text.replace(value, f"[{name}]")
        return text


def _record(rank: RankPlan) -> RankRecord:
    return RankRecord(
        rank=rank.rank,
        host=rank.host,
        where=transport.where(rank.transport),
        runtime=rank.runtime,
        image=rank.image.reference if rank.image else rank.venv,
        argv=list(rank.argv),
        argv_sha256=rank.argv_sha256,
        env_sha256=rank.env_sha256,
        env=sorted({*rank.env, *rank.pass_env}),
    )


def _local_secrets(plan: LaunchPlan) -> dict[str, str]:
    """Values of passed-through variables that this host knows: an output may show them."""
    names = {
        name
        for rank in plan.ranks
        if isinstance(rank.transport, LocalTransport)
        for name in rank.pass_env
    }
    return {name: os.environ[name] for name in names if len(os.environ.get(name, "")) >= 8}


@contextmanager
def signals(cancelled: threading.Event) -> Iterator[None]:
    """While in here, INT, TERM and HUP cancel in order instead of ending the process."""
    import signal

    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {kind: signal.signal(kind, lambda *_: cancelled.set()) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
