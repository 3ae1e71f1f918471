# SPDX-License-Identifier: Apache-2.0
"""Kernel-page units: a packed KV cache block whose layers have one page stride.

A kernel addresses page ``i`` of a layer at ``base + i * stride(0)``. A packed block
holds the pages of several layers, so a layer whose kernel takes smaller pages than
the block's own cannot simply be split: the next layer's page is in the way. But the
stride P of kernel pages need not be the block stride S over the pages in a block, it
only has to divide it: page j of block b then has id ``b * (S / P) + j``.

The rule: a packed group in which some spec's kernel page is smaller than its block is
laid out in units. A unit is one kernel page of every distinct kernel page size in the
group; its size is P. A layer's pages are at one place of consecutive units, and S is
as many units as the most numerous kernel page size has pages in a block:

    unit 0            unit 1            unit 2            ...
    [ A 0 | a 0 ]     [ B 0 | b 0 ]     [ B 1 | b 1 ]     S = 3 P

with B and b of two kernel pages a block, A and a of one.

Backends opt in, through the spec: ``kernel_page_tokens`` is the kernel page that they
take, ``kernel_page_stride`` is what this module answers. A group with a spec that did
not opt in is left as it was.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import (
        KVCacheGroupSpec,
        KVCacheSpec,
        MLAAttentionSpec,
    )


def kernel_page_bytes(spec: "MLAAttentionSpec") -> int:
    """Bytes of one kernel page, padded to the spec's own alignment."""
    page = replace(spec, block_size=spec.kernel_page_tokens, page_size_padded=None)
    return page.page_size_bytes


def kernel_pages(spec: "MLAAttentionSpec") -> int:
    """Kernel pages in one block."""
    return spec.block_size // spec.kernel_page_tokens


def lay_out_in_kernel_page_units(
    groups: "list[KVCacheGroupSpec]", vllm_config: "VllmConfig"
) -> "list[KVCacheGroupSpec]":
    """The groups; specs of those that the rule applies to carry their page stride.

    Only layouts with the block outermost pack several layers into a block.
    """
    if not any(_is_split(group) for group in groups):
        return groups
    layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
    if not layout.is_block_outermost:
        return groups
    return [_laid_out(group) if _is_split(group) else group for group in groups]


def _is_split(group: "KVCacheGroupSpec") -> bool:
    """Whether all layers opted in, and some has several kernel pages in a block."""
    specs = _layer_specs(group).values()
    opted_in = all(getattr(spec, "kernel_page_tokens", None) for spec in specs)
    return opted_in and any(kernel_pages(spec) > 1 for spec in specs)


def _laid_out(group: "KVCacheGroupSpec") -> "KVCacheGroupSpec":
    specs = _layer_specs(group)
    stride = _unit_bytes(specs.values())
    laid_out = {n: replace(s, kernel_page_stride=stride) for n, s in specs.items()}
    if hasattr(group.kv_cache_spec, "kv_cache_specs"):
        spec = replace(group.kv_cache_spec, kv_cache_specs=laid_out)
    else:
        spec = next(iter(laid_out.values()))
    return replace(group, kv_cache_spec=spec)


def _layer_specs(group: "KVCacheGroupSpec") -> dict[str, Any]:
    """The specs of a group's layers; of those on this worker, after a projection."""
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if specs is None:
        return dict.fromkeys(group.layer_names, group.kv_cache_spec)
    return {name: specs[name] for name in group.layer_names}


def _place_alignment(specs: Iterable[Any]) -> int:
    """What every place in a unit starts at a multiple of."""
    return math.lcm(*(spec.alignment or spec.dtype.itemsize for spec in specs))


def _places(specs: Iterable[Any]) -> tuple[dict[int, int], int]:
    """``{kernel page size: offset in the unit}``, largest first, and their total."""
    specs = list(specs)
    alignment = _place_alignment(specs)
    places, offset = {}, 0
    for size in sorted({kernel_page_bytes(spec) for spec in specs}, reverse=True):
        places[size] = offset
        offset += -(-size // alignment) * alignment
    return places, offset


def _unit_bytes(specs: Iterable[Any]) -> int:
    """Bytes of a unit: a multiple of every block stride that a spec asks for, since a
    kernel sees it as the stride between its blocks."""
    specs = list(specs)
    asked = (s.block_stride_alignment for s in specs)
    strides = math.lcm(1, *(a for a in asked if isinstance(a, int)))
    return -(-_places(specs)[1] // strides) * strides


def unit_block_bytes(groups: "Iterable[KVCacheGroupSpec]") -> int:
    """Bytes that a block needs for the groups that are laid out in units; 0 without."""
    needed = 0
    for group in groups:
        pages: dict[int, int] = {}
        stride = 0
        for spec in _layer_specs(group).values():
            if stride := getattr(spec, "kernel_page_stride", None) or 0:
                size = kernel_page_bytes(spec)
                pages[size] = pages.get(size, 0) + kernel_pages(spec)
        needed = max(needed, max(pages.values(), default=0) * stride)
    return needed


def unit_padding(groups: "Iterable[KVCacheGroupSpec]", page_bytes: int) -> int:
    """Bytes that units take in a block beyond ``page_bytes``, the pages of the largest
    group side by side."""
    return max(unit_block_bytes(groups) - page_bytes, 0)


def unit_layer_stride(
    spec: "KVCacheSpec", layer_names: Sequence[str], layer_stride: int
) -> int:
    """Bytes from one layer of ``spec`` to the next; ``layer_stride`` outside units.

    A layer alone gets one unit: vLLM takes a tensor whose layers are not closer
    together than its blocks for one that is not packed.
    """
    stride = getattr(spec, "kernel_page_stride", None)
    if not stride:
        return layer_stride
    return stride * (kernel_pages(spec) if len(layer_names) > 1 else 1)


def unit_offset(
    layers_by_spec: "Mapping[KVCacheSpec, Sequence[str]]",
    spec: "KVCacheSpec",
    byte_offset: int,
) -> int:
    """Bytes from a block's start to the first layer of ``spec``; ``byte_offset``
    outside units.

    Args:
        layers_by_spec: a group's layers on this worker, in the order of their places.
        spec: one of its keys.
        byte_offset: what upstream's side-by-side packing has.
    """
    if not getattr(spec, "kernel_page_stride", None):
        return byte_offset
    size, unit = kernel_page_bytes(spec), 0
    for other, layer_names in layers_by_spec.items():
        if other == spec:
            break
        if kernel_page_bytes(other) == size:
            unit += len(layer_names) * kernel_pages(other)
    return unit * spec.kernel_page_stride + _places(layers_by_spec)[0][size]


def keep_kernel_pages(
    merged: "MLAAttentionSpec", specs: "Sequence[MLAAttentionSpec]"
) -> None:
    """Gives a merged spec the kernel pages that all of ``specs`` have.

    Raises:
        AssertionError: they differ, so the specs cannot be one (vLLM's own way).
    """
    for name in ("kernel_page_tokens", "kernel_page_stride"):
        values = {getattr(spec, name) for spec in specs}
        assert len(values) == 1, f"All layers in a KV cache group need one {name}."
        object.__setattr__(merged, name, values.pop())
    if merged.kernel_page_tokens:  # what its kernel pages are padded to; merge drops it
        object.__setattr__(merged, "alignment", specs[0].alignment)
