# SPDX-License-Identifier: Apache-2.0
"""Switches that mislead, and contexts that leave a fast path: warnings.

Switches with which a start fails are found where the op's implementation is selected
(sm120_selftest_ops.py).
"""

import os
from typing import Any

from vllm import envs
from vllm.models.deepseek_v41.nvidia.sm120_rank_model import sm_count
from vllm.models.deepseek_v41.nvidia.sm120_selftest_report import Fact, Report
from vllm.platforms import current_platform

# Compressed positions that one thread block of persistent_topk takes from a row, by the
# rows of a step: by arithmetic from its public launcher, rounded. All of a row's blocks
# must be resident at once, and one fits on an SM. From 9 rows on a block takes three
# times as many.
_POSITIONS_PER_SM = {4: 8290, 8: 11520}


def add(report: Report, config: Any, capability: tuple[int, int], real: bool) -> None:
    """Adds facts and warnings.

    Args:
        report: where they go.
        config: the VllmConfig.
        capability: of the target.
        real: the target is this machine's GPU.
    """
    if text := misleading():
        report.warnings["switches"] = text
    sms = current_platform.num_compute_units() if real else sm_count(capability)
    assumed = None if real else "the capability's usual GPU; --capability names none"
    report.facts["sms"] = Fact(sms, "vllm.platforms", assumed)
    context = int(config.model_config.max_model_len)
    hf_config = config.model_config.hf_config
    block = int(getattr(hf_config, "candidate_block_size", 0) or 0)
    if block:
        width = -(-context // block)
        source = f"max_model_len / candidate_block_size {block}"
        report.facts["candidate_width"] = Fact(width, source)
    ratios = [ratio for ratio in hf_config.compress_ratios if ratio]
    if text := long_context(context // min(ratios), sms) if ratios else None:
        report.warnings["long_context"] = text


def misleading() -> str | None:
    """What this environment does that its names do not say."""
    found = []
    if not envs.VLLM_USE_DEEP_GEMM:
        found.append(
            "VLLM_USE_DEEP_GEMM=0 moves the hyper-connections to TileLang and the "
            "experts to Marlin; the indexer's logits stay DeepGEMM's"
        )
    if "VLLM_MOE_USE_DEEP_GEMM" in os.environ:
        found.append(
            "VLLM_MOE_USE_DEEP_GEMM is not read for these experts; "
            "VLLM_USE_DEEP_GEMM and --moe-backend are"
        )
    return "; ".join(found) or None


def long_context(positions: int, sms: int) -> str | None:
    """Whether decode's top-k leaves its fast path.

    Args:
        positions: most compressed positions in a row.
        sms: of the GPU.
    """
    limits = {rows: sms * each for rows, each in _POSITIONS_PER_SM.items()}
    beyond = {rows: limit for rows, limit in limits.items() if positions > limit}
    if not beyond:
        return None
    said = ", ".join(f"about {limit} for {rows}" for rows, limit in limits.items())
    return (
        f"rows of {positions} compressed positions on {sms} SMs: persistent_topk takes "
        f"{said} rows in a step; longer ones take top_k_per_row_decode, which is "
        "slower. A shorter --max-model-len avoids it"
    )
