# SPDX-License-Identifier: Apache-2.0
"""Gate `memory`: vLLM's own model and plan against figures from the configuration alone."""

import json
from types import SimpleNamespace

import pytest

from fork import geometry

ARGV = geometry.default_argv()
GIB = 1 << 30
TEXT = json.loads((geometry.MODEL / "config.json").read_text())["text_config"]

# Each row: 256 FP8 values and 8 scales of a byte.
TABLES = sum(TEXT["engram_num_embeddings"]) * (TEXT["engram_head_dim"] + 8)


@pytest.fixture
def run(platform, tmp_path):
    """``run(options, *more argv)`` gives exit code, report and output."""
    from vllm.models.deepseek_v41.nvidia import sm120_decode_shape_selftest as selftest

    def do(options, *more):
        path = tmp_path / "report.json"
        given = ["--rules-only", "--tokens", "1", *options.split()]
        said = []
        code = selftest.main(["--json", str(path), *given, "--", *ARGV, *more], said.append)
        return code, json.loads(path.read_text()), "\n".join(said)

    return do


def test_gb10_with_default_engram_placement(run):
    code, report, _ = run("--capability 12.1 --device-memory-gib 121")
    assert (code, report["gates"]) == (1, ["memory"])
    [why] = [r["why"] for r in report["messages"]["refusals"]]
    assert "found 121.0 GiB that GPU and host share" in why
    assert "Engram tables 47.2, pinned 66.0 GiB" in why  # 188.8 / 4; 2 x (32 + 1)
    assert "weights 77." in why and "KV cache" in why and "GiB" in why
    # Counted once: what is on the GPU, and what is pinned.
    memory = report["facts"]["memory"]["value"]
    needed = memory["gpu_bytes"][0] + memory["pinned_bytes"][0]
    assert f"needs at least {needed / GIB:.1f} GiB" in why


def test_four_times_96_with_tables_on_the_host(run):
    code, report, said = run(
        "--capability 12.0 --device-memory-gib 96", "--engram-config.cpu_offload", "true"
    )
    assert (code, report["gates"]) == (0, []), said
    memory = report["facts"]["memory"]["value"]
    assert memory["host_pinned_bytes"] == 4 * 2 * (32 + 1) * GIB
    assert "a host with 4 ranks pins 264.0 GiB" in said
    assert report["facts"]["not_evaluated"]["value"] == ["toolchain"]


def test_a_kv_cache_that_the_argv_fixes(run):
    fixed = ["--kv-cache-memory-bytes", str(20 * GIB)]
    _, report, _ = run("--capability 12.0 --device-memory-gib 96", *fixed)
    assert report["gates"] == ["memory"]
    assert "KV cache 20.000" in report["messages"]["refusals"][0]["why"]


@pytest.fixture
def judged(platform):
    """``judged(device, host, capability, need, config)``: gates and what is said, for
    needs made by hand, in GiB."""
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_memory as memory
    from vllm.models.deepseek_v41.nvidia.sm120_selftest_report import Report

    def do(device=None, host=None, capability=(12, 0), need=None, stages=1, **config):
        sizes = {"weights": 78, "tables": 47, "pinned": 66, "dequantised": 1, "kv_cache": 2}
        made = {k: v * GIB for k, v in (sizes | (need or {})).items()}
        placed = {"tables_pinned": bool(made["pinned"]), "unknown": config.pop("unknown", None)}
        needs = [memory.Need(stage=n, **made, **placed) for n in range(stages)]
        parallel = {
            "tensor_parallel_size": 4,
            "pipeline_parallel_size": stages,
            "data_parallel_size_local": 1,
            "distributed_executor_backend": config.pop("executor", None),
            "nnodes": config.pop("nnodes", 1),
        }
        cache = {"gpu_memory_utilization": 0.92, "kv_cache_memory_bytes": None} | config
        whole = SimpleNamespace(
            parallel_config=SimpleNamespace(**parallel),
            cache_config=SimpleNamespace(**cache),
            engram_config=SimpleNamespace(dp_shared_memory=False),
        )
        report = Report([], rules_only=True, complete=True)
        given = (size and int(size * GIB) for size in (device, host))
        memory.check(report, needs, whole, capability, *given)
        said = " ".join([r.why for r in report.refusals] + list(report.warnings.values()))
        return report.gates(), said, report.facts["memory"]

    return do


ON_GPU = {"pinned": 0}
REFUSED = {
    "tables on the GPU": ({"device": 96, "need": ON_GPU}, "or --engram-config.cpu_offload true"),
    "one GiB too much": ({"device": 81 / 0.92 - 1}, "= 81.0 GiB"),
    "a small share": ({"device": 96, "gpu_memory_utilization": 0.8}, "0.8: 76.8 GiB"),
    "a small host": ({"device": 96, "host": 256}, "its 4 ranks pin at least 264.0 GiB"),
    "two stages on a host": ({"host": 512, "stages": 2}, "its 8 ranks pin at least 528.0 GiB"),
    "shared memory": ({"device": 121, "capability": (12, 1)}, "needs at least 147.0 GiB"),
    "shared, all on the GPU": (
        {"device": 121, "capability": (12, 1), "need": ON_GPU},
        "needs at least 128.0 GiB",
    ),
}


@pytest.mark.parametrize("given, said", REFUSED.values(), ids=REFUSED)
def test_refused(judged, given, said):
    gates, why, _ = judged(**given)
    assert gates == ["memory"] and said in why


RIGHT = {
    "just enough": {"device": 81 / 0.92 + 0.01},
    "a fixed KV cache takes no share": {"device": 82, "kv_cache_memory_bytes": 2 * GIB},
    "a host that is just large enough": {"device": 96, "host": 264},
    "four hosts": {"device": 96, "host": 66, "nnodes": 4},
    "two stages on two hosts": {"host": 264, "stages": 2, "nnodes": 2},
    "Ray, one rank a host": {"host": 66, "executor": "ray"},
    "exact sizes": {"host": 188, "need": {"pinned": 47}},
    "shared memory is counted once": {"device": 147, "host": 100, "capability": (12, 1)},
    "nothing is known": {},
}


@pytest.mark.parametrize("given", RIGHT.values(), ids=RIGHT)
def test_passes(judged, given):
    gates, why, fact = judged(**given)
    assert gates == [], why
    assert "a GPU needs at least weights 78.0" in fact.value["says"]


def test_unknown_placement_is_a_warning(judged):
    given = {"device": 121, "capability": (12, 1)}
    gates, why, fact = judged(**given, unknown="member mine changes Engram code")
    assert gates == [] and "needs at least 147.0 GiB" in why
    assert fact.assumed == "member mine changes Engram code"


def test_without_a_size_nothing_is_refused_and_the_need_is_said(run):
    code, report, said = run("--capability 12.1")
    assert code == 0 and "memory: a GPU needs at least" in said
    assert "memory" in report["facts"]["not_evaluated"]["value"]


def test_members_of_the_users_own_that_move_tables_are_never_refused(run, monkeypatch, tmp_path):
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_memory as memory

    package = tmp_path / "vllm"
    (package / "sm120_foreign").mkdir(parents=True)
    stand_in = SimpleNamespace(__file__=str(package / "__init__.py"))
    monkeypatch.setattr(memory, "vllm", stand_in)
    diff = package / "sm120_foreign" / "mine.diff"
    diff.write_text("+++ b/vllm/entrypoints/openai/api_server.py\n")
    code, report, _ = run("--capability 12.1 --device-memory-gib 121")
    assert report["gates"] == ["memory"]  # nothing to do with the tables
    diff.write_text("+++ b/vllm/models/deepseek_v41/common/engram.py\n")
    code, report, _ = run("--capability 12.1 --device-memory-gib 121")
    assert (code, report["gates"]) == (0, [])
    said = report["messages"]["warnings"]["engram_memory"]
    assert "member mine changes Engram code" in said and "121.0 GiB" in said
    assert report["facts"]["memory"]["assumed"]


def test_bytes_against_the_configuration(platform, engine_config):
    """Experts and tables, from the configuration's sizes alone."""
    from vllm.models.deepseek_v41.nvidia import sm120_rank_model as rank_model

    config = engine_config()
    with rank_model.as_target((12, 0)):
        [rank] = rank_model.build(config)
    sizes = {name: p.numel() * p.element_size() for name, p in rank.parameters()}
    # 2304 / 4 = 576 columns, padded to 640 for DeepGEMM's tiles of 128; half a byte a
    # value and a byte of scale for 32.
    values = TEXT["num_hidden_layers"] * TEXT["n_routed_experts"] * 3 * TEXT["hidden_size"] * 640
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert experts == values // 2 + values // 32
    tables = sum(size for name, size in sizes.items() if "engram.embed_tokens" in name)
    assert abs(tables - TABLES / 4) < 1e-3 * tables  # heads have different prime sizes


def test_stages_hold_their_own_layers(platform, engine_config, monkeypatch, kv_plan):
    from vllm.models.deepseek_v41.nvidia import sm120_rank_model as rank_model
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_memory as memory

    def needs(*more):
        config = engine_config(*more)
        with rank_model.as_target((12, 0)):
            ranks = rank_model.build(config)
        return memory.needs(ranks, kv_plan.KVPlan(config))

    [whole] = needs()
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "20,20")
    first, second = needs("--pipeline-parallel-size", "2")
    assert (first.tables, second.tables) == (whole.tables, 0)  # layers 1 and 14
    # Final norm and vision are a few hundred MiB; nothing is held twice but the vision.
    assert 0 <= first.weights + second.weights - whole.weights < GIB
    assert 0 < second.kv_cache < whole.kv_cache


def test_the_kv_cache_is_what_vllm_itself_asks_for(platform, engine_config, kv_plan):
    """As its own check counts one request of max_model_len."""
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_memory as memory

    found = []
    for length in ("65536", "131072"):
        plan = kv_plan.KVPlan(engine_config("--max-model-len", length))
        [size] = memory._kv_caches(plan, [range(40)])
        found.append(size)
    # 1800 B a token of context (README), in blocks of 128 tokens.
    assert found[1] - found[0] == 65536 * 1800


@pytest.mark.parametrize(
    "size, rounded", [(1, 1), (3, 4), (1 << 30, 1 << 30), ((1 << 30) + 1, 1 << 31)]
)
def test_pinned_memory_is_rounded_up(platform, size, rounded):
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_memory as memory

    assert memory._power_of_two(size) == rounded


def test_tables_that_are_pinned_as_they_are(run, monkeypatch):
    """Huge pages, or an allocator that is told not to round: 188.8 GiB instead of 264."""
    options = "--capability 12.0 --device-memory-gib 96 --host-memory-gib 192"
    _, report, said = run(options, "--engram-config.use_thp", "true")
    assert report["gates"] == [] and "pins 188.8 GiB" in said
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "pinned_max_round_threshold_mb:64")
    _, report, said = run(options)
    assert report["gates"] == [] and "pins 188.8 GiB" in said


@pytest.mark.parametrize("size", ["0", "-1", "x", "1e99", "nan"])
def test_bad_sizes(platform, size):
    from vllm.models.deepseek_v41.nvidia import sm120_decode_shape_selftest as selftest

    said = []
    options = ["--rules-only", "--capability", "12.0", "--device-memory-gib", size]
    assert selftest.main([*options, "--", *ARGV], said.append) == 2
    assert said[-1].startswith("SELFTEST NOT RUN: ")


def test_the_smallest_gpu_that_the_ranks_use_counts(platform, monkeypatch):
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_memory as memory

    sizes = [96 * GIB, 72 * GIB, 24 * GIB]
    total = classmethod(lambda cls, number=0: sizes[number])
    monkeypatch.setattr(platform, "get_device_total_memory", total)
    count = classmethod(lambda cls: len(sizes))
    monkeypatch.setattr(platform, "device_count", count, raising=False)
    layout = {"distributed_executor_backend": "mp", "nnodes": 1, "pipeline_parallel_size": 1}
    for ranks, smallest in ((1, 96), (2, 72), (4, 24)):
        parallel = SimpleNamespace(tensor_parallel_size=ranks, **layout)
        found, host = memory.sizes_here(SimpleNamespace(parallel_config=parallel))
        assert found == smallest * GIB and host > 0


def test_replicas_share_their_tables_or_not(run):
    """Two replicas of TP 4 on one host: shared by default, else pinned twice."""
    twice = ["--data-parallel-size", "2"]
    for more, pinned in (([], 188.8), (["--engram-config.dp_shared_memory", "false"], 528.0)):
        _, _, said = run("--capability 12.0", *twice, *more)
        assert f"pins {pinned} GiB" in said


def test_what_the_machine_has_counts_where_nothing_is_given(platform, monkeypatch):
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_memory as memory
    from vllm.models.deepseek_v41.nvidia.sm120_selftest_path import Path
    from vllm.models.deepseek_v41.nvidia.sm120_selftest_report import Report

    monkeypatch.setattr(memory, "sizes_here", lambda config: (96 * GIB, 512 * GIB))

    def sizes(capability, device, host):
        options = SimpleNamespace(
            capability=capability, device_memory_gib=device, host_memory_gib=host, calls=None
        )
        report = Report([], rules_only=True, complete=True)
        return Path(report, options, None, (12, 0))._sizes()

    assert sizes(None, None, None) == (96 * GIB, 512 * GIB)
    assert sizes(None, 80.5, None) == (int(80.5 * GIB), 512 * GIB)
    assert sizes((12, 0), None, None) == (None, None)
    assert sizes((12, 0), 80, 100) == (80 * GIB, 100 * GIB)
