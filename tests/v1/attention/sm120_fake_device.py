# SPDX-License-Identifier: Apache-2.0
"""Kernels for tests without a GPU: right ones, and one for each planted fault.

In a module of its own, so that a child process can import it. The fork's modules come
from this checkout and not from an installed wheel: they need torch alone, and these are
the bytes that the wheel is built of.
"""

import dataclasses
import importlib
import os
import sys
import time
from pathlib import Path

import torch

MODELS = str(Path(__file__).resolve().parents[3] / "vllm" / "models")
if MODELS not in sys.path:
    sys.path.append(MODELS)


def load(name):
    """A module of ``vllm/models/deepseek_v41/nvidia``, without importing vLLM."""
    return importlib.import_module(f"deepseek_v41.nvidia.{name}")


packed = load("sm120_packed_cache")
reference = load("sm120_reference")
kernels = load("sm120_device_kernels")


@dataclasses.dataclass
class Fake:
    """A kernel around a function. The loosest bound, so that faults must stand out."""

    name: str
    call: object
    bound: object

    def __call__(self, *args):
        return self.call(*args)


def right_attention(q, window, compressed, sinks, scale, out):
    out.copy_(reference.sparse_mla(q, window, compressed, sinks, scale)[0])


def right_logits(*inputs):
    """As a library gives them: fp32, and anything at all past a row's context."""
    logits = reference.paged_index_logits(*inputs).float()
    return torch.where(torch.isinf(logits), torch.nan, logits)


def change(segment, **fields):
    return segment and dataclasses.replace(segment, **fields)


def rescaled(segment, page):
    """Every UE8M0 scale byte one too high."""
    cache = segment.cache.clone()
    cache[:, page * 576 : page * 584] += 1
    return change(segment, cache=cache)


def interleaved(segment):
    """As if a record's scales followed its data."""
    rows = packed.record_view(segment.cache, segment.page)
    cache = torch.cat((rows[..., :576].flatten(1), rows[..., 576:].flatten(1)), 1)
    return change(segment, cache=cache)


def tight(segment):
    """As if pages were adjacent."""
    cache = segment.cache
    size = packed.record_page_bytes(segment.page)
    return change(segment, cache=cache.as_strided((cache.shape[0], size), (size, 1)))


def moved(segment, by):
    """Every valid slot moved, around the end."""
    slots = segment.cache.shape[0] * segment.page
    there = (segment.indices + by) % slots
    return change(segment, indices=torch.where(segment.indices < 0, -1, there))


def _wrong_softmax_scale(q, window, compressed, sinks, scale, out):
    right_attention(q, window, compressed, sinks, scale * 1.25, out)


def _wrong_record_scale(q, window, compressed, sinks, scale, out):
    right_attention(q, window, rescaled(compressed, compressed.page), sinks, scale, out)


def _interleaved_scales(q, window, compressed, sinks, scale, out):
    right_attention(q, interleaved(window), compressed, sinks, scale, out)


def _off_by_one_page(q, window, compressed, sinks, scale, out):
    right_attention(q, moved(window, window.page), compressed, sinks, scale, out)


def _off_by_one_slot(q, window, compressed, sinks, scale, out):
    right_attention(q, window, moved(compressed, 1), sinks, scale, out)


def _swapped_segments(q, window, compressed, sinks, scale, out):
    other = change(window, cache=compressed.cache), change(compressed, cache=window.cache)
    right_attention(q, *other, sinks, scale, out)


def _ignored_window_length(q, window, compressed, sinks, scale, out):
    right_attention(q, change(window, lengths=None), compressed, sinks, scale, out)


def _ignored_compressed_length(q, window, compressed, sinks, scale, out):
    right_attention(q, window, change(compressed, lengths=None), sinks, scale, out)


def _last_candidate_dropped(q, window, compressed, sinks, scale, out):
    shorter = change(window, lengths=(window.lengths - 1).clamp_min(0))
    right_attention(q, shorter, compressed, sinks, scale, out)


def _invalid_is_slot_0(q, window, compressed, sinks, scale, out):
    window = change(window, indices=window.indices.clamp_min(0))
    right_attention(q, window, compressed, sinks, scale, out)


def _ignored_sink(q, window, compressed, sinks, scale, out):
    right_attention(q, window, compressed, None, scale, out)


def _sink_counted_twice(q, window, compressed, sinks, scale, out):
    right_attention(q, window, compressed, sinks + 2.0**0.5 / 2, scale, out)


def _unwritten_row(q, window, compressed, sinks, scale, out):
    before = out[-1].clone()
    right_attention(q, window, compressed, sinks, scale, out)
    out[-1] = before


def _nan(q, window, compressed, sinks, scale, out):
    right_attention(q, window, compressed, sinks, scale, out)
    out[0, 1, 2] = torch.nan


def _wrong_head(q, window, compressed, sinks, scale, out):
    right_attention(q, window, compressed, sinks, scale, out)
    out.copy_(out.roll(1, 1))


def _stale_index(q, window, compressed, sinks, scale, out):
    stale = change(window, indices=window.indices.roll(1, 0))
    right_attention(q, stale, compressed, sinks, scale, out)


def _wrong_stride(q, window, compressed, sinks, scale, out):
    right_attention(q, window, tight(compressed), sinks, scale, out)


def _garbage_in_empty_rows(q, window, compressed, sinks, scale, out):
    right_attention(q, window, compressed, sinks, scale, out)
    out[(out == 0).all(-1)] = 1e-3


def _segments_averaged(q, window, compressed, sinks, scale, out):
    first = reference.sparse_mla(q, window, None, sinks, scale)[0]
    second = reference.sparse_mla(q, compressed, None, sinks, scale)[0]
    out.copy_((first + second) / 2)


def _writes_outside(q, window, compressed, sinks, scale, out):
    right_attention(q, window, compressed, sinks, scale, out)
    tokens, heads, dim = out.shape
    longer = out.as_strided((tokens + 1, heads, dim), out.stride(), out.storage_offset())
    longer[-1, 0, 0] = 0


def _refuses(*inputs):
    raise ValueError("page_block_size must be 64\nand much more")


ATTENTION_FAULTS = {
    "wrong scale": _wrong_softmax_scale,
    "wrong record scale": _wrong_record_scale,
    "interleaved scales": _interleaved_scales,
    "off-by-one page": _off_by_one_page,
    "off-by-one slot": _off_by_one_slot,
    "swapped segments": _swapped_segments,
    "ignored window length": _ignored_window_length,
    "ignored compressed length": _ignored_compressed_length,
    "last candidate dropped": _last_candidate_dropped,
    "invalid index read as slot 0": _invalid_is_slot_0,
    "ignored sink": _ignored_sink,
    "sink counted twice": _sink_counted_twice,
    "unwritten row": _unwritten_row,
    "NaN": _nan,
    "wrong head": _wrong_head,
    "stale index": _stale_index,
    "wrong stride": _wrong_stride,
    "garbage in empty rows": _garbage_in_empty_rows,
    "segments averaged": _segments_averaged,
    "writes outside its output": _writes_outside,
    "refuses": _refuses,
}


def _logits_with(change_inputs):
    def call(q, cache, page, block_table, lengths, weights):
        return right_logits(*change_inputs(q, cache, page, block_table, lengths, weights))

    return call


def _index_stride(cache, page):
    size = packed.index_page_bytes(page)
    return cache.as_strided((cache.shape[0], size), (size, 1))


def _index_rescaled(cache, page):
    """Key scales read one key further."""
    cache = cache.clone()
    scales = cache[:, page * 128 : page * 132]
    scales.copy_(scales.roll(4, 1))
    return cache


def _one_logit(*inputs):
    logits = right_logits(*inputs)
    logits[0, 100] *= 2
    return logits


def _unwritten_page(*inputs):
    """Memory as it came, with this page left out."""
    logits = right_logits(*inputs)
    bits = torch.tensor(0x7FA5A5A5, dtype=torch.int32)
    logits[0, 64:128] = bits.view(torch.float32)
    return logits


def _no_relu(q, cache, page, block_table, lengths, weights):
    slots = (block_table.long()[..., None] * page + torch.arange(page)).flatten(1)
    keys = packed.unpack_index_keys(cache, page, slots)
    return torch.einsum("thd,tkd,th->tk", q.double(), keys, weights.double()).float()


INDEXER_FAULTS = {
    "wrong key scale": _logits_with(
        lambda q, c, p, b, n, w: (q, _index_rescaled(c, p), p, b, n, w)
    ),
    "off-by-one page": _logits_with(lambda q, c, p, b, n, w: (q, c, p, b.roll(1, 1), n, w)),
    "stale table": _logits_with(lambda q, c, p, b, n, w: (q, c, p, b.roll(1, 0), n, w)),
    "wrong stride": _logits_with(lambda q, c, p, b, n, w: (q, _index_stride(c, p), p, b, n, w)),
    "wrong head": _logits_with(lambda q, c, p, b, n, w: (q, c, p, b, n, w.roll(1, 1))),
    "last key dropped": _logits_with(lambda q, c, p, b, n, w: (q, c, p, b, n - 1, w)),
    "no relu": _no_relu,
    "one wrong logit": _one_logit,
    "unwritten page": _unwritten_page,
    "too few columns": lambda *inputs: right_logits(*inputs)[:, :-64],
    "refuses": _refuses,
}


def fp8_attention(q, window, compressed, sinks, scale, out):
    """The numerics that FlashInfer's SM120 kernels have, in plain PyTorch.

    The query's NoPE part is rounded to e4m3 by groups of 64, and probabilities, times
    the record's scale of a group, by tiles of 64 candidates. RoPE stays bf16.
    """
    nope = q[..., :448].double().unflatten(-1, (7, 64))
    rounded = torch.cat((_e4m3(nope, -1).flatten(-2), q[..., 448:].double()), -1)
    segments = [s for s in (window, compressed) if s]
    parts = [reference._candidates(s, slice(None)) for s in segments]
    records = torch.cat([r for r, _ in parts], 1)
    valid = torch.cat([v for _, v in parts], 1)
    logits = (rounded @ records.mT * scale).masked_fill(~valid[:, None], -torch.inf)
    total = torch.logsumexp(logits, -1)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.double())
    weights = torch.where(valid[:, None], (logits - total[..., None]).exp(), 0.0)
    scales = torch.cat([_scales_of(s) for s in segments], 1)  # [T, W, 7]
    result = torch.zeros(out.shape, dtype=torch.float64)
    for first in range(0, records.shape[1], 64):
        tile = slice(first, first + 64)
        result[..., 448:] += weights[..., tile] @ records[:, tile, 448:]
        for group in range(7):
            factor = scales[:, None, tile, group]
            cols = slice(group * 64, group * 64 + 64)
            folded = _e4m3(weights[..., tile] * factor, -1)
            result[..., cols] += folded @ (records[:, tile, cols] / factor.mT)
    out.copy_(result)


def _e4m3(values, dim):
    size = values.abs().amax(dim, keepdim=True).clamp_min(1e-300) / 448
    return (values / size).float().to(torch.float8_e4m3fn).double() * size


def _scales_of(segment):
    slots = segment.indices.long().clamp_min(0)
    _, scales = packed._record_parts(segment.cache, segment.page)
    return torch.exp2(packed._gather(scales, slots)[..., :7].double() - 127)


# Made in a child, by name.


def right_kernel():
    return Fake("right", right_attention, kernels.BF16_BOUND)


def wrong_head_kernel():
    return Fake("wrong head", _wrong_head, kernels.FP8_BOUND)


def right_indexer():
    return Fake("right indexer", right_logits, kernels.INDEXER_BOUND)


def crashing_kernel():
    def crash(*inputs):
        print("Assertion failed: block_kv == 64", file=sys.stderr, flush=True)
        os.abort()

    return Fake("crash", crash, kernels.BF16_BOUND)


def leaving_kernel():
    return Fake("leave", lambda *inputs: os._exit(7), kernels.BF16_BOUND)


def hanging_kernel():
    return Fake("hang", lambda *inputs: time.sleep(3600), kernels.BF16_BOUND)


def missing_kernel():
    raise ImportError("no kernel of that name")
