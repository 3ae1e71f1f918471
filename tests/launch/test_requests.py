# SPDX-License-Identifier: Apache-2.0
"""Pins what each request renders to, and which contradict each other.

That vLLM reads it so is shown in test_with_vllm.py.
"""

import itertools

import pytest
from pydantic import TypeAdapter, ValidationError

from fork import pin, probe
from sm120_launch.conflicts import conflicts, flag_of, warnings
from sm120_launch.requests import (
    KINDS,
    AnyRequest,
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
    render,
)

V30, V33 = Context((0, 30)), Context((0, 33))
TEXT, IMAGES = Modality(modality="text-only"), Modality(modality="multimodal")
SPARKS = Parallel(tensor=4, nnodes=4, master_address="10.0.0.1", master_port=29501)


@pytest.mark.parametrize(
    ("made", "context", "rendered"),
    [
        ([], V33, ""),
        ([TEXT], V33, "--language-model-only"),
        ([TEXT], Context((0, 31)), "--language-model-only"),
        # facts/geometry: on 0.30 the flag alone leaves the window 1152 wide
        ([TEXT], V30, "--language-model-only --hf-overrides.vision_max_n_token 0"),
        ([IMAGES], V30, ""),
        ([ImageLimit(images=2)], V33, "--limit-mm-per-prompt.image 2"),
        (
            [HfOverrides(values={"vision_max_n_token": 0})],
            V33,
            "--hf-overrides.vision_max_n_token 0",
        ),
        ([HfOverrides(values={"vision_n_layers": 0})], V33, "--hf-overrides.vision_n_layers 0"),
        (
            [HfOverrides(values={"b": True, "a.c": None}), TEXT],
            V30,
            "--language-model-only --hf-overrides.a.c null --hf-overrides.b true "
            "--hf-overrides.vision_max_n_token 0",
        ),
        ([Engram(cpu_offload=True)], V33, "--engram-config.cpu_offload true"),
        (
            [Engram(cpu_offload=False, embedding_across_dp=True)],
            V33,
            "--engram-config.cpu_offload false --engram-config.embedding_across_dp true",
        ),
        (
            [KvCache(dtype="fp8", block_size=256, gpu_memory_utilization=0.92)],
            V33,
            "--kv-cache-dtype fp8 --block-size 256 --gpu-memory-utilization 0.92",
        ),
        (
            [KvCache(memory_bytes=1 << 33, prefix_caching=False)],
            V33,
            "--kv-cache-memory-bytes 8589934592 --no-enable-prefix-caching",
        ),
        ([KvCache(prefix_caching=True)], V33, "--enable-prefix-caching"),
        (
            [Limits(max_model_len=131072, max_num_seqs=16, max_num_batched_tokens=4096)],
            V33,
            "--max-model-len 131072 --max-num-seqs 16 --max-num-batched-tokens 4096",
        ),
        (
            [Speculative(method="dspark", num_speculative_tokens=5)],
            V33,
            "--speculative-config.method dspark --speculative-config.num_speculative_tokens 5",
        ),
        (
            [Server(host="0.0.0.0", port=9000, served_model_name="v41")],
            V33,
            "--host 0.0.0.0 --port 9000 --served-model-name v41",
        ),
        (
            [Parallel(tensor=2, pipeline=2, executor="ray")],
            Context((0, 33), 3),
            "--tensor-parallel-size 2 --pipeline-parallel-size 2 "
            "--distributed-executor-backend ray",
        ),
        (
            [SPARKS],
            V33,
            "--tensor-parallel-size 4 --nnodes 4 --node-rank 0 --master-addr 10.0.0.1 "
            "--master-port 29501",
        ),
        (
            [SPARKS],
            Context((0, 33), 2),
            "--tensor-parallel-size 4 --nnodes 4 --node-rank 2 --master-addr 10.0.0.1 "
            "--master-port 29501 --headless",
        ),
        ([Extra(arguments=("--enforce-eager", "--seed", "1"))], V33, "--enforce-eager --seed 1"),
    ],
)
def test_rendering(made, context, rendered):
    assert render(made, context) == rendered.split()
    assert conflicts(made, context) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("1k", '"1k"'),  # else a number with a suffix
        ("7", '"7"'),
        ("true", '"true"'),
        ("-x", '"-x"'),  # else another option
        ("a b", '"a b"'),
        ("", '""'),
        ("größe", '"größe"'),
        ("deepseek-ai/x.y", "deepseek-ai/x.y"),
        (-1.5, "-1.5"),
        (1e30, "1e+30"),
    ],
)
def test_values_of_dotted_arguments(value, text):
    assert render([HfOverrides(values={"a": value})], V33) == ["--hf-overrides.a", text]


@pytest.mark.parametrize("base", pin.load().bases)
def test_text_only_is_the_form_that_the_probe_shows_to_be_safe(base):
    """Patched, that form passes on every base, the width included (tests/fork/test_cases.py)."""
    context = Context(tuple(int(part) for part in base.split(".")[:2]))
    assert render([TEXT], context) == probe.modalities(base)["text-only safe"]


MADE = [TEXT, HfOverrides(values={"a": 1}), KvCache(dtype="fp8"), SPARKS]


def test_order_in_the_profile_is_nothing():
    forms = {tuple(render(some, V30)) for some in itertools.permutations(MADE)}
    assert len(forms) == 1


def test_ranks_differ_in_their_number_alone():
    """Every rank asks for the same modality."""
    argvs = [render(MADE, Context((0, 30), n)) for n in range(4)]
    plain = [[a for a in argv if a != "--headless"] for argv in argvs]
    place = plain[0].index("--node-rank") + 1
    assert [argv[place] for argv in plain] == list("0123")
    assert ["--headless" in argv for argv in argvs] == [False, True, True, True]
    assert len({tuple(argv[:place] + argv[place + 1 :]) for argv in plain}) == 1


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ([TEXT, ImageLimit(images=1)], ("text-only", "image_limit")),
        ([IMAGES, HfOverrides(values={"vision_n_layers": 0})], ("multimodal", "vision_n_layers")),
        ([TEXT, HfOverrides(values={"vision_max_n_token": 5})], ("text-only", "says 5")),
        ([TEXT, IMAGES], ("modality", "2 times")),
        ([TEXT, Extra(arguments=("--no-language-model-only",))], ("extra", "modality")),
        ([TEXT, Extra(arguments=("--language_model_only",))], ("extra", "modality")),
        ([TEXT, Extra(arguments=("--limit-mm-per-prompt.image", "2"))], ("extra", "modality")),
        ([TEXT, Extra(arguments=('--limit-mm-per-prompt={"image":2}',))], ("extra", "modality")),
        ([TEXT, Extra(arguments=("--hf-overrides.a", "1"))], ("extra", "modality")),
        ([TEXT, Extra(arguments=("--hf-over", "{}"))], ("extra", "modality")),
        ([KvCache(dtype="fp8"), Extra(arguments=("--kv-cache-dtype=auto",))], ("kv_cache",)),
        ([KvCache(dtype="fp8"), Extra(arguments=("--kv-cache-d", "auto"))], ("kv_cache",)),
        ([Engram(use_thp=True), Extra(arguments=("--engram_config", "{}"))], ("engram",)),
        ([Limits(max_num_seqs=1), Extra(arguments=("--max-num-seqs", "2"))], ("limits",)),
        ([Server(port=8001), Extra(arguments=("--port", "8002"))], ("server",)),
        ([Speculative(method="x"), Extra(arguments=("-sc", "{}"))], ("speculative",)),
        ([Extra(arguments=("-tp", "2"))], ("layout",)),
        ([Extra(arguments=("-tp=2",))], ("layout",)),
        ([Extra(arguments=("--tensor-parallel-size", "2"))], ("layout",)),
        ([Extra(arguments=("--tensor-par=2",))], ("layout",)),
        ([Extra(arguments=("-n4",))], ("layout",)),
        ([Extra(arguments=("--headless",))], ("layout",)),
        ([Extra(arguments=("--node_rank", "1"))], ("layout",)),
        ([Extra(arguments=("--data-parallel-size", "2"))], ("data-parallel",)),
        ([Extra(arguments=("-dp", "2"))], ("data-parallel",)),
        ([Extra(arguments=("--model", "/x"))], ("model",)),
        ([Extra(arguments=("--config", "x.yaml"))], ("file of arguments",)),
        ([Extra(arguments=("--api-key", "x"))], ("secret", "pass_env")),
        ([Extra(arguments=("--api-key=x",))], ("secret", "pass_env")),
        ([Extra(arguments=("--hf-token", "x"))], ("secret", "pass_env")),
        # where the engine answers, as a launch asks it
        ([Extra(arguments=("--port", "9000"))], ("kind 'server'",)),
        ([Extra(arguments=("--host=10.0.0.5",))], ("kind 'server'",)),
        ([Extra(arguments=("--uds", "/x"))], ("kind 'server'",)),
        ([Extra(arguments=("--grpc",))], ("HTTP",)),
        ([Extra(arguments=("--ssl-keyfile", "/x"))], ("TLS",)),
        ([Extra(arguments=("--ssl_certfile=/x",))], ("TLS",)),
        ([Extra(arguments=("--enable-ssl-refresh",))], ("TLS",)),
        ([Extra(arguments=("--otlp-traces-endpoint", "http://u:hunter2@h/x"))], ("login",)),
        ([Extra(arguments=("--otlp-traces-endpoint=http://u:hunter2@h",))], ("--otlp", "login")),
        ([Extra(arguments=("--", "x"))], ("'--'",)),
        ([Extra(arguments=("x",))], ("second model",)),
    ],
)
def test_contradictions_are_named(made, words):
    found = conflicts(made, V30)
    assert len(found) == 1, found
    assert all(word in found[0] for word in words)


def test_what_an_argument_says_is_not_repeated():
    made = [KvCache(dtype="fp8"), Extra(arguments=("--api-key=hunter2", "--block-size=hunter2"))]
    found = conflicts(made, V33)
    assert len(found) == 2 and "--api-key" in found[0] and "--block-size" in found[1]
    assert "hunter2" not in "".join(found)


@pytest.mark.parametrize(
    "made",
    [
        [IMAGES, ImageLimit(images=1)],
        [Extra(arguments=("--otlp-traces-endpoint", "http://h:4317/a@b"))],  # no login
        [TEXT, HfOverrides(values={"vision_max_n_token": 0})],
        [Extra(arguments=("--max-num-seqs", "2"))],  # nobody else asks for it
        [Extra(arguments=("--kv-cache-dtype", "fp8", "--rope-scaling.factor", "-1"))],
        [KvCache(dtype="fp8"), Extra(arguments=("--max-logprobs", "-1", "--numa-bind"))],
    ],
)
def test_what_goes_together(made):
    assert conflicts(made, V30) == []


def test_width_by_vision_n_layers_is_warned_of():
    assert "KeyError" in warnings([HfOverrides(values={"vision_n_layers": 0})])[0]
    assert warnings([HfOverrides(values={"vision_n_layers": 32}), TEXT]) == []


ADAPTER = TypeAdapter(AnyRequest)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kind": "engram"}, "asks for nothing"),
        ({"kind": "extra", "arguments": []}, "at least 1"),
        ({"kind": "hf_overrides", "values": {}}, "at least 1"),
        ({"kind": "hf_overrides", "values": {"a=b": 1}}, "pattern"),
        ({"kind": "hf_overrides", "values": {"a+": 1}}, "pattern"),
        ({"kind": "hf_overrides", "values": {"a": [1]}}, "valid"),
        ({"kind": "kv_cache", "dtype": "--x"}, "pattern"),
        ({"kind": "kv_cache", "gpu_memory_utilization": 1.5}, "less than"),
        ({"kind": "server", "port": 80}, "1024"),
        ({"kind": "server", "host": "-h"}, "pattern"),
        ({"kind": "server", "host": "h/x"}, "pattern"),
        ({"kind": "parallel", "tensor": 4, "nnodes": 4}, "master_address"),
        ({"kind": "parallel", "tensor": 4, "master_address": "h"}, "nnodes"),
        ({"kind": "parallel", "tensor": 3, "nnodes": 2, "master_address": "h"}, "do not divide"),
        (
            {
                "kind": "parallel",
                "tensor": 2,
                "nnodes": 2,
                "master_address": "h",
                "executor": "ray",
            },
            "drop nnodes",
        ),
        ({"kind": "modality", "modality": "text"}, "text-only"),
        ({"kind": "modality", "modality": "text-only", "x": 1}, "Extra inputs"),
        ({"kind": "nothing"}, "kv_cache"),
    ],
)
def test_bad_requests(given, words):
    with pytest.raises(ValidationError, match=words):
        ADAPTER.validate_python(given)


def test_kinds_are_all_discriminated():
    kinds = [cls.model_fields["kind"].default for cls in KINDS]
    schema = ADAPTER.json_schema()
    assert sorted(schema["discriminator"]["mapping"]) == sorted(kinds)


@pytest.mark.parametrize(
    ("argument", "flag"),
    [
        ("--a_b.c_d", "--a-b"),
        ("--no-a", "--a"),
        ("--a=b.c", "--a"),
        ("-tp", "-tp"),
        ("-1", ""),
        ("-1.5", ""),
        ("x", ""),
        ("--", ""),
        ("", ""),
    ],
)
def test_flag_of(argument, flag):
    assert flag_of(argument) == flag
