# SPDX-License-Identifier: Apache-2.0
"""Quantised GEMMs at the model's shapes: dense MXFP8 layers, and FP8 x FP4 experts."""

import inspect
from dataclasses import dataclass
from typing import ClassVar

import torch

from .sm120_device_cases import GUARD_BYTE
from .sm120_device_kernels import Bound
from .sm120_op_call import Expected, Kernel, Op, Tensors, Unavailable
from .sm120_op_reference import MX_GROUP, UE8M0_BIAS, mxfp4_values, mxfp8_values
from .sm120_reference import CHUNK_BYTES

FP8_PRODUCT_BOUND = Bound(
    4e-2,
    "activations rounded to e4m3: 2**-4 at most, 2.6 % in the mean, which the norm of "
    "a row of hundreds of sums keeps; a group of 32 with a wrong scale adds more",
)
BF16_PRODUCT_BOUND = Bound(
    1e-2, "fp32 sums of exact products, rounded to bf16 (2**-9), and 13-bit sums of fp8"
)
# FP8 activations of the experts have a scale for so many values (DeepGemmFP4Experts).
ACTIVATION_GROUP = 128


@dataclass(frozen=True)
class Mxfp8Linear(Op):
    """One dense layer: weights as the checkpoint has them, through vLLM's kernel.

    Attributes:
        layer: the layer's name in the model.
        tokens: rows of the activations.
        n, k: output and input features on this rank.
    """

    name: ClassVar[str] = "mxfp8"
    entry: ClassVar[str] = "init_mxfp8_linear_kernel(...).apply_weights"

    layer: str
    tokens: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.layer}, {self.tokens} x {self.k} to {self.n}"

    def gpu_bytes(self) -> int:
        # The weight, a copy that the kernel may rewrite, and that written anew.
        weights = self.n * self.k * 4
        return weights + 4 * CHUNK_BYTES + self.tokens * (self.n + self.k) * 40

    def inputs(self, rng: torch.Generator) -> Tensors:
        groups = self.k // MX_GROUP

        def powers(rows: int, low: int, high: int) -> torch.Tensor:
            size = (rows, groups)
            return torch.randint(low, high, size, generator=rng, device=rng.device)

        x = torch.randn((self.tokens, self.k), generator=rng, device=rng.device)
        scale = torch.exp2(powers(self.tokens, -3, 4).float())
        x = (x.unflatten(1, (groups, MX_GROUP)) * scale.unsqueeze(-1)).flatten(1)
        shape = (self.n, self.k)
        weight = torch.empty(shape, dtype=torch.float8_e4m3fn, device=rng.device)
        for part in weight.split(self._rows()):
            part.copy_(torch.randn(part.shape, generator=rng, device=rng.device))
        return {
            "x": x.to(torch.bfloat16),
            "weight": weight,
            "scales": (powers(self.n, -8, -4) + UE8M0_BIAS).to(torch.uint8),
        }

    def expected(self, given: Tensors, got: Tensors) -> dict[str, Expected]:
        x = given["x"].to(torch.float64)
        parts = (given[name].split(self._rows()) for name in ("weight", "scales"))
        products = [x @ mxfp8_values(*part).mT for part in zip(*parts, strict=True)]
        return {"out": Expected(torch.cat(products, 1), FP8_PRODUCT_BOUND)}

    def _rows(self) -> int:
        """Rows of the weight looked at together."""
        return max(1, CHUNK_BYTES // (8 * self.k))

    def library(self) -> Kernel:
        """What vLLM selects for this shape here; activations by its own quantiser.

        Raises:
            ImportError: no vLLM.
            ValueError: vLLM has no kernel for this shape.
        """
        from vllm.model_executor.kernels.linear import init_mxfp8_linear_kernel

        known = inspect.signature(init_mxfp8_linear_kernel).parameters
        shape = {"weight_shape": (self.n, self.k)} if "weight_shape" in known else {}
        kernel = init_mxfp8_linear_kernel(**shape)  # 0.30 selects by platform alone

        def prepare(given: Tensors) -> torch.nn.Module:
            layer = torch.nn.Module()
            for name, tensor in (("weight", "weight"), ("weight_scale", "scales")):
                value = given[tensor].clone()
                layer.register_parameter(name, torch.nn.Parameter(value, False))
            # What vLLM's linear layers carry and some kernels read.
            layer.input_size_per_partition = self.k
            layer.output_size_per_partition = self.n
            layer.logical_widths = [self.n]
            layer.orig_dtype = torch.bfloat16
            layer.params_dtype = torch.bfloat16
            # As while vLLM loads a bf16 model: some kernels read it.
            default = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)
            try:
                kernel.process_weights_after_loading(layer)
            finally:
                torch.set_default_dtype(default)
            return layer

        layers: list[torch.nn.Module] = []

        def call(given: Tensors) -> Tensors:
            if not layers:  # once, as vLLM does it
                layers.append(prepare(given))
            return {"out": kernel.apply_weights(layers[0], given["x"])}

        return call


@dataclass(frozen=True)
class Experts(Op):
    """Both grouped GEMMs of a rank's routed experts, with experts that nobody chose.

    Rows are permuted by vLLM's own kernel, which pads each expert's to the alignment
    (128) and marks padding -1; rows past the last expert are -1 alone.

    Attributes:
        tokens: query tokens.
        top: experts a token takes.
        experts: experts of the call, a few of the model's.
        hidden: hidden size.
        inner: intermediate size on this rank as the kernel is handed it, padded to 128.
    """

    name: ClassVar[str] = "experts"
    entry: ClassVar[str] = "vllm.utils.deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous"

    tokens: int
    top: int
    experts: int
    hidden: int
    inner: int

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens x {self.top} of {self.experts} experts, "
            f"{self.hidden} to 2 x {self.inner} and back"
        )

    def gpu_bytes(self) -> int:
        weights = self.experts * 3 * self.inner * self.hidden
        rows = self.tokens * self.top + min(self.experts, self.tokens * self.top) * 128
        wide = max(self.hidden, 2 * self.inner)
        one = 2 * self.inner * self.hidden * 32
        return weights * 2 + rows * wide * 24 + one + (16 << 20)

    def inputs(self, rng: torch.Generator) -> Tensors:
        device = rng.device

        def codes(*shape: int) -> torch.Tensor:
            values = torch.randint(256, shape, generator=rng, device=device)
            return values.to(torch.uint8)

        def scales(*shape: int) -> torch.Tensor:
            values = torch.randint(-8, -4, shape, generator=rng, device=device)
            return (values + UE8M0_BIAS).to(torch.uint8)

        def activations(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, generator=rng, device=device)
            groups = (*shape[:-1], shape[-1] // ACTIVATION_GROUP, 1)
            sizes = torch.randint(-3, 4, groups, generator=rng, device=device)
            parts = values.unflatten(-1, (-1, ACTIVATION_GROUP))
            return (parts * torch.exp2(sizes.float())).flatten(-2).to(torch.bfloat16)

        e, h, i = self.experts, self.hidden, self.inner
        # Odd experts are chosen by nobody; a token takes each expert once at most.
        chosen = torch.arange(0, e, 2, device=device)
        order = torch.rand((self.tokens, chosen.numel()), generator=rng, device=device)
        ids = chosen[order.argsort(1)[:, : self.top]]
        return {
            "w13": codes(e, 2 * i, h // 2),
            "s13": scales(e, 2 * i, h // MX_GROUP),
            "w2": codes(e, h, i // 2),
            "s2": scales(e, h, i // MX_GROUP),
            "x": activations(self.tokens, h),
            "middle": activations(self.tokens, ids.shape[1], i),
            "ids": ids.int(),
        }

    def expected(self, given: Tensors, got: Tensors) -> dict[str, Expected]:
        """From activations as the library quantised them: ``x8``, ``middle8``."""
        ids = given["ids"]
        x = got["x8"].to(torch.float64)
        middle = got["middle8"].to(torch.float64)
        first = x.new_zeros((*ids.shape, 2 * self.inner))
        second = x.new_zeros((*ids.shape, self.hidden))
        for expert in range(self.experts):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            if not token.numel():
                continue
            w13 = mxfp4_values(given["w13"][expert], given["s13"][expert])
            first[token, slot] = x[token] @ w13.mT
            w2 = mxfp4_values(given["w2"][expert], given["s2"][expert])
            second[token, slot] = middle[token, slot] @ w2.mT
        return {
            "x8": Expected(given["x"].to(torch.float64), FP8_PRODUCT_BOUND),
            "middle8": Expected(given["middle"].to(torch.float64), FP8_PRODUCT_BOUND),
            "first": Expected(first, BF16_PRODUCT_BOUND),
            "second": Expected(second, BF16_PRODUCT_BOUND),
        }

    def library(self) -> Kernel:
        """DeepGEMM's, with vLLM's quantisers and permutation around it.

        Raises:
            ImportError: no vLLM.
            Unavailable: vLLM does not run experts by DeepGEMM on this GPU.
        """
        from vllm.model_executor.layers.fused_moe.deep_gemm_utils import (
            deepgemm_moe_permute,
        )
        from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import (
            DeepGemmFP4Experts,
        )
        from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import (
            _pack_deepgemm_mxfp4_scales,
        )
        from vllm.model_executor.layers.quantization.utils.fp8_utils import (
            per_token_group_quant_fp8,
            per_token_group_quant_fp8_packed_for_deepgemm,
        )
        from vllm.utils.deep_gemm import (
            m_grouped_fp8_fp4_gemm_nt_contiguous,
            mk_alignment_scope,
        )

        if not DeepGemmFP4Experts._supports_current_device():
            raise Unavailable("vLLM's DeepGemmFP4Experts does not take this GPU")

        def gemm(
            a: torch.Tensor,
            a_scales: torch.Tensor,
            w: torch.Tensor,
            w_scales: torch.Tensor,
            layout: torch.Tensor,
        ) -> torch.Tensor:
            out = torch.full((a.shape[0], w.shape[1]), torch.nan, device=a.device)
            out = out.to(torch.bfloat16)
            m_grouped_fp8_fp4_gemm_nt_contiguous(
                (a, a_scales),
                (w.view(torch.int8), w_scales),
                out,
                layout,
                recipe_a=(1, ACTIVATION_GROUP),
                recipe_b=(1, MX_GROUP),
            )
            return out

        def call(given: Tensors) -> Tensors:
            s13, s2 = _pack_deepgemm_mxfp4_scales(
                *(torch.nn.Parameter(given[name], False) for name in ("w13", "w2")),
                *(torch.nn.Parameter(given[name], False) for name in ("s13", "s2")),
            )
            x8, scales = per_token_group_quant_fp8(given["x"], ACTIVATION_GROUP)
            rows, row_scales, layout, places, alignment = deepgemm_moe_permute(
                aq=x8,
                aq_scale=scales,
                topk_ids=given["ids"],
                local_num_experts=self.experts,
                expert_map=None,
                expert_tokens_meta=None,
            )[:5]
            places = places.long()
            spread = torch.full(
                (rows.shape[0], self.inner), GUARD_BYTE, device=rows.device
            ).to(torch.bfloat16)
            spread[places] = given["middle"]
            middle8, packed = per_token_group_quant_fp8_packed_for_deepgemm(
                spread, ACTIVATION_GROUP, use_ue8m0=True
            )
            with mk_alignment_scope(alignment):
                first = gemm(rows, row_scales, given["w13"], s13, layout)
                second = gemm(middle8, packed, given["w2"], s2, layout)
            factors = _unpacked(packed, self.inner // ACTIVATION_GROUP)
            return {
                "x8": _scaled(x8, scales),
                "middle8": _scaled(middle8, factors)[places],
                "first": first[places],
                "second": second[places],
            }

        return call


def _scaled(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 ``[M, K]`` of e4m3 ``[M, K]`` and a factor for each 128 of them."""
    groups = data.to(torch.float64).unflatten(-1, (-1, ACTIVATION_GROUP))
    return (groups * scales.to(torch.float64).unsqueeze(-1)).flatten(-2)


def _unpacked(packed: torch.Tensor, groups: int) -> torch.Tensor:
    """float64 ``[M, groups]`` of int32 ``[M, groups / 4]``, four UE8M0 bytes each, the
    first in the low byte."""
    shifts = torch.arange(0, 32, 8, device=packed.device)
    exponents = ((packed.unsqueeze(-1) >> shifts) & 255).flatten(1)[:, :groups]
    return torch.exp2(exponents.to(torch.float64) - UE8M0_BIAS)
