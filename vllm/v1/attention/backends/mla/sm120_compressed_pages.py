# SPDX-License-Identifier: Apache-2.0
"""64 states in every compressed page of DeepSeek-V4.1 on capability family 120.

A compressed cache stores one state for ``tokens_per_state`` tokens (the layer's
compress ratio: 1 or 2). On SM12x the backends declare 64 x tokens_per_state tokens as
their kernel block. The spec's block is the same, so that one kernel page is one manager
block, unless vLLM can lay several kernel pages out in a block (sm120_kv_layout): then
it stays ``--block-size``. Elsewhere both functions give back what they were given.
"""

from typing import TYPE_CHECKING

import vllm.envs as envs
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import CacheConfig
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.kv_cache_interface import KVCacheSpec

# What DeepGEMM's paged MQA logits and every FlashInfer since 0.6.18 both take on SM120:
# DeepGEMM's host assert is block_kv == 64 (FP8 cache, vLLM 0.30 and 0.31) or 32 or 64
# (0.32 on); FlashInfer's DSv4 decode is compiled for pages of 64 before 0.7.2.
STATES_PER_PAGE = 64

# A test on another GPU adds its own family here and in sm120_kv_layout.py.
CAPABILITY_FAMILIES = (120,)

# The largest compress ratio: its kernel page is the one that a block must hold.
_MAX_TOKENS_PER_STATE = 2


def on_family(families: "Iterable[int]") -> bool:
    """Whether this is an NVIDIA GPU of one of these capability families. ROCm's
    platform answers with a capability, too: 12.0 for gfx1201."""
    return not current_platform.is_rocm() and any(
        current_platform.is_device_capability_family(family) for family in families
    )


def _applies() -> bool:
    return on_family(CAPABILITY_FAMILIES)


def _in_units() -> bool:
    """Whether blocks hold several kernel pages: asked for, in a vLLM that can."""
    # vLLM's table has no such variable without sm120_kv_layout.
    layout = getattr(envs, "VLLM_SM120_KV_LAYOUT", "spec-blocks")
    return layout == "kernel-page-units"


def compressed_block_size(cache_config: "CacheConfig", tokens_per_state: int) -> int:
    """Tokens in a block of a compressed cache's spec.

    Args:
        cache_config: its ``block_size`` is what other platforms use.
        tokens_per_state: the layer's compress ratio.

    Raises:
        ValueError: on SM12x, ``--block-size`` was given and no whole number of kernel
            pages fits in it: a multiple of 128 is needed, or of 64 in spec blocks.
    """
    block_size = cache_config.block_size
    if not _applies():
        return block_size
    in_units = _in_units()
    step = STATES_PER_PAGE * (_MAX_TOKENS_PER_STATE if in_units else 1)
    if cache_config.user_specified_block_size and block_size % step:
        raise ValueError(
            f"--block-size {block_size} cannot be used for DeepSeek-V4.1 on SM12x: "
            f"compressed pages hold {STATES_PER_PAGE} states, so it must be a multiple "
            f"of {step}. Use --block-size 128, or leave it out."
        )
    return block_size if in_units else STATES_PER_PAGE * tokens_per_state


def compressed_kernel_block_sizes(
    stock: "list[int | MultipleOf]", kv_cache_spec: "KVCacheSpec | None" = None
) -> "list[int | MultipleOf]":
    """Kernel block sizes, in tokens, that a backend of compressed caches declares.

    Args:
        stock: what the backend declares on other platforms.
        kv_cache_spec: the cache's spec. vLLM asks without one to choose a block size,
            and 0.30 and 0.31 to select kernel blocks, too: what is declared then must
            hold for every spec.
    """
    if not _applies():
        return stock
    if kv_cache_spec is None:
        widest = STATES_PER_PAGE * _MAX_TOKENS_PER_STATE
        return [widest] if _in_units() else [STATES_PER_PAGE, widest]
    return [STATES_PER_PAGE * int(kv_cache_spec.tokens_per_state)]
