# SPDX-License-Identifier: Apache-2.0
"""The sparse-MLA kernels on a CPU: Triton's in its interpreter, in a process of its own,
since whether Triton interprets is settled when it is imported; the CUDA one compiled for the
CPU. Level of evidence: *emulated*."""

import ctypes
import functools
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from unittest import mock


class Child:
    """Runs ``measure`` in a process with the interpreter."""

    def __enter__(self):
        saved = {name: os.environ.get(name) for name in ("TRITON_INTERPRET", "OMP_NUM_THREADS")}
        os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        try:
            self.pool = ProcessPoolExecutor(1, get_context("spawn"))
            self.pool.submit(int).result()  # it has the environment now
        finally:
            for name, value in saved.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
        return self

    def __exit__(self, *error):
        self.pool.shutdown()

    def measure(self, **what):
        return self.pool.submit(measure, **what).result()

    def call(self, function, *args):
        return self.pool.submit(function, *args).result()


def _modules():
    import sm120_fake_device as fake

    return (
        fake.load("sm120_device_cases"),
        fake.load("sm120_reference"),
        fake.load("sm120_packed_cache"),
        fake.load("ops.sm120_sparse_mla"),
        fake.load("ops.sm120_sparse_mla_plan"),
    )


class OnCpu:
    """The CUDA kernels, compiled for the CPU, in place of ``sm120_sparse_mla_cuda.Kernels``.

    Args:
        seed: of the order in which warps and lanes take turns.
        text: another source than sm120_sparse_mla.cu's.
    """

    def __init__(self, seed=0, text=None):
        self.seed = seed
        self.library = library(text)

    def launch(self, planned, call):
        import sm120_fake_device as fake

        host = fake.load("ops.sm120_sparse_mla_cuda")
        cut, packed = planned.config, host.pack(planned, call)
        tokens, heads, _ = call.q.shape
        self._run(
            *(cut.function, planned.splits * planned.head_blocks, tokens),
            *(host.THREADS, cut.shared, packed),
        )
        if planned.splits > 1:
            self._run(host.MERGE, heads, tokens, host.MERGE_THREADS, host.MERGE_SHARED, packed)

    def _run(self, name, x, y, threads, shared, packed):
        error = self.library.run(name.encode(), x, y, threads, shared, self.seed, packed)
        if error:
            raise AssertionError(f"{name}: {error.decode()}")


@functools.cache
def library(text=None):
    """sm120_sparse_mla.cu for the CPU, or another source's text."""
    import sm120_cuda_on_cpu
    import sm120_fake_device as fake

    if text is None:
        text = fake.load("ops.sm120_sparse_mla_cuda").SOURCE.read_text()
    with tempfile.TemporaryDirectory() as folder:
        built = sm120_cuda_on_cpu.build(text + _DRIVER, Path(folder))
    built.run.argtypes = [ctypes.c_char_p, *[ctypes.c_uint] * 3, ctypes.c_size_t]
    built.run.argtypes += [ctypes.c_uint, ctypes.c_char_p]
    built.run.restype = ctypes.c_char_p
    return built


_DRIVER = """
#include <cstring>

extern "C" unsigned long sizeof_call() { return sizeof(Call); }

extern "C" unsigned long shared_bytes(int heads) {
  return heads == 16 ? Layout<1>::bytes : Layout<2>::bytes;
}

extern "C" const char* run(const char* name, unsigned x, unsigned y, unsigned threads,
                           unsigned long shared, unsigned seed, const void* bytes) {
  static std::string error;
  Call call;
  std::memcpy(&call, bytes, sizeof call);
  const std::string which = name;
  void (*kernel)(const Call) = which == "candidates_16"   ? candidates_16
                               : which == "candidates_32" ? candidates_32
                                                          : merge_splits;
  error = run_grid(x, y, threads, shared, seed, [&] { kernel(call); }, kernel == merge_splits);
  return error.c_str();
}
"""


def spread(segment, page, stride):
    """A segment whose pages lie ``stride`` bytes apart in memory of its own."""
    import dataclasses

    import torch

    blocks = segment.cache.shape[0]
    pool = torch.empty(blocks * stride, dtype=torch.uint8)
    cache = pool.as_strided((blocks, page * 584), (stride, 1))
    cache.copy_(segment.cache[:, : page * 584])
    return dataclasses.replace(segment, cache=cache)


def measure(
    shape,
    seed=0,
    config=None,
    stride=0,
    sinks=None,
    lens=True,
    twice=False,
    loud=1.0,
    sms=4,
    cuda=False,
    past=False,
    order=None,
    text=None,
):
    """One call against the float64 reference.

    Args:
        shape: fields of ``AttentionShape``.
        config: its name, or None for what would be chosen.
        stride: bytes from page to page of both caches, where it is no multiple of 576.
        sinks: every head's, instead of random ones.
        lens: whether the call is given lengths.
        twice: whether it is made twice, and must give the same bits.
        loud: factor of the query: 8 makes one candidate outweigh all others.
        sms: of the GPU that the call is planned for.
        cuda: whether the CUDA kernel may serve.
        past: whether the call is given slots past the end of the cache for invalid ones.
        order, text: of ``OnCpu``; the seed, and the source as it is, if not given.

    Returns:
        ``whole``: the relative norm of everything; ``worst``: of the worst row; ``lse``:
        largest difference; ``splits``, ``zeros``: how many rows are exact zeros;
        ``invalid``: how many have no candidate.
    """
    import dataclasses

    import torch

    cases, reference, packed, ops, planning = _modules()
    case = cases.random_case(cases.AttentionShape(**shape), seed, "cpu")
    window, extra = case.window, case.compressed
    if stride:
        window = spread(window, window.page, stride)
        extra = extra and spread(extra, extra.page, stride)
    if not lens:
        window = dataclasses.replace(window, lengths=None)
        extra = extra and dataclasses.replace(extra, lengths=None)
    q = case.q * loud
    sink = case.sinks if sinks is None else torch.full((q.shape[1],), sinks)
    indices = [segment and segment.indices for segment in (window, extra)]
    if past:
        for number, segment in enumerate(s for s in (window, extra) if s):
            slots = segment.cache.shape[0] * segment.page
            beyond = torch.tensor([slots, 2**31 - 1, slots + 7], dtype=torch.int32)
            beyond = beyond.repeat(segment.indices.shape[1])[: segment.indices.shape[1]]
            indices[number] = torch.where(segment.indices < 0, beyond, segment.indices)
    more = {}
    if extra is not None:
        more = {
            "extra_cache": packed.record_view(extra.cache, extra.page),
            "extra_indices": indices[1],
            "extra_lens": extra.lengths,
        }
    tokens, heads, _ = q.shape
    tile = None if config is None else planning.CONFIGS[config]
    ops._gpus[q.device] = gpu = planning.Gpu(sms, 100 << 10)
    ops._workspaces.clear()
    cuda = cuda and (tile is None or tile.function is not None)
    mine = (
        functools.partial(OnCpu, seed if order is None else order, text) if cuda else lambda: None
    )
    width = window.indices.shape[1]
    splits = planning.plan(
        tokens, heads, width, extra.indices.shape[1] if extra else 0, gpu, tile, cuda
    ).splits
    # NaN wherever nothing was written; the workspace, too.
    ops.default_workspace(q.device).fill_(torch.nan)
    outs = []
    for _ in range(1 + twice):
        out = torch.full_like(q, torch.nan)
        lse = torch.full((tokens, heads), torch.nan)
        view = packed.record_view(window.cache, window.page)
        args = (q, view, indices[0], window.lengths, sink, case.scale, out)
        with mock.patch.object(ops, "_cuda_kernels", lambda device, config: mine()):
            ops.sparse_mla(*args, lse=lse, config=tile, **more)
        outs.append((out, lse))
    same = all(torch.equal(a, b) for a, b in zip(outs[0], outs[-1], strict=True))
    want, want_lse = reference.sparse_mla(q, window, extra, sink, case.scale)
    none = torch.isinf(want_lse)
    difference = (out.double() - want).norm() / want.norm().clamp_min(1e-30)
    far = (lse.double() - want_lse)[~none].abs()
    return {
        "whole": float(difference),
        "worst": reference.relative_norm(out, want),
        "lse": float(far.max()) if far.numel() else 0.0,
        "splits": splits,
        "same": same,
        "zeros": int((out == 0).all(-1).sum()),
        "invalid": int(none.sum()),
        "empty_lse": bool(torch.equal(none, lse == -torch.inf)),
    }


def refused(change):
    """What a call says whose arguments are wrong in one way."""
    import torch

    cases, _, packed, ops, planning = _modules()
    # Enough for splits, whatever was measured before: without them no workspace is needed.
    case = cases.random_case(cases.AttentionShape(2, 4, 8, 4, context=8), 0, "cpu")
    ops._gpus[case.q.device] = planning.Gpu(132, 100 << 10)
    window = case.window
    args = {
        "q": case.q,
        "swa_cache": packed.record_view(window.cache, 4),
        "swa_indices": window.indices,
        "swa_lens": window.lengths,
        "sinks": case.sinks,
        "scale": case.scale,
        "out": torch.empty_like(case.q),
    }
    wrong = {
        "heads": {"q": case.q.new_zeros(2, 129, 512), "out": case.q.new_zeros(2, 129, 512)},
        "width of q": {"q": case.q[..., :256]},
        "type of q": {"q": case.q.half()},
        "out": {"out": case.q[:1]},
        "record": {"swa_cache": args["swa_cache"][..., :576]},
        "odd stride": {"swa_cache": packed.record_view(spread(window, 4, 2339).cache, 4)},
        "rows of indices": {"swa_indices": window.indices[:1]},
        "type of indices": {"swa_indices": window.indices.long()},
        "lens": {"swa_lens": window.lengths[:1]},
        "sinks": {"sinks": case.sinks.double()},
        "lse": {"lse": torch.empty(4, 2)},
        "no extra indices": {"extra_cache": args["swa_cache"]},
        "workspace": {"swa_indices": window.indices.repeat(1, 5), "workspace": torch.empty(1)},
        "its type": {
            "swa_indices": window.indices.repeat(1, 5),
            "workspace": torch.empty(1 << 20, dtype=torch.bfloat16),
        },
        "its address": {
            "swa_indices": window.indices.repeat(1, 5),
            "workspace": torch.empty(1 << 20)[1:],
        },
    }[change]
    try:
        ops.sparse_mla(**{**args, **wrong})
    except ValueError as error:
        return str(error)
    return None
