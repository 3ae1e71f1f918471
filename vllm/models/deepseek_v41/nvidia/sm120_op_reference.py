# SPDX-License-Identifier: Apache-2.0
"""What the ops on DeepSeek-V4.1's path compute, in plain PyTorch float64.

Beside sm120_reference.py, which has attention and paged indexer logits. Each function
runs on any device, takes what a kernel takes and returns what is right before rounding.
T tokens, H heads, D dims, E experts, m streams of the hyper-connection.
"""

from collections.abc import Sequence

import torch

# e2m1: sign, two exponent bits, one mantissa bit.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
UE8M0_BIAS = 127
MX_GROUP = 32


def mx_factors(scales: torch.Tensor) -> torch.Tensor:
    """float64 powers of two of UE8M0 bytes, of the same shape; 255 is NaN."""
    exponent = scales.to(torch.int32)
    factors = torch.ldexp(
        torch.ones_like(exponent, dtype=torch.float64), exponent - 127
    )
    return torch.where(exponent == 255, torch.nan, factors)


def mxfp8_values(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` of e4m3 ``[..., K]`` and UE8M0 ``[..., K / 32]``."""
    groups = data.to(torch.float64).unflatten(-1, (-1, MX_GROUP))
    return (groups * mx_factors(scales).unsqueeze(-1)).flatten(-2)


def mxfp4_values(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` of uint8 ``[..., K / 2]``, the even element in the low half of each
    byte, and UE8M0 ``[..., K / 32]``."""
    table = torch.tensor(_E2M1, dtype=torch.float64, device=packed.device)
    table = torch.cat((table, -table))
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    groups = table[codes.long()].unflatten(-1, (-1, MX_GROUP))
    return (groups * mx_factors(scales).unsqueeze(-1)).flatten(-2)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last dimension."""
    x = x.to(torch.float64)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def rope(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> torch.Tensor:
    """GPT-J rotation of the last R dims, of neighbours (2i, 2i + 1).

    Args:
        x: ``[T, ..., D]``.
        positions: ``[T]``.
        cos_sin: ``[positions, R]``, R / 2 cosines, then R / 2 sines.
    """
    width = cos_sin.shape[1]
    x = x.to(torch.float64)
    row = cos_sin[positions].to(torch.float64)
    row = row.view(x.shape[0], *(1,) * (x.dim() - 2), width)
    cos, sin = row[..., : width // 2], row[..., width // 2 :]
    even, odd = x[..., -width::2], x[..., 1 - width :: 2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return torch.cat((x[..., :-width], turned.flatten(-2)), -1)


def prefill_logits(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Indexer logits of rows over a stretch of gathered keys each.

    Args:
        q: ``[T, H, 128]``.
        keys: float64 ``[N, 128]``, scaled.
        weights: ``[T, H]``.
        starts, ends: ``[T]``: row t reads keys ``starts[t]`` up to ``ends[t]``.

    Returns:
        ``[T, N]``, column n being key n; -inf outside a row's stretch.
    """
    out = keys.new_full((q.shape[0], keys.shape[0]), -torch.inf)
    for token in range(q.shape[0]):
        first, last = int(starts[token]), int(ends[token])
        dots = keys[first:last] @ q[token].to(torch.float64).mT
        out[token, first:last] = dots.relu() @ weights[token].to(torch.float64)
    return out


def hyper_connection(
    residual: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    eps: float,
    post_factor: float,
    rounds: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coefficients of one hyper-connection from its residual streams.

    Args:
        residual: ``[T, m, D]``.
        fn: ``[m * (m + 2), m * D]``: rows for pre, post and the m x m mixture.
        scale: ``[3]``, of pre, post and mixture.
        base: ``[m * (m + 2)]``.
        norm_eps: beside the mean square.
        eps: beside the sums of Sinkhorn's rounds, and added to pre.
        post_factor: of post.
        rounds: of Sinkhorn.

    Returns:
        pre ``[T, m]``, post ``[T, m]`` and the mixture ``[T, m, m]``, [from, to].
    """
    x = residual.flatten(1).to(torch.float64)
    streams = residual.shape[1]
    mixes = x @ fn.to(torch.float64).mT
    mixes = mixes / torch.sqrt(x.square().mean(1, keepdim=True) + norm_eps)
    parts = mixes.split((streams, streams, streams * streams), 1)
    offsets = base.to(torch.float64).split((streams, streams, streams * streams))
    pre, post, mixture = (
        part * factor.to(torch.float64) + offset
        for part, factor, offset in zip(parts, scale, offsets, strict=True)
    )
    mixture = mixture.unflatten(1, (streams, streams)).softmax(2) + eps
    mixture = mixture / (mixture.sum(1, keepdim=True) + eps)
    for _ in range(rounds - 1):
        mixture = mixture / (mixture.sum(2, keepdim=True) + eps)
        mixture = mixture / (mixture.sum(1, keepdim=True) + eps)
    return pre.sigmoid() + eps, post.sigmoid() * post_factor, mixture


def hyper_post(
    x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, mixture: torch.Tensor
) -> torch.Tensor:
    """Streams ``[T, m, D]`` after a sublayer gave ``x [T, D]``: the mixture of the
    streams before, and ``post`` times x."""
    mixed = mixture.to(torch.float64).mT @ residual.to(torch.float64)
    return mixed + post.to(torch.float64).unsqueeze(-1) * x.to(torch.float64)[:, None]


def pooled_pairs(
    rows: torch.Tensor, before: torch.Tensor, positions: Sequence[int]
) -> torch.Tensor:
    """Latents of ratio 2 before their norm, of one request's chunk.

    Args:
        rows: ``[T, 2 * D]``: values, then gate logits.
        before: ``[2 * D]``: the row before the chunk, read where the chunk's first
            token closes a group.
        positions: of the T tokens, consecutive.

    Returns:
        ``[T, D]``: the softmax-weighted sum of a token and its predecessor where the
        token closes a group (odd positions), zeros elsewhere.
    """
    rows, before = rows.to(torch.float64), before.to(torch.float64)
    dim = rows.shape[1] // 2
    out = rows.new_zeros((rows.shape[0], dim))
    for token, position in enumerate(positions):
        if position % 2 == 0:
            continue
        earlier = rows[token - 1] if token else before
        pair = torch.stack((earlier, rows[token]))
        gate = pair[:, dim:].softmax(0)
        out[token] = (gate * pair[:, :dim]).sum(0)
    return out


def block_scores(logits: torch.Tensor, length: int, block: int) -> torch.Tensor:
    """One row's candidate blocks: the largest logit of each block of ``length`` logits,
    +inf for the newest. fp32 ``[blocks]``."""
    count = -(-length // block)
    padded = logits.new_full((count * block,), -torch.inf)
    padded[:length] = logits[:length]
    scores = padded.view(count, block).amax(1)
    if count:
        scores[-1] = torch.inf
    return scores


def sampling_probabilities(
    logits: torch.Tensor, top_k: int, top_p: float
) -> torch.Tensor:
    """float64 ``[V]``: the k largest logits, renormalised; of those the fewest that
    reach ``top_p``, renormalised. Logits are distinct."""
    kept, order = logits.to(torch.float64).sort(descending=True)
    chances = kept[:top_k].softmax(0)
    before = chances.cumsum(0) - chances
    chances = torch.where(before < top_p, chances, 0.0)
    out = torch.zeros_like(kept)
    out[order[:top_k]] = chances / chances.sum()
    return out
