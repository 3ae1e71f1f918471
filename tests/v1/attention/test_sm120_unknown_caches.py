# SPDX-License-Identifier: Apache-2.0
"""What upstream may add one day must not pass for what the fork knows."""

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def plan(platform):
    """A KVPlan of one cache, judged: class, spec, bytes of a state."""
    from vllm.models.deepseek_v41.nvidia.sm120_kv_plan import KVPlan

    def judge(layer, spec, state_bytes):
        made = KVPlan.__new__(KVPlan)
        made.layers, made.specs = {"cache": layer}, {"cache": spec}
        made.views = {"cache": torch.empty(1, 1, 64, state_bytes, dtype=torch.uint8)}
        made._refuse_unknown()

    return judge


def bare(cls):
    """An instance of a layer's class without its weights."""
    made = type("Made", (cls,), dict.fromkeys(getattr(cls, "__abstractmethods__", ())))
    return made.__new__(made)


@pytest.mark.parametrize(
    ("name", "state_bytes"),
    [
        ("DeepseekV4SWACache", 584),
        ("DeepseekV4Attention", 584),
        ("DeepseekV4IndexerCache", 132),
        ("DeepseekV4IndexerCache", 68),
    ],
)
def test_known_caches_and_records(plan, name, state_bytes):
    from vllm.models.deepseek_v41 import attention

    layer = bare(getattr(attention, name))
    plan(layer, None, state_bytes)
    with pytest.raises(RuntimeError, match=r"cache: states of 600 B are a record unknown"):
        plan(layer, None, 600)


def test_a_ring_is_known_and_another_class_is_not(plan):
    from vllm.v1.kv_cache_interface import CircularBufferSpec

    plan(SimpleNamespace(), bare(CircularBufferSpec), 4096)
    with pytest.raises(RuntimeError, match=r"cache: SimpleNamespace .* kind of cache unknown"):
        plan(SimpleNamespace(), None, 584)


class Pages:
    """Sliding-window pages as releases and proposals write them."""

    swa_block_size = 96

    def literal(self):
        DeepseekV4SWACache(block_size=32)  # noqa: F821

    def attribute(self):
        DeepseekV4SWACache(block_size=self.swa_block_size)  # noqa: F821

    def expression(self):
        DeepseekV4SWACache(  # noqa: F821
            block_size=64 if current_platform.is_device_capability_family(120) else 32  # noqa: F821
        )

    def local(self):
        size = 64
        DeepseekV4SWACache(block_size=size)  # noqa: F821

    def other(self):
        OtherCache(block_size=32)  # noqa: F821


@pytest.mark.parametrize(
    ("form", "tokens"),
    [("literal", 32), ("attribute", 96), ("expression", 64), ("local", None), ("other", None)],
)
def test_the_windows_page_is_read_or_refused(platform, monkeypatch, form, tokens):
    from vllm.models.deepseek_v41 import attention
    from vllm.models.deepseek_v41.nvidia import sm120_planned_caches

    monkeypatch.setattr(attention.DeepseekV4Attention, "__init__", getattr(Pages, form))
    if tokens is None:
        with pytest.raises(RuntimeError, match="cannot be read"):
            sm120_planned_caches.swa_block_size(Pages)
    else:
        assert sm120_planned_caches.swa_block_size(Pages) == tokens
