# SPDX-License-Identifier: Apache-2.0
"""Kernel pages of a KV cache laid out in units (v1/core/sm120_kernel_page_units.py).

The views that kernels and the zeroer get, and the slots of caches with one state a
token, which vLLM computes in manager blocks: slot ``b * block + o`` becomes
``b * (S / P) * page + o``, S being the block stride and P the page stride.
"""

from typing import TYPE_CHECKING

import torch
from vllm.triton_utils import tl, triton

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

# What vLLM's slot mappings hold for a token that writes nothing.
PAD_SLOT = -1


def in_units(spec: "KVCacheSpec") -> bool:
    """Whether the planner laid this spec's pages out in units."""
    return bool(getattr(spec, "kernel_page_stride", None))


def kernel_page_view(
    kv_cache: torch.Tensor, spec: "KVCacheSpec"
) -> tuple[torch.Tensor, int]:
    """A cache as its kernels address it, and the pages from one block to the next.

    Args:
        kv_cache: [blocks, ..., states a block, C], a view with the block stride.

    Returns:
        [pages, ..., states a page, C] with the page stride. Page j of block b has the
        id ``b * stride + j``; the pages between are other layers' and never addressed.
    """
    states = spec.get_num_kernel_states(spec.kernel_page_tokens)
    page_stride, rest = divmod(spec.kernel_page_stride, kv_cache.element_size())
    block_stride, odd = divmod(kv_cache.stride(0), page_stride)
    assert not rest and not odd, "a block is a whole number of units"
    pages = spec.block_size // spec.kernel_page_tokens
    view = kv_cache.as_strided(
        (
            (kv_cache.shape[0] - 1) * block_stride + pages,
            *kv_cache.shape[1:-2],
            states,
            kv_cache.shape[-1],
        ),
        (page_stride, *kv_cache.stride()[1:]),
    )
    return view, block_stride


def block_page_view(
    kv_cache: torch.Tensor, spec: "KVCacheSpec", block_stride: int, num_blocks: int
) -> torch.Tensor:
    """A kernel-page view, [pages, ..., states, C], by blocks: [blocks, pages a block,
    ..., states, C], which spans every page of the block."""
    pages = spec.block_size // spec.kernel_page_tokens
    return kv_cache.as_strided(
        (num_blocks, pages, *kv_cache.shape[1:]),
        (kv_cache.stride(0) * block_stride, *kv_cache.stride()),
    )


@triton.jit(do_not_specialize=["num_slots", "capacity"])
def _kernel_slots_kernel(
    slots_ptr,  # [num_slots] int64, in manager blocks
    out_ptr,  # [capacity] int64, in kernel pages
    num_slots,
    capacity,
    BLOCK_TOKENS: tl.constexpr,
    GAP: tl.constexpr,  # slots of other layers between two blocks
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + at, mask=at < num_slots, other=PAD)
    moved = slot + slot // BLOCK_TOKENS * GAP
    # All of it: a CUDA graph may read more slots than this step has tokens.
    tl.store(out_ptr + at, tl.where(slot >= 0, moved, PAD), mask=at < capacity)


class KernelSlots:
    """Slot mappings in kernel pages, in buffers that CUDA graphs may keep.

    Only for caches with one state a token: compressed ones take their slots from the
    block table already.
    """

    _BLOCK = 1024

    @classmethod
    def make(
        cls,
        spec: "KVCacheSpec",
        vllm_config: "VllmConfig",
        device: torch.device,
        microbatches: int,
    ) -> "KernelSlots | None":
        """One buffer for each microbatch, or None where slots need no mapping."""
        if not in_units(spec) or spec.tokens_per_state != 1:
            return None
        if spec.kernel_page_tokens == spec.block_size:
            return None  # one page a block: its page ids are the block ids
        return cls(
            spec,
            vllm_config.scheduler_config.max_num_batched_tokens,
            device,
            microbatches,
        )

    def __init__(
        self,
        spec: "KVCacheSpec",
        max_tokens: int,
        device: torch.device,
        microbatches: int = 1,
    ) -> None:
        self.block_tokens = spec.block_size
        self.page_tokens = spec.kernel_page_tokens
        self.mapped = torch.full(
            (microbatches, max_tokens), PAD_SLOT, dtype=torch.int64, device=device
        )
        # What each microbatch was last mapped from, for drafts that rewrite it.
        self.sources: dict[int, torch.Tensor] = {}

    def map(
        self, slot_mapping: torch.Tensor, block_stride: int, microbatch: int = 0
    ) -> torch.Tensor:
        """The slots in kernel pages.

        Args:
            slot_mapping: [num_tokens] int64, in manager blocks.
            block_stride: pages from one block to the next (``kernel_page_view``).
        """
        out = self.mapped[microbatch]
        count, capacity = slot_mapping.numel(), out.numel()
        assert count <= capacity, f"{count} slots, buffers hold {capacity}"
        assert block_stride > 0, "the caches are not bound yet"
        assert slot_mapping.is_contiguous()
        self.sources[microbatch] = slot_mapping
        _kernel_slots_kernel[(triton.cdiv(capacity, self._BLOCK),)](
            slot_mapping,
            out,
            count,
            capacity,
            BLOCK_TOKENS=self.block_tokens,
            GAP=block_stride * self.page_tokens - self.block_tokens,
            PAD=PAD_SLOT,
            BLOCK=self._BLOCK,
        )
        return out[:count]

    def refresh(self, block_stride: int) -> None:
        """Maps again what was last mapped, after its slots were rewritten in place."""
        for microbatch, source in self.sources.items():
            self.map(source, block_stride, microbatch)
