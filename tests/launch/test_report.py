# SPDX-License-Identifier: Apache-2.0
"""Verdicts on a gate's output: one kind passes, whatever else is there."""

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sm120_launch import report
from sm120_launch.process import Outcome
from sm120_launch.receipt import Receipt, kept

ID = "20261130-200000-000000-000000"


@pytest.fixture
def rank(make_rank):
    return make_rank()


def good(rank, **changes):
    """The report of a pass, as design and self-test have it."""
    return {
        "schema": 1,
        "runtime_key": rank.runtime_key,
        "argv_sha256": rank.argv_sha256,
        "env_sha256": rank.env_sha256,
        "complete": True,
        "level": "device",
        "verdict": "PASS",
        "line": "SELFTEST PASS",
        "gates": [],
        "warnings": ["eager"],
        "facts": {"capability": {"value": "12.0", "source": "x", "assumed": None}},
        "rows": [{"layer_kind": "ratio 1", "ok": True, "gate": None, "error_norm": 1e-4}],
        **changes,
    }


def framed(own="SELFTEST PASS\n", body=None, status=0, launch_id=ID):
    text = body if isinstance(body, str) else json.dumps(body)
    return f"{own}\nSM120-REPORT {launch_id}\n{text}\nSM120-END {launch_id} {status}\n".encode()


def judge(rank, stdout, exit_code=0, **more):
    return report.judge(Outcome(exit_code, stdout=stdout, **more), rank, ID)


def test_pass(rank):
    verdict = judge(rank, framed("warning eager: x\nSELFTEST PASS\n", good(rank)))
    assert (verdict.label, verdict.reason) == ("PASS", "")
    assert verdict.report == good(rank)


CHANGES = {
    "schema": 2,
    "runtime_key": None,
    "argv_sha256": "0" * 64,
    "env_sha256": "0" * 64,
    "complete": False,
    "level": "rules",
    "verdict": "FAIL",
    "line": "SELFTEST PASS ",
    "gates": ["memory"],
    "rows": [],
}


@pytest.mark.parametrize("key", CHANGES)
def test_each_change_of_the_report_is_a_no(rank, key):
    assert judge(rank, framed(body=good(rank, **{key: CHANGES[key]}))).label == "NO ANSWER"
    without = good(rank)
    del without[key]
    assert judge(rank, framed(body=without)).label == "NO ANSWER"


@pytest.mark.parametrize("value", [1, "true", None, [True]])
def test_complete_is_the_boolean(rank, value):
    assert not judge(rank, framed(body=good(rank, complete=value))).passed


@pytest.mark.parametrize(
    "own",
    [
        "",
        "selftest pass\n",
        "SELFTEST PASS \n",
        "SELFTEST PASS\nmore\n",
        "RULES PASS\n",
        "xSELFTEST PASS\n",
        "SELFTEST PASS\r\n",
        "SELFTEST PASS: no\n",
        "\x1b[32mSELFTEST PASS\x1b[0m\n",
    ],
)
def test_last_line_is_exact(rank, own):
    assert not judge(rank, framed(own, good(rank))).passed


SELECTED = {"call": "experts", "ok": True, "error_norm": None, "selection": True}
RAN = {"call": "indexer", "ok": True, "error_norm": 1e-4, "selection": False}


def test_selected_ops_need_no_device(rank):
    body = good(rank, rows=[RAN, SELECTED])
    verdict = judge(rank, framed(body=body))
    assert (verdict.label, verdict.report) == ("PASS", body)


@pytest.mark.parametrize(
    "rows",
    [
        [SELECTED],
        [RAN, SELECTED | {"ok": False}],
        [RAN, SELECTED | {"selection": False}],
        [RAN, SELECTED | {"selection": "yes"}],
    ],
    ids=["nothing ran", "a refused op", "a call that did not run", "no truth value"],
)
def test_a_selection_is_no_call_that_ran(rank, rows):
    assert judge(rank, framed(body=good(rank, rows=rows))).label == "NO ANSWER"


@pytest.mark.parametrize(
    "exit_code, status", [(1, 0), (0, 1), (1, 1), (2, 2), (None, 0), (137, 137)]
)
def test_both_exit_statuses_count(rank, exit_code, status):
    assert not judge(rank, framed(body=good(rank), status=status), exit_code).passed


@pytest.mark.parametrize("problem", ["timed out", "oversized", "cancelled", "lost", "not started"])
def test_a_problem_of_the_way_is_a_no(rank, problem):
    verdict = judge(rank, framed(body=good(rank)), problem=problem, detail="why")
    assert (verdict.label, verdict.reason) == ("NO ANSWER", f"{problem}: why")


@pytest.mark.parametrize("status, label", [(0, "PASS"), (1, "NO ANSWER"), (137, "NO ANSWER")])
def test_a_whole_answer_whose_end_was_not_heard(rank, status, label):
    whole = framed(body=good(rank), status=status)
    assert judge(rank, whole, None, problem="lingers").label == label
    assert not judge(rank, whole + b"more\n", None, problem="lingers").passed


def test_frame_of_another_launch(rank):
    other = framed(body=good(rank), launch_id="20261130-200000-000000-000001")
    assert not judge(rank, other).passed
    assert judge(rank, other + framed(body=good(rank))).passed


@pytest.mark.parametrize("cut", [1, 3, 10, 100, 300])
def test_cut_output(rank, cut):
    whole = framed(body=good(rank)).rstrip(b"\n")
    assert not judge(rank, whole[:-cut]).passed


def test_two_frames(rank):
    assert not judge(rank, framed(body=good(rank)) + framed(body=good(rank))).passed


@pytest.mark.parametrize(
    "body",
    [
        "",
        "null",
        "[]",
        "{",
        "[" * 100_000,
        '{"schema": NaN}',
        '{"a": 1} {"b": 2}',
        '{"schema": 1, "schema": 1}',
        "9" * 10_000,
    ],
)
def test_hostile_reports(rank, body):
    verdict = judge(rank, framed(body=body))
    assert verdict.label == "NO ANSWER" and len(verdict.reason) <= 300


def test_own_no_is_told(rank):
    body = good(rank, verdict="FAIL", line="SELFTEST FAIL: heads", gates=["heads"])
    verdict = judge(rank, framed("SELFTEST FAIL: heads\n", body, 1), 1)
    assert (verdict.label, verdict.reason) == ("FAIL", "SELFTEST FAIL: heads")
    assert verdict.gates == ["heads"]
    verdict = judge(rank, framed("SELFTEST NOT RUN: no GPU here\n", "", 2), 2)
    assert (verdict.label, verdict.reason) == ("NOT RUN", "SELFTEST NOT RUN: no GPU here")


def test_no_with_the_wrong_status_is_no_answer(rank):
    assert judge(rank, framed("SELFTEST FAIL: x\n", "", 2), 2).label == "NO ANSWER"
    assert judge(rank, framed("SELFTEST NOT RUN: x\n", "", 1), 1).label == "NO ANSWER"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(own=st.binary(max_size=200), body=st.binary(max_size=200), status=st.integers(0, 255))
@example(own=b"SELFTEST PASS", body=b"{}", status=0)
def test_any_bytes_are_a_no_that_can_be_kept(own, body, status):
    rank = _any_rank()
    stdout = b"%s\nSM120-REPORT %s\n%s\nSM120-END %s %d\n" % (
        own,
        ID.encode(),
        body,
        ID.encode(),
        status,
    )
    verdict = judge(rank, stdout, status)
    assert not verdict.passed
    _can_be_kept(verdict)


@settings(deadline=None)
@given(key=st.sampled_from(sorted(CHANGES)), value=_JSON)
def test_any_json_in_a_field(key, value):
    rank = _any_rank()
    body = good(rank)
    if body[key] == value and type(body[key]) is type(value):
        return
    verdict = judge(rank, framed(body={**body, key: value}))
    _can_be_kept(verdict)
    if key != "rows":
        assert not verdict.passed


def _any_rank():
    from sm120_launch import keys
    from sm120_launch.plan import LocalTransport, RankPlan

    argv = ("/m",)
    return RankPlan(
        rank=0,
        profile="p",
        host="h",
        transport=LocalTransport(),
        runtime="venv",
        venv="/v",
        runtime_key="k",
        argv=argv,
        argv_sha256=keys.argv_sha256(argv),
        env={},
        env_sha256=keys.env_sha256({}),
        devices=(),
        checkpoint="/m",
        model="/m",
    )


def _can_be_kept(verdict):
    receipt = Receipt(
        id=ID,
        kind="gate",
        profile="p",
        profile_key="",
        runtime_key="",
        begun="",
        why=verdict.reason,
    )
    receipt.ranks = []
    receipt.model_extra["report"] = kept(verdict.report)
    assert json.loads(receipt.text().encode("utf-8"))["why"] == verdict.reason


@pytest.mark.parametrize(
    "raw, shown",
    [
        (b"a\x1b[31mred\x1b[0m", "ared"),
        (b"\x1b]0;title\x07x", "x"),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        (b"\x1bPq#0;2\x1b\\x", "x"),
        ("\x9b2Jx".encode(), "x"),
        ("a\u202eb\u2066c".encode(), "abc"),
        (b"a\rb\r\nc\x00\x08", "a\nb\nc"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        ("größe\t→".encode(), "größe\t→"),
        (b"\x1b[", ""),
        (b"\x1b]no end\nSELFTEST FAIL", "no end\nSELFTEST FAIL"),
    ],
)
def test_plain(raw, shown):
    assert report.plain(raw) == shown


@pytest.mark.parametrize("raw", [b"\x1b]", b"\xc2\x9d", b"\x1b[", b"\xc2\x9b0", b"\n", b"a\n"])
def test_plain_takes_linear_time(raw):
    begun = time.monotonic()
    report.plain(raw * (4 << 20))
    assert time.monotonic() - begun < 30


@given(st.text())
def test_plain_leaves_no_control_and_is_stable(text):
    shown = report.plain(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 for c in shown)
    assert report.plain(shown) == shown
    shown.encode("utf-8")
