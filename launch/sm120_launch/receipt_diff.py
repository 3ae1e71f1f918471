# SPDX-License-Identifier: Apache-2.0
"""Two receipts compared: which implementation each op selected, and the facts it rests on.

When one host behaves differently: its toolchain, its GPU or a switch made vLLM choose
another kernel, and the self-test's report, which a receipt keeps, has the choice.
"""

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from sm120_launch.receipt import RankRecord, Receipt

ABSENT = "(absent)"


class Difference(BaseModel):
    """One thing that two ranks' reports say differently.

    Attributes:
        rank: the rank's number, in both.
        what: the op, with layers and tokens where it depends on them; or the fact.
        left, right: what each says; ``ABSENT`` where it says nothing.
    """

    rank: int
    what: str
    left: str
    right: str


def differences(left: Receipt, right: Receipt) -> list[Difference]:
    """What differs, rank by rank; a rank that one lacks differs in everything."""
    found = []
    ranks = {record.rank for receipt in (left, right) for record in receipt.ranks}
    for rank in sorted(ranks):
        one, other = (_said(receipt, rank) for receipt in (left, right))
        for what in sorted(one.keys() | other.keys()):
            a, b = one.get(what, ABSENT), other.get(what, ABSENT)
            if a != b:
                found.append(Difference(rank=rank, what=what, left=a, right=b))
    return found


def _said(receipt: Receipt, rank: int) -> dict[str, str]:
    records = [record for record in receipt.ranks if record.rank == rank]
    return dict(_lines(records[0])) if records else {}


def _lines(record: RankRecord) -> Iterator[tuple[str, str]]:
    """What a rank's report says, by what it says it of. The report is untrusted."""
    report = record.report or {}
    rows = report.get("rows")
    for row in rows if isinstance(rows, list) else ():
        if not isinstance(row, dict) or row.get("selection") is not True:
            continue
        tokens = f", {row.get('tokens')} tokens" if row.get("tokens") else ""
        what = f"{row.get('call')} ({row.get('layer_kind')}{tokens})"
        refused = "" if row.get("ok") else f"; refused: {row.get('reason')}"
        yield what, f"{row.get('route')}{refused}"
    facts = report.get("facts")
    for name, fact in facts.items() if isinstance(facts, dict) else ():
        value: Any = fact.get("value") if isinstance(fact, dict) else fact
        yield f"fact {name}", json.dumps(value, sort_keys=True, ensure_ascii=False)
