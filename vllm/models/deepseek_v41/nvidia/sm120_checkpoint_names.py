# SPDX-License-Identifier: Apache-2.0
"""The tensor names of a checkpoint against the model that a configuration builds.

A tensor without a parameter ends weight loading in an error, after everything before
it was read. This asks before anything is read.

vLLM's own code: the model class and the DSpark draft's, built on the meta device with
every layer; the quantization config and the methods that create the parameters of
linear layers and experts; ``hf_to_vllm_mapper``; ``AutoWeightsLoader`` and the
``load_weights`` that it finds, which decide where a name goes, which names are skipped
and what is an error.

Ours: one rank instead of a launch's many, without offloading, expert parallelism or a
mega-MoE backend (its parameters are those of all ranks together; what is left out
changes where a tensor lies, not what it is called); stand-ins for CUDA streams, process
groups, the engram hash and the choice of kernels, which name no parameter; parameters
that note what they are fed instead of storing it; the order in which names are fed; and
that an expert's tensor which the loader drops without a word counts as homeless.

Nothing is imported that a vLLM image lacks, no weight is read and no GPU is touched.
Works on an unpatched tree too. Level of evidence: rule.
"""

import contextlib
import copy
import dataclasses
import inspect
import json
import math
import os
import re
import stat
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from vllm.config import EngramConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.utils import configure_quant_config
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.models.deepseek_v41 import (
    DeepseekV4FP8Config,
    DeepseekV41ForCausalLM,
    DSparkDeepseekV4ForCausalLM,
    attention,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_MAX_INDEX_BYTES = 64 << 20
_MAX_HEADER_BYTES = 100 << 20
_MAX_NAME = 512

_MAX_HOMELESS = 1000
"""Names without a home after which the rest is not asked for."""

_MOST = {
    "num_hidden_layers": 512,
    "num_nextn_predict_layers": 64,
    "vision_n_layers": 512,
    "n_routed_experts": 4096,
    "dspark_n_routed_experts": 4096,
}
"""What a configuration may have, so that building it ends: config.json is untrusted."""

_NO_HOME = (LookupError, ValueError, UnboundLocalError, AssertionError, AttributeError)
"""What vLLM's loaders end in where a name has no parameter."""

_DIGITS = re.compile(r"(?<=\.)\d+(?=\.)")
_IMAGE_BIAS = ".ffn.gate.bias_vl"


class CannotCheck(RuntimeError):
    """This tree's model cannot be built on a CPU, so names cannot be compared."""


@dataclasses.dataclass(frozen=True)
class NamesReport:
    """What does not fit between a checkpoint and the configured model.

    Attributes:
        homeless: names in the checkpoint, as it spells them, whose loading would end in
            an error; sorted.
        unfed: parameters of the model, as vLLM names them, that no tensor feeds, or of
            which some shards or experts are missing (then said in brackets); sorted.
        advice: what to change, where that is known.
        complete: False where so many names were homeless that the rest was not asked
            for.
    """

    homeless: list[str]
    unfed: list[str]
    advice: str | None = None
    complete: bool = True


# --- The checkpoint's names --------------------------------------------------------


def read_index(model_dir: str | os.PathLike[str]) -> set[str] | None:
    """Tensor names of a checkpoint folder; its files are untrusted.

    Returns:
        The names in ``model.safetensors.index.json``, else those in the header of a
        single ``model.safetensors``, else None.

    Raises:
        ValueError: one line; the file is malformed, truncated, of the wrong type or
            larger than a checkpoint's can be.
    """
    folder = Path(model_dir)
    for name, read in ((INDEX, _index_names), (SINGLE, _header_names)):
        path = folder / name
        try:
            with _open_regular(path) as fd:
                if fd is None:
                    continue
                names = read(fd)
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{name}: {_one_line(error)}") from None
        if not names:
            raise ValueError(f"{name}: names no tensor")
        for tensor in names:
            if not (0 < len(tensor) <= _MAX_NAME and tensor.isprintable()):
                raise ValueError(f"{name}: not a tensor name: {_shown(tensor)}")
        return names
    return None


@contextlib.contextmanager
def _open_regular(path: Path) -> Iterator[int | None]:
    """A file descriptor for reading; None where there is no such file. A FIFO or a
    device is refused, without waiting for it."""
    if not os.path.lexists(path):
        yield None
        return
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("not a regular file")
        yield fd
    finally:
        os.close(fd)


def _read(fd: int, size: int, what: str) -> bytes:
    """Exactly ``size`` bytes."""
    parts: list[bytes] = []
    while size > 0:
        part = os.read(fd, min(size, 1 << 24))
        if not part:
            raise ValueError(f"truncated: {what} ends early")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _index_names(fd: int) -> set[str]:
    size = os.fstat(fd).st_size
    if size > _MAX_INDEX_BYTES:
        raise ValueError(f"{size} bytes, more than {_MAX_INDEX_BYTES}")
    index = _json_object(_read(fd, size, "the file"))
    names = index.get("weight_map")
    if not isinstance(names, dict):
        raise ValueError("weight_map is not an object")
    for name, shard in names.items():
        if not isinstance(shard, str) or not shard:
            raise ValueError(f"the shard of {_shown(name)} is not a file name")
    return set(names)


def _header_names(fd: int) -> set[str]:
    size = os.fstat(fd).st_size
    length = int.from_bytes(_read(fd, 8, "the length of the header"), "little")
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes, more than {_MAX_HEADER_BYTES}")
    if length > size - 8:
        raise ValueError(f"truncated: a header of {length} bytes in {size}")
    header = _json_object(_read(fd, length, "the header"))
    header.pop("__metadata__", None)
    end = 0
    for name, tensor in header.items():
        offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
        if not (
            isinstance(offsets, list)
            and len(offsets) == 2
            and all(type(offset) is int for offset in offsets)
            and 0 <= offsets[0] <= offsets[1]
        ):
            raise ValueError(f"{_shown(name)} has no data_offsets")
        end = max(end, offsets[1])
    if end > size - 8 - length:
        raise ValueError(
            f"truncated: {size} bytes, its tensors need {8 + length + end}"
        )
    return set(header)


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 80 else text[:77] + "...")


def _one_line(error: BaseException, limit: int = 200) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


# --- The model's names -------------------------------------------------------------


def check(vllm_config: "VllmConfig", names: Collection[str]) -> NamesReport:
    """Compares a checkpoint's tensor names with the model of ``vllm_config``.

    ``vllm_config`` is not changed. A platform of the wanted capability must be in
    place, real or pretended. Other threads must not build models meanwhile.

    Raises:
        CannotCheck: one line; the model could not be built here.
    """
    homeless: set[str] = set()
    unfed: list[str] = []
    complete = True
    with stand_ins(), torch.no_grad():
        for model, spared in _built(vllm_config):
            notes = _Notes(model)
            lost = _feed(model, sorted(names), notes)
            homeless |= set(lost)
            complete &= len(lost) < _MAX_HOMELESS
            unfed += [name for name in notes.unfed() if not name.startswith(spared)]
    advice = None
    if any(name.endswith(_IMAGE_BIAS) for name in homeless):
        advice = safe_text_only()
    return NamesReport(sorted(homeless), sorted(unfed), advice, complete)


def safe_text_only() -> str:
    """Which text-only form keeps the parameters that the checkpoint fills here.

    Before upstream #57152 (first in 0.31) V4.1's prefill is widened by
    ``vision_max_n_token`` even for text; its attention class then reads that field.
    """
    form = "--language-model-only"
    if "vision_max_n_token" in inspect.getsource(attention):
        form += " --hf-overrides.vision_max_n_token 0"
    return (
        "vision_n_layers 0 removes ffn.gate.bias_vl, which the checkpoint fills. For "
        f"text only use {form} instead."
    )


def copied(vllm_config: "VllmConfig") -> Any:
    """A copy to build a model with: what building writes to is not shared."""
    config = copy.copy(vllm_config)
    config.model_config = copy.copy(vllm_config.model_config)
    for field in ("hf_config", "hf_text_config"):
        with contextlib.suppress(AttributeError):
            value = copy.deepcopy(getattr(vllm_config.model_config, field))
            setattr(config.model_config, field, value)
    compilation = copy.copy(vllm_config.compilation_config)
    for field, value in vars(compilation).items():
        if isinstance(value, (dict, list, set)):
            setattr(compilation, field, copy.copy(value))
    for field in ("static_forward_context", "static_all_moe_layers"):
        if hasattr(compilation, field):
            getattr(compilation, field).clear()
    config.compilation_config = compilation
    config.quant_config = _quantization(vllm_config)
    return config


def _one_rank(vllm_config: "VllmConfig") -> Any:
    """The configuration of one rank that holds the whole model, on copies."""
    config = copied(vllm_config)
    config.parallel_config = changed(
        vllm_config.parallel_config,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        world_size=1,
        rank=0,
        data_parallel_rank=0,
        enable_expert_parallel=False,
        enable_eplb=False,
        enable_dbo=False,
    )
    config.kernel_config = changed(
        vllm_config.kernel_config, moe_backend="auto", enable_jit_warmup=False
    )
    # vLLM makes one where the platform is CUDA; a pretended one may not count.
    config.engram_config = changed(
        vllm_config.engram_config or EngramConfig(cpu_offload=False),
        cpu_offload=False,
        dp_shared_memory=False,
        use_thp=False,
        embedding_across_dp=False,
    )
    return config


def changed(config: Any, **values: Any) -> Any:
    """A copy with those fields changed that this release has."""
    config = copy.copy(config)
    for field, value in values.items():
        if hasattr(config, field):
            object.__setattr__(config, field, value)
    return config


def _quantization(vllm_config: "VllmConfig") -> Any:
    """The quantization config that a CUDA platform gives this model.

    Where the platform is only pretended, vLLM has chosen another class.
    """
    found = copy.copy(vllm_config.quant_config)
    model_config = vllm_config.model_config
    hf_quant = getattr(model_config.hf_config, "quantization_config", None)
    if isinstance(hf_quant, dict) and not isinstance(found, DeepseekV4FP8Config):
        chosen = DeepseekV4FP8Config.override_quantization_method(
            hf_quant, model_config.quantization, hf_config=model_config.hf_config
        )
        if chosen is not None:
            found = DeepseekV4FP8Config.from_config(hf_quant)
    if found is not None:
        configure_quant_config(found, DeepseekV41ForCausalLM)
    return found


class _Ignored:
    """In place of a CUDA stream or event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class _NoHash(nn.Module):
    """In place of the engram hash, which has no parameter and wants the tokenizer."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def process_group(size: int = 1, rank: int = 0) -> Any:
    """In place of a group of ``size`` processes, of which this is ``rank``."""
    return SimpleNamespace(
        world_size=size,
        rank=rank,
        rank_in_group=rank,
        local_rank=0,
        ranks=list(range(size)),
        is_first_rank=rank == 0,
        is_last_rank=rank == size - 1,
        device_communicator=None,
        unique_name="names:0",
    )


@contextlib.contextmanager
def stand_ins(
    groups: Mapping[str, Any] | None = None, kernels: bool = True
) -> Iterator[None]:
    """What building a model asks of a GPU, its peers and its kernels, for a while.

    Args:
        groups: process groups by their name in vLLM's parallel_state; every other one
            has this process alone.
        kernels: also stand in for the choice of kernels.
    """
    from vllm.model_executor.layers.quantization import fp8, modelopt, mxfp4
    from vllm.models.deepseek_v41.nvidia import model
    from vllm.utils import flashinfer

    group = process_group()
    gpu = SimpleNamespace(multi_processor_count=1)
    replaced: list[tuple[Any, str, Any]] = [
        (parallel_state, name, (groups or {}).get(name, group))
        for name, annotation in parallel_state.__annotations__.items()
        if "GroupCoordinator" in str(annotation)
    ]
    replaced += [
        (torch.cuda, "Stream", _Ignored),
        (torch.cuda, "Event", _Ignored),
        (torch.cuda, "get_device_properties", lambda *_: gpu),
        (torch.accelerator, "current_device_index", lambda: 0),
        # Whether FlashInfer has this shape is another gate's question.
        (flashinfer, "has_flashinfer_sparse_mla_sm120_config", lambda *_: True),
        (model, "NgramHashState", _NoHash),
        # Asks the replicas, and this machine's shared memory.
        (model, "can_share_engram_tables", lambda *_, **__: True),
    ]
    if kernels:
        kernel = mock.MagicMock()
        for module in (fp8, modelopt):
            for kind in ("fp8", "mxfp8", "nvfp4"):
                name = f"init_{kind}_linear_kernel"
                replaced.append((module, name, lambda *_, **__: kernel))
        backend = mxfp4.Mxfp4MoeBackend.MARLIN
        chosen = lambda *_, **__: (backend, None)  # noqa: E731
        replaced.append((mxfp4, "select_deepseek_v4_mxfp4_moe_backend", chosen))
        chosen_fp8 = lambda *_, **__: (kernel, None)  # noqa: E731
        replaced.append((fp8, "select_fp8_moe_backend", chosen_fp8))
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _built(vllm_config: Any) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """The model, then the DSpark draft where one is asked for; each with the prefixes
    of parameters that it need not load itself."""
    hf_config = vllm_config.model_config.hf_config
    for field, most in _MOST.items():
        value = getattr(hf_config, field, 0) or 0
        if not isinstance(value, int) or value > most:
            raise CannotCheck(f"{field} is {_shown(str(value))}, more than {most}")
    classes: list[tuple[Any, tuple[str, ...]]] = [(DeepseekV41ForCausalLM, ())]
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None and "dspark" in str(speculative.method):
        # The first two are the model's. The confidence head is optional: the draft's
        # loader drops it if not fed.
        spared = ("model.embed_tokens.", "lm_head.", "model.confidence_head.")
        classes.append((DSparkDeepseekV4ForCausalLM, spared))
    config = None
    for cls, spared in classes:
        try:
            config = config or _one_rank(vllm_config)
            with set_current_vllm_config(config), torch.device("meta"):
                model = cls(vllm_config=config)
        except Exception as error:
            if os.environ.get("SM120_FORK_DEBUG"):
                raise
            raise CannotCheck(
                f"{cls.__name__} cannot be built on the meta device: "
                f"{type(error).__name__}: {_one_line(error)}"
            ) from error
        yield model, spared


class _Notes:
    """What each parameter was fed: which shards, of which experts."""

    def __init__(self, model: nn.Module) -> None:
        """Puts a tiny parameter that takes notes in the place of each real one."""
        self.parts: dict[str, set[tuple[Any, ...]]] = {}
        self.values: dict[str, nn.Parameter] = {}
        self.shapes: dict[str, torch.Size] = {}
        self.count = 0
        tiny: dict[int, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            tiny[id(parameter)] = self._tiny(name)
            self.shapes[name] = parameter.shape
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = tiny[id(parameter)]

    def _tiny(self, name: str) -> nn.Parameter:
        value = nn.Parameter(torch.full((1, 1), math.nan), requires_grad=False)
        parts = self.parts[name] = set()
        self.values[name] = value

        def weight_loader(_: Any, __: Any, *args: Any, **kwargs: Any) -> bool:
            if "expert_id" in kwargs:
                parts.add((kwargs["shard_id"], kwargs["expert_id"]))
            else:
                parts.add(args)
            self.count += 1
            return True

        value.weight_loader = weight_loader
        return value

    def unfed(self) -> Iterator[str]:
        """Parameters, or parts of them, that nothing was fed to.

        Which shards a parameter has is known from others of its kind: the same name in
        another layer, of the same shape (a compressor of ratio 1 has no gate, and half
        the rows).
        """
        shards: dict[Any, set[Any]] = defaultdict(set)
        for name, parts in self.parts.items():
            # Before 0.33 attention sinks are written without their weight_loader.
            if not parts and not bool(self.values[name].isnan().any()):
                parts.add(())
            kind = _DIGITS.sub("N", name), self.shapes[name]
            shards[kind] |= {part[:1] for part in parts}
        for name, parts in self.parts.items():
            expected = shards[_DIGITS.sub("N", name), self.shapes[name]]
            if any(len(part) == 2 for part in parts):
                experts = range(self.shapes[name][0])
                expected = {(*shard, i) for shard in expected for i in experts}
            missing = sorted(expected - parts, key=str)
            if not parts:
                yield name
            elif missing:
                some = ", ".join("/".join(map(str, part)) for part in missing[:4])
                more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
                yield f"{name} [{some}{more}]"


def _feed(model: nn.Module, names: list[str], notes: _Notes) -> list[str]:
    """Feeds the names to the model's own loader; returns those without a home.

    The loader stops at the first error. The name that it had just taken is the one,
    and it is called again with those that follow. An expert's tensor that it drops
    without a word, as it does with experts that the configuration does not have, has no
    home either.
    """
    tensor = torch.ones(1, 1)
    if hasattr(model, "hf_to_vllm_mapper"):
        # As its load_weights does: its mapper, then one group for each child.
        mapper = model.hf_to_vllm_mapper
        pairs = [
            (new, old) for old in names for new, _ in mapper.apply([(old, tensor)])
        ]
        pairs.sort()
        load = lambda weights: AutoWeightsLoader(model).load_weights(weights)  # noqa: E731
    else:
        pairs = [(name, name) for name in names]
        load = model.load_weights
    # Kernel layouts, which have no part in names.
    for owner in (model, getattr(model, "language_model", None)):
        if hasattr(owner, "process_weights_after_loading"):
            owner.process_weights_after_loading = lambda: None

    lost: list[str] = []
    taken = 0
    ended = False

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal taken, ended
        while taken < len(pairs) and len(lost) < _MAX_HOMELESS:
            new, old = pairs[taken]
            taken += 1
            before = notes.count
            yield new, tensor
            if notes.count == before and ".experts." in new and _loads(model, new):
                lost.append(old)
        ended = True

    while taken < len(pairs) and len(lost) < _MAX_HOMELESS:
        before = taken
        try:
            load(weights())
        except Exception as error:
            if isinstance(error, _NO_HOME) and taken > before and not ended:
                lost.append(pairs[taken - 1][1])
                continue
            if os.environ.get("SM120_FORK_DEBUG"):
                raise
            raise CannotCheck(
                f"the loader stopped after {taken} of {len(pairs)} names: "
                f"{type(error).__name__}: {_one_line(error)}"
            ) from error
    return lost


def _loads(model: nn.Module, name: str) -> bool:
    """Whether the model takes names of that kind; the draft leaves the rest alone."""
    return hasattr(model, "hf_to_vllm_mapper") or name.startswith("mtp.")
