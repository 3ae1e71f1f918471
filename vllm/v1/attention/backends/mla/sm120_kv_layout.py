# SPDX-License-Identifier: Apache-2.0
"""Which KV cache layout DeepSeek-V4.1 gets on SM12x, and what it can be used with.

``VLLM_SM120_KV_LAYOUT`` chooses: ``kernel-page-units`` (64 states a page at the bytes
per token of stock vLLM, v1/core/sm120_kernel_page_units.py) or ``spec-blocks`` (a block
of 64 states for each compressed spec). The backends of V4.1's compressed caches opt
in here; every other backend's specs, and other platforms, stay as they are.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import vllm.envs as envs
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend

KERNEL_PAGE_UNITS = "kernel-page-units"
SPEC_BLOCKS = "spec-blocks"

# Families whose V4.1 caches are laid out in units. A test on another GPU adds its own
# family here and in sm120_compressed_pages.py.
CAPABILITY_FAMILIES = (120,)

_ARCHITECTURE = "DeepseekV41ForCausalLM"

# They copy whole blocks, whatever is in them: OffloadingConnector makes one region of a
# packed block (offloading/worker.py, register_kv_caches), SimpleCPUOffloadConnector
# copies base + block * stride (v1/simple_kv_offload/worker.py). The others are not
# known to: one that moves layers or pages by their specs' sizes would miss the pages
# that a layer has in later units. NIXL splits blocks by the kernel block that it finds
# for the ratio-1 caches (nixl/base_worker.py, _sync_block_size_with_kernel).
WHOLE_BLOCK_CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector")


class KVConnectorError(RuntimeError):
    """A KV connector that would move wrong bytes. Not a ValueError: pydantic would bury
    its message in a dump of the whole configuration."""


def uses_kernel_page_units() -> bool:
    """Whether this device's V4.1 caches are laid out in units."""
    # As on_family in sm120_compressed_pages.py: this module applies without it.
    return (
        envs.VLLM_SM120_KV_LAYOUT == KERNEL_PAGE_UNITS
        and not current_platform.is_rocm()
        and any(
            current_platform.is_device_capability_family(family)
            for family in CAPABILITY_FAMILIES
        )
    )


def with_kernel_pages(
    backend: "type[AttentionBackend]", spec: AttentionSpec
) -> AttentionSpec:
    """The spec, with the kernel page that ``backend`` takes where units are used."""
    if not uses_kernel_page_units() or not isinstance(spec, MLAAttentionSpec):
        return spec
    sizes = backend.get_supported_kernel_block_sizes(spec)
    if not all(isinstance(size, int) for size in sizes):
        return spec  # vLLM may then choose another page than the largest named here
    fitting = [size for size in sizes if spec.block_size % size == 0]
    if not fitting:  # vLLM refuses the block size itself
        return spec
    return replace(spec, kernel_page_tokens=max(fitting))


def check_kv_connectors(vllm_config: "VllmConfig") -> None:
    """Refuses connectors that do not copy whole blocks, before any weight is read.

    Raises:
        KVConnectorError: the connector's name, and the way out.
    """
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    model_config = getattr(vllm_config, "model_config", None)
    if (
        transfer is None
        or not transfer.kv_connector
        or model_config is None
        or _ARCHITECTURE not in (model_config.architectures or ())
        or not uses_kernel_page_units()
    ):
        return
    used = [(transfer.kv_connector, transfer.kv_connector_module_path)]
    if transfer.kv_connector == "MultiConnector":
        children = (transfer.kv_connector_extra_config or {}).get("connectors", [])
        used += [
            (str(c.get("kv_connector")), c.get("kv_connector_module_path"))
            for c in children
        ]
        if used[0][1] is None:
            del used[0]  # vLLM's own only asks its children
    # A class from the user's own module may be called anything.
    refused = [name for name, own in used if own or name not in WHOLE_BLOCK_CONNECTORS]
    if refused:
        raise KVConnectorError(
            f"KV connector {', '.join(refused)} cannot be used with DeepSeek-V4.1's KV "
            f"cache layout {KERNEL_PAGE_UNITS}: a layer's pages are not side by side "
            "there, and it is not known to copy whole blocks. Use one of "
            f"{', '.join(WHOLE_BLOCK_CONNECTORS)}, or set "
            f"VLLM_SM120_KV_LAYOUT={SPEC_BLOCKS}, which takes 80 % more memory per "
            "token of context"
        )
