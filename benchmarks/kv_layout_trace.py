# SPDX-License-Identifier: Apache-2.0
"""A long random trace of requests through vLLM's KV cache manager, inside one tree.

    python -m benchmarks.kv_layout_trace REQUEST.json RESULT.json

Started by benchmarks/kv_layout.py and by tests, with a tree first on the path. The trace is
the same in every tree: what a request does follows from the seed alone, and the pool is
large enough that no layout evicts, so that hits can be compared one by one.
"""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from fork import geometry, planner

PROMPTS = (1, 6000)
SHARED = (0, 128, 1000, 2048, 4096)
"""Tokens that a prompt has in common with others of its family."""


def trace(plan: Any, requests: int, caching: bool, blocks: int, seed: int = 0) -> dict[str, Any]:
    """The trace's hits, its steps and their CPU time.

    Args:
        requests: how many come and go.
        caching: whether prefixes are cached.
        blocks: of the pool.

    Raises:
        AssertionError: a block is in two places, or was never freed.
    """
    rng = random.Random(seed)
    families = [[rng.randrange(1000, 100000) for _ in range(max(SHARED))] for _ in range(4)]
    manager, make = plan.manager(blocks, caching)
    pool = manager.block_pool
    free = pool.get_num_free_blocks()
    running: list[Any] = []
    hits, spent, steps, started = [], 0.0, 0, 0
    while started < requests or running:
        if started < requests and len(running) < 16:
            prefix = rng.choice(families)[: rng.choice(SHARED)]
            own = [rng.randrange(1000, 100000) for _ in range(rng.randrange(*PROMPTS) // 4)]
            request = make(prefix + own + [started], f"r{started}")
            request.left, request.fresh = rng.randrange(1, 60), True
            running.append(request)
            started += 1
        new = {request.request_id: 1 for request in running}
        before = time.process_time()
        for request in running:
            if request.fresh:
                found, count = manager.get_computed_blocks(request)[:2]
                new[request.request_id] = chunk = min(request.num_tokens - count, 2048)
                given = manager.allocate_slots(request, chunk, count, found)
                request.num_computed_tokens = count
                request.fresh = False
                hits.append(int(count))
            else:
                rest = request.num_tokens - request.num_computed_tokens
                new[request.request_id] = chunk = min(rest, 2048)
                given = manager.allocate_slots(request, chunk)
            assert given is not None, "the pool is too small for this trace"
        spent += time.process_time() - before
        steps += 1
        for request in list(running):
            request.num_computed_tokens += new[request.request_id]
            if request.num_computed_tokens < request.num_tokens:
                continue
            request.left -= 1
            if request.left:
                request.append_output_token_ids(rng.randrange(1000, 100000))
                continue
            before = time.process_time()
            manager.free(request)
            spent += time.process_time() - before
            running.remove(request)
        if steps % 50 == 0:
            _check_use(manager, running)
    assert pool.get_num_free_blocks() == free, "blocks leaked"
    return {"hits": hits, "steps": steps, "us_per_step": spent / steps * 1e6}


def _check_use(manager: Any, running: list[Any]) -> None:
    """Every block is in as many block tables as it says, and in one KV cache group."""
    uses: dict[int, int] = {}
    group_of: dict[int, int] = {}
    counts: dict[int, int] = {}
    for request in running:
        for group, blocks in enumerate(manager.get_blocks(request.request_id).blocks):
            for block in blocks:
                if block.is_null:
                    continue
                uses[block.block_id] = uses.get(block.block_id, 0) + 1
                counts[block.block_id] = block.ref_cnt
                before = group_of.setdefault(block.block_id, group)
                assert before == group, f"block {block.block_id} is in two KV cache groups"
    assert uses == counts, "a block is used more often than it is counted"


def metadata_us(plan: Any, builds: int = 200) -> dict[str, float]:
    """Host time of one step's metadata, in µs, kernel launches left out.

    16 requests of 4096 tokens: 16 decodes, and one prefill of 2048.
    """
    import torch
    import triton
    from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

    triton.runtime.interpreter.InterpretedFunction.run = lambda *_, **__: None
    config = plan.kv_cache_config
    out = {}
    for name, lengths in (("decode", [1] * 16), ("prefill", [2048])):
        count = len(lengths)
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        tokens = int(starts[-1])
        seq_lens = torch.full((count,), 4096, dtype=torch.int32)
        tables = [
            torch.ones(count, 4096 // g.kv_cache_spec.block_size + 1, dtype=torch.int32)
            for g in config.kv_cache_groups
        ]
        slots = torch.zeros(len(tables), tokens, dtype=torch.int64)
        positions = torch.cat([torch.arange(4096 - n, 4096) for n in lengths])

        def build(tables=tables, starts=starts, seq_lens=seq_lens, slots=slots, at=positions):
            build_attn_metadata(
                plan.groups,
                num_reqs=len(seq_lens),
                num_tokens=len(at),
                query_start_loc_gpu=starts,
                query_start_loc_cpu=starts,
                max_query_len=int(starts.diff().max()),
                seq_lens=seq_lens,
                max_seq_len=4096,
                block_tables=tables,
                slot_mappings=slots,
                kv_cache_config=config,
                seq_lens_cpu_upper_bound=seq_lens,
                positions=at,
            )

        for _ in range(20):
            build()
        before = time.process_time()
        for _ in range(builds):
            build()
        out[name] = (time.process_time() - before) / builds * 1e6
    return out


def main() -> None:
    """Reads the request, runs the traces, writes the result."""
    request = json.loads(Path(sys.argv[1]).read_text())
    planner.set_up_platform((12, 0))
    config = planner.vllm_config([*geometry.default_argv(), "--max-model-len", "16384"])
    plan = planner.Plan(config, planner.planned_caches_module())
    rounds = range(request.get("rounds", 1))
    result = {"layout": planner.kv_layout(), "groups": len(plan.groups), "traces": []}
    for caching in (True, False):
        for _ in rounds:
            found = trace(plan, request["requests"], caching, request["blocks"])
            result["traces"].append({"caching": caching} | found)
    if request.get("metadata"):
        result["metadata_us"] = [metadata_us(plan) for _ in rounds]
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
