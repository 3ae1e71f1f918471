# SPDX-License-Identifier: Apache-2.0
"""Who serves a sparse-MLA call, in serving and in the self-test's rows; nothing is computed."""

import dataclasses
import json
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fork import geometry

RULES = ["--rules-only", "--capability", "12.0"]


@pytest.fixture(scope="module")
def route(platform):
    from vllm.models.deepseek_v41.nvidia import sm120_sparse_mla_route

    return sm120_sparse_mla_route


@pytest.fixture
def forget(route):
    """Decisions are kept for good in serving; not from test to test."""

    def do():
        for cached in (route._routes, route._decided, route._decode_tokens):
            cached.cache_clear()

    do()
    yield
    do()


@dataclasses.dataclass
class Limits:
    """FlashInfer's rules: decode and prefill of 128 candidates, pages of 64."""

    library: str = "FlashInfer 0.0"
    decode_tokens: int = 64
    asked: int = 0

    def refused(self, shape):
        self.asked += 1
        found = [] if shape.width == 128 else ["width"]
        return found + ([] if shape.page == 64 else ["page"])

    def route(self, shape):
        return "FlashInfer decode" if shape.tokens <= 64 else "FlashInfer prefill"


def _shape(**more):
    return SimpleNamespace(
        **{
            "tokens": 8,
            "heads": 16,
            "width": 128,
            "page": 64,
            "extra_width": 512,
            "extra_page": 64,
            **more,
        }
    )


WIDE = "FlashInfer 0.0 has no {} kernel for width 1152"


@pytest.mark.parametrize(
    "mode, shape, expected",
    [
        ("auto", {}, ("flashinfer", (), "FlashInfer 0.0 has a kernel")),
        ("auto", {"width": 1152}, ("fork", (), WIDE.format("decode"))),
        ("auto", {"width": 1152, "tokens": 65}, ("fork", (), WIDE.format("prefill"))),
        (
            "auto",
            {"width": 1, "page": 32},
            ("fork", (), "FlashInfer 0.0 has no decode kernel for width 1, page 32"),
        ),
        ("flashinfer", {}, ("flashinfer", (), "VLLM_SM120_SPARSE_MLA=flashinfer")),
        ("flashinfer", {"width": 1152}, ("flashinfer", ("width",), None)),
        ("fork", {}, ("fork", (), "VLLM_SM120_SPARSE_MLA=fork")),
        ("fork", {"width": 1152, "page": 1}, ("fork", (), None)),
        ("fork", {"heads": 129}, ("fork", ("heads",), None)),
    ],
)
def test_routes(route, mode, shape, expected):
    name, refused, reason = expected
    found = route.Routes(mode, Limits()).of(_shape(**shape))
    assert (found.name, found.refused) == (name, refused)
    assert reason is None or found.reason == reason


def test_without_flashinfer(route):
    assert route.Routes("auto", None).of(_shape()).name == "fork"
    assert route.Routes("fork", None).of(_shape()).name == "fork"
    assert route.Routes("flashinfer", None).of(_shape()).refused
    assert route.Routes("auto", None).decode_tokens == 64


def test_vllms_own_table_has_the_variable(route, monkeypatch):
    import vllm.envs as envs

    monkeypatch.delenv("VLLM_SM120_SPARSE_MLA", raising=False)
    assert envs.VLLM_SM120_SPARSE_MLA == "auto"
    for value in ("auto", "flashinfer", "fork"):
        monkeypatch.setenv("VLLM_SM120_SPARSE_MLA", value)
        assert envs.VLLM_SM120_SPARSE_MLA == route.mode() == value
    monkeypatch.setenv("VLLM_SM120_SPARSE_MLA", "triton")
    with pytest.raises(ValueError, match="triton"):
        _ = envs.VLLM_SM120_SPARSE_MLA


def test_the_variable_is_in_the_environments_digest(route, monkeypatch):
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_report as report

    assert report.environment({"VLLM_SM120_SPARSE_MLA": "fork", "OTHER": "x"}) == {
        "VLLM_SM120_SPARSE_MLA": "fork"
    }


# --- serving -------------------------------------------------------------------------


@pytest.fixture
def kernels(route, monkeypatch, forget):
    """Both kernels, noting what they are called with."""
    from vllm.utils import flashinfer

    seen = []
    fork = ModuleType("stand-in")
    fork.sparse_mla = lambda *args, **more: seen.append(("fork", args, more))
    fork.default_workspace = lambda device: f"fork's on {device}"
    name = "vllm.models.deepseek_v41.nvidia.ops.sm120_sparse_mla"
    monkeypatch.setitem(sys.modules, name, fork)
    entry = "flashinfer_trtllm_batch_decode_sparse_mla_dsv4"
    monkeypatch.setattr(flashinfer, entry, lambda **more: seen.append(("flashinfer", (), more)))
    limits = Limits()
    monkeypatch.setattr(
        "vllm.models.deepseek_v41.nvidia.sm120_kernel_limits.FlashInferLimits", lambda: limits
    )
    seen_limits = SimpleNamespace(calls=seen, limits=limits)
    return seen_limits


def _arguments(tokens=2, heads=8, width=128, extra=True):
    cache = torch.zeros(3, 64, 1, 584, dtype=torch.uint8)
    lens = torch.ones(tokens, dtype=torch.int32)
    given = {
        "query": torch.zeros(tokens, heads, 512, dtype=torch.bfloat16),
        "swa_kv_cache": cache,
        "workspace_buffer": None,
        "sparse_indices": torch.zeros(tokens, width, dtype=torch.int32),
        "compressed_kv_cache": None,
        "out": torch.zeros(tokens, heads, 512, dtype=torch.bfloat16),
        "bmm1_scale": 0.25,
        "sinks": torch.zeros(heads),
        "kv_layout": "NHD",
        "swa_topk_lens": lens,
        "extra_sparse_indices": None,
        "extra_sparse_topk_lens": None,
    }
    if extra:
        given |= {
            "compressed_kv_cache": torch.zeros(3, 32, 1, 584, dtype=torch.uint8),
            "extra_sparse_indices": torch.zeros(tokens, 1, 16, dtype=torch.int32),
            "extra_sparse_topk_lens": lens,
        }
    return given


@pytest.mark.parametrize(
    "mode, width, expected",
    [
        ("auto", 128, "flashinfer"),
        ("auto", 1152, "fork"),
        ("flashinfer", 128, "flashinfer"),
        ("flashinfer", 1152, "flashinfer"),  # it may refuse for itself
        ("fork", 128, "fork"),
    ],
)
@pytest.mark.parametrize("extra", [True, False])
def test_a_call_takes_its_route(route, kernels, monkeypatch, mode, width, expected, extra):
    monkeypatch.setenv("VLLM_SM120_SPARSE_MLA", mode)
    given = _arguments(width=width, extra=extra)
    route.sparse_mla_dsv4(**given)
    [(name, args, more)] = kernels.calls
    assert name == expected
    if name == "flashinfer":
        assert all(more[key] is value for key, value in given.items())
        return
    order = ("query", "swa_kv_cache", "sparse_indices", "swa_topk_lens", "sinks", "bmm1_scale")
    assert all(a is given[key] for a, key in zip(args, (*order, "out"), strict=True))
    assert more["extra_cache"] is given["compressed_kv_cache"]
    assert more["extra_indices"] is given["extra_sparse_indices"]
    assert more["extra_lens"] is given["extra_sparse_topk_lens"]


def test_fork_never_asks_flashinfer(route, kernels, monkeypatch):
    monkeypatch.setenv("VLLM_SM120_SPARSE_MLA", "fork")
    from vllm.utils import flashinfer

    for name in ("has_flashinfer_sparse_mla_sm120", "has_flashinfer_sparse_mla_sm120_config"):
        monkeypatch.setattr(flashinfer, name, None)
    route.sparse_mla_dsv4(**_arguments())
    assert route.has_sparse_mla() and route.has_sparse_mla_config(128, 640)
    assert not route.has_sparse_mla_config(129, 128)
    assert kernels.limits.asked == 0


def test_a_class_is_decided_and_said_once(route, kernels, monkeypatch):
    monkeypatch.setenv("VLLM_SM120_SPARSE_MLA", "auto")
    said = []
    monkeypatch.setattr(route.logger, "info", lambda text, *args: said.append(text % args))
    for tokens in (1, 8, 64, 8):  # one class
        route.sparse_mla_dsv4(**_arguments(tokens, width=1152))
    assert kernels.limits.asked == 1
    assert said == [
        "DeepSeek-V4.1 sparse MLA, up to 64 tokens, 8 heads, 1152 candidates of page 64 + 16 of "
        "page 32: fork (FlashInfer 0.0 has no decode kernel for width 1152)"
    ]
    route.sparse_mla_dsv4(**_arguments(65, width=1152))
    assert len(said) == kernels.limits.asked == 2 and "more than 64 tokens" in said[1]


def test_workspaces(route, kernels, monkeypatch):
    """FlashInfer's must stay zero, so the two are never one."""
    stock = lambda device: f"FlashInfer's on {device}"  # noqa: E731
    for mode, expected in (("fork", "fork's"), ("auto", "FlashInfer's"), ("flashinfer", "Fl")):
        monkeypatch.setenv("VLLM_SM120_SPARSE_MLA", mode)
        assert route.workspace("cuda:0", stock).startswith(expected)


@pytest.mark.parametrize("mode", ["auto", "flashinfer", "fork"])
def test_the_attention_class_calls_the_route(route, monkeypatch, mode):
    """Decode, in the edited class itself."""
    from vllm.models.deepseek_v41.nvidia import flashinfer_sparse

    monkeypatch.setenv("VLLM_SM120_SPARSE_MLA", mode)
    seen = []
    monkeypatch.setattr(flashinfer_sparse, "sparse_mla_dsv4", lambda **more: seen.append(more))
    monkeypatch.setattr(flashinfer_sparse, "flashinfer_trtllm_batch_decode_sparse_mla_dsv4", None)
    cls = flashinfer_sparse.DeepseekV4FlashInferSM120Attention
    layer = SimpleNamespace(
        _prepare_query=lambda q, output: q,
        _as_sparse_cache=cls._as_sparse_cache,
        _get_workspace=lambda device: None,
        swa_cache_layer=SimpleNamespace(kv_cache=torch.zeros(3, 64, 584, dtype=torch.uint8)),
        scale=0.5,
        attn_sink=None,
    )
    metadata = SimpleNamespace(
        num_decodes=2,
        num_decode_tokens=2,
        decode_swa_indices=torch.zeros(2, 128, dtype=torch.int32),
        decode_swa_lens=torch.ones(2, dtype=torch.int32),
    )
    q = torch.zeros(2, 8, 512, dtype=torch.bfloat16)
    cls._forward_decode(layer, q, None, metadata, None, True, q)
    [call] = seen
    assert call["swa_kv_cache"].shape == (3, 64, 1, 584)
    assert call["sparse_indices"] is metadata.decode_swa_indices


# --- the self-test -------------------------------------------------------------------


@pytest.fixture
def rows(platform, monkeypatch, tmp_path):
    """The attention rows of a mode, and the report."""
    from vllm.models.deepseek_v41.nvidia import sm120_decode_shape_selftest as selftest

    def run(mode, *more):
        monkeypatch.setenv("VLLM_SM120_SPARSE_MLA", mode)
        path = tmp_path / "report.json"
        argv = [*geometry.default_argv(), *more]
        code = selftest.main(["--json", str(path), *RULES, "--", *argv], lambda line: None)
        report = json.loads(path.read_text())
        assert code == {"PASS": 0, "FAIL": 1}[report["verdict"]], report
        return [row for row in report["rows"] if row["call"] == "attention"], report

    return run


@pytest.mark.parametrize("mode", ["auto", "flashinfer", "fork"])
def test_rows_say_their_route(rows, mode):
    """FlashInfer of this base takes all of them."""
    found, report = rows(mode)
    assert {row["route"] for row in found} == {"fork" if mode == "fork" else "flashinfer"}
    assert report["verdict"] == "PASS" and report["facts"]["sparse_mla"]["value"] == mode
    reasons = {row["reason"] for row in found}
    assert reasons == ({"VLLM_SM120_SPARSE_MLA=fork"} if mode == "fork" else {None})
    assert ("flashinfer" in report["facts"]) == (mode != "fork")


def test_a_refused_width_is_a_row_of_the_forks_kernel(rows, monkeypatch):
    from vllm.models.deepseek_v41.nvidia import sm120_kernel_limits as limits

    refuse = lambda self, shape: ["width"] if shape.tokens > 64 else []  # noqa: E731
    monkeypatch.setattr(limits.FlashInferLimits, "refused", refuse)
    found, report = rows("auto")
    for row in found:
        assert row["ok"] and row["gate"] is None
        assert row["route"] == ("fork" if row["tokens"] > 64 else "flashinfer")
        assert (row["reason"] is not None) == (row["tokens"] > 64)
    assert report["verdict"] == "PASS" and not report["messages"]["refusals"]
    found, report = rows("flashinfer")
    assert report["gates"] == ["swa_width"]
    assert "prefill kernel for width 128" in report["messages"]["refusals"][0]["why"]
    assert all(row["route"] == "flashinfer" for row in found)


def test_device_rows_run_their_route(platform):
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_device as device
    from vllm.models.deepseek_v41.nvidia.sm120_device_calls import CallResult
    from vllm.models.deepseek_v41.nvidia.sm120_device_kernels import BF16_BOUND
    from vllm.models.deepseek_v41.nvidia.sm120_selftest_report import Report, Row

    def row(call, route):
        return Row(call, [0], call, 8, 16, 128, 64, 0, 0, 64, route)

    report = Report([], rules_only=False, complete=True)
    report.rows += [row("attention", "flashinfer"), row("attention", "fork")]
    report.rows += [row("indexer", "DeepGEMM paged MQA logits")]
    view = torch.zeros(2, 1, 64, 584, dtype=torch.uint8)
    plan = SimpleNamespace(
        views={
            "model.layers.0.attn.swa_cache": view,
            "model.layers.0.attn.indexer.k_cache": view,
        }
    )
    seen = []

    def calls(every, **_):
        seen.extend(call.kernel for call in every)
        return [CallResult("x", True, 1e-3, BF16_BOUND) for _ in every]

    device.run(report, plan, attention="FlashInfer", indexer="DeepGEMM", calls=calls, fork="fork")
    assert seen == ["FlashInfer", "fork", "DeepGEMM"]
    assert report.verdict() == "PASS"
    assert {"attention_bound", "fork_attention_bound", "indexer_bound"} <= report.facts.keys()


def test_window_pages_are_any_with_the_forks_kernel_alone(platform, monkeypatch):
    from vllm.v1.attention.backends.mla.sm120_page_geometry import page_problem
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    window = SlidingWindowMLASpec.__new__(SlidingWindowMLASpec)
    compressed = MLAAttentionSpec.__new__(MLAAttentionSpec)
    for spec, size in ((window, 32), (compressed, 128)):
        object.__setattr__(spec, "block_size", size)
        object.__setattr__(spec, "tokens_per_state", 1)
    for mode, problem in (("auto", True), ("flashinfer", True), ("fork", False)):
        monkeypatch.setenv("VLLM_SM120_SPARSE_MLA", mode)
        assert (page_problem(window) is not None) == problem
        assert page_problem(compressed) is not None  # the indexer's pages are DeepGEMM's


def test_logging_is_vllms(route):
    assert isinstance(route.logger, logging.Logger)
