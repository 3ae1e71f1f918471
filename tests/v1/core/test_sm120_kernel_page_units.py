# SPDX-License-Identifier: Apache-2.0
"""The planner's rule on hand-made specs: what it lays out, what it leaves alone."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def units(platform):
    from vllm.v1.core import sm120_kernel_page_units

    return sm120_kernel_page_units


@pytest.fixture
def interface(platform):
    from vllm.v1 import kv_cache_interface

    return kv_cache_interface


def config(layout="BLHNC"):
    from vllm.v1.kv_cache_interface import KVCacheLayout

    resolved = KVCacheLayout[layout]
    cache = SimpleNamespace(get_resolved_kv_cache_layout=lambda: resolved)
    return SimpleNamespace(cache_config=cache)


@pytest.fixture
def spec(interface):
    """An MLA spec of records of ``size`` B that opts in with ``page`` tokens."""

    def make(size, block=128, page=64, alignment=576, **more):
        return interface.MLAAttentionSpec(
            block_size=block,
            num_kv_heads=1,
            head_size=size,
            dtype=torch.uint8,
            state_content_bytes=size,
            alignment=alignment,
            kernel_page_tokens=page,
            **more,
        )

    return make


@pytest.fixture
def group(interface):
    def make(specs):
        merged = interface.UniformTypeKVCacheSpecs.from_specs(specs)
        return interface.KVCacheGroupSpec(list(specs), merged)

    return make


def laid_out(units, group):
    [found] = units.lay_out_in_kernel_page_units([group], config())
    return found


def by_spec(group):
    out = {}
    for name, spec in group.kv_cache_spec.kv_cache_specs.items():
        out.setdefault(spec, []).append(name)
    return out


def test_two_sizes(units, spec, group):
    """A unit is one page of each size; a layer with two pages has two units in a row."""
    found = laid_out(units, group({"a": spec(584, page=128), "b": spec(584), "i": spec(132)}))
    # 128 x 584 B is another page size than 64 x 584 B: three places in a unit.
    stride = 74880 + 37440 + 8640
    assert {s.kernel_page_stride for s in by_spec(found)} == {stride}
    layers = by_spec(found)
    offsets = {names[0]: units.unit_offset(layers, s, -1) for s, names in layers.items()}
    assert offsets == {"a": 0, "b": 74880, "i": 74880 + 37440}
    assert units.unit_block_bytes([found]) == 2 * stride
    assert {s.get_block_stride_alignment() for s in layers} == {stride}


def test_layers_of_one_size_follow_each_other(units, spec, group):
    pages = {f"l{n}": spec(584, tokens_per_state=2, page=128) for n in range(3)}
    found = laid_out(units, group(pages | {"r1": spec(584)}))
    layers = by_spec(found)
    offsets = {names[0]: units.unit_offset(layers, s, -1) for s, names in layers.items()}
    assert offsets == {"l0": 0, "r1": 3 * 37440}
    strides = {n[0]: units.unit_layer_stride(s, n, -1) for s, n in layers.items()}
    assert strides == {"l0": 37440, "r1": 37440}  # r1 alone: one unit, not two
    assert units.unit_block_bytes([found]) == 5 * 37440
    assert units.unit_padding([found], 5 * 37440 - 1) == 1
    assert units.unit_padding([found], 6 * 37440) == 0


def test_a_stage_with_some_of_the_layers(units, spec, group, interface):
    pages = {f"l{n}": spec(584, tokens_per_state=2, page=128) for n in range(3)}
    whole = laid_out(units, group(pages | {"r1": spec(584)}))
    stage = {"r1": whole.kv_cache_spec.kv_cache_specs["r1"]}
    uniform = replace(whole.kv_cache_spec, kv_cache_specs=stage)
    projected = interface.KVCacheGroupSpec(["r1"], uniform)
    assert units.unit_block_bytes([projected]) == 2 * 37440
    assert units.unit_offset(by_spec(projected), stage["r1"], -1) == 0
    assert units.unit_block_bytes([interface.KVCacheGroupSpec([], whole.kv_cache_spec)]) == 0


def test_an_alignment_asked_for_holds_in_a_unit(units, spec, group):
    """DeepGEMM's sparse logits need a block stride of whole 256 B."""
    found = laid_out(units, group({"m": spec(584), "i": spec(132, block_stride_alignment=2304)}))
    [stride] = {s.kernel_page_stride for s in by_spec(found)}
    assert stride % 2304 == 0 and stride == 46080


@pytest.mark.parametrize(
    "case", ["one did not opt in", "no page is smaller than its block", "another layout"]
)
def test_left_as_it_was(units, spec, group, case):
    specs = {"m": spec(584), "i": spec(132)}
    layout = "BLHNC"
    if case.startswith("one"):
        specs["i"] = spec(132, page=None)
    elif case.startswith("no"):
        specs = {"m": spec(584, page=128), "i": spec(132, page=128)}
    else:
        layout = "LBNHC"
    given = [group(specs)]
    found = units.lay_out_in_kernel_page_units(given, config(layout))
    assert found[0] is given[0]
    for one in specs.values():
        assert units.unit_offset({one: ["m"]}, one, 77) == 77
        assert units.unit_layer_stride(one, ["m"], 88) == 88
    assert units.unit_block_bytes(given) == 0


def test_no_layout_is_asked_for_without_an_opt_in(units, group, interface):
    """Other models may be planned before a layout is resolved."""
    plain = interface.FullAttentionSpec(
        block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
    )
    given = [interface.KVCacheGroupSpec(["a"], plain)]
    assert units.lay_out_in_kernel_page_units(given, SimpleNamespace()) is given


def test_merged_specs_keep_their_pages(spec, interface):
    one = replace(spec(584), kernel_page_stride=46080)
    merged = interface.MLAAttentionSpec.merge([one, one])
    assert merged == one and merged.kernel_page_stride == 46080
    for other in (spec(584), replace(one, kernel_page_tokens=None)):
        with pytest.raises(AssertionError, match="kernel_page"):
            interface.MLAAttentionSpec.merge([one, other])
