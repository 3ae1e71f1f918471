# SPDX-License-Identifier: Apache-2.0
"""Page geometry by vLLM's own planning and allocation, inside one tree, on a CPU.

    python -m fork.planner REQUEST.json RESULT.json

Started by fork/geometry.py with the tree first on the path. The request has ``argvs``
(each what follows ``vllm serve``) and ``capability``, for a capacity also ``memory_bytes``
and ``lengths``; the result is a list with a ``{"plan": …}`` or ``{"error": …}`` for each.
Several share one process, since importing vLLM is what costs. Everything below is vLLM's:
the serve parser, the configuration, the attention layers (built on the meta device) and
their specs, the groups, the layout, the kernel block sizes, the metadata builders, the
allocation and the KV cache manager. What the start-up check would plan is compared with
what the layers ask for.
"""

import copy
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fork import ROOT

_CONTEXT = 64 * 1024
"""Tokens of the shorter of two requests whose blocks are compared."""


def set_up_platform(capability: tuple[int, int]) -> None:
    """Makes vLLM believe in a CUDA device of that capability (sm120_selftest_argv)."""
    _own_modules()
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_argv

    sm120_selftest_argv.set_up_platform(capability)


def kv_layout() -> str:
    """The layout of compressed caches that this tree would use."""
    from vllm import envs

    if "VLLM_SM120_KV_LAYOUT" not in envs.environment_variables:
        return "stock"
    return str(envs.VLLM_SM120_KV_LAYOUT)


def _own_modules() -> None:
    """Puts this checkout's modules behind the tree's own, for a stock tree has none."""
    import vllm.models.deepseek_v41.nvidia as package

    folder = str(ROOT / "vllm" / "models" / "deepseek_v41" / "nvidia")
    if folder not in package.__path__:
        package.__path__.append(folder)


def planned_caches_module() -> Any:
    """The module that plans specs: the tree's own, or on a stock tree this checkout's."""
    _own_modules()
    from vllm.models.deepseek_v41.nvidia import sm120_planned_caches

    return sm120_planned_caches


def vllm_config(argv: list[str]) -> Any:
    """The configuration that ``vllm serve <argv>`` makes, start-up check included."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_argv

    args = sm120_selftest_argv.parse(argv)
    return AsyncEngineArgs.from_cli_args(args).create_engine_config()


class Plan:
    """vLLM's plan (sm120_kv_plan.KVPlan), compared with the start-up check's, and what its
    KV cache manager does with it.

    Raises:
        RuntimeError: the start-up check would plan other caches than the model has.
    """

    def __init__(self, config: Any, module: Any) -> None:
        from vllm.models.deepseek_v41.nvidia.sm120_kv_plan import KVPlan

        expected = {cache.name: cache.spec for cache in module.planned_caches(config)}
        block_size = module.manager_block_size(config)
        plan = KVPlan(config)
        self.config, self.layers, self.specs = plan.config, plan.layers, plan.specs
        self.views, self.builder, self.groups = plan.views, plan.builder, plan.groups
        self.kv_cache_config, self.block_stride = plan.kv_cache_config, plan.block_stride
        self._compare(expected, block_size)

    def _compare(self, expected: dict[str, Any], block_size: int) -> None:
        """What the start-up check plans must be what the model asks for."""
        from vllm.models.deepseek_v41.nvidia.sm120_kv_plan import kind_of

        real = {name: spec for name, spec in self.specs.items() if kind_of(self.layers[name])}
        chosen = self.config.cache_config.block_size
        if chosen != block_size:
            raise RuntimeError(f"the start-up check plans blocks of {block_size}, not {chosen}")
        if real != expected:
            odd = sorted(n for n in real.keys() | expected if real.get(n) != expected.get(n))
            raise RuntimeError(
                f"the start-up check plans other caches than the model has: {odd[0]}: "
                f"{expected.get(odd[0])} instead of {real.get(odd[0])}"
            )

    def manager(
        self, blocks: int, caching: bool = True
    ) -> tuple[Any, Callable[[list[int], str], Any]]:
        """A KVCacheManager over ``blocks`` blocks, and what makes its requests."""
        from vllm.models.deepseek_v41.nvidia.sm120_kv_plan import call
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.request import Request

        config = kv_cache_utils.generate_scheduler_kv_cache_config(
            [copy.deepcopy(self.kv_cache_config)]
        )
        config.num_blocks = blocks
        scheduler, hashing = kv_cache_utils.resolve_kv_cache_block_sizes(config, self.config)
        manager = call(
            KVCacheManager,
            kv_cache_config=config,
            max_model_len=self.config.model_config.max_model_len,
            scheduler_block_size=scheduler,
            hash_block_size=hashing,
            max_in_flight_tokens=self.config.scheduler_config.max_num_batched_tokens,
            enable_caching=caching,
        )
        hash_fn = get_hash_fn_by_name("sha256")
        kv_cache_utils.init_none_hash(hash_fn)
        hasher = kv_cache_utils.get_request_block_hasher(hashing, hash_fn)

        def request(tokens: list[int], name: str) -> Request:
            return call(
                Request,
                request_id=name,
                prompt_token_ids=tokens,
                sampling_params=SamplingParams(max_tokens=1),
                pooling_params=None,
                eos_token_id=None,
                block_hasher=hasher,
            )

        return manager, request

    def bytes_per_token(self) -> float:
        """Bytes of KV cache that one more token of context takes, in the long run.

        Two requests, one twice as long, through vLLM's own manager: what the longer
        one holds more, which leaves out the window and the rings that both have.
        """
        held = []
        for tokens in (_CONTEXT, 2 * _CONTEXT):
            manager, request = self.manager(1 << 17)
            pool = manager.block_pool
            free = pool.get_num_free_blocks()
            self.prefill(manager, request(list(range(tokens)), "r"))
            held.append(free - pool.get_num_free_blocks())
        return (held[1] - held[0]) * self.block_stride / _CONTEXT

    def prefill(self, manager: Any, request: Any, computed: int = 0, blocks: Any = None) -> None:
        """Runs a request's prompt through the manager in the scheduler's chunks."""
        chunk = self.config.scheduler_config.max_num_batched_tokens
        request.num_computed_tokens = 0
        while computed < request.num_tokens:
            new = min(chunk, request.num_tokens - computed)
            given = manager.allocate_slots(
                request,
                new,
                computed if blocks is not None else 0,
                blocks,
            )
            if given is None:
                raise RuntimeError("the KV cache manager has no block left")
            blocks = None
            computed += new
            request.num_computed_tokens = computed

    def prefix_hit_tokens(self) -> int:
        """The step in which prefix hits grow: the greatest common divisor of the hits of
        prompts that extend cached ones of many lengths."""
        return math.gcd(*(self.hit(cached, cached + 8) for cached in range(150, 1400, 50)))

    def hit(self, cached: int, prompt: int) -> int:
        """Tokens that hit when a prompt extends one of ``cached`` tokens to ``prompt``."""
        manager, request = self.manager(4096)
        first = request(list(range(cached)), "first")
        self.prefill(manager, first)
        manager.free(first)
        return int(manager.get_computed_blocks(request(list(range(prompt)), "again"))[1])


def describe(plan: Plan) -> dict[str, Any]:
    """The plan as plain data, a row for each kind of page."""
    from vllm.models.deepseek_v41.nvidia.sm120_kv_plan import kind_of

    rows: dict[tuple, dict[str, Any]] = {}
    for name, spec in plan.specs.items():
        kind = kind_of(plan.layers[name])
        if kind is None:
            continue
        builder = plan.builder(name).kv_cache_spec
        view = plan.views[name]
        states = int(view.shape[-2])
        ratio = int(spec.tokens_per_state)
        row = {
            "layer_kind": kind,
            "layers": [],
            "compressed": kind != "swa",
            "tokens_per_state": ratio,
            "block": int(spec.block_size),
            "page_bytes": int(spec.page_size_bytes),
            "kernel_block": states * ratio,
            "kernel_stride_bytes": int(view.stride(0) * view.element_size()),
            "states": states,
        }
        if int(builder.num_states) != states:
            raise RuntimeError(
                f"{name}: the metadata builder has {builder.num_states} states a page, "
                f"the cache's view {states}"
            )
        key = tuple(v for k, v in row.items() if k != "layers")
        rows.setdefault(key, row)["layers"].append(int(name.split(".")[2]))
    order = {"swa": 0, "main": 1, "indexer": 2}
    specs = sorted(rows.values(), key=lambda r: (order[r["layer_kind"]], -r["tokens_per_state"]))
    groups = [_group(plan, g) for g in plan.kv_cache_config.kv_cache_groups]
    return {
        "specs": specs,
        "layout": kv_layout(),
        "groups": groups,
        "problems": [problem for group in groups for problem in group.pop("problems")],
        "manager_block": int(plan.config.cache_config.block_size),
        "block_stride": plan.block_stride,
        "prefix_hit_tokens": plan.prefix_hit_tokens(),
        "prefix_hit_1000_1003": plan.hit(1000, 1003),
        "bytes_per_token": plan.bytes_per_token(),
    }


def _group(plan: Plan, group: Any) -> dict[str, Any]:
    """A KV cache group, where its pages lie in a block, and what is wrong with that."""
    from vllm.models.deepseek_v41.nvidia.sm120_block_places import place_of, place_problems
    from vllm.models.deepseek_v41.nvidia.sm120_kv_plan import kind_of

    # A UniformTypeKVCacheSpecs is one of several layers' specs.
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    places = {
        name: place_of(plan.views[name], specs.get(name, group.kv_cache_spec))
        for name in group.layer_names
    }
    return {
        "block": int(group.kv_cache_spec.block_size),
        "caches": len(group.layer_names),
        "names": list(group.layer_names),
        "places": [
            {"name": name, "kind": kind_of(plan.layers[name]) or "ring"} | asdict(place)
            for name, place in places.items()
        ],
        "problems": place_problems(places, plan.block_stride),
    }


def planned(
    argv: list[str], module: Any, what: Callable[[Plan], dict[str, Any]] = describe
) -> dict[str, Any]:
    """One argv's plan as ``what`` says it, or the one line that refuses it."""
    try:
        return {"plan": what(Plan(vllm_config(argv), module))}
    except SystemExit as error:
        return {"error": f"vLLM's argument parser stopped ({error})"}
    except Exception as error:
        if os.environ.get("SM120_FORK_DEBUG"):
            raise
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Reads the request, plans, writes the result."""
    request = json.loads(Path(sys.argv[1]).read_text())
    set_up_platform(tuple(request["capability"]))
    module = planned_caches_module()
    what = describe
    if "memory_bytes" in request:
        from fork import kv_capacity

        what = partial(kv_capacity.measure, **{k: request[k] for k in ("memory_bytes", "lengths")})
    results = [planned(argv, module, what) for argv in request["argvs"]]
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
