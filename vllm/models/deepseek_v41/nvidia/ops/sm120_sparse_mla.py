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

from .sm120_sparse_mla_cuda import Kernels, kernels, takes
from .sm120_sparse_mla_operands import (
    Operands,
    check_workspace,
    checked_query,
    checked_segment,
)
from .sm120_sparse_mla_plan import (
    Config,
    Gpu,
    largest_workspace_floats,
    plan,
    workspace_floats,
)

logger = logging.getLogger(__name__)

LOG2_E = 1.4426950408889634


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
    tokens, heads, _ = checked_query(q, out, sinks, lse)
    swa_indices = checked_segment("swa", swa_cache, swa_indices, swa_lens, tokens)
    touched, width = [q, out, swa_cache], 0
    if extra_cache is not None:
        extra_indices = checked_segment(
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
        check_workspace(parts, workspace_floats(tokens, heads, planned.splits), device)
    call = Operands(
        *(q, swa_cache, swa_indices, swa_lens, sinks, scale * LOG2_E, out),
        *(extra_cache, extra_indices, extra_lens, lse, parts),
    )
    if planned.config.function is None:
        from .sm120_sparse_mla_triton import launch

        launch(planned, call)
    elif cuda is None:
        raise ValueError(f"{planned.config.function} cannot serve this call here")
    else:
        cuda.launch(planned, call)


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
