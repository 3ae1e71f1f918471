# SPDX-License-Identifier: Apache-2.0
"""Where the pages of each cache lie inside a KV cache block, and what is wrong there.

A kernel finds page ``i`` of a layer at ``base + i * stride``: one stride, whatever lies
between. Page j of block b has the id ``b * (block bytes / stride) + j``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Place:
    """The pages that one cache has in a block.

    Attributes:
        offset: bytes from the block's start to the cache's first page.
        page_bytes: bytes of a page that kernels touch, without padding.
        stride: bytes from one page id to the next.
        pages: pages a block.
        alignment: what offsets and strides must be multiples of.
    """

    offset: int
    page_bytes: int
    stride: int
    pages: int
    alignment: int

    def spans(self) -> list[tuple[int, int]]:
        """First byte and the one after the last, page by page."""
        starts = (self.offset + page * self.stride for page in range(self.pages))
        return [(start, start + self.page_bytes) for start in starts]


def place_of(view: Any, spec: Any) -> Place:
    """The place of a cache.

    Args:
        view: as kernels get it, [pages, ..., states a page, C], bytes from the start of
            the allocation.
        spec: the cache's spec at its manager block.
    """
    size = view.element_size()
    states = int(view.shape[-2])
    # A state covers tokens_per_state tokens; the spec counts its own states a block.
    pages = max(int(spec.num_states) // states, 1)
    return Place(
        offset=view.storage_offset() * size,
        page_bytes=view[0].numel() * size,
        stride=view.stride(0) * size,
        pages=pages,
        alignment=getattr(spec, "alignment", None) or 1,
    )


def place_problems(places: Mapping[str, Place], block_bytes: int) -> list[str]:
    """What is wrong with the places of one KV cache group in its block; empty if
    kernels find every page, and no page of the group is where another is."""
    problems = []
    for name, place in places.items():
        if block_bytes % place.stride:
            problems.append(
                f"{name}: pages are {place.stride} B apart, which does not divide the "
                f"block's {block_bytes} B: its kernels need one stride"
            )
        for what, value in (("offset", place.offset), ("stride", place.stride)):
            if value % place.alignment:
                problems.append(
                    f"{name}: {what} {value} B is no multiple of {place.alignment}"
                )
    return problems + _overlaps(places, block_bytes)


def _overlaps(places: Mapping[str, Place], block_bytes: int) -> Iterable[str]:
    spans = sorted(
        (*span, name) for name, place in places.items() for span in place.spans()
    )
    problems = [
        f"{name}: a page at {start} to {end} leaves the block of {block_bytes} B"
        for start, end, name in spans
        if end > block_bytes
    ]
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start < end:
            problems.append(f"{one} and {other}: pages overlap at byte {start}")
    return problems
