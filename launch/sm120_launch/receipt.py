# SPDX-License-Identifier: Apache-2.0
"""Receipts: one JSON a launch, gate or stop, in a folder that only grows.

A receipt is written as an intent before anything else happens and is rewritten, whole,
at every stage, beside itself and then renamed. A launcher that is killed leaves its last
stage; the next run of the profile finds it, since the lock that goes with it is free.
"""

import contextlib
import fcntl
import json
import math
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sm120_launch.errors import LaunchError
from sm120_launch.plan import Transport
from sm120_launch.report import plain

SCHEMA = 1
FOLDER_VARIABLE = "SM120_LAUNCH_RECEIPTS"

OUTPUT_HEAD, OUTPUT_TAIL = 8 << 10, 56 << 10
"""Characters of an output that are kept, from its beginning and its end."""

_PROFILE = re.compile(rb'"profile":\s*"([^"]*)"')
_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9]{6}-[0-9a-f]{6}")

Stage = Literal["intent", "clean", "gate", "stage", "start"]
Result = Literal["passed", "started", "stopped", "refused", "failed", "cancelled"]


class Command(BaseModel):
    """One command on a host and how it ended. Output: bounded, without escape codes."""

    purpose: str
    exit_code: int | None
    problem: str | None = None
    detail: str = ""
    seconds: float
    stdout: str = ""
    stderr: str = ""


class RankRecord(BaseModel):
    """One rank: what was planned for it, and what came of it.

    Attributes:
        where: the host, for people.
        transport: the same, so that what was started can be ended when the profile says
            something else.
    """

    rank: int
    host: str
    where: str
    transport: Transport | None = None
    runtime: str
    image: str | None
    argv: list[str]
    argv_sha256: str
    env_sha256: str
    env: list[str] = Field(description="names only")
    verdict: str | None = None
    reason: str = ""
    gates: list[str] = []
    gate_seconds: float | None = None
    report: dict[str, Any] | None = None
    engine: str | None = None
    commands: list[Command] = []


class Receipt(BaseModel):
    """One launch, gate or stop.

    Attributes:
        stage: what it was at, or about to begin, when this was written.
        result: None until it has ended.
        interrupted: receipts of this profile that this run found without an end.
        cleaned: those whose remains, a running engine too, this run removed.
    """

    model_config = ConfigDict(extra="allow")

    schema_: Literal[1] = Field(default=1, alias="schema")
    id: str
    kind: Literal["gate", "launch", "stop"]
    profile: str
    profile_key: str
    runtime_key: str
    base: str = ""
    stage: Stage = "intent"
    result: Result | None = None
    why: str = ""
    warnings: list[str] = []
    control_host: str = ""
    pid: int = 0
    begun: str
    ended: str | None = None
    interrupted: list[str] = []
    cleaned: list[str] = []
    ranks: list[RankRecord] = []

    def text(self) -> str:
        return self.model_dump_json(by_alias=True, indent=1) + "\n"


def bounded(text: str | bytes) -> str:
    """Head and tail of an output as plain text, and how much was left out between."""
    whole = plain(text)
    if len(whole) <= OUTPUT_HEAD + OUTPUT_TAIL:
        return whole
    left_out = len(whole) - OUTPUT_HEAD - OUTPUT_TAIL
    return f"{whole[:OUTPUT_HEAD]}\n[… {left_out} characters left out …]\n{whole[-OUTPUT_TAIL:]}"


def kept(value: Any, depth: int = 12) -> Any:
    """A report as it can be kept: plain text, finite, not too deep, not too long."""
    if isinstance(value, str):
        return plain(value)[:4096]
    if depth == 0:
        return None
    if isinstance(value, dict):
        items = list(value.items())[:1024]
        return {plain(str(key))[:256]: kept(item, depth - 1) for key, item in items}
    if isinstance(value, list):
        return [kept(item, depth - 1) for item in value[:4096]]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def new_id() -> str:
    """Sorts by time (UTC); also part of containers' names (runtime.LAUNCH_ID)."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{secrets.token_hex(3)}"


def default_folder() -> Path:
    """$SM120_LAUNCH_RECEIPTS, else the user's state folder (XDG)."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "sm120-launch" / "receipts"


class Folder:
    """The folder of receipts.

    Raises:
        LaunchError: from every method, where the folder cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def _refuse(self, error: OSError) -> LaunchError:
        return LaunchError(
            f"receipts cannot be kept in {self.path}: {error.strerror or error}",
            "a folder that can be written, with space left",
            f"Make space, or name another with --receipts or ${FOLDER_VARIABLE}",
        )

    @contextlib.contextmanager
    def lock(self, profile: str) -> Iterator[None]:
        """Held while a command works on the profile; a killed process lets it go."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = open(self.path / f".{profile}.lock", "a+")  # noqa: SIM115 closed below
        except OSError as error:
            raise self._refuse(error) from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LaunchError(
                    f"another command works on profile {profile} now",
                    "one at a time",
                    "Wait for it, or end it (sm120-launch receipts names its process)",
                ) from None
            except OSError as error:
                raise self._refuse(error) from None
            yield

    def is_locked(self, profile: str) -> bool:
        try:
            with open(self.path / f".{profile}.lock") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def create(self, receipt: Receipt) -> None:
        """Writes an intent; a receipt that is there is never replaced by another."""
        self._write(receipt, first=True)

    def update(self, receipt: Receipt) -> None:
        """Rewrites this process's own receipt."""
        self._write(receipt, first=False)

    def _write(self, receipt: Receipt, first: bool) -> None:
        target = self.path / f"{receipt.id}.json"
        beside = None
        try:
            number, beside = tempfile.mkstemp(dir=self.path, prefix=".receipt-")
            with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(receipt.text())
                file.flush()
                os.fsync(file.fileno())
            if first:
                os.link(beside, target)
                os.unlink(beside)
            else:
                os.replace(beside, target)
            folder = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            if beside is not None:
                with contextlib.suppress(OSError):
                    os.unlink(beside)
            raise self._refuse(error) from None

    def read(self, receipt_id: str) -> Receipt:
        if not _ID.fullmatch(receipt_id):
            raise LaunchError(
                f"{receipt_id!r} is no receipt", "an id", "sm120-launch receipts lists them"
            )
        path = self.path / f"{receipt_id}.json"
        try:
            return Receipt.model_validate(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise LaunchError(
                f"no receipt {receipt_id} in {self.path}", "", "sm120-launch receipts lists them"
            ) from None
        except OSError as error:
            raise self._refuse(error) from None
        except (ValueError, ValidationError, RecursionError) as error:
            raise LaunchError(
                f"{path} is damaged: {str(error).splitlines()[0]}",
                "a receipt as it was written",
                "Move it elsewhere",
            ) from None

    def ids(self) -> list[str]:
        """All receipts, oldest first."""
        try:
            return sorted(p.stem for p in self.path.glob("*.json") if _ID.fullmatch(p.stem))
        except OSError as error:
            raise self._refuse(error) from None

    def of(self, profile: str) -> tuple[list[Receipt], list[LaunchError]]:
        """The profile's receipts, oldest first; and what is wrong with those that may be
        its own and cannot be read: damaged, or of a newer schema."""
        found, damaged = [], []
        for receipt_id in self.ids():
            try:
                named = _PROFILE.search((self.path / f"{receipt_id}.json").read_bytes())
                if named is None or named[1] == profile.encode():
                    found.append(self.read(receipt_id))
            except OSError as error:
                damaged.append(self._refuse(error))
            except LaunchError as error:
                damaged.append(error)
        return [receipt for receipt in found if receipt.profile == profile], damaged


def interrupted(receipts: list[Receipt]) -> list[Receipt]:
    """Those without an end whose remains no later run removed. To be asked under lock."""
    cleaned = {receipt_id for receipt in receipts for receipt_id in receipt.cleaned}
    return [r for r in receipts if r.result is None and r.id not in cleaned]


def not_cleaned(receipts: list[Receipt]) -> list[Receipt]:
    """The interrupted, and launches whose engines were started and that no later run
    removed: what a launch or stop has to end."""

    def may_run(found: Receipt) -> bool:
        return found.kind == "launch" and any(
            record.engine not in (None, "stopped") for record in found.ranks
        )

    cleaned = {receipt_id for receipt in receipts for receipt_id in receipt.cleaned}
    return [r for r in receipts if (r.result is None or may_run(r)) and r.id not in cleaned]


def changed(found: Receipt, change: Callable[[str], str]) -> Receipt:
    """A copy in which everything that a host or the plan said went through ``change``: not
    what later runs read, such as names, states and how to reach a host."""

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, dict):
            return {change(key): walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else value

    data = found.model_dump(by_alias=True)
    data |= {key: walk(data[key]) for key in ("why", "warnings")}
    read = ("host", "where", "transport", "runtime")
    data["ranks"] = [walk(rank) | {key: rank[key] for key in read} for rank in data["ranks"]]
    return Receipt.model_validate(data)


def control_host() -> str:
    return socket.gethostname()
