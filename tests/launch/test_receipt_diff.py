# SPDX-License-Identifier: Apache-2.0
"""What two receipts say differently; their reports are untrusted."""

import pytest

from sm120_launch import receipt
from sm120_launch.receipt import RankRecord, Receipt
from sm120_launch.receipt_diff import ABSENT, differences


def made(*reports):
    fields = {"where": "", "runtime": "venv", "image": None, "argv": [], "argv_sha256": ""}
    ranks = [
        RankRecord(rank=n, host=f"h{n}", env_sha256="", env=[], report=report, **fields)
        for n, report in enumerate(reports)
    ]
    names = {"kind": "gate", "profile": "p", "profile_key": "k", "runtime_key": "r"}
    return Receipt(id=receipt.new_id(), begun=receipt.now(), ranks=ranks, **names)


def report(route="DEEPGEMM_MXFP4", ok=True, tokens=0, facts=None):
    row = {"call": "experts", "layer_kind": "backbone", "route": route, "ok": ok}
    row |= {"selection": True, "tokens": tokens, "reason": "because"}
    ran = {"call": "attention", "route": "FlashInfer decode", "ok": True, "error_norm": 0.1}
    return {"rows": [row, ran], "facts": facts or {}}


def test_the_same():
    assert differences(made(report(), report()), made(report(), report())) == []


def test_another_kernel_on_one_rank():
    [found] = differences(made(report(), report()), made(report(), report("MARLIN")))
    assert (found.rank, found.what) == (1, "experts (backbone)")
    assert (found.left, found.right) == ("DEEPGEMM_MXFP4", "MARLIN")


def test_a_refusal_differs_from_a_choice():
    [found] = differences(made(report()), made(report(ok=False)))
    assert found.right == "DEEPGEMM_MXFP4; refused: because"


def test_token_counts_are_apart():
    found = differences(made(report(tokens=32)), made(report(tokens=33)))
    assert [(one.left, one.right) for one in found] == [
        ("DEEPGEMM_MXFP4", ABSENT),
        (ABSENT, "DEEPGEMM_MXFP4"),
    ]


def test_facts():
    left, right = ({"sms": {"value": n, "source": "x"}} for n in (48, 188))
    [found] = differences(made(report(facts=left)), made(report(facts=right)))
    assert (found.what, found.left, found.right) == ("fact sms", "48", "188")


def test_a_rank_that_one_lacks():
    assert {d.rank for d in differences(made(report()), made(report(), report()))} == {1}


@pytest.mark.parametrize(
    "odd", [None, {}, {"rows": 3}, {"rows": [1, None, {"selection": 1}]}, {"facts": []}], ids=repr
)
def test_odd_reports_say_nothing(odd):
    assert differences(made(odd), made(None)) == []
