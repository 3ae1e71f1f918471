# SPDX-License-Identifier: Apache-2.0
"""Faults planted in a live engine, to see that the proof would find them.

Each is a context in which one thing that paging rests on is wrong. They work on what
every attention class has: the layer's insertion of KV, the metadata of a forward pass,
views of the caches, sinks.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault and the scenario made for it.

    Attributes:
        blind: True where the proof is known not to find it: it stood out, by less than
            ten times the noise. README.md has the figures.
        arms: in which it is planted.
    """

    name: str
    scenario: str
    plant: Callable[[Any], contextlib.AbstractContextManager[None]]
    variant: str = "text"
    blind: bool = False
    arms: tuple[str, ...] = ("fork", "fork-units", "fork-sm120")


def _layer(engine: Any, index: int) -> Any:
    return engine.language_model.model.layers[index].attn


def _cleared(method: Callable) -> Callable:
    """A context manager around an attribute of an instance that hides its class's."""

    @contextlib.contextmanager
    def plant(engine: Any) -> Iterator[None]:
        undo: list[Callable[[], None]] = []

        def replace(owner: Any, name: str, value: Any) -> None:
            owner.__dict__[name] = value
            undo.append(lambda: owner.__dict__.pop(name))

        def change(tensor: torch.Tensor, value: Any) -> None:
            kept = tensor.clone()
            tensor.copy_(value)
            undo.append(lambda: tensor.copy_(kept))

        try:
            method(engine, replace, change)
            yield
        finally:
            for step in reversed(undo):
                step()

    return plant


def _with_metadata(attn: Any, replace: Callable, change: Callable[[dict], dict]) -> None:
    """Runs a layer's attention with other metadata than the rest of the pass."""
    from vllm.forward_context import get_forward_context

    forward = attn.forward_mqa

    def planted(*args: Any, **kwargs: Any) -> None:
        context = get_forward_context()
        right = context.attn_metadata
        if isinstance(right, dict):
            context.attn_metadata = {**right, **change(right)}
        try:
            forward(*args, **kwargs)
        finally:
            context.attn_metadata = right

    replace(attn, "forward_mqa", planted)


@_cleared
def slot_one_page_off(engine: Any, replace: Callable, change: Callable) -> None:
    """Layer 1 writes its window KV one page after where attention reads it."""
    attn = _layer(engine, 1)
    insert, prefix = attn._fused_qnorm_rope_kv_insert, attn.swa_cache_layer.prefix
    page = attn.swa_cache_layer.block_size

    def planted(q: Any, kv: Any, positions: Any, metadata: Any) -> torch.Tensor:
        if isinstance(metadata, dict):
            swa = metadata[prefix]
            slots = attn.swa_cache_layer.kv_cache.shape[0] * page
            wrong = torch.where(
                swa.slot_mapping >= 0, (swa.slot_mapping + page) % slots, swa.slot_mapping
            )
            metadata = {**metadata, prefix: dataclasses.replace(swa, slot_mapping=wrong)}
        return insert(q, kv, positions, metadata)

    replace(attn, "_fused_qnorm_rope_kv_insert", planted)


@_cleared
def pages_swapped(engine: Any, replace: Callable, change: Callable) -> None:
    """Layer 3 reads each request's ratio-2 pages in the place of another's.

    Within a request the order of pages that are all chosen changes nothing: attention
    does not depend on the order of what it looks at.
    """
    attn = _layer(engine, 3)
    prefix = attn.compressed_cache_prefix

    def swapped(metadata: dict) -> dict:
        table = metadata[prefix].block_table.roll(1, dims=0)
        return {prefix: dataclasses.replace(metadata[prefix], block_table=table)}

    _with_metadata(attn, replace, swapped)


@_cleared
def stride_off(engine: Any, replace: Callable, change: Callable) -> None:
    """Layer 3 steps from page to page of its compressed cache by 576 bytes too little."""
    attn = _layer(engine, 3)
    right = attn._compressed_kv_cache

    def planted() -> torch.Tensor:
        cache = right()
        return cache.as_strided(cache.shape, (cache.stride(0) - 576, *cache.stride()[1:]))

    replace(attn, "_compressed_kv_cache", planted)


@_cleared
def indexer_page_offset(engine: Any, replace: Callable, change: Callable) -> None:
    """Every indexer reads its key pages 1152 bytes (nine keys) too far on."""
    for layer in engine.language_model.model.layers:
        if layer.attn.indexer is not None:
            _read_further_on(layer.attn.indexer, replace)


def _read_further_on(indexer: Any, replace: Callable) -> None:
    forward, cache = indexer.indexer_op.forward, indexer.k_cache

    def planted(*args: Any, **kwargs: Any) -> Any:
        right = cache.kv_cache
        if right.numel():
            size = (right.shape[0] - 1, *right.shape[1:])
            cache.kv_cache = right.as_strided(size, right.stride(), right.storage_offset() + 1152)
        try:
            return forward(*args, **kwargs)
        finally:
            cache.kv_cache = right

    replace(indexer.indexer_op, "forward", planted)


@_cleared
def sink_ignored(engine: Any, replace: Callable, change: Callable) -> None:
    """Layer 0 has no attention sink."""
    change(_layer(engine, 0).attn_sink.data, float("-inf"))


@_cleared
def length_one_off(engine: Any, replace: Callable, change: Callable) -> None:
    """Every layer's window ends one token early in decoding: the token itself is unseen."""
    for layer in engine.language_model.model.layers:
        prefix = layer.attn.swa_cache_layer.prefix

        def shorter(metadata: dict, prefix: str = prefix) -> dict:
            swa = metadata[prefix]
            if swa.decode_swa_lens is None:
                return {}
            lens = (swa.decode_swa_lens - 1).clamp(min=1)
            return {prefix: dataclasses.replace(swa, decode_swa_lens=lens)}

        _with_metadata(layer.attn, replace, shorter)


@_cleared
def window_page_stale(engine: Any, replace: Callable, change: Callable) -> None:
    """Layer 1 finds the page before the newest one in the newest one's place."""
    attn = _layer(engine, 1)
    prefix = attn.swa_cache_layer.prefix

    def shifted(metadata: dict) -> dict:
        swa = metadata[prefix]
        changed = {"block_table": swa.block_table.roll(1, dims=1)}
        if swa.decode_swa_indices is not None:
            page = attn.swa_cache_layer.block_size
            slots = swa.decode_swa_indices
            wrong = torch.where(slots >= 0, (slots - page).clamp(min=0), slots)
            changed["decode_swa_indices"] = wrong
        return {prefix: dataclasses.replace(swa, **changed)}

    _with_metadata(attn, replace, shifted)


@_cleared
def draft_slot_one_page_off(engine: Any, replace: Callable, change: Callable) -> None:
    """The draft's context KV is written one page off in every draft layer."""
    draft = engine.runner.speculator.model.model
    store = draft.precompute_and_store_context_kv
    page = draft.layers[0].attn.swa_cache_layer.block_size
    slots = draft.layers[0].attn.swa_cache_layer.kv_cache.shape[0] * page

    def planted(main_x: Any, positions: Any, mappings: Any = None) -> None:
        if mappings is not None:
            mappings = [
                None if slot is None else torch.where(slot >= 0, (slot + page) % slots, slot)
                for slot in mappings
            ]
        store(main_x, positions, mappings)

    replace(draft, "precompute_and_store_context_kv", planted)


@_cleared
def kernel_slots_unmapped(engine: Any, replace: Callable, change: Callable) -> None:
    """Ratio-1 caches laid out in units are written where vLLM's own slots point."""
    replay = engine.runner.model_state._replay_attn_groups or ()
    for groups in (engine.runner.attn_groups, *replay):
        for group in (group for several in groups for group in several):
            if group.kernel_slots is not None:
                replace(group.kernel_slots, "map", lambda slots, *_: slots)


FAULTS = (
    Fault("slot_one_page_off", "short", slot_one_page_off),
    Fault("pages_swapped", "few", pages_swapped),
    Fault("stride_off", "decode", stride_off),
    Fault("indexer_page_offset", "far", indexer_page_offset, blind=True),
    Fault("sink_ignored", "short", sink_ignored),
    Fault("length_one_off", "few", length_one_off),
    Fault("window_page_stale", "decode", window_page_stale),
    Fault("draft_slot_one_page_off", "drafted", draft_slot_one_page_off, variant="dspark"),
    Fault(
        "kernel_slots_unmapped",
        "few",
        kernel_slots_unmapped,
        arms=("fork-units", "fork-sm120"),
    ),
)


def known_blind(name: str) -> bool:
    return any(fault.blind for fault in FAULTS if fault.name == name)
