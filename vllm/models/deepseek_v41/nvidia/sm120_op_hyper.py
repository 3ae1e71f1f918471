# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections: the prenorm GEMM, and the fused post and pre of a sublayer."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .sm120_device_kernels import Bound
from .sm120_op_call import Expected, Kernel, Op, Tensors
from .sm120_op_reference import hyper_connection, hyper_post, rms_norm

TF32_BOUND = Bound(
    2**-9,
    "the projection is rounded to TF32, by 2**-11 at most to nearest and 2**-10 cut "
    "off; a row of 24 sums of thousands of such terms has about 0.6 of that",
)
FP32_BOUND = Bound(2**-13, "a sum of positive fp32 terms, thousands of them")
STREAM_BOUND = Bound(2**-7, "bf16 in and out: 2**-9 each, of sums of five terms")
MIX_BOUND = Bound(
    1e-2, "TF32 projections of bf16 streams through sigmoid and Sinkhorn's rounds"
)


@dataclass(frozen=True)
class Prenorm(Op):
    """``x @ fn.T`` and the sum of squares of each row of x, summed over splits.

    Attributes:
        tokens: rows of x.
        width: of a row: streams times hidden size, or hidden size at the model's entry.
        outputs: rows of fn, streams * (streams + 2).
        splits: of the width; vLLM takes 1, 4 or 16.
    """

    name: ClassVar[str] = "hc_prenorm"
    entry: ClassVar[str] = "vllm.utils.deep_gemm.tf32_hc_prenorm_gemm"

    tokens: int
    width: int
    outputs: int
    splits: int

    def __str__(self) -> str:
        return f"{self.tokens} x {self.width} to {self.outputs}, {self.splits} splits"

    def gpu_bytes(self) -> int:
        rows = self.tokens + self.outputs
        # Inputs, their float64, and its square.
        return (
            rows * self.width * (4 + 8) + 2 * self.tokens * self.width * 8 + (4 << 20)
        )

    def inputs(self, rng: torch.Generator) -> Tensors:
        device = rng.device
        x = torch.randn((self.tokens, self.width), generator=rng, device=device)
        fn = torch.randn((self.outputs, self.width), generator=rng, device=device)
        # The last element of a row weighs as much as 64 others: a cut tail shows.
        x[:, -1] *= 8
        return {"x": x.to(torch.bfloat16), "fn": fn * self.width**-0.5}

    def expected(self, given: Tensors, got: Tensors) -> dict[str, Expected]:
        x = given["x"].to(torch.float64)
        return {
            "out": Expected(x @ given["fn"].to(torch.float64).mT, TF32_BOUND),
            "sqrsum": Expected(x.square().sum(1, keepdim=True), FP32_BOUND),
        }

    def library(self) -> Kernel:
        """DeepGEMM's, or TileLang's where vLLM runs without DeepGEMM.

        Raises:
            ImportError: no vLLM, or no TileLang.
        """
        from vllm.utils.deep_gemm import is_deep_gemm_supported, tf32_hc_prenorm_gemm

        deep_gemm = is_deep_gemm_supported()
        splits = self.splits if deep_gemm else 1
        if not deep_gemm:
            from vllm.model_executor.kernels.mhc import tilelang_kernels

        def call(given: Tensors) -> Tensors:
            x, fn = given["x"], given["fn"]
            shape = (splits, x.shape[0])
            nan = {"fill_value": torch.nan, "device": x.device}
            out = torch.full((*shape, fn.shape[0]), dtype=torch.float32, **nan)
            sqrsum = torch.full(shape, dtype=torch.float32, **nan)
            if deep_gemm:
                tf32_hc_prenorm_gemm(x, fn, out, sqrsum, splits)
            else:
                tilelang_kernels._HC_PRENORM_GEMM_TILELANG_KERNEL(
                    x, fn, out, sqrsum, x.shape[1], 1
                )
            return {"out": out.sum(0), "sqrsum": sqrsum.sum(0).unsqueeze(1)}

        return call


@dataclass(frozen=True)
class HyperFused(Op):
    """Post of one sublayer and pre of the next, as between attention and experts.

    Attributes:
        tokens: at most 32 are one fused TileLang kernel, more are post, prenorm and an
            epilogue.
        hidden: hidden size.
        streams: of the hyper-connection.
        rounds: of Sinkhorn.
        eps: of the hyper-connection.
        norm_eps: of RMS norms.
    """

    name: ClassVar[str] = "hc_fused"
    entry: ClassVar[str] = "mhc_fused_post_pre_delayed_tilelang"

    tokens: int
    hidden: int
    streams: int
    rounds: int
    eps: float
    norm_eps: float
    # What DeepseekV4DecoderLayer multiplies post by.
    post_factor: float = 2.0

    def __str__(self) -> str:
        return f"{self.tokens} tokens of {self.streams} x {self.hidden}"

    def gpu_bytes(self) -> int:
        mixes = self.streams * (self.streams + 2)
        values = (8 * self.tokens + mixes) * self.streams * self.hidden
        return values * 12 + (16 << 20)

    def inputs(self, rng: torch.Generator) -> Tensors:
        device, m, d = rng.device, self.streams, self.hidden

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=rng, device=device)

        mixes = m * (m + 2)
        # Streams of unlike size: a swap shows.
        sizes = torch.arange(1, m + 1, device=device).unsqueeze(1)
        return {
            "x": normal(self.tokens, d).to(torch.bfloat16),
            "residual": (normal(self.tokens, m, d) * sizes).to(torch.bfloat16),
            "post": normal(self.tokens, m, 1).sigmoid() * self.post_factor,
            "mixture": (normal(self.tokens, m, m)).softmax(-1),
            "fn": normal(mixes, m * d) * (m * d) ** -0.5,
            "scale": 0.5 + normal(3).sigmoid(),
            "base": normal(mixes),
            "pre": normal(self.tokens, m).sigmoid(),
            "norm": (1 + 0.1 * normal(d)).to(torch.bfloat16),
        }

    def expected(self, given: Tensors, got: Tensors) -> dict[str, Expected]:
        streams = hyper_post(
            given["x"], given["residual"], given["post"].squeeze(-1), given["mixture"]
        )
        pre, post, mixture = hyper_connection(
            streams,
            given["fn"],
            given["scale"],
            given["base"],
            self.norm_eps,
            self.eps,
            self.post_factor,
            self.rounds,
        )
        # The sublayer's input is collapsed with the coefficients carried along.
        hidden = (given["pre"].to(torch.float64).unsqueeze(-1) * streams).sum(1)
        return {
            "streams": Expected(streams, STREAM_BOUND),
            "post": Expected(post, MIX_BOUND),
            "mixture": Expected(mixture.flatten(1), MIX_BOUND),
            "hidden": Expected(
                rms_norm(hidden, given["norm"], self.norm_eps), STREAM_BOUND
            ),
            "next_pre": Expected(pre, MIX_BOUND),
            "mean": Expected(streams.mean(1), STREAM_BOUND),
        }

    def library(self) -> Kernel:
        """TileLang's, by vLLM's function.

        Raises:
            ImportError: no vLLM, or no TileLang.
        """
        from vllm.model_executor.kernels.mhc.tilelang import (
            mhc_fused_post_pre_delayed_tilelang as fused,
        )

        def call(given: Tensors) -> Tensors:
            streams, post, mixture, hidden, next_pre, mean = fused(
                given["x"],
                given["residual"],
                given["post"],
                given["mixture"],
                given["fn"],
                given["scale"],
                given["base"],
                self.norm_eps,
                self.eps,
                self.eps,
                self.post_factor,
                self.rounds,
                pre_mix=given["pre"],
                norm_weight=given["norm"],
                norm_eps=self.norm_eps,
                capture_aux=True,
            )
            return {
                "streams": streams,
                "post": post.squeeze(-1),
                "mixture": mixture.flatten(1),
                "hidden": hidden,
                "next_pre": next_pre,
                "mean": mean,
            }

        return call
