# SPDX-License-Identifier: Apache-2.0
"""Which kernel serves a sparse-MLA call on SM12x: FlashInfer's, or the fork's own.

``VLLM_SM120_SPARSE_MLA``: ``auto`` takes FlashInfer wherever its own rules have a
kernel for the shape (sm120_kernel_limits), and the fork's kernel else; ``flashinfer``
and ``fork`` take that one alone. The self-test asks the same ``Routes``, so its rows
say what serving does. Each class of shapes is decided once and logged once.
"""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import vllm.envs as envs
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.models.deepseek_v41.nvidia.sm120_kernel_limits import (
        AttentionShape,
        FlashInferLimits,
    )

logger = init_logger(__name__)

VARIABLE = "VLLM_SM120_SPARSE_MLA"

# What the fork's kernel takes at most (ops/sm120_sparse_mla_plan.py).
_FORK_HEADS = 128


@dataclass(frozen=True)
class Route:
    """Who serves a class of shapes.

    Attributes:
        name: ``flashinfer`` or ``fork``.
        refused: dimensions that it does not take, of ``heads``, ``width``, ``page``
            and ``extra_page``; empty where the shape is served.
        reason: why this route, in a few words.
    """

    name: str
    refused: tuple[str, ...]
    reason: str


class Routes:
    """Decides by mode and FlashInfer's rules.

    Args:
        mode: of ``VLLM_SM120_SPARSE_MLA``.
        limits: FlashInfer's rules; None where it is not installed.
    """

    def __init__(self, mode: str, limits: "FlashInferLimits | None") -> None:
        self.mode = mode
        self.limits = limits

    @property
    def decode_tokens(self) -> int:
        """Most tokens of a call for which FlashInfer takes its decode kernel; where
        there is none, the 64 of every release served."""
        return 64 if self.limits is None else self.limits.decode_tokens

    def of(self, shape: "AttentionShape") -> Route:
        """The route of a shape."""
        if self.mode == "fork":
            return self._fork(shape, f"{VARIABLE}=fork")
        if self.limits is None:
            if self.mode == "auto":
                return self._fork(shape, "FlashInfer has no SM120 sparse MLA here")
            return Route("flashinfer", ("heads",), "FlashInfer is not installed")
        refused = tuple(self.limits.refused(shape))
        if self.mode == "flashinfer":
            return Route("flashinfer", refused, f"{VARIABLE}=flashinfer")
        if not refused:
            return Route("flashinfer", (), f"{self.limits.library} has a kernel")
        which = self.limits.route(shape).split()[-1]
        what = ", ".join(f"{d.replace('_', ' ')} {getattr(shape, d)}" for d in refused)
        why = f"{self.limits.library} has no {which} kernel for {what}"
        return self._fork(shape, why)

    @staticmethod
    def _fork(shape: "AttentionShape", why: str) -> Route:
        refused = ("heads",) if shape.heads > _FORK_HEADS else ()
        return Route("fork", refused, why)


def mode() -> str:
    """``VLLM_SM120_SPARSE_MLA``."""
    return envs.VLLM_SM120_SPARSE_MLA


def routes() -> Routes:
    """What this environment and the installed FlashInfer decide.

    Raises:
        RuntimeError: the installed FlashInfer's rules cannot be read.
    """
    return _routes(mode())


@functools.cache
def _routes(chosen: str) -> Routes:
    if chosen == "fork":
        return Routes(chosen, None)
    try:
        from vllm.models.deepseek_v41.nvidia.sm120_kernel_limits import FlashInferLimits
    except ImportError:
        # The rules come with the self-test's patch: without it, nothing is refused.
        return Routes("flashinfer", _Unruled())
    try:
        return Routes(chosen, FlashInferLimits())
    except ImportError:
        return Routes(chosen, None)


class _Unruled:
    """FlashInfer without rules: takes everything, or says so when it is called."""

    library = "FlashInfer"
    decode_tokens = 64

    def refused(self, shape: Any) -> list[str]:
        return []


# --- what DeepseekV4FlashInferSM120Attention calls, in place of FlashInfer ------------


def has_sparse_mla() -> bool:
    """Whether a kernel can serve this class at all."""
    if mode() != "flashinfer":
        return True
    from vllm.utils.flashinfer import has_flashinfer_sparse_mla_sm120

    return has_flashinfer_sparse_mla_sm120()


def has_sparse_mla_config(num_q_heads: int, top_k: int) -> bool:
    """Whether a kernel can serve a layer's decode calls."""
    if mode() != "flashinfer":
        return num_q_heads <= _FORK_HEADS
    from vllm.utils.flashinfer import has_flashinfer_sparse_mla_sm120_config

    return has_flashinfer_sparse_mla_sm120_config(num_q_heads, top_k)


def workspace(device: torch.device, stock: Any) -> torch.Tensor:
    """The workspace of a call, allocated before any CUDA graph is captured.

    Args:
        device: the layer's.
        stock: makes FlashInfer's.
    """
    if mode() == "flashinfer":
        return stock(device)
    from vllm.models.deepseek_v41.nvidia.ops.sm120_sparse_mla import default_workspace

    # FlashInfer's must hold zeros, so the two are not one.
    own = default_workspace(device)
    return own if mode() == "fork" else stock(device)


def sparse_mla_dsv4(**call: Any) -> None:
    """FlashInfer's DSv4 entry point, by the route of the call's shape.

    Keyword arguments as the attention class gives that function: ``query`` and ``out``
    bf16 ``[T, H, 512]``, ``swa_kv_cache`` and ``compressed_kv_cache`` (or None) uint8
    ``[blocks, page, 1, 584]``, their indices, lengths, ``sinks`` and ``bmm1_scale``.
    """
    query, cache = call["query"], call["swa_kv_cache"]
    extra, indices = call["compressed_kv_cache"], call["extra_sparse_indices"]
    route = _decided(
        mode(),
        query.shape[0] <= _decode_tokens(mode()),
        query.shape[1],
        call["sparse_indices"].shape[-1],
        cache.shape[1],
        0 if extra is None else indices.shape[-1],
        0 if extra is None else extra.shape[1],
    )
    if route == "flashinfer":
        from vllm.utils import flashinfer

        flashinfer.flashinfer_trtllm_batch_decode_sparse_mla_dsv4(**call)
        return
    from vllm.models.deepseek_v41.nvidia.ops.sm120_sparse_mla import sparse_mla

    sparse_mla(
        query,
        cache,
        call["sparse_indices"],
        call["swa_topk_lens"],
        call["sinks"],
        call["bmm1_scale"],
        call["out"],
        extra_cache=extra,
        extra_indices=None if extra is None else indices,
        extra_lens=None if extra is None else call["extra_sparse_topk_lens"],
    )


@functools.cache
def _decode_tokens(chosen: str) -> int:
    return _routes(chosen).decode_tokens


@dataclass(frozen=True)
class _Shape:
    """As sm120_kernel_limits.AttentionShape, which this patch alone lacks."""

    tokens: int
    heads: int
    width: int
    page: int
    extra_width: int
    extra_page: int


@functools.cache
def _decided(
    chosen: str,
    small: bool,
    heads: int,
    width: int,
    page: int,
    extra_width: int,
    extra_page: int,
) -> str:
    """The name of a class's route; decided and logged once."""
    found = _routes(chosen)
    tokens = found.decode_tokens + (not small)
    shape = _Shape(tokens, heads, width, page, extra_width, extra_page)
    try:
        from vllm.models.deepseek_v41.nvidia.sm120_kernel_limits import AttentionShape

        shape = AttentionShape(**vars(shape))
    except ImportError:
        pass
    route = found.of(shape)
    kind = "up to" if small else "more than"
    extra = f" + {extra_width} of page {extra_page}" if extra_width else ""
    logger.info(
        "DeepSeek-V4.1 sparse MLA, %s %d tokens, %d heads, %d candidates of page %d%s: "
        "%s (%s)",
        kind,
        found.decode_tokens,
        heads,
        width,
        page,
        extra,
        route.name,
        route.reason,
    )
    return route.name
