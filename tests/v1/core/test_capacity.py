# SPDX-License-Identifier: Apache-2.0
"""``fork capacity`` by vLLM's own manager, against figures worked out by hand."""

import pytest

from fork import kv_capacity, planner


@pytest.fixture
def measure(engine_config, monkeypatch):
    def make(layout, memory, *more):
        monkeypatch.setenv("VLLM_SM120_KV_LAYOUT", layout)
        config = engine_config("--max-num-batched-tokens", 2048, *more)
        plan = planner.Plan(config, planner.planned_caches_module())
        return kv_capacity.measure(plan, memory, [8192])

    return make


def test_units(measure):
    found = measure("kernel-page-units", 1001 * 230400 + 1)
    # Windows: the 127 tokens before the 131073rd lie in three blocks of 64, in each of
    # seven groups; while 2048 tokens are prefilled, in 2 + 32.
    assert found == {
        "layout": "kernel-page-units",
        "blocks": 1001,
        "block_bytes": [230400],
        "bytes": [1001 * 230400],
        "context_blocks_per_128_tokens": 1.0,
        "request_blocks": {"window": 21, "window_while_prefilling": 238, "ring": 1},
        "tokens": (1000 - 239) * 128,
        # 65 + 21 + 1 blocks each (one token is decoded), and 64 + 238 + 1 for the last
        # while it is prefilled.
        "requests": {"8192": 9},
    }


def test_spec_blocks(measure):
    found = measure("spec-blocks", 1001 * 138240)
    assert (found["layout"], found["blocks"]) == ("spec-blocks", 1001)
    assert found["context_blocks_per_128_tokens"] == 3.0
    # 14 groups of windows, of three layers each.
    assert found["request_blocks"] == {
        "window": 14 * 3,
        "window_while_prefilling": 14 * 34,
        "ring": 1,
    }
    assert found["tokens"] == (1000 - 14 * 34 - 1) * 128 // 3


def test_pipeline_stages(measure):
    found = measure("kernel-page-units", 100 * 138240, "--pipeline-parallel-size", 2)
    assert (found["blocks"], found["block_bytes"]) == (100, [138240, 138240])


def test_no_block_fits(measure):
    with pytest.raises(ValueError, match="no block"):
        measure("kernel-page-units", 230400)
