# SPDX-License-Identifier: Apache-2.0
"""Names in a checkpoint against the names that the configured model takes.

The real index is not to be had here: ``checkpoint_names`` writes down what vLLM's mapper,
loader and layers accept. Level of evidence: source read.
"""

import json
import os
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fork import ROOT
from tests.v41_names import checkpoint_names

FOLDER = ROOT / "vllm" / "models" / "deepseek_v41" / "nvidia"

OVERRIDE = ("--hf-overrides.vision_n_layers", "0")
TEXT_ONLY = ("--language-model-only",)
IMAGE_BIAS = [f"layers.{i}.ffn.gate.bias_vl" for i in range(40)]


@pytest.fixture(scope="module")
def module(platform):
    """The module: the installed wheel's, or where it has none, this checkout's."""
    import vllm.models.deepseek_v41.nvidia as package
    from vllm.model_executor.models import ModelRegistry
    from vllm.models.deepseek_v41 import DSparkDeepseekV4ForCausalLM

    # Else vLLM would import the draft again in another process, as fork.planner says.
    ModelRegistry.register_model("DSparkV41DraftModel", DSparkDeepseekV4ForCausalLM)
    if str(FOLDER) not in package.__path__:
        package.__path__.append(str(FOLDER))
    from vllm.models.deepseek_v41.nvidia import sm120_checkpoint_names

    return sm120_checkpoint_names


@pytest.fixture
def small_config(engine_config):
    """V4.1 with 16 experts a layer instead of 384; everything else as it is."""
    few = ("n_routed_experts", "dspark_n_routed_experts")
    return lambda *more: engine_config(
        *(argument for name in few for argument in (f"--hf-overrides.{name}", "16")), *more
    )


def _names(config) -> set[str]:
    return checkpoint_names(config.model_config.hf_config)


# --- check -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        (),
        TEXT_ONLY,
        (*TEXT_ONLY, "--hf-overrides.vision_max_n_token", "0"),
        ("--pipeline-parallel-size", "2", "--enable-expert-parallel"),
        ("--speculative-config", '{"method": "dspark", "num_speculative_tokens": 5}'),
    ],
    ids=["multimodal", "text only", "safe text only of 0.30", "other layout", "draft"],
)
def test_every_name_has_a_home_and_every_parameter_is_fed(module, small_config, more):
    config = small_config(*more)
    report = module.check(config, _names(config))
    assert report == module.NamesReport([], [], None, True)


def test_the_whole_model(module, engine_config):
    config = engine_config()
    names = _names(config)
    assert len(names) > 40 * 384 * 6
    assert module.check(config, names) == module.NamesReport([], [], None, True)


@pytest.mark.parametrize("draft", [False, True])
def test_vision_n_layers_0_leaves_image_biases_homeless(module, small_config, draft):
    more = [*TEXT_ONLY, *OVERRIDE]
    expected = IMAGE_BIAS
    if draft:
        more += ["--speculative-config", '{"method": "dspark", "num_speculative_tokens": 5}']
        expected = expected + [f"mtp.{i}.ffn.gate.bias_vl" for i in range(3)]
    config = small_config(*more)
    report = module.check(config, _names(config))
    assert report.homeless == sorted(expected)
    assert report.unfed == []
    assert "--language-model-only instead" in report.advice
    assert "\n" not in report.advice


def test_vision_n_layers_0_with_a_tower_leaves_its_blocks_homeless_too(module, small_config):
    config = small_config(*OVERRIDE)
    report = module.check(config, _names(config))
    assert set(IMAGE_BIAS) < set(report.homeless)
    assert all(n in IMAGE_BIAS or n.startswith("vision.blocks.") for n in report.homeless)
    assert report.advice


def test_the_safe_form_follows_the_tree(module, monkeypatch):
    assert "vision_max_n_token" not in module.safe_text_only()
    monkeypatch.setattr("inspect.getsource", lambda _: "x.vision_max_n_token")
    assert (
        "--language-model-only --hf-overrides.vision_max_n_token 0 instead"
        in module.safe_text_only()
    )


RENAMED = [
    "layers.3.attn.wo_b.scale",
    "layers.0.attn.wq_a.weight",
    "layers.39.attn.attn_sink",
    "layers.20.attn.compressor.wkv.weight",
    "layers.36.attn.indexer.weights_proj.weight",
    "layers.14.engram.embed.scale",
    "layers.7.ffn.gate.bias_vl",
    "layers.7.ffn.gate.bias",
    "layers.5.ffn.shared_experts.w3.weight",
    "layers.5.ffn.experts.7.w2.scale",
    "embed.weight",
    "head.weight",
    "vision.blocks.31.attn.wqkv.bias",
    "image_newline",
]


def test_renamed_tensors_are_homeless_by_their_names(module, small_config):
    config = small_config()
    names = _names(config)
    assert set(RENAMED) <= names
    renamed = {_renamed(name) for name in RENAMED}
    report = module.check(config, names - set(RENAMED) | renamed)
    # vLLM ignores an unexpected bias of the tower, as of any module its own loader fills.
    assert renamed - set(report.homeless) <= {"vision.blocks.31.attn.wqkv2.bias"}
    assert set(report.homeless) <= renamed
    assert len(report.unfed) == len(RENAMED)
    assert report.advice is None


def _renamed(name: str) -> str:
    """Another name of the same shape: the last part but a suffix the loader knows."""
    parts = name.split(".")
    at = -2 if parts[-1] in ("weight", "scale", "bias") and len(parts) > 2 else -1
    parts[at] += "2"
    return ".".join(parts)


@pytest.mark.parametrize(
    "name, parameter",
    [
        ("layers.3.attn.wo_b.scale", "layers.3.attn.wo_b.weight_scale"),
        ("layers.39.attn.attn_sink", "layers.39.attn.attn_sink"),
        ("layers.0.attn.wkv.weight", "layers.0.attn.fused_wqa_wkv.weight [1]"),
        ("layers.5.ffn.gate.bias_vl", "layers.5.ffn.gate.bias_vl"),
        (
            "layers.5.ffn.experts.7.w2.weight",
            "layers.5.ffn.experts.routed_experts.w2_weight [w2/7]",
        ),
        ("norm.weight", "norm.weight"),
    ],
)
def test_a_missing_tensor_leaves_its_parameter_unfed(module, small_config, name, parameter):
    config = small_config(*TEXT_ONLY)
    report = module.check(config, _names(config) - {name})
    assert report.homeless == []
    assert report.unfed == [f"language_model.model.{parameter}"]


def test_more_experts_or_layers_than_configured_are_homeless(module, small_config):
    config = small_config(*TEXT_ONLY)
    more = {
        "layers.0.ffn.experts.16.w1.weight",
        "layers.39.ffn.experts.99.w2.scale",
        "layers.40.attn_norm.weight",
        "layers.40.ffn.shared_experts.w1.weight",
        "layers.40.ffn.experts.0.w1.weight",
    }
    report = module.check(config, _names(config) | more)
    assert report == module.NamesReport(sorted(more), [], None, True)


def test_an_expert_missing_everywhere_is_unfed(module, small_config):
    config = small_config(*TEXT_ONLY)
    names = {name for name in _names(config) if ".experts.15." not in name}
    unfed = module.check(config, names).unfed
    assert len(unfed) == 40 * 4
    assert all(name.endswith("/15]") or "/15, w3/15]" in name for name in unfed)


def test_another_checkpoint_altogether_ends_soon(module, small_config):
    config = small_config(*TEXT_ONLY)
    names = {f"model.layers.{i}.mlp.weight" for i in range(100_000)}
    report = module.check(config, names)
    assert not report.complete
    assert 0 < len(report.homeless) <= 1000


def test_nothing_outside_is_changed(module, small_config):
    import torch
    from vllm.distributed import parallel_state

    config = small_config(*TEXT_ONLY)
    groups = {name: value for name, value in vars(parallel_state).items() if name.isupper()}
    before = [torch.cuda.Stream, torch.cuda.Event, torch.cuda.get_device_properties]
    context = dict(config.compilation_config.static_forward_context)
    sizes = vars(config.parallel_config).copy()
    quantization = config.quant_config
    module.check(config, _names(config))
    assert groups == {n: v for n, v in vars(parallel_state).items() if n.isupper()}
    assert before == [torch.cuda.Stream, torch.cuda.Event, torch.cuda.get_device_properties]
    assert context == config.compilation_config.static_forward_context
    assert sizes == vars(config.parallel_config)
    assert quantization is config.quant_config


def test_a_model_that_cannot_be_built_is_one_line(module, small_config, monkeypatch):
    class Broken:
        def __init__(self, **_):
            raise RuntimeError("first\nsecond")

    monkeypatch.setattr(module, "DeepseekV41ForCausalLM", Broken)
    with pytest.raises(module.CannotCheck, match=r"^Broken cannot be built .*first second$"):
        module.check(small_config(), {"embed.weight"})


@pytest.mark.parametrize("field", ["num_hidden_layers", "n_routed_experts", "vision_n_layers"])
def test_a_hostile_size_is_not_built(module, small_config, field):
    config = small_config()
    setattr(config.model_config.hf_config, field, 10**9)
    with pytest.raises(module.CannotCheck, match=rf"^{field} is '1000000000', more than \d+$"):
        module.check(config, {"embed.weight"})


# --- read_index --------------------------------------------------------------------


def _index(folder: Path, content: bytes | str) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def _single(folder: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    size = struct.pack("<Q", len(header) if length is None else length)
    (folder / "model.safetensors").write_bytes(size + header + data)
    return folder


def _tensor(start: int = 0, end: int = 4) -> dict:
    return {"dtype": "F32", "shape": [1], "data_offsets": [start, end]}


def test_names_of_an_index(module, tmp_path):
    index = {"metadata": {"total_size": 1}, "weight_map": {"a.b": "1.safetensors", "c": "2"}}
    assert module.read_index(_index(tmp_path, json.dumps(index))) == {"a.b", "c"}
    assert module.read_index(str(tmp_path)) == {"a.b", "c"}


def test_names_of_a_single_file(module, tmp_path):
    header = {"__metadata__": {"format": "pt"}, "a": _tensor(), "b": _tensor(4, 8)}
    _single(tmp_path, json.dumps(header).encode(), b"12345678")
    assert module.read_index(tmp_path) == {"a", "b"}


def test_names_of_a_link_into_a_cache(module, tmp_path):
    (tmp_path / "cache").mkdir()
    _index(tmp_path / "cache", '{"weight_map": {"a": "x"}}')
    name = "model.safetensors.index.json"
    (tmp_path / name).symlink_to(tmp_path / "cache" / name)
    assert module.read_index(tmp_path) == {"a"}


def test_neither_file(module, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert module.read_index(tmp_path) is None
    assert module.read_index(tmp_path / "absent") is None


def _refused(module, folder) -> str:
    with pytest.raises(ValueError) as caught:
        module.read_index(folder)
    line = str(caught.value)
    assert line.isprintable() and len(line) < 400
    assert line.startswith("model.safetensors")
    return line


@pytest.mark.parametrize(
    "content, why",
    [
        ("", "Expecting value"),
        ('{"weight_map": {"a": "x"', "Expecting"),
        (b'\xff\xfe{"weight_map": {}}', ""),
        (b'{"weight_map": {"a\x80": "x"}}', "not UTF-8"),
        ("[1]", "not a JSON object"),
        ("null", "not a JSON object"),
        ("{}", "weight_map is not an object"),
        ('{"weight_map": ["a"]}', "weight_map is not an object"),
        ('{"weight_map": {}}', "names no tensor"),
        ('{"weight_map": {"a": 1}}', "the shard of 'a' is not a file name"),
        ('{"weight_map": {"a": ""}}', "the shard of 'a' is not a file name"),
        ('{"weight_map": {"": "x"}}', "not a tensor name: ''"),
        ('{"weight_map": {"a\\nb": "x"}}', "not a tensor name: 'a\\nb'"),
        ('{"weight_map": {"\\ud800": "x"}}', "not a tensor name"),
        ('{"weight_map": {"\\u001b[2J": 1}}', "the shard of"),
        ('{"weight_map": {"%s": "x"}}' % ("a" * 1000), "not a tensor name: 'aaa"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"weight_map": %s}' % ("9" * 5000), ""),
    ],
)
def test_a_malformed_index_is_one_line(module, tmp_path, content, why):
    assert why in _refused(module, _index(tmp_path, content))


@pytest.mark.parametrize(
    "header, data, length, why",
    [
        (b"", b"", 0, "Expecting value"),
        (b"{}", b"", None, "names no tensor"),
        (b"[]", b"", None, "not a JSON object"),
        (b'{"a": 1}', b"", None, "'a' has no data_offsets"),
        (b'{"a": {"data_offsets": [0, 4.0]}}', b"1234", None, "'a' has no data_offsets"),
        (b'{"a": {"data_offsets": [4, 0]}}', b"1234", None, "'a' has no data_offsets"),
        (b'{"a": {"data_offsets": [true, true]}}', b"12", None, "'a' has no data_offsets"),
        (b'{"a": {"data_offsets": [0, 4]}}', b"123", None, "truncated"),
        (b'{"a"', b"", 1000, "truncated: a header of 1000 bytes"),
        (b"{}", b"", 2**64 - 1, "more than"),
        (b"{}", b"", (100 << 20) + 1, "more than"),
    ],
)
def test_a_malformed_single_file_is_one_line(module, tmp_path, header, data, length, why):
    assert why in _refused(module, _single(tmp_path, header, data, length))


def test_a_file_of_less_than_eight_bytes(module, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"123")
    assert "truncated" in _refused(module, tmp_path)


def test_a_huge_index_is_not_read(module, tmp_path):
    with open(tmp_path / "model.safetensors.index.json", "wb") as file:
        file.truncate((64 << 20) + 1)  # sparse
    assert "more than" in _refused(module, tmp_path)


@pytest.mark.parametrize("kind", ["folder", "fifo", "dangling link", "loop"])
def test_what_is_no_file(module, tmp_path, kind):
    path = tmp_path / "model.safetensors.index.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(path if kind == "loop" else tmp_path / "gone")
    _refused(module, tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["weight_map", "a", "\n"]) | st.text(max_size=4), inner)
    ),
    max_leaves=8,
)
FUZZ = settings(
    max_examples=int(os.environ.get("SM120_FUZZ_EXAMPLES", "150")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def _read(module, folder) -> None:
    try:
        names = module.read_index(folder)
    except ValueError as error:
        assert str(error).isprintable() and len(str(error)) < 400
    else:
        assert names and all(name.isprintable() for name in names)


@FUZZ
@given(content=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_index_is_names_or_one_line(module, tmp_path, content):
    _read(module, _index(tmp_path, content))


@FUZZ
@given(tensors=JSON, weights=st.dictionaries(st.text(max_size=6), JSON, max_size=3))
def test_any_object_is_names_or_one_line(module, tmp_path, tensors, weights):
    _read(module, _index(tmp_path, json.dumps({"weight_map": weights, "metadata": tensors})))


@FUZZ
@given(
    header=st.binary(max_size=60)
    | st.dictionaries(
        st.text(max_size=4),
        st.fixed_dictionaries({"data_offsets": st.lists(st.integers(-1, 9), max_size=3)}) | JSON,
        max_size=3,
    ).map(lambda value: json.dumps(value).encode()),
    data=st.binary(max_size=8),
    length=st.none() | st.integers(0, 2**64 - 1),
)
def test_any_single_file_is_names_or_one_line(module, tmp_path, header, data, length):
    _read(module, _single(tmp_path, header, data, length))
