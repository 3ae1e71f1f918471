# SPDX-License-Identifier: Apache-2.0
"""Every record is where its kernel looks, over random allocations, frees, prefix hits,
evictions and preemptions; and a planted fault is seen. Level of evidence: *emulated*."""

import json
import os
import subprocess
import sys

import pytest

from fork import ROOT

pytestmark = pytest.mark.slow

FAULTS = ("unmapped slot", "stride off by one page", "swapped units")


def traces(*runs):
    """What sm120_record_trace counted, one a run, in a process with Triton's interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.v1.worker.sm120_record_trace", json.dumps(runs)],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_records_and_planted_faults():
    """A short trace of each."""
    right, *wrong = traces({"steps": 24}, *({"steps": 10, "fault": f} for f in FAULTS))
    assert right["right"] > 5000 and right.get("wrong", 0) == right.get("outside", 0) == 0
    assert right["written by kernels"] > 50 and right["leaked blocks"] == 0
    for fault, counts in zip(FAULTS, wrong, strict=True):
        assert counts.get("wrong", 0) + counts.get("outside", 0) > 100, fault


@pytest.mark.parametrize(
    "run",
    [
        {"steps": 600, "seed": 1},
        {"steps": 150, "seed": 2, "block_size": 256, "blocks": 60},
        {"steps": 150, "seed": 3, "caching": False},
    ],
    ids=["128", "256", "no prefix caching"],
)
def test_long_trace(run):
    [counts] = traces(run)
    assert counts.get("wrong", 0) == counts.get("outside", 0) == counts["leaked blocks"] == 0
    assert counts["right"] > 250 * run["steps"] and counts["allocations"] > 4 * run["steps"]
    caching = run.get("caching", True)
    assert (counts.get("hits", 0) > 0) == caching
    assert counts["frees"] > 5 and counts["preemptions"] > 5
    if run["steps"] == 600:
        assert counts["hits"] > 20 and counts["evictions"] > 20
        # Every kind of cache was written by its own kernel.
        for kind in ("main 1", "main 2", "indexer 1", "indexer 2", "swa 1"):
            assert counts[f"{kind} by kernels"] > 0
