# SPDX-License-Identifier: Apache-2.0
"""gate, launch, stop and receipts as commands: exit codes, JSON, what a person reads."""

import json
import sys

import pytest

from sm120_launch import cli, cli_launch
from sm120_launch.process import Outcome
from sm120_launch.receipt import Folder


@pytest.fixture
def plan(make_plan, make_rank, tmp_path):
    """A plan's file, as `plan --json` prints it."""
    found = json.loads(make_plan(make_rank(0), make_rank(1)).model_dump_json())
    for rank in found["ranks"]:
        rank["commands"] = {"gate": ["x"]}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(found))
    return path


@pytest.fixture
def command(monkeypatch, capsys, tmp_path, fake_hosts):
    """``command(*arguments)`` gives exit code, standard output and standard error."""
    monkeypatch.setenv("SM120_LAUNCH_RECEIPTS", str(tmp_path / "receipts"))
    for console in (cli.out, cli.err, cli_launch.out, cli_launch.err):
        monkeypatch.setattr(console, "width", 200)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["sm120-launch", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return run


def test_launch_and_its_receipt(command, plan):
    code, out, err = command("launch", plan)
    assert code == 0
    assert "PASS" in out and "started" in out
    assert "rank 1 on host2: PASS" in err
    code, out, _ = command("receipts", "--json")
    [row] = json.loads(out)["receipts"]
    assert (code, row["kind"], row["state"]) == (0, "launch", "started")
    code, out, _ = command("receipts", "show", row["id"], "--json")
    assert (code, json.loads(out)["id"]) == (0, row["id"])
    code, out, _ = command("receipts", "show", row["id"])
    assert code == 0 and "rank 0 on host1, gate" in out and "SELFTEST PASS" in out
    code, out, _ = command("receipts")
    assert code == 0 and row["id"] in out and "started" in out


def test_diff_of_two_receipts(command, plan, tmp_path):
    """A host on which the experts fall to another kernel, by an older nvcc."""
    ids = []
    for _ in range(2):
        code, out, _ = command("gate", plan, "--json")
        ids.append(json.loads(out)["id"])
    assert command("receipts", "diff", *ids)[:2] == (0, "the same\n")
    path = tmp_path / "receipts" / f"{ids[1]}.json"
    found = json.loads(path.read_text())
    found["ranks"][1]["report"]["rows"] += [
        {"call": "experts", "layer_kind": "backbone", "route": "[MARLIN]", "ok": True}
        | {"selection": True, "tokens": 0}
    ]
    found["ranks"][1]["report"]["facts"] = {"toolchain": {"value": {"nvcc": "12.8"}}}
    path.write_text(json.dumps(found))
    code, out, _ = command("receipts", "diff", *ids)
    assert code == 1 and "experts (backbone)" in out and "[MARLIN]" in out
    code, out, _ = command("receipts", "diff", *reversed(ids), "--json")
    rank = found["ranks"][1]["rank"]
    assert (code, json.loads(out)) == (
        1,
        [
            {"rank": rank, "what": what, "left": left, "right": "(absent)"}
            for what, left in (
                ("experts (backbone)", "[MARLIN]"),
                ("fact toolchain", '{"nvcc": "12.8"}'),
            )
        ],
    )


def test_json_is_all_of_standard_output(command, plan):
    code, out, err = command("gate", plan, "--json")
    assert (code, json.loads(out)["result"]) == (0, "passed")
    assert "rank 0 on host1: PASS" in err


def test_no_is_exit_1(command, plan, fake_hosts):
    fake_hosts.says["gate", 1] = Outcome(None, problem="lost", detail="gone [bold]")
    code, out, _ = command("launch", plan)
    assert code == 1
    assert "refused: 1 of 2 did not pass; rank 1 on host2: NO ANSWER, lost: gone [bold]" in out


def test_second_launch_is_exit_2(command, plan):
    command("launch", plan)
    code, out, err = command("launch", plan)
    assert (code, out) == (2, "")
    assert err.startswith("error: profile p runs already") and "Traceback" not in err
    assert command("stop", plan)[0] == 0
    assert command("launch", plan)[0] == 0


def test_interrupted_is_told(command, plan, tmp_path, fake_hosts):
    folder = Folder(tmp_path / "receipts")
    fake_hosts.says["gate", 0] = lambda *rest: 1 / 0
    with pytest.raises(ZeroDivisionError):
        command("gate", plan)
    [[done], _] = folder.of("p")
    folder.update(done.model_copy(update={"result": None}))  # as a kill would leave it
    del fake_hosts.says["gate", 0]
    assert json.loads(command("receipts", "--json")[1])["receipts"][0]["state"] == "interrupted"
    assert "at stage gate; the launcher was killed" in command("receipts")[1]
    code, out, _ = command("gate", plan)
    assert code == 0
    assert f"{done.id} was interrupted, its launcher killed; what it left is removed." in out


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "is no plan"),
        ("{}", "is no plan"),
        ("[]", "is no plan"),
        ('{"ranks": [1]}', "is no plan"),
        ('{"ranks": []}', "Field required"),
        ("[" * 10_000, "is no plan"),
        ("\x00", "is no plan"),
    ],
)
def test_hostile_plans(command, tmp_path, text, said):
    path = tmp_path / "bad.json"
    path.write_text(text)
    code, out, err = command("launch", path)
    assert (code, out) == (2, "") and said in err and "Traceback" not in err


def test_files_that_are_not_there(command, tmp_path):
    for name in ("none.json", "none.toml"):
        code, _, err = command("gate", tmp_path / name)
        assert code == 2 and name in err and "Traceback" not in err
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    assert command("gate", tmp_path / "bytes.json")[0] == 2


def test_a_damaged_receipt_is_listed(command, plan, tmp_path):
    command("gate", plan)
    (tmp_path / "receipts/20260101-000000-000000-000000.json").write_text("{")
    rows = json.loads(command("receipts", "--json")[1])["receipts"]
    assert sorted(row["state"] for row in rows) == ["damaged", "passed"]
    code, out, _ = command("receipts")
    assert code == 0 and "damaged" in out and "passed" in out
    assert command("gate", plan)[0] == 0


PROFILE = """\
schema = 1
name = "p"
recipe = "no-recipe.whl"
model = "/models/v41"
[defaults]
runtime = "podman"
devices = []
[[ranks]]
transport = { kind = "local" }
[[ranks]]
transport = { kind = "ssh", address = "h2", known_hosts = "known" }
"""


def test_stop_needs_neither_recipe_nor_images(command, plan, tmp_path, fake_hosts):
    """Nor receipts: the profile says where to look."""
    path = tmp_path / "profile.toml"
    path.write_text(PROFILE)
    fake_hosts.says["cleanup", 1] = lambda rank: Outcome(
        0 if rank.transport.known_hosts == str(tmp_path / "known") else 1
    )
    assert command("gate", path)[0] == 2
    code, out, _ = command("stop", path)
    assert (code, fake_hosts.calls) == (0, [("cleanup", 0), ("cleanup", 1)])
    assert "stopped" in out


def test_stop_tells_of_a_rank_that_has_moved(command, plan, tmp_path, fake_hosts):
    command("launch", plan)
    path = tmp_path / "profile.toml"
    path.write_text(PROFILE)
    code, out, err = command("stop", path)
    assert (code, fake_hosts.running) == (0, set())
    assert "rank 1 on host2: cleaning up" in err and "rank 1 on h2: cleaning up" in err
    assert "host2" in out and "h2" in out


def test_receipts_that_are_not_there(command):
    assert command("receipts") == (0, *command("receipts")[1:])
    assert json.loads(command("receipts", "--json")[1])["receipts"] == []
    for name in ("nonsense", "20261130-200000-000000-000000"):
        code, _, err = command("receipts", "show", name)
        assert code == 2 and "sm120-launch receipts lists them" in err


@pytest.mark.parametrize("name", ["gate", "launch", "stop"])
def test_help(command, name):
    """Enough to work from: what it does, what it takes, what its end means."""
    code, out, _ = command(name, "--help")
    said = " ".join(out.split())
    assert code == 0 and "--json" in said and "--receipts" in said
    assert "Exit codes: 0 " in said and ", 1 " in said and ", 2 bad input" in said
    assert "A profile in TOML" in said and "SM120_LAUNCH_RECEIPTS" in said


def test_help_of_all(command):
    code, out, _ = command("--help")
    said = " ".join(out.split())
    assert code == 0 and "Exit codes: 0 done, 1 the gate or a start said no, 2 bad" in said
    assert "docs/launching.md" in said


def test_commands_are_there_once():
    functions = [command.callback.__name__ for command in cli.app.registered_commands]
    groups = [group.name for group in cli.app.registered_groups]
    assert sorted(functions) == ["gate", "launch", "plan_command", "stop"]
    assert sorted(groups) == ["image", "receipts"]
