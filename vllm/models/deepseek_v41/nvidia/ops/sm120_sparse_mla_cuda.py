# SPDX-License-Identifier: Apache-2.0
"""sm120_sparse_mla.cu: built by NVRTC when first used, and launched.

NVRTC comes with PyTorch, so neither nvcc nor a C++ compiler is needed; building takes
about a second a process. Called through ``sm120_sparse_mla.sparse_mla``, which takes
Triton's kernel where this one cannot be built.
"""

import ctypes
import functools
import logging
import struct
import threading
from pathlib import Path
from typing import Any

import torch

from .sm120_sparse_mla_operands import Operands, slots_of
from .sm120_sparse_mla_plan import CONFIGS, WARP, WARPS, Plan

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("sm120_sparse_mla.cu")

# mul.bf16x2 and griddepcontrol need it (PTX ISA).
MINIMUM_CAPABILITY = (9, 0)

# The source's ``Call``: two segments, pointers, strides, scale, counts.
CALL = struct.Struct("<" + "3Q2qi5I" * 2 + "5Q4qf3i")

_NO_SEGMENT = (0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0)

THREADS = WARPS * WARP
MERGE = "merge_splits"
MERGE_THREADS = 512
MERGE_SHARED = 3 * 128 * 16


def build(capability: tuple[int, int]) -> bytes:
    """The source compiled for a GPU, as a cubin. Needs no GPU.

    Raises:
        RuntimeError: NVRTC is missing or refuses; the text holds its log.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise RuntimeError(f"no cuda-bindings: {error}") from error
    try:
        made, program = nvrtc.nvrtcCreateProgram(
            SOURCE.read_bytes(), SOURCE.name.encode(), 0, [], []
        )
    except RuntimeError as error:  # the library is not found
        raise RuntimeError(f"no NVRTC: {error}") from error
    _checked("nvrtcCreateProgram", made)
    major, minor = capability
    options = [f"--gpu-architecture=sm_{major}{minor}a".encode(), b"-std=c++17"]
    options.append(b"-default-device")
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(result):
            # Two at least: Python shares its byte strings of one.
            log = b" " * max(2, nvrtc.nvrtcGetProgramLogSize(program)[1])
            nvrtc.nvrtcGetProgramLog(program, log)
            text = log.decode(errors="replace").strip(" \0\n")
            raise RuntimeError(
                f"NVRTC refuses {SOURCE.name} for {major}.{minor}: {text}"
            )
        cubin = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
        _checked("nvrtcGetCUBIN", *nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return cubin


def _checked(name: str, result: Any, *rest: Any) -> Any:
    if int(result):
        raise RuntimeError(f"{name}: {result.name}")
    return rest[0] if len(rest) == 1 else rest


class Kernels:
    """The kernels, loaded for one device.

    Args:
        index: the CUDA device, whose context PyTorch has made.

    Raises:
        RuntimeError: they cannot be built or loaded.
    """

    def __init__(self, index: int) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._index = index
        self._local = threading.local()
        with torch.cuda.device(index):
            self._make_current()
            cubin = build(torch.cuda.get_device_capability(index))
            loaded = driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0)
            library = _checked("cuLibraryLoadData", *loaded)
            attributes = driver.CUfunction_attribute
            most = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._functions = {}
            for name, shared in (
                *((c.function, c.shared) for c in CONFIGS.values() if c.function),
                (MERGE, 0),
            ):
                kernel = _checked(
                    name, *driver.cuLibraryGetKernel(library, name.encode())
                )
                function = _checked(name, *driver.cuKernelGetFunction(kernel))
                if shared:
                    _checked(name, *driver.cuFuncSetAttribute(function, most, shared))
                self._functions[name] = function
        self._library = library
        self._merge_config()  # or a name that these bindings lack would show in serving

    def _make_current(self) -> None:
        """PyTorch's context of the device, where this thread has none yet: PyTorch
        makes it at a thread's first call that needs one, which this may be."""
        torch.cuda.init()
        (result, context) = self._driver.cuCtxGetCurrent()
        if int(result) or not int(context):
            device = _checked("cuDeviceGet", *self._driver.cuDeviceGet(self._index))
            made = self._driver.cuDevicePrimaryCtxRetain(device)
            context = _checked("cuDevicePrimaryCtxRetain", *made)
            _checked("cuCtxSetCurrent", *self._driver.cuCtxSetCurrent(context))

    def launch(self, planned: Plan, call: Operands) -> None:
        """Launches a call, with its plan, on the current stream."""
        if torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                return self.launch(planned, call)
        tokens, heads, _ = call.q.shape
        local = self._local
        if not hasattr(local, "bytes"):
            self._make_current()
            local.bytes = ctypes.create_string_buffer(CALL.size)
            local.params = (ctypes.c_void_p * 1)(ctypes.addressof(local.bytes))
            local.merge = self._merge_config()
        local.bytes.raw = pack(planned, call)
        params = ctypes.addressof(local.params)
        stream = torch.cuda.current_stream().cuda_stream
        cut = planned.config
        assert cut.function is not None
        (result,) = self._driver.cuLaunchKernel(
            self._functions[cut.function],
            *(planned.splits * planned.head_blocks, tokens, 1, THREADS, 1, 1),
            *(cut.shared, stream, params, 0),
        )
        _checked(cut.function, result)
        if planned.splits > 1:
            merge = local.merge
            merge.gridDimX, merge.gridDimY, merge.hStream = heads, tokens, stream
            (result,) = self._driver.cuLaunchKernelEx(
                merge, self._functions[MERGE], params, 0
            )
            _checked(MERGE, result)

    def _merge_config(self) -> Any:
        """The merge may be launched while the splits still run: it waits for them
        (programmatic dependent launch)."""
        driver = self._driver
        early = driver.CUlaunchAttribute()
        ids = driver.CUlaunchAttributeID
        early.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX = MERGE_THREADS
        config.sharedMemBytes = MERGE_SHARED
        config.attrs = [early]
        config.numAttrs = 1
        return config


@functools.cache
def kernels(index: int) -> Kernels | None:
    """The kernels of a device; None, said once in the log, where there are none. Which
    of the two serves is settled at the first call: no rank changes in the middle."""
    try:
        if torch.cuda.get_device_capability(index) < MINIMUM_CAPABILITY:
            raise RuntimeError("needs compute capability 9.0 or newer")
        return Kernels(index)
    except (AttributeError, ImportError, OSError, RuntimeError) as error:
        # AttributeError: cuda-bindings of another release.
        logger.warning(
            "The sparse MLA's CUDA kernel is not there, Triton's serves, which is "
            "slower: %s",
            error,
        )
        return None


def takes(*tensors: torch.Tensor) -> bool:
    """Whether the CUDA kernel can read and write these: rows at multiples of 16 B.

    Args:
        tensors: caches, and ``q`` and ``out``; the last dimension is contiguous.
    """
    for tensor in tensors:
        bits = tensor.data_ptr()
        strides = (
            tensor.stride()[:1] if tensor.dtype == torch.uint8 else tensor.stride()[:2]
        )
        for stride in strides:
            bits |= stride * tensor.element_size()
        if bits % 16:
            return False
    return True


@functools.cache
def division(page: int) -> tuple[int, int]:
    """``magic`` and ``shift``: slot // page == slot * magic >> shift below 2**31."""
    shift = 31 + (page - 1).bit_length()
    return -(-(1 << shift) // page), shift


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _segment(
    cache: torch.Tensor, indices: torch.Tensor, lens: torch.Tensor | None
) -> tuple[int, ...]:
    page = cache.shape[1]
    return (
        cache.data_ptr(),
        indices.data_ptr(),
        _address(lens),
        cache.stride(0),
        indices.stride(0),
        indices.shape[1],
        page,
        *division(page),
        slots_of(cache),
        0,
    )


def pack(planned: Plan, call: Operands) -> bytes:
    """A call as the source's ``Call``."""
    extra = _NO_SEGMENT
    if call.extra_cache is not None:
        assert call.extra_indices is not None
        extra = _segment(call.extra_cache, call.extra_indices, call.extra_lens)
    return CALL.pack(
        *_segment(call.swa_cache, call.swa_indices, call.swa_lens),
        *extra,
        call.q.data_ptr(),
        call.out.data_ptr(),
        *(_address(x) for x in (call.sinks, call.lse, call.parts)),
        *(call.q.stride(0), call.q.stride(1)),
        *(call.out.stride(0), call.out.stride(1)),
        *(call.scale_log2, call.q.shape[1], planned.splits, planned.head_blocks),
    )
