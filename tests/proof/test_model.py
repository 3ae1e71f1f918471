# SPDX-License-Identifier: Apache-2.0
"""The tiny model's configurations and table, against V4.1's own dimensions, a list of
names written down elsewhere, and arithmetic."""

import json
from types import SimpleNamespace

import pytest

from fork import geometry
from proof import model
from tests.v41_names import checkpoint_names

V41 = json.loads((geometry.MODEL / "config.json").read_text())

SMALLER = {
    "vocab_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "rope_scaling",
    "n_routed_experts",
    "compress_ratios",
    "kv_source_layer_ids",
    "index_source_layer_ids",
    "candidate_source_layer_id",
    "candidate_topk_blocks",
    "engram_layer_ids",
    "engram_num_embeddings",
    "engram_vocab_size",
    "engram_compressed_vocab_size",
    "num_nextn_predict_layers",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
    "dspark_n_routed_experts",
}
"""What the docstring says is small: depth, experts, vocabulary and tables."""


def _table(variant):
    return {tensor.name: tensor for part in model.tensors(variant).values() for tensor in part}


@pytest.mark.parametrize("variant", model.VARIANTS)
def test_widths_heads_and_formats_are_v41s_own(variant):
    config = model.config(variant)
    for field in ("architectures", "model_type", "quantization_config", "image_token_id"):
        assert config[field] == V41[field]
    text, real = config["text_config"], V41["text_config"]
    assert text.keys() == real.keys()
    assert {field for field in real if text[field] != real[field]} <= SMALLER


def test_an_unknown_variant_is_named():
    with pytest.raises(ValueError, match=r"'txt' is not a variant; one of text, engram"):
        model.config("txt")


def test_a_configuration_is_the_callers_own():
    model.config("text")["text_config"]["vocab_size"] = 1
    assert model.config("text")["text_config"]["vocab_size"] == model.WORDS


@pytest.mark.parametrize("variant", model.VARIANTS)
def test_names_are_those_written_down_from_the_loader(variant):
    config = model.config(variant)
    text = SimpleNamespace(**config["text_config"])
    expected = checkpoint_names(text, vision_layers=model.VISION_LAYERS)
    if not text.num_nextn_predict_layers:
        expected = {name for name in expected if not name.startswith("mtp.")}
    assert set(_table(variant)) == expected


@pytest.mark.parametrize("variant", model.VARIANTS)
def test_no_name_is_there_twice(variant):
    listed = [tensor.name for part in model.tensors(variant).values() for tensor in part]
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("variant", model.VARIANTS)
def test_every_quantized_weight_has_a_scale_for_32_columns(variant):
    table = _table(variant)
    quantized = [t for t in table.values() if t.kind in ("fp8", "fp4")]
    assert len(quantized) == sum(t.kind == "e8m0" for t in table.values())
    for weight in quantized:
        scale = table[weight.name.removesuffix(".weight") + ".scale"]
        columns = weight.shape[1] * (2 if weight.kind == "fp4" else 1)
        # An expert's and the engram's rows have scales of their own.
        rows = 1 if weight.kind == "fp4" or ".engram.embed." in weight.name else 32
        assert scale.shape == (-(-weight.shape[0] // rows), columns // 32)
        assert scale.spread == weight.spread


def test_shards_that_variants_share_are_equal():
    text = model.tensors("text")
    for variant in model.VARIANTS:
        for name, tensors in model.tensors(variant).items():
            assert text.get(name, tensors) == tensors


def test_the_engram_table_holds_every_hash():
    """24 columns, each of its own prime, the smallest above the engram's vocabulary."""
    primes, candidate = [], model.ENGRAM_WORDS
    while len(primes) < model.NGRAM_COLUMNS:
        candidate += 1
        if all(candidate % divisor for divisor in range(2, int(candidate**0.5) + 1)):
            primes.append(candidate)
    assert sum(primes) == 100_776  # what the docstring says
    assert sum(primes) <= model.ENGRAM_ROWS


def test_the_layers_cover_both_ratios_and_an_index_source_without_kv():
    text = model.config("text")["text_config"]
    ratios = text["compress_ratios"]
    assert len(ratios) == text["num_hidden_layers"] == model.LAYERS
    assert set(ratios) == {0, 1, 2}
    assert all(ratios[layer] == ratio for layer, ratio in model.KV_SOURCES.items())
    assert set(text["index_source_layer_ids"]) - set(text["kv_source_layer_ids"]) == {5}
    table = _table("text")
    gated = {n.split(".")[1] for n in table if n.endswith("compressor.wgate.weight")}
    assert gated == {"2"}


def test_the_image_token_lies_in_the_vision_vocabulary_alone():
    sizes = {v: model.config(v)["text_config"]["vocab_size"] for v in model.VARIANTS}
    assert sizes.pop("vision") > model.IMAGE_TOKEN > max(sizes.values())
