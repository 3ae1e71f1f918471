# SPDX-License-Identifier: Apache-2.0
"""Device calls on a fake device: a right kernel passes, every planted fault is named."""

import dataclasses
import sys
import time
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

if str(Path(__file__).parent) not in sys.path:  # a child process imports it, too
    sys.path.append(str(Path(__file__).parent))

import sm120_fake_device as fake  # noqa: E402

cases = fake.load("sm120_device_cases")
calls = fake.load("sm120_device_calls")
kernels = fake.load("sm120_device_kernels")
child_process = fake.load("sm120_child_process")
packed = fake.packed

# Pages lie as far apart as in a pool of the patched tree (geometry: 414720 B a block).
SHAPE = cases.AttentionShape(
    10, 4, 128, 64, 512, 64, stride=414720, extra_stride=414720, context=640
)
INDEXER = cases.IndexerShape(8, 16, 64, context=300, stride=9216)


@pytest.fixture(scope="module")
def case():
    return cases.random_case(SHAPE, seed=1, device="cpu")


@pytest.fixture(scope="module")
def indexer_case():
    return cases.random_case(INDEXER, seed=1, device="cpu")


def test_right_kernel_passes(case):
    result = calls.run_attention(case, fake.right_kernel())
    assert result.ok and result.reason == ""
    assert 1e-3 < result.error_norm < 3e-3  # what rounding to bf16 costs
    assert result.call == "right: attention, 10 tokens x 4 heads, 128 of page 64 + 512 of page 64"


@pytest.mark.parametrize(
    "shape",
    [
        cases.AttentionShape(1, 4, 128, 64, context=640),
        cases.AttentionShape(9, 8, 128, 64, real_heads=5, sinks=False, context=640),
        cases.AttentionShape(8, 4, 192, 32, 512, 128, context=640),
        cases.AttentionShape(8, 4, 128, 64, 64, 2, context=128),
        cases.AttentionShape(8, 4, 3, 1, 1, 1, context=1),
        cases.AttentionShape(130, 1, 16, 64, 16, 64, context=64),
    ],
    ids=str,
)
def test_right_kernel_passes_at_other_shapes(shape):
    case = cases.random_case(shape, device="cpu")
    assert calls.run_attention(case, fake.right_kernel()).reason == ""


def test_one_token_of_every_kind_passes():
    for kind in cases.ROW_KINDS:
        shape = cases.AttentionShape(1, 8, 128, 64, 512, 64, rows=(kind,))
        case = cases.random_case(shape, device="cpu")
        assert calls.run_attention(case, fake.right_kernel()).reason == "", kind


@pytest.mark.parametrize("fault", fake.ATTENTION_FAULTS)
def test_attention_fault_fails(case, fault):
    """At the loosest bound there is."""
    kernel = fake.Fake(fault, fake.ATTENTION_FAULTS[fault], kernels.FP8_BOUND)
    result = calls.run_attention(case, kernel)
    assert not result.ok and result.reason
    assert result.call.startswith(f"{fault}: attention, 10 tokens")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", fake.INDEXER_FAULTS)
def test_indexer_fault_fails(fault, seed):
    case = cases.random_case(INDEXER, seed, device="cpu")
    kernel = fake.Fake(fault, fake.INDEXER_FAULTS[fault], kernels.INDEXER_BOUND)
    result = calls.run_indexer(case, kernel)
    assert not result.ok and result.reason
    assert result.call.startswith(f"{fault}: indexer, 8 rows")


def test_reasons_name_the_place(case):
    faults = fake.ATTENTION_FAULTS
    run = lambda name: calls.run_attention(case, fake.Fake(name, faults[name], kernels.FP8_BOUND))  # noqa: E731
    assert run("unwritten row").reason == (
        "2048 of 20480 elements were not written, the first at [9, 0, 0]"
    )
    assert run("NaN").reason == "1 of 20480 elements are not finite, the first at [0, 1, 2]"
    assert run("writes outside its output").reason == "wrote outside its output"
    assert run("refuses").reason == "raised ValueError: page_block_size must be 64"
    assert "above 0.1; " in run("wrong head").reason and "head" in run("wrong head").reason


def test_right_indexer_passes(indexer_case):
    result = calls.run_indexer(indexer_case, fake.right_indexer())
    assert result.ok and result.error_norm < 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_bound_leaves_room_for_fp8_numerics(seed):
    """FlashInfer's SM120 kernels round more than bf16 ones do: right, and not near."""
    shape = dataclasses.replace(SHAPE, tokens=64, heads=16, context=4096, stride=0)
    case = cases.random_case(shape, seed, device="cpu")
    kernel = fake.Fake("fp8", fake.fp8_attention, kernels.FP8_BOUND)
    result = calls.run_attention(case, kernel)
    assert result.ok
    assert 0.02 < result.error_norm < 0.6 * kernels.FP8_BOUND.value


def test_case_touches_the_corners(case):
    for segment in (case.window, case.compressed):
        slots = segment.cache.shape[0] * segment.page
        full = set(segment.indices[0].tolist())
        assert {0, 63, slots - 64, slots - 1} <= full
        assert (segment.indices == -1).any() and segment.indices.max() < slots
        assert {0, 1, segment.indices.shape[1]} <= set(segment.lengths.tolist())
        assert segment.cache.stride(0) == 414720
        assert segment.cache.storage_offset() == 414720 - 37440  # the page lies last


def test_case_is_the_same_for_a_seed(case):
    again = cases.random_case(SHAPE, seed=1, device="cpu")
    other = cases.random_case(SHAPE, seed=2, device="cpu")
    assert torch.equal(again.q, case.q) and torch.equal(again.sinks, case.sinks)
    assert torch.equal(again.window.cache, case.window.cache)
    assert not torch.equal(other.q, case.q)


def test_padded_heads_have_no_query_and_no_sink():
    case = cases.random_case(cases.AttentionShape(2, 8, 128, 64, real_heads=5), device="cpu")
    assert (case.q[:, 5:] == 0).all() and (case.q[:, :5] != 0).any()
    assert torch.isinf(case.sinks).tolist() == [False] * 5 + [True] * 3


def test_large_pool_is_not_filled():
    """Memory of a pool as large as the engine's is reserved and not touched."""
    shape = cases.AttentionShape(1, 1, 128, 64, context=1 << 20, stride=414720)
    started = time.monotonic()
    case = cases.random_case(shape, device="cpu")
    assert case.window.cache.shape[0] == 16384
    assert int(case.window.indices.max()) == (1 << 20) - 1
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("stride", [576, 37441])
def test_stride_that_does_not_fit_is_refused(stride):
    with pytest.raises(ValueError, match=f"stride {stride} B: a page takes 37440 B"):
        cases.random_case(cases.AttentionShape(1, 1, 1, 64, stride=stride), device="cpu")


def test_unknown_row_kind_is_refused():
    with pytest.raises(ValueError, match="row kind 'half': need one of full, holes"):
        cases.random_case(cases.AttentionShape(1, 1, 1, 64, rows=("half",)), device="cpu")


# The adapters, with vLLM's functions replaced by ones that read the views they get.


@pytest.fixture
def stub(monkeypatch):
    """Puts modules of that content where ``vllm`` would be, for one test."""
    for name in ("vllm", "vllm.utils", "vllm.models", "vllm.models.deepseek_v41"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.models.deepseek_v41.nvidia", types.ModuleType("x"))

    def put(name, **content):
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)

    return put


def cache_of(view, record):
    """The cache that ``[blocks, page, 1, record]`` is a view of, by its strides alone."""
    blocks, page, one, size = view.shape
    assert (one, size, view.dtype) == (1, record, torch.uint8)
    assert view.stride()[1] == record and view.stride(3) == 1
    return view.as_strided((blocks, page * record), (view.stride(0), 1)), page


def read_as_flashinfer(**given):
    """FlashInfer's arguments, by the words of its documentation."""
    assert given["kv_layout"] == "NHD" and given["workspace_buffer"].dtype == torch.uint8
    window = fake.reference.Segment(
        *cache_of(given["swa_kv_cache"], 584), given["sparse_indices"], given["swa_topk_lens"]
    )
    extra = None
    if given["compressed_kv_cache"] is not None:
        extra = fake.reference.Segment(
            *cache_of(given["compressed_kv_cache"], 584),
            given["extra_sparse_indices"].squeeze(1),
            given["extra_sparse_topk_lens"],
        )
    fake.right_attention(
        given["query"], window, extra, given["sinks"], given["bmm1_scale"], given["out"]
    )


@pytest.mark.parametrize("extra", [0, 512])
def test_flashinfer_adapter(stub, extra):
    attention = types.SimpleNamespace(
        _as_sparse_cache=lambda cache: cache.unsqueeze(-2),
        _get_workspace=lambda device: torch.zeros(8, dtype=torch.uint8, device=device),
    )
    stub(
        "vllm.models.deepseek_v41.nvidia.flashinfer_sparse",
        DeepseekV4FlashInferSM120Attention=attention,
    )
    stub("vllm.utils.flashinfer", flashinfer_trtllm_batch_decode_sparse_mla_dsv4=read_as_flashinfer)
    shape = dataclasses.replace(SHAPE, extra_width=extra, extra_page=64 if extra else 0)
    case = cases.random_case(shape, device="cpu")
    result = calls.run_attention(case, kernels.flashinfer_kernel())
    assert result.ok and result.call.startswith("FlashInfer DSv4: attention")


@pytest.mark.parametrize("cleans", [False, True])
def test_deep_gemm_adapter(stub, cleans):
    """With and without the argument that releases before 0.33 ask for."""

    def logits(q, cache, weights, lengths, table, schedule, max_model_len):
        assert q[1] is None and schedule == (lengths.data_ptr(), 64, 188)
        assert lengths.shape == (8, 1) and max_model_len == 320
        cache, page = cache_of(cache, 132)
        return fake.right_logits(q[0].squeeze(1), cache, page, table, lengths[:, 0], weights)

    def older(*inputs, max_model_len, clean_logits):
        assert clean_logits is False
        return logits(*inputs, max_model_len)

    stub(
        "vllm.utils.deep_gemm",
        fp8_fp4_paged_mqa_logits=older if cleans else logits,
        get_paged_mqa_logits_metadata=lambda lens, page, sms: (lens.data_ptr(), page, sms),
    )
    stub("vllm.utils.platform_utils", num_compute_units=lambda device: 188)
    case = cases.random_case(INDEXER, device="cpu")
    assert calls.run_indexer(case, kernels.deep_gemm_kernel()).reason == ""


# Child processes.

SMALL = cases.AttentionShape(2, 2, 8, 64, 8, 64, context=64)


def device_call(kernel, shape=SMALL, **fields):
    return child_process.DeviceCall(shape, kernel, device="cpu", **fields)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_child_gives_every_result(method):
    """A crash and an exit in the middle cost neither their names nor what follows."""
    small_indexer = cases.IndexerShape(2, 4, 64, context=100)
    results = child_process.in_child(
        [
            device_call(fake.right_kernel),
            device_call(fake.crashing_kernel),
            device_call(fake.wrong_head_kernel, name="attention of layer 7"),
            device_call(fake.missing_kernel),
            device_call(fake.leaving_kernel),
            device_call(fake.right_indexer, small_indexer),
        ],
        method=method,
    )
    assert [result.ok for result in results] == [True, False, False, False, False, True]
    _, crash, wrong, missing, leave, _ = results
    assert (
        crash.call == "crashing_kernel: attention, 2 tokens x 2 heads, 8 of page 64 + 8 of page 64"
    )
    assert (
        crash.reason
        == "crashed: killed by SIGABRT; it last printed: Assertion failed: block_kv == 64"
    )
    assert wrong.call == "attention of layer 7" and "relative norm" in wrong.reason
    assert missing.reason == "raised ImportError: no kernel of that name"
    assert leave.reason == "crashed: exit status 7"


def test_hang_is_stopped_and_named():
    started = time.monotonic()
    results = child_process.in_child(
        [device_call(fake.hanging_kernel), device_call(fake.right_kernel)], limit_s=5
    )
    assert [result.ok for result in results] == [False, True]
    assert results[0].reason == "hung: no result in 5 s; it was stopped"
    assert results[0].call.startswith("hanging_kernel: attention")
    assert time.monotonic() - started < 120


def test_child_that_does_not_start_is_named():
    results = child_process.in_child([device_call(fake.right_kernel)], start_s=0.01)
    assert results[0].reason == "the child did not start in 0.01 s; it was stopped"


def test_child_prints_nothing_here(capfd):
    child_process.in_child([device_call(fake.crashing_kernel)])
    assert capfd.readouterr() == ("", "")
