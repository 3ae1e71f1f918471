# SPDX-License-Identifier: Apache-2.0
"""Shared by the proof's tests: results made by hand, in the form that proof.engine writes."""

import importlib.util
import json

import pytest

MISSING = [n for n in ("numpy", "torch", "safetensors") if importlib.util.find_spec(n) is None]
WITHOUT = ("test_model.py", "test_pack.py")
"""What runs without vLLM's dependencies."""


class SkippedModule(pytest.Module):
    """A module that is not imported."""

    def collect(self):
        missing = ", ".join(MISSING)
        why = f"the proof needs vLLM's dependencies, missing: {missing}; ./build.sh makes .venv"
        pytest.skip(why, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if MISSING and module_path.name not in WITHOUT:
        return SkippedModule.from_parent(parent, path=module_path)
    return None


class ResultFolder:
    """A folder of results, as proof.run leaves one."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, arm, setup, runs, **more):
        """Writes one engine process' result; returns its record.

        ``runs`` is a list of dictionaries; ``answers`` in one is a list of rows, each a
        list of log-probabilities or a pair of hits and those.
        """
        made = []
        for run in runs:
            run = {"scenario": "decode", "fault": None, "error": None, "repeat": 0, **run}
            rows = []
            for number, row in enumerate(run.pop("answers", ())):
                cached, values = row if isinstance(row, tuple) else (0, row)
                where = {"scenario": run["scenario"], "request": str(number), "where": "forced"}
                rows.append({**where, "cached": cached, "logprobs": [float(v) for v in values]})
            made.append({**run, "rows": rows})
        record = {"arm": arm, "setup": setup, "variant": "text", "like": None, "failed": None}
        record |= {"vllm": "0.33.0", "gpu": "Testing GPU", "attention": "FlashMLA"}
        record |= {"runs": made, **more}
        (self.folder / f"{setup}.{arm}.json").write_text(json.dumps(record))
        return record


@pytest.fixture
def result_folder(tmp_path):
    return ResultFolder(tmp_path / "results")
