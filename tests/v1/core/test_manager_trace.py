# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache manager over a long random trace: hits as stock's, one by one, no block
leaked and none in two places (benchmarks/kv_layout_trace.py asserts both)."""

import pytest

from benchmarks import kv_layout


@pytest.mark.bases
@pytest.mark.parametrize("base", ["0.32.0", "0.33.0"])
def test_hits_as_stocks(base):
    results = kv_layout.run(base, requests=400, metadata=False)
    assert {n: r["layout"] for n, r in results.items()} == {n: n for n in kv_layout.ARMS}
    for caching in (True, False):
        found = {
            name: next(t for t in result["traces"] if t["caching"] is caching)
            for name, result in results.items()
        }
        hits = found["stock"]["hits"]
        assert len(hits) == 400 and found["stock"]["steps"] > 500
        assert (sum(h > 0 for h in hits) > 200) is caching
        for other in found.values():
            assert (other["hits"], other["steps"]) == (hits, found["stock"]["steps"])
