# SPDX-License-Identifier: Apache-2.0
"""Views and slots of kernel pages, on hand-made caches."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from fork import planner

SLOTS = """
import json, sys, torch
from types import SimpleNamespace
from fork import planner
planner.set_up_platform((12, 0))
from vllm.v1.worker.sm120_kernel_pages import KernelSlots
spec = SimpleNamespace(block_size=128, kernel_page_tokens=64)
slots = KernelSlots(spec, 40, torch.device("cpu"), 2)
given = torch.tensor([0, 63, 64, 127, 128, 300, -1, 128 * 9 + 5])
first = slots.map(given, 5, 0).tolist()
tail = slots.mapped[0, 8:].tolist()
other = slots.map(given[:3], 7, 1).tolist()
kept = slots.mapped[0, :8].tolist()
given[0] = 128
slots.refresh(5)
print(json.dumps([first, tail, other, kept, slots.mapped[0, :8].tolist()]))
"""


def test_slots_in_kernel_pages():
    """Slot b x 128 + o becomes b x 320 + o: five pages of 64 from one block to the next."""
    done = subprocess.run(
        [sys.executable, "-c", SLOTS],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "."},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, tail, other, kept, refreshed = json.loads(done.stdout.splitlines()[-1])
    assert first == [0, 63, 64, 127, 320, 684, -1, 2885]
    assert set(tail) == {-1}  # a CUDA graph may read on
    assert other == [0, 63, 64]
    assert kept == first  # microbatches have buffers of their own
    assert refreshed == [320, *first[1:]]  # a draft rewrote its slots in place


@pytest.mark.parametrize("page, mapped", [(64, True), (128, False)])
def test_a_page_that_is_its_block_needs_no_mapping(laid_out, page, mapped):
    """Its page ids are block ids: vLLM has no kernel block for it, and no stride."""
    from dataclasses import replace

    from vllm.v1.worker.sm120_kernel_pages import KernelSlots

    _, spec = laid_out
    scheduler = SimpleNamespace(max_num_batched_tokens=8)
    config = SimpleNamespace(scheduler_config=scheduler)
    spec = replace(spec, kernel_page_tokens=page)
    made = KernelSlots.make(spec, config, torch.device("cpu"), 1)
    assert (made is not None) == mapped
    if made:
        with pytest.raises(AssertionError, match="not bound"):
            made.map(torch.zeros(3, dtype=torch.int64), 0)


@pytest.fixture
def laid_out(platform):
    """A cache of three blocks of five units, as allocated: [3, 1, 128, 584]."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(
        block_size=128,
        num_kv_heads=1,
        head_size=512,
        dtype=torch.uint8,
        state_content_bytes=584,
        alignment=576,
        kernel_page_tokens=64,
        kernel_page_stride=46080,
    )
    raw = torch.arange(3 * 230400) % 251
    view = raw.to(torch.uint8).as_strided((3, 1, 128, 584), (230400, 128 * 584, 584, 1), 3 * 46080)
    return view, spec


def test_page_ids(laid_out):
    from vllm.v1.worker.sm120_kernel_pages import kernel_page_view

    cache, spec = laid_out
    view, stride = kernel_page_view(cache, spec)
    assert (stride, tuple(view.shape)) == (5, (12, 1, 64, 584))
    for block in range(3):
        for page in range(2):
            start = block * 230400 + (3 + page) * 46080
            found = view[block * 5 + page]
            assert found.storage_offset() == start and found.is_contiguous()


def test_the_zeroer_gets_every_page_of_a_block(laid_out):
    from vllm.v1.worker.sm120_kernel_pages import block_page_view, kernel_page_view

    cache, spec = laid_out
    view, stride = kernel_page_view(cache, spec)
    blocks = block_page_view(view, spec, stride, 3)
    assert tuple(blocks.shape) == (3, 2, 1, 64, 584)
    assert blocks.stride()[:2] == (230400, 46080)
    assert blocks[2, 1].storage_offset() == view[11].storage_offset()


def test_vllms_zeroer_clears_every_page(engine_config):
    """KVBlockZeroer's own segments, over the caches as a runner binds them."""
    from vllm.models.deepseek_v41.nvidia.sm120_block_places import place_of
    from vllm.v1.worker.utils import KVBlockZeroer

    found = planner.Plan(engine_config(), planner.planned_caches_module())
    groups = [group for groups in found.groups for group in groups]
    bound = {n: SimpleNamespace(kv_cache=v.squeeze(1)) for n, v in found.views.items()}
    sizes = [g.kv_cache_spec.block_size for g in found.kv_cache_config.kv_cache_groups]
    blocks = found.kv_cache_config.num_blocks
    zeroer = KVBlockZeroer(torch.device("cpu"), groups, sizes, bound, blocks)
    addresses, strides, lengths = (part.tolist() for part in zeroer._meta[:3])
    assert {4 * stride for stride in strides} == {found.block_stride}
    cleared = dict(zip(addresses, (4 * n for n in lengths), strict=True))
    for group in groups:
        for name in group.layer_names:
            view = found.views[name]
            place = place_of(view, group.kv_cache_spec)
            first, last = place.spans()[0][0], place.spans()[-1][1]
            assert cleared[view.data_ptr()] >= last - first, name
    # Ratio 1 is read and zeroed over two units.
    main = found.views["model.layers.20.attn"]
    assert cleared[main.data_ptr()] >= 46080 + 64 * 584
    for address, length in zip(addresses, lengths, strict=True):
        place = address - main.untyped_storage().data_ptr()
        assert place >= 0 and place + 4 * length <= found.block_stride
