# SPDX-License-Identifier: Apache-2.0
"""The sliding-window page: 64 tokens on the SM120 class, 32 on every other."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.fixture
def classes(platform):
    from vllm.models.deepseek_v41 import attention
    from vllm.models.deepseek_v41.nvidia import flash_mla_mega_attn, flashinfer_sparse, flashmla

    return {
        "base": attention.DeepseekV4Attention,
        "FlashMLA": flashmla.DeepseekV4FlashMLAAttention,
        "mega": flash_mla_mega_attn.DeepseekV4MegaAttnAttention,
        "FlashInfer SM100": flashinfer_sparse.DeepseekV4FlashInferMLAAttention,
        "FlashInfer SM120": flashinfer_sparse.DeepseekV4FlashInferSM120Attention,
    }


def test_class_attribute(classes):
    assert {name: cls.swa_block_size for name, cls in classes.items()} == {
        "base": 32,
        "FlashMLA": 32,
        "mega": 32,
        "FlashInfer SM100": 32,
        "FlashInfer SM120": 64,
    }


@pytest.mark.parametrize("module", ["amd.rocm"])
def test_classes_that_cannot_be_imported_here_keep_the_default(platform, module):
    """ROCm's module needs a driver to import: its source sets no page of its own."""
    root = Path(find_spec("vllm.models.deepseek_v41").origin).parent
    tree = ast.parse((root / (module.replace(".", "/") + ".py")).read_text())
    classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    assert any("DeepseekV4Attention" in map(ast.unparse, c.bases) for c in classes)
    assert "swa_block_size" not in ast.unparse(tree)


@pytest.mark.parametrize("page", [32, 64, 96])
def test_built_layer_has_its_class_page(engine_config, kv_plan, classes, monkeypatch, page):
    """The real layer, built: its cache has the class's page."""
    config = engine_config()
    monkeypatch.setattr(classes["FlashInfer SM120"], "swa_block_size", page)
    kv_plan.build_layers(config)
    layers = config.compilation_config.static_forward_context
    pages = {n: x.block_size for n, x in layers.items() if n.endswith(".swa_cache")}
    assert len(pages) == 40
    assert set(pages.values()) == {page}
    assert layers["model.layers.0.attn.swa_cache"].get_kv_cache_spec(config).block_size == page
