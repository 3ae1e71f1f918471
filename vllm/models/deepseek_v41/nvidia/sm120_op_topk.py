# SPDX-License-Identifier: Apache-2.0
"""The indexer's choice: top-k of decode rows, and two-level candidate blocks."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .sm120_op_call import EXACT, Kernel, Op, Tensors, Verdict
from .sm120_op_reference import block_scores

# The logits kernels allocate rows of a multiple of this many columns.
_ALIGNED_COLUMNS = 256


def _rows(count: int, width: int, rng: torch.Generator) -> torch.Tensor:
    """fp32 ``[count, width]`` with ties: logits of bf16 precision, some zero."""
    columns = -(-width // _ALIGNED_COLUMNS) * _ALIGNED_COLUMNS
    logits = torch.randn((count, columns), generator=rng, device=rng.device)
    logits = logits.masked_fill_(logits.abs() < 0.1, 0.0)
    return logits.to(torch.bfloat16).float()[:, :width]


def _lengths(count: int, longest: int, around: int) -> list[int]:
    """Row lengths: the longest, then what lies around a limit, then the rest."""
    named = [longest, around + 1, around, around - 1, 1, longest - 1, 0, longest // 2]
    named = [max(0, min(n, longest)) for n in named]
    return [named[row % len(named)] for row in range(count)]


@dataclass(frozen=True)
class TopK(Op):
    """Indices of the k largest logits of each row, as a set, -1 where there are fewer.

    Attributes:
        tokens: rows.
        width: columns of the logits, what the engine allocates.
        longest: compressed positions of the longest row.
        k: of the indexer.
        backend: vLLM's ``sparse_indexer_topk_backend``.
    """

    name: ClassVar[str] = "topk"
    entry: ClassVar[str] = "vllm.model_executor.layers.indexer_topk.get_indexer_topk"

    tokens: int
    width: int
    longest: int
    k: int
    backend: str = "auto"

    def __str__(self) -> str:
        return (
            f"{self.tokens} rows of {self.longest} in {self.width} columns, "
            f"k {self.k}, {self.backend}"
        )

    def gpu_bytes(self) -> int:
        return (
            self.tokens * self.width * (4 * 4 + 2 + 1) + self.longest * 24 + (8 << 20)
        )

    def inputs(self, rng: torch.Generator) -> Tensors:
        lengths = _lengths(self.tokens, self.longest, self.k)
        logits = _rows(self.tokens, self.width, rng)
        for row, length in enumerate(lengths):
            logits[row, length:] = 1e30  # columns past a row's end are not cleaned
        ends = torch.tensor(lengths, dtype=torch.int32, device=rng.device)
        return {"logits": logits, "lengths": ends.unsqueeze(1)}

    def judge(self, given: Tensors, got: Tensors) -> Verdict:
        """Each row: indices within it, none twice, and the k largest values."""
        wrong, reason = 0, ""
        indices = got["indices"]
        if indices.shape != (self.tokens, self.k):
            return Verdict(1.0, EXACT, f"indices have the shape {tuple(indices.shape)}")
        for row, length in enumerate(given["lengths"].flatten().tolist()):
            logits, found = given["logits"][row, :length], indices[row].long()
            found = found[found != -1]
            take = min(self.k, length)
            what = ""
            if bool(((found < 0) | (found >= length)).any()):
                what = f"index {int(found.max())} is outside of a row of {length}"
            elif found.numel() != take:
                what = f"{found.numel()} indices, need {take}"
            elif found.unique().numel() != take:
                what = f"{take - int(found.unique().numel())} indices are there twice"
            else:
                best = logits.topk(take).values.sort().values
                missed = int((logits[found].sort().values != best).sum())
                what = f"{missed} of {take} are not among the largest" if missed else ""
                wrong += missed
            if what and not reason:
                reason = f"row {row} of length {length}: {what}"
        share = wrong / (self.tokens * self.k)
        return Verdict(share if not reason else share or 1.0, EXACT, reason)

    def defined(self, given: Tensors, got: Tensors) -> Tensors:
        """The values chosen: of equal ones any may be, and in any order."""
        indices = got["indices"].long()
        inside = (indices >= 0) & (indices < given["lengths"])
        values = given["logits"].gather(1, torch.where(inside, indices, 0))
        return {"values": torch.where(inside, values, torch.inf).sort(1).values}

    def library(self) -> Kernel:
        """vLLM's dispatcher, with what it selects here.

        Raises:
            ImportError: no vLLM.
        """
        from vllm.model_executor.layers.indexer_topk import get_indexer_topk
        from vllm.v1.worker.workspace import (
            init_workspace_manager,
            is_workspace_manager_initialized,
        )

        def call(given: Tensors) -> Tensors:
            logits = given["logits"]
            if not is_workspace_manager_initialized():
                init_workspace_manager(logits.device)
            shape = (self.tokens, self.k)
            indices = torch.full(shape, -1, dtype=torch.int32, device=logits.device)
            select = get_indexer_topk(self.backend)
            select(logits, given["lengths"], 1, indices, self.k, self.longest)
            return {"indices": indices}

        return call


@dataclass(frozen=True)
class Candidates(Op):
    """Blocks of the source indexer, and the mask that later indexers get of them.

    Attributes:
        tokens: rows.
        width: columns of the logits.
        longest: compressed positions of the longest row.
        blocks: candidate blocks a row.
        block: positions in a block.
    """

    name: ClassVar[str] = "candidates"
    entry: ClassVar[str] = "select_candidate_blocks, apply_candidate_mask"

    tokens: int
    width: int
    longest: int
    blocks: int
    block: int

    def __str__(self) -> str:
        return (
            f"{self.blocks} blocks of {self.block}, {self.tokens} rows of "
            f"{self.longest} in {self.width} columns"
        )

    def gpu_bytes(self) -> int:
        cells = self.tokens * self.width
        return cells * (4 * 6 + 4) + cells // self.block * 32 + (8 << 20)

    def inputs(self, rng: torch.Generator) -> Tensors:
        lengths = _lengths(self.tokens, self.longest, self.blocks * self.block)
        logits = _rows(self.tokens, self.width, rng)
        for row, length in enumerate(lengths):
            logits[row, length:] = 1e30
        ends = torch.tensor(lengths, dtype=torch.int32, device=rng.device)
        return {"logits": logits, "lengths": ends}

    def judge(self, given: Tensors, got: Tensors) -> Verdict:
        """The blocks are the best by score, the newest among them; the mask keeps the
        logits in them and nothing else."""
        if bool((got["blocks"] < -1).any()):
            return Verdict(1.0, EXACT, "blocks that were not written")
        for row, length in enumerate(given["lengths"].tolist()):
            logits, found = given["logits"][row], got["blocks"][row].long()
            found = found[found >= 0]
            scores = block_scores(logits, length, self.block)
            take = min(self.blocks, scores.numel())
            at = f"row {row} of length {length}"
            if found.numel() != take or found.unique().numel() != take:
                n = found.unique().numel()
                return Verdict(1.0, EXACT, f"{at}: {n} distinct blocks, need {take}")
            if take and int(found.max()) >= scores.numel():
                return Verdict(1.0, EXACT, f"{at}: block {int(found.max())} is past it")
            best = scores.topk(take).values.sort().values
            missed = int((scores[found].sort().values != best).sum())
            if missed:
                reason = f"{at}: {missed} of {take} blocks are not among the best"
                return Verdict(missed / take, EXACT, reason)
            keep = torch.zeros(scores.numel(), dtype=torch.bool, device=found.device)
            keep[found] = True
            keep = keep.repeat_interleave(self.block)[:length]
            masked = torch.full_like(logits, -torch.inf)
            masked[:length] = torch.where(keep, logits[:length], -torch.inf)
            wrong = int((got["masked"][row] != masked).sum())
            if wrong:
                reason = f"{at}: {wrong} of {self.width} masked logits are wrong"
                return Verdict(wrong / self.width, EXACT, reason)
        return Verdict(0.0, EXACT)

    def library(self) -> Kernel:
        """vLLM's Triton kernels and torch.topk.

        Raises:
            ImportError: no vLLM.
        """
        from vllm.model_executor.kernels.attention.dsa.candidate_blocks import (
            apply_candidate_mask,
            select_candidate_blocks,
        )

        def call(given: Tensors) -> Tensors:
            logits, lengths = given["logits"], given["lengths"]
            shape = (self.tokens, self.blocks)
            found = torch.full(shape, -7, dtype=torch.int32, device=logits.device)
            select_candidate_blocks(
                logits, None, lengths, self.blocks, self.block, found
            )
            masked = torch.empty_like(logits).copy_(logits)
            apply_candidate_mask(masked, None, lengths, found, self.block)
            return {"blocks": found, "masked": masked}

        return call
