# SPDX-License-Identifier: Apache-2.0
"""Calls of ops on a CPU: right kernels pass, planted faults and races are named, a
missing library, a crash and a hang are results, and memory stays as stated."""

import importlib.util
import re
import sys
import time
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))

import sm120_fake_device as fake  # noqa: E402
import sm120_fake_ops as ops  # noqa: E402

op_call = fake.load("sm120_op_call")
child_process = fake.load("sm120_child_process")
calls = fake.load("sm120_device_calls")


@pytest.mark.parametrize("name", ops.SHAPES)
def test_right_kernel_passes(name):
    op = ops.SHAPES[name]
    for seed in range(3):
        result = op_call.run_op(op, ops.RIGHT[name](op), "cpu", seed)
        assert result.reason == "" and result.ok, seed
        assert result.error_norm <= max(result.bound.value, 0)
    assert result.call == f"{op.name}: {op}"
    assert result.first_s > 0 and result.rest_s > 0


@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault) for name, faults in ops.FAULTS.items() for fault in faults]
)
def test_fault_fails(name, fault):
    op = ops.SHAPES[name]
    for seed in range(2):
        result = op_call.run_op(op, ops.FAULTS[name][fault](op), "cpu", seed)
        assert not result.ok and result.reason, seed


def test_every_op_has_faults():
    assert set(ops.FAULTS) == set(ops.RIGHT) == set(ops.SHAPES)
    assert min(len(faults) for faults in ops.FAULTS.values()) >= 3


@pytest.mark.parametrize("name", [n for n in ops.SHAPES if n != "sampler"])
def test_race_is_found(name):
    op = ops.SHAPES[name]
    result = op_call.run_op(op, ops.Race(ops.RIGHT[name](op)), "cpu")
    assert not result.ok
    assert "call 13 of 20 on the same inputs differs" in result.reason
    assert result.error_norm is not None


def test_reason_names_place_and_size():
    op = ops.SHAPES["mxfp8"]
    result = op_call.run_op(op, ops.FAULTS["mxfp8"]["a row unwritten"](op), "cpu")
    assert result.reason == "out: relative norm 1 in row [1], above 0.04; 1 of 3 rows wrong"
    assert result.error_norm == 1.0
    op = ops.SHAPES["topk"]
    result = op_call.run_op(op, ops.FAULTS["topk"]["one missed"](op), "cpu")
    assert result.reason == "row 0 of length 900: 1 of 32 are not among the largest"
    assert result.error_norm == 1 / (9 * 32)


def test_topk_takes_equal_values_in_any_order():
    """Ties may be broken any way, and differently from call to call: a twelfth of a row
    is zero, and the limit lies there."""
    op = ops.topk_ops.TopK(2, 1000, 900, 450)
    right = ops.topk(op)

    def shuffled(given):
        logits = given["logits"] + 1e-6 * torch.rand_like(given["logits"])
        indices = right(given | {"logits": logits})["indices"]
        return {"indices": indices[:, torch.randperm(op.k)]}

    result = op_call.run_op(op, shuffled, "cpu")
    assert result.ok, result.reason
    taken = {tuple(sorted(shuffled(given)["indices"][0].tolist())) for given in [_inputs(op)] * 4}
    assert len(taken) > 1  # there are ties at the limit


def _inputs(op):
    return op.inputs(torch.Generator().manual_seed(0))


def test_kernel_that_raises_is_a_result():
    def raising(given):
        raise RuntimeError("Assertion error (csrc/apis/hc.hpp:42): arch_major == 12\nand more")

    result = op_call.run_op(ops.SHAPES["hc_prenorm"], raising, "cpu")
    assert not result.ok and result.error_norm is None
    assert result.reason == (
        "raised RuntimeError: Assertion error (csrc/apis/hc.hpp:42): arch_major == 12"
    )


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("#include <cuda.h>\na.cu(3): error: no such type\n#endif", "a.cu(3): error: no such type"),
        (
            "No kernel. Reasons: \n A: needs SM100\n B: absent",
            "No kernel. Reasons: A: needs SM100 B: absent",
        ),
        ("", "no message"),
    ],
)
def test_reason_of_many_lines_tells(message, said):
    def raising(given):
        raise ValueError(message)

    result = op_call.run_op(ops.SHAPES["topk"], raising, "cpu")
    assert result.reason == f"raised ValueError: {said}"


@pytest.mark.parametrize("shape", ["hc_prenorm", "experts", "kv_insert", "topk"])
def test_wrong_shape_is_a_result(shape):
    op = ops.SHAPES[shape]

    def cut(given):
        return {
            name: t[:1] if t.dim() > 1 else t for name, t in ops.RIGHT[shape](op)(given).items()
        }

    result = op_call.run_op(op, cut, "cpu")
    assert not result.ok and ("shape" in result.reason or "compared" in result.reason)


# Memory.


class _Counts(TorchDispatchMode):
    """The most bytes of tensors that lived at once."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.seen = weakref.WeakSet()
        self.sizes = {}

    def _gone(self, key):
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.sizes:
                self.sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, key)
        self.most = max(self.most, self.now)
        return out


def peak(op, kernel):
    with _Counts() as counts:
        given = op.inputs(torch.Generator().manual_seed(0))
        got = kernel(op)(given)
        op.judge(given, got)
    return counts.most


@pytest.mark.parametrize("name", ops.SHAPES)
def test_memory_is_what_is_stated(name):
    """Of inputs and reference, with a kernel that costs nothing."""
    op = ops.SHAPES[name]
    got = ops.RIGHT[name](op)(_inputs(op))
    found = peak(op, lambda op: lambda given: got)
    assert found <= op.gpu_bytes()


# In a child process.


def call(kernel, name=""):
    return op_call.OpCall(ops.SHAPES["topk"], kernel, device="cpu", name=name)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1"])
def test_any_name_of_a_gpu_will_do(monkeypatch, device):
    def set_device(given):
        assert torch.device(given).index is not None, "Expected a torch.device with an index"
        chosen.append(torch.device(given).index)

    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(op_call, "run_op", lambda *_: calls.CallResult("topk", True, 0.0, None))
    made = op_call.OpCall(ops.SHAPES["topk"], ops.right_topk, device=device)
    assert made.run(lambda text: None).ok
    assert chosen == ([] if device == "cuda" else [int(device[-1])])


# Native ops that the self-test names, which vLLM's own files have to call by the same
# namespace: a wrong one reads as "this build has no such op", on every build.
NAMED = re.compile(r"""torch\.ops\.(\w+)(?:\.(\w+)|,\s*"(\w+)")""")


@pytest.mark.needs_vllm
def test_native_ops_are_where_vllms_wrappers_call_them():
    vllm = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    files = ("_custom_ops.py", "models/deepseek_v41/attention.py")
    callers = "".join((vllm / file).read_text() for file in files)
    folder = Path(op_call.__file__).parent
    found = {
        (match[1], match[2] or match[3])
        for path in folder.glob("sm120_*.py")
        for match in NAMED.finditer(path.read_text())
    }
    assert ("_C_cache_ops", "cp_gather_indexer_k_quant_cache") in found
    for space, name in found:
        assert f"torch.ops.{space}.{name}" in callers


def test_missing_libraries_are_rows_and_the_rest_goes_on():
    calls = [call(ops.no_library), call(ops.no_entry), call(ops.right_topk, "the last")]
    said = []
    results = child_process.in_child(calls, limit_s=60, method="fork", say=said.append)
    assert [r.ok for r in results] == [False, False, True]
    assert results[0].reason == "cannot be called: No module named 'deep_gemm'"
    assert results[1].reason.startswith("cannot be called: ")
    assert "an_op_that_no_build_has" in results[1].reason
    assert results[2].call == "the last"
    assert [line.split(":")[0] for line in said] == ["absent", "absent", "right"]


def test_crash_fails_one_call():
    calls = [call(ops.crash, "first"), call(ops.right_topk, "second")]
    first, second = child_process.in_child(calls, limit_s=60, method="fork")
    assert first.call == "first" and first.reason.startswith("crashed: killed by SIGABRT")
    assert "illegal memory access" in first.reason
    assert second.ok


def test_hang_at_first_and_later_have_limits_of_their_own():
    calls = [call(ops.hang, "never"), call(ops.hangs_later, "once"), call(ops.right_topk)]
    began = time.monotonic()
    results = child_process.in_child(calls, limit_s=3, after_first_s=1.5, method="fork")
    assert time.monotonic() - began < 30
    assert results[0].reason == "hung: no result in 3 s; it was stopped"
    assert results[1].reason == "hung: no result in 1.5 s; it was stopped"
    assert results[2].ok


def test_compiling_is_not_taken_for_a_hang_and_is_told(monkeypatch):
    monkeypatch.setattr(child_process, "_SAY_S", 0.5)
    said = []
    results = child_process.in_child(
        [call(ops.slow_first, "slow")], limit_s=30, after_first_s=10, method="fork", say=said.append
    )
    assert results[0].ok and results[0].first_s > 1.9
    assert said[0].startswith("slow: compiling or running for 0.5 s")
    assert said[-1].startswith("right: slow: error 0; first call 2.")


def test_ops_travel_to_a_child_that_imports_afresh():
    results = child_process.in_child([call(ops.right_topk)], limit_s=60, method="spawn")
    assert results[0].ok, results[0].reason


# Paged logits of the rules' rows.


def test_indexer_race_is_found():
    cases, calls, kernels = (fake.load(f"sm120_device_{n}") for n in ("cases", "calls", "kernels"))
    case = cases.random_case(cases.IndexerShape(8, 16, 64, context=300), device="cpu")
    count = 0

    def racing(*inputs):
        nonlocal count
        count += 1
        logits = fake.right_logits(*inputs)
        if count == 17:
            logits[3].view(torch.int32)[5] ^= 1
        return logits

    kernel = fake.Fake("racing", racing, kernels.INDEXER_BOUND)
    assert calls.run_indexer(case, kernel).ok
    count = 0
    result = calls.run_indexer(case, kernel, 20)
    assert not result.ok and "call 17 of 20" in result.reason
