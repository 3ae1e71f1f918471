# SPDX-License-Identifier: Apache-2.0
"""Pins the command line: exit codes, one message an error, and what goes to which stream."""

import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fork import ROOT, ForkError, capacity, cli, fetch, geometry, pin, recipe, wheel
from fork.edits import SetReturn

RUN, NEW = "vllm/worker/run.py", "vllm/new.py"
PRISTINE, PATCHED = "def sizes():\n    return [128]\n", "def sizes():\n    return [64]\n"

COMMANDS = {
    "status": ["--base", "--members", "--json"],
    "apply": ["--members"],
    "revert": ["--members"],
    "verify": [],
    "diff": ["--base", "--members"],
    "branch": ["--base", "--members"],
    "export": ["--base", "--members", "--upstream", "--no-tests"],
    "wheel": ["--base", "--platform", "--out"],
    "recipe": ["--base", "--members", "--json"],
    "geometry": ["--base", "--block-size", "--json", "--plot"],
    "capacity": ["--memory-gib", "--base", "--lengths", "--json", "--plot"],
    "probe": [
        *("--base", "--all-bases", "--members", "--tokens", "--calls", "--json", "--rules-only")
    ],
    "rebase": ["--latest", "--tree", "--variants-of", "--text-only", "--json", "--write"],
    "patches": [],
}


@pytest.fixture
def run():
    """Runs a command in this process; an error it raises is raised here."""

    def invoke(*arguments):
        command = [str(a) for a in arguments]
        return CliRunner().invoke(cli.app, command, catch_exceptions=False)

    return invoke


@pytest.fixture
def root(tmp_path, write_tree):
    """The miniature tree, unpatched."""
    folder = tmp_path / "site"
    folder.mkdir()
    write_tree(folder)
    return folder


@pytest.fixture(autouse=True)
def messages(monkeypatch):
    """What is written to the error console, in full width."""
    console = Console(file=io.StringIO(), width=500)
    monkeypatch.setattr(cli, "err", console)
    monkeypatch.setattr(cli, "out", Console(width=500))
    return console.file.getvalue


@pytest.fixture(autouse=True)
def small(monkeypatch, tiny_pin, make_patch, use_series, tmp_path):
    """A series of two patches and a pin for the miniature tree."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / NEW).write_bytes(b"NEW = 1\n")
    monkeypatch.setattr(pin, "load", lambda: tiny_pin)
    edit = SetReturn(RUN, "sizes", old="[128]", new="[64]")
    return use_series(
        make_patch("p_run", edit, title="[Attention] [a] title", retire="at [once]"),
        make_patch("p_new", modules=(NEW,)),
    )


def plain(text):
    """Without colours and boxes, white space as one blank."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


@pytest.mark.parametrize(("command", "options"), COMMANDS.items())
def test_help(run, command, options):
    done = run(command, "--help")
    shown = plain(done.stdout)
    assert done.exit_code == 0
    assert set(re.findall(r"(?<= )--[a-z-]+", shown)) - {"--help"} >= set(options)
    assert f"fork {command}" in shown


def test_help_lists_every_command(run):
    done = run("--help")
    assert done.exit_code == 0
    assert all(f" {name} " in plain(done.stdout) for name in COMMANDS)
    listed = {c.name or c.callback.__name__ for c in cli.app.registered_commands}
    assert listed == set(COMMANDS)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["status", "--nonsense"],
        ["apply"],
        ["verify"],
        ["geometry", "--block-size", "many"],
        ["export", "out", "--upstream", "--members", "p_run"],
        ["capacity"],
        ["capacity", "--memory-gib", "much"],
        ["capacity", "--memory-gib", "1", "--lengths", "1,x"],
        [],
    ],
)
def test_bad_arguments_exit_2(run, arguments):
    done = run(*arguments)
    assert done.exit_code == 2
    assert "Usage" in done.output


class TestTree:
    def test_status_apply_verify_revert(self, run, root, messages, snapshot):
        before = snapshot(root)
        done = run("apply", root)
        assert done.exit_code == 0
        assert done.stdout.splitlines() == sorted([RUN, NEW, recipe.PATH])
        assert "applied: 3 files" in messages()
        assert (root / RUN).read_text() == PATCHED
        assert run("verify", root).exit_code == 0
        assert f"verified {root}: vLLM 0.33.0" in messages()
        assert run("apply", root).stdout == ""
        assert messages().endswith("nothing to do\n")
        done = run("revert", root)
        assert done.exit_code == 0
        assert done.stdout.splitlines() == sorted([RUN, NEW, recipe.PATH])
        assert snapshot(root) == before

    def test_verify_names_each_fault(self, run, root, messages):
        run("apply", root)
        (root / NEW).write_bytes(b"NEW = 2\n")
        done = run("verify", root)
        assert done.exit_code == 1
        lines = done.stdout.splitlines()
        assert [line for line in lines if line.startswith("p_new: drift")]
        assert [line for line in lines if line.startswith(f"{NEW}: its hash")]
        assert len(lines) == 2
        assert "verified" not in messages()

    @pytest.mark.parametrize("chosen", ["p_run", " p_run ,p_run"])
    def test_members(self, run, root, chosen):
        run("apply", root, "--members", chosen)
        assert (root / RUN).read_text() == PATCHED
        assert not (root / NEW).exists()
        run("revert", root, "--members", "p_new")
        assert (root / RUN).read_text() == PATCHED

    @pytest.mark.parametrize("command", ["apply", "revert", "status", "recipe"])
    def test_unknown_member(self, run, root, command, snapshot):
        before = snapshot(root)
        arguments = [root] if command != "recipe" else []
        with pytest.raises(ForkError, match=r"not in the series: p_else.*p_run, p_new"):
            run(command, *arguments, "--members", "p_run,p_else")
        assert snapshot(root) == before

    @pytest.mark.parametrize("command", ["apply", "revert"])
    def test_a_wheel_is_not_edited(self, run, tmp_path, command):
        path = tmp_path / "v.whl"
        path.write_bytes(b"PK\x05\x06" + bytes(18))
        with pytest.raises(ForkError, match=r"is a wheel.*fork wheel"):
            run(command, path)
        assert path.stat().st_size == 22

    @pytest.mark.parametrize("command", ["apply", "revert", "verify", "status"])
    def test_nothing_there(self, run, tmp_path, command):
        with pytest.raises(ForkError, match="holds no vLLM"):
            run(command, tmp_path / "nowhere")

    def test_path_and_base(self, run, root):
        with pytest.raises(ForkError, match="PATH or --base, not both"):
            run("status", root, "--base", "0.33.0")


class TestStatus:
    def verdicts(self, done):
        return {n: row["verdict"] for n, row in json.loads(done.stdout)["patches"].items()}

    def test_json(self, run, root):
        done = run("status", root, "--json")
        assert done.exit_code == 0
        found = json.loads(done.stdout)
        assert (found["tree"], found["version"]) == (str(root), "0.33.0")
        assert self.verdicts(done) == {"p_run": "pending", "p_new": "pending"}
        run("apply", root, "--members", "p_new")
        done = run("status", root, "--json")
        assert self.verdicts(done) == {"p_run": "pending", "p_new": "applied"}
        assert list(found["patches"]) == ["p_run", "p_new"]

    def test_drift_exits_1(self, run, root):
        (root / RUN).write_text(PRISTINE.replace("[128]", "[256]"))
        assert run("status", root).exit_code == 1
        done = run("status", root, "--json")
        assert done.exit_code == 1
        assert self.verdicts(done) == {"p_run": "drift", "p_new": "pending"}
        [why] = json.loads(done.stdout)["patches"]["p_run"]["why"]
        assert RUN in why and "[256]" in why

    @pytest.mark.parametrize("found", ["[256]", "[wide]", "x[a]"])
    def test_the_table_says_why(self, run, root, found):
        """What was found is shown as it is, brackets too."""
        (root / RUN).write_text(PRISTINE.replace("[128]", found))
        [why] = json.loads(run("status", root, "--json").stdout)["patches"]["p_run"]["why"]
        assert found in why
        assert why in plain(run("status", root).stdout)

    def test_landed_is_not_an_error(self, run, root):
        (root / RUN).write_text(PATCHED)
        done = run("status", root, "--json")
        assert done.exit_code == 0
        assert self.verdicts(done)["p_run"] == "upstream"

    @pytest.mark.parametrize("name", ["site-2", "[old]"])
    def test_table(self, run, tmp_path, write_tree, name):
        """A path is shown as it is, brackets too."""
        root = tmp_path / name
        root.mkdir()
        write_tree(root)
        done = run("status", root)
        assert done.exit_code == 0
        assert f"{root}(vLLM0.33.0)" in plain(done.stdout).replace(" ", "")
        assert "p_run pending" in plain(done.stdout)

    def test_of_a_base(self, run, small_wheel):
        assert self.verdicts(run("status", "--json")) == {"p_run": "pending", "p_new": "pending"}


@pytest.fixture
def small_wheel(tmp_path, root, monkeypatch):
    """Makes the miniature tree the upstream wheel of every base and platform."""
    shutil.make_archive(str(tmp_path / "v"), "zip", root)
    path = (tmp_path / "v.zip").rename(tmp_path / "v.whl")
    monkeypatch.setattr(fetch, "upstream_wheel", lambda pin, base=None, platform=None: path)
    return path


def test_diff_applies(run, small_wheel, root):
    done = run("diff")
    assert done.exit_code == 0
    apply = ["git", "apply", "-p1", "-"]
    subprocess.run(apply, cwd=root, input=done.stdout_bytes, check=True)
    assert (root / RUN).read_text() == PATCHED
    assert (root / NEW).read_text() == "NEW = 1\n"
    assert run("diff", "--members", "p_new").stdout.count("diff --git") == 1


def test_branch_and_export(run, small_wheel, tmp_path):
    done = run("branch", tmp_path / "b")
    assert done.exit_code == 0
    log = ["git", "log", "--reverse", "--format=%H"]
    assert done.stdout == subprocess.check_output(log, cwd=tmp_path / "b", text=True)
    done = run("export", tmp_path / "e", "--members", "p_run")
    assert done.stdout.splitlines() == [str(p) for p in (tmp_path / "e").iterdir()]
    assert len(done.stdout.splitlines()) == 1


class TestWheel:
    @pytest.fixture
    def asked(self, monkeypatch, small_wheel):
        """What fork.wheel.build is asked for; it names its file by platform."""
        calls = []

        def build(the_pin, members, folder, base, platform, progress):
            progress(1)
            calls.append(([m.name for m in members], base, platform))
            return folder / f"v-{platform}.whl"

        monkeypatch.setattr(wheel, "build", build)
        return calls

    def test_prints_the_path_alone(self, run, asked, tmp_path):
        done = run("wheel", "--out", tmp_path, "--platform", "aarch64", "--base", "0.33.0")
        assert done.exit_code == 0
        assert done.stdout == f"{tmp_path}/v-aarch64.whl\n"
        assert asked == [(["p_run", "p_new"], "0.33.0", "aarch64")]

    def test_all_platforms(self, run, asked, tmp_path):
        done = run("wheel", "--out", tmp_path, "--platform", "all")
        assert done.stdout == f"{tmp_path}/v-x86_64.whl\n{tmp_path}/v-aarch64.whl\n"

    def test_this_machines_by_default(self, run, asked):
        assert run("wheel").stdout == "dist/v-None.whl\n"
        assert asked == [(["p_run", "p_new"], None, None)]


class TestRecipe:
    def test_json_is_the_document(self, run, small, tiny_pin):
        done = run("recipe", "--json")
        assert done.exit_code == 0
        assert done.stdout_bytes == recipe.document(recipe.build(tiny_pin, small))
        done = run("recipe", "--json", "--members", "p_new", "--base", "0.33.0")
        assert done.stdout_bytes == recipe.document(recipe.build(tiny_pin, small[1:], "0.33.0"))

    def test_table(self, run, small, tiny_pin):
        built = recipe.build(tiny_pin, small)
        shown = plain(run("recipe").stdout)
        assert recipe.runtime_key(built) in shown
        for member in built["members"]:
            assert f"{member['name']} {member['sha256']}" in shown
        assert "vLLM 0.33.0, fork release 1" in shown and "transformers >=5" in shown


def test_patches_shows_each_as_written(run):
    """Brackets are words of the title, not the console's markup."""
    shown = plain(run("patches").stdout)
    assert "p_run [Attention] [a] title Retire: at [once]" in shown
    assert "p_new x Retire: x" in shown


SPEC = {
    "layer_kind": "main",
    "layers": [2],
    "tokens_per_state": 2,
    "block": 128,
    "page_bytes": 37440,
    "kernel_block": 128,
    "states": 64,
}


class TestGeometry:
    @pytest.fixture
    def measured(self, monkeypatch):
        """Replaces the planning: ``set(error, legal)`` for the patched tree."""
        result = {"schema": 1, "base": "0.33.0", "capability": "12.0", "rules": {}}

        def tree(legal):
            spec = SPEC | {"legal": legal, "refused_by": None if legal else "L"}
            return {
                "specs": [spec],
                "groups": [],
                "block_stride": 1,
                "bytes_per_token": 1.0,
                "prefix_hit_tokens": 128,
            }

        def set_to(patched):
            patched = tree(patched) if isinstance(patched, bool) else {"error": patched}
            result["trees"] = {"stock": tree(False), "patched": patched}

        def measure(the_pin, members, base, argv, say):
            say("starting")
            return result | {"argv": list(argv)}

        monkeypatch.setattr(geometry, "measure", measure)
        return set_to

    @pytest.mark.parametrize(("patched", "code"), [(True, 0), (False, 1), ("ValueError: no", 1)])
    @pytest.mark.parametrize("options", [[], ["--json", "-"], ["--json", "FILE"]])
    def test_exit_code_and_output(self, run, measured, tmp_path, patched, code, options):
        measured(patched)
        path = tmp_path / "g.json"
        options = [str(path) if o == "FILE" else o for o in options]
        done = run("geometry", "--block-size", "256", *options)
        assert done.exit_code == code
        if "-" in options:
            found = json.loads(done.stdout)  # and nothing else
        else:
            assert "compressed KV" in done.stdout and "--block-size 256" in done.stdout
            assert path.exists() is bool(options)
            found = json.loads(path.read_text()) if options else None
            assert {p.name for p in tmp_path.glob("*g.json*")} <= {"g.json"}
        if found:
            assert found["argv"] == geometry.default_argv(256)
            assert ("error" in found["trees"]["patched"]) is isinstance(patched, str)


LAYOUT = {
    "layout": "x",
    "blocks": 1001,
    "block_bytes": [230400],
    "bytes": [230630400],
    "context_blocks_per_128_tokens": 1.0,
    "request_blocks": {"window": 21, "window_while_prefilling": 238, "ring": 1},
    "tokens": 97408,
    "requests": {"8192": 9},
}


class TestCapacity:
    @pytest.fixture
    def measured(self, monkeypatch):
        """Sets what is measured, in layouts that are refused by name."""

        def set_to(*refused):
            def measure(the_pin, members, argv, memory_gib, base, lengths, say):
                names = capacity.LAYOUTS
                layouts = {n: {"error": "no"} if n in refused else LAYOUT for n in names}
                return {
                    "schema": 1,
                    "base": "0.33.0",
                    "argv": list(argv),
                    "memory_gib": memory_gib,
                    "layouts": layouts,
                }

            monkeypatch.setattr(capacity, "measure", measure)

        return set_to

    @pytest.mark.parametrize(
        ("refused", "code"),
        [
            ([], 0),
            (["kernel-page-units"], 0),
            (["stock"], 0),
            (["spec-blocks", "kernel-page-units"], 1),
        ],
    )
    def test_table_and_exit_code(self, run, measured, refused, code):
        measured(*refused)
        done = run("capacity", "--memory-gib", "20", "--", "m", "--tensor-parallel-size", "4")
        assert done.exit_code == code
        assert "--tensor-parallel-size 4" in done.stdout and "20 GiB" in done.stdout
        assert done.stdout.count("97,408") == 3 - len(refused)
        assert done.stdout.count("refuses to plan this: no") == len(refused)

    def test_a_checkpoint_by_a_relative_path(self, tmp_path, monkeypatch):
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "config.json").write_text("{}")
        monkeypatch.chdir(tmp_path)
        argv = ["m", "--block-size", "128", "--served-model-name", "n"]
        assert capacity.absolute(argv) == [str(tmp_path / "m"), *argv[1:]]

    def test_json_and_nothing_else(self, run, measured):
        measured()
        done = run("capacity", "--memory-gib", "1.5", "--json", "-")
        assert json.loads(done.stdout)["memory_gib"] == 1.5

    @pytest.mark.parametrize("memory, lengths", [(0, [1]), (-1, [1]), (1, [0]), (1, [])])
    def test_what_cannot_be_is_refused(self, tiny_pin, memory, lengths):
        with pytest.raises(ForkError, match="positive"):
            capacity.measure(tiny_pin, [], ["m"], memory, None, lengths)


# main(): what a user sees of an error. A process each, so few.


def fork(*arguments):
    command = [sys.executable, "-m", "fork", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "--base", "0.1"], "error: base 0.1 is not served. Served: 0.30.0"),
        (["status", "no/[where]/:x:"], "error: no/[where]/:x: holds no vLLM"),
        (["verify", "[/bold]"], "error: [/bold] holds no vLLM"),
    ],
)
def test_an_error_is_one_message(arguments, message):
    done = fork(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ForkError("found [this]\n  need that"), "error: found [this]\n  need that\n"),
        (FileNotFoundError(2, "No such file", "a/[b]"), "error: No such file: a/[b]\n"),
        (OSError(28, "No space left on device"), "error: No space left on device\n"),
        (OSError("no git"), "error: no git\n"),
    ],
    ids=["ours", "of a file", "of no file", "of words"],
)
def test_every_refusal_ends_in_one_message(monkeypatch, messages, error, message):
    """As the errors that the tests above catch."""

    def fail():
        raise error

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert messages() == message


@pytest.mark.parametrize("path", ["dir/g.json", "g.json"])
def test_written_beside_and_renamed(tmp_path, monkeypatch, killer, path):
    """A file that is there is whole: the older one or the new."""
    target = tmp_path / path
    target.parent.mkdir(exist_ok=True)
    target.write_text("older")
    with killer([(os, "replace")]) as kill, pytest.raises(kill.Killed):
        kill.arm(1)
        cli._write_beside(target, "new")
    assert target.read_text() == "older"
    cli._write_beside(target, "new")
    assert target.read_text() == "new"


ARM = {"base": "0.33.0", "tree": "patched", "modality": "text-only safe"}


@pytest.mark.parametrize("verdict, code", [("PASS", 0), ("FAIL", 1), ("NOT_RUN", 1)])
def test_probe(run, monkeypatch, tmp_path, verdict, code):
    """One row an arm; exit 1 where the patched, safe arm does not pass."""
    from fork import probe

    asked = []
    other = ARM | {"tree": "unpatched", "report": {"verdict": "FAIL", "line": "RULES FAIL: [x]"}}
    rows = [ARM | {"report": {"verdict": verdict, "line": f"RULES {verdict}"}}, other]
    monkeypatch.setattr(probe, "run", lambda *given: asked.append(given) or rows)
    path = tmp_path / "arms.json"
    done = run("probe", "--json", path, "--tokens", "1,8", "--rules-only", "--", "m", "--x", "1")
    assert done.exit_code == code
    assert f"RULES {verdict}" in done.stdout and "RULES FAIL: [x]" in done.stdout
    _, bases, argv, options, members = asked[0]
    assert (bases, argv, members) == ([pin.load().base], ["m", "--x", "1"], None)
    assert options == ["--rules-only", "--capability", "12.0", "--tokens", "1,8"]
    assert json.loads(path.read_text()) == {"schema": 1, "arms": rows}
