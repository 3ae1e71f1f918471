# SPDX-License-Identifier: Apache-2.0
"""Prefill's indexer logits: keys gathered from their pages, then MQA logits."""

import inspect
from dataclasses import dataclass
from typing import ClassVar

import torch

from .sm120_device_cases import GUARD_BYTE
from .sm120_device_kernels import INDEXER_BOUND
from .sm120_op_call import EXACT, Expected, Kernel, Op, Tensors, Unavailable
from .sm120_op_reference import prefill_logits
from .sm120_packed_cache import (
    INDEX_DIM,
    index_page_bytes,
    index_view,
    pack_index_keys,
    unpack_index_keys,
)

# Rows of keys in the two requests of a chunk are unlike, and neither is a whole page.
_REQUESTS = 2


@dataclass(frozen=True)
class PrefillLogits(Op):
    """One chunk of two requests, causal within each.

    Attributes:
        tokens: query rows.
        heads: indexer heads.
        page: keys in a page.
        keys: keys that each request has gathered at most.
        stride: bytes from one block to the next; 0: the page's own.
    """

    name: ClassVar[str] = "prefill_logits"
    entry: ClassVar[str] = "vllm.utils.deep_gemm.fp8_fp4_mqa_logits"

    tokens: int
    heads: int
    page: int
    keys: int
    stride: int = 0

    def __str__(self) -> str:
        return (
            f"{self.tokens} rows x {self.heads} heads, {self.keys} keys a request of "
            f"page {self.page}"
        )

    def _pages(self) -> int:
        return -(-self.keys // self.page)

    def gpu_bytes(self) -> int:
        blocks = _REQUESTS * self._pages() + 1
        pool = blocks * (self.stride or index_page_bytes(self.page))
        keys = _REQUESTS * self._pages() * self.page
        packing = keys * INDEX_DIM * 40
        logits = self.tokens * keys * (4 * 4 + 8 * 6)
        rows = keys * self.heads * 8 * 3 + self.tokens * self.heads * INDEX_DIM * 16
        return pool + packing + logits + rows + (8 << 20)

    def inputs(self, rng: torch.Generator) -> Tensors:
        device, page, pages = rng.device, self.page, self._pages()
        blocks = _REQUESTS * pages + 1
        size = index_page_bytes(page)
        stride = self.stride or size
        pool = torch.full(
            (blocks, stride), GUARD_BYTE, dtype=torch.uint8, device=device
        )
        cache = pool[:, stride - size :]
        keys = torch.randn(
            (blocks * page, INDEX_DIM), generator=rng, device=device
        ) * torch.exp2(
            torch.randint(-3, 4, (blocks * page, 1), generator=rng, device=device)
        )
        pack_index_keys(keys, page, out=cache)
        table = torch.randperm(blocks - 1, generator=rng, device=device) + 1
        # The first request has all keys, the second ends one key into its last page.
        lengths = [self.keys, max(self.keys - page + 1, 1)]
        bounds = torch.tensor([0, lengths[0], sum(lengths)], device=device)
        split = self.tokens // 3
        rows = torch.arange(self.tokens, device=device)
        second = (rows >= split).int()
        starts = bounds[second]
        behind = torch.where(rows < split, split - 1 - rows, self.tokens - 1 - rows)
        ends = bounds[second + 1] - behind
        ends = torch.maximum(ends, starts)
        if self.tokens > 1:
            ends[0] = starts[0] + 1  # one key
            ends[-2] = starts[-2]  # none
        q = torch.randn(
            (self.tokens, self.heads, INDEX_DIM), generator=rng, device=device
        )
        return {
            "cache": cache,
            "table": table.view(_REQUESTS, pages).int(),
            "bounds": bounds.int(),
            "q": q.to(torch.float8_e4m3fn),
            "weights": torch.randn(
                (self.tokens, self.heads), generator=rng, device=device
            ),
            "starts": starts.int(),
            "ends": ends.int(),
        }

    def slots(self, given: Tensors) -> torch.Tensor:
        """Global slots of the gathered keys, in order."""
        page = self.page
        offsets = torch.arange(page, device=given["table"].device)
        slots = given["table"].long()[..., None] * page + offsets
        counts = given["bounds"].diff().tolist()
        return torch.cat([s.flatten()[:n] for s, n in zip(slots, counts, strict=True)])

    def widest(self, given: Tensors) -> int:
        return int((given["ends"] - given["starts"]).max())

    def expected(self, given: Tensors, got: Tensors) -> dict[str, Expected]:
        keys = unpack_index_keys(given["cache"], self.page, self.slots(given))
        absolute = prefill_logits(
            given["q"], keys, given["weights"], given["starts"], given["ends"]
        )
        want = absolute.new_zeros((self.tokens, self.widest(given)))
        for row in range(self.tokens):
            first, last = int(given["starts"][row]), int(given["ends"][row])
            want[row, : last - first] = absolute[row, first:last]
        return {
            "keys": Expected(keys, EXACT),
            "logits": Expected(want, INDEXER_BOUND, self._within(given)),
        }

    def _within(self, given: Tensors) -> torch.Tensor:
        column = torch.arange(self.widest(given), device=given["ends"].device)
        return column < (given["ends"] - given["starts"]).unsqueeze(1)

    def defined(self, given: Tensors, got: Tensors) -> Tensors:
        logits = got["logits"]
        zero = torch.zeros_like(logits)
        return got | {"logits": torch.where(self._within(given), logits, zero)}

    def library(self) -> Kernel:
        """vLLM's gather and DeepGEMM's logits.

        Raises:
            ImportError: no vLLM.
            Unavailable: the build has no gather.
        """
        from vllm import _custom_ops as ops
        from vllm.utils.deep_gemm import fp8_fp4_mqa_logits

        if not hasattr(torch.ops._C_cache_ops, "cp_gather_indexer_k_quant_cache"):
            raise Unavailable(
                "no _C_cache_ops.cp_gather_indexer_k_quant_cache in this build"
            )
        # Since 0.33 a row's logits begin in column 0; before, in its first key's.
        parameters = inspect.signature(fp8_fp4_mqa_logits).parameters
        compressed = "max_seqlen_k" in parameters

        def call(given: Tensors) -> Tensors:
            device = given["q"].device
            count = int(given["bounds"][-1])
            keys = torch.zeros(
                (count, INDEX_DIM), dtype=torch.float8_e4m3fn, device=device
            )
            scales = torch.zeros((count, 4), dtype=torch.uint8, device=device)
            view = index_view(given["cache"], self.page)
            ops.cp_gather_indexer_k_quant_cache(
                view, keys, scales, given["table"], given["bounds"]
            )
            widest = self.widest(given)
            factors = scales.view(torch.float32).squeeze(-1)
            logits = fp8_fp4_mqa_logits(
                (given["q"], None),
                (keys, factors),
                given["weights"],
                given["starts"],
                given["ends"],
                widest if compressed else False,
            )
            if not compressed:
                columns = torch.arange(widest, device=device) + given["starts"][:, None]
                logits = logits.gather(1, columns.clamp_max(logits.shape[1] - 1).long())
            gathered = keys.to(torch.float64) * factors.to(torch.float64)[:, None]
            return {"keys": gathered, "logits": logits[:, :widest]}

        return call
