# SPDX-License-Identifier: Apache-2.0
"""The KV caches that a configuration would plan on SM12x, without building the model.

Each spec comes from the class that makes it when the model is built, called with the
few attributes it reads. Nothing is imported that a vLLM image lacks, no weight is read
and no GPU is touched. Works on an unpatched tree too.
"""

import ast
import copy
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.models.deepseek_v41 import attention as v41
from vllm.models.deepseek_v41.nvidia.model import _select_dsv4_attn_cls
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.indexer import dsa_indexer_uses_fp4
from vllm.v1.attention.backends.mla.sparse_swa import (
    DeepseekSparseSWABackend,
    DeepseekV4SWACache,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
from vllm.v1.worker import utils

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend

# Bytes of a V4 record: 448 fp8 + 64 bf16 + 7 scales + 1 pad; pages are padded to the
# TMA stride of 576. DeepseekV4Attention.__init__ holds both as literals.
_RECORD_BYTES = 584
_PAGE_ALIGNMENT = 576


@dataclass(frozen=True)
class PlannedCache:
    """One KV cache of one layer.

    Attributes:
        name: ``model.layers.<i>.attn`` and, for caches that hang below it, the rest of
            the name that vLLM gives them.
        layer: the layer's index; drafts follow the backbone.
        kind: ``swa``, ``main`` or ``indexer``.
        tokens_per_state: the compress ratio; 1 for the sliding window.
        backend: the backend that declares its kernel blocks.
        spec: as the worker would hand it to the planner.
        kernel_spec: the spec at the kernel block size that vLLM would select.
    """

    name: str
    layer: int
    kind: str
    tokens_per_state: int
    backend: "type[AttentionBackend]"
    spec: KVCacheSpec
    kernel_spec: KVCacheSpec


def planned_caches(vllm_config: "VllmConfig") -> list[PlannedCache]:
    """Every sliding-window, main and indexer cache of the model and its DSpark draft.

    The compressor's ring buffers are left out: no SM12x kernel is bound to their size.

    Raises:
        RuntimeError: the installed attention class has changed so that its
            sliding-window page cannot be read.
        ValueError: vLLM finds no kernel block for a cache (``No common block size``),
            or refuses the KV cache dtype.
    """
    hf_config = vllm_config.model_config.hf_config
    attn_cls = _select_dsv4_attn_cls(vllm_config)
    config = _as_planned(vllm_config)
    drafts = draft_layers(vllm_config)
    ratios = list(hf_config.compress_ratios)[: hf_config.num_hidden_layers]
    sources = set(hf_config.kv_source_layer_ids or ())
    window = _swa_cache(config, attn_cls, hf_config)

    caches: list[PlannedCache] = []
    for layer in range(len(ratios) + drafts):
        name = f"model.layers.{layer}.attn"
        spec = DeepseekV4SWACache.get_kv_cache_spec(window, config)
        backend = attn_cls.swa_backend_cls or DeepseekSparseSWABackend
        caches.append(_planned(f"{name}.swa_cache", layer, "swa", backend, spec))
        if layer not in sources or layer >= len(ratios):
            continue
        for kind, suffix, backend, spec in _compressed(
            config, attn_cls, hf_config, int(ratios[layer])
        ):
            caches.append(_planned(name + suffix, layer, kind, backend, spec))
    return caches


def _planned(name: str, layer: int, kind: str, backend: Any, spec: Any) -> PlannedCache:
    ratio = int(spec.tokens_per_state)
    if hasattr(utils, "customize_attention_spec"):  # 0.32 on
        spec = utils.customize_attention_spec(backend, spec)
        block = utils.select_common_block_size(spec.block_size, [backend], [spec])
    else:
        block = utils.select_common_block_size(spec.block_size, [backend])
    kernel_spec = spec.copy_with_new_block_size(block)
    return PlannedCache(name, layer, kind, ratio, backend, spec, kernel_spec)


def _as_planned(vllm_config: "VllmConfig") -> Any:
    """The configuration as the worker has it when it asks for specs, on a copy.

    A layer resolves ``--kv-cache-dtype`` when it is built and writes the record's name
    back to the cache configuration; the platform then chooses the block size.
    """
    cache_config = copy.copy(vllm_config.cache_config)
    cache_config.cache_dtype = resolved_cache_dtype(vllm_config)
    cache_config.block_size = manager_block_size(vllm_config)
    config = copy.copy(vllm_config)
    config.cache_config = cache_config
    return config


def manager_block_size(vllm_config: "VllmConfig") -> int:
    """``--block-size``, or where the user gave none, what the platform will choose once
    the layers are built."""
    cache_config = vllm_config.cache_config
    if cache_config.user_specified_block_size:
        return cache_config.block_size
    attn_cls = _select_dsv4_attn_cls(vllm_config)
    backends = [
        attn_cls.backend_cls,
        attn_cls.swa_backend_cls or DeepseekSparseSWABackend,
        v41.DeepseekV41IndexerBackend,
    ]
    default = type(cache_config).DEFAULT_BLOCK_SIZE
    # From 0.31 on a size that every backend takes. The base Platform answers None for
    # a name it lacks, so the class is asked.
    if hasattr(type(current_platform), "_preferred_block_size_for_backends"):
        return current_platform._preferred_block_size_for_backends(
            backends, default, vllm_config
        )
    return backends[0].get_preferred_block_size(default)


def resolved_cache_dtype(vllm_config: "VllmConfig") -> str:
    """The KV record that attention layers resolve ``--kv-cache-dtype`` to.

    Raises:
        ValueError: the attention class cannot store that dtype.
    """
    attn_cls = _select_dsv4_attn_cls(vllm_config)
    requested = vllm_config.cache_config.cache_dtype
    if requested.endswith("_ds_mla") and attn_cls.use_fp8_ds_mla_layout:
        return requested
    return v41._resolve_dsv4_kv_cache_dtype(
        attn_cls.use_fp8_ds_mla_layout, requested, None
    )[0]


def _compressed(
    config: Any, attn_cls: Any, hf_config: Any, ratio: int
) -> Iterator[tuple[str, str, Any, AttentionSpec]]:
    dtype = config.cache_config.cache_dtype
    packed = attn_cls.use_fp8_ds_mla_layout
    main = SimpleNamespace(
        is_kv_source=True,
        head_dim=hf_config.head_dim,
        compress_ratio=ratio,
        kv_cache_dtype=dtype,
        kv_cache_torch_dtype=_torch_dtype(packed, dtype),
        kv_page_alignment=_PAGE_ALIGNMENT,
        kv_bytes_per_token=_RECORD_BYTES,  # 0.30
        compressed_bytes_per_token=_RECORD_BYTES,  # 0.31 on
    )
    spec = attn_cls.get_kv_cache_spec(main, config)
    yield "main", "", attn_cls.backend_cls, spec

    indexer = SimpleNamespace(
        head_dim=v41._indexer_k_cache_head_dim(
            hf_config.index_head_dim, dsa_indexer_uses_fp4(config)
        ),
        dtype=v41.torch.uint8,
        cache_config=config.cache_config,
        compress_ratio=ratio,
        sparse_logits=getattr(config.attention_config, "indexer_sparse_logits", False),
        rocm_mxfp4=False,
    )
    spec = v41.DeepseekV4IndexerCache.get_kv_cache_spec(indexer, config)
    backend = v41.DeepseekV4IndexerCache.get_attn_backend(indexer)
    yield "indexer", ".indexer.k_cache", backend, spec


def _torch_dtype(packed: bool, dtype: str) -> Any:
    return v41._resolve_dsv4_kv_cache_dtype(packed, dtype, None)[1]


def _swa_cache(config: Any, attn_cls: Any, hf_config: Any) -> Any:
    dtype = config.cache_config.cache_dtype
    return SimpleNamespace(
        block_size=swa_block_size(attn_cls),
        head_dim=hf_config.head_dim,
        window_size=hf_config.sliding_window,
        dtype=_torch_dtype(attn_cls.use_fp8_ds_mla_layout, dtype),
        cache_config=config.cache_config,
        packed_bytes_per_token=_RECORD_BYTES,
        packed_page_alignment=_PAGE_ALIGNMENT,
        packed_block_stride_alignment=None,
        bounded_replay=bool(getattr(config.cache_config, "swa_bounded_replay", False)),
    )


def swa_block_size(attn_cls: Any) -> int:
    """Tokens in a sliding-window page of an attention class.

    Upstream has the figure as a literal inside ``DeepseekV4Attention.__init__``, its
    proposals as an expression of the platform, the fork as a class attribute. Each is
    read from that call's source, with the class in the place of ``self``.

    Raises:
        RuntimeError: the source has none of these.
    """
    source = textwrap.dedent(inspect.getsource(v41.DeepseekV4Attention.__init__))
    for node in ast.walk(ast.parse(source)):
        if (
            not isinstance(node, ast.Call)
            or ast.unparse(node.func) != "DeepseekV4SWACache"
        ):
            continue
        for keyword in node.keywords:
            if keyword.arg != "block_size":
                continue
            try:
                names = vars(v41) | {"self": attn_cls}
                return int(eval(ast.unparse(keyword.value), names))
            except Exception:  # it is of __init__'s own names, say
                break
    raise RuntimeError(
        "the sliding-window page of DeepseekV4Attention cannot be read: its __init__ "
        "calls DeepseekV4SWACache in a way this check does not know. Use a vLLM "
        "release that the fork serves."
    )


def draft_layers(vllm_config: "VllmConfig") -> int:
    """Layers of the DSpark draft; 0 where none is asked for."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None or "dspark" not in str(speculative.method):
        return 0
    return int(vllm_config.model_config.hf_config.num_nextn_predict_layers or 0)
