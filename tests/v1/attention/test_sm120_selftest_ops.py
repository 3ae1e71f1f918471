# SPDX-License-Identifier: Apache-2.0
"""Which implementation each op has, and switches with which a start fails or misleads."""

import json
import os

import pytest
import torch

from fork import geometry

ARGV = geometry.default_argv()


@pytest.fixture
def run(platform, tmp_path):
    """``run(argv, options, capability)`` gives exit code, report and output lines."""
    from vllm.models.deepseek_v41.nvidia import sm120_decode_shape_selftest as selftest

    def do(*more, options=(), capability="12.0"):
        path = tmp_path / "report.json"
        given = ["--rules-only", "--capability", capability, "--tokens", "1", *options]
        said = []
        code = selftest.main(["--json", str(path), *given, "--", *ARGV, *more], said.append)
        return code, json.loads(path.read_text()), said

    return do


def routes(report):
    return {
        (row["call"], row["layer_kind"], row["tokens"]): row["route"]
        for row in report["rows"]
        if row["selection"]
    }


# Read from the tree's source, TP 4: docs/self-test.md.
CUTLASS = "FlashInferCutlassMxfp8LinearKernel"
SHAPES = {
    "attn.fused_wqa_wkv": "1792x5120",
    "attn.wq_b": "8192x1280",
    "attn.wo_b": "5120x2048",
    "attn.indexer.wq_b": "4096x1280",
    "ffn.shared_experts.gate_up_proj": "1152x5120",
    "ffn.shared_experts.down_proj": "5120x576",
    "engram.wkv": "6400x6144",
}
EXPECTED = {
    ("attention_class", "backbone", 0): (
        "DeepseekV4FlashInferSM120Attention (FLASHINFER_MLA_SPARSE_DSV41)"
    ),
    ("kv_record", "backbone", 0): "fp8_ds_mla, 584 B",
    ("q_kv_norm", "backbone", 0): "fused_q_kv_rmsnorm_quant",
    ("linear attn.wo_a", "backbone", 0): "EmulationMxfp8LinearKernel 2048x4096",
    ("experts", "backbone", 0): "DEEPGEMM_MXFP4 (DeepGemmFP4Experts)",
    ("experts", "DSpark draft", 0): "DEEPGEMM_MXFP4 (DeepGemmFP4Experts)",
    ("router", "backbone", 0): "cublas_router_gemm",
    ("indexer_op", "backbone", 0): "SparseAttnIndexer, DeepGEMM, FP8 cache",
    ("engram_table", "backbone", 0): "ParallelEngramEmbedding, pinned host memory",
    ("mxfp8_quantize", "all", 0): "FlashInfer mxfp8_quantize, cute-dsl",
    ("decode_topk", "all", 1): "persistent_topk",
    ("decode_topk", "all", 65): "persistent_topk",
    ("candidate_blocks", "all", 0): "Triton, torch.topk",
    ("mhc_pre", "all", 4): "DeepGEMM tf32_hc_prenorm_gemm, 16 splits",
    ("mhc_post_pre", "all", 32): "TileLang fused",
    ("mhc_post_pre", "all", 33): "TileLang post + DeepGEMM tf32_hc_prenorm_gemm, 16 splits",
    ("sampler", "all", 0): "FlashInfer top-k/top-p",
    ("linear main_proj", "all", 0): f"{CUTLASS} 5120x15360",
} | {(f"linear {name}", "backbone", 0): f"{CUTLASS} {shape}" for name, shape in SHAPES.items()}


@pytest.mark.parametrize("capability", ["12.0", "12.1"])
def test_what_is_selected(run, capability):
    speculative = '{"method": "dspark", "num_speculative_tokens": 5}'
    code, report, said = run("--speculative-config", speculative, capability=capability)
    assert code == 0, said
    found = routes(report)
    assert {key: found.get(key) for key in EXPECTED} == EXPECTED
    rows = [row for row in report["rows"] if row["selection"]]
    assert all(row["ok"] and row["error_norm"] is None for row in rows)
    [experts] = [r for r in rows if r["call"] == "experts" and r["layer_kind"] == "backbone"]
    assert experts["layers"] == list(range(40))
    # What cannot be asked says so.
    unknown = [row for row in rows if row["route"] == "unknown"]
    assert unknown == []
    [reduce] = [row for row in rows if row["call"] == "all_reduce"]
    assert reduce["reason"].startswith("assumed: ")


def test_an_emulation_is_a_warning_with_its_cost(run):
    code, report, _ = run()
    assert code == 0
    said = report["messages"]["warnings"]["emulation"]
    assert "attn.wo_a" in said and "8 MiB more a layer" in said  # 2048 x 4096 bytes


REFUSED = {
    "dequantised never": (
        {"VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD": "0"},
        [],
        "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD=0",
    ),
    "linear backend": ({}, ["--linear-backend", "deep_gemm"], "Leave --linear-backend deep_gemm"),
    "FP32 scales": ({"VLLM_USE_DEEP_GEMM_E8M0": "0"}, [], "VLLM_USE_DEEP_GEMM_E8M0=0"),
    "expert kernels of SM100": (
        {},
        ["--moe-backend", "flashinfer_trtllm"],
        "does not support the deployment configuration",
    ),
}


@pytest.mark.parametrize("env, more, said", REFUSED.values(), ids=REFUSED)
def test_switches_with_which_a_start_fails(run, monkeypatch, env, more, said):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    code, report, lines = run(*more)
    assert (code, report["gates"], lines[-1]) == (1, ["ops"], "RULES FAIL: ops")
    why = [r["why"] for r in report["messages"]["refusals"]]
    assert any(said in one for one in why), why


def test_switches_that_mislead(run, monkeypatch):
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    monkeypatch.setenv("VLLM_MOE_USE_DEEP_GEMM", "1")
    code, report, _ = run()
    found = routes(report)
    assert code == 0
    assert found["experts", "backbone", 0].startswith("MARLIN")
    assert found["mhc_pre", "all", 4] == "TileLang prenorm GEMM"
    assert found["indexer_op", "backbone", 0] == "SparseAttnIndexer, DeepGEMM, FP8 cache"
    said = report["messages"]["warnings"]["switches"]
    assert "the indexer's logits stay DeepGEMM's" in said and "VLLM_MOE_USE_DEEP_GEMM" in said


def test_other_scales_are_no_fault_where_marlin_has_the_experts(run, monkeypatch):
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "0")
    code, report, _ = run("--moe-backend", "marlin")
    assert code == 0 and routes(report)["experts", "backbone", 0].startswith("MARLIN")


def test_a_disabled_kernel_gives_way_to_the_next(run, monkeypatch):
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", CUTLASS)
    _, report, _ = run()
    found = routes(report)
    assert found["linear attn.wq_b", "backbone", 0] == "MarlinMxfp8LinearKernel 8192x1280"
    assert found["q_kv_norm", "backbone", 0] == "fused_q_kv_rmsnorm"


def test_an_op_that_cannot_be_asked_is_assumed(run, monkeypatch):
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_ops as ops

    def changed(*_):
        raise AttributeError("no resolve_backend in this release")

    monkeypatch.setitem(ops._ASKED, "decode_topk", changed)
    code, report, _ = run()
    [row] = [row for row in report["rows"] if row["call"] == "decode_topk"]
    assert (code, row["ok"], row["route"]) == (0, True, "unknown")
    assert row["reason"].startswith("assumed: cannot be asked here: AttributeError")


def test_a_model_that_cannot_be_built(run, monkeypatch):
    from vllm.models.deepseek_v41.nvidia import sm120_rank_model

    def changed(*_, **__):
        raise TypeError("another constructor")

    monkeypatch.setattr(sm120_rank_model, "DeepseekV41ForCausalLM", changed)
    code, report, said = run(options=["--device-memory-gib", "8"])
    assert (code, report["verdict"]) == (0, "PASS")
    assert report["facts"]["not_evaluated"]["value"] == ["memory", "ops", "toolchain"]
    assert any("another constructor" in line for line in said if "not evaluated" in line)


def test_a_narrowed_run_does_not_select(run):
    _, report, _ = run(options=["--calls", "indexer"])
    assert routes(report) == {} and "ops" in report["facts"]["not_evaluated"]["value"]


def test_nothing_of_the_pretence_stays(run, monkeypatch):
    """The platform, the environment, operators, and what functions remember."""
    from vllm.models.deepseek_v41.nvidia import sm120_rank_model as rank_model
    from vllm.platforms import current_platform
    from vllm.utils import deep_gemm

    before = type(current_platform), dict(os.environ), torch.ops._C
    with rank_model.as_target((12, 1)):
        assert current_platform.is_cuda() and deep_gemm.is_deep_gemm_supported()
        assert current_platform.num_compute_units() == 48
    assert (type(current_platform), dict(os.environ), torch.ops._C) == before
    assert not deep_gemm.is_deep_gemm_supported()


@pytest.mark.parametrize(
    "positions, sms, leaves",
    [
        (1 << 20, 188, False),  # RTX PRO 6000: not below 1M
        (390_000, 48, False),  # GB10: at about 398k for up to 4 rows
        (400_000, 48, True),
        (1 << 20, 48, True),
        (300_000, 34, True),  # a smaller card
    ],
)
def test_long_context(platform, positions, sms, leaves):
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_switches as switches

    assert (switches.long_context(positions, sms) is not None) is leaves


def test_long_context_counts_states_of_ratio_1(run):
    _, report, _ = run("--max-model-len", "524288", capability="12.1")
    assert "524288 compressed positions on 48 SMs" in report["messages"]["warnings"]["long_context"]
    assert report["facts"]["candidate_width"]["value"] == 524288 // 8
    _, report, _ = run("--max-model-len", "262144", capability="12.1")
    assert "long_context" not in report["warnings"]
