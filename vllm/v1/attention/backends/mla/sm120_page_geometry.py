# SPDX-License-Identifier: Apache-2.0
"""The start-up check of DeepSeek-V4.1's page geometry on capability family 120.

``check_planned_pages`` runs while the configuration is validated, on the specs that
it would plan; ``check_kernel_pages`` runs where kernel block sizes are finally chosen,
before the KV cache is allocated; ``checked_places`` where the allocated caches are
bound to layers. None runs again after start-up, and all raise: ``python -O`` does not
switch them off.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import vllm.envs as envs
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CircularBufferSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.worker.utils import AttentionGroup

# States in a page of a compressed cache, and tokens in one of the sliding window: the
# one size that DeepGEMM and FlashInfer of every base take on SM120 (DeepGEMM's host
# assert on block_kv; FlashInfer 0.6.18's _DECODE_DSV4_PAGE_BLOCK_SIZE).
STATES_PER_PAGE = 64
SWA_PAGE_TOKENS = 64

_ARCHITECTURE = "DeepseekV41ForCausalLM"
_SM12X_FAMILY = 120
# Where V4.1's caches get their backends from. Layers of other backends (a foreign
# draft model's, say) are none of this check's business.
_BACKEND_MODULES = (
    "vllm.models.deepseek_v41",
    "vllm.v1.attention.backends.mla.indexer",
    "vllm.v1.attention.backends.mla.sparse_swa",
)


class PageGeometryError(RuntimeError):
    """A KV cache page that no SM12x kernel takes. Not a ValueError: pydantic would
    bury its message in a dump of the whole configuration."""


def applies_to(vllm_config: "VllmConfig") -> bool:
    """Whether this configuration runs DeepSeek-V4.1 on SM12x."""
    model_config = getattr(vllm_config, "model_config", None)
    return (
        model_config is not None
        and _ARCHITECTURE in (model_config.architectures or ())
        and _on_sm12x()
    )


def _on_sm12x() -> bool:
    # ROCm's platform answers with a capability, too: 12.0 for gfx1201.
    return (
        not current_platform.is_rocm()
        and current_platform.is_device_capability_family(_SM12X_FAMILY)
    )


def _any_attention_page() -> bool:
    """Whether the fork's sparse MLA alone reads window pages (sm120_sparse_mla).
    Compressed pages are DeepGEMM's, too: the indexer's share a block with the main
    cache's."""
    return getattr(envs, "VLLM_SM120_SPARSE_MLA", None) == "fork"


def page_problem(spec: KVCacheSpec) -> str | None:
    """What is wrong with a page, or None.

    Args:
        spec: a cache's spec at its kernel block size.
    """
    name = type(spec).__name__
    if isinstance(spec, CircularBufferSpec):
        return None  # the compressor's ring: Triton kernels of any size
    if isinstance(spec, SlidingWindowMLASpec):
        if spec.block_size == SWA_PAGE_TOKENS or _any_attention_page():
            return None
        return (
            f"{name}: found {spec.block_size} tokens a page, need {SWA_PAGE_TOKENS}; "
            "apply the fork's patch sm120_swa_page_block_size"
        )
    if isinstance(spec, MLAAttentionSpec):
        if spec.num_states == STATES_PER_PAGE:
            return None
        return (
            f"{name}, {spec.tokens_per_state} token(s) a state, kernel block "
            f"{spec.block_size}: found {spec.num_states} states a page, need "
            f"{STATES_PER_PAGE}; apply the fork's patch sm120_compressed_page_states"
        )
    return (
        f"{name}: a kind of cache this check does not know, so it cannot vouch for it"
    )


def _refuse(problems: Iterable[tuple[str, str]], when: str) -> None:
    lines = [f"  {layers}: {problem}" for layers, problem in problems]
    if lines:
        raise PageGeometryError(
            f"DeepSeek-V4.1 on SM12x: KV cache pages that no kernel takes, {when}.\n"
            + "\n".join(lines)
            + "\nInstall the fork's wheel (`python -m fork verify` says what lacks)"
        )


def check_planned_pages(vllm_config: "VllmConfig") -> None:
    """Checks the specs that this configuration would plan. No weight is read yet.

    Raises:
        PageGeometryError: a page that no SM12x kernel takes.
    """
    if not applies_to(vllm_config):
        return
    # Imports the model's modules, so only now.
    from vllm.models.deepseek_v41.nvidia.sm120_planned_caches import (
        PlannedCache,
        planned_caches,
    )

    try:
        caches = planned_caches(vllm_config)
    except ValueError as error:  # vLLM's or ours: no block fits these arguments
        raise PageGeometryError(str(error)) from None
    problems: dict[str, list[PlannedCache]] = {}
    for cache in caches:
        if problem := page_problem(cache.kernel_spec):
            problems.setdefault(problem, []).append(cache)
    _refuse(
        (
            (_shown([c.name for c in found], {c.backend for c in found}), problem)
            for problem, found in problems.items()
        ),
        "planned by these arguments",
    )


def check_kernel_pages(
    vllm_config: "VllmConfig",
    backend: "type[AttentionBackend]",
    layer_names: list[str],
    kernel_spec: KVCacheSpec,
) -> None:
    """Checks the pages that one attention group's kernels will get.

    Args:
        vllm_config: the runner's configuration.
        backend: the group's backend.
        layer_names: the group's layers.
        kernel_spec: the group's spec at the kernel block size that was chosen.

    Raises:
        PageGeometryError: a page that no SM12x kernel takes.
    """
    if not applies_to(vllm_config) or not isinstance(kernel_spec, AttentionSpec):
        return
    if not backend.__module__.startswith(_BACKEND_MODULES):
        return
    if problem := page_problem(kernel_spec):
        _refuse([(_shown(layer_names, {backend}), problem)], "chosen for the KV cache")


def checked_places(
    views: "dict[str, Any]",
    kv_caches: "Mapping[str, Any]",
    attn_groups: "Iterable[AttentionGroup]",
) -> "dict[str, Any]":
    """``views``, once it is checked where the allocated pages of each KV cache group
    lie in its blocks.

    Args:
        views: ``{layer: cache}`` as kernels address it.
        kv_caches: ``{layer: cache}`` by manager blocks.
        attn_groups: every group of the runner.

    Raises:
        PageGeometryError: a page that its kernels would not find, or an overlap.
    """
    groups = list(attn_groups)
    if not (
        any(g.backend.__module__.startswith(_BACKEND_MODULES[0]) for g in groups)
        and _on_sm12x()
    ):
        return views
    from vllm.models.deepseek_v41.nvidia.sm120_block_places import (
        Place,
        place_of,
        place_problems,
    )

    places: dict[int, dict[str, Place]] = {}
    strides: dict[int, str] = {}  # of blocks, in bytes, with a cache that has it
    problems: list[tuple[str, str]] = []
    for group in groups:
        for name in group.layer_names:
            if name not in views or not group.backend.__module__.startswith(
                _BACKEND_MODULES
            ):
                continue
            by_block = kv_caches[name]
            stride = by_block.stride(0) * by_block.element_size()
            strides.setdefault(stride, name)
            place = place_of(views[name], group.kv_cache_spec)
            places.setdefault(group.kv_cache_group_id, {})[name] = place
            # The ids that block tables and slots are mapped to.
            ids = group.kernel_block_stride or 1
            if place.stride * ids != stride:
                problems.append(
                    (
                        name,
                        f"blocks are {ids} page ids apart, pages {place.stride} B, "
                        f"but blocks {stride} B",
                    )
                )
    if len(strides) > 1:
        shown = ", ".join(f"{name}: {stride} B" for stride, name in strides.items())
        problems.append(("all KV cache groups", f"blocks of different sizes ({shown})"))
    problems += [
        (f"KV cache group {number}", problem)
        for number, found in places.items()
        for problem in place_problems(found, max(strides))
    ]
    _refuse(problems, "where the KV cache was allocated")
    return views


def _shown(names: list[str], backends: "set[type[AttentionBackend]]") -> str:
    """The caches, a few by name, and who declares their pages."""
    shown = ", ".join(names)
    if len(names) > 4:
        shown = f"{names[0]}, {names[1]}, … {names[-1]} ({len(names)} caches)"
    declared_by = ", ".join(sorted(backend.get_name() for backend in backends))
    return f"{shown} [{declared_by}]"
