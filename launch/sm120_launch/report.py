# SPDX-License-Identifier: Apache-2.0
"""From what a gate printed to one verdict. Everything that is not a whole, matching PASS
is a no, with its reason; the output is untrusted and bounded.

The frame around the self-test's output is described in runtime.py.
"""

import json
import re
from itertools import islice
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sm120_launch.plan import RankPlan
from sm120_launch.process import Outcome
from sm120_launch.runtime import END_MARK, REPORT_LIMIT, REPORT_MARK

PASS_LINE = "SELFTEST PASS"

# Terminal sequences (ECMA-48): CSI; OSC, DCS, SOS, PM and APC strings that end within a
# line's length; two-byte escapes. Nothing can be hidden behind a string that does not end.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x90\x98\x9c-\x9f\n]{0,4096}(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]?"
)
# Controls but newline and tab, and what changes the direction of text.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")

Label = Literal["PASS", "FAIL", "NOT RUN", "NO ANSWER"]


class Row(BaseModel):
    """One call of the report; the other fields are for people.

    With ``selection`` it says which implementation an op has, and no device runs it.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    ok: bool
    error_norm: float | None = None
    selection: bool = False


class Report(BaseModel):
    """The self-test's report, schema 1: what a verdict rests on."""

    model_config = ConfigDict(strict=True, extra="allow")

    schema_: Literal[1] = Field(alias="schema")
    runtime_key: str | None
    argv_sha256: str
    env_sha256: str
    complete: bool
    level: Literal["rules", "device"]
    verdict: Literal["PASS", "FAIL", "NOT_RUN"]
    line: str
    gates: list[str]
    warnings: list[str] = []
    rows: list[Row]


class Verdict(BaseModel):
    """What the gate of one rank came to.

    Attributes:
        label: ``PASS``, or the self-test's own ``FAIL`` or ``NOT RUN``, or ``NO ANSWER``
            where there is no answer to this question that could be believed.
        reason: why, in one line; empty for a pass.
        gates: the self-test's failing gates.
        report: the report as printed, None where there is none.
    """

    label: Label
    reason: str = ""
    gates: list[str] = []
    report: dict[str, Any] | None = None

    @property
    def passed(self) -> bool:
        return self.label == "PASS"


class _Unbelievable(Exception):
    """Why an output is no answer."""


def plain(text: str | bytes) -> str:
    """Text that cannot move a cursor: escape sequences and control characters removed."""
    data = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
    text = data.decode("utf-8", "replace")
    return _CONTROLS.sub("", _ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))


def one_line(text: str | bytes, limit: int = 300) -> str:
    """``plain``, on one line of at most ``limit`` characters."""
    return " ".join(plain(text).split())[:limit]


def last_line(data: bytes) -> str:
    """The last line that is not empty, as ``one_line``."""
    lines = plain(data[-4096:]).strip().splitlines()
    return one_line(lines[-1]) if lines else ""


def why(outcome: Outcome) -> str:
    """A command that did not do what it should, in one line."""
    said = outcome.detail or last_line(outcome.stderr) or last_line(outcome.stdout)
    what = outcome.problem or f"exit {outcome.exit_code}"
    return one_line(f"{what}: {said}" if said else what)


def judge(outcome: Outcome, rank: RankPlan, launch_id: str) -> Verdict:
    """The verdict on one gate's output. Never raises.

    An output that is whole is an answer also where what ran the gate lingers after it: the
    frame ends with the self-test's own exit status.
    """
    if outcome.problem and outcome.problem != "lingers":
        reason = f"{outcome.problem}: {outcome.detail}" if outcome.detail else outcome.problem
        return Verdict(label="NO ANSWER", reason=one_line(reason))
    try:
        own, report_text, status = _unframe(outcome.stdout, launch_id)
    except _Unbelievable as error:
        said = last_line(outcome.stderr) or last_line(outcome.stdout)
        said = f" ({said})" if said else ""
        return Verdict(
            label="NO ANSWER", reason=one_line(f"exit {outcome.exit_code}, {error}{said}")
        )
    line = own.rstrip(b"\n").rpartition(b"\n")[2]
    exit_code = status if outcome.problem else outcome.exit_code
    if (exit_code, status) in ((1, 1), (2, 2)):
        return _refused(line, report_text, status)
    report: dict[str, Any] | None = None
    try:
        if exit_code != 0 or status != 0:
            raise _Unbelievable(f"exit {exit_code}, the self-test's own {status}")
        if line != PASS_LINE.encode():
            raise _Unbelievable(f"exit 0, but the last line is {one_line(line)!r}")
        report = _parse(report_text)
        _must_match(Report.model_validate(report), rank)
    except _Unbelievable as error:
        return Verdict(label="NO ANSWER", reason=one_line(str(error)), report=report)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        reason = one_line(f"the report is no report: {where}: {first['msg']}")
        return Verdict(label="NO ANSWER", reason=reason, report=report)
    return Verdict(label="PASS", report=report)


def _unframe(stdout: bytes, launch_id: str) -> tuple[bytes, bytes, int]:
    """The self-test's own output, its report and its exit status."""
    body, newline, end = stdout.rstrip(b"\n").rpartition(b"\n")
    found = re.fullmatch(rb"%s %s (\d{1,3})" % (END_MARK.encode(), launch_id.encode()), end)
    if not newline or not found:
        raise _Unbelievable("the output ends before the self-test did")
    mark = rb"(?m)^%s %s\n" % (REPORT_MARK.encode(), launch_id.encode())
    marks = list(islice(re.finditer(mark, body + b"\n"), 2))
    if len(marks) != 1:
        raise _Unbelievable(f"{'more than one' if marks else 'no'} report in the output")
    return body[: marks[0].start()], body[marks[0].end() :], int(found[1])


def _refused(line: bytes, report_text: bytes, status: int) -> Verdict:
    """The self-test's own no; its report is kept where it can be read."""
    said = one_line(line)
    label: Label = "NO ANSWER"
    reason = f"exit {status}, but the last line is {said!r}"
    if status == 1 and said.startswith("SELFTEST FAIL"):
        label, reason = "FAIL", said
    if status == 2 and said.startswith("SELFTEST NOT RUN"):
        label, reason = "NOT RUN", said
    verdict = Verdict(label=label, reason=one_line(reason))
    try:
        found = _parse(report_text)
        verdict.gates = Report.model_validate(found).gates
        verdict.report = found
    except (_Unbelievable, ValidationError):
        pass
    return verdict


def _parse(text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key twice")
        return found

    if not text.strip():
        raise _Unbelievable("no report")
    if len(text) > REPORT_LIMIT:
        raise _Unbelievable(f"a report of more than {REPORT_LIMIT} bytes")
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise _Unbelievable(f"the report is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise _Unbelievable("the report is not a JSON object")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _must_match(report: Report, rank: RankPlan) -> None:
    """Raises _Unbelievable at the first thing that a pass of this rank would not say."""
    wanted = {
        "verdict": "PASS",
        "line": PASS_LINE,
        "gates": [],
        "level": "device",
        "complete": True,
        "runtime_key": rank.runtime_key,
        "argv_sha256": rank.argv_sha256,
        "env_sha256": rank.env_sha256,
    }
    for key, value in wanted.items():
        if (found := getattr(report, key)) != value:
            raise _Unbelievable(f"the report has {key} {found!r}, needed {value!r}")
    calls = [row for row in report.rows if not row.selection]
    if not calls:
        raise _Unbelievable("the report has no row that a device ran")
    if not all(row.ok for row in report.rows) or any(row.error_norm is None for row in calls):
        raise _Unbelievable("the report says PASS over a row that failed or was not run")
