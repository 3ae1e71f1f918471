# SPDX-License-Identifier: Apache-2.0
"""How one sparse-MLA call is cut into programs: tile sizes by shape, in one table.

Pure Python: planning a call needs no GPU. What is tuned on one is ``CONFIGS`` and
``choose``; the kernel's logic does not change.
"""

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

# 32-bit registers of a multiprocessor, and its warp (CUDA, every compute capability
# from 8.0 to 12.1).
REGISTERS = 65536
WARP = 32

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
        warps: warps of a program. The eight slices of a record are dealt to them.
        ahead: whether a step's records are read, into registers, while the step
            before is computed.
        stages: Triton's own pipeline, through shared memory; 1: none.
        registers: a thread's, at most: the compiler is held to it.
        shared: bytes of shared memory.
    """

    heads: int
    candidates: int
    warps: int
    ahead: bool
    stages: int
    registers: int
    shared: int

    def programs(self, gpu: Gpu) -> int:
        """Programs that one multiprocessor holds at once."""
        threads = self.warps * WARP
        by_registers = REGISTERS // (threads * self.registers)
        by_shared = gpu.shared // (self.shared + RESERVED_SHARED)
        return max(1, min(by_registers, by_shared))


_KIB = 1024

# `python -m benchmarks.sparse_mla_compile` shows each one's shared memory and that none
# spills; tests hold it to that. 99 KiB is what a block of SM12x may have.
CONFIGS = {
    "16 heads, 16 records, 8 warps": Config(16, 16, 8, False, 1, 128, 48 * _KIB),
    "16 heads, 16 records, 8 warps, ahead": Config(16, 16, 8, True, 1, 128, 48 * _KIB),
    "16 heads, 16 records, 8 warps, 3 stages": Config(
        16, 16, 8, False, 3, 128, 59 * _KIB
    ),
    "16 heads, 32 records, 8 warps": Config(16, 32, 8, False, 1, 255, 80 * _KIB),
    "16 heads, 32 records, 8 warps, ahead": Config(16, 32, 8, True, 1, 255, 80 * _KIB),
    "32 heads, 16 records, 8 warps": Config(32, 16, 8, False, 1, 255, 64 * _KIB),
    "32 heads, 16 records, 8 warps, ahead": Config(32, 16, 8, True, 1, 255, 64 * _KIB),
    "32 heads, 16 records, 8 warps, 3 stages": Config(
        32, 16, 8, False, 3, 255, 75 * _KIB
    ),
    "32 heads, 32 records, 8 warps": Config(32, 32, 8, False, 1, 255, 96 * _KIB),
    "32 heads, 32 records, 8 warps, ahead": Config(32, 32, 8, True, 1, 255, 96 * _KIB),
}


def choose(tokens: int, heads: int, gpu: Gpu) -> str:
    """The name of the config for a call. Not tuned on a GPU yet."""
    if heads > 16:
        return "32 heads, 16 records, 8 warps, ahead"
    # Where tokens are few, each step's latency counts: the smallest step.
    if tokens * 8 <= gpu.sms:
        return "16 heads, 16 records, 8 warps"
    return "16 heads, 16 records, 8 warps, ahead"


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


def plan(
    tokens: int,
    heads: int,
    width: int,
    extra_width: int,
    gpu: Gpu,
    config: Config | None = None,
) -> Plan:
    """Cuts a call into programs: as many as the GPU holds at once, no more.

    Args:
        tokens, heads: of the call.
        width, extra_width: columns of the two index tables.
        gpu: where it runs.
        config: None: ``choose``.
    """
    if config is None:
        config = CONFIGS[choose(tokens, heads, gpu)]
    head_blocks = -(-heads // config.heads)
    steps = -(-width // config.candidates) - (-extra_width // config.candidates)
    room = gpu.sms * config.programs(gpu) // max(1, tokens * head_blocks)
    splits = max(1, min(steps, room, MAX_SPLITS))
    # No more splits than finish at the same step.
    splits = -(-steps // -(-steps // splits)) if steps else 1
    return Plan(config, head_blocks, splits)


def workspace_floats(tokens: int, heads: int, splits: int) -> int:
    """fp32 values that the parts of a call take until they are merged: each split's
    output and log-sum-exp."""
    return 0 if splits == 1 else tokens * heads * splits * (HEAD_DIM + 1)


def largest_workspace_floats(gpu: Gpu) -> int:
    """What no call's ``workspace_floats`` exceeds on a GPU: ``plan`` splits only up to
    the programs that it holds at once."""
    heads = max(c.programs(gpu) * c.heads for c in CONFIGS.values())
    return gpu.sms * heads * (HEAD_DIM + 1)
