# SPDX-License-Identifier: Apache-2.0
"""Sampling under top-k and top-p: what is drawn, how often, and that it ends."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from .sm120_device_kernels import Bound
from .sm120_op_call import Kernel, Op, Tensors, Verdict
from .sm120_op_reference import sampling_probabilities

# A chi-square statistic of a dozen degrees of freedom is further than so many of its
# deviations above its mean in one run of a million.
_DEVIATIONS = 8.0


@dataclass(frozen=True)
class Sampler(Op):
    """Many draws from one distribution, each row the same logits.

    Attributes:
        tokens: rows, all sampled together.
        vocabulary: of the model.
        top_k, top_p: of every row.
        draws: how often the rows are sampled.
    """

    name: ClassVar[str] = "sampler"
    entry: ClassVar[str] = "flashinfer_sample, or apply_top_k_top_p"

    repeats: ClassVar[int] = 1  # random, on purpose

    tokens: int
    vocabulary: int
    top_k: int = 20
    top_p: float = 0.9
    draws: int = 16

    def __str__(self) -> str:
        return (
            f"{self.tokens} rows of {self.vocabulary}, top-k {self.top_k}, top-p "
            f"{self.top_p:g}, {self.draws} times"
        )

    def gpu_bytes(self) -> int:
        # Sorting keeps values and int64 places, twice.
        return self.tokens * self.vocabulary * 40 + self.vocabulary * 64 + (16 << 20)

    def inputs(self, rng: torch.Generator) -> Tensors:
        size = (self.vocabulary,)
        order = torch.randperm(self.vocabulary, generator=rng, device=rng.device)
        noise = torch.rand(size, generator=rng, device=rng.device)
        # Distinct: the largest fall by 0.1 to 0.2 each, the rest lies far below.
        ladder = -0.15 * torch.arange(self.vocabulary, device=rng.device)
        logits = torch.empty(size, device=rng.device)
        logits[order] = ladder.clamp_min(-30.0) + 0.05 * noise
        return {"logits": logits}

    def judge(self, given: Tensors, got: Tensors) -> Verdict:
        """Only allowed tokens, and a chi-square of their counts that chance gives."""
        chances = sampling_probabilities(given["logits"], self.top_k, self.top_p)
        allowed = chances > 0
        freedom = int(allowed.sum()) - 1
        most = freedom + _DEVIATIONS * math.sqrt(2 * freedom)
        bound = Bound(
            most / freedom,
            "chi-square over its degrees of freedom, eight deviations above the mean",
        )
        drawn = got["tokens"].flatten().long()
        total = self.tokens * self.draws
        if drawn.numel() != total:
            return Verdict(1.0, bound, f"{drawn.numel()} tokens, need {total}")
        inside = (drawn >= 0) & (drawn < self.vocabulary)
        if not bool(inside.all()):
            wrong = int(drawn[~inside][0])
            return Verdict(1.0, bound, f"token {wrong} of {self.vocabulary}")
        outside = int((~allowed[drawn]).sum())
        if outside:
            reason = f"{outside} of {total} tokens are outside of top-k and top-p"
            return Verdict(outside / total, bound, reason)
        counts = torch.bincount(drawn, minlength=self.vocabulary)[allowed]
        wanted = chances[allowed] * total
        chi = float(((counts - wanted).square() / wanted).sum()) / freedom
        if chi > bound.value:
            reason = f"tokens are drawn unevenly: {chi:.3g} above {bound.value:.3g}"
            return Verdict(chi, bound, reason)
        return Verdict(chi, bound)

    def library(self) -> Kernel:
        """FlashInfer's where vLLM takes it here, else vLLM's Triton mask and a draw.

        Raises:
            ImportError: no vLLM, or no FlashInfer.
        """
        from vllm.v1.sample.ops import topk_topp_sampler as sampling

        fused = sampling.flashinfer_sampler_supported()

        def call(given: Tensors) -> Tensors:
            row = given["logits"]
            device = row.device
            k = torch.full((self.tokens,), self.top_k, dtype=torch.int32, device=device)
            p = torch.full((self.tokens,), self.top_p, device=device)
            found = []
            for _ in range(self.draws):
                logits = row.expand(self.tokens, -1).contiguous()
                if fused:
                    found.append(sampling.flashinfer_sample(logits, k, p))
                    continue
                masked = sampling.apply_top_k_top_p(logits, k, p)
                chances = masked.softmax(-1, dtype=torch.float32)
                # The exponential race that vLLM's native sampler draws by.
                race = torch.empty_like(chances).exponential_()
                found.append(chances.div_(race).argmax(-1))
            return {"tokens": torch.stack(found)}

        return call
