# SPDX-License-Identifier: Apache-2.0
"""vLLM's own Triton kernels through the ops' calls, in Triton's interpreter, on a CPU.

Run as a program, since Triton decides at import: prints one JSON line a call. Level of
evidence: emulated.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
sys.path.append(str(Path(__file__).parent))

import sm120_fake_ops as ops
import torch

cache_ops, topk_ops = ops.cache_ops, ops.topk_ops


def convert_right():
    """Triton's interpreter loses the carry of e4m3's mantissa (1.96 becomes 1.0) and cuts
    small values and bf16 off; GPUs round to nearest even, as torch does."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    types = {
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
        tl.bfloat16: (torch.bfloat16, torch.int16),
    }

    def converted(values, source, target, mode):
        if source == tl.float32 and target in types:
            to, bits = types[target]
            right = torch.from_numpy(values.astype("float32")).to(to).view(bits)
            return right.numpy().view(f"uint{8 * bits.itemsize}")
        return convert(values, source, target, mode)

    interpreter._convert_float = converted


def main():
    import vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache  # noqa: F401
    from vllm.model_executor.kernels.attention.dsa import candidate_blocks

    convert_right()
    # It asserts that its logits are on a GPU, and nothing else needs one.
    on_gpu = type("OnGpu", (torch.Tensor,), {"is_cuda": True})
    for name in ("select_candidate_blocks", "apply_candidate_mask"):
        kernel = getattr(candidate_blocks, name)
        passing = lambda logits, *rest, k=kernel: k(logits.as_subclass(on_gpu), *rest)  # noqa: E731
        setattr(candidate_blocks, name, passing)
    shapes = [
        cache_ops.Compressor(19, 2, 64, 38016),
        cache_ops.Compressor(22, 2, 64),
        cache_ops.Compressor(19, 1, 64, 38016),
        cache_ops.IndexerStore(20, 2, 64, 9216),
        cache_ops.IndexerStore(20, 1, 32),
        topk_ops.Candidates(4, 500, 450, 16, 8),
    ]
    for op in shapes:
        type(op).repeats = 2  # the interpreter has no races
        result = ops.fake.load("sm120_op_call").run_op(op, op.library(), "cpu")
        print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()
