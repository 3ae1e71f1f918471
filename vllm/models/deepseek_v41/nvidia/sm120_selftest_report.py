# SPDX-License-Identifier: Apache-2.0
"""The self-test's report: what was found, the verdict, and the line that says it.

``RULES PASS``, ``RULES FAIL: <gates>``, ``SELFTEST PASS``, ``SELFTEST FAIL: <gates>``
or ``SELFTEST NOT RUN: <why>``; exit 0, 1, 0, 1, 2. A narrowed scope never passes as a
whole one: ``complete`` says which it was.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

SCHEMA = 1

# What the rules and the device can be asked about, by the rows' ``call``.
CALLS = (
    "attention",
    "indexer",
    # The ops of sm120_op_plan.py: on the device only.
    "hc_prenorm",
    "hc_fused",
    "mxfp8",
    "experts",
    "kv_insert",
    "compressor",
    "indexer_store",
    "prefill_logits",
    "topk",
    "candidates",
    "sampler",
)

# Gates that end in NOT RUN: nothing about a kernel can be said.
NOT_RUN_GATES = frozenset({"arguments", "checkpoint", "device"})

# The environment that changes which kernels run or which shapes they get: the fork's
# own switches, vLLM's, DeepGEMM's and FlashInfer's. Nothing else is read, so no secret
# can end up in a digest.
_ENVIRONMENT = (
    "VLLM_SM120_",
    "VLLM_KV_CACHE_",
    "VLLM_USE_",
    "VLLM_ENABLE_",
    "VLLM_MXFP8_",
    "VLLM_MOE_",
    "VLLM_DEEP_GEMM_",
    "VLLM_BATCH_INVARIANT",
    "DG_",
    "FLASHINFER_",
)


class Refusal(Exception):
    """Stops the self-test at one gate.

    Args:
        gate: the gate.
        why: found, needed, what to do, in one line.
    """

    def __init__(self, gate: str, why: str) -> None:
        super().__init__(why)
        self.gate = gate
        self.why = " ".join(why.split())


@dataclass(frozen=True)
class Fact:
    """One figure and where it was read; ``assumed`` says why it could not be."""

    value: Any
    source: str
    assumed: str | None = None


@dataclass
class Row:
    """One call that serving will make. Pages are 0 where there is no such cache.

    With ``selection`` it says which implementation (``route``) an op (``call``) has,
    and no device runs it; figures that do not apply are 0.
    """

    layer_kind: str
    layers: list[int]
    call: str
    tokens: int
    heads: int
    topk: int
    page: int
    extra_topk: int
    extra_page: int
    states: int
    route: str
    ok: bool = True
    gate: str | None = None
    reason: str | None = None
    error_norm: float | None = None
    selection: bool = False


@dataclass
class Report:
    """What the self-test found so far.

    Attributes:
        argv: what follows ``vllm serve``.
        rules_only: no device was asked.
        complete: nothing was narrowed.
        rows: calls, which a device runs at level ``device``.
        selection: which implementation each op has; rows of the report too.
        env_sha256: of the environment as the report was begun: while it builds its
            configuration, vLLM sets switches of its own, and those follow from argv and
            checkpoint.
    """

    argv: Sequence[str]
    rules_only: bool
    complete: bool
    env_sha256: str = field(default_factory=lambda: digest(environment(os.environ)))
    facts: dict[str, Fact] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    selection: list[Row] = field(default_factory=list)
    warnings: dict[str, str] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    not_run: str | None = None

    def gates(self) -> list[str]:
        """The gates that failed, sorted."""
        rows = [*self.rows, *self.selection]
        found = {row.gate for row in rows if not row.ok and row.gate}
        return sorted(found | {refusal.gate for refusal in self.refusals})

    def verdict(self) -> str:
        """``PASS``, ``FAIL`` or ``NOT_RUN``."""
        if self._why_not_run() or NOT_RUN_GATES & set(self.gates()):
            return "NOT_RUN"
        return "FAIL" if self.gates() else "PASS"

    def _why_not_run(self) -> str | None:
        """Also where nothing failed and not everything ran: that is no pass."""
        if self.not_run or self.gates():
            return self.not_run
        if not self.rows:
            return "no row was judged"
        if not self.rules_only and any(row.error_norm is None for row in self.rows):
            return "a row was not run on the device"
        return None

    def line(self) -> str:
        """The last line of the output."""
        verdict = self.verdict()
        if verdict == "NOT_RUN":
            why = self._why_not_run() or self.refusals[0].why
            return f"SELFTEST NOT RUN: {why}"
        level = "RULES" if self.rules_only else "SELFTEST"
        if verdict == "PASS":
            return f"{level} PASS"
        return f"{level} FAIL: {', '.join(self.gates())}"

    def exit_code(self) -> int:
        """0 pass, 1 fail, 2 not run."""
        return {"PASS": 0, "FAIL": 1, "NOT_RUN": 2}[self.verdict()]

    def to_json(self) -> dict[str, Any]:
        """The report as it is written."""
        return {
            "schema": SCHEMA,
            "runtime_key": runtime_key(),
            "argv_sha256": digest(list(self.argv)),
            "env_sha256": self.env_sha256,
            "complete": self.complete,
            "level": "rules" if self.rules_only else "device",
            "verdict": self.verdict(),
            "line": self.line(),
            "gates": self.gates(),
            "warnings": sorted(self.warnings),
            "messages": {
                "refusals": [{"gate": r.gate, "why": r.why} for r in self.refusals],
                "warnings": self.warnings,
            },
            "facts": {name: asdict(fact) for name, fact in self.facts.items()},
            "rows": [asdict(row) for row in [*self.rows, *self.selection]],
        }

    def write(self, path: Path) -> None:
        """Writes the report beside ``path``, then renames it.

        Raises:
            OSError: the folder cannot be written.
        """
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False, default=str)
        data = (text + "\n").encode("utf-8", "backslashreplace")
        number, beside = tempfile.mkstemp(dir=path.parent, prefix=".selftest-")
        try:
            with open(number, "wb") as file:
                file.write(data)
            os.replace(beside, path)
        except BaseException:
            os.unlink(beside)
            raise


def digest(value: Any) -> str:
    """SHA-256 of a value as JSON, UTF-8, no spaces, no ASCII escapes, keys sorted."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that changes what runs."""
    return {k: v for k, v in given.items() if k.startswith(_ENVIRONMENT)}


def runtime_key() -> str | None:
    """The runtime key of the recipe that the installed tree carries, or None."""
    found = util.find_spec("vllm")
    if found is None or found.origin is None:
        return None
    try:
        path = Path(found.origin).parent / "sm120_recipe.json"
        return str(json.loads(path.read_text(encoding="utf-8"))["runtime_key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
