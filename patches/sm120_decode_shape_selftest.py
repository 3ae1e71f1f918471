# SPDX-License-Identifier: Apache-2.0
"""[Attention] DeepSeek-V4.1: a self-test of every SM12x shape before weights are loaded

Why: a refused shape costs half an hour of loading on every rank. The module takes what
    follows `vllm serve`, plans pages and widths with vLLM's own code, and asks
    FlashInfer's and DeepGEMM's own rules, in seconds. New modules only: it applies to an
    unpatched tree too, and shows there what the other patches mend.
Upstream: none known.
Retire: when upstream refuses unsupported shapes before it loads weights.
Test: pytest tests/fork/test_cases.py tests/v1/attention/test_sm120_selftest.py
"""

_FOLDER = "vllm/models/deepseek_v41/nvidia"

MODULES = tuple(
    f"{_FOLDER}/{name}.py"
    for name in (
        "sm120_decode_shape_selftest",
        "sm120_selftest_argv",
        "sm120_selftest_report",
        "sm120_selftest_rules",
        "sm120_selftest_warnings",
        "sm120_selftest_path",
        "sm120_selftest_ops",
        "sm120_selftest_memory",
        "sm120_selftest_switches",
        "sm120_selftest_toolchain",
        "sm120_rank_model",
        "sm120_kernel_limits",
        "sm120_kv_plan",
        "sm120_checkpoint_names",
        "sm120_selftest_device",
        "sm120_child_process",
        "sm120_device_calls",
        "sm120_device_cases",
        "sm120_device_kernels",
        "sm120_packed_cache",
        "sm120_reference",
        "sm120_kernel_caches",
        "sm120_op_call",
        "sm120_op_cache",
        "sm120_op_gemm",
        "sm120_op_hyper",
        "sm120_op_logits",
        "sm120_op_plan",
        "sm120_op_reference",
        "sm120_op_sampler",
        "sm120_op_table",
        "sm120_op_topk",
    )
)
