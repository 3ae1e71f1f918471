# SPDX-License-Identifier: Apache-2.0
"""What the launcher renders and digests, as the installed vLLM and its self-test see it."""

import ast
import json
import os
import random
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from fork import ROOT, geometry, pin
from sm120_launch import keys, requests, runtime
from sm120_launch.requests import (
    Context,
    Engram,
    Extra,
    HfOverrides,
    ImageLimit,
    KvCache,
    Limits,
    Modality,
    Parallel,
    Server,
    Speculative,
)

try:
    FOUND = metadata.version("vllm")
except metadata.PackageNotFoundError:
    FOUND = "none"
WANTED = pin.load().fork_version()

pytestmark = [
    pytest.mark.needs_vllm,
    pytest.mark.skipif(FOUND != WANTED, reason=f"needs vllm {WANTED}, found {FOUND}"),
]

BASE = tuple(int(part) for part in WANTED.split(".")[:2])
ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_SM120_NOTHING": "größe"}

RANKS = [
    Modality(modality="text-only"),
    KvCache(dtype="fp8"),
    Parallel(tensor=4, nnodes=4, master_address="10.0.0.1"),
    Extra(arguments=("--skip-tokenizer-init",)),
]


def some(chance):
    """Requests by chance, and the parsed arguments that each must come to."""
    value = chance.choice(["1k", "7", "true", "-x", "a b", "größe", "x/y.z", 1, 2.5, True, None])
    tokens = chance.randrange(1, 9)
    share = chance.choice([0.5, 0.92])
    kinds = [
        (Modality(modality="text-only"), {"language_model_only": True}),
        (Modality(modality="multimodal"), {"language_model_only": False}),
        (ImageLimit(images=tokens), {"limit_mm_per_prompt": {"image": tokens}}),
        (
            HfOverrides(values={"a_b": value, "c.d": tokens}),
            {"hf_overrides": {"a_b": value, "c": {"d": tokens}}},
        ),
        (Engram(cpu_offload=True), {"engram_config": {"cpu_offload": True}}),
        (
            Engram(cpu_offload=True, use_thp=True, dp_shared_memory=False),
            {"engram_config": {"cpu_offload": True, "use_thp": True, "dp_shared_memory": False}},
        ),
        (
            KvCache(dtype="fp8", gpu_memory_utilization=share, prefix_caching=False),
            {
                "kv_cache_dtype": "fp8",
                "gpu_memory_utilization": share,
                "enable_prefix_caching": False,
            },
        ),
        (
            KvCache(block_size=64 * tokens, memory_bytes=1 << 33, prefix_caching=True),
            {
                "block_size": 64 * tokens,
                "kv_cache_memory_bytes": 1 << 33,
                "enable_prefix_caching": True,
            },
        ),
        (
            Limits(max_model_len=4096, max_num_seqs=tokens, max_num_batched_tokens=512),
            {"max_model_len": 4096, "max_num_seqs": tokens, "max_num_batched_tokens": 512},
        ),
        (
            Speculative(method="dspark", num_speculative_tokens=tokens),
            {"speculative_config": {"method": "dspark", "num_speculative_tokens": tokens}},
        ),
        (
            Server(host="0.0.0.0", port=9000, served_model_name="v41"),
            {"host": "0.0.0.0", "port": 9000, "served_model_name": ["v41"]},
        ),
        (
            Parallel(tensor=2, pipeline=2, executor="mp"),
            {
                "tensor_parallel_size": 2,
                "pipeline_parallel_size": 2,
                "distributed_executor_backend": "mp",
                "headless": False,
            },
        ),
        (
            Parallel(tensor=4, nnodes=4, master_address="10.0.0.1", master_port=29600),
            {
                "nnodes": 4,
                "node_rank": 2,
                "headless": True,
                "master_addr": "10.0.0.1",
                "master_port": 29600,
            },
        ),
        (Extra(arguments=("--enforce-eager", "--seed", "7")), {"enforce_eager": True, "seed": 7}),
    ]
    made, expected = [], {}
    for request, parsed in chance.sample(kinds, chance.randrange(1, len(kinds))):
        if type(request) not in map(type, made):
            made.append(request)
            expected |= parsed
    return made, expected


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """The cases, and what one process with vLLM makes of them."""
    folder = tmp_path_factory.mktemp("ask")
    cases = [some(random.Random(seed)) for seed in range(200)]
    parse = [["/m", *requests.render(made, Context(BASE, 2))] for made, _ in cases]
    model = geometry.default_argv()[0]
    ranks = [[model, *requests.render(RANKS, Context(BASE, n))] for n in range(4)]
    (folder / "request.json").write_text(json.dumps({"parse": parse, "selftest": ranks}))
    quiet = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    script = Path(__file__).with_name("ask_vllm.py")
    command = [sys.executable, str(script), "request.json", "result.json"]
    env = {**os.environ, **quiet, **ENVIRONMENT}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return cases, ranks, env, json.loads((folder / "result.json").read_text())


def test_what_is_rendered_is_what_vllm_reads(asked):
    cases, _, _, result = asked
    for (made, expected), parsed in zip(cases, result["parse"], strict=True):
        assert parsed["model_tag"] == "/m"
        for name, value in expected.items():
            found = parsed[name]
            if name == "engram_config":  # vLLM fills in the fields that were not given
                found = {k: found[k] for k in value}
            assert found == value, (made, name)


def test_nothing_else_is_set(asked):
    """An argument that no request made has vLLM's default, whatever else was asked."""
    cases, _, _, result = asked
    seen: dict[str, set[str]] = {}
    for (_, expected), parsed in zip(cases, result["parse"], strict=True):
        for name in parsed.keys() - expected.keys():
            seen.setdefault(name, set()).add(json.dumps(parsed[name]))
    made = {"tensor_parallel_size"}  # 4 with nnodes, which does not list it above
    assert {name for name, values in seen.items() if len(values) > 1} <= made


def test_digests_are_the_selftests(asked):
    """Although vLLM sets switches of its own in its environment while it is asked."""
    _, ranks, env, result = asked
    for argv, report in zip(ranks, result["selftest"], strict=True):
        assert report["argv_sha256"] == keys.argv_sha256(argv)
    assert result["selftest"][0]["env_sha256"] == keys.env_sha256(env)


def test_the_runtime_key_is_the_wheels(asked):
    found = asked[3]["selftest"][0]["runtime_key"]
    path = metadata.distribution("vllm").locate_file(keys.RECIPE)
    assert keys.load_recipe(Path(path)).runtime_key == found


def test_every_rank_asks_for_the_same_modality_and_sees_width_128(asked):
    _, ranks, _, result = asked
    assert {"--language-model-only" in argv for argv in ranks} == {True}
    widths = [r["facts"]["prefill_width"]["value"] for r in result["selftest"]]
    assert widths == [128, 128, 128, 128]
    assert {r["verdict"] for r in result["selftest"]} == {"PASS"}


def test_the_engine_s_module_is_what_the_console_script_runs():
    """And it runs when it is a program: runtime.SERVE is `vllm serve`."""
    (script,) = metadata.distribution("vllm").entry_points.select(
        group="console_scripts", name="vllm"
    )
    assert script.value == f"{runtime.SERVE[1]}:main"
    path = metadata.distribution("vllm").locate_file(runtime.SERVE[1].replace(".", "/") + ".py")
    last = ast.parse(Path(path).read_text()).body[-1]
    assert ast.unparse(last) == "if __name__ == '__main__':\n    main()"


def test_root_is_the_checkouts():
    """The launcher under test is this checkout's."""
    assert Path(keys.__file__).is_relative_to(ROOT / "launch")
