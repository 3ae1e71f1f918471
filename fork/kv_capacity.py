# SPDX-License-Identifier: Apache-2.0
"""How much fits into a KV cache, by vLLM's own planning and cache manager.

Runs in the process of fork/planner.py, with a tree first on the path. Blocks are what
vLLM's planner makes of the memory of each pipeline stage; requests are what its KV cache
manager admits, one after the other, each prefilled in the scheduler's chunks, decoded by
one token and then kept, without prefix hits.
"""

import copy
from typing import Any

from fork.planner import Plan

_PROBE_TOKENS = (64 * 1024, 128 * 1024)
"""Two lengths: what the longer request holds more is context."""


def measure(plan: Plan, memory_bytes: int, lengths: list[int]) -> dict[str, Any]:
    """Blocks, bytes, tokens and requests.

    Args:
        memory_bytes: KV cache memory of one rank.
        lengths: tokens of the requests that are counted.

    Raises:
        ValueError: no block fits.
    """
    from fork.planner import kv_layout

    blocks, block_bytes = stages(plan, memory_bytes)
    usable = blocks - 1  # vLLM's block pool keeps one, the null block
    short, long = (held(plan, tokens) for tokens in _PROBE_TOKENS)
    step = _PROBE_TOKENS[1] - _PROBE_TOKENS[0]
    per_step = long["context"] - short["context"]
    prefilling = held(plan, _PROBE_TOKENS[1], decoded=False)
    own = prefilling["window"] + prefilling["ring"]
    return {
        "layout": kv_layout(),
        "blocks": blocks,
        "block_bytes": block_bytes,
        "bytes": [blocks * size for size in block_bytes],
        "context_blocks_per_128_tokens": per_step * 128 / step,
        "request_blocks": {
            "window": long["window"],
            "window_while_prefilling": prefilling["window"],
            "ring": long["ring"],
        },
        "tokens": max(usable - own, 0) * step // per_step,
        "requests": {str(length): requests(plan, blocks, length) for length in lengths},
    }


def stages(plan: Plan, memory_bytes: int) -> tuple[int, list[int]]:
    """Blocks that every pipeline stage can hold, and the bytes of one on each stage.

    Raises:
        ValueError: no block fits.
    """
    from vllm.models.deepseek_v41.nvidia.sm120_kv_plan import planning

    config = plan.config
    groups = planning.get_kv_cache_groups(config, copy.copy(plan.specs))
    counts, sizes = [], []
    for specs in stage_specs(config, plan.specs):
        own = planning._project_kv_cache_groups_to_worker(groups, specs)
        found = planning.get_kv_cache_config_from_groups(config, own, memory_bytes)
        if found.num_blocks < 2:
            raise ValueError(f"{memory_bytes} B of KV cache hold no block")
        counts.append(found.num_blocks)
        sizes.append(found.kv_cache_tensors[0].size // found.num_blocks)
    return min(counts), sizes


def stage_specs(config: Any, specs: dict[str, Any]) -> list[dict[str, Any]]:
    """The specs by pipeline stage, as vLLM spreads the layers; drafts are on the last."""
    from vllm.distributed.utils import get_pp_indices

    count = config.parallel_config.pipeline_parallel_size
    layers = config.model_config.hf_config.num_hidden_layers
    out = []
    for stage in range(count):
        start, end = get_pp_indices(layers, stage, count)
        end = end if stage < count - 1 else 1 << 30
        out.append({n: s for n, s in specs.items() if start <= int(n.split(".")[2]) < end})
    return out


def held(plan: Plan, tokens: int, decoded: bool = True) -> dict[str, int]:
    """Blocks that a request of ``tokens`` tokens holds, by what they are for.

    Args:
        decoded: one token past its prefill, when blocks below the window are free again.
    """
    from vllm.v1.kv_cache_interface import CircularBufferSpec, SlidingWindowSpec, iter_layer_specs

    manager, request = plan.manager(1 << 17, caching=False)
    one = request([0] * tokens, "r")
    plan.prefill(manager, one)
    if decoded:
        _decode(manager, one)
    blocks = manager.get_blocks(one.request_id).blocks
    found = {"context": 0, "window": 0, "ring": 0}
    for group, held_blocks in zip(plan.kv_cache_config.kv_cache_groups, blocks, strict=True):
        spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
        kind = "context"
        if isinstance(spec, SlidingWindowSpec):
            kind = "window"
        elif isinstance(spec, CircularBufferSpec):
            kind = "ring"
        found[kind] += sum(not block.is_null for block in held_blocks)
    return found


def requests(plan: Plan, blocks: int, tokens: int) -> int:
    """How many requests of ``tokens`` tokens the cache holds at once."""
    manager, request = plan.manager(blocks, caching=False)
    prompt = [0] * tokens
    count = 0
    while True:
        one = request(prompt, f"r{count}")
        try:
            plan.prefill(manager, one)
        except RuntimeError:  # no block left
            return count
        if not _decode(manager, one):
            return count
        count += 1


def _decode(manager: Any, request: Any) -> bool:
    """One more token; False where there is no block for it."""
    request.append_output_token_ids([0])
    return manager.allocate_slots(request, 1) is not None
