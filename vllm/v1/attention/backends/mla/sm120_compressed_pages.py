# SPDX-License-Identifier: Apache-2.0
"""64 states in every compressed page of DeepSeek-V4.1 on capability family 120.

A compressed cache stores one state for ``tokens_per_state`` tokens (the layer's
compress ratio: 1 or 2). On SM12x its spec's block is 64 x tokens_per_state tokens,
and the backends declare that block as their kernel block, so one kernel page is one
manager block of 64 states. Elsewhere both functions give back what they were given.
"""

from typing import TYPE_CHECKING

from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import CacheConfig
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.kv_cache_interface import KVCacheSpec

# What DeepGEMM's paged MQA logits and every FlashInfer since 0.6.18 both take on SM120:
# DeepGEMM's host assert is block_kv == 64 (FP8 cache, vLLM 0.30 and 0.31) or 32 or 64
# (0.32 on); FlashInfer's DSv4 decode is compiled for pages of 64 before 0.7.2.
STATES_PER_PAGE = 64

SM12X_FAMILY = 120


def compressed_block_size(cache_config: "CacheConfig", tokens_per_state: int) -> int:
    """Tokens in a block of a compressed cache's spec.

    Args:
        cache_config: its ``block_size`` is what other platforms use.
        tokens_per_state: the layer's compress ratio.

    Raises:
        ValueError: on SM12x, ``--block-size`` was given and is no multiple of 64.
    """
    block_size = cache_config.block_size
    if not current_platform.is_device_capability_family(SM12X_FAMILY):
        return block_size
    if cache_config.user_specified_block_size and block_size % STATES_PER_PAGE:
        raise ValueError(
            f"--block-size {block_size} cannot be used for DeepSeek-V4.1 on SM12x: "
            f"compressed pages hold {STATES_PER_PAGE} states, so it must be a multiple "
            f"of {STATES_PER_PAGE}. Use --block-size 128, or leave it out."
        )
    return STATES_PER_PAGE * tokens_per_state


def compressed_kernel_block_sizes(
    stock: "list[int | MultipleOf]", kv_cache_spec: "KVCacheSpec | None" = None
) -> "list[int | MultipleOf]":
    """Kernel block sizes, in tokens, that a backend of compressed caches declares.

    Args:
        stock: what the backend declares on other platforms.
        kv_cache_spec: the cache's spec. vLLM 0.30 and 0.31 select kernel blocks
            without one; both blocks that specs have here are declared then.
    """
    if not current_platform.is_device_capability_family(SM12X_FAMILY):
        return stock
    if kv_cache_spec is None:
        return [STATES_PER_PAGE, 2 * STATES_PER_PAGE]
    return [STATES_PER_PAGE * int(kv_cache_spec.tokens_per_state)]
