# SPDX-License-Identifier: Apache-2.0
"""What one sparse-MLA call reads and writes, as either kernel gets it; its checks."""

from typing import NamedTuple

import torch

from .sm120_sparse_mla_plan import HEAD_DIM, MAX_HEADS, MAX_TOKENS

_RECORD_BYTES = 584

# Slots are int32.
_MOST_SLOTS = (1 << 31) - 1


class Operands(NamedTuple):
    """The arguments of ``sm120_sparse_mla.sparse_mla``, checked; indices ``[T, W]``.

    Attributes:
        scale_log2: its scale, times log2(e).
        parts: the workspace; None where candidates are not split.
    """

    q: torch.Tensor
    swa_cache: torch.Tensor
    swa_indices: torch.Tensor
    swa_lens: torch.Tensor | None
    sinks: torch.Tensor | None
    scale_log2: float
    out: torch.Tensor
    extra_cache: torch.Tensor | None = None
    extra_indices: torch.Tensor | None = None
    extra_lens: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    parts: torch.Tensor | None = None


def slots_of(cache: torch.Tensor) -> int:
    """Slots that an index can name."""
    return min(cache.shape[0] * cache.shape[1], _MOST_SLOTS)


def checked_query(
    q: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> tuple[int, int, int]:
    shape = tuple(q.shape)
    if len(shape) != 3 or shape[2] != HEAD_DIM or shape[1] > MAX_HEADS:
        raise ValueError(f"q is {shape}, need [T, H <= {MAX_HEADS}, {HEAD_DIM}]")
    if shape[0] > MAX_TOKENS:
        raise ValueError(f"q has {shape[0]} tokens, one call takes {MAX_TOKENS}")
    if tuple(out.shape) != shape:
        raise ValueError(f"out is {tuple(out.shape)}, need q's {shape}")
    for name, tensor in (("q", q), ("out", out)):
        if tensor.dtype != torch.bfloat16 or tensor.stride(2) != 1:
            raise ValueError(
                f"{name} is {tensor.dtype}, stride {tensor.stride()}; need bfloat16 "
                "with a contiguous last dimension"
            )
    if sinks is not None and (
        tuple(sinks.shape) != shape[1:2]
        or sinks.dtype != torch.float32
        or not sinks.is_contiguous()
    ):
        raise ValueError(f"sinks are {sinks.dtype} {tuple(sinks.shape)}, need fp32 [H]")
    if lse is not None and (
        tuple(lse.shape) != shape[:2]
        or lse.dtype != torch.float32
        or not lse.is_contiguous()
    ):
        raise ValueError(f"lse is {lse.dtype} {tuple(lse.shape)}, need fp32 [T, H]")
    return shape


def checked_segment(
    name: str,
    cache: torch.Tensor,
    indices: torch.Tensor | None,
    lens: torch.Tensor | None,
    tokens: int,
) -> torch.Tensor:
    """The index table as ``[T, W]``."""
    if (
        cache.dtype != torch.uint8
        or cache.dim() not in (3, 4)
        or cache.shape[-1] != _RECORD_BYTES
        or (cache.dim() == 4 and cache.shape[2] != 1)
        or cache.shape[1] < 1
    ):
        raise ValueError(
            f"{name}_cache is {cache.dtype} {tuple(cache.shape)}, need uint8 "
            f"[blocks, page, {_RECORD_BYTES}]"
        )
    if cache.stride(0) % 2 or cache.data_ptr() % 2:
        raise ValueError(f"{name}_cache's pages start at odd addresses")
    if indices is None:
        raise ValueError(f"{name}_cache has no indices")
    if indices.dim() == 3:
        indices = indices.squeeze(1)
    if (
        indices.dim() != 2
        or indices.shape[0] != tokens
        or indices.dtype != torch.int32
        or (indices.shape[1] > 1 and indices.stride(1) != 1)
    ):
        raise ValueError(
            f"{name}_indices are {indices.dtype} {tuple(indices.shape)}, need int32 "
            f"[{tokens}, W] with contiguous rows"
        )
    if lens is not None and (
        tuple(lens.shape) != (tokens,)
        or lens.dtype != torch.int32
        or not lens.is_contiguous()
    ):
        raise ValueError(
            f"{name}_lens are {lens.dtype} {tuple(lens.shape)}, need int32 [{tokens}]"
        )
    return indices


def check_workspace(parts: torch.Tensor, need: int, device: torch.device) -> None:
    if parts.numel() < need:
        raise ValueError(f"workspace of {parts.numel()} floats, need {need}")
    if (
        parts.dtype != torch.float32
        or not parts.is_contiguous()
        or parts.device != device
        or parts.data_ptr() % 16
    ):
        raise ValueError(
            f"workspace is {parts.dtype} on {parts.device}, need contiguous fp32 on "
            f"{device} at a multiple of 16 B"
        )
