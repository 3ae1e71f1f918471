# SPDX-License-Identifier: Apache-2.0
"""How one sparse-MLA call is cut into programs: tile sizes by shape, in one table.

Pure Python: planning a call needs no GPU. What is tuned on one is ``CONFIGS`` and
``choose``; the kernel's logic does not change.
"""

import functools
from dataclasses import dataclass

# Values of a record, and of a head.
HEAD_DIM = 512

# Most query heads of a call: what vLLM pads to at most.
MAX_HEADS = 128

# Most tokens of a call: CUDA's limit on a grid's second dimension.
MAX_TOKENS = 65535

# Most parts that a token's candidates are cut into: the merge holds all of them at
# once, in registers.
MAX_SPLITS = 64

# What a step takes where two programs share a multiprocessor, and what writing and
# merging one part of 16 heads takes, both in steps of a program alone, of about 2.1 us:
# measured on an H200.
SHARED_STEP = 1.25
PART = 0.014
H200_SMS = 132

# 32-bit registers of a multiprocessor, and its warp (CUDA, every compute capability
# from 8.0 to 12.1).
REGISTERS = 65536
WARP = 32

# Warps of a program of either kernel: a record's eight slices are dealt to them.
WARPS = 8

# Shared memory that the driver keeps of each block (CUDA, since 8.0), in bytes.
RESERVED_SHARED = 1024


@dataclass(frozen=True)
class Gpu:
    """What planning needs to know of a GPU.

    Attributes:
        sms: multiprocessors.
        shared: bytes of shared memory of each.
    """

    sms: int
    shared: int


@dataclass(frozen=True)
class Config:
    """Tile sizes of one kernel.

    Attributes:
        heads: query heads of a program, which share each gathered record. 16 fill a
            tensor-core instruction.
        candidates: records of a step.
        registers: a thread's, at most: the compiler is held to it.
        shared: bytes of shared memory.
        function: of sm120_sparse_mla.cu; None: Triton's kernel.
        ahead: of Triton's: whether a step's records are read, into registers, while the
            step before is computed.
    """

    heads: int
    candidates: int
    registers: int
    shared: int
    function: str | None = None
    ahead: bool = False

    def programs(self, gpu: Gpu) -> int:
        """Programs that one multiprocessor holds at once."""
        by_registers = REGISTERS // (WARPS * WARP * self.registers)
        by_shared = gpu.shared // (self.shared + RESERVED_SHARED)
        return max(1, min(by_registers, by_shared))


def _cuda(function: str, heads: int, registers: int) -> Config:
    """A config of sm120_sparse_mla.cu, with the shared memory of its ``Layout``."""
    step, stages = 32, 2
    copies = stages * step * (576 + WARPS * 4)
    logits = WARPS * heads * step * 4 if heads > 16 else 0
    weights = heads * (step + 8) * 2 + 2 * heads * 4
    return Config(heads, step, registers, copies + logits + weights, function)


_KIB = 1024

# `python -m benchmarks.sparse_mla_compile` shows each one's shared memory and that none
# spills; tests hold it to that. 99 KiB is what a block of SM12x may have.
CONFIGS = {
    "CUDA, 16 heads": _cuda("candidates_16", 16, 128),
    "CUDA, 32 heads": _cuda("candidates_32", 32, 255),
    "Triton, 16 heads, 16 records": Config(16, 16, 128, 48 * _KIB),
    "Triton, 16 heads, 16 records, ahead": Config(16, 16, 128, 48 * _KIB, ahead=True),
    "Triton, 32 heads, 32 records, ahead": Config(32, 32, 255, 96 * _KIB, ahead=True),
}


def choose(tokens: int, heads: int, gpu: Gpu, cuda: bool) -> str:
    """The name of the config for a call, as tuned on an H200 (benchmarks/NOTES.md)."""
    if cuda:
        # 32 heads share each record, where that leaves work for every multiprocessor.
        wide = heads > 16 and tokens * -(-heads // 16) > gpu.sms
        return "CUDA, 32 heads" if wide else "CUDA, 16 heads"
    if heads > 16:
        return "Triton, 32 heads, 32 records, ahead"
    # Where tokens are few, each step's latency counts.
    few = tokens * 8 <= gpu.sms
    return "Triton, 16 heads, 16 records" + ("" if few else ", ahead")


@dataclass(frozen=True)
class Plan:
    """One call's grid. From shapes alone, so that a CUDA graph may hold it.

    Attributes:
        config: tile sizes.
        head_blocks: programs side by side over the heads.
        splits: parts of each token's candidates; 1: no merge.
    """

    config: Config
    head_blocks: int
    splits: int


@functools.lru_cache(4096)
def plan(
    tokens: int,
    heads: int,
    width: int,
    extra_width: int,
    gpu: Gpu,
    config: Config | None = None,
    cuda: bool = False,
) -> Plan:
    """Cuts a call into programs: as many as the GPU holds at once, no more.

    Args:
        tokens, heads: of the call.
        width, extra_width: columns of the two index tables.
        gpu: where it runs.
        config: None: ``choose``.
        cuda: whether the CUDA kernel may serve it.
    """
    if config is None:
        config = CONFIGS[choose(tokens, heads, gpu, cuda)]
    head_blocks = -(-heads // config.heads)
    steps = -(-width // config.candidates) - (-extra_width // config.candidates)
    blocks = max(1, tokens * head_blocks)
    most = max(1, min(steps, gpu.sms * config.programs(gpu) // blocks, MAX_SPLITS))
    # No more splits than finish at the same step.
    useful = {-(-steps // each) for each in range(1, steps + 1)} or {1}
    splits = min(
        (s for s in useful if s <= most),
        key=lambda s: (_time(s, steps, blocks, config, gpu), s),
    )
    return Plan(config, head_blocks, splits)


def _time(splits: int, steps: int, blocks: int, config: Config, gpu: Gpu) -> float:
    """What a number of splits costs, in steps of a program that has its multiprocessor
    for itself. Its two weights fit what an H200 takes (benchmarks/NOTES.md)."""
    shared = blocks * splits > gpu.sms
    taken = -(-steps // splits) * (SHARED_STEP if shared else 1.0)
    if splits > 1:
        taken += blocks * splits * config.heads / 16 * PART * H200_SMS / gpu.sms
    return taken


def workspace_floats(tokens: int, heads: int, splits: int) -> int:
    """fp32 values that the parts of a call take until they are merged: each split's
    output and log-sum-exp."""
    return 0 if splits == 1 else tokens * heads * splits * (HEAD_DIM + 1)


def largest_workspace_floats(gpu: Gpu) -> int:
    """What no call's ``workspace_floats`` exceeds on a GPU: ``plan`` splits only up to
    the programs that it holds at once."""
    heads = max(c.programs(gpu) * c.heads for c in CONFIGS.values())
    return gpu.sms * heads * (HEAD_DIM + 1)
