# SPDX-License-Identifier: Apache-2.0
"""The model of each pipeline stage, as one of its ranks builds it, on the meta device.

vLLM's own layers, sizes, placement and choice of kernels, without a weight and without
a GPU::

    with as_target(capability):  # no GPU here; None on the real one
        for rank in build(config):
            rank.modules(), rank.refused

Without a GPU vLLM's own CudaPlatform answers, with the capability that is asked about.
What stands in: CUDA streams, process groups (of the right sizes), the Engram hash, the
storage of Engram tables, and compiled operators, which are looked up by name when a
layer is built and never called.
Level of evidence: rule.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.utils import get_pp_indices
from vllm.models.deepseek_v41 import DeepseekV41ForCausalLM, DSparkDeepseekV4ForCausalLM
from vllm.models.deepseek_v41.nvidia import sm120_checkpoint_names as names
from vllm.models.deepseek_v41.nvidia.sm120_kv_plan import draft_layers
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils import import_utils
from vllm.utils.torch_utils import set_default_torch_dtype

# Compiled modules that vllm.platforms.cuda imports, and that need a driver.
_COMPILED = ("_C", "_C_stable_libtorch", "_qutlass_C")

# Namespaces of torch.ops that they fill.
_OPERATORS = ("_C", "_moe_C", "_C_cache_ops")

# Modules whose functions remember an answer of the platform.
_REMEMBERING = ("vllm.utils.flashinfer", "vllm.utils.deep_gemm")

# Functions that choose a kernel, where the model's quantization calls them.
_LINEAR = ("init_fp8_linear_kernel", "init_mxfp8_linear_kernel")
_EXPERTS = "select_deepseek_v4_mxfp4_moe_backend"

_HAS_DEEP_GEMM = import_utils.has_deep_gemm

# How a selector of vLLM says that nothing it has can run.
_NO_KERNEL = (ValueError, NotImplementedError, RuntimeError, AssertionError)

# SMs of the GPUs that a hypothetical capability stands for: GB10, and RTX PRO 6000.
_SMS = {(12, 1): 48}
_MOST_SMS = 188


class CannotBuild(RuntimeError):
    """This tree's model cannot be built on a CPU: its kernels cannot be asked for."""


@dataclass
class RankModel:
    """What a rank of one pipeline stage builds.

    Attributes:
        stage: the stage, from 0.
        layers: its backbone layers.
        config: the configuration that the model was built with.
        model: the backbone.
        draft: the DSpark draft, on the last stage where one is asked for.
        refused: what vLLM's selectors could not serve, in their words.
    """

    stage: int
    layers: range
    config: Any
    model: nn.Module
    draft: nn.Module | None = None
    refused: list[str] = field(default_factory=list)

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module by name; the draft's begin with ``draft.``."""
        yield from self.model.named_modules()
        if self.draft is not None:
            for name, module in self.draft.named_modules():
                yield f"draft.{name}", module

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once; what the draft shares with the model is the model's."""
        yield from self.model.named_parameters()
        if self.draft is not None:
            for name, parameter in self.draft.named_parameters():
                if not name.startswith(("model.embed_tokens.", "lm_head.")):
                    yield f"draft.{name}", parameter


def build(config: Any) -> list[RankModel]:
    """The ranks' models, one a pipeline stage. To be called ``as_target``.

    Raises:
        CannotBuild: one line.
    """
    parallel = config.parallel_config
    stages = int(parallel.pipeline_parallel_size)
    count = int(config.model_config.hf_config.num_hidden_layers)
    found = []
    for stage in range(stages):
        copied = names.copied(config)
        copied.kernel_config = names.changed(
            config.kernel_config, enable_jit_warmup=False
        )
        # On a platform that only pretends, before this, some releases make none.
        if copied.engram_config is None:
            copied._resolve_and_verify_engram_config()
        layers = range(*get_pp_indices(count, stage, stages))
        try:
            found.append(_build(copied, stage, stages, layers))
        except Exception as error:
            if os.environ.get("SM120_FORK_DEBUG"):
                raise
            said = " ".join(str(error).split())[:200]
            raise CannotBuild(f"{type(error).__name__}: {said}") from error
    return found


def _build(config: Any, stage: int, stages: int, layers: range) -> RankModel:
    parallel = config.parallel_config
    ranks, replicas = parallel.tensor_parallel_size, parallel.data_parallel_size
    across = bool(config.engram_config and config.engram_config.embedding_across_dp)
    shared = bool(config.engram_config and config.engram_config.dp_shared_memory)
    groups = {
        "_TP": names.process_group(ranks),
        "_PP": names.process_group(stages, stage),
        "_DP": names.process_group(replicas),
        "_EP": names.process_group(ranks * replicas),
        # None where every replica has tables of its own.
        "_ENGRAM_DP": names.process_group(replicas) if across or shared else None,
    }
    refused: list[str] = []
    with (
        names.stand_ins(groups, kernels=False),
        _noted_refusals(refused),
        _tables_of_no_bytes(),
        torch.no_grad(),
        set_current_vllm_config(config),
        set_default_torch_dtype(config.model_config.dtype),
        torch.device("meta"),
    ):
        model = DeepseekV41ForCausalLM(vllm_config=config)
        draft = None
        if stage == stages - 1 and draft_layers(config):
            draft = DSparkDeepseekV4ForCausalLM(vllm_config=config)
    return RankModel(stage, layers, config, model, draft, refused)


@contextlib.contextmanager
def asking(rank: RankModel, capability: tuple[int, int] | None) -> Iterator[None]:
    """Inside, functions of vLLM that choose a kernel at a call can be asked: its
    configuration is that rank's, and without a GPU a device stands in. To be used
    ``as_target`` of the same capability."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(set_current_vllm_config(rank.config))
        dtype = rank.config.model_config.dtype
        stack.enter_context(set_default_torch_dtype(dtype))
        if capability is not None:
            stack.enter_context(names.stand_ins(kernels=False))
            major, minor = capability
            gpu = SimpleNamespace(
                multi_processor_count=sm_count(capability), major=major, minor=minor
            )
            stack.enter_context(
                mock.patch.object(torch.cuda, "get_device_properties", lambda *_: gpu)
            )
        yield


# Modules that hold Engram tables: of all releases, and before 0.32.
_ENGRAM = ("common.engram", "nvidia.engram")


@contextlib.contextmanager
def _tables_of_no_bytes() -> Iterator[None]:
    """Engram tables have their size and no storage. Before 0.33 they are allocated and
    pinned on the host even where the device is meta."""

    def allocate(table: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows, dim = table.part_num_embeddings, table.dim
        scales = dim // table.block_size
        return (
            torch.empty(rows, dim, dtype=torch.float8_e4m3fn, device="meta"),
            torch.empty(rows, scales, dtype=torch.uint8, device="meta"),
        )

    with contextlib.ExitStack() as stack:
        for name in _ENGRAM:
            try:
                module = importlib.import_module(f"vllm.models.deepseek_v41.{name}")
            except ImportError:
                continue
            for owner in list(vars(module).values()):
                if isinstance(owner, type) and "_allocate_weights" in vars(owner):
                    stack.enter_context(
                        mock.patch.object(owner, "_allocate_weights", allocate)
                    )
        yield


@contextlib.contextmanager
def _noted_refusals(refused: list[str]) -> Iterator[None]:
    """A selector that finds nothing is noted, and building goes on."""
    from vllm.model_executor.layers.quantization import fp8, modelopt, mxfp4

    nothing = mock.MagicMock(name="no kernel")
    instead: list[tuple[ModuleType, str, Any]] = [
        (module, name, nothing) for module in (fp8, modelopt) for name in _LINEAR
    ]
    instead.append((mxfp4, _EXPERTS, (mxfp4.Mxfp4MoeBackend.MARLIN, None)))
    with contextlib.ExitStack() as stack:
        for module, name, value in instead:
            if select := getattr(module, name, None):
                noted = _noting(select, refused, value)
                stack.enter_context(mock.patch.object(module, name, noted))
        yield


def _noting(select: Any, refused: list[str], instead: Any) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        try:
            return select(*args, **kwargs)
        except _NO_KERNEL as error:
            said = " ".join(str(error).split())
            if said not in refused:
                refused.append(said)
            return instead

    return noted


@contextlib.contextmanager
def as_target(capability: tuple[int, int] | None) -> Iterator[None]:
    """vLLM's platform is CUDA with that capability inside; with None, it is the real
    one, and nothing changes. FlashInfer's toolchain passes for present, and DeepGEMM
    for importable (``deep_gemm_assumed`` says whether it is).

    Raises:
        CannotBuild: vLLM's CUDA platform cannot be imported here.
    """
    if capability is None:
        yield
        return
    platform = _cuda_platform(capability)
    before = current_platform.__class__
    with contextlib.ExitStack() as stack:
        cubin = {"VLLM_HAS_FLASHINFER_CUBIN": "1"}
        stack.enter_context(mock.patch.dict(os.environ, cubin))
        if deep_gemm_assumed():
            _replace_everywhere(stack, import_utils.has_deep_gemm, lambda: True)
        for name in _OPERATORS:
            found = _Operators(getattr(torch.ops, name))
            stack.enter_context(mock.patch.object(torch.ops, name, found))
        stack.callback(_forget)
        stack.callback(setattr, current_platform, "__class__", before)
        current_platform.__class__ = platform
        _forget()
        yield


def deep_gemm_assumed() -> str | None:
    """Why vLLM's DeepGEMM passes for importable on a hypothetical target."""
    if _HAS_DEEP_GEMM():
        return None
    return "DeepGEMM's extension cannot be imported here"


def _replace_everywhere(
    stack: contextlib.ExitStack, function: Any, stand_in: Any
) -> None:
    """In every module of vLLM that has imported the function by name."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("vllm.") or module is None:
            continue
        if vars(module).get(function.__name__) is function:
            stack.enter_context(mock.patch.object(module, function.__name__, stand_in))


def _cuda_platform(capability: tuple[int, int]) -> type:
    """vLLM's own CudaPlatform, of a device that has ``capability``."""
    module = "vllm.platforms.cuda"
    absent = [f"vllm.{n}" for n in _COMPILED if f"vllm.{n}" not in sys.modules]
    was_there = module in sys.modules
    with contextlib.ExitStack() as stack:
        for name in absent:
            sys.modules[name] = ModuleType(name)
            stack.callback(sys.modules.pop, name, None)
        if not was_there:
            # Others find out by this import that there is no driver.
            stack.callback(sys.modules.pop, module, None)
        try:
            base = importlib.import_module(module).CudaPlatformBase
        except Exception as error:
            raise CannotBuild(f"{module}: {type(error).__name__}: {error}") from error
    sms = sm_count(capability)
    answers = {
        "get_device_capability": lambda cls, device_id=0: DeviceCapability(*capability),
        "num_compute_units": lambda cls, device_id=0: sms,
        "get_device_name": lambda cls, device_id=0: "SM12x",
        "is_fully_connected": lambda cls, ids: False,
    }
    return type(
        "TargetPlatform", (base,), {n: classmethod(f) for n, f in answers.items()}
    )


def sm_count(capability: tuple[int, int]) -> int:
    """SMs of the GPU that a hypothetical capability stands for: GB10's 48 for 12.1,
    else RTX PRO 6000's 188."""
    return _SMS.get(capability, _MOST_SMS)


def _forget() -> None:
    for name in _REMEMBERING:
        for value in vars(importlib.import_module(name)).values():
            clear = getattr(value, "cache_clear", None)
            if callable(clear):
                clear()


class _Operators:
    """A namespace of compiled operators in which any name is found."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._real, name)
        except AttributeError:
            return mock.MagicMock(name=f"operator {name}")
