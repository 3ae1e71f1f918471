# SPDX-License-Identifier: Apache-2.0
"""The whole path on real containers and real SSH: gate, stage, start, receipt."""

import json

import pytest

pytestmark = pytest.mark.slow


def test_gate_stage_start_receipt(world):
    """Every rank's own argv is gated in that rank's image, then all are staged and started."""
    plan = world.plan()
    staged = world.folder / "staged"
    script = ("sh", "-c", 'echo "$1" >>"$2"', "sh")
    ranks = [
        rank.model_copy(update={"staging": ((*script, str(rank.rank), str(staged)),)})
        for rank in plan.ranks
    ]
    plan = world.plan_of(*ranks)
    done = world.run("launch", plan)
    assert done.returncode == 0, done.stdout + done.stderr
    argvs = sorted("sm120-standin:1 " + " ".join(rank.argv) for rank in plan.ranks)
    assert sorted(world.witnessed("gate")) == argvs
    assert sorted(world.witnessed("engine")) == argvs
    assert sorted(staged.read_text().split()) == ["0", "1", "2", "3"]
    assert len(world.containers()) == 4
    [kept] = world.kept()
    assert kept == json.loads(done.stdout)
    assert (kept["kind"], kept["result"]) == ("launch", "started")
    assert [rank["verdict"] for rank in kept["ranks"]] == ["PASS"] * 4
    assert [tuple(rank["argv"]) for rank in kept["ranks"]] == [rank.argv for rank in plan.ranks]
    assert [rank["report"]["argv_sha256"] for rank in kept["ranks"]] == [
        rank.argv_sha256 for rank in plan.ranks
    ]
    again = world.run("launch", plan)
    assert again.returncode == 2
    assert "runs already" in again.stderr
    assert len(world.containers()) == 4
    stopped = world.run("stop", plan)
    assert stopped.returncode == 0
    assert world.containers() == []
    assert [kept["result"] for kept in world.kept()] == ["started", "stopped"]
