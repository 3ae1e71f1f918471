# SPDX-License-Identifier: Apache-2.0
"""Gate ``memory``: what a rank must hold at least, against what GPU and host have.

Parameters are those of vLLM's own model as a rank builds it (sm120_rank_model.py), so
the split over ranks, stages and experts, padding and the placement of Engram tables are
vLLM's. The KV cache is counted with one request of ``max_model_len``, without which
vLLM does not start. Activations, CUDA graphs, NCCL and the CUDA context are left out:
it is a lower bound.
"""

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.models.deepseek_v41.nvidia.sm120_kv_plan import KVPlan, planning
from vllm.models.deepseek_v41.nvidia.sm120_rank_model import RankModel
from vllm.models.deepseek_v41.nvidia.sm120_selftest_report import (
    Fact,
    Refusal,
    Report,
)
from vllm.platforms import current_platform

GIB = 1 << 30

# DGX Spark's GB10: GPU and host share one memory.
_UNIFIED = (12, 1)

# Settings of PyTorch's allocator with which it does not round pinned memory up.
_UNROUNDED = ("pinned_max_round_threshold", "pinned_max_cached_size")


@dataclass(frozen=True)
class Need:
    """Bytes that each rank of one pipeline stage holds at least.

    Attributes:
        stage: the stage, from 0.
        weights: parameters on the GPU, without Engram tables.
        tables: Engram tables, wherever they are.
        tables_pinned: they are in pinned host memory, not on the GPU.
        pinned: what pinning them takes: torch rounds each tensor up to a power of two.
        dequantised: what weights grow by that an emulation keeps in BF16.
        kv_cache: one request of ``max_model_len``, or what the argv fixes.
        unknown: why the tables' placement is not known; then it is assumed.
    """

    stage: int
    weights: int
    tables: int
    tables_pinned: bool
    pinned: int
    dequantised: int
    kv_cache: int
    unknown: str | None = None

    @property
    def gpu(self) -> int:
        """On the GPU."""
        tables = 0 if self.tables_pinned else self.tables
        return self.weights + tables + self.dequantised + self.kv_cache

    def on_gpu(self) -> str:
        """The arithmetic, in GiB."""
        parts = [f"weights {_gib(self.weights)}"]
        if self.tables and not self.tables_pinned:
            parts.append(f"Engram tables {_gib(self.tables)}")
        if self.dequantised:
            parts.append(f"weights kept in BF16 {_gib(self.dequantised)}")
        parts.append(f"KV cache {_gib(self.kv_cache, 3)}")
        return f"{' + '.join(parts)} = {_gib(self.gpu)} GiB"

    def on_host(self) -> str:
        """The arithmetic of pinned memory, in GiB."""
        rounded = ""
        if self.pinned != self.tables:
            rounded = " (each tensor rounded up to a power of two)"
        return (
            f"Engram tables {_gib(self.tables)}, pinned {_gib(self.pinned)} GiB"
            f"{rounded}"
        )


def needs(ranks: Sequence[RankModel], plan: KVPlan) -> list[Need]:
    """What the ranks of each stage hold, from their models and vLLM's KV plan."""
    foreign = _foreign_engram()
    kv_caches = _kv_caches(plan, [rank.layers for rank in ranks])
    return [
        _need(rank, kv_cache, foreign)
        for rank, kv_cache in zip(ranks, kv_caches, strict=True)
    ]


def _need(rank: RankModel, kv_cache: int, foreign: str | None) -> Need:
    config = rank.config
    in_tables: dict[int, int] = {}
    pinned = dequantised = 0
    offloaded = False
    owners = 0
    for name, module in rank.modules():
        if "engram" in name and hasattr(module, "cpu_offload"):
            owners += 1
            offloaded |= bool(module.cpu_offload)
            for parameter in module.parameters(recurse=False):
                size = _bytes(parameter)
                in_tables[id(parameter)] = size
                if module.cpu_offload:
                    exact = any(
                        getattr(module, way, False)
                        for way in ("dp_shared_memory", "use_thp")
                    )
                    pinned += size if exact or _unrounded() else _power_of_two(size)
        if _is_dequantised(module):
            dequantised += module.weight.numel()  # one byte becomes two
    weights = sum(_bytes(p) for _, p in rank.parameters() if id(p) not in in_tables)
    engram = set(getattr(config.model_config.hf_config, "engram_layer_ids", None) or ())
    unknown = foreign
    if owners < len(engram & set(rank.layers)):
        unknown = unknown or "an Engram layer has no table that this build knows"
    return Need(
        rank.stage,
        weights,
        sum(in_tables.values()),
        offloaded,
        pinned,
        dequantised,
        kv_cache,
        unknown,
    )


def _is_dequantised(module: Any) -> bool:
    """An emulated grouped linear: vLLM keeps its weight in BF16 once it is loaded."""
    if not getattr(module, "is_bmm", False):
        return False
    if not envs.VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD:
        return False
    # Other kernels of it need family 100 (DeepGEMM's), which SM12x is not.
    return module.weight.dtype == torch.float8_e4m3fn


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _power_of_two(size: int) -> int:
    """As torch's allocator for pinned memory rounds (CachingHostAllocator.h)."""
    return 1 << max(0, size - 1).bit_length()


def _unrounded() -> bool:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    given = ",".join(os.environ.get(name, "") for name in names)
    return any(setting in given for setting in _UNROUNDED)


def _kv_caches(plan: KVPlan, stages: Sequence[range]) -> list[int]:
    """KV cache bytes without which each stage does not start."""
    config = plan.config
    fixed = config.cache_config.kv_cache_memory_bytes
    if fixed:
        return [int(fixed)] * len(stages)
    if getattr(config.model_config, "original_max_model_len", None) == -1:
        return [0] * len(stages)  # "auto": the context shrinks until it fits
    groups = planning.get_kv_cache_groups(config, copy.copy(plan.specs))
    found = []
    for number, layers in enumerate(stages):
        last = number == len(stages) - 1
        # Drafts follow the backbone and are on its last stage.
        own = {
            name: spec
            for name, spec in plan.specs.items()
            if (layer := int(name.split(".")[2])) >= layers.start
            and (last or layer < layers.stop)
        }
        projected = planning._project_kv_cache_groups_to_worker(groups, own)
        one = planning.get_kv_cache_config_from_groups(config, projected, GIB)
        block = one.kv_cache_tensors[0].size // one.num_blocks
        blocks = sum(_blocks(group.kv_cache_spec, config) for group in projected)
        found.append(block * blocks)
    return found


def _blocks(spec: Any, config: Any) -> int:
    """Blocks of one group for a request of max_model_len, as vLLM counts them."""
    if hasattr(spec, "max_memory_usage_pages"):
        return int(spec.max_memory_usage_pages(config))
    return -(-int(spec.max_memory_usage_bytes(config)) // int(spec.page_size_bytes))


def _foreign_engram() -> str | None:
    """Why tables may be elsewhere: a diff of the user's own, applied below the fork's
    patches, that touches Engram code. The wheel carries such diffs."""
    folder = Path(vllm.__file__).parent / "sm120_foreign"
    for path in sorted(folder.glob("*.diff")):
        if "engram" in path.read_text(encoding="utf-8", errors="replace").lower():
            return f"member {path.stem} changes Engram code"
    return None


def check(
    report: Report,
    found: Sequence[Need],
    config: Any,
    capability: tuple[int, int],
    device: int | None,
    host: int | None,
) -> None:
    """Compares, and says the arithmetic; a facts row has it in any case.

    Args:
        report: gets facts, refusals and warnings.
        found: of ``needs``.
        config: the VllmConfig.
        capability: of the target.
        device: bytes of a GPU, None where that is not known.
        host: bytes of the host, None where that is not known.
    """
    parallel = config.parallel_config
    per_stage = int(parallel.tensor_parallel_size)
    here, assumed = _ranks_here(config)
    # Replicas on one host have tables of their own, unless they share them.
    if not (config.engram_config and config.engram_config.dp_shared_memory):
        per_stage *= max(1, int(parallel.data_parallel_size_local))
        here *= max(1, int(parallel.data_parallel_size_local))
    unified = is_unified(capability)
    tightest = max(found, key=lambda need: need.gpu + (need.pinned if unified else 0))
    of_stages = [need.pinned for need in found for _ in range(per_stage)]
    host_need = sum(sorted(of_stages, reverse=True)[:here])
    says = f"a GPU needs at least {tightest.on_gpu()}"
    if host_need:
        says += f"; a host with {here} ranks pins {_gib(host_need)} GiB: a rank's "
        says += max(found, key=lambda need: need.pinned).on_host()
    unknown = next((need.unknown for need in found if need.unknown), None)
    report.facts["memory"] = Fact(
        {
            "says": says,
            "gpu_bytes": [need.gpu for need in found],
            "pinned_bytes": [need.pinned for need in found],
            "host_pinned_bytes": host_need,
            "ranks_on_host": here,
            "unified": unified,
        },
        "vLLM's model on the meta device, its KV plan, EngramConfig",
        unknown or assumed,
    )
    why = _too_much(found, config, unified, device, host, host_need, here)
    if why is None:
        return
    if unknown is None:
        report.refusals.append(Refusal("memory", why))
        return
    report.warnings["engram_memory"] = (
        f"{unknown}, so where its tables are is assumed as without it: {why}"
    )


def _too_much(
    found: Sequence[Need],
    config: Any,
    unified: bool,
    device: int | None,
    host: int | None,
    host_need: int,
    here: int,
) -> str | None:
    if device is not None:
        for need in found:
            if unified and (total := need.gpu + need.pinned) > device:
                pinned = f"{need.on_host()}; " if need.pinned else ""
                return (
                    f"found {_gib(device)} GiB that GPU and host share, a rank of "
                    f"stage {need.stage} needs at least {_gib(total)} GiB: on the GPU "
                    f"{need.on_gpu()}; {pinned}offloading frees nothing here. Use more "
                    "ranks, or Engram tables on storage"
                )
            limit, share = _limit(config, device)
            if need.gpu > limit:
                return (
                    f"found a GPU of {_gib(device)} GiB{share}, a rank of stage "
                    f"{need.stage} needs at least {need.on_gpu()}. Use more ranks"
                    f"{_or_offload(need, unified)}"
                )
    if not unified and host is not None and host_need > host:
        largest = max(found, key=lambda need: need.pinned)
        return (
            f"found a host of {_gib(host)} GiB, its {here} ranks pin at least "
            f"{_gib(host_need)} GiB: a rank's {largest.on_host()}. Set "
            "--engram-config.use_thp true (exact sizes), spread ranks over more "
            "hosts, or keep tables on the GPUs"
        )
    return None


def _or_offload(need: Need, unified: bool) -> str:
    if unified or need.tables_pinned or not need.tables:
        return ", or a shorter --max-model-len"
    return ", or --engram-config.cpu_offload true"


def _limit(config: Any, device: int) -> tuple[int, str]:
    """What of a GPU vLLM uses: its share, unless the KV cache's size is fixed."""
    if config.cache_config.kv_cache_memory_bytes:
        return device, ""
    share = float(config.cache_config.gpu_memory_utilization)
    limit = int(device * share)
    return limit, f" (--gpu-memory-utilization {share:g}: {_gib(limit)} GiB)"


def _ranks_here(config: Any) -> tuple[int, str | None]:
    """Ranks on this host, and why that is assumed."""
    parallel = config.parallel_config
    ranks = int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)
    if parallel.distributed_executor_backend == "ray":
        # Ray places them; one a host is the least.
        return 1, "Ray places the ranks: one on each host is assumed"
    return max(1, ranks // max(1, int(getattr(parallel, "nnodes", 1)))), None


def is_unified(capability: tuple[int, int]) -> bool:
    """Whether GPU and host share one memory: GB10's capability, or what a GPU says."""
    if capability == _UNIFIED:
        return True
    try:
        return bool(current_platform.is_integrated_gpu())
    except Exception:  # no GPU here, or a release that does not ask
        return False


def sizes_here(config: Any) -> tuple[int, int]:
    """Bytes of the smallest GPU of this machine that the ranks use, and of its host."""
    used = min(_ranks_here(config)[0], current_platform.device_count())
    total = current_platform.get_device_total_memory
    smallest = min(int(total(number)) for number in range(max(1, used)))
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return smallest, host


def _gib(size: int, digits: int = 1) -> str:
    return f"{size / GIB:.{digits}f}"
