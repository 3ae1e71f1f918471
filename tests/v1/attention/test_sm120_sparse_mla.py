# SPDX-License-Identifier: Apache-2.0
"""Both sparse-MLA kernels on a CPU against the float64 reference, how calls are cut into
programs, and what the compilers say for sm_120a.

Levels of evidence: *emulated*, and *compiled*. tests/kernels has the large shapes, on a GPU.
"""

import contextlib
import functools
import itertools
import sys
import threading
import types
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

if str(Path(__file__).parent) not in sys.path:  # the child process imports it, too
    sys.path.append(str(Path(__file__).parent))

import sm120_cuda_on_cpu  # noqa: E402
import sm120_emulated_sparse_mla as emulated  # noqa: E402
import sm120_fake_device as fake  # noqa: E402

from benchmarks import sparse_mla_compile  # noqa: E402

planning = fake.load("ops.sm120_sparse_mla_plan")
cases = fake.load("sm120_device_cases")
host = fake.load("ops.sm120_sparse_mla_cuda")
BF16_BOUND = fake.kernels.BF16_BOUND.value

# Of everything together: probabilities and output round to bf16, about 2e-3.
WHOLE = 3e-3

RTX_PRO_6000 = planning.Gpu(188, 100 << 10)
SPARK = planning.Gpu(48, 100 << 10)
H200 = planning.Gpu(132, 228 << 10)


WITHOUT_COMPILER = "no C++ compiler: the CUDA kernel's logic is unproven in this run"

needs_compiler = pytest.mark.skipif(sm120_cuda_on_cpu.compiler() is None, reason=WITHOUT_COMPILER)


def _needs_cuda_source(cuda):
    """The same; skips where that needs a compiler which is not here."""
    if cuda and sm120_cuda_on_cpu.compiler() is None:
        pytest.skip(WITHOUT_COMPILER)
    return cuda


@pytest.fixture(scope="module")
def child():
    with emulated.Child() as made:
        yield made


@pytest.fixture(params=["cuda", "triton"])
def measure(request, child):
    """``emulated.measure`` with one kernel or the other."""
    cuda = _needs_cuda_source(request.param == "cuda")
    return functools.partial(child.measure, cuda=cuda)


def right(found):
    assert found["whole"] <= WHOLE and found["worst"] <= BF16_BOUND, found
    assert found["lse"] < 1e-5 and found["empty_lse"] and found["same"], found
    assert found["zeros"] >= found["invalid"], found
    return found


def shape(tokens, heads, width, page, extra=0, extra_page=0, **more):
    context = max(width, page, extra, extra_page, 16)
    return {
        "tokens": tokens,
        "heads": heads,
        "width": width,
        "page": page,
        "extra_width": extra,
        "extra_page": extra_page or (64 if extra else 0),
        "context": context,
        **more,
    }


SHAPES = [
    shape(1, 16, 128, 64, 512, 64),
    shape(1, 4, 1, 1),
    shape(1, 128, 63, 64, 1, 1),
    shape(2, 8, 1, 64, 1, 2),
    shape(2, 12, 63, 32, 1, 128),
    shape(2, 64, 128, 2, 64, 256),
    shape(7, 4, 192, 256, 64, 1),
    shape(7, 16, 128, 128),
    shape(7, 3, 63, 2, 64, 2),
    shape(8, 8, 128, 64, 64, 64),
    shape(8, 16, 192, 32, 1, 32),
    shape(8, 33, 17, 1, 15, 64),
    shape(8, 1, 65, 64, 33, 128),
]


@pytest.mark.parametrize("what", SHAPES, ids=lambda s: str(cases.AttentionShape(**s)))
def test_shapes(measure, what):
    right(measure(shape=what))


@pytest.mark.parametrize("config", planning.CONFIGS)
def test_every_config(child, config):
    cuda = _needs_cuda_source(planning.CONFIGS[config].function is not None)
    what = shape(2, 20, 70, 64, 35, 32)
    found = right(child.measure(shape=what, config=config, sms=1, cuda=cuda))
    assert found["splits"] == 1
    right(child.measure(shape=what, config=config, sms=6, cuda=cuda))


@pytest.mark.parametrize(
    "config, sms, splits",
    [
        ("Triton, 16 heads, 16 records", 1, 1),
        ("Triton, 16 heads, 16 records", 12, 6),
        ("Triton, 16 heads, 16 records", 24, 12),
        ("CUDA, 16 heads", 1, 1),
        ("CUDA, 16 heads", 6, 3),
        ("CUDA, 16 heads", 12, 6),
    ],
)
def test_splits_change_nothing_and_the_sink_counts_once(child, config, sms, splits):
    cuda = _needs_cuda_source(planning.CONFIGS[config].function is not None)
    what = shape(2, 8, 128, 64, 64, 64)
    found = child.measure(shape=what, config=config, sms=sms, twice=True, cuda=cuda)
    assert right(found)["splits"] == splits


@pytest.mark.parametrize("kind", cases.ROW_KINDS)
def test_kinds_of_rows(measure, kind):
    """Holes, length 0, all invalid, one candidate, one cache alone: alone and split."""
    for sms in (1, 6):
        what = shape(2, 4, 70, 32, 40, 64, rows=(kind,))
        found = right(measure(shape=what, sms=sms))
        if kind in ("empty", "invalid"):
            assert found["zeros"] == found["invalid"] == 8  # exact, whatever the sink
        else:
            assert found["invalid"] == 0


@pytest.mark.parametrize("sink", [float("-inf"), -50.0, 0.0, 30.0, float("inf")])
def test_sinks(measure, sink):
    for sms in (1, 6):
        found = measure(shape=shape(2, 4, 40, 32, 20, 64), sinks=sink, sms=sms)
        if sink == float("inf"):  # it takes everything
            assert found["zeros"] == 8 and found["worst"] == 0
        else:
            right(found)


def test_no_sinks_and_no_lengths(measure):
    right(measure(shape=shape(2, 4, 40, 32, 20, 64, sinks=False)))
    every = shape(2, 4, 40, 32, 20, 64, rows=("full", "holes"))
    right(measure(shape=every, lens=False))


def test_slots_past_the_end_are_skipped(measure):
    rows = ("holes", "invalid", "full")
    right(measure(shape=shape(3, 4, 40, 32, 20, 64, rows=rows), past=True))


def test_a_candidate_that_outweighs_all_others(measure):
    right(measure(shape=shape(3, 4, 40, 32, 20, 64), loud=16.0))


@pytest.mark.parametrize("page, stride", [(64, 138240), (64, 414720), (32, 19008), (2, 5760)])
def test_pages_apart(measure, page, stride):
    what = shape(4, 8, 64, page, 64, page, stride=stride, extra_stride=stride, context=64)
    right(measure(shape=what))


@pytest.mark.parametrize("page, stride", [(1, 584), (3, 1752), (64, 37378), (1, 586)])
def test_pages_at_any_even_address(measure, page, stride):
    """No multiple of 16: slower reads, the same values."""
    right(measure(shape=shape(2, 4, 20, page, 10, page, context=page * 8), stride=stride))


def test_addresses_past_4_gib(measure):
    """Four pages 1.5 GB apart; memory that nobody touches is not taken."""
    what = shape(2, 4, 20, 8, 10, 8, context=32)
    right(measure(shape=what, stride=3 << 29))


@settings(
    deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    tokens=st.integers(1, 9),
    heads=st.integers(1, 40),
    width=st.integers(1, 70),
    page=st.sampled_from([1, 2, 3, 16, 64, 100]),
    extra=st.integers(0, 70),
    extra_page=st.sampled_from([1, 2, 5, 64, 128]),
    sms=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 1000),
)
def test_any_shape(measure, tokens, heads, width, page, extra, extra_page, sms, seed):
    what = shape(tokens, heads, width, page, extra, extra_page if extra else 0)
    right(measure(shape=what, seed=seed, sms=sms))


REFUSED = {
    "heads": "H <= 128",
    "width of q": "512]",
    "type of q": "need bfloat16",
    "out": "need q's",
    "record": "[blocks, page, 584]",
    "odd stride": "odd addresses",
    "rows of indices": "need int32 [2, W]",
    "type of indices": "need int32 [2, W]",
    "lens": "need int32 [2]",
    "sinks": "need fp32 [H]",
    "lse": "need fp32 [T, H]",
    "no extra indices": "has no indices",
    "workspace": "need ",
    "its type": "contiguous fp32",
    "its address": "multiple of 16 B",
}


@pytest.mark.parametrize("change, said", REFUSED.items())
def test_wrong_arguments_are_refused(child, change, said):
    assert said in (child.call(emulated.refused, change) or "nothing")


# --- plans -------------------------------------------------------------------------


@settings(max_examples=300)
@given(
    tokens=st.integers(1, planning.MAX_TOKENS),
    heads=st.integers(1, planning.MAX_HEADS),
    width=st.integers(1, 4096),
    extra=st.integers(0, 4096),
    gpu=st.sampled_from([RTX_PRO_6000, SPARK, H200, planning.Gpu(1, 100 << 10)]),
    name=st.sampled_from([None, *planning.CONFIGS]),
    cuda=st.booleans(),
)
def test_plans(tokens, heads, width, extra, gpu, name, cuda):
    config = None if name is None else planning.CONFIGS[name]
    made = planning.plan(tokens, heads, width, extra, gpu, config, cuda)
    if name is None:
        assert (made.config.function is not None) == cuda
    assert made.head_blocks * made.config.heads >= heads
    assert 1 <= made.splits <= planning.MAX_SPLITS
    steps = -(-width // made.config.candidates) - (-extra // made.config.candidates)
    # Every split has a step, and together they have all.
    each = -(-steps // made.splits)
    assert (made.splits - 1) * each < steps <= made.splits * each
    need = planning.workspace_floats(tokens, heads, made.splits)
    assert need <= planning.largest_workspace_floats(gpu)
    if made.splits > 1:  # all run at once
        programs = tokens * made.head_blocks * made.splits
        assert programs <= gpu.sms * made.config.programs(gpu)


def test_workspaces_are_tens_of_mib():
    for gpu in (RTX_PRO_6000, SPARK, H200):
        assert planning.largest_workspace_floats(gpu) * 4 < 64 << 20


@pytest.mark.parametrize("config", planning.CONFIGS.values(), ids=planning.CONFIGS)
def test_configs_fit_an_sm12x_multiprocessor(config):
    assert config.shared + planning.RESERVED_SHARED <= sparse_mla_compile.SHARED_LIMIT
    threads = planning.WARPS * planning.WARP
    assert threads * config.registers * config.programs(SPARK) <= planning.REGISTERS
    assert config.programs(SPARK) >= 1


@pytest.mark.parametrize("page", [1, 2, 3, 64, 100, 640, 65537, (1 << 30) + 1])
def test_division_is_exact(page):
    magic, shift = host.division(page)
    assert magic < 1 << 32
    edges = [n * page + d for n in (0, 1, 2, 1000, (1 << 31) // page) for d in (-1, 0, 1)]
    for slot in [*edges, (1 << 31) - 1]:
        if 0 <= slot < 1 << 31:
            assert slot * magic >> shift == slot // page


# --- the CUDA source ------------------------------------------------------------------


@needs_compiler
def test_the_source_and_its_host_agree():
    library = emulated.library()
    assert library.sizeof_call() == host.CALL.size
    for config in planning.CONFIGS.values():
        if config.function:
            assert library.shared_bytes(config.heads) == config.shared


@needs_compiler
def test_every_value_of_a_record_is_exact():
    """One candidate's weight is 1, so the output is its record: every e4m3 byte with scales
    from the smallest to the largest that leave bf16's range alone."""
    packed = fake.load("sm120_packed_cache")
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    scales = [0, 1, 20, 100, 119, 120, 127, 134, 135, 200, 240]
    cache = torch.zeros(len(scales), packed.record_page_bytes(1), dtype=torch.uint8)
    for row, scale in enumerate(scales):
        cache[row, :448] = codes.roll(64 * row).repeat(2)[:448]
        cache[row, 448:576] = torch.arange(64).bfloat16().view(torch.uint8)
        cache[row, 576:583] = scale
    q = torch.zeros(len(scales), 3, 512, dtype=torch.bfloat16)
    out = torch.full_like(q, torch.nan)
    slots = torch.arange(len(scales), dtype=torch.int32).unsqueeze(1)
    made = planning.plan(len(scales), 3, 1, 0, SPARK, None, True)
    operands = fake.load("ops.sm120_sparse_mla_operands").Operands
    call = operands(q, packed.record_view(cache, 1), slots, None, None, 1.0, out)
    emulated.OnCpu().launch(made, call)
    want = packed.unpack_records(cache, 1, slots[:, 0]).bfloat16()
    assert torch.equal(out, want.unsqueeze(1).expand_as(out))


# What makes the kernel wrong, in one way each: (text, which of its places, replacement).
FAULTS = {
    "a step's copies are not waited for": ("copy_wait<0>();", 0, ""),
    "other lanes' scales are not waited for": ("    sync_warp();", 0, ""),
    "logits are added up too early": ("    sync_block();", 0, ""),
    "weights are read too early": ("    sync_block();", 1, ""),
    "factors are read too early": ("  sync_block();\n\n#pragma unroll\n  for", 0, "for"),
    "the merge does not wait for the splits": ("  wait_for_previous_grid();\n", 0, ""),
    "splits are added up too early": ("  sync_block();\n  if (group > 0) return;", 0, ""),
    "pairs are swapped": ("0x7632", 1, "0x5410"),
    "one record for the next": ("i64(row) * DATA_BYTES", 0, "i64(row + 1) * DATA_BYTES"),
    "one scale for the next": ("warp % 4 * 8", 0, "(warp + 1) % 4 * 8"),
    "a length is one short": ("column < length)", 0, "column < length - 1)"),
    "the sum is not rescaled": ("total[tile] * shrink", 0, "total[tile]"),
    "the output is not rescaled": ("[n % 2][0] *= upper", 0, "[n % 2][0] *= 1"),
}


@functools.cache
def _worst(text):
    """The worst row over three orders of warps and lanes, or inf for the emulator's error."""
    what = shape(9, 20, 100, 64, 70, 32)
    found = []
    for order, sms in itertools.product((0, 1, 5), (1, 188)):
        try:
            run = emulated.measure(what, seed=3, order=order, sms=sms, cuda=True, text=text)
        except AssertionError:
            return float("inf")
        found.append(run["worst"])
    return max(found)


@needs_compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_source_is_found(fault):
    source = host.SOURCE.read_text()
    text, place, instead = FAULTS[fault]
    parts = source.split(text)
    assert len(parts) > place + 1
    broken = text.join(parts[: place + 1]) + instead + text.join(parts[place + 1 :])
    assert _worst(source) <= BF16_BOUND < _worst(broken)


# --- the compilers' reports ---------------------------------------------------------


def _fit(capability, configs):
    found = list(sparse_mla_compile.compiled(capability, configs))
    cuda = [name for name in configs if planning.CONFIGS[name].function]
    triton = len(configs) - len(cuda)
    assert len(found) == len(cuda) + bool(cuda) + 2 * triton + 2 * bool(triton)
    for one in found:
        assert one.fits, one
        assert one.matrix["HGMMA"] == 0  # the same instructions on both
        name = one.name.removesuffix(", split")
        if name in planning.CONFIGS:
            config = planning.CONFIGS[name]
            assert one.matrix["HMMA"] > 0
            assert one.registers <= config.registers, one
            assert one.shared <= config.shared + planning.RESERVED_SHARED, one


@pytest.fixture
def nvrtc():
    try:
        host.build((9, 0))
    except RuntimeError as error:
        if str(error).startswith(("no NVRTC", "no cuda-bindings")):
            pytest.skip(f"{error}: what its compiler reports is unproven in this run")
        raise


def test_compiles_for_sm_120a_without_spills(nvrtc):
    _fit(120, [name for name in planning.CONFIGS if planning.CONFIGS[name].function])


@pytest.mark.slow
@pytest.mark.parametrize("capability", sparse_mla_compile.CAPABILITIES)
def test_every_config_compiles_without_spills(nvrtc, capability):
    _fit(capability, list(planning.CONFIGS))


def test_a_source_that_does_not_compile_is_said(nvrtc, monkeypatch, tmp_path):
    broken = tmp_path / "broken.cu"
    broken.write_text("KERNEL(32, 1) nothing() {}")
    monkeypatch.setattr(host, "SOURCE", broken)
    with pytest.raises(RuntimeError, match=r"NVRTC refuses broken.cu for 12.0: .*error"):
        host.build((12, 0))


# --- launching ------------------------------------------------------------------------


class Driver:
    """CUDA's driver as the bindings show it, and what was asked of it."""

    def __init__(self, context):
        self.bindings = pytest.importorskip("cuda.bindings.driver")
        self.context, self.calls = context, []

    def __getattr__(self, name):
        if name.startswith("CU"):
            return getattr(self.bindings, name)

        def call(*args):
            self.calls.append((name, *args))
            answers = {"cuCtxGetCurrent": self.context, "cuDeviceGet": 5}
            answers["cuDevicePrimaryCtxRetain"] = 77
            return (0, answers[name]) if name in answers else (0,)

        return call


@pytest.mark.parametrize("context, made", [(0, True), (123, False)])
@pytest.mark.parametrize("tokens, splits", [(256, 1), (1, 20)])
def test_a_call_is_launched_as_planned(monkeypatch, context, made, tokens, splits):
    driver = Driver(context)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    stream = types.SimpleNamespace(cuda_stream=99)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    kernels = object.__new__(host.Kernels)
    kernels._driver, kernels._index, kernels._local = driver, 3, threading.local()
    kernels._functions = {"candidates_16": 11, host.MERGE: 12}
    planned = planning.plan(tokens, 12, 128, 512, H200, None, True)
    assert planned.splits == splits
    q = torch.zeros(tokens, 12, 512, dtype=torch.bfloat16)
    cache, indices = torch.zeros(2, 64, 584, dtype=torch.uint8), torch.zeros(tokens, 128).int()
    operands = fake.load("ops.sm120_sparse_mla_operands").Operands
    call = operands(q, cache, indices, None, None, 1.0, torch.empty_like(q))
    for _ in range(2):
        kernels.launch(planned, call)
    names = [name for name, *_ in driver.calls]
    # A thread without a context gets PyTorch's, once.
    assert names.count("cuCtxGetCurrent") == 1
    assert names.count("cuCtxSetCurrent") == made
    (first, *_) = (call for call in driver.calls if call[0] == "cuLaunchKernel")
    assert first[1:8] == (11, splits, tokens, 1, host.THREADS, 1, 1)
    assert first[8:10] == (planned.config.shared, 99)
    merges = [call for call in driver.calls if call[0] == "cuLaunchKernelEx"]
    assert len(merges) == (2 if splits > 1 else 0)
    for _, config, function, *_ in merges:
        assert (config.gridDimX, config.gridDimY, config.blockDimX) == (
            12,
            tokens,
            host.MERGE_THREADS,
        )
        assert (function, config.numAttrs, int(config.hStream)) == (12, 1, 99)


def test_without_the_library_triton_serves_and_the_log_says_why(monkeypatch, caplog):
    def build(capability):
        raise RuntimeError("no NVRTC: not found")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (12, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(host, "build", build)
    monkeypatch.setattr(host.Kernels, "_make_current", lambda self: None)
    host.kernels.cache_clear()
    try:
        assert host.kernels(0) is None
    finally:
        host.kernels.cache_clear()
    assert "no NVRTC" in caplog.text and "Triton's serves" in caplog.text
