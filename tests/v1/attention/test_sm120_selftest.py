# SPDX-License-Identifier: Apache-2.0
"""The self-test in one process: verdicts, gates, the report, hostile input, a fake device."""

import hashlib
import json
import os
import random
import string
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fork import geometry

ARGV = geometry.default_argv()
RULES = ["--rules-only", "--capability", "12.0"]


@pytest.fixture(scope="module")
def selftest(platform):
    from vllm.models.deepseek_v41.nvidia import sm120_decode_shape_selftest

    return sm120_decode_shape_selftest


@pytest.fixture
def run(selftest, tmp_path):
    """``run(options, argv)`` gives exit code, report and output lines."""

    def do(options, argv):
        path = tmp_path / "report.json"
        path.unlink(missing_ok=True)
        said = []
        code = selftest.main(["--json", str(path), *options, "--", *argv], said.append)
        assert said[-1].count("\n") == 0
        return code, json.loads(path.read_text()), said

    return do


def test_patched_passes(run):
    code, report, said = run(RULES, ARGV)
    assert (code, said[-1], report["verdict"]) == (0, "RULES PASS", "PASS")
    assert report["gates"] == [] and report["complete"] is True and report["level"] == "rules"
    assert report["schema"] == 1 and all(row["ok"] for row in report["rows"])
    text = json.dumps(ARGV, separators=(",", ":"), ensure_ascii=False)
    assert report["argv_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    kinds = {(r["layer_kind"], r["call"]) for r in report["rows"] if not r["selection"]}
    assert kinds == {
        ("window only", "attention"),
        ("ratio 1", "attention"),
        ("ratio 2", "attention"),
        ("ratio 1", "indexer"),
        ("ratio 2", "indexer"),
    }
    # 64 heads over 4 ranks; window 128; index_topk 512: facts about the model.
    shapes = {(r["heads"], r["topk"], r["extra_topk"]) for r in report["rows"] if r["extra_topk"]}
    assert shapes == {(16, 128, 512)}
    assert {1, 8, 64, 65} <= {row["tokens"] for row in report["rows"]}
    assert all(fact["source"] for fact in report["facts"].values())


WARNED = {
    "parser": (["--tool-call-parser", "deepseek_v4", "--enable-auto-tool-choice"], "deepseek_v41"),
    "eager": (["--enforce-eager"], "CUDA graphs"),
    "remote_code": (["--trust-remote-code"], "as the argv asks"),
    "deep_gemm": (["--max-model-len", "131072"], "VLLM_DEEP_GEMM_WARMUP=skip"),
    "weights_unchecked": ([], "no index file"),
}


@pytest.mark.parametrize("name, more, said", [(k, *v) for k, v in WARNED.items()], ids=WARNED)
def test_warnings_do_not_fail(run, name, more, said):
    code, report, lines = run([*RULES, "--tokens", "1"], [*ARGV, *more])
    assert (code, name in report["warnings"]) == (0, True), lines
    assert said in report["messages"]["warnings"][name]


def test_right_argv_has_few_warnings(run):
    _, report, _ = run([*RULES, "--tokens", "1"], [*ARGV, "--max-model-len", "65536"])
    assert report["warnings"] == ["emulation", "weights_unchecked"]


def test_unified_memory_is_warned_of(run):
    options = ["--rules-only", "--capability", "12.1", "--tokens", "1"]
    _, report, _ = run(options, ARGV)
    assert "engram_memory" in report["warnings"]


def test_what_is_not_evaluated_is_said(run):
    _, report, said = run(RULES, ARGV)
    assert report["facts"]["not_evaluated"]["value"] == ["memory", "toolchain"]
    assert any(line.startswith("not evaluated: memory, toolchain (") for line in said)


def test_a_narrowed_scope_says_so(run):
    for options in (["--tokens", "1"], ["--calls", "attention"]):
        _, report, _ = run([*RULES, *options], ARGV)
        assert report["complete"] is False and report["verdict"] == "PASS"


@pytest.mark.parametrize("ranks, heads", [(1, 64), (2, 32), (8, 8)])
def test_heads_of_a_rank(run, ranks, heads):
    argv = [*ARGV]
    argv[argv.index("--tensor-parallel-size") + 1] = str(ranks)
    _, report, _ = run(RULES, argv)
    assert {row["heads"] for row in report["rows"] if row["call"] == "attention"} == {heads}


def test_draft_rows(run):
    """DSpark's three layers read a window of 128 + 5 slots, rounded up to 64: 192."""
    speculative = '{"method": "dspark", "num_speculative_tokens": 5}'
    _, report, said = run(RULES, [*ARGV, "--speculative-config", speculative])
    calls = [row for row in report["rows"] if not row["selection"]]
    rows = [row for row in calls if row["layer_kind"] == "DSpark draft"]
    assert rows, said
    assert {(tuple(r["layers"]), r["topk"], r["page"], r["extra_topk"]) for r in rows} == {
        ((40, 41, 42), 192, 64, 0)
    }
    assert report["verdict"] == "PASS"


REFUSED = {
    "heads": (["--tensor-parallel-size", "3"], "heads", "1, 2, 4, 8"),
    "o_groups": (["--tensor-parallel-size", "16"], "heads", "o_groups"),
    "backend dtype": (["--kv-cache-dtype", "bfloat16"], "backend", "--kv-cache-dtype fp8"),
    "backend": (["--attention-backend", "FLASHMLA_SPARSE"], "backend", "does not run on SM12x"),
    "block size": (["--block-size", "96"], "block_size", "multiple of 128"),
}


@pytest.mark.parametrize("more, gate, said", REFUSED.values(), ids=REFUSED)
def test_refused(run, more, gate, said):
    code, report, lines = run(RULES, [*ARGV, *more])
    assert (code, report["gates"], lines[-1]) == (1, [gate], f"RULES FAIL: {gate}")
    assert said in "\n".join(lines)


@pytest.mark.parametrize("start, legal", [("20,20", True), ("19,21", False), ("24,16", False)])
def test_pipeline_stages(run, monkeypatch, start, legal):
    """A stage may start at layer 20, a KV and index source; not inside a span."""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", start)
    _, report, lines = run(RULES, [*ARGV, "--pipeline-parallel-size", "2"])
    assert report["gates"] == ([] if legal else ["parallel_layout"])
    assert legal or "start stages at 2, 8, 14, 20" in "\n".join(lines)


NOT_RUN = {
    "nothing": ([], "arguments"),
    "unknown flag": ([*ARGV, "--swa-block-size", "64"], "arguments"),
    "not a number": ([*ARGV, "--block-size", "x"], "arguments"),
    "no folder": (["nowhere", "--kv-cache-dtype", "fp8"], "checkpoint"),
    "NUL": (["a\0b"], "arguments"),
}


@pytest.mark.parametrize("argv, gate", NOT_RUN.values(), ids=NOT_RUN)
def test_not_run(run, argv, gate):
    code, report, said = run(RULES, argv)
    assert (code, report["verdict"], report["gates"]) == (2, "NOT_RUN", [gate])
    assert said[-1].startswith("SELFTEST NOT RUN: ")


@pytest.mark.parametrize(
    "options",
    [
        ["--capability", "12.0"],
        ["--rules-only", "--capability", "9.0"],
        ["--rules-only", "--capability", "twelve"],
        ["--rules-only", "--tokens", "0"],
        ["--rules-only", "--calls", "everything"],
        ["--what"],
    ],
    ids=" ".join,
)
def test_bad_options(selftest, options):
    said = []
    assert selftest.main([*options, "--", *ARGV], said.append) == 2
    assert said[-1].startswith("SELFTEST NOT RUN: ")


def _config():
    return json.loads((geometry.MODEL / "config.json").read_text())


FIELDS = ["num_hidden_layers", "num_attention_heads", "compress_ratios", "kv_source_layer_ids"]
FIELDS += ["index_source_layer_ids", "sliding_window", "o_groups", "index_topk", "head_dim"]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [None, "x", -1, 10**12, [], {}, [None], 1.5], ids=repr)
def test_wrong_fields(run, tmp_path, field, value):
    config = _config()
    config["text_config"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, report, said = run(RULES, [str(tmp_path), *ARGV[1:]])
    assert (code, report["gates"]) == (2, ["checkpoint"]), said


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"model_type": "llama"}', '{"model_type": []}', "[" * 90000]
)
def test_wrong_files(run, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    code, report, _ = run(RULES, [str(tmp_path), *ARGV[1:]])
    assert (code, report["gates"]) == (2, ["checkpoint"])


_WORDS = st.sampled_from(
    [
        *ARGV,
        "--block-size",
        "--max-model-len",
        "--speculative-config",
        "--hf-overrides",
        "--hf-overrides.vision_n_layers",
        "--enforce-eager",
        "--pipeline-parallel-size",
        "-1",
        "0",
        "{}",
        "64",
        "auto",
        "--",
        "--help",
        "",
        "ü",
    ]
)


@settings(
    max_examples=int(os.environ.get("SELFTEST_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(_WORDS | st.text(string.printable, max_size=12), max_size=12))
@example(["--help"])
@example(["--", "--"])
def test_no_argv_ends_in_a_traceback(selftest, argv):
    said = []
    code = selftest.main([*RULES, "--tokens", "1", "--", *argv], said.append)
    assert code in (0, 1, 2)
    assert said[-1].startswith(("RULES PASS", "RULES FAIL: ", "SELFTEST NOT RUN: "))


def test_no_config_ends_in_a_traceback(run, tmp_path):
    """Random damage to a right config.json: a clear verdict, whatever it is."""
    draw = random.Random(0)
    for _ in range(25):
        config = _config()
        text = config["text_config"]
        for _ in range(draw.randrange(1, 4)):
            where = draw.choice([config, text, config["vision_config"]])
            key = draw.choice(sorted(where))
            where[key] = draw.choice(
                [None, 0, -1, 1 << 40, "x", [], {}, [1], True, 0.5, where[key]]
            )
            if draw.random() < 0.3:
                del where[key]
        (tmp_path / "config.json").write_text(json.dumps(config))
        code, _, said = run([*RULES, "--tokens", "1"], [str(tmp_path), *ARGV[1:]])
        assert code in (0, 1, 2), said


def test_report_that_cannot_be_written(selftest, tmp_path):
    said = []
    path = tmp_path / "no" / "folder.json"
    assert selftest.main(["--json", str(path), *RULES, "--", *ARGV], said.append) == 2
    assert said[-1].startswith("SELFTEST NOT RUN: the report cannot be written")


@pytest.fixture
def on_device(selftest, monkeypatch):
    """The device rows with stand-in kernels on the CPU: ``on_device(attention, indexer)``
    gives the report. Child processes are not used here (test_sm120_device_calls.py)."""
    from vllm.models.deepseek_v41.nvidia import sm120_device_calls as calls
    from vllm.models.deepseek_v41.nvidia import sm120_device_cases as cases
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_argv as argv
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_device as device
    from vllm.models.deepseek_v41.nvidia.sm120_selftest_report import Report

    def in_process(waiting, **_):
        results = []
        for call in waiting:
            kernel, case = call.kernel(), cases.random_case(call.shape, 0, "cpu")
            runs = calls.run_attention if kernel.name == "attention" else calls.run_indexer
            results.append(runs(case, kernel))
        return results

    def do(attention, indexer):
        report = Report(ARGV, rules_only=False, complete=True)
        options = SimpleNamespace(
            tokens=[1, 8],
            calls=None,
            capability=(12, 0),
            device_memory_gib=None,
            host_memory_gib=None,
        )
        argv.set_up_platform((12, 0))
        plan = selftest.judge(report, options, argv.parse(ARGV), (12, 0))
        device.run(report, plan, "cpu", lambda: attention, lambda: indexer, in_process)
        return report

    return do


@pytest.fixture
def kernels(platform):
    from vllm.models.deepseek_v41.nvidia import sm120_device_kernels, sm120_reference

    class Kernel:
        def __init__(self, name, bound, call):
            self.name, self.bound, self.call = name, bound, call

        def __call__(self, *args):
            return self.call(*args)

    def attention(q, window, compressed, sinks, scale, out):
        out.copy_(sm120_reference.sparse_mla(q, window, compressed, sinks, scale)[0])

    def no_sink(q, window, compressed, sinks, scale, out):
        attention(q, window, compressed, None, scale, out)

    def logits(*args):
        return sm120_reference.paged_index_logits(*args).float()

    def doubled(*args):
        return 2 * logits(*args)

    bound = sm120_device_kernels.BF16_BOUND
    index_bound = sm120_device_kernels.INDEXER_BOUND
    return {
        "right": Kernel("attention", bound, attention),
        "no sink": Kernel("attention", bound, no_sink),
        "right logits": Kernel("indexer", index_bound, logits),
        "doubled logits": Kernel("indexer", index_bound, doubled),
    }


@pytest.mark.parametrize(
    ("present", "executor", "nnodes", "asked"),
    [
        (4, None, 1, [0, 1, 2, 3]),
        (8, "mp", 1, [0, 1, 2, 3]),
        (1, "mp", 4, [0]),
        (3, "mp", 1, None),
        (1, "ray", 1, [0]),  # Ray: this node's share is what is visible
        (8, "ray", 1, [0, 1, 2, 3]),
        (0, "ray", 1, None),
    ],
)
def test_every_gpu_that_the_argv_uses_here(
    platform, selftest, monkeypatch, present, executor, nnodes, asked
):
    from argparse import Namespace

    from vllm.models.deepseek_v41.nvidia import sm120_selftest_device as device
    from vllm.models.deepseek_v41.nvidia.sm120_selftest_report import Refusal, Report

    seen = []
    count = classmethod(lambda cls: present)
    monkeypatch.setattr(platform, "device_count", count, raising=False)
    monkeypatch.setattr(selftest, "_real_capability", lambda number=0: (12, 0))
    monkeypatch.setattr(device, "op_rows", lambda *_: [])
    monkeypatch.setattr(device, "run", lambda report, plan, name, **_: seen.append(name))
    args = Namespace(
        tensor_parallel_size=4,
        pipeline_parallel_size=1,
        nnodes=nnodes,
        distributed_executor_backend=executor,
    )
    report = Report([], rules_only=False, complete=True)
    if asked is None:
        with pytest.raises(Refusal, match="GPUs here"):
            selftest._on_each_gpu(report, None, args)
    else:
        selftest._on_each_gpu(report, None, args)
        assert seen == [f"cuda:{number}" for number in asked]


def test_right_device_passes(on_device, kernels):
    report = on_device(kernels["right"], kernels["right logits"])
    assert report.line() == "SELFTEST PASS", report.refusals
    assert all(row.error_norm is not None and row.error_norm < 1e-2 for row in report.rows)
    for call in ("attention", "indexer"):
        bound = report.facts[f"{call}_bound"]
        assert bound.value > 0 and bound.source


def test_wrong_attention_fails(on_device, kernels):
    report = on_device(kernels["no sink"], kernels["right logits"])
    assert report.line() == "SELFTEST FAIL: backend"
    assert "attention" in report.refusals[0].why


def test_wrong_indexer_fails(on_device, kernels):
    report = on_device(kernels["right"], kernels["doubled logits"])
    assert report.line() == "SELFTEST FAIL: indexer_page"


def test_a_row_that_did_not_run_is_no_pass(on_device, kernels):
    report = on_device(kernels["right"], kernels["right logits"])
    report.rows[3].error_norm = None
    assert report.line() == "SELFTEST NOT RUN: a row was not run on the device"
    assert report.exit_code() == 2


def test_no_rows_are_no_pass(platform):
    from vllm.models.deepseek_v41.nvidia.sm120_selftest_report import Report

    for rules_only in (True, False):
        report = Report([], rules_only=rules_only, complete=True)
        assert report.line() == "SELFTEST NOT RUN: no row was judged"


def test_wrong_pages_are_judged_by_the_self_test_not_by_the_start_up_check(run, monkeypatch):
    """On a tree with the check and without the page patches: gates, not an error."""
    from vllm.models.deepseek_v41.nvidia import flashinfer_sparse

    cls = flashinfer_sparse.DeepseekV4FlashInferSM120Attention
    monkeypatch.setattr(cls, "swa_block_size", 32)
    _, report, _ = run(RULES, ARGV)
    # FlashInfer 0.7.2 takes a page of 32; the rows show it.
    assert report["verdict"] == "PASS"
    assert {row["page"] for row in report["rows"] if row["call"] == "attention"} == {32}


# Ops.


@pytest.fixture(scope="module")
def planned(platform):
    """A judged report and vLLM's plan, at one token."""
    from vllm.models.deepseek_v41.nvidia import sm120_decode_shape_selftest as selftest
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_argv as argv
    from vllm.models.deepseek_v41.nvidia.sm120_selftest_report import Report

    report = Report(ARGV, rules_only=False, complete=True)
    options = SimpleNamespace(
        tokens=[1],
        calls=None,
        capability=(12, 0),
        device_memory_gib=None,
        host_memory_gib=None,
    )
    argv.set_up_platform((12, 0))
    return report, selftest.judge(report, options, argv.parse(ARGV), (12, 0))


@pytest.fixture
def with_ops(planned):
    """``with_ops(result, calls)``: the report of a device run in which each call came to
    ``result(call)``, vLLM's plan, the calls that were made, and what was said."""
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_device as device
    from vllm.models.deepseek_v41.nvidia.sm120_selftest_report import Report

    def do(result, calls=None):
        judged, plan = planned
        made, said = [], []

        def runner(waiting, **_):
            made.extend(waiting)
            return [result(call) for call in waiting]

        report = judged if calls is None else Report(ARGV, rules_only=False, complete=False)
        ops = device.op_rows(report, plan, calls)
        device.run(report, plan, "cpu", calls=runner, ops=ops, say=said.append)
        return report, plan, made, said

    return do


def came_right(call):
    from vllm.models.deepseek_v41.nvidia import sm120_device_calls, sm120_device_kernels

    bound = sm120_device_kernels.BF16_BOUND
    return sm120_device_calls.CallResult(str(call), True, 1e-3, bound, "", 2.0, 0.25, 1 << 20)


def test_ops_are_rows_with_the_planned_pages(with_ops):
    from vllm.models.deepseek_v41.nvidia import sm120_op_plan, sm120_selftest_report

    report, plan, made, said = with_ops(came_right)
    assert set(sm120_op_plan.OP_CALLS) <= set(sm120_selftest_report.CALLS)
    rows = [row for row in report.rows if row.layer_kind == "op"]
    # Whether DeepGEMM serves the experts is for a GPU to say.
    assert {row.call for row in rows} >= set(sm120_op_plan.OP_CALLS) - {"experts"}
    assert all(row.ok and row.error_norm == 1e-3 for row in rows)
    ops = [call.op for call in made if hasattr(call, "op")]
    written = {op.stride for op in ops if op.name == "kv_insert"}
    assert written == {plan.views["model.layers.0.attn.swa_cache"].stride(0)}
    written = {op.ratio: op.stride for op in ops if op.name == "indexer_store"}
    names = {1: "model.layers.20", 2: "model.layers.2"}
    views = {r: plan.views[f"{name}.attn.indexer.k_cache"] for r, name in names.items()}
    assert written == {ratio: view.stride(0) for ratio, view in views.items()}
    assert {op.page for op in ops if hasattr(op, "page")} == {64}
    assert {op.padded_heads for op in ops if op.name == "kv_insert"} == {16}
    assert {op.capacity for op in ops if op.name == "compressor"} == {8}
    assert report.facts["ops_first_calls_s"].value == 2.0 * len(made)
    assert report.facts["ops_peak_bytes"].value == 1 << 20
    stated = report.facts["ops_memory"].value
    assert set(stated) == {row.call for row in rows}
    assert max(stated.values()) < 2 << 30
    assert report.line() == "SELFTEST PASS"
    assert any("compiled" in line for line in said)


def test_wrong_op_fails_the_gate_ops(with_ops):
    from dataclasses import replace

    def result(call):
        found = came_right(call)
        if str(call).startswith("hc_fused"):
            why = "mean: relative norm 0.2"
            return replace(found, ok=False, error_norm=0.2, reason=why)
        return found

    report, *_ = with_ops(result, ["hc_fused", "topk"])
    assert report.line() == "SELFTEST FAIL: ops"
    assert {row.call for row in report.rows} == {"hc_fused", "topk"}
    row = next(row for row in report.rows if row.call == "hc_fused")
    assert (row.gate, row.error_norm) == ("ops", 0.2)
    assert "mean: relative norm 0.2" in row.reason


def test_missing_entry_point_is_a_row(with_ops):
    from vllm.models.deepseek_v41.nvidia import sm120_device_calls

    def result(call):
        why = "cannot be called: No module named 'tilelang'"
        return sm120_device_calls.failed(str(call), why)

    report, *_ = with_ops(result, ["sampler"])
    assert report.line() == "SELFTEST FAIL: ops"
    assert report.rows[0].reason.endswith("cannot be called: No module named 'tilelang'")
