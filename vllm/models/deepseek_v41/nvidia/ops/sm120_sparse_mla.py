# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA over ``fp8_ds_mla`` records: any page, width and head count up to 128.

For what FlashInfer's SM120 kernels refuse; runs on any GPU with e4m3 conversions and
bf16 tensor cores (compute capability 8.9 or newer)::

    sparse_mla(q, swa_cache, swa_indices, swa_lens, sinks, scale, out)
    sparse_mla(..., extra_cache=cache, extra_indices=indices, extra_lens=lens)

Two kernels do it: sm120_sparse_mla.cu, built when first used, and Triton's, which is
slower, where that cannot be built or a page or row starts at no multiple of 16 B.
Both cut a token's candidates into splits where tokens are few, which a second kernel
merges in a fixed order; the sink enters there, once.

``sm120_reference.sparse_mla`` defines the result.
"""

import functools
import logging

import torch

from .sm120_sparse_mla_cuda import Kernels, kernels, pack, takes
from .sm120_sparse_mla_plan import (
    HEAD_DIM,
    MAX_HEADS,
    MAX_TOKENS,
    Config,
    Gpu,
    largest_workspace_floats,
    plan,
    workspace_floats,
)

logger = logging.getLogger(__name__)

LOG2_E = 1.4426950408889634

_RECORD_BYTES = 584


def sparse_mla(
    q: torch.Tensor,
    swa_cache: torch.Tensor,
    swa_indices: torch.Tensor,
    swa_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    *,
    extra_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_lens: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    config: Config | None = None,
) -> None:
    """Attention of each token over its own candidates; writes ``out``, all of it.

    One softmax over both caches' candidates. Deterministic: equal inputs of equal
    shapes give equal bits. Allocates nothing and never waits for the GPU once
    ``default_workspace`` was called for it, so that CUDA graphs may capture it; grids
    depend on shapes alone.

    Args:
        q: bf16 ``[T, H, 512]``, the last dimension contiguous; T to 65535, H to 128.
        swa_cache: uint8 ``[blocks, page, 584]`` or ``[blocks, page, 1, 584]``: the view
            that vLLM binds, of which base, page and block stride matter. Any page;
            strides and base are multiples of 2 B, and much faster of 16.
        swa_indices: int32 ``[T, W]`` or ``[T, 1, W]``, W at least 1: slots, ``block *
            page + row``. Negative ones are skipped, and so are those past the end of
            the cache: where a request's logits are NaN, top-k gives anything.
        swa_lens: int32 ``[T]``, entries of each row that count; None: all.
        sinks: fp32 ``[H]``, natural logits, or None.
        scale: what q·k is multiplied by.
        out: bf16 ``[T, H, 512]``, the last dimension contiguous. Exact zeros where a
            row has no valid candidate.
        extra_cache, extra_indices, extra_lens: the compressed cache, likewise.
        lse: fp32 ``[T, H]``, contiguous, or None: gets the natural log-sum-exp of the
            candidates without the sink; -inf where there is none.
        workspace: fp32, as ``default_workspace``; None: that.
        config: tile sizes, for tuning.

    Raises:
        ValueError: a shape, type or stride that does not fit.
    """
    tokens, heads, _ = _checked_query(q, out, sinks, lse)
    swa_indices = _checked_segment("swa", swa_cache, swa_indices, swa_lens, tokens)
    touched, width = [q, out, swa_cache], 0
    if extra_cache is not None:
        extra_indices = _checked_segment(
            "extra", extra_cache, extra_indices, extra_lens, tokens
        )
        touched.append(extra_cache)
        width = extra_indices.shape[1]
    if tokens == 0 or heads == 0:
        return
    device = q.device
    cuda = _cuda_kernels(device, config)
    if cuda is not None and not takes(*touched):
        _say_unaligned()
        cuda = None
    planned = plan(
        *(tokens, heads, swa_indices.shape[1], width, gpu_of(device)),
        config,
        cuda is not None,
    )
    parts = None
    if planned.splits > 1:
        parts = default_workspace(device) if workspace is None else workspace
        _check_workspace(parts, workspace_floats(tokens, heads, planned.splits), device)
    args = (planned, q, swa_cache, swa_indices, swa_lens, sinks, scale * LOG2_E, out)
    more = (extra_cache, extra_indices, extra_lens, lse, parts)
    if planned.config.function is None:
        from .sm120_sparse_mla_triton import launch

        launch(*args, *more)
    elif cuda is None:
        raise ValueError(f"{planned.config.function} cannot serve this call here")
    else:
        cuda.launch(planned, pack(*args, *more), tokens, heads)


def _cuda_kernels(device: torch.device, config: Config | None) -> Kernels | None:
    """The CUDA kernels, where they may serve."""
    if device.type != "cuda" or (config is not None and config.function is None):
        return None
    return kernels(
        torch.cuda.current_device() if device.index is None else device.index
    )


@functools.cache
def _say_unaligned() -> None:
    logger.warning(
        "Sparse MLA gets pages or rows at no multiple of 16 bytes: Triton's kernel "
        "serves them, which is slower"
    )


def _check_workspace(parts: torch.Tensor, need: int, device: torch.device) -> None:
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


_workspaces: dict[torch.device, torch.Tensor] = {}
_gpus: dict[torch.device, Gpu] = {}


def default_workspace(device: torch.device) -> torch.Tensor:
    """fp32, enough for any call on this device; allocated once, and kept, and the
    kernels are built. Call it before a CUDA graph is captured."""
    if device not in _workspaces:
        _cuda_kernels(device, None)
        floats = largest_workspace_floats(gpu_of(device))
        _workspaces[device] = torch.empty(floats, dtype=torch.float32, device=device)
    return _workspaces[device]


def gpu_of(device: torch.device) -> Gpu:
    """What planning needs to know of a device; a small GPU for the interpreter."""
    if device not in _gpus:
        found = Gpu(sms=4, shared=100 << 10)
        if device.type == "cuda":
            had = torch.cuda.get_device_properties(device)
            shared = had.shared_memory_per_multiprocessor
            found = Gpu(had.multi_processor_count, shared)
        _gpus[device] = found
    return _gpus[device]


def _checked_query(
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


def _checked_segment(
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
