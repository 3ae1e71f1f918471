# SPDX-License-Identifier: Apache-2.0
"""The self-test's calls of ops, by the installed vLLM's kernels, on the GPU that is here.

Needs a GPU and vLLM with its binaries. A library that is not installed, or has no kernel
for this GPU, skips its calls by name; a kernel that answers wrongly fails. As a table:
``python3 -m vllm.models.deepseek_v41.nvidia.sm120_op_table --config fork/model/config.json``.
"""

import importlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

CONFIG = Path(__file__).resolve().parents[2] / "fork" / "model" / "config.json"
# Kernels that vLLM has for these families of GPUs alone (DeepGemmFP4Experts).
ONLY_ON = {"experts": (10, 12)}


@pytest.fixture(scope="module")
def fork_module():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here: what the kernels answer is unproven in this run")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    return lambda name: importlib.import_module(f"vllm.models.deepseek_v41.nvidia.{name}")


def _names():
    import sys

    models = str(Path(__file__).resolve().parents[2] / "vllm" / "models")
    if models not in sys.path:
        sys.path.append(models)
    return importlib.import_module("deepseek_v41.nvidia.sm120_op_plan").OP_CALLS


@pytest.mark.parametrize("name", _names())
def test_kernel_agrees(fork_module, name):
    family = torch.cuda.get_device_capability()[0]
    if family not in ONLY_ON.get(name, (family,)):
        pytest.skip(f"vLLM runs {name} by these kernels on SM{ONLY_ON[name]} only")
    plan, op_call = fork_module("sm120_op_plan"), fork_module("sm120_op_call")
    child = fork_module("sm120_child_process")
    ops = plan.plan_ops(plan.from_config(CONFIG, 4), [name])
    results = child.in_child([op_call.OpCall(op) for op in ops], limit_s=300)
    absent = [r.reason for r in results if r.reason.startswith(op_call.CANNOT)]
    if len(absent) == len(results):
        pytest.skip(f"{name} {absent[0]}")
    assert [f"{r.call}: {r.reason}" for r in results if not r.ok] == []
    assert max(r.peak_bytes for r in results) < op_call.MEMORY_LIMIT
    for op, result in zip(ops, results, strict=True):
        # PyTorch's allocator rounds up, and kernels have workspaces of their own.
        assert result.peak_bytes < op.gpu_bytes() + (64 << 20), result.call
