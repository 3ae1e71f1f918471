# SPDX-License-Identifier: Apache-2.0
"""The KV caches of DeepSeek-V4.1 as vLLM itself plans and allocates them, on a CPU.

The attention layers are the real ones, built without weights on the meta device; specs,
groups, layout, kernel block sizes, metadata builders and allocation are vLLM's own. No
GPU is needed, and none is touched.
"""

import copy
import inspect
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.models.deepseek_v41.attention import (
    DeepseekV4Attention,
    DeepseekV4IndexerCache,
)
from vllm.models.deepseek_v41.nvidia.model import _select_dsv4_attn_cls
from vllm.platforms import current_platform
from vllm.utils import flashinfer
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.attention.backends.utils import (
    get_supported_kv_cache_layouts,
    resolve_kv_cache_layout,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import CircularBufferSpec
from vllm.v1.worker import utils
from vllm.v1.worker.gpu import attn_utils

try:
    from vllm.v1.core import kv_cache_planning as planning  # 0.33
except ImportError:
    planning = kv_cache_utils

# Blocks to allocate: enough for every group, and a few MB.
_BLOCKS = 64

# Bytes of a state that SM12x kernels read: the V4 record (sm120_packed_cache.py) and an
# index key, 128 fp8 + 4 or 64 packed MXFP4 + 4 (attention._indexer_k_cache_head_dim).
_STATE_BYTES = {"swa": (584,), "main": (584,), "indexer": (132, 68)}


class KVPlan:
    """What vLLM plans for one configuration.

    Attributes:
        config: the VllmConfig, with block size, cache dtype and layout as the engine
            core would leave them.
        layers: ``{name: layer}``, all that have a KV cache or an attention backend.
        specs: ``{name: spec}``, as the worker hands them to the planner.
        kv_cache_config: vLLM's KVCacheConfig, for a few blocks.
        groups: per KV cache group, vLLM's AttentionGroups.
        kernel_block_sizes: one a group, as vLLM's runners choose them.
        views: ``{name: tensor}``, [blocks, heads, states, bytes] as a kernel gets it.
        block_stride: bytes from one block to the next.

    Raises:
        ValueError: vLLM refuses these sizes.
        RuntimeError: on SM12x, a kind of cache or a record that nobody here knows.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        build_layers(config)
        self.layers = config.compilation_config.static_forward_context
        current_platform.update_block_size_for_backend(config)
        self.specs = attn_utils.get_kv_cache_spec(config)
        layout = self._layout()
        groups = planning.get_kv_cache_groups(config, copy.copy(self.specs))
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
        if current_platform.is_device_capability_family(120):
            self._refuse_unknown()

    def _refuse_unknown(self) -> None:
        """A cache that no rule is about must not pass for one that is right."""
        for name, spec in self.specs.items():
            kind = kind_of(self.layers[name])
            if kind is None:
                if not isinstance(spec, CircularBufferSpec):
                    raise RuntimeError(
                        f"{name}: {type(self.layers[name]).__name__} with a "
                        f"{type(spec).__name__} is a kind of cache unknown to the fork"
                    )
                continue
            view = self.views[name]
            size = int(view.shape[-1] * view.element_size())
            if size not in _STATE_BYTES[kind]:
                known = " or ".join(map(str, _STATE_BYTES[kind]))
                raise RuntimeError(
                    f"{name}: states of {size} B are a record unknown to the fork: "
                    f"SM12x kernels read {known} B"
                )

    def _layout(self) -> Any:
        config = self.config
        used = (layer.get_attn_backend() for layer in self.layers.values())
        layouts = get_supported_kv_cache_layouts(list(dict.fromkeys(used)))
        names = [layout.name for layout in layouts]
        specs = list(self.specs.values())
        layout = call(resolve_kv_cache_layout, config, [names], kv_cache_specs=specs)
        config.cache_config.kv_cache_layout = layout.name
        return layout

    def builder(self, name: str) -> Any:
        """The metadata builder that serves a cache."""
        for groups in self.groups:
            for group in groups:
                if name in group.layer_names:
                    return group.get_metadata_builder(0)
        raise KeyError(name)


def build_layers(config: Any) -> None:
    """Builds every attention layer of the model and its draft, without weights.

    They register themselves in the configuration, as in a worker. Quantization is left
    out: it decides how weights are stored, not how the cache is.
    """
    _one_rank()
    # Both ask for a GPU; neither has a say in the geometry.
    has_config = "has_flashinfer_sparse_mla_sm120_config"
    stand_ins = [
        (flashinfer, has_config, lambda *_: True),
        (torch.cuda, "Event", lambda *_, **__: None),
    ]
    config.quant_config = None
    config.compilation_config.static_forward_context.clear()
    attn_cls = _select_dsv4_attn_cls(config)
    hf_config = config.model_config.hf_config
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in stand_ins]
    try:
        for owner, name, stand_in in stand_ins:
            setattr(owner, name, stand_in)
        with set_current_vllm_config(config), torch.device("meta"):
            for layer in range(hf_config.num_hidden_layers + draft_layers(config)):
                attn_cls(config, prefix=f"model.layers.{layer}.attn")
    finally:
        for owner, name, value in saved:
            setattr(owner, name, value)


def draft_layers(config: Any) -> int:
    """Layers of the DSpark draft; 0 where none is asked for."""
    speculative = config.speculative_config
    if speculative is None or "dspark" not in str(speculative.method):
        return 0
    return int(config.model_config.hf_config.num_nextn_predict_layers or 0)


def kind_of(layer: Any) -> str | None:
    """``swa``, ``main`` or ``indexer``; None for the compressor's ring."""
    kinds = {
        DeepseekV4SWACache: "swa",
        DeepseekV4Attention: "main",
        DeepseekV4IndexerCache: "indexer",
    }
    found = (kind for cls, kind in kinds.items() if isinstance(layer, cls))
    return next(found, None)


def call(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls with those keywords that the release's signature has."""
    known = inspect.signature(function).parameters
    return function(*args, **{k: v for k, v in kwargs.items() if k in known})


def _one_rank() -> None:
    """Tensor parallel groups of this process alone: the cache is the same on each."""
    if parallel_state.model_parallel_is_initialized():
        return
    platform = type(current_platform)
    device_type = platform.device_type
    platform.device_type = "cpu"
    try:
        with (
            tempfile.NamedTemporaryFile() as rendezvous,
            set_current_vllm_config(VllmConfig()),
        ):
            parallel_state.init_distributed_environment(
                world_size=1,
                rank=0,
                distributed_init_method=f"file://{rendezvous.name}",
                local_rank=0,
                backend="gloo",
            )
            parallel_state.initialize_model_parallel(1, 1)
    finally:
        platform.device_type = device_type
