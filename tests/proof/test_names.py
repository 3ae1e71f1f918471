# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoints against vLLM itself: its loader's names and shapes, its tokenizer
and its image processor. One module, because importing vLLM is what costs.

A CPU passes for capability 12.0, as in tests/v1; no weight is made.
"""

import functools
import importlib.util
import json
import math
import os
import re
import sys
from importlib import metadata

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import pytest
import torch

from fork import ROOT, pin, planner
from proof import model, scenarios, tokenizer
from proof.engine import SETUPS, _picture


def _missing() -> str | None:
    wanted = pin.load().fork_version()
    try:
        found = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        found = "none"
    return None if found == wanted else f"needs vllm {wanted} installed, found {found}"


pytestmark = [
    pytest.mark.needs_vllm,
    pytest.mark.skipif(bool(_missing()), reason=_missing() or ""),
]

DTYPES = {
    "bf16": torch.bfloat16,
    "eye": torch.bfloat16,
    "f32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "fp4": torch.uint8,
    "e8m0": torch.float8_e8m0fnu,
}


@pytest.fixture(scope="module")
def names():
    """This checkout's sm120_checkpoint_names: the installed wheel may have an older one."""
    planner.set_up_platform((12, 0))
    path = ROOT / "vllm/models/deepseek_v41/nvidia/sm120_checkpoint_names.py"
    spec = importlib.util.spec_from_file_location("proof_checkpoint_names", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Makes a variant's folder without weights, once."""

    @functools.cache
    def make(variant):
        folder = tmp_path_factory.mktemp(variant)
        config = model.config(variant)
        (folder / "config.json").write_text(json.dumps(config))
        tokenizer.write_tokenizer(folder, config["text_config"]["vocab_size"])
        return folder

    return make


@pytest.fixture(scope="module")
def configured(names, folders):
    """The VllmConfig of a variant's engine, once for each."""

    @functools.cache
    def make(variant, *more):
        argv = [str(folders(variant)), "--kv-cache-dtype", "fp8", "--max-model-len", "8192"]
        if variant == "vision":
            argv += ["--limit-mm-per-prompt.image", "2"]
        else:
            argv.append("--language-model-only")
        if variant == "dspark":
            chosen = SETUPS["dspark"].options["speculative_config"]
            argv += ["--speculative-config", json.dumps(chosen)]
        planner.set_up_platform((12, 0))  # another module's test may have set another one
        return planner.vllm_config([*argv, *more])

    return make


@pytest.fixture
def built(names, configured):
    """vLLM's modules of a variant on the meta device: the model and, with dspark, its draft."""

    def make(variant):
        config = configured(variant)
        with names.stand_ins(), torch.no_grad():
            for made, _ in names._built(config):
                for owner in (made, getattr(made, "language_model", None)):
                    if hasattr(owner, "process_weights_after_loading"):
                        owner.process_weights_after_loading = lambda: None
                yield made

    return make


def _table(variant):
    return {tensor.name: tensor for part in model.tensors(variant).values() for tensor in part}


# --- names -------------------------------------------------------------------------


@pytest.mark.parametrize("variant", model.VARIANTS)
def test_every_tensor_has_a_home_and_every_parameter_is_fed(names, configured, variant):
    report = names.check(configured(variant), set(_table(variant)))
    assert report == names.NamesReport([], [], None, True)


def test_a_misspelt_and_a_missing_tensor_are_found(names, configured):
    found = set(_table("text"))
    misspelt = "layers.4.attn.compressor.wkv.weight"
    missing = "layers.3.ffn.experts.7.w2.scale"
    assert {misspelt, missing} <= found
    wrong = misspelt.replace("wkv", "wvk")
    report = names.check(configured("text"), found - {misspelt, missing} | {wrong})
    assert report.homeless == [wrong]
    prefix = "language_model.model.layers"
    assert report.unfed == [
        f"{prefix}.3.ffn.experts.routed_experts.w2_weight_scale [w2/7]",
        f"{prefix}.4.attn.compressor.fused_wkv_wgate.weight",
    ]


def test_vision_n_layers_0_refuses_the_image_biases_and_nothing_else(names, configured):
    setup = SETUPS["no-vision-layers"]
    assert not setup.loads
    assert setup.options["hf_overrides"] == {"vision_n_layers": 0}
    config = configured(setup.variant, "--hf-overrides.vision_n_layers", "0")
    report = names.check(config, set(_table(setup.variant)))
    assert report.homeless == [f"layers.{i}.ffn.gate.bias_vl" for i in range(model.LAYERS)]
    assert report.unfed == []


# --- shapes ------------------------------------------------------------------------

FUSED = {
    "fused_wqa_wkv": ("wq_a", "wkv"),
    "fused_wkv_wgate": ("wkv", "wgate"),
    "gate_up_proj": ("w1", "w3"),
    "w13": ("w1", "w3"),
    "down_proj": ("w2",),
    "w2": ("w2",),
}
RENAMED = {
    "embed_tokens": "embed",
    "lm_head": "head",
    "e_score_correction_bias": "bias",
    "markov_w1": "embed",
    "markov_w2": "head",
    "weight_scale": "scale",
    "weight_scale_inv": "scale",
}
"""vLLM's spelling to DeepSeek's, read from its loaders."""

LAST = f"mtp.{model.DRAFTS - 1}"
DRAFT = {"model.main_": "mtp.0.main_"}
DRAFT |= {f"model.{name}": f"{LAST}.{name}" for name in ("norm", "markov_head", "confidence_head")}


def _fed_by(parameter, draft):
    """The checkpoint's tensors that make up a parameter, in the order of its rows."""
    name = parameter.removeprefix("language_model.")
    if draft:
        name = re.sub(r"^model\.layers\.", "mtp.", name)
        for ours, theirs in DRAFT.items():
            if name.startswith(ours):
                name = theirs + name.removeprefix(ours)
    parts = name.removeprefix("model.").split(".")
    if "routed_experts" in parts:
        at = parts.index("routed_experts")
        which, _, kind = parts[at + 1].partition("_")
        experts = model.DRAFT_EXPERTS if draft else model.EXPERTS
        prefix, kind = ".".join(parts[:at]), RENAMED.get(kind, kind)
        return [[f"{prefix}.{e}.{w}.{kind}" for w in FUSED[which]] for e in range(experts)]
    parts = [RENAMED.get(part, part) for part in parts]
    for fused, own in FUSED.items():
        if fused in parts:
            return [[".".join(w if p == fused else p for p in parts) for w in own]]
    return [[".".join(parts)]]


def _expected(parameter, table, draft):
    """A parameter's shape as the checkpoint's tensors make it: rows are concatenated, and
    linear layers keep a scale for each row where the checkpoint has one for 32."""
    experts = _fed_by(parameter, draft)
    rows, columns = 0, ()
    # Ratio 1 has no gate.
    owners = [table[n] for n in experts[0] if n in table or not n.endswith("wgate.weight")]
    for tensor in owners:
        many = tensor.kind == "e8m0" and parameter.endswith(".weight_scale")
        weight = table.get(tensor.name.removesuffix(".scale") + ".weight")
        rows += tensor.shape[0] * (model.BLOCK if many else 1)
        columns = tensor.shape[1:]
        if tensor.kind == "e8m0":
            width = weight.shape[1] * (2 if weight.kind == "fp4" else 1)
            assert tensor.shape[1] * model.BLOCK == width
    shape = (rows, *columns)
    return (len(experts), *shape) if len(experts) > 1 else shape


@pytest.mark.parametrize("variant", model.VARIANTS)
def test_every_parameter_has_the_shape_that_its_tensors_make(built, variant):
    table = _table(variant)
    fed = set()
    for module in built(variant):
        draft = not hasattr(module, "hf_to_vllm_mapper")
        for name, parameter in module.named_parameters():
            shape = tuple(parameter.shape)
            fed |= {tensor for expert in _fed_by(name, draft) for tensor in expert}
            if ".engram.embed_tokens." in name:
                # vLLM's table ends after the last of its primes.
                (rows, *width), expected = shape, _expected(name, table, draft)
                assert rows <= expected[0] and tuple(width) == expected[1:], name
            else:
                assert shape == _expected(name, table, draft), name
    # Text only has no tower; everything else of the table is somewhere.
    tower = () if variant == "vision" else ("vision.", "aligner.")
    assert {name for name in table if not name.startswith(tower or "-")} <= fed


@pytest.mark.parametrize("variant", model.VARIANTS)
def test_vllms_own_loader_takes_every_tensor_as_it_is(built, variant):
    """Meta tensors of the table's shapes and dtypes, through load_weights itself."""
    table = _table(variant)
    for module in built(variant):
        tensors = [
            (name, torch.empty(tensor.shape, dtype=DTYPES[tensor.kind], device="meta"))
            for name, tensor in table.items()
        ]
        assert module.load_weights(iter(tensors))


@pytest.mark.parametrize(
    "name",
    ["embed.weight", "layers.2.attn.wq_b.scale", "layers.4.attn.compressor.norm.weight"],
)
def test_vllms_own_loader_refuses_a_smaller_tensor(built, name):
    """Or the test above could not fail."""
    (module,) = built("text")
    tensor = _table("text")[name]
    smaller = (tensor.shape[0] - 1, *tensor.shape[1:])
    wrong = torch.empty(smaller, dtype=DTYPES[tensor.kind], device="meta")
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        module.load_weights(iter([(name, wrong)]))


# --- tokenizer and images ----------------------------------------------------------


def test_the_compressed_vocabulary_is_the_configured_one(names, folders):
    from transformers import AutoTokenizer
    from vllm.models.deepseek_v41.common.engram import build_compressed_token_map

    mapped, size = build_compressed_token_map(AutoTokenizer.from_pretrained(folders("engram")))
    assert size == model.COMPRESSED_WORDS
    assert len(mapped) == model.WORDS
    quarter = model.WORDS // 4
    assert mapped[-quarter:] == mapped[-2 * quarter : -quarter]
    assert mapped[:-quarter] == list(range(model.COMPRESSED_WORDS))


def test_the_image_word_has_the_only_id_that_vllm_takes(names, folders):
    from transformers import AutoTokenizer
    from vllm.models.deepseek_v41.common import mm_preprocess

    found = AutoTokenizer.from_pretrained(folders("vision"))
    mm_preprocess.validate_image_sentinel_ids(found)
    assert found.convert_tokens_to_ids(mm_preprocess.IMAGE_PLACEHOLDER) == model.IMAGE_TOKEN
    assert len(found) == model.IMAGE_WORDS


def _image_positions(side):
    """A start, an end, and for each row of 3 x 3 patches of 14 pixels one more at its end."""
    cells = math.ceil(math.ceil(side / model.PATCH) / model.DOWNSAMPLE)
    return cells * (cells + 1) + 2


@pytest.fixture(scope="module")
def renderer(configured):
    from vllm.renderers import renderer_from_config

    made = renderer_from_config(configured("vision"))
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def asked():
    """What the scenario ``image`` asks."""
    found = []

    class Engine:
        forget = staticmethod(lambda: None)
        run = staticmethod(lambda _, requests: found.extend(requests))

    scenarios.image(Engine)
    return found


@pytest.mark.parametrize("number", range(3))
def test_vllm_expands_the_images_of_the_scenario(renderer, asked, number):
    request = asked[number]
    prompt = {
        "prompt_token_ids": list(request.prompt),
        "multi_modal_data": {"image": [_picture(side) for side in request.images]},
    }
    (made,) = renderer.render_cmpl(renderer.render_prompts([prompt]))
    sides = iter(request.images)
    expected = []
    for token in request.prompt:
        count = _image_positions(next(sides)) if token == model.IMAGE_TOKEN else 1
        expected += [token] * count
    assert list(made["prompt_token_ids"]) == expected
    assert len(made["mm_placeholders"]["image"]) == len(request.images)
    most = model.config("vision")["vision_config"]["max_image_tokens"]
    assert all(_image_positions(side) <= most for side in request.images)
