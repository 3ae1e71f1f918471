# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM's Triton kernels agree with the references, in the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("sm120_interpreted_ops.py")


@pytest.fixture(scope="module")
def results():
    done = subprocess.run(
        [sys.executable, PROGRAM],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_triton_kernels_agree(results):
    assert [r["call"].split(":")[0] for r in results] == [
        *["compressor"] * 3,
        *["indexer_store"] * 2,
        "candidates",
    ]
    assert [r["reason"] for r in results] == [""] * 6
    # And not because nothing was compared.
    assert all(r["error_norm"] > 0 for r in results[:3])
    assert all(r["error_norm"] < 5e-3 for r in results)
