# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA over ``fp8_ds_mla`` records in Triton: for what the CUDA kernel does not
take, and where it cannot be built. Called through ``sm120_sparse_mla.sparse_mla``.

How it works. A record's 512 values are eight slices of 64: seven in e4m3, with one
scale each, and one in bf16. Warps own slices, not heads or candidates: each multiplies
its slice of the query with its slice of some records, a sum over warps gives logits,
and each then adds to its own slice of the output. So nothing of the query or the output
is held twice, and a record is read and dequantised once for key and value. Where there
are few tokens, a token's candidates are cut into splits, which a second kernel merges
in a fixed order; the sink enters there, once.
"""

import torch
import triton
import triton.language as tl

from .sm120_sparse_mla_operands import Operands, slots_of
from .sm120_sparse_mla_plan import HEAD_DIM, WARPS, Plan

# Columns of the output that one program of the merge adds up.
_MERGE_COLUMNS = 128


@triton.jit
def _bf16(value, EMULATED: tl.constexpr):
    """Rounded to nearest even. The interpreter's own conversion truncates."""
    if EMULATED:
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        value = bits.to(tl.float32, bitcast=True)
    return value.to(tl.bfloat16)


@triton.jit
def _step(
    step,
    swa_steps,
    swa,
    swa_indices,
    swa_len,
    swa_page,
    swa_stride,
    swa_slots,
    extra,
    extra_indices,
    extra_len,
    extra_page,
    extra_stride,
    extra_slots,
    CANDIDATES: tl.constexpr,
    WIDE_SCALES: tl.constexpr,
):
    """Reads one step's records: which are valid [N], e4m3 bytes [8, N, 64] with the
    last slice left zero, that slice's bf16 [N, 64], and scales: bytes [8, N], or where
    they lie at multiples of 8 a word of eight [N]. Nothing is read through an invalid
    index."""
    second = step >= swa_steps
    cache = tl.where(second, extra, swa)
    indices = tl.where(second, extra_indices, swa_indices)
    length = tl.where(second, extra_len, swa_len)
    page = tl.where(second, extra_page, swa_page)
    stride = tl.where(second, extra_stride, swa_stride)
    slots = tl.where(second, extra_slots, swa_slots)
    first = tl.where(second, step - swa_steps, step) * CANDIDATES
    column = first + tl.arange(0, CANDIDATES)
    slot = tl.load(indices + column, mask=column < length, other=-1)
    valid = (slot >= 0) & (slot < slots)
    slot = tl.where(valid, slot, 0)
    block = slot // page
    row = slot - block * page
    start = cache + block.to(tl.int64) * stride
    record = start + row * 576
    part = tl.arange(0, 8)
    column = tl.arange(0, 64)
    quantised = part < 7
    nope = tl.load(
        record[None, :, None] + part[:, None, None] * 64 + column[None, None, :],
        mask=valid[None, :, None] & quantised[:, None, None],
        other=0,
    )
    rope = tl.load(
        (record[:, None] + 448).to(tl.pointer_type(tl.bfloat16)) + column[None, :],
        mask=valid[:, None],
        other=0.0,
    )
    at = start + page.to(tl.int64) * 576 + row * 8
    if WIDE_SCALES:
        scale = tl.load(at.to(tl.pointer_type(tl.int64)), mask=valid, other=0)
    else:
        scale = tl.load(
            at[None, :] + part[:, None],
            mask=valid[None, :] & quantised[:, None],
            other=0,
        )
    return valid, nope, rope, scale


@triton.jit
def _dequantised(nope, rope, scale, WIDE_SCALES: tl.constexpr, EMULATED: tl.constexpr):
    """bf16 [8, N, 64]: exact, but for scales that leave bf16's range."""
    if WIDE_SCALES:
        scale = scale[None, :] >> (tl.arange(0, 8) * 8)[:, None].to(tl.int64)
    exponent = scale.to(tl.int32) & 255
    # As the bits of an fp32: 2**(byte - 127); byte 0 is subnormal, 255 is NaN.
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    bits = tl.where(exponent == 255, 0x7FC00000, bits)
    factor = bits.to(tl.float32, bitcast=True)
    value = nope.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor[:, :, None]
    last = (tl.arange(0, 8) == 7)[:, None, None]
    return tl.where(last, rope[None, :, :], _bf16(value, EMULATED))


@triton.jit
def _attend(
    q,
    records,
    valid,
    acc,
    largest,
    total,
    scale_log2,
    HEADS: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """One step of the online softmax, in base 2."""
    if EMULATED:
        q, records = q.to(tl.float32), records.to(tl.float32)
    logits = tl.sum(tl.dot(q, tl.permute(records, (0, 2, 1))), 0) * scale_log2
    logits = tl.where(valid[None, :], logits, float("-inf"))
    now = tl.maximum(largest, tl.max(logits, 1))
    finite = tl.where(now == float("-inf"), 0.0, now)
    weights = tl.exp2(logits - finite[:, None])
    shrink = tl.exp2(largest - finite)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[None, :, None]
    weights = _bf16(weights, EMULATED).to(records.dtype)
    weights = tl.broadcast_to(weights[None, :, :], (8, HEADS, records.shape[1]))
    return tl.dot(weights, records, acc), now, total


# Triton compiles again where an integer is 1 or a multiple of 16. For these that would
# only cost start-up time; strides decide how wide loads are.
_UNSPECIALIZED = [
    "heads",
    "swa_page",
    "swa_slots",
    "swa_width",
    "swa_row",
    "extra_page",
    "extra_slots",
    "extra_width",
    "extra_row",
    "splits",
    "head_blocks",
]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _candidates_kernel(
    q,
    swa,
    swa_indices,
    swa_lens,
    extra,
    extra_indices,
    extra_lens,
    sinks,
    out,
    lse,
    parts,
    scale_log2,
    heads,
    q_token,
    q_head,
    out_token,
    out_head,
    swa_page,
    swa_stride,
    swa_slots,
    swa_width,
    swa_row,
    extra_page,
    extra_stride,
    extra_slots,
    extra_width,
    extra_row,
    splits,
    head_blocks,
    HAS_SWA_LENS: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    HAS_EXTRA_LENS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    SPLIT: tl.constexpr,
    AHEAD: tl.constexpr,
    HEADS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    WIDE_SCALES: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """One split of one token's candidates, for ``HEADS`` heads."""
    program = tl.program_id(0)
    split = program // head_blocks
    token = tl.program_id(1).to(tl.int64)
    head = (program - split * head_blocks) * HEADS + tl.arange(0, HEADS)
    real = head < heads
    part = tl.arange(0, 8)
    column = tl.arange(0, 64)
    latent = part[:, None, None] * 64 + column[None, None, :]
    q_at = q + token * q_token + head[None, :, None] * q_head + latent
    query = tl.load(q_at, mask=real[None, :, None], other=0.0)

    swa_len = swa_width
    if HAS_SWA_LENS:
        swa_len = tl.minimum(tl.load(swa_lens + token).to(tl.int32), swa_width)
    swa_steps = tl.cdiv(tl.maximum(swa_len, 0), CANDIDATES)
    steps = swa_steps
    extra_len = extra_width
    if HAS_EXTRA:
        if HAS_EXTRA_LENS:
            extra_len = tl.load(extra_lens + token).to(tl.int32)
            extra_len = tl.minimum(extra_len, extra_width)
        steps += tl.cdiv(tl.maximum(extra_len, 0), CANDIDATES)
    each = tl.cdiv(steps, splits)
    first = split * each
    last = tl.minimum(first + each, steps)
    swa_indices += token * swa_row
    extra_indices += token * extra_row

    acc = tl.zeros((8, HEADS, 64), tl.float32)
    largest = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    if AHEAD:
        valid, nope, rope, scale = _step(
            first,
            swa_steps,
            swa,
            swa_indices,
            tl.where(first < last, swa_len, 0),
            swa_page,
            swa_stride,
            swa_slots,
            extra,
            extra_indices,
            tl.where(first < last, extra_len, 0),
            extra_page,
            extra_stride,
            extra_slots,
            CANDIDATES,
            WIDE_SCALES,
        )
        for step in range(first, last):
            records = _dequantised(nope, rope, scale, WIDE_SCALES, EMULATED)
            now_valid = valid
            more = step + 1 < last
            valid, nope, rope, scale = _step(
                step + 1,
                swa_steps,
                swa,
                swa_indices,
                tl.where(more, swa_len, 0),
                swa_page,
                swa_stride,
                swa_slots,
                extra,
                extra_indices,
                tl.where(more, extra_len, 0),
                extra_page,
                extra_stride,
                extra_slots,
                CANDIDATES,
                WIDE_SCALES,
            )
            acc, largest, total = _attend(
                query,
                records,
                now_valid,
                acc,
                largest,
                total,
                scale_log2,
                HEADS,
                EMULATED,
            )
    else:
        for step in range(first, last):
            valid, nope, rope, scale = _step(
                step,
                swa_steps,
                swa,
                swa_indices,
                swa_len,
                swa_page,
                swa_stride,
                swa_slots,
                extra,
                extra_indices,
                extra_len,
                extra_page,
                extra_stride,
                extra_slots,
                CANDIDATES,
                WIDE_SCALES,
            )
            records = _dequantised(nope, rope, scale, WIDE_SCALES, EMULATED)
            acc, largest, total = _attend(
                query,
                records,
                valid,
                acc,
                largest,
                total,
                scale_log2,
                HEADS,
                EMULATED,
            )

    some = total > 0
    acc = acc * (1.0 / tl.where(some, total, 1.0))[None, :, None]
    lse_log2 = tl.where(some, largest + tl.log2(total), float("-inf"))
    if SPLIT:
        # [T, splits, heads, 512], and after it [T, splits, heads].
        row = (token * splits + split) * heads + head
        at = parts + row[None, :, None] * 512 + latent
        tl.store(at, acc, mask=real[None, :, None])
        lses = parts + tl.num_programs(1).to(tl.int64) * splits * heads * 512
        tl.store(lses + row, lse_log2, mask=real)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=real, other=0.0) * 1.4426950408889634
            acc = acc * _kept(sink, lse_log2)[None, :, None]
        out_at = out + token * out_token + head[None, :, None] * out_head + latent
        tl.store(out_at, _bf16(acc, EMULATED), mask=real[None, :, None])
        if HAS_LSE:
            lse_at = lse + token * heads + head
            tl.store(lse_at, lse_log2 * 0.6931471805599453, mask=real)


# Triton's interpreter multiplies bf16 as if it were integers: there, operands are
# rounded to bf16 and multiplied as fp32, which is what tensor cores do.
_EMULATED = not isinstance(_candidates_kernel, triton.JITFunction)


@triton.jit
def _kept(sink_log2, lse_log2):
    """What the sink leaves of the weights: exp(lse) / (exp(lse) + exp(sink))."""
    kept = 1.0 / (1.0 + tl.exp2(sink_log2 - lse_log2))
    return tl.where(lse_log2 == float("-inf"), 0.0, kept)


@triton.jit(do_not_specialize=["heads", "splits"])
def _merge_kernel(
    parts,
    sinks,
    out,
    lse,
    heads,
    splits,
    out_token,
    out_head,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """The splits of one token and head, ``COLUMNS`` of its output, always in the same
    order; then the sink."""
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.arange(0, SPLITS)
    row = (token * splits + split) * heads + head
    lses = parts + tl.num_programs(1).to(tl.int64) * splits * heads * 512
    lse_log2 = tl.load(lses + row, mask=split < splits, other=float("-inf"))
    value = tl.load(
        parts + row[:, None] * 512 + column[None, :],
        mask=(split < splits)[:, None],
        other=0.0,
    )
    largest = tl.max(lse_log2, 0)
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    weight = tl.exp2(lse_log2 - finite)
    total = tl.sum(weight, 0)
    some = total > 0
    result = tl.sum(value * weight[:, None], 0) / tl.where(some, total, 1.0)
    whole = tl.where(some, finite + tl.log2(total), float("-inf"))
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        result = result * _kept(sink, whole)
    at = out + token * out_token + head * out_head + column
    tl.store(at, _bf16(result, EMULATED))
    if HAS_LSE:  # the same value from each block of columns
        tl.store(lse + token * heads + head, whole * 0.6931471805599453)


def launch(planned: Plan, call: Operands) -> None:
    """One call, checked and planned by ``sparse_mla``."""
    q, swa_cache, swa_indices, swa_lens, sinks, scale_log2, out, *more = call
    extra_cache, extra_indices, extra_lens, lse, parts = more
    tokens, heads, _ = q.shape
    splits, cut = planned.splits, planned.config
    has_extra = extra_cache is not None
    if not has_extra:
        extra_cache, extra_indices = swa_cache, swa_indices
    if parts is None:
        parts = q  # not touched
    _candidates_kernel[(splits * planned.head_blocks, tokens)](
        q,
        swa_cache,
        swa_indices,
        swa_indices if swa_lens is None else swa_lens,
        extra_cache,
        extra_indices,
        extra_indices if extra_lens is None else extra_lens,
        q if sinks is None else sinks,
        out,
        q if lse is None else lse,
        parts,
        scale_log2,
        heads,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        swa_cache.shape[1],
        swa_cache.stride(0),
        slots_of(swa_cache),
        swa_indices.shape[1],
        swa_indices.stride(0),
        extra_cache.shape[1],
        extra_cache.stride(0),
        slots_of(extra_cache),
        extra_indices.shape[1] if has_extra else 0,
        extra_indices.stride(0),
        splits,
        planned.head_blocks,
        HAS_SWA_LENS=swa_lens is not None,
        HAS_EXTRA=has_extra,
        HAS_EXTRA_LENS=extra_lens is not None,
        HAS_SINKS=sinks is not None,
        HAS_LSE=lse is not None,
        SPLIT=splits > 1,
        AHEAD=cut.ahead,
        HEADS=cut.heads,
        CANDIDATES=cut.candidates,
        WIDE_SCALES=_by_eights(swa_cache) and _by_eights(extra_cache),
        EMULATED=_EMULATED,
        num_warps=WARPS,
        num_stages=1,
        maxnreg=cut.registers,
    )
    if splits > 1:
        _merge_kernel[(heads, tokens, HEAD_DIM // _MERGE_COLUMNS)](
            parts,
            q if sinks is None else sinks,
            out,
            q if lse is None else lse,
            heads,
            splits,
            out.stride(0),
            out.stride(1),
            HAS_SINKS=sinks is not None,
            HAS_LSE=lse is not None,
            SPLITS=max(2, triton.next_power_of_2(splits)),
            COLUMNS=_MERGE_COLUMNS,
            EMULATED=_EMULATED,
            num_warps=4,
            num_stages=1,
        )


def _by_eights(cache: torch.Tensor) -> bool:
    """Whether every record's scales lie at a multiple of 8 B, as in all of vLLM's."""
    return cache.stride(0) % 8 == 0 and cache.data_ptr() % 8 == 0
