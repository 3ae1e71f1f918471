# SPDX-License-Identifier: Apache-2.0
"""64 states in every compressed page on capability family 120; elsewhere as upstream.

The layout here is ``spec-blocks``; test_sm120_kv_layout.py has the other.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from fork import planner

OTHERS = [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (None,)]
SM12X = [(12, 0), (12, 1)]
SPECS = [None, SimpleNamespace(tokens_per_state=1), SimpleNamespace(tokens_per_state=2)]

# Without a spec both blocks, for vLLM 0.30 and 0.31; with one, 64 x its ratio.
DECLARED = [[64, 128], [64], [128]]


@pytest.fixture(autouse=True)
def spec_blocks(monkeypatch):
    monkeypatch.setenv("VLLM_SM120_KV_LAYOUT", "spec-blocks")


@pytest.fixture
def backends(platform):
    from vllm.models.deepseek_v41 import sparse_mla
    from vllm.models.deepseek_v41.nvidia import flashinfer_sparse
    from vllm.v1.attention.backends.mla import indexer

    return {
        "main": sparse_mla.DeepseekV4SparseMLABackend,
        "FlashMLA": sparse_mla.DeepseekV4FlashMLABackend,
        "FlashInfer": flashinfer_sparse.DeepseekV4FlashInferMLASparseBackend,
        "indexer": indexer.DeepseekV41IndexerBackend,
        "mega": sparse_mla.FlashMLAMegaAttnBackend,
        "V4 indexer": indexer.DeepseekV4IndexerBackend,
        "V3.2 indexer": indexer.DeepseekV32IndexerBackend,
    }


def _declared(backends, spec):
    return {n: b.get_supported_kernel_block_sizes(spec) for n, b in backends.items()}


@pytest.mark.parametrize("version", OTHERS, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=["none", "ratio 1", "ratio 2"])
def test_other_platforms_declare_what_they_did(backends, capability, version, spec):
    capability(*version)
    main = 64 if version[0] == 9 else 128
    assert _declared(backends, spec) == {
        "main": [main],
        "FlashMLA": [main],
        "FlashInfer": [128],
        "indexer": [main],
        "mega": [128],
        "V4 indexer": [256],
        "V3.2 indexer": [64],
    }


@pytest.mark.parametrize("version", SM12X, ids=str)
@pytest.mark.parametrize("spec, sizes", list(zip(SPECS, DECLARED, strict=True)))
def test_declared_on_sm12x(backends, capability, version, spec, sizes):
    capability(*version)
    declared = _declared(backends, spec)
    changed = {n: declared.pop(n) for n in ("main", "FlashMLA", "FlashInfer", "indexer")}
    assert set(map(tuple, changed.values())) == {tuple(sizes)}
    assert declared == {"mega": [128], "V4 indexer": [256], "V3.2 indexer": [64]}


def _spec_blocks(kv_plan, config):
    """Blocks that the built layers ask for, by kind and ratio."""
    kv_plan.build_layers(config)
    found = {}
    for layer in config.compilation_config.static_forward_context.values():
        kind = kv_plan.kind_of(layer)
        spec = layer.get_kv_cache_spec(config)
        if kind in ("main", "indexer") and spec is not None:
            found.setdefault((kind, spec.tokens_per_state), set()).add(spec.block_size)
    return found


@pytest.mark.parametrize("version", [(9, 0), (10, 0), (None,)], ids=str)
@pytest.mark.parametrize("block_size", [64, 128, 256])
def test_other_platforms_keep_the_block_size_given(engine_config, capability, version, block_size):
    """The hook gives back the cache configuration's own block size."""
    from vllm.v1.attention.backends.mla.sm120_compressed_pages import compressed_block_size

    config = engine_config("--block-size", block_size)
    capability(*version)
    for ratio in (1, 2):
        assert compressed_block_size(config.cache_config, ratio) == block_size


@pytest.mark.parametrize("block_size", [None, 64, 128, 192, 256, 1024])
def test_blocks_asked_for_on_sm12x(engine_config, kv_plan, block_size):
    more = ("--block-size", block_size) if block_size else ()
    assert _spec_blocks(kv_plan, engine_config(*more)) == {
        ("main", 1): {64},
        ("main", 2): {128},
        ("indexer", 1): {64},
        ("indexer", 2): {128},
    }


@pytest.mark.parametrize("block_size", [16, 32, 96, 100])
def test_block_size_that_gives_no_whole_page_is_refused(engine_config, block_size):
    """One clear line while the configuration is validated, not a dump."""
    from vllm.v1.attention.backends.mla.sm120_page_geometry import PageGeometryError

    with pytest.raises(PageGeometryError) as caught:
        engine_config("--block-size", block_size)
    message = str(caught.value)
    assert "\n" not in message
    assert f"--block-size {block_size}" in message
    assert "multiple of 64" in message and "--block-size 128" in message


@pytest.fixture
def plan(engine_config):
    def make(*more):
        return planner.Plan(engine_config(*more), planner.planned_caches_module())

    return make


@pytest.mark.parametrize("more", [(), ("--block-size", 64), ("--block-size", 256)], ids=str)
def test_allocated_pages(plan, kv_plan, more):
    """Through vLLM's planner, both its metadata builders and its allocation."""
    found = plan(*more)
    pages = {}
    for name, spec in found.specs.items():
        kind = kv_plan.kind_of(found.layers[name])
        if kind:
            # [blocks, heads, states, bytes a state]
            pages.setdefault((kind, spec.tokens_per_state), set()).add(found.views[name].shape[-2])
    assert pages == {
        ("swa", 1): {64},
        ("main", 1): {64},
        ("main", 2): {64},
        ("indexer", 1): {64},
        ("indexer", 2): {64},
    }
    # One stride, 576-aligned for the record's TMA stride; pages inside it.
    assert found.block_stride % 576 == 0
    assert found.block_stride == 3 * (37440 + 8640)


def test_pages_of_a_block_do_not_overlap(plan):
    """Every group's pages lie side by side inside the block, byte for byte."""
    found = plan()
    for group in found.kv_cache_config.kv_cache_groups:
        taken = []
        for name in group.layer_names:
            view = found.views[name]
            start = view.storage_offset() * view.element_size()
            size = view[0].numel() * view.element_size()
            assert view.stride(0) * view.element_size() == found.block_stride
            taken.append((start, start + size))
        taken.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(taken))
        assert taken[-1][1] <= found.block_stride


def test_prefix_hits_and_memory(plan):
    """As stock's hits, at way A's price: 3240 B a token of context against stock's 1800."""
    found = plan()
    assert found.prefix_hit_tokens() == 128
    assert found.hit(1000, 1003) == 896
    assert found.hit(1024, 2048) == 1024
    assert found.hit(100, 200) == 0
    # Ratio 1 takes two blocks for 128 tokens, ratio 2 one: 3 x 138240 B for 128 tokens.
    assert found.bytes_per_token() == 3 * 138240 / 128


def test_draft_layers_get_the_same_pages(engine_config, kv_plan):
    """DSpark's three draft layers are sliding-window only, with the same page."""
    speculative = '{"method": "dspark", "num_speculative_tokens": 5}'
    try:
        config = engine_config("--speculative-config", speculative)
    except Exception as error:
        pytest.skip(f"vLLM makes no DSpark configuration from a config.json alone: {error}")
    kv_plan.build_layers(config)
    layers = config.compilation_config.static_forward_context
    assert {layers[f"model.layers.{n}.attn.swa_cache"].block_size for n in (40, 41, 42)} == {64}
