# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1's sparse MLA and indexer logits in plain PyTorch float64.

What kernels are compared with. Runs on any device::

    window = Segment(pack_records(values, 64), 64, indices, lengths)
    out, lse = sparse_mla(q, window, None, sinks, 512**-0.5)
    error = relative_norm(kernel_out, out)

Peak memory of ``sparse_mla`` and ``paged_index_logits`` beside their arguments and
results: about 4 * ``CHUNK_BYTES``.
"""

from dataclasses import dataclass

import torch

# Relative: the checkout's tests load this folder without importing vLLM (20 s, and a
# GPU machine's dependencies).
from .sm120_packed_cache import (
    HEAD_DIM,
    INDEX_DIM,
    unpack_index_keys,
    unpack_records,
)

# Bounds the float64 temporaries of one step: rows are worked through in chunks.
CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class Segment:
    """Candidates of one cache.

    Attributes:
        cache: uint8 ``[blocks, bytes]``, packed records.
        page: records a page.
        indices: integer ``[T, W]``, global slots; negative entries are invalid.
        lengths: integer ``[T]``: entries at or past a row's length are ignored. None:
            every entry counts.
    """

    cache: torch.Tensor
    page: int
    indices: torch.Tensor
    lengths: torch.Tensor | None = None


def sparse_mla(
    q: torch.Tensor,
    window: Segment,
    compressed: Segment | None,
    sinks: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each token over its own candidates; the record is key and value.

    One softmax over the union of both segments. A slot that is listed twice counts
    twice. ``exp(sink)`` enters the denominator once and carries no value: -inf is no
    sink, +inf gives zeros.

    Args:
        q: floating ``[T, H, 512]``.
        window: the sliding window's candidates, of T rows.
        compressed: the compressed cache's candidates, or None.
        sinks: floating ``[H]``, natural logits, not multiplied by ``scale``; or None.
        scale: what q·k is multiplied by.

    Returns:
        float64 ``[T, H, 512]``, and the natural log-sum-exp ``[T, H]`` of the
        candidates without the sink. Where a row has no valid candidate: exact zeros,
        whatever its sink, and -inf.

    Raises:
        ValueError: shapes that do not fit, or a slot past the end of its cache.
    """
    tokens, heads, _ = q.shape
    segments = [window] if compressed is None else [window, compressed]
    for segment in segments:
        _check_segment(segment, tokens)
    out = q.new_zeros((tokens, heads, HEAD_DIM), dtype=torch.float64)
    lse = q.new_full((tokens, heads), -torch.inf, dtype=torch.float64)
    width = sum(segment.indices.shape[1] for segment in segments)
    if width == 0:
        return out, lse
    step = max(1, CHUNK_BYTES // (8 * width * (HEAD_DIM + heads)))
    for start in range(0, tokens, step):
        part = slice(start, min(start + step, tokens))
        parts = [_candidates(segment, part) for segment in segments]
        records = torch.cat([r for r, _ in parts], 1)  # [t, W, 512]
        valid = torch.cat([v for _, v in parts], 1).unsqueeze(1)  # [t, 1, W]
        logits = q[part].to(torch.float64) @ records.mT * scale  # [t, H, W]
        logits = logits.masked_fill(~valid, -torch.inf)
        lse[part] = torch.logsumexp(logits, -1)
        total = lse[part]
        if sinks is not None:
            total = torch.logaddexp(total, sinks.to(torch.float64))
        weights = torch.exp(logits - total.unsqueeze(-1))
        out[part] = torch.where(valid, weights, 0.0) @ records
    return out, lse


def _candidates(segment: Segment, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Records ``[t, W, 512]``, zeros where invalid, and their validity ``[t, W]``."""
    indices = segment.indices[part].long()
    valid = indices >= 0
    if segment.lengths is not None:
        column = torch.arange(indices.shape[1], device=indices.device)
        valid &= column < segment.lengths[part].unsqueeze(1)
    records = unpack_records(
        segment.cache, segment.page, torch.where(valid, indices, 0)
    )
    return torch.where(valid.unsqueeze(-1), records, 0.0), valid


def _check_segment(segment: Segment, tokens: int) -> None:
    slots = segment.cache.shape[0] * segment.page
    if segment.indices.dim() != 2 or segment.indices.shape[0] != tokens:
        raise ValueError(
            f"indices are {tuple(segment.indices.shape)}, need [{tokens}, width]"
        )
    if segment.lengths is not None and segment.lengths.shape != (tokens,):
        raise ValueError(f"lengths are {tuple(segment.lengths.shape)}, need [{tokens}]")
    if segment.indices.numel() and int(segment.indices.max()) >= slots:
        raise ValueError(
            f"slot {int(segment.indices.max())} is past the end of a cache of "
            f"{slots} records"
        )


def paged_index_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    page: int,
    block_table: torch.Tensor,
    context_lengths: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Indexer logits: ``sum over heads of weight * relu(q . key)``, on scaled keys.

    Args:
        q: fp8 e4m3 or floating ``[T, H, 128]``, one row a query.
        cache: uint8 ``[blocks, bytes]``, packed indexer keys.
        page: keys a page.
        block_table: integer ``[T, pages]``, blocks of each query's context.
        context_lengths: integer ``[T]``, keys of each query's context.
        weights: floating ``[T, H]``.

    Returns:
        float64 ``[T, pages * page]``; -inf at and past a row's context length. Table
        entries past it are not read.
    """
    tokens, pages = block_table.shape
    out = q.new_full((tokens, pages * page), -torch.inf, dtype=torch.float64)
    offsets = torch.arange(page, device=cache.device)
    heads = q.shape[1]
    step = max(1, CHUNK_BYTES // (8 * page * (INDEX_DIM + heads)))
    for token in range(tokens):
        length = int(context_lengths[token])
        query = q[token].to(torch.float64)
        weight = weights[token].to(torch.float64)
        for start in range(0, -(-length // page), step):
            blocks = block_table[token, start : min(start + step, -(-length // page))]
            slots = (blocks.long()[:, None] * page + offsets).flatten()
            dots = unpack_index_keys(cache, page, slots) @ query.mT  # [keys, H]
            first = start * page
            last = min(first + slots.shape[0], length)
            out[token, first:last] = (dots.relu() @ weight)[: last - first]
    return out


def relative_norms(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Each row's ``|got - want| / |want|``, float64 of the shape less its last dim.

    A row is the last dimension: 512 values of one token and head, the logits of one
    page. Norms are Euclidean. A row that should be zero must be zero, and anything that
    is not finite gives inf.

    Raises:
        ValueError: the shapes differ.
    """
    if got.shape != want.shape:
        raise ValueError(
            f"compared {tuple(got.shape)} with {tuple(want.shape)}: shapes differ"
        )
    want = want.to(torch.float64)
    error = torch.linalg.vector_norm(got.to(torch.float64) - want, dim=-1)
    size = torch.linalg.vector_norm(want, dim=-1)
    ratio = torch.where(error == 0, 0.0, error / size)  # x / 0 is inf
    return torch.nan_to_num(ratio, nan=torch.inf, posinf=torch.inf)


def relative_norm(got: torch.Tensor, want: torch.Tensor) -> float:
    """The one measure of similarity: the worst of ``relative_norms``.

    The worst row and not the whole, so that one wrong row shows however many are right.
    """
    norms = relative_norms(got, want)
    return float(norms.max()) if norms.numel() else 0.0
