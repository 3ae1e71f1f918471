# SPDX-License-Identifier: Apache-2.0
"""Random inputs for one attention or indexer call, in the engine's byte layout.

Made so that a mistake shows however small its share of the work is: the first and last
slot of the first and last page are *loud* (each outweighs many ordinary candidates),
every index past a row's length points to a loud slot too, bytes between pages are
large values, and sinks weigh about as much as all candidates together.
"""

import math
from dataclasses import dataclass

import torch

from .sm120_packed_cache import (
    HEAD_DIM,
    INDEX_DIM,
    NOPE,
    PAGE_ALIGNMENT,
    SCALE_GROUP,
    index_page_bytes,
    pack_index_keys,
    pack_records,
    record_page_bytes,
)
from .sm120_reference import Segment

# Kinds of rows, dealt to tokens in turn. ``full``: no entry is left out. ``holes``: a
# seventh of them is -1. ``short``: random lengths. ``one``: the last slot of the last
# page alone. ``empty``: length 0. ``invalid``: full length, all -1. ``window`` and
# ``compressed``: the other segment has length 0.
ROW_KINDS = (
    "full",
    "holes",
    "short",
    "one",
    "empty",
    "invalid",
    "window",
    "compressed",
)

# Only so many blocks are filled and used, first and last among them: a pool may be as
# large as the engine's without costing more than its memory.
LIVE_BLOCKS = 64

# Root mean square of a query's values; records have about 1.
_QUERY_SIZE = 0.5

# Between pages: 240.0 as e4m3, 5e33 as bf16, 2**-8 as UE8M0. Finite, and far off.
GUARD_BYTE = 0x77

# 1 / sqrt(512): DeepSeek-V4.1's softmax scale without its YaRN factor, which would
# change the sharpness of random logits and nothing else.
SCALE = HEAD_DIM**-0.5


@dataclass(frozen=True)
class AttentionShape:
    """One attention call.

    Attributes:
        tokens: query tokens.
        heads: query heads that the kernel is handed, padding included.
        width: candidates of the sliding window, columns of its index table.
        page: records in a page of the sliding window.
        extra_width, extra_page: the same of the compressed cache; 0, 0: none.
        stride, extra_stride: bytes from one block to the next; 0: the page's own, so
            that pages are adjacent. Multiples of 576, and the page lies at the end.
        context: records that each cache holds at least.
        real_heads: heads that are not padding; 0: all. Padding has zero queries and
            sinks of -inf, as vLLM gives it.
        sinks: whether the call has attention sinks.
        rows: kinds of rows, see ``ROW_KINDS``.
    """

    tokens: int
    heads: int
    width: int
    page: int
    extra_width: int = 0
    extra_page: int = 0
    stride: int = 0
    extra_stride: int = 0
    context: int = 4096
    real_heads: int = 0
    sinks: bool = True
    rows: tuple[str, ...] = ROW_KINDS

    def __str__(self) -> str:
        extra = f" + {self.extra_width} of page {self.extra_page}"
        return (
            f"{self.tokens} tokens x {self.heads} heads, {self.width} of page "
            f"{self.page}{extra if self.extra_width else ''}"
        )


@dataclass(frozen=True)
class AttentionCase:
    """What an attention kernel is handed, on one device.

    ``q`` bf16 ``[T, H, 512]``; segments as ``Segment``, indices and lengths int32;
    ``sinks`` fp32 ``[H]`` or None; ``scale`` multiplies q·k.
    """

    shape: AttentionShape
    q: torch.Tensor
    window: Segment
    compressed: Segment | None
    sinks: torch.Tensor | None
    scale: float = SCALE


@dataclass(frozen=True)
class IndexerShape:
    """One call of paged MQA logits.

    Attributes:
        tokens: query rows, one request each.
        heads: indexer heads.
        page: keys in a page.
        context: keys of the longest context.
        stride: bytes from one block to the next; 0: the page's own.
        empty: whether one query has no key at all.
    """

    tokens: int
    heads: int
    page: int
    context: int = 4096
    stride: int = 0
    empty: bool = True

    def __str__(self) -> str:
        return (
            f"{self.tokens} rows x {self.heads} heads, {self.context} keys of page "
            f"{self.page}"
        )


@dataclass(frozen=True)
class IndexerCase:
    """What an indexer kernel is handed, on one device.

    ``q`` fp8 e4m3 ``[T, H, 128]``; ``cache`` uint8 ``[blocks, bytes]``;
    ``block_table`` int32 ``[T, pages]``; ``context_lengths`` int32 ``[T]``;
    ``weights`` fp32 ``[T, H]``.
    """

    shape: IndexerShape
    q: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    context_lengths: torch.Tensor
    weights: torch.Tensor


def random_case(
    shape: AttentionShape | IndexerShape, seed: int = 0, device: str = "cuda"
) -> AttentionCase | IndexerCase:
    """A case of this shape, the same for the same seed and device type.

    Peak memory: the caches (blocks x stride), three times q, and about 0.2 GiB.

    Raises:
        ValueError: a stride that no page fits in, or not a multiple of 576.
    """
    generator = torch.Generator(device).manual_seed(seed)
    if isinstance(shape, IndexerShape):
        return _indexer_case(shape, generator)
    return _attention_case(shape, generator)


def _attention_case(shape: AttentionShape, rng: torch.Generator) -> AttentionCase:
    common = torch.randn(HEAD_DIM, generator=rng, device=rng.device)
    q = torch.randn(
        (shape.tokens, shape.heads, HEAD_DIM), generator=rng, device=rng.device
    )
    # Logits of ordinary records then deviate by 0.5: an error of a rounded query stays
    # small, and no row hangs on one candidate.
    q = q.add_(common).mul_(_QUERY_SIZE * 0.5**0.5).to(torch.bfloat16)
    real = shape.real_heads or shape.heads
    q[:, real:] = 0
    # A loud record weighs an eighth of all ordinary candidates of the row together;
    # q·(common * loud) * SCALE is about 8 * loud.
    total = math.log(shape.width + shape.extra_width)
    gain = _QUERY_SIZE * 0.5**0.5 * HEAD_DIM * SCALE
    loud = max(total - math.log(8), 0.0) / gain
    extra = None
    if shape.extra_width:
        extra = _segment(shape, rng, common * loud, extra=True)
    window = _segment(shape, rng, common * loud, extra=False)
    sinks = None
    if shape.sinks:
        noise = torch.rand(shape.heads, generator=rng, device=rng.device)
        sinks = total + 2 * noise
        sinks[real:] = -torch.inf
    return AttentionCase(shape, q, window, extra, sinks)


def _segment(
    shape: AttentionShape, rng: torch.Generator, loud: torch.Tensor, extra: bool
) -> Segment:
    """One cache and each token's candidates in it."""
    page, width, stride = shape.page, shape.width, shape.stride
    if extra:
        page, width, stride = shape.extra_page, shape.extra_width, shape.extra_stride
    blocks = -(-shape.context // page)
    live = _live_blocks(blocks, rng.device)
    slots = (live[:, None] * page + torch.arange(page, device=rng.device)).flatten()
    corners = _corners(blocks * page, page, rng.device)
    # Where a row's dead entries point: loud, and no row's candidate.
    decoys = slots[(slots > 0) & ~torch.isin(slots, corners)][:4]
    values = _record_values(slots.numel(), rng)
    values[torch.isin(slots, torch.cat((corners, decoys)))] += loud
    cache = _cache(blocks, record_page_bytes(page), stride, rng.device)
    packed = pack_records(values, page)
    cache[live, : packed.shape[1]] = packed

    ordinary = slots[~torch.isin(slots, decoys)]
    pick = torch.randint(
        ordinary.numel(), (shape.tokens, width), generator=rng, device=rng.device
    )
    indices = ordinary[pick]
    indices[:, : corners.numel()] = corners[:width]
    indices[:, -1] = corners[-1]  # the last candidate counts, too
    lengths = torch.full((shape.tokens,), width, device=rng.device)
    column = torch.arange(width, device=rng.device)
    kinds = [shape.rows[t % len(shape.rows)] for t in range(shape.tokens)]
    random = torch.randint(
        1, width + 1, (shape.tokens,), generator=rng, device=rng.device
    )
    for token, kind in enumerate(kinds):
        if kind not in ROW_KINDS:
            raise ValueError(f"row kind {kind!r}: need one of {', '.join(ROW_KINDS)}")
        if kind == "holes":
            indices[token, column % 7 == 3] = -1
        elif kind == "short":
            lengths[token] = random[token]
        elif kind == "one":
            lengths[token], indices[token, 0] = 1, corners[-1]
        elif kind == "invalid":
            indices[token] = -1
        if kind == "empty" or kind == ("window" if extra else "compressed"):
            lengths[token] = 0
    if decoys.numel():
        dead = column >= lengths[:, None]
        indices = torch.where(dead, decoys[column % decoys.numel()], indices)
    return Segment(cache, page, indices.int(), lengths.int())


def _record_values(count: int, rng: torch.Generator) -> torch.Tensor:
    """fp32 ``[count, 512]`` of about unit variance, whose groups' scales differ."""
    values = torch.randn((count, HEAD_DIM), generator=rng, device=rng.device)
    groups = NOPE // SCALE_GROUP
    powers = torch.randint(
        -1, 2, (count, groups, 1), generator=rng, device=rng.device
    ).float()
    nope = values[:, :NOPE].unflatten(1, (groups, SCALE_GROUP))
    # 0.75: the mean square of 1/2, 1 and 2 is 1.75.
    values[:, :NOPE] = (nope * torch.exp2(powers) * 0.75).flatten(1)
    return values


def _indexer_case(shape: IndexerShape, rng: torch.Generator) -> IndexerCase:
    page, tokens = shape.page, shape.tokens
    pages = -(-shape.context // page)
    live = _live_blocks(pages + 2, rng.device)
    keys = torch.randn(
        (live.numel() * page, INDEX_DIM), generator=rng, device=rng.device
    )
    powers = torch.randint(
        -3, 4, (keys.shape[0], 1), generator=rng, device=rng.device
    ).float()
    cache = _cache(pages + 2, index_page_bytes(page), shape.stride, rng.device)
    packed = pack_index_keys(keys * torch.exp2(powers), page)
    cache[live, : packed.shape[1]] = packed
    pick = torch.randint(
        live.numel(), (tokens, pages), generator=rng, device=rng.device
    )
    block_table = live[pick]
    block_table[:, 0], block_table[:, -1] = live[-1], live[0]
    # Full, one key, one page, one key more, none, all but one; then at random.
    corner = [shape.context, 1, page, page + 1, 0, shape.context - 1]
    lengths = torch.randint(
        0, shape.context + 1, (tokens,), generator=rng, device=rng.device
    )
    named = torch.tensor(corner[:tokens], device=rng.device)
    lengths[: named.numel()] = named.clamp(0, shape.context)
    if not shape.empty:
        lengths.clamp_(min=1)
    q = torch.randn(
        (tokens, shape.heads, INDEX_DIM), generator=rng, device=rng.device
    ).to(torch.float8_e4m3fn)
    weights = torch.randn((tokens, shape.heads), generator=rng, device=rng.device)
    return IndexerCase(shape, q, cache, block_table.int(), lengths.int(), weights)


def _cache(blocks: int, size: int, stride: int, device: torch.device) -> torch.Tensor:
    """uint8 ``[blocks, size]``, the last ``size`` bytes of every ``stride``."""
    stride = stride or size
    if stride < size or stride % PAGE_ALIGNMENT:
        raise ValueError(
            f"stride {stride} B: a page takes {size} B, and strides are multiples of "
            f"{PAGE_ALIGNMENT}"
        )
    pool = torch.empty((blocks, stride), dtype=torch.uint8, device=device)
    pool[_live_blocks(blocks, device)] = GUARD_BYTE
    return pool[:, stride - size :]


def _live_blocks(blocks: int, device: torch.device) -> torch.Tensor:
    """int64, ascending: the first, the last, and some between."""
    count = min(blocks, LIVE_BLOCKS)
    steps = torch.arange(count, device=device) * (blocks - 1) // max(count - 1, 1)
    return steps.unique()


def _corners(slots: int, page: int, device: torch.device) -> torch.Tensor:
    """int64: first and last slot of the first and of the last page, ascending."""
    found = sorted({0, page - 1, slots - page, slots - 1})
    return torch.tensor(found, device=device)
