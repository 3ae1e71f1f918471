# SPDX-License-Identifier: Apache-2.0
"""How one sparse-MLA call is cut into programs: tile sizes by shape, in one table.

Pure Python, so that planning costs a call microseconds and tests need no GPU. What is
tuned on a GPU is ``CONFIGS`` and ``choose``; the kernel's logic does not change.
"""

from dataclasses import dataclass

# A record's latent width, and its eight slices of 64: seven with one UE8M0 scale each,
# and the bf16 RoPE part (sm120_packed_cache).
HEAD_DIM = 512

# Most query heads of a call (vLLM pads to 128 at most).
MAX_HEADS = 128

# Most parts that a token's candidates are cut into: the merge holds all of them at
# once, in registers.
MAX_SPLITS = 64

# Programs of a grid's second dimension, in CUDA.
MAX_TOKENS = 65535


@dataclass(frozen=True)
class Config:
    """Tile sizes of one kernel.

    Attributes:
        heads: query heads of a program, which share each gathered record: 16 is what
            one tensor-core instruction takes.
        candidates: records of a step.
        warps: warps of a program. The eight slices of a record are dealt to them.
        prefetch: whether the next step's records are read, into registers, before
            this step's are used.
        per_sm: programs that one multiprocessor holds at once, by registers and shared
            memory: what the number of splits is chosen for.
    """

    heads: int
    candidates: int
    warps: int
    prefetch: bool
    per_sm: int


# Registers and shared memory of each: `python -m benchmarks.sparse_mla --compile`.
CONFIGS = {
    "few": Config(heads=16, candidates=32, warps=4, prefetch=False, per_sm=1),
    "many": Config(heads=16, candidates=32, warps=8, prefetch=True, per_sm=1),
    "wide": Config(heads=32, candidates=32, warps=8, prefetch=True, per_sm=1),
}


def choose(tokens: int, heads: int, sms: int) -> str:
    """The name of the config for a call.

    Args:
        tokens, heads: of the call.
        sms: multiprocessors of the GPU.
    """
    if heads > 16:
        return "wide"
    return "few" if tokens * 4 <= sms else "many"


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
    sms: int,
    config: Config | None = None,
) -> Plan:
    """Cuts a call into programs: as many as the GPU holds at once, no more.

    Args:
        tokens, heads: of the call.
        width, extra_width: columns of the two index tables.
        sms: multiprocessors of the GPU.
        config: None: ``choose``.
    """
    if config is None:
        config = CONFIGS[choose(tokens, heads, sms)]
    head_blocks = -(-heads // config.heads)
    steps = -(-width // config.candidates) - (-extra_width // config.candidates)
    room = sms * config.per_sm // max(1, tokens * head_blocks)
    splits = max(1, min(steps, room, MAX_SPLITS))
    # As few splits as finish at the same step.
    splits = -(-steps // -(-steps // splits)) if steps else 1
    return Plan(config, head_blocks, splits)


def workspace_floats(tokens: int, heads: int, splits: int) -> int:
    """fp32 values that the parts of a call take until they are merged: each split's
    output and log-sum-exp."""
    return 0 if splits == 1 else tokens * heads * splits * (HEAD_DIM + 1)


def largest_workspace_floats(sms: int) -> int:
    """What no call's ``workspace_floats`` exceeds on a GPU with so many
    multiprocessors: ``plan`` splits only up to the programs that it holds at once."""
    programs = max(sms * c.per_sm * c.heads for c in CONFIGS.values())
    return programs * (HEAD_DIM + 1)
