# SPDX-License-Identifier: Apache-2.0
"""Both pipelines are Buildkite's, by its public schema; every test is in exactly one step."""

import json
import os
import shlex
from copy import deepcopy
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import jsonschema
import pytest
import yaml

from fork import ROOT

PIPELINES = ("pipeline.yml", "nightly.yml")


@pytest.fixture(scope="module")
def validator():
    """The schema comes with Buildkite's SDK, pinned in pyproject.toml."""
    found = find_spec("buildkite_sdk")
    assert found, "./build.sh --tests installs Buildkite's schema"
    schema = json.loads(Path(found.origin).with_name("schema.json").read_text(encoding="utf-8"))
    return jsonschema.validators.validator_for(schema)(schema)


def load(name):
    return yaml.safe_load((ROOT / ".buildkite" / name).read_text(encoding="utf-8"))


def steps(name):
    return {step["key"]: step for step in load(name)["steps"]}


@pytest.mark.parametrize("name", PIPELINES)
def test_valid_by_buildkite_s_schema(validator, name):
    assert [error.message for error in validator.iter_errors(load(name))] == []


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize(
    "change",
    [
        {"comand": "./test.sh"},
        {"timeout_in_minutes": "soon"},
        {"artifact_paths": 3},
        {"retry": {"automatic": [{"exit_code": 1}], "more": 1}},
        {"concurrency": "one"},
    ],
    ids=str,
)
def test_the_schema_refuses_what_is_wrong(validator, name, change):
    pipeline = deepcopy(load(name))
    pipeline["steps"][0] |= change
    assert not validator.is_valid(pipeline)


@pytest.mark.parametrize("name", PIPELINES)
def test_steps_run_scripts_of_this_repository_and_end(name):
    for step in load(name)["steps"]:
        script = ROOT / shlex.split(step["command"])[0]
        assert script.is_file() and os.access(script, os.X_OK)
        assert step["timeout_in_minutes"] <= 60
    assert len(steps(name)) == len(load(name)["steps"])
    assert {s.get("depends_on") for s in load(name)["steps"]} <= {None, *steps(name)}


def test_ci_runs_the_same_script():
    assert "test.sh" in (ROOT / ".ci/run").read_text()
    commands = [shlex.split(step["command"])[0] for step in load("pipeline.yml")["steps"]]
    assert commands.count("./test.sh") == 4


def test_every_test_is_in_exactly_one_step():
    """By its marks: a step's -m, and --everyday as test.sh spells it out."""
    everyday = 'set -- -m "not bases and not slow" "$@"'
    assert everyday in (ROOT / "test.sh").read_text()
    chosen = {}
    for key, step in steps("pipeline.yml").items():
        words = shlex.split(step["command"])
        if "-m" in words:
            chosen[key] = words[words.index("-m") + 1]
        elif "--everyday" in words:
            chosen[key] = "not bases and not slow"
    assert set(chosen) == {"unit", "bases", "containers"}
    for bases, slow in product((False, True), repeat=2):
        marks = {"bases": bases, "slow": slow, "__builtins__": {}}
        assert [eval(expression, marks) for expression in chosen.values()].count(True) == 1


def test_artefacts():
    assert "dist/*.whl" in steps("pipeline.yml")["wheels"]["artifact_paths"]
    assert steps("nightly.yml")["rebase"]["artifact_paths"] == "nightly/*"
