# SPDX-License-Identifier: Apache-2.0
"""Page geometry by vLLM's own planning and allocation, inside one tree, on a CPU.

    python -m fork.planner REQUEST.json RESULT.json

Started by fork/geometry.py with the tree first on the path. The request has ``argvs``
(each what follows ``vllm serve``) and ``capability``; the result is a list with a
``{"plan": …}`` or ``{"error": …}`` for each. Several share one process, since importing
vLLM is what costs. Everything below is vLLM's: the serve parser, the configuration, the
attention layers (built on the meta device) and their specs, the groups, the layout, the
kernel block sizes, the metadata builders, the allocation and the KV cache manager. What
the start-up check would plan is compared with what the layers ask for.
"""

import copy
import inspect
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fork import ROOT

_BLOCKS = 64
"""Blocks to allocate: enough for every group, small enough for a laptop."""

_COMPUTE_UNITS = 188
"""Streaming multiprocessors, as an RTX PRO 6000 Blackwell has."""

_CONTEXT = 64 * 1024
"""Tokens of the shorter of two requests whose blocks are compared."""


def set_up_platform(capability: tuple[int, int]) -> None:
    """Makes vLLM believe in a CUDA device of that capability, in the order that works:
    import the model first, without a platform, and only then name one."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    from vllm.model_executor.models import ModelRegistry
    from vllm.models.deepseek_v41 import DeepseekV41ForCausalLM
    from vllm.platforms.interface import DeviceCapability

    # Else vLLM would import the model again in another process, to ask what it can do.
    ModelRegistry.register_model("DeepseekV41ForCausalLM", DeepseekV41ForCausalLM)
    platform.device_type = "cuda"
    # As CudaPlatform answers; without it the planner gives every layer a full context.
    platform.support_hybrid_kv_cache = classmethod(lambda cls: True)
    # Metadata builders size their buffers by it; the geometry does not depend on it.
    platform.num_compute_units = classmethod(lambda cls, device_id=0: _COMPUTE_UNITS)
    platform.get_device_capability = classmethod(
        lambda cls, device_id=0: DeviceCapability(*capability)
    )


def planned_caches_module() -> Any:
    """The module that plans specs: the tree's own, or on a stock tree this checkout's."""
    import vllm.models.deepseek_v41.nvidia as package

    package.__path__.append(str(ROOT / "vllm" / "models" / "deepseek_v41" / "nvidia"))
    from vllm.models.deepseek_v41.nvidia import sm120_planned_caches

    return sm120_planned_caches


def vllm_config(argv: list[str]) -> Any:
    """The configuration that ``vllm serve <argv>`` makes."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:  # before 0.33
        from vllm.entrypoints.launchers.cli_args import make_arg_parser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    args.model = args.model_tag or args.model
    return AsyncEngineArgs.from_cli_args(args).create_engine_config()


def build_layers(config: Any) -> None:
    """Builds every attention layer of the model and its draft, without weights.

    They register themselves in the configuration, as in a worker. Quantization is left
    out: it decides how weights are stored, not how the cache is.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.models.deepseek_v41.nvidia.model import _select_dsv4_attn_cls
    from vllm.models.deepseek_v41.nvidia.sm120_planned_caches import draft_layers
    from vllm.utils import flashinfer

    _one_rank()
    # Both ask for a GPU; neither has a say in the geometry.
    flashinfer.has_flashinfer_sparse_mla_sm120_config = lambda *_: True
    torch.cuda.Event = lambda *_, **__: None
    config.quant_config = None
    config.compilation_config.static_forward_context.clear()
    attn_cls = _select_dsv4_attn_cls(config)
    hf_config = config.model_config.hf_config
    layers = hf_config.num_hidden_layers + draft_layers(config)
    with set_current_vllm_config(config), torch.device("meta"):
        for layer in range(layers):
            attn_cls(config, prefix=f"model.layers.{layer}.attn")


def _one_rank() -> None:
    """Tensor parallel groups of this process alone: the cache is the same on each rank."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform

    if parallel_state.model_parallel_is_initialized():
        return
    platform = type(current_platform)
    platform.device_type = "cpu"
    with tempfile.NamedTemporaryFile() as rendezvous, set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            distributed_init_method=f"file://{rendezvous.name}",
            local_rank=0,
            backend="gloo",
        )
        parallel_state.initialize_model_parallel(1, 1)
    platform.device_type = "cuda"


def kind_of(layer: Any) -> str | None:
    """``swa``, ``main`` or ``indexer``; None for the compressor's ring."""
    from vllm.models.deepseek_v41.attention import DeepseekV4Attention, DeepseekV4IndexerCache
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

    kinds = {
        DeepseekV4SWACache: "swa",
        DeepseekV4Attention: "main",
        DeepseekV4IndexerCache: "indexer",
    }
    return next((kind for cls, kind in kinds.items() if isinstance(layer, cls)), None)


class Plan:
    """What vLLM plans for one configuration.

    Attributes:
        config: the VllmConfig, with block size, cache dtype and layout as the engine
            core would leave them.
        specs: ``{name: spec}``, as the worker hands them to the planner.
        kv_cache_config: vLLM's KVCacheConfig for ``_BLOCKS`` blocks.
        groups: per KV cache group, vLLM's AttentionGroups.
        kernel_block_sizes: one a group, as vLLM's runners choose them.
        views: ``{name: the view a kernel gets}``, allocated on the CPU.
    """

    def __init__(self, config: Any, module: Any) -> None:
        self.config = config
        expected = {cache.name: cache.spec for cache in module.planned_caches(config)}
        block_size = module.manager_block_size(config)
        build_layers(config)
        self._plan()
        self._compare(expected, block_size)

    def _compare(self, expected: dict[str, Any], block_size: int) -> None:
        """What the start-up check plans must be what the model asks for."""
        chosen = self.config.cache_config.block_size
        real = {name: spec for name, spec in self.specs.items() if kind_of(self.layers[name])}
        if chosen != block_size:
            raise RuntimeError(f"the start-up check plans blocks of {block_size}, not {chosen}")
        if real != expected:
            odd = sorted(n for n in real.keys() | expected if real.get(n) != expected.get(n))
            raise RuntimeError(
                f"the start-up check plans other caches than the model has: {odd[0]}: "
                f"{expected.get(odd[0])} instead of {real.get(odd[0])}"
            )

    def _plan(self) -> None:
        import torch
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.utils import (
            get_supported_kv_cache_layouts,
            resolve_kv_cache_layout,
        )
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.worker import utils
        from vllm.v1.worker.gpu import attn_utils

        try:
            from vllm.v1.core import kv_cache_planning as planning  # 0.33
        except ImportError:
            planning = kv_cache_utils

        config = self.config
        self.layers = config.compilation_config.static_forward_context
        current_platform.update_block_size_for_backend(config)
        self.specs = specs = attn_utils.get_kv_cache_spec(config)
        backends = list(dict.fromkeys(x.get_attn_backend() for x in self.layers.values()))
        layouts = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
        layout = call(
            resolve_kv_cache_layout, config, [layouts], kv_cache_specs=list(specs.values())
        )
        config.cache_config.kv_cache_layout = layout.name
        groups = planning.get_kv_cache_groups(config, copy.copy(specs))
        one = planning.get_kv_cache_config_from_groups(config, groups, 1 << 30)
        self.block_stride = one.kv_cache_tensors[0].size // one.num_blocks
        self.kv_cache_config = planning.get_kv_cache_config_from_groups(
            config, groups, self.block_stride * _BLOCKS
        )
        self.kv_cache_config.kv_cache_layout = layout.name
        device = torch.device("cpu")
        found = attn_utils.init_attn_backend(self.kv_cache_config, config, device)
        self.groups, self.kernel_block_sizes = found[0], found[-1]
        views = utils.allocate_kv_cache(
            self.kv_cache_config, device, layout, self.kernel_block_sizes
        )
        if hasattr(utils, "map_kv_caches_to_kernel_blocks"):  # 0.32 on
            every = [group for groups in self.groups for group in groups]
            views = utils.map_kv_caches_to_kernel_blocks(views, every)
        self.views = views

    def manager(self, blocks: int) -> tuple[Any, Callable[[list[int], str], Any]]:
        """A KVCacheManager over ``blocks`` blocks, and what makes its requests."""
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
            enable_caching=True,
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


def call(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls with those keywords that the release's signature has."""
    known = inspect.signature(function).parameters
    return function(*args, **{k: v for k, v in kwargs.items() if k in known})


def describe(plan: Plan) -> dict[str, Any]:
    """The plan as plain data, a row for each kind of page."""
    rows: dict[tuple, dict[str, Any]] = {}
    for name, spec in plan.specs.items():
        kind = kind_of(plan.layers[name])
        if kind is None:
            continue
        group = next(g for gs in plan.groups for g in gs if name in g.layer_names)
        builder = group.get_metadata_builder(0).kv_cache_spec
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
    return {
        "specs": specs,
        "groups": [_group(g) for g in plan.kv_cache_config.kv_cache_groups],
        "manager_block": int(plan.config.cache_config.block_size),
        "block_stride": plan.block_stride,
        "prefix_hit_tokens": plan.prefix_hit_tokens(),
        "prefix_hit_1000_1003": plan.hit(1000, 1003),
        "bytes_per_token": plan.bytes_per_token(),
    }


def _group(group: Any) -> dict[str, Any]:
    return {
        "block": int(group.kv_cache_spec.block_size),
        "caches": len(group.layer_names),
        "names": list(group.layer_names),
    }


def planned(argv: list[str], module: Any) -> dict[str, Any]:
    """One argv's plan, or the one line that refuses it."""
    try:
        return {"plan": describe(Plan(vllm_config(argv), module))}
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
    results = [planned(argv, module) for argv in request["argvs"]]
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
