# SPDX-License-Identifier: Apache-2.0
"""Shapes of the ops follow from config and layout, and the whole fits its budget."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))

import sm120_fake_device as fake  # noqa: E402

plan = fake.load("sm120_op_plan")
op_call = fake.load("sm120_op_call")
table = fake.load("sm120_op_table")
caches = fake.load("sm120_kernel_caches")
CONFIG = Path(__file__).resolve().parents[3] / "fork" / "model" / "config.json"


@pytest.fixture
def figures():
    return plan.from_config(CONFIG, 4)


def of(figures, name):
    return plan.plan_ops(figures, [name])


def test_dense_layers_of_four_ranks(figures):
    """N x K that the model's layers have at TP 4."""
    found = {op.layer: (op.n, op.k) for op in of(figures, "mxfp8")}
    assert found == {
        "fused_wqa_wkv": (1792, 5120),
        "wq_b": (8192, 1280),
        "wo_b": (5120, 2048),
        "indexer.wq_b": (4096, 1280),
        "shared gate_up": (1152, 5120),
        "shared down": (5120, 576),
        "engram.wkv": (6400, 6144),
        "main_proj": (5120, 15360),
    }


def test_shapes_of_four_ranks(figures):
    assert [(o.tokens, o.width, o.splits) for o in of(figures, "hc_prenorm")][:3] == [
        (1, 20480, 1),
        (1, 20480, 4),
        (1, 20480, 16),
    ]
    assert {o.outputs for o in of(figures, "hc_prenorm")} == {24}
    assert [o.tokens for o in of(figures, "hc_fused")] == [4, 32, 33]
    assert {(o.inner, o.top, o.hidden) for o in of(figures, "experts")} == {(640, 6, 5120)}
    assert {(o.heads, o.padded_heads) for o in of(figures, "kv_insert")} == {(16, 16)}
    assert [o.ratio for o in of(figures, "compressor")] == [1, 2]
    assert {o.k for o in of(figures, "topk")} == {512}
    assert {o.tokens for o in of(figures, "topk")} == {1, 5, 9}
    assert max(o.longest for o in of(figures, "topk")) == 1048576
    assert {(o.blocks, o.block) for o in of(figures, "candidates")} == {(2048, 8)}


def test_shapes_follow_the_layout(figures):
    eight = dataclasses.replace(figures, ranks=8, padded_heads=16, max_model_len=65536, draft=False)
    dense = {op.layer: (op.n, op.k) for op in of(eight, "mxfp8")}
    assert dense["shared down"] == (5120, 288)
    assert dense["engram.wkv"] == (3200, 6144)
    assert "main_proj" not in dense
    assert {(o.heads, o.padded_heads) for o in of(eight, "kv_insert")} == {(8, 16)}
    assert {o.inner for o in of(eight, "experts")} == {384}
    assert sorted({o.longest for o in of(eight, "topk")}) == [4096, 32768, 65536]
    whole = dataclasses.replace(eight, expert_parallel=True)
    assert {o.inner for o in of(whole, "experts")} == {2304}
    other = dataclasses.replace(figures, window=plan.Cache(32, 38016), deep_gemm_experts=False)
    assert {(o.page, o.stride) for o in of(other, "kv_insert")} == {(32, 38016)}
    assert of(other, "experts") == []


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("stride", [0, 414720])
def test_whole_stays_below_its_memory(figures, ranks, stride):
    """Calls follow one another, so the largest counts."""
    some = dataclasses.replace(
        figures,
        ranks=ranks,
        padded_heads=max(64 // ranks, 16),
        window=plan.Cache(64, stride),
        compressed={r: plan.Cache(64, stride) for r in (1, 2)},
        indexer={r: plan.Cache(64, stride) for r in (1, 2)},
    )
    found = {str(op): op.gpu_bytes() for op in plan.plan_ops(some)}
    assert len(found) > 40
    assert max(found.values()) < op_call.MEMORY_LIMIT, max(found, key=found.get)


def test_each_shape_is_called_once(figures):
    found = plan.plan_ops(figures)
    assert len(found) == len(set(found))
    assert len(of(figures, "prefill_logits")) == 2  # ratios 1 and 2 have the same pages
    apart = dataclasses.replace(figures, indexer={1: plan.Cache(64, 0), 2: plan.Cache(64, 9216)})
    assert len(of(apart, "prefill_logits")) == 4


def test_every_call_has_ops(figures):
    assert {op.name for op in plan.plan_ops(figures)} == set(plan.OP_CALLS)
    assert {op.name for op in plan.plan_ops(figures, ["topk", "mxfp8"])} == {"topk", "mxfp8"}


@pytest.mark.parametrize(
    ("text", "ranks", "why"),
    [
        ("{", 4, "is no config.json of DeepSeek-V4.1"),
        ('{"hidden_size": 4096}', 4, "num_attention_heads"),
        (None, 3, "64 heads do not divide by 3 ranks"),
        (None, 0, "0 ranks"),
    ],
)
def test_config_that_cannot_be_used(tmp_path, text, ranks, why):
    path = CONFIG
    if text is not None:
        path = tmp_path / "config.json"
        path.write_text(text)
    with pytest.raises(ValueError, match=why):
        plan.from_config(path, ranks)


# The table.


@pytest.fixture
def run(tmp_path):
    """``run(result, *options)``: exit status and what was said, each call having come to
    ``result(call)``."""

    def do(result, *options):
        said = []
        runner = lambda calls, **_: [result(call) for call in calls]  # noqa: E731
        given = ["--config", str(CONFIG), "--device", "cpu", *options]
        return table.main(given, said.append, runner), said

    return do


def right(call):
    bound = fake.kernels.BF16_BOUND
    return table.CallResult(str(call), True, 2e-3, bound, "", 41.5, 0.5, 3 << 20)


def test_table_of_right_calls(run, tmp_path):
    path = tmp_path / "table.json"
    status, said = run(right, "--calls", "hc_fused", "--json", str(path))
    assert status == 0
    assert said[0].split() == ["error", "bound", "first", "s", "rest", "s", "MiB", "call"]
    assert said[1].split()[:6] == ["right", "0.002", "0.01", "41.5", "0.5", "3"]
    assert said[1].endswith("hc_fused: 4 tokens of 4 x 5120")
    assert said[-1].startswith("3 of 3 calls right, 0 wrong, 0 cannot be made here")
    assert [c["ok"] for c in json.loads(path.read_text())["calls"]] == [True] * 3
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


def test_table_tells_absent_from_wrong(run):
    def absent(call):
        return table.CallResult(str(call), False, reason="cannot be called: no tilelang")

    def wrong(call):
        if "33 tokens" in str(call):
            return table.CallResult(str(call), False, 0.5, None, "mean: relative norm 0.5")
        return absent(call)

    assert run(absent, "--calls", "hc_fused")[0] == 0
    status, said = run(wrong, "--calls", "hc_fused")
    assert status == 1
    assert said[1].startswith("absent") and said[1].endswith("cannot be called: no tilelang")
    assert said[3].startswith("WRONG") and said[3].endswith("mean: relative norm 0.5")
    assert said[-1].startswith("0 of 3 calls right, 1 wrong, 2 cannot be made here")


def test_table_calls_what_sm12x_gets_too(figures):
    calls = table.table_calls(figures, ["topk", "indexer"], "cpu")
    backends = [call.op.backend for call in calls if isinstance(call, op_call.OpCall)]
    assert backends.count("auto") == backends.count("persistent") == 12
    assert len(calls) == 27  # and paged logits of 1, 8 and 64 rows


@pytest.mark.parametrize("options", [["--calls", "nothing"], ["--tensor-parallel-size", "5"]])
def test_table_refuses_arguments(run, options, capsys):
    with pytest.raises(SystemExit) as error:
        run(right, *options)
    assert error.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


# Compiled kernels.


def test_first_run_and_second(tmp_path):
    where = caches.folders({"HOME": str(tmp_path), "DG_JIT_CACHE_DIR": str(tmp_path / "dg")})
    before = caches.count(where)
    assert caches.compared(before, before) == "nothing was compiled"
    (tmp_path / "dg" / "cache" / "kernel.1").mkdir(parents=True)
    (tmp_path / "dg" / "cache" / "kernel.1" / "kernel.cubin").touch()
    (tmp_path / ".triton" / "cache" / "a").mkdir(parents=True)
    for name in ("k.cubin", "k.json"):
        (tmp_path / ".triton" / "cache" / "a" / name).touch()
    after = caches.count(where)
    assert caches.compared(before, after) == (
        "compiled for the first time on this host: DeepGEMM 1 files, Triton 2 files"
    )
    assert caches.compared(after, caches.count(where)) == (
        "nothing was compiled: the kernel caches of this host were reused "
        "(DeepGEMM 1 files, Triton 2 files)"
    )
