# SPDX-License-Identifier: Apache-2.0
"""The check of where pages lie in a block: right ones pass, each kind of fault is named."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fork import planner

UNIT, BLOCK = 46080, 230400


@pytest.fixture
def places(platform):
    from vllm.models.deepseek_v41.nvidia import sm120_block_places as module

    def main(offset, pages):
        return module.Place(offset, 64 * 584, UNIT if pages > 1 else BLOCK, pages, 576)

    def index(offset, pages):
        return module.Place(offset, 64 * 132, UNIT if pages > 1 else BLOCK, pages, 576)

    right = {f"m{n}": main(n * UNIT, 1) for n in range(3)} | {"m20": main(3 * UNIT, 2)}
    right |= {f"i{n}": index(n * UNIT + 37440, 1) for n in range(3)}
    right |= {"i20": index(3 * UNIT + 37440, 2)}
    return SimpleNamespace(module=module, right=right)


def test_units_are_right(places):
    assert places.module.place_problems(places.right, BLOCK) == []


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("m20", {"stride": UNIT + 576}, "does not divide"),
        ("m20", {"offset": 3 * UNIT + 8}, "offset 138248 B is no multiple of 576"),
        ("i0", {"offset": 37000}, "pages overlap"),
        ("m20", {"offset": 2 * UNIT}, "m2 and m20: pages overlap at byte 92160"),
        ("i20", {"offset": 4 * UNIT + 37440}, "leaves the block"),
    ],
)
def test_each_fault_is_named(places, name, change, words):
    wrong = places.right | {name: replace(places.right[name], **change)}
    problems = places.module.place_problems(wrong, BLOCK)
    assert any(words in problem for problem in problems), problems


def test_place_of_an_allocated_view(places):
    raw = torch.zeros(4 * BLOCK, dtype=torch.uint8)
    view = raw.as_strided((3 * 5 + 2, 1, 64, 584), (UNIT, 584, 584, 1), 3 * UNIT)
    spec = SimpleNamespace(num_states=128, alignment=576)
    assert places.module.place_of(view, spec) == places.right["m20"]


def test_the_start_up_check_stops_wrong_places(engine_config, monkeypatch):
    """Both runners bind their caches through the function that checks."""
    from vllm.v1.attention.backends.mla import sm120_page_geometry as check
    from vllm.v1.core import kv_cache_planning, sm120_kernel_page_units

    right = sm120_kernel_page_units.unit_offset

    def one_unit_early(layers, spec, offset):
        found = right(layers, spec, offset)
        stride = getattr(spec, "kernel_page_stride", None)
        return found - stride if stride and spec.tokens_per_state == 1 else found

    monkeypatch.setattr(kv_cache_planning, "unit_offset", one_unit_early)
    with pytest.raises(check.PageGeometryError) as caught:
        planner.Plan(engine_config(), planner.planned_caches_module())
    message = str(caught.value)
    assert "where the KV cache was allocated" in message and "pages overlap" in message
    assert "model.layers.20.attn" in message


def _strided(cache, blocks, stride):
    """A cache by blocks that are ``stride`` bytes apart."""
    step = stride // cache.element_size()
    return cache.as_strided((blocks, *cache.shape[1:]), (step, *cache.stride()[1:]))


@pytest.fixture
def allocated(engine_config):
    """What a runner hands to the check: caches by block, views of kernels, groups."""
    found = planner.Plan(engine_config(), planner.planned_caches_module())
    groups = [group for groups in found.groups for group in groups]
    blocks = found.kv_cache_config.num_blocks
    raw = {name: _strided(view, blocks, found.block_stride) for name, view in found.views.items()}
    return SimpleNamespace(views=found.views, raw=raw, groups=groups, stride=found.block_stride)


@pytest.fixture
def checked(platform):
    from vllm.v1.attention.backends.mla import sm120_page_geometry as check

    return check


def test_what_is_allocated_passes(allocated, checked):
    assert checked.checked_places(allocated.views, allocated.raw, allocated.groups)


@pytest.mark.parametrize("ids", [0, 1, 4, 7])
def test_page_ids_that_do_not_reach_the_next_block_are_named(allocated, checked, ids, monkeypatch):
    name = "model.layers.20.attn"
    [group] = [g for g in allocated.groups if name in g.layer_names]
    assert group.kernel_block_stride == 5
    monkeypatch.setattr(group, "kernel_block_stride", ids)
    with pytest.raises(checked.PageGeometryError, match="page ids apart") as caught:
        checked.checked_places(allocated.views, allocated.raw, allocated.groups)
    assert name in str(caught.value)


@pytest.mark.parametrize("one", [0, -1])
def test_blocks_of_two_sizes_are_named(allocated, checked, one):
    name = allocated.groups[one].layer_names[0]
    wrong = _strided(allocated.raw[name], 2, allocated.stride + 576)
    with pytest.raises(checked.PageGeometryError, match="blocks of different sizes"):
        checked.checked_places(allocated.views, allocated.raw | {name: wrong}, allocated.groups)
