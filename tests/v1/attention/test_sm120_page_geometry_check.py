# SPDX-License-Identifier: Apache-2.0
"""The start-up check: silent where pages are right, one clear refusal where they are not."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fork import planner


@pytest.fixture
def check(platform):
    from vllm.v1.attention.backends.mla import sm120_page_geometry

    return sm120_page_geometry


@pytest.fixture
def stock_swa_page(platform, monkeypatch):
    """As if sm120_swa_page_block_size were not applied."""
    from vllm.models.deepseek_v41.nvidia import flashinfer_sparse

    monkeypatch.setattr(flashinfer_sparse.DeepseekV4FlashInferSM120Attention, "swa_block_size", 32)


@pytest.fixture
def stock_compressed_pages(platform, monkeypatch):
    """As if sm120_compressed_page_states were not applied."""
    from vllm.models.deepseek_v41 import attention
    from vllm.models.deepseek_v41.nvidia import flashinfer_sparse
    from vllm.v1.attention.backends.mla import indexer

    monkeypatch.setattr(attention, "compressed_block_size", lambda cache, ratio: cache.block_size)
    for module in (indexer, flashinfer_sparse):
        monkeypatch.setattr(module, "compressed_kernel_block_sizes", lambda stock, spec=None: [128])


def test_right_pages_pass(engine_config, check):
    """40 windows, 4 main and 4 indexer caches, none of them wrong."""
    caches = planner.planned_caches_module().planned_caches(engine_config())
    assert len(caches) == 48
    assert [cache.name for cache in caches if check.page_problem(cache.kernel_spec)] == []


def test_wrong_window_stops_the_configuration(engine_config, check, stock_swa_page):
    """While the configuration is validated: no engine, no weights."""
    with pytest.raises(check.PageGeometryError) as caught:
        engine_config()
    message = str(caught.value)
    assert "model.layers.0.attn.swa_cache" in message and "(40 caches)" in message
    assert "found 32 tokens a page, need 64" in message
    assert "sm120_swa_page_block_size" in message
    assert "compressed" not in message.split("sm120_swa_page_block_size")[0]


def test_wrong_states_stop_the_configuration(engine_config, check, stock_compressed_pages):
    with pytest.raises(check.PageGeometryError) as caught:
        engine_config()
    message = str(caught.value)
    assert "model.layers.20.attn, model.layers.20.attn.indexer.k_cache" in message
    assert "MLAAttentionSpec" in message
    assert "found 128 states a page, need 64" in message
    assert "sm120_compressed_page_states" in message
    assert "layers.2." not in message  # ratio 2 has 64 states


@pytest.mark.parametrize("version", [(9, 0), (10, 0), (None,)], ids=str)
def test_other_platforms_are_not_checked(
    engine_config, check, capability, stock_swa_page, stock_compressed_pages, version
):
    model = SimpleNamespace(architectures=["DeepseekV41ForCausalLM"])
    capability(*version)
    assert not check.applies_to(SimpleNamespace(model_config=model))
    check.check_planned_pages(SimpleNamespace(model_config=model))


@pytest.mark.parametrize("architectures", [["DeepseekV4ForCausalLM"], ["LlamaForCausalLM"], None])
def test_other_models_are_not_checked(check, capability, architectures):
    capability(12, 0)
    config = SimpleNamespace(model_config=SimpleNamespace(architectures=architectures))
    assert not check.applies_to(config)
    assert not check.applies_to(SimpleNamespace(model_config=None))


@pytest.fixture
def plan(engine_config):
    config = engine_config()
    return config, planner.planned_caches_module()


def test_last_check_sees_what_was_chosen(plan, check, monkeypatch):
    """The first check passed; the block is changed behind its back before the KV cache
    is allocated: the metadata builders' check stops both runners."""
    from vllm.models.deepseek_v41.nvidia import flashinfer_sparse

    config, module = plan
    cls = flashinfer_sparse.DeepseekV4FlashInferSM120Attention
    before = module.planned_caches(config)
    monkeypatch.setattr(module, "planned_caches", lambda _: before)
    monkeypatch.setattr(cls, "swa_block_size", 32)
    with pytest.raises(check.PageGeometryError) as caught:
        planner.Plan(config, module)
    message = str(caught.value)
    assert "chosen for the KV cache" in message
    assert "found 32 tokens a page, need 64" in message
    assert ".attn.swa_cache" in message


def test_both_runners_pass_the_last_check(platform):
    """Both call create_metadata_builders, which checks first, before they allocate."""
    from vllm.v1.worker import utils
    from vllm.v1.worker.gpu import attn_utils

    body = inspect.getsource(utils.AttentionGroup.create_metadata_builders)
    assert body.index("check_kernel_pages(") < body.index("get_builder_cls()")
    assert "create_metadata_builders(" in inspect.getsource(attn_utils.init_attn_backend)
    # The first runner cannot be imported without a GPU.
    path = Path(inspect.getsourcefile(attn_utils)).parent.parent / "gpu_model_runner.py"
    nodes = ast.walk(ast.parse(path.read_text()))
    functions = {n.name: ast.unparse(n) for n in nodes if isinstance(n, ast.FunctionDef)}
    assert "create_metadata_builders(" in functions["initialize_metadata_builders"]
    start = functions["initialize_kv_cache"]
    checked = start.index("initialize_metadata_builders(")
    assert checked < start.index("initialize_kv_cache_tensors(")


def _specs(block=64, ratio=1):
    import torch
    from vllm.v1.kv_cache_interface import (
        CircularBufferSpec,
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
    )

    common = {"block_size": block, "num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8}
    return {
        "compressed": MLAAttentionSpec(**common, tokens_per_state=ratio),
        "window": SlidingWindowMLASpec(**common, sliding_window=128),
        "ring": CircularBufferSpec(**common, head_size_v=0),
        "unknown": FullAttentionSpec(**common),
    }


@pytest.mark.parametrize(
    "kind, block, ratio, wrong",
    [
        ("compressed", 64, 1, None),
        ("compressed", 128, 2, None),
        ("compressed", 128, 1, "found 128 states a page, need 64"),
        ("compressed", 64, 2, "found 32 states a page, need 64"),
        ("compressed", 256, 4, None),
        ("window", 64, 1, None),
        ("window", 32, 1, "found 32 tokens a page, need 64"),
        ("window", 128, 1, "found 128 tokens a page, need 64"),
        ("ring", 8, 1, None),
        ("unknown", 64, 1, "does not know"),
    ],
)
def test_rule(check, kind, block, ratio, wrong):
    problem = check.page_problem(_specs(block, ratio)[kind])
    assert (problem is None) == (wrong is None)
    assert wrong is None or wrong in problem


def test_foreign_backends_are_left_alone(engine_config, check):
    """A draft model with attention of its own is none of the check's business."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    config = engine_config()
    check.check_kernel_pages(config, TritonAttentionBackend, ["draft.0"], _specs()["unknown"])


def test_python_o_does_not_switch_it_off(check):
    """No assert in the check; and it refuses under -O."""
    for module in (check, planner.planned_caches_module()):
        tree = ast.parse(inspect.getsource(module))
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(tree))
    code = (
        "from vllm.v1.attention.backends.mla import sm120_page_geometry as check\n"
        "assert False, 'asserts are on'\n"
        "try:\n"
        "    check._refuse([('layers.0', 'found 32')], 'now')\n"
        "except check.PageGeometryError as error:\n"
        "    print('refused:', error)\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True)
    assert "refused: DeepSeek-V4.1 on SM12x" in done.stdout, done.stderr[-2000:]
