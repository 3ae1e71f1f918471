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
from dataclasses import replace
from typing import Any, Literal, TypeVar

from sm120_launch import cluster, engine, gate, planning, receipt, runtime, transport
from sm120_launch.errors import LaunchError
from sm120_launch.plan import LaunchPlan, LocalTransport, RankPlan, Transport
from sm120_launch.process import Outcome
from sm120_launch.receipt import Command, Folder, RankRecord, Receipt, Result, Stage
from sm120_launch.report import one_line, plain
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
        (gate.check_names if kind == "stop" else gate.check)(plan)
        self.plan = plan
        self._former: list[RankPlan] = []
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
            before, damaged = self.folder.of(self.plan.profile)
            if damaged and self.receipt.kind == "launch":
                raise damaged[0]
            self.receipt.warnings += map(str, damaged)
            left = receipt.interrupted(before)
            self.receipt.interrupted = [found.id for found in left]
            if self.receipt.kind != "gate":
                left = receipt.not_cleaned(before)
                self._add_former(left)
            silent = self._refuse_running(before) if self.receipt.kind == "launch" else ""
            self._save(self.folder.create)
            try:
                if silent:
                    raise Stop("refused", silent)
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
        self._check_cluster()
        self._gate()
        if self.receipt.kind == "gate":
            return "passed"
        self._stage("stage")
        self._run_staging()
        self._check_cluster()
        self._check_ports()
        self._stage("start")
        self._start()
        return "started"

    def _stage(self, stage: Stage) -> None:
        if self.cancelled.is_set():
            raise Stop("cancelled", f"before {stage}")
        self.receipt.stage = stage
        self._save(self.folder.update)

    def _end(self, result: Result, why: str) -> None:
        if self.cancelled.is_set() and result in ("refused", "failed"):
            result, why = "cancelled", why or "by a signal"
        self.receipt.result = result
        self.receipt.why = why
        self.receipt.ended = receipt.now()
        try:
            self._save(self.folder.update)
        except LaunchError as error:
            if result == "started":
                self._stop_engines()
                raise LaunchError(
                    f"{error.found}; the ranks were stopped again", error.needed, error.remedy
                ) from None
            raise

    def _save(self, write: Callable[[Receipt], None]) -> None:
        """Everything that is written goes through here, and no secret gets past it."""
        self.receipt = receipt.changed(self.receipt, self._hide)
        write(self.receipt)

    def _add_former(self, left: list[Receipt]) -> None:
        """Ranks that an earlier launch had where this plan has none: they are asked, and
        cleaned, where the receipt says how to reach them."""
        have = {_place(record) for record in self.receipt.ranks}
        for record in (record for found in left for record in found.ranks):
            if record.transport is None or _place(record) in have:
                continue
            have.add(_place(record))
            rank = planning.to_end(
                record.rank, self.plan.profile, record.host, record.transport, record.runtime
            )
            self._former.append(rank)
            self.receipt.ranks.append(_record(rank))

    def _refuse_running(self, before: list[Receipt]) -> str:
        """Refuses while an engine of the profile runs, whoever started it: receipts may be
        elsewhere, so the hosts are asked. Not those of launches that are known to have
        ended otherwise: cleaning up removes these. Returns who of the plan did not answer.
        """
        ended = {found.id for found in before if found.result != "started"}

        def ask(rank: RankPlan) -> Outcome:
            return self._call(rank.transport, runtime.engines_command(rank))

        silent = ""
        ranks = [*self.plan.ranks, *self._former]
        for rank, outcome in zip(ranks, self._on_all(ask, ranks), strict=True):
            for name in plain(outcome.stdout).split():
                launched = (name.split(".") + [name] * 3)[2]  # runtime.name
                if launched not in ended:
                    raise LaunchError(
                        f"profile {self.plan.profile} runs already, since launch "
                        f"{one_line(launched)}: rank {rank.rank} on {rank.host}",
                        "no engine of this profile",
                        "sm120-launch stop PROFILE ends it",
                    )
            if not outcome.ok and rank not in self._former:
                silent = silent or (
                    f"rank {rank.rank} on {rank.host} does not say whether its engine runs: "
                    f"{why_not(outcome)}"
                )
        return silent

    def _clean(self, left: list[Receipt]) -> None:
        """Removes what earlier launches left; a gate alone touches no engine."""

        def clean(rank: RankPlan) -> str:
            self._told(rank, "cleaning up")
            commands = [runtime.cleanup_command(rank)]
            if self.receipt.kind == "gate":
                commands = [runtime.stop_command(rank, found.id, "gate") for found in left]
            for command in commands:
                outcome = self._call(rank.transport, command, cancelled=self.cancelled)
                if not outcome.ok:
                    self._ran(rank, "clean", outcome)
                    return f"rank {rank.rank} on {rank.host}: {why_not(outcome)}"
            return ""

        ranks = [*self.plan.ranks, *self._former]
        failed = dict(
            zip(map(_place, map(_record, ranks)), self._on_all(clean, ranks), strict=True)
        )
        # A host that left the profile may be no more: that must not stop a launch.
        needed = ranks if self.receipt.kind == "stop" else self.plan.ranks
        if whys := [why for rank in needed if (why := failed[_place(_record(rank))])]:
            raise Stop("refused", f"what earlier launches left cannot be removed: {whys[0]}")
        for found in left:
            gone = [record for record in found.ranks if failed.get(_place(record), "unknown")]
            self.receipt.warnings += (
                f"{found.id} had rank {record.rank} on {record.where}, which is not in this plan "
                "and was not cleaned: look there, and if that host is no more, move the receipt "
                f"out of {self.folder.path}"
                for record in gone
            )
            if not gone and (self.receipt.kind != "gate" or found.stage != "start"):
                self.receipt.cleaned.append(found.id)

    def _check_cluster(self) -> None:
        """Ray places the engine's workers by itself: only where every GPU node is a rank, and
        its raylet as the rank is planned, does a gate speak for them."""
        with_ray = [rank for rank in self.plan.ranks if rank.transport.kind == "ray"]
        if with_ray and (wrong := cluster.differences(with_ray)):
            raise Stop("refused", f"the Ray cluster is not the planned one: {'; '.join(wrong)}")

    def _check_ports(self) -> None:
        """Refuses where somebody else would answer in the engine's place."""

        def check(rank: RankPlan) -> str:
            command = runtime.port_command(rank, self.id)
            if command is None:
                return ""
            outcome = self._call(rank.transport, command, cancelled=self.cancelled)
            self._ran(rank, "port", outcome)
            return "" if outcome.ok else f"rank {rank.rank} on {rank.host}: {why_not(outcome)}"

        if whys := [why for why in self._on_all(check, self._engines()) if why]:
            raise Stop("refused", f"the engine's port is not free: {whys[0]}")

    def _gate(self) -> None:
        def one(rank: RankPlan) -> bool:
            begun = time.monotonic()
            verdict = gate.run(
                rank,
                self.id,
                call=self._call,
                cancelled=self.cancelled,
                told=lambda line: self._told(rank, line),
                warned=lambda line: self._warn(rank, line),
                ran=lambda purpose, outcome: self._ran(rank, purpose, outcome),
            )
            record = self._record_of(rank)
            record.verdict, record.reason = verdict.label, verdict.reason
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
                outcome = self._call(
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
                call=self._call,
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
            outcome = self._call(rank.transport, command)
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
        place = _place(_record(rank))
        return next(found for found in self.receipt.ranks if _place(found) == place)

    def _call(self, where: Transport, argv: Sequence[str], **more: Any) -> Outcome:
        """``transport.run``; secrets are hidden before anything of an output is cut off."""
        if heard := more.get("on_line"):
            more["on_line"] = lambda line: heard(self._hide(line))
        done = transport.run(where, argv, **more)
        streams = {"stdout": done.stdout, "stderr": done.stderr}
        for name, value in self._secrets.items():
            streams = {
                stream: data.replace(os.fsencode(value), f"[{name}]".encode())
                for stream, data in streams.items()
            }
        return replace(done, detail=self._hide(done.detail), **streams)

    def _told(self, rank: RankPlan, line: str) -> None:
        self._tell(rank, self._hide(line))

    def _warn(self, rank: RankPlan, line: str) -> None:
        with self._lock:
            self.receipt.warnings.append(f"rank {rank.rank} on {rank.host}: {line}")

    def _ran(self, rank: RankPlan, purpose: str, outcome: Outcome) -> None:
        record = Command(
            purpose=purpose,
            exit_code=outcome.exit_code,
            problem=outcome.problem,
            detail=receipt.bounded(outcome.detail),
            seconds=round(outcome.seconds, 3),
            stdout=receipt.bounded(outcome.stdout),
            stderr=receipt.bounded(outcome.stderr),
        )
        with self._lock:
            self._record_of(rank).commands.append(record)

    def _hide(self, text: str) -> str:
        for name, value in self._secrets.items():
            text = text.replace(value, f"[{name}]")
        return text


def _place(record: RankRecord) -> tuple[int, str, str]:
    """What tells one rank of a profile from another: cleaning up goes by it."""
    return record.rank, record.where, record.runtime


def _record(rank: RankPlan) -> RankRecord:
    return RankRecord(
        rank=rank.rank,
        host=rank.host,
        where=transport.where(rank.transport),
        transport=rank.transport,
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
