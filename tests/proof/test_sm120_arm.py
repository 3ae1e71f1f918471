# SPDX-License-Identifier: Apache-2.0
"""The arm ``fork-sm120`` as far as a CPU goes: on a platform of capability 9.0, SM12x's class
is built for every layer, on SM12x's pages, and FlashInfer is not asked for anything."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from fork import ROOT
from tests.proof.test_names import _missing

pytestmark = [
    pytest.mark.needs_vllm,
    pytest.mark.slow,
    pytest.mark.skipif(bool(_missing()), reason=_missing() or ""),
]

BUILD = """
import json, sys
from fork import geometry, planner
planner.set_up_platform((9, 0))
from proof import arms
arms.ARMS["fork-sm120"].prepare()
import vllm.utils.flashinfer as flashinfer

def never(*args, **more):
    raise AssertionError("FlashInfer was asked")

for name in ("has_flashinfer", "has_flashinfer_sparse_mla_sm120"):
    setattr(flashinfer, name, never)
config = planner.vllm_config(geometry.default_argv())
from vllm.models.deepseek_v41.nvidia.sm120_kv_plan import KVPlan
plan = KVPlan(config)
attention = {n: type(x).__name__ for n, x in plan.layers.items() if n.endswith(".attn")}
pages = {n: int(v.shape[-2]) for n, v in plan.views.items() if "compressor" not in n}
print(json.dumps({"attention": attention, "pages": pages}))
"""


@pytest.fixture(scope="module")
def built():
    assert importlib.util.find_spec("vllm")
    done = subprocess.run(
        [sys.executable, "-c", BUILD],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_layer_is_of_sm12x_class(built):
    assert len(built["attention"]) == 40
    assert set(built["attention"].values()) == {"DeepseekV4FlashInferSM120Attention"}


def test_pages_are_sm12x_pages(built):
    kinds = {name: page for name, page in built["pages"].items() if page != 64}
    assert not kinds and len(built["pages"]) >= 48
