# SPDX-License-Identifier: Apache-2.0
"""The nightly script with a rebase and an agent that are stand-ins: artefacts, annotation,
exit status, and what is compared with what."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest

from fork import ROOT

# Stands for .venv/bin/python: `-m fork rebase` writes $RESULT, all else is this Python.
PYTHON = """\
#!/bin/sh
if [ "$1 $2 $3" = "-m fork rebase" ]; then
  echo "$@" >asked
  echo "the table"; echo "what it said" >&2
  [ -z "$RESULT" ] || printf %s "$RESULT" >"$6"
  exit "$STATUS"
fi
exec {python} "$@"
"""
AGENT = """\
#!/bin/sh
if [ "$1" = annotate ]; then echo "$@" >../annotated; cat >../annotation; exit; fi
echo "$@" >../downloaded
mkdir -p "$4/nightly" && printf %s "$PREVIOUS" >"$4/nightly/rebase.json"
"""


def release(version="0.34.0", verdict="pending", **more):
    patches = [{"name": "p_a", "verdict": verdict, "why": []}]
    return {"version": version, "patches": patches, "problems": [], "seconds": 1.0, **more}


def result(*releases):
    return {"schema": 1, "releases": list(releases)}


@pytest.fixture
def night(tmp_path, monkeypatch):
    """Runs nightly.sh in a checkout of stand-ins."""
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / ".buildkite", checkout / ".buildkite")
    programs = {
        checkout / "build.sh": "#!/bin/sh\n",
        checkout / ".venv/bin/python": PYTHON.format(python=sys.executable),
        tmp_path / "bin/buildkite-agent": AGENT,
    }
    for path, text in programs.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(found=None, status=0, agent=True, **environment):
        text = found if isinstance(found, str) else json.dumps(found) if found else ""
        env = {**os.environ, "RESULT": text, "STATUS": str(status), **environment}
        env["SM120_NIGHTLY_STATE"] = str(tmp_path / "state")
        if agent:
            env["PATH"] = f"{tmp_path / 'bin'}:{env['PATH']}"
        command = ["bash", checkout / ".buildkite/nightly.sh"]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        return done.returncode, (checkout / "nightly/changes.md").read_text()

    run.folder = tmp_path
    return run


def annotation(night):
    return (night.folder / "annotated").read_text(), (night.folder / "annotation").read_text()


def test_a_good_night(night):
    code, changed = night(result(release()))
    assert code == 0 and changed.startswith("First run")
    how, text = annotation(night)
    assert "--style success" in how and "the table" in text and "First run" in text
    out = night.folder / "checkout/nightly"
    assert sorted(p.name for p in out.iterdir()) == [
        *("changes.md", "rebase.json", "rebase.log", "rebase.txt"),
    ]
    asked = (night.folder / "checkout/asked").read_text().split()
    assert asked == ["-m", "fork", "rebase", "--latest", "--json", "nightly/rebase.json"]


def test_drift_fails_with_the_table_and_says_what_is_new(night):
    night(result(release()))
    code, changed = night(result(release(verdict="drift")), status=1)
    assert code == 1
    assert "0.34.0 › patches › p_a › verdict: pending → drift" in changed
    how, text = annotation(night)
    assert "--style error" in how and "the table" in text and "pending → drift" in text
    # the third night compares with the second
    assert "Nothing has changed" in night(result(release(verdict="drift")), status=1)[1]


def test_a_night_without_a_result_fails_and_keeps_the_last_one(night):
    night(result(release()))
    for status in (1, 0):
        code, changed = night(None, status=status)
        assert code == 1 and changed.startswith("No result")
        assert "what it said" in annotation(night)[1]
    assert "Nothing has changed" in night(result(release()))[1]


def test_a_last_result_that_cannot_be_read_hides_nothing(night):
    night("{")
    code, changed = night(result(release(verdict="drift")), status=1)
    assert code == 1 and "cannot be read" in changed
    assert "the table" in annotation(night)[1]


def test_the_last_run_from_another_build(night):
    previous = json.dumps(result(release("0.33.0")))
    _, changed = night(result(release()), SM120_NIGHTLY_PREVIOUS="b-1", PREVIOUS=previous)
    assert "- new: releases › 0.34.0" in changed and "- gone: releases › 0.33.0" in changed
    asked = (night.folder / "downloaded").read_text()
    assert "--build b-1" in asked and "nightly/rebase.json" in asked


def test_without_an_agent(night):
    code, _ = night(result(release()), status=1, agent=False)
    assert code == 1 and not (night.folder / "annotated").exists()


@pytest.fixture(scope="module")
def module():
    spec = importlib.util.spec_from_file_location("changes", ROOT / ".buildkite/changes.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


class TestChanges:
    def test_order_time_and_folder_do_not_count(self, module):
        old = result(release("1", tree="/a", seconds=1), release("2"))
        new = result(release("2", seconds=9), release("1", tree="/b", seconds=2))
        assert module.report(old, new).startswith("Nothing has changed")

    def test_a_patch_that_upstream_made_unnecessary(self, module):
        old = result(release(patches=[{"name": "a", "without": {"needed": True, "why": ["x"]}}]))
        new = result(release(patches=[{"name": "a", "without": {"needed": False, "why": []}}]))
        text = module.report(old, new)
        assert "› a › without › needed: true → false" in text
        assert "- gone: releases › 0.34.0 › patches › a › without › why: x" in text

    def test_null_to_an_object(self, module):
        text = module.report({"stock": None}, {"stock": {"a": 1}})
        assert 'stock: null → {"a": 1}' in text

    def test_names_that_repeat_are_told_apart_by_place(self, module):
        old, new = [{"name": "a", "x": 1}] * 2, [{"name": "a", "x": 1}, {"name": "a", "x": 2}]
        assert "- 1 › x: 1 → 2" in module.report(old, new)

    def test_very_many_are_cut(self, module):
        old, new = ({str(n): value for n in range(999)} for value in (0, 1))
        text = module.report(old, new)
        assert len(text.splitlines()) < 210 and "and 799 more" in text

    @pytest.mark.parametrize(
        ("files", "words"),
        [
            ({}, "no such file"),
            ({"new": "{"}, "new is not JSON"),
            ({"new": "{}", "old": "["}, "old"),
        ],
    )
    def test_bad_input(self, tmp_path, files, words):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        command = [sys.executable, ROOT / ".buildkite/changes.py", "old", "new"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
