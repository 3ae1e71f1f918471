# SPDX-License-Identifier: Apache-2.0
"""Random requests through vLLM's own cache manager, slot mappings and store kernels, on a
CPU: every record that is written must be read back where a kernel looks.

    TRITON_INTERPRET=1 python -m tests.v1.worker.sm120_record_trace '[{"steps": 200}]'

Prints a JSON object for each run: what happened, and how many records were right and
wrong. A process of its own: Triton decides about its interpreter when it is imported.

A record is named by the tokens before it, so a prefix hit must find what another request
wrote. Its bytes come from a bank, which the same kernels wrote to a dense cache before.
"""

import json
import random
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

from fork import geometry, planner

BANK = 256
WINDOW = 128
STATES = 64
# Data and scale bytes of a record: the V4 record and the FP8 index key.
RECORD = {"main": (576, 8), "swa": (576, 8), "indexer": (128, 4)}
FAULTS = ("unmapped slot", "stride off by one page", "swapped units")


@contextmanager
def planted(fault):
    """One thing broken inside the installed vLLM."""
    from vllm.v1.attention.backends.mla import sm120_page_geometry
    from vllm.v1.core import kv_cache_planning, sm120_kernel_page_units
    from vllm.v1.worker import sm120_kernel_pages, utils

    def stride_off(kv_cache, spec):
        view, stride = sm120_kernel_pages.kernel_page_view(kv_cache, spec)
        return view, stride - 1

    def swapped(layers_by_spec, spec, byte_offset):
        """The ratio-1 layer starts where the second ratio-2 layer is."""
        found = sm120_kernel_page_units.unit_offset(layers_by_spec, spec, byte_offset)
        unit = getattr(spec, "kernel_page_stride", None)
        return found - 2 * unit if unit and spec.tokens_per_state == 1 else found

    places = {
        "unmapped slot": (sm120_kernel_pages.KernelSlots, "map", lambda self, slots, *_: slots),
        "stride off by one page": (utils, "kernel_page_view", stride_off),
        "swapped units": (kv_cache_planning, "unit_offset", swapped),
    }
    with ExitStack() as stack:
        if fault:
            stack.enter_context(mock.patch.object(*places[fault]))
            # The start-up check would stop some of them first.
            stack.enter_context(mock.patch.object(sm120_page_geometry, "_SM12X_FAMILY", -1))
        yield


class Cache:
    """One layer's cache: where its records go, and what they are."""

    def __init__(self, name, kind, number, spec, view, group_id, attn_group):
        self.name, self.kind, self.number = name, kind, number
        self.ratio = int(spec.tokens_per_state)
        self.view = view.squeeze(1)  # as bind_kv_cache: [pages, 64, C]
        self.group_id, self.attn_group = group_id, attn_group
        self.limit = self.view.shape[0] * STATES

    def _bytes(self, pages, slots):
        """The whole allocation, and where in it each record is: data, then scales, at
        page x 64 + slot as kernels address them. None where one is outside."""
        import torch

        data, scale = RECORD[self.kind]
        raw = torch.empty(0, dtype=torch.uint8).set_(self.view.untyped_storage())
        base = self.view.storage_offset() + pages * self.view.stride(0)
        at = (base + slots * data).unsqueeze(1) + torch.arange(data)
        scales = base + STATES * data + slots * scale
        at = torch.cat((at, scales.unsqueeze(1) + torch.arange(scale)), 1)
        return (raw, at) if int(at.max()) < raw.numel() else None

    def read(self, pages, slots):
        """[records, bytes], or None where one is outside the allocation."""
        found = self._bytes(pages, slots)
        return None if found is None else found[0][found[1]]

    def copy(self, slots, records):
        """What the store kernel does with these slots, without the kernel."""
        keep = slots >= 0
        raw, at = self._bytes(slots[keep] // STATES, slots[keep] % STATES)
        raw[at] = records[keep]


class Trace:
    """The requests, the manager and the caches."""

    def __init__(self, seed, blocks, caching, block_size):
        import torch
        from vllm.models.deepseek_v41.nvidia import sm120_kv_plan

        self.random = random.Random(seed)
        torch.manual_seed(seed)
        sm120_kv_plan._BLOCKS = blocks
        argv = [*geometry.default_argv(block_size), "--max-model-len", "1024"]
        argv += ["--max-num-batched-tokens", "512", "--max-num-seqs", "16"]
        config = planner.vllm_config(argv)
        self.plan = planner.Plan(config, planner.planned_caches_module())
        self.manager, self.request = self.plan.manager(blocks, caching)
        self.kv_config = self.plan.kv_cache_config
        self.count = Counter()
        self._watch_evictions()
        specs = [group.kv_cache_spec for group in self.kv_config.kv_cache_groups]
        self.replay = max(spec.prefix_replay_tokens for spec in specs)
        self.caches = list(self._caches(sm120_kv_plan))
        self._fill_bank()
        self.running, self.names, self.uid = [], {}, 0
        self.families = [self._tokens(700) for _ in range(3)]

    def _watch_evictions(self):
        pool = self.manager.block_pool
        evict = pool._maybe_evict_cached_block

        def counted(*args, **kwargs):
            evicted = evict(*args, **kwargs)
            self.count["evictions"] += bool(evicted)
            return evicted

        pool._maybe_evict_cached_block = counted

    def _caches(self, sm120_kv_plan):
        for group_id, groups in enumerate(self.plan.groups):
            window_taken = False
            for group in groups:
                for name in group.layer_names:
                    kind = sm120_kv_plan.kind_of(self.plan.layers[name])
                    # One window layer a group: their pages differ by offset alone.
                    if kind is None or (kind == "swa" and window_taken):
                        continue
                    window_taken = kind == "swa"
                    number = int(name.split(".")[2]) * 3 + len(kind)
                    spec, view = group.kv_cache_spec, self.plan.views[name]
                    yield Cache(name, kind, number, spec, view, group_id, group)

    def _fill_bank(self):
        import torch

        self.latents = torch.randn(BANK, 512).bfloat16()
        self.keys = torch.randn(BANK, 128).bfloat16()
        # RoPE by zero: a record does not depend on its position.
        self.cos_sin = torch.cat((torch.ones(1024, 32), torch.zeros(1024, 32)), 1)
        self.norm = torch.ones(128).bfloat16()
        self.bank = {}
        every = torch.arange(BANK)
        for kind, width in (("main", 584), ("swa", 584), ("indexer", 132)):
            dense = torch.zeros(BANK // STATES, STATES, width, dtype=torch.uint8)
            cache = SimpleNamespace(kind=kind, view=dense, ratio=1)
            self._store(cache, every, every, every)
            reader = Cache.__new__(Cache)
            reader.kind, reader.view = kind, dense
            self.bank[kind] = reader.read(every // STATES, every % STATES)
            assert len(torch.unique(self.bank[kind], dim=0)) == BANK

    def _store(self, cache, slots, chosen, positions):
        """vLLM's own store kernels."""
        from vllm.models.deepseek_v41.common.ops.cache_utils import quantize_and_insert_k_cache
        from vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache import (
            rope_quant_insert,
        )
        from vllm.models.deepseek_v41.common.ops.indexer_k_store import indexer_k_norm_rope_store

        if cache.kind == "main":
            rope_quant_insert(
                self.latents[chosen], positions, self.cos_sin, cache.view, slots, cache.ratio
            )
        elif cache.kind == "indexer":
            indexer_k_norm_rope_store(
                self.keys[chosen],
                positions,
                self.cos_sin,
                self.norm,
                1e-6,
                cache.view,
                slots,
                cache.ratio,
                False,
            )
        else:
            quantize_and_insert_k_cache(self.latents[chosen], cache.view, slots, STATES)

    def _tokens(self, count):
        return [self.random.randrange(1000, 100000) for _ in range(count)]

    def _named(self, request):
        """The running hash of a request's tokens, one for each position."""
        known = self.names.setdefault(request.request_id, [])
        tokens = request.all_token_ids
        while len(known) < len(tokens):
            before = known[-1] if known else 17
            known.append((before * 1000003 + tokens[len(known)] * 7919) & 0xFFFFFFFFFFFF)
        return known

    def _records(self, cache, request, positions):
        import torch

        named = self._named(request)
        return torch.tensor(
            [(named[p] * 31 + cache.number * 127) % 1000003 % BANK for p in positions]
        )

    # Requests.

    def admit(self):
        """A new request, often with a prefix that others had."""
        family = self.random.choice(self.families)
        prefix = family[: self.random.choice((0, 64, 130, 256, 300, 400))]
        tokens = prefix + self._tokens(self.random.randrange(1, 120))
        self.uid += 1
        request = self.request(tokens, f"r{self.uid}")
        request.wanted = self.random.randrange(1, 40)
        self.running.append(self._started(request))

    def _started(self, request):
        request.num_computed_tokens = 0
        request.fresh = True
        return request

    def drop(self, request, preempted):
        """Frees a request's blocks; a preempted one starts again later."""
        self.manager.free(request)
        self.running.remove(request)
        self.count["preemptions" if preempted else "frees"] += 1
        if preempted:
            self.running.append(self._started(request))

    def schedule(self):
        """Blocks for one step. Returns [(request, first position, tokens)]."""
        batch, budget, preempted = [], 160, set()
        for request in list(self.running):
            if budget <= 0 or request.request_id in preempted:
                continue
            asked = min(budget, self.random.choice((32, 64, 160)))
            found = self._scheduled(request, asked)
            if found is None:
                taken = {r.request_id for r, *_ in batch} | {request.request_id}
                others = [r for r in self.running if not r.fresh and r.request_id not in taken]
                if not others:
                    continue
                self.drop(others[-1], preempted=True)
                preempted.add(others[-1].request_id)
                found = self._scheduled(request, asked)
            if found is not None:
                self.count["allocations"] += 1
                budget -= found[1]
                batch.append((request, *found))
        return batch

    def _scheduled(self, request, asked):
        """First position and tokens of a request's next chunk, or None without blocks.

        As the scheduler does it: a hit of no more than a window is dropped, another's
        last window is computed again for the sliding-window caches alone.
        """
        if not request.fresh:
            start = request.num_computed_tokens
            new = min(request.num_tokens - start, asked)
            return (start, new) if self.manager.allocate_slots(request, new) else None
        blocks, hit = self.manager.get_computed_blocks(request)[:2]
        if hit <= self.replay:
            blocks, hit = None, 0
        start = hit - (self.replay if hit else 0)
        new = min(request.num_tokens - start, asked)
        if self.manager.allocate_slots(request, max(start + new - hit, 0), hit, blocks) is None:
            return None
        request.fresh, request.replay_start = False, start
        request.num_computed_tokens = start
        self.count["hit tokens"] += hit
        self.count["hits"] += hit > 0
        return start, new

    # One step's metadata and writes.

    def step(self):
        if len(self.running) < 12 and self.random.random() < 0.5:
            self.admit()
        batch = self.schedule()
        if batch:
            self._write(batch, self._metadata(batch))
            self.count["steps"] += 1
        for request, start, new in batch:
            request.num_computed_tokens = start + new
            if request.num_computed_tokens < request.num_tokens:
                continue
            request.wanted -= 1
            if request.wanted <= 0:
                self.drop(request, preempted=False)
            else:
                request.append_output_token_ids(self._tokens(1))
        if self.running and self.random.random() < 0.03:
            live = [r for r in self.running if not r.fresh]
            if live:
                self.drop(self.random.choice(live), preempted=self.random.random() < 0.5)

    def tables(self, requests):
        """Block tables, one a KV cache group: int32 [requests, blocks]."""
        import torch

        ids = [self.manager.get_block_ids(r.request_id) for r in requests]
        out = []
        for group_id in range(len(self.kv_config.kv_cache_groups)):
            rows = [one[group_id] for one in ids]
            table = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int32)
            for row, blocks in zip(table, rows, strict=True):
                row[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            out.append(table)
        return out

    def _slots(self, tables, starts, positions):
        """vLLM's slot-mapping kernel: [groups, tokens] int64."""
        import torch
        from vllm.v1.worker.gpu.block_table import _compute_slot_mappings_kernel

        groups = [g.kv_cache_spec for g in self.kv_config.kv_cache_groups]
        every = len(groups)
        slots = torch.full((every, 512), -1, dtype=torch.int64)
        _compute_slot_mappings_kernel[(every, len(starts))](
            512,
            torch.arange(len(starts) - 1, dtype=torch.int32),
            starts,
            positions,
            torch.tensor([t.data_ptr() for t in tables], dtype=torch.uint64),
            torch.tensor([t.stride(0) for t in tables], dtype=torch.int64),
            torch.tensor([s.block_size for s in groups], dtype=torch.int32),
            torch.tensor([s.uses_slot_mapping for s in groups], dtype=torch.bool),
            torch.ones(every, dtype=torch.bool),
            slots,
            slots.stride(0),
            0,
            CP_SIZE=1,
            CP_INTERLEAVE=1,
            PAD_ID=-1,
            TRITON_BLOCK_SIZE=1024,
        )
        return slots[:, : len(positions)]

    def _metadata(self, batch):
        import torch
        from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

        tables = self.tables([r for r, *_ in batch])
        lengths = torch.tensor([new for *_, new in batch])
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int()
        positions = torch.cat([torch.arange(s, s + n) for _, s, n in batch])
        seq_lens = torch.tensor([s + n for _, s, n in batch], dtype=torch.int32)
        slots = self._slots(tables, starts, positions)
        self._pad_replayed(batch, slots, starts, positions)
        metadata = build_attn_metadata(
            self._built(),
            num_reqs=len(batch),
            num_tokens=len(positions),
            query_start_loc_gpu=starts,
            query_start_loc_cpu=starts,
            max_query_len=int(lengths.max()),
            seq_lens=seq_lens,
            max_seq_len=int(seq_lens.max()),
            block_tables=tables,
            slot_mappings=slots,
            kv_cache_config=self.kv_config,
            seq_lens_cpu_upper_bound=seq_lens,
            positions=positions,
        )
        for cache in self.caches:  # a window's slots are the manager's
            metadata.setdefault(cache.name, SimpleNamespace(slot_mapping=slots[cache.group_id]))
        return metadata, positions

    def _pad_replayed(self, batch, slots, starts, positions):
        """vLLM's kernel for bounded replay: no slots for what the hit holds already."""
        import torch
        from vllm.models.deepseek_v41.nvidia.model_state import _pad_replayed_slots_kernel

        cacheable = self.kv_config.prefix_cacheable_group_ids
        replay = [r.replay_start for r, *_ in batch]
        self.count["replay steps"] += any(replay)
        _pad_replayed_slots_kernel[(len(batch),)](
            slots,
            slots.stride(0),
            torch.tensor(cacheable, dtype=torch.int32),
            starts,
            positions,
            torch.tensor(replay, dtype=torch.int32),
            self.replay,
            -1,
            NUM_GROUPS=len(cacheable),
            BLOCK=1024,
        )

    def _built(self):
        """The groups whose builders run: windows' rarely, for their index kernels take
        the interpreter most of a second."""
        if self.count["steps"] % 200 == 1:
            return self.plan.groups
        windows = {c.group_id for c in self.caches if c.kind == "swa"}
        return [[] if n in windows else g for n, g in enumerate(self.plan.groups)]

    def _write(self, batch, built):
        import torch

        metadata, positions = built
        for cache in self.caches:
            slots = metadata[cache.name].slot_mapping[: len(positions)].contiguous()
            outside = slots >= cache.limit
            if outside.any():  # would write to memory that is not ours
                self.count["outside"] += int(outside.sum())
                slots = torch.where(outside, -1, slots)
            chosen = torch.cat([self._records(cache, r, range(s, s + n)) for r, s, n in batch])
            written = int((slots >= 0).sum())
            # The interpreter takes 10 ms a record: a few caches a step go through the
            # kernel, in turn, and the others through a copy to the same places.
            if written <= self.kernel_records and self.random.random() < 0.2:
                self._store(cache, slots, chosen, positions)
                self.count["written by kernels"] += written
                self.count[f"{cache.kind} {cache.ratio} by kernels"] += written
            elif written:
                cache.copy(slots, self.bank[cache.kind][chosen])
            self.count["written"] += written

    # What is there.

    def verify(self):
        """Every record that a live request may read, from the pages that its kernels get."""
        import torch

        live = [r for r in self.running if not r.fresh and r.num_computed_tokens]
        if not live:
            return
        tables = self.tables(live)
        for cache in self.caches:
            mapped = cache.attn_group.map_to_kernel_block_table(tables[cache.group_id]).clone()
            for row, request in zip(mapped, live, strict=True):
                done = request.num_computed_tokens
                if request.replay_start and done < request.replay_start + self.replay:
                    continue  # its window is still being computed again
                first = max(done - WINDOW + 1, 0) if cache.kind == "swa" else 0
                states = torch.arange(first, done // cache.ratio)
                if not len(states):
                    continue
                found = cache.read(row[states // STATES].long(), states % STATES)
                last = [int(s) * cache.ratio + cache.ratio - 1 for s in states]
                wanted = self.bank[cache.kind][self._records(cache, request, last)]
                if found is None:
                    self.count["outside"] += len(states)
                    continue
                right = int((found == wanted).all(1).sum())
                self.count["right"] += right
                self.count["wrong"] += len(states) - right
                if right < len(states):
                    self.count[f"wrong {cache.kind} {cache.ratio}"] += len(states) - right


def run(steps, fault=None, kernel_records=24, **more):
    """The counts of a trace of ``steps`` steps, verified after every tenth."""
    given = {"seed": 0, "blocks": 120, "caching": True, "block_size": None} | more
    with planted(fault):
        trace = Trace(**given)
        trace.kernel_records = kernel_records
        pool = trace.manager.block_pool
        free = pool.get_num_free_blocks()
        while trace.count["steps"] < steps:
            trace.step()
            if trace.count["steps"] % 10 == 0:
                trace.verify()
        trace.verify()
    for request in list(trace.running):
        if not request.fresh:
            trace.manager.free(request)
    trace.count["leaked blocks"] = free - pool.get_num_free_blocks()
    return dict(trace.count)


if __name__ == "__main__":
    planner.set_up_platform((12, 0))
    print(json.dumps([run(**asked) for asked in json.loads(sys.argv[1])]))
