# SPDX-License-Identifier: Apache-2.0
"""The packed bytes of DeepSeek-V4.1's KV caches, written and read in plain PyTorch.

Imports torch alone and runs on any device. A *cache* here is uint8 ``[blocks, bytes]``,
one row a page; its rows may lie further apart than a page is long, as they do where
the pages of other layers lie between::

    pool = torch.zeros(blocks, 230400, dtype=torch.uint8)
    cache = pack_records(values, 64, out=pool[:, 576 : 576 + record_page_bytes(64)])
    kernel(record_view(cache, 64))
    values = unpack_records(cache, 64, slots)

Slots are global: ``block * page + row``.
"""

import torch

# The V4 record, as FlashMLA's and FlashInfer's DSv4 kernels document it: a data row of
# 448 fp8 e4m3 NoPE values and 64 bf16 RoPE values, and a scale row of 7 UE8M0 scales,
# one for 64 NoPE values each, and 1 pad byte.
NOPE = 448
ROPE = 64
HEAD_DIM = NOPE + ROPE
SCALE_GROUP = 64
GROUPS = NOPE // SCALE_GROUP
DATA_BYTES = NOPE + 2 * ROPE
SCALE_BYTES = GROUPS + 1
RECORD_BYTES = DATA_BYTES + SCALE_BYTES
# vLLM pads a page to this, the TMA stride of the record (kv_page_alignment).
PAGE_ALIGNMENT = 576

# The FP8 indexer key: 128 fp8 values and one fp32 scale (index_head_dim 128).
INDEX_DIM = 128
INDEX_SCALE_BYTES = 4
INDEX_BYTES = INDEX_DIM + INDEX_SCALE_BYTES

FP8_MAX = 448.0  # the largest finite e4m3fn value
UE8M0_BIAS = 127


def record_page_bytes(page: int) -> int:
    """Bytes of a page of ``page`` records, padding included."""
    return _round_up(page * RECORD_BYTES)


def index_page_bytes(page: int) -> int:
    """Bytes of a page of ``page`` indexer keys, padding included."""
    return _round_up(page * INDEX_BYTES)


def _round_up(size: int) -> int:
    return -(-size // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def pack_records(
    values: torch.Tensor, page: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Quantises and packs records.

    A group's scale is the smallest power of two that brings it within e4m3's range, and
    1 for a group of zeros; bf16 and e4m3 round to nearest even.

    Args:
        values: floating ``[slots, 512]``, finite; ``slots`` is a multiple of ``page``.
        page: records a page.
        out: uint8 ``[blocks, >= page * 584]`` to write into, of any row stride; bytes
            that belong to no record are left alone. None: a new cache of zeros, whose
            rows are ``record_page_bytes(page)`` long.

    Returns:
        uint8 ``[blocks, bytes]``: ``out``, or the new cache.

    Raises:
        ValueError: a shape that does not fit.
    """
    blocks = _blocks(values, HEAD_DIM, page)
    if out is None:
        out = _zeros(values, blocks, record_page_bytes(page))
    rows, scales = _record_parts(out, page)
    _same_blocks(out, blocks)
    values = values.to(torch.float64)
    groups = values[:, :NOPE].unflatten(1, (GROUPS, SCALE_GROUP))
    exponents = _scale_exponents(groups.abs().amax(-1))
    quantised = torch.ldexp(groups, -exponents.unsqueeze(-1)).float()
    nope = quantised.to(torch.float8_e4m3fn).flatten(1).view(torch.uint8)
    rope = values[:, NOPE:].to(torch.bfloat16).contiguous().view(torch.uint8)
    rows.copy_(torch.cat((nope, rope), 1).unflatten(0, (blocks, page)))
    bytes_ = torch.zeros_like(nope[:, :SCALE_BYTES])
    bytes_[:, :GROUPS] = (exponents + UE8M0_BIAS).to(torch.uint8)
    scales.copy_(bytes_.unflatten(0, (blocks, page)))
    return out


def _scale_exponents(largest: torch.Tensor) -> torch.Tensor:
    """int32 ``[slots, 7]``: the least e with ``largest <= 448 * 2**e``."""
    mantissa, exponent = torch.frexp(largest / FP8_MAX)  # mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    exponent = torch.where(largest == 0, 0, exponent)
    return exponent.clamp(-UE8M0_BIAS, UE8M0_BIAS).to(torch.int32)


def unpack_records(
    cache: torch.Tensor, page: int, slots: torch.Tensor | None = None
) -> torch.Tensor:
    """The values that a kernel reads from packed records.

    Args:
        cache: uint8 ``[blocks, bytes]``.
        page: records a page.
        slots: integer, any shape, within the cache. None: every slot in order.

    Returns:
        float64 ``[*slots.shape, 512]``, exact. A scale byte of 255 is NaN, as UE8M0
        has it.
    """
    rows, scales = _record_parts(cache, page)
    row, scale = _gather(rows, slots), _gather(scales, slots)
    nope = row[..., :NOPE].contiguous().view(torch.float8_e4m3fn).to(torch.float64)
    exponent = scale[..., :GROUPS].to(torch.int32)
    factor = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent - 127)
    factor = torch.where(exponent == 255, torch.nan, factor)
    nope = nope.unflatten(-1, (GROUPS, SCALE_GROUP)) * factor.unsqueeze(-1)
    rope = row[..., NOPE:].contiguous().view(torch.bfloat16).to(torch.float64)
    return torch.cat((nope.flatten(-2), rope), -1)


def record_view(cache: torch.Tensor, page: int) -> torch.Tensor:
    """The view of a cache that kernels are handed.

    uint8 ``[blocks, page, 584]`` over the same memory, strides (row stride of
    ``cache``, 584, 1): what vLLM binds to a layer. Only its base, page, block stride
    and record size carry meaning: a page's bytes are not interleaved, so
    ``view[b, r]`` is not record r.
    """
    return _kernel_view(cache, page, RECORD_BYTES)


def pack_index_keys(
    keys: torch.Tensor, page: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Quantises and packs FP8 indexer keys: N x 128 fp8 bytes, then N fp32 scales.

    A key's scale is the smallest power of two that brings it within e4m3's range (vLLM
    writes powers of two as well), and 1 for a key of zeros.

    Args:
        keys: floating ``[slots, 128]``, finite; ``slots`` is a multiple of ``page``.
        page, out: as ``pack_records``, with 132 bytes a key.
    """
    blocks = _blocks(keys, INDEX_DIM, page)
    if out is None:
        out = _zeros(keys, blocks, index_page_bytes(page))
    rows, scales = _index_parts(out, page)
    _same_blocks(out, blocks)
    keys = keys.to(torch.float64)
    exponents = _scale_exponents(keys.abs().amax(-1))
    quantised = torch.ldexp(keys, -exponents.unsqueeze(-1)).float()
    data = quantised.to(torch.float8_e4m3fn).view(torch.uint8)
    rows.copy_(data.unflatten(0, (blocks, page)))
    factor = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    scales.copy_(factor.unsqueeze(-1).view(torch.uint8).unflatten(0, (blocks, page)))
    return out


def unpack_index_keys(
    cache: torch.Tensor, page: int, slots: torch.Tensor | None = None
) -> torch.Tensor:
    """float64 ``[*slots.shape, 128]``: the keys of a packed indexer cache, scaled."""
    rows, scales = _index_parts(cache, page)
    data = _gather(rows, slots).view(torch.float8_e4m3fn).to(torch.float64)
    return data * _gather(scales, slots).view(torch.float32).to(torch.float64)


def index_view(cache: torch.Tensor, page: int) -> torch.Tensor:
    """uint8 ``[blocks, page, 132]`` as kernels are handed it; see ``record_view``."""
    return _kernel_view(cache, page, INDEX_BYTES)


def _record_parts(cache: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _parts(cache, page, DATA_BYTES, SCALE_BYTES)


def _index_parts(cache: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _parts(cache, page, INDEX_DIM, INDEX_SCALE_BYTES)


def _parts(
    cache: torch.Tensor, page: int, data: int, scale: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views ``[blocks, page, data]`` and ``[blocks, page, scale]`` of a cache."""
    _check_cache(cache, page, data + scale)
    rows = cache[:, : page * data].unflatten(1, (page, data))
    scales = cache[:, page * data : page * (data + scale)].unflatten(1, (page, scale))
    return rows, scales


def _gather(parts: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
    """Bytes ``[*slots.shape, n]`` of slots: copies, free to be reinterpreted."""
    blocks, page, _ = parts.shape
    if slots is None:
        slots = torch.arange(blocks * page, device=parts.device)
    slots = slots.long()
    return parts[slots // page, slots % page]


def _kernel_view(cache: torch.Tensor, page: int, size: int) -> torch.Tensor:
    _check_cache(cache, page, size)
    return cache[:, : page * size].unflatten(1, (page, size))


def _check_cache(cache: torch.Tensor, page: int, size: int) -> None:
    if cache.dtype != torch.uint8 or cache.dim() != 2 or cache.stride(1) != 1:
        raise ValueError(
            f"a cache is uint8 [blocks, bytes] with bytes side by side, found "
            f"{cache.dtype} {tuple(cache.shape)}, strides {cache.stride()}"
        )
    if page < 1 or cache.shape[1] < page * size:
        raise ValueError(
            f"a page of {page} takes {page * size} bytes, the cache's rows have "
            f"{cache.shape[1]}"
        )


def _blocks(values: torch.Tensor, dim: int, page: int) -> int:
    if values.dim() != 2 or values.shape[1] != dim or page < 1:
        raise ValueError(f"need [slots, {dim}], found {tuple(values.shape)}")
    if values.shape[0] % page:
        raise ValueError(f"{values.shape[0]} slots do not fill pages of {page}")
    return values.shape[0] // page


def _same_blocks(out: torch.Tensor, blocks: int) -> None:
    if out.shape[0] != blocks:
        raise ValueError(f"{blocks} pages of values, {out.shape[0]} rows to write")


def _zeros(like: torch.Tensor, blocks: int, size: int) -> torch.Tensor:
    return torch.zeros((blocks, size), dtype=torch.uint8, device=like.device)
