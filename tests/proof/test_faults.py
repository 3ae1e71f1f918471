# SPDX-License-Identifier: Apache-2.0
"""The planted faults on small fakes of what they touch: each shows, and none stays.

Whether they show in a real engine's answers is the proof's own question (report.py).
"""

import copy
import dataclasses
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from proof import faults

PAGE, PAGES, BYTES = 4, 5, 2000
FAULTS = {fault.name: fault for fault in faults.FAULTS}


@dataclasses.dataclass
class Metadata:
    """What a layer's caches are told of a pass."""

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    decode_swa_lens: torch.Tensor | None = None
    decode_swa_indices: torch.Tensor | None = None


class Operator:
    """Called as vLLM's custom operators are: the indexer's."""

    def __init__(self, cache):
        self.cache, self.seen = cache, []

    def forward(self, *args):
        self.seen.append(self.cache.kv_cache)
        if args == ("fail",):
            raise RuntimeError("kernel")
        return args


class Attention:
    """An attention layer that notes what reaches its kernels."""

    def __init__(self, index, context):
        name = f"model.layers.{index}.attn"
        self.context, self.seen = context, []
        self.swa_cache_layer = SimpleNamespace(
            prefix=f"{name}.swa_cache", block_size=PAGE, kv_cache=torch.zeros(PAGES, PAGE, 8)
        )
        self.compressed_cache_prefix = f"{name}.mla"
        self.attn_sink = torch.nn.Parameter(torch.arange(4.0), requires_grad=False)
        self.storage = torch.arange(PAGES * BYTES).to(torch.uint8)
        cache = SimpleNamespace(kv_cache=self.storage.view(PAGES, PAGE, BYTES // PAGE))
        self.indexer = SimpleNamespace(k_cache=cache, indexer_op=Operator(cache))

    def _fused_qnorm_rope_kv_insert(self, q, kv, positions, metadata):
        self.seen.append(metadata)
        return q

    def _compressed_kv_cache(self):
        return self.storage.view(PAGES, PAGE, BYTES // PAGE)

    def forward_mqa(self, *args):
        self.seen.append(self.context.attn_metadata)
        if args == ("fail",):
            raise RuntimeError("kernel")


class Draft:
    """DSpark's draft, as far as its context KV goes."""

    def __init__(self, layer):
        self.layers, self.seen = [SimpleNamespace(attn=layer)], []

    def precompute_and_store_context_kv(self, main_x, positions, mappings=None):
        self.seen.append(mappings)


@pytest.fixture
def context(monkeypatch):
    """The forward context; vLLM itself is not imported."""
    found = SimpleNamespace(attn_metadata=None)
    module = ModuleType("vllm.forward_context")
    module.get_forward_context = lambda: found
    monkeypatch.setitem(sys.modules, "vllm.forward_context", module)
    return found


class KernelSlots:
    """The fork's slots in kernel pages."""

    def map(self, slots, block_stride, microbatch=0):
        return slots + 1000


@pytest.fixture
def engine(context):
    layers = [SimpleNamespace(attn=Attention(index, context)) for index in range(6)]
    metadata = {}
    for index, layer in enumerate(layers):
        for prefix in (layer.attn.swa_cache_layer.prefix, layer.attn.compressed_cache_prefix):
            metadata[prefix] = Metadata(
                torch.tensor([0, 5, -1, PAGES * PAGE - 1]),
                torch.arange(6).view(2, 3) + 10 * index,
                torch.tensor([1, 2, 128]),
                torch.tensor([[9, 4, 3, -1]]),
            )
    context.attn_metadata = metadata
    groups = [[SimpleNamespace(kernel_slots=slots)] for slots in (KernelSlots(), None)]
    replayed = tuple([[SimpleNamespace(kernel_slots=KernelSlots())]] for _ in range(2))
    return SimpleNamespace(
        language_model=SimpleNamespace(model=SimpleNamespace(layers=layers)),
        runner=SimpleNamespace(
            speculator=SimpleNamespace(model=SimpleNamespace(model=Draft(layers[0].attn))),
            attn_groups=groups,
            model_state=SimpleNamespace(_replay_attn_groups=replayed),
        ),
    )


def _attn(engine, index):
    return engine.language_model.model.layers[index].attn


def _equal(one, other):
    pairs = zip(dataclasses.astuple(one), dataclasses.astuple(other), strict=True)
    return all(a is b or torch.equal(a, b) for a, b in pairs)


def _seen_by(engine, index, context, *args):
    """What layer ``index`` is told in one pass; it must be right again afterwards."""
    attn, right = _attn(engine, index), context.attn_metadata
    try:
        attn.forward_mqa(*args)
    finally:
        assert context.attn_metadata is right
    return attn.seen[-1]


def _only(seen, right, prefix):
    """That of all metadata only ``prefix``'s differs."""
    assert seen.keys() == right.keys()
    assert {name for name in right if not _equal(seen[name], right[name])} == {prefix}


def test_slot_one_page_off(engine, context):
    attn, right = _attn(engine, 1), copy.deepcopy(context.attn_metadata)
    prefix = attn.swa_cache_layer.prefix
    with FAULTS["slot_one_page_off"].plant(engine):
        attn._fused_qnorm_rope_kv_insert("q", "kv", "p", context.attn_metadata)
        # A profiling run has no metadata.
        attn._fused_qnorm_rope_kv_insert("q", "kv", "p", None)
    seen, nothing = attn.seen
    # One page on, around the end, and unused slots stay unused.
    assert seen[prefix].slot_mapping.tolist() == [PAGE, 5 + PAGE, -1, PAGE - 1]
    _only(seen, right, prefix)
    assert nothing is None
    assert all(_equal(context.attn_metadata[name], right[name]) for name in right)


def test_pages_swapped(engine, context):
    right = copy.deepcopy(context.attn_metadata)
    with FAULTS["pages_swapped"].plant(engine):
        seen = _seen_by(engine, 3, context)
        prefix = _attn(engine, 3).compressed_cache_prefix
        assert seen[prefix].block_table.tolist() == [[33, 34, 35], [30, 31, 32]]
        _only(seen, right, prefix)
        others = _seen_by(engine, 2, context)
    assert all(_equal(others[name], right[name]) for name in right)


def test_kernel_slots_unmapped(engine):
    runner = engine.runner
    (mapped,), _ = runner.attn_groups
    ((replayed,),), _ = runner.model_state._replay_attn_groups
    with FAULTS["kernel_slots_unmapped"].plant(engine):
        for group in (mapped, replayed):
            assert group.kernel_slots.map(7, 5, 0) == 7
    assert mapped.kernel_slots.map(7, 5) == 1007


def test_stride_off(engine):
    attn = _attn(engine, 3)
    right = attn._compressed_kv_cache()
    with FAULTS["stride_off"].plant(engine):
        wrong = attn._compressed_kv_cache()
    assert wrong.shape == right.shape
    assert wrong.data_ptr() == right.data_ptr()
    assert wrong.stride() == (BYTES - 576, *right.stride()[1:])
    assert torch.equal(wrong[0], right[0]) and not torch.equal(wrong[1], right[1])


def test_indexer_page_offset(engine):
    indexer = _attn(engine, 2).indexer
    right = indexer.k_cache.kv_cache
    with FAULTS["indexer_page_offset"].plant(engine):
        assert indexer.indexer_op.forward("x") == ("x",)
        assert indexer.k_cache.kv_cache is right
        # Before memory is allocated there is nothing to shift.
        indexer.k_cache.kv_cache = torch.empty(0)
        indexer.indexer_op.forward("y")
        indexer.k_cache.kv_cache = right
    wrong, empty = indexer.indexer_op.seen
    assert wrong.data_ptr() == right.data_ptr() + 1152
    assert wrong.stride() == right.stride()
    # Nothing past the end is read.
    last = wrong.data_ptr() + (wrong.shape[0] - 1) * wrong.stride(0) + BYTES
    assert last <= right.data_ptr() + PAGES * BYTES
    assert empty.numel() == 0


def test_indexer_page_offset_is_undone_when_the_kernel_fails(engine):
    indexer = _attn(engine, 2).indexer
    right = indexer.k_cache.kv_cache
    with FAULTS["indexer_page_offset"].plant(engine):
        with pytest.raises(RuntimeError, match="kernel"):
            indexer.indexer_op.forward("fail")
        assert indexer.k_cache.kv_cache is right


def test_sink_ignored(engine):
    sinks = [_attn(engine, index).attn_sink for index in (0, 1)]
    with FAULTS["sink_ignored"].plant(engine):
        assert sinks[0].tolist() == [float("-inf")] * 4
        assert sinks[1].tolist() == [0, 1, 2, 3]
    assert sinks[0].tolist() == [0, 1, 2, 3]


def test_length_one_off(engine, context):
    right = copy.deepcopy(context.attn_metadata)
    with FAULTS["length_one_off"].plant(engine):
        for index in range(6):
            prefix = _attn(engine, index).swa_cache_layer.prefix
            seen = _seen_by(engine, index, context)
            # A window of one token keeps it: an empty one is another fault.
            assert seen[prefix].decode_swa_lens.tolist() == [1, 1, 127]
            _only(seen, right, prefix)


def test_length_one_off_leaves_prefill_alone(engine, context):
    prefix = _attn(engine, 0).swa_cache_layer.prefix
    context.attn_metadata[prefix].decode_swa_lens = None
    right = copy.deepcopy(context.attn_metadata)
    with FAULTS["length_one_off"].plant(engine):
        seen = _seen_by(engine, 0, context)
    assert all(_equal(seen[name], right[name]) for name in right)


@pytest.mark.parametrize("decoding", [True, False])
def test_window_page_stale(engine, context, decoding):
    attn = _attn(engine, 1)
    prefix = attn.swa_cache_layer.prefix
    if not decoding:
        context.attn_metadata[prefix].decode_swa_indices = None
    right = copy.deepcopy(context.attn_metadata)
    with FAULTS["window_page_stale"].plant(engine):
        seen = _seen_by(engine, 1, context)
    assert seen[prefix].block_table.tolist() == [[12, 10, 11], [15, 13, 14]]
    if decoding:
        # One page back, not before the first slot; -1 is no slot.
        assert seen[prefix].decode_swa_indices.tolist() == [[5, 0, 0, -1]]
    else:
        assert seen[prefix].decode_swa_indices is None
    _only(seen, right, prefix)


def test_draft_slot_one_page_off(engine):
    draft = engine.runner.speculator.model.model
    slots = torch.tensor([0, -1, PAGES * PAGE - 1])
    with FAULTS["draft_slot_one_page_off"].plant(engine):
        draft.precompute_and_store_context_kv("x", "p", [slots, None])
        draft.precompute_and_store_context_kv("x", "p")
    (wrong, none), nothing = draft.seen
    assert wrong.tolist() == [PAGE, -1, PAGE - 1]
    assert none is None and nothing is None
    assert slots.tolist() == [0, -1, PAGES * PAGE - 1]


METADATA = ["pages_swapped", "length_one_off", "window_page_stale"]


@pytest.mark.parametrize("name", METADATA)
def test_metadata_is_right_again_when_a_kernel_fails(engine, context, name):
    right = context.attn_metadata
    with FAULTS[name].plant(engine):
        for index in range(6):
            with pytest.raises(RuntimeError, match="kernel"):
                _attn(engine, index).forward_mqa("fail")
            assert context.attn_metadata is right


@pytest.mark.parametrize("name", METADATA)
def test_a_pass_without_metadata_is_left_alone(engine, context, name):
    """vLLM's profiling and warm-up runs."""
    context.attn_metadata = None
    with FAULTS[name].plant(engine):
        assert all(_seen_by(engine, index, context) is None for index in range(6))


def _state(engine):
    """All that a fault could leave changed: instance attributes and the values of sinks."""
    found = []
    for index in range(6):
        attn = _attn(engine, index)
        owners = [attn, attn.indexer.indexer_op, attn.indexer.k_cache, attn.swa_cache_layer]
        for owner in owners:
            found.append({k: id(v) for k, v in vars(owner).items() if k != "seen"})
        found.append(attn.attn_sink.tolist())
    runner = engine.runner
    kept = [runner.speculator.model.model]
    for groups in (runner.attn_groups, *runner.model_state._replay_attn_groups):
        kept += [g.kernel_slots for several in groups for g in several if g.kernel_slots]
    return [*found, *({k: id(v) for k, v in vars(o).items() if k != "seen"} for o in kept)]


@pytest.mark.parametrize("end", ["normal", "exception", "interrupt"])
@pytest.mark.parametrize("name", FAULTS)
def test_everything_is_as_before(engine, name, end):
    before = _state(engine)
    raised = {"exception": RuntimeError, "interrupt": KeyboardInterrupt}.get(end)
    if raised is None:
        with FAULTS[name].plant(engine):
            assert _state(engine) != before
    else:
        with pytest.raises(raised), FAULTS[name].plant(engine):
            raise raised
    assert _state(engine) == before


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_can_be_planted_again(engine, name):
    before = _state(engine)
    for _ in range(2):
        with FAULTS[name].plant(engine):
            changed = _state(engine)
        assert changed != before
    assert _state(engine) == before


def test_a_fault_that_cannot_be_planted_leaves_nothing(engine):
    """Half of the layers are changed before one lacks what is asked of it."""
    before = _state(engine)
    broken = _attn(engine, 4)
    del engine.language_model.model.layers[4].attn
    with pytest.raises(AttributeError), FAULTS["length_one_off"].plant(engine):
        pass
    engine.language_model.model.layers[4].attn = broken
    assert _state(engine) == before
