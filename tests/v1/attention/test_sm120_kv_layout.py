# SPDX-License-Identifier: Apache-2.0
"""Kernel-page units for DeepSeek-V4.1: what the wheel plans, and what it refuses.

Expected figures are the facts of the measured prototype, not this code's output.
"""

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest

from fork import planner

UNIT = 37440 + 8640
"""One 64-state page of 584 B records, and one of 132 B index keys, each padded to 576."""


@pytest.fixture
def plan(engine_config):
    def make(*more):
        return planner.Plan(engine_config(*more), planner.planned_caches_module())

    return make


DRAFT = ("--speculative-config", '{"method": "dspark", "num_speculative_tokens": 5}')


@pytest.mark.parametrize(
    "more, groups, stride, step, hit",
    [
        ((), 9, 230400, 128, 896),
        (("--block-size", 128), 9, 230400, 128, 896),
        (("--block-size", 256), 6, 460800, 256, 768),
        (DRAFT, 10, 230400, 128, 896),
    ],
    ids=["default", "128", "256", "three draft layers, k = 5"],
)
def test_stock_memory_with_64_states(plan, kv_plan, more, groups, stride, step, hit):
    found = plan(*more)
    assert len(found.kv_cache_config.kv_cache_groups) == groups
    assert found.block_stride == stride
    assert found.bytes_per_token() == 1800
    assert (found.prefix_hit_tokens(), found.hit(1000, 1003)) == (step, hit)
    block = found.config.cache_config.block_size
    for name, spec in found.specs.items():
        kind = kv_plan.kind_of(found.layers[name])
        if kind is None:
            continue
        view, builder = found.views[name], found.builder(name)
        assert view.shape[-2] == builder.kv_cache_spec.num_states == 64
        pages = 1 if kind == "swa" else block // (64 * spec.tokens_per_state)
        assert view.stride(0) == (UNIT if pages > 1 else stride)
        assert view.storage_offset() % 576 == view.stride(0) % 576 == 0
        last = (64 - 1) * stride // view.stride(0) + pages  # of sm120_kv_plan's 64 blocks
        assert view.shape[0] == last


def pages_of_groups(found, kv_plan):
    """Per KV cache group, first and last byte of each page in a block."""
    for group, attn_groups in zip(found.kv_cache_config.kv_cache_groups, found.groups, strict=True):
        by_name = {n: g for g in attn_groups for n in g.layer_names}
        spans = []
        for name in group.layer_names:
            view, spec = found.views[name], by_name[name].kv_cache_spec
            count = spec.num_states // view.shape[-2]
            size = view.element_size()
            for page in range(count):
                start = (view.storage_offset() + page * view.stride(0)) * size
                spans.append((start, start + view[0].numel() * size))
        yield sorted(spans)


@pytest.mark.parametrize("more", [(), ("--block-size", 256), DRAFT], ids=["128", "256", "draft"])
def test_no_page_is_where_another_is(plan, kv_plan, more):
    found = plan(*more)
    for spans in pages_of_groups(found, kv_plan):
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
        assert spans[-1][1] <= found.block_stride


@pytest.mark.parametrize("block_size", [64, 96, 192, 100])
def test_a_block_without_whole_pages_is_refused(engine_config, block_size):
    from vllm.v1.attention.backends.mla.sm120_page_geometry import PageGeometryError

    with pytest.raises(PageGeometryError) as caught:
        engine_config("--block-size", block_size)
    [line] = str(caught.value).splitlines()
    assert f"--block-size {block_size}" in line and "multiple of 128" in line


def test_pipeline_stages(plan):
    """Whole units for each stage; the rounding of a stage with few KV sources is what
    pipeline parallelism costs here."""
    from vllm.v1.core import kv_cache_planning as planning

    found = plan()
    stages = [
        {n: s for n, s in found.specs.items() if (int(n.split(".")[2]) < 20) == (stage == 0)}
        for stage in (0, 1)
    ]
    groups = planning.get_global_kv_cache_groups(found.config, stages)
    memory = [4 << 30] * 2
    configs = planning.get_kv_cache_configs(found.config, stages, memory, groups)
    assert configs[0].num_blocks == configs[1].num_blocks
    strides = [c.kv_cache_tensors[0].size // c.num_blocks for c in configs]
    # Layers 2, 8 and 14: three units. Layer 20: two, where the seven groups of windows
    # have up to three layers on each stage (112320 B), so three, too.
    assert strides == [3 * UNIT, 3 * UNIT]
    for config in configs:
        for tensor in config.kv_cache_tensors:
            assert tensor.block_stride == config.kv_cache_tensors[0].block_stride
            # A layer as far from the next as blocks are would be taken for unpacked.
            if "swa_cache" not in tensor.layers[0]:
                assert tensor.layer_stride < tensor.block_stride


def test_other_platforms_do_not_opt_in(engine_config, capability):
    from vllm.models.deepseek_v41 import sparse_mla
    from vllm.v1.attention.backends.mla import indexer

    config = engine_config()
    caches = planner.planned_caches_module().planned_caches(config)
    specs = [c.spec for c in caches if c.kind != "swa"]
    assert all(spec.kernel_page_tokens for spec in specs)
    for version in ((9, 0), (10, 0), (None,)):
        capability(*version)
        for backend in (sparse_mla.DeepseekV4FlashMLABackend, indexer.DeepseekV41IndexerBackend):
            for spec in specs:
                assert backend.customize_spec(spec) is spec


def test_rocm_of_the_same_number_does_not_opt_in(engine_config, capability, monkeypatch):
    """gfx1201 answers 12.0."""
    from vllm.models.deepseek_v41 import sparse_mla
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla import sm120_compressed_pages, sm120_page_geometry

    config = engine_config()
    caches = planner.planned_caches_module().planned_caches(config)
    specs = [c.spec for c in caches if c.kind != "swa"]
    capability(12, 0)
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: True)
    for spec in specs:
        assert sparse_mla.DeepseekV4FlashMLABackend.customize_spec(spec) is spec
    assert sm120_compressed_pages.compressed_kernel_block_sizes([128]) == [128]
    assert not sm120_page_geometry.applies_to(config)


def test_a_backend_that_takes_multiples_is_left_alone(engine_config):
    """vLLM may choose another kernel page for it than the largest that it names."""
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.mla import sm120_kv_layout

    config = engine_config()
    [spec, *_] = [
        c.spec for c in planner.planned_caches_module().planned_caches(config) if c.kind != "swa"
    ]
    for sizes, opted_in in (([64, 128], True), ([64, MultipleOf(128)], False)):
        backend = SimpleNamespace(get_supported_kernel_block_sizes=lambda spec, s=sizes: s)
        assert (sm120_kv_layout.with_kernel_pages(backend, spec) is not spec) == opted_in


class TestEnvironment:
    def test_in_vllms_own_table(self, platform):
        from vllm import envs

        assert envs.VLLM_SM120_KV_LAYOUT == "kernel-page-units"
        assert "VLLM_SM120_KV_LAYOUT" in envs.environment_variables
        assert "VLLM_SM120_KV_LAYOUT" in envs.__dir__()

    def test_a_wrong_value_is_refused_with_the_right_ones(self, platform, monkeypatch):
        from vllm import envs

        monkeypatch.setenv("VLLM_SM120_KV_LAYOUT", "spec_blocks")
        with pytest.raises(ValueError, match="'kernel-page-units', 'spec-blocks'"):
            _ = envs.VLLM_SM120_KV_LAYOUT


class TestConnectors:
    @pytest.fixture
    def check(self, capability):
        from vllm.v1.attention.backends.mla import sm120_kv_layout

        capability(12, 0)
        return sm120_kv_layout

    @staticmethod
    def config(connector, architecture="DeepseekV41ForCausalLM", **more):
        more = {"kv_connector_extra_config": {}, "kv_connector_module_path": None} | more
        return SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector=connector, **more),
            model_config=SimpleNamespace(architectures=[architecture]),
        )

    def test_every_connector_of_vllm_is_decided(self, check):
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        known = sorted(KVConnectorFactory._registry)
        assert set(check.WHOLE_BLOCK_CONNECTORS) < set(known)
        for name in known:
            if name == "MultiConnector":
                continue
            if name in check.WHOLE_BLOCK_CONNECTORS:
                check.check_kv_connectors(self.config(name))
                continue
            with pytest.raises(check.KVConnectorError) as caught:
                check.check_kv_connectors(self.config(name))
            assert name in str(caught.value)
            assert "VLLM_SM120_KV_LAYOUT=spec-blocks" in str(caught.value)

    def test_children_of_a_multi_connector(self, check):
        def multi(*names):
            children = {"connectors": [{"kv_connector": n} for n in names]}
            return self.config("MultiConnector", kv_connector_extra_config=children)

        check.check_kv_connectors(multi("OffloadingConnector", "SimpleCPUOffloadConnector"))
        with pytest.raises(check.KVConnectorError, match="KV connector NixlConnector cannot"):
            check.check_kv_connectors(multi("OffloadingConnector", "NixlConnector"))

    def test_a_child_of_ones_own_is_refused_whatever_its_name(self, check):
        child = {"kv_connector": "OffloadingConnector", "kv_connector_module_path": "mine"}
        config = self.config("MultiConnector", kv_connector_extra_config={"connectors": [child]})
        with pytest.raises(check.KVConnectorError, match="OffloadingConnector"):
            check.check_kv_connectors(config)

    def test_a_class_of_ones_own_is_refused_whatever_its_name(self, check):
        config = self.config("OffloadingConnector", kv_connector_module_path="mine")
        with pytest.raises(check.KVConnectorError):
            check.check_kv_connectors(config)

    def test_not_in_spec_blocks_elsewhere_or_for_others(self, check, capability, monkeypatch):
        nixl = self.config("NixlConnector")
        check.check_kv_connectors(self.config("NixlConnector", "LlamaForCausalLM"))
        check.check_kv_connectors(self.config(None))
        capability(9, 0)
        check.check_kv_connectors(nixl)
        capability(12, 0)
        monkeypatch.setenv("VLLM_SM120_KV_LAYOUT", "spec-blocks")
        check.check_kv_connectors(nixl)

    def test_while_the_configuration_is_validated(self, engine_config, check):
        """No engine, no weights."""
        wanted = {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}
        with pytest.raises(check.KVConnectorError, match="MooncakeConnector"):
            engine_config("--kv-transfer-config", json.dumps(wanted))
