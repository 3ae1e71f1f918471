# SPDX-License-Identifier: Apache-2.0
"""The sparse-MLA kernel in Triton's interpreter against the float64 reference, how calls are
cut into programs, and what the compiler says for sm_120a.

Levels of evidence: *emulated*, and *compiled*. tests/kernels has the large shapes, on a GPU.
"""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

if str(Path(__file__).parent) not in sys.path:  # the child process imports it, too
    sys.path.append(str(Path(__file__).parent))

import sm120_emulated_sparse_mla as emulated  # noqa: E402
import sm120_fake_device as fake  # noqa: E402

from benchmarks import sparse_mla_compile  # noqa: E402

planning = fake.load("ops.sm120_sparse_mla_plan")
cases = fake.load("sm120_device_cases")
BF16_BOUND = fake.kernels.BF16_BOUND.value

# Of everything together: probabilities and output round to bf16, about 2e-3.
WHOLE = 3e-3

RTX_PRO_6000 = planning.Gpu(188, 100 << 10)
SPARK = planning.Gpu(48, 100 << 10)
H200 = planning.Gpu(132, 228 << 10)


@pytest.fixture(scope="module")
def child():
    with emulated.Child() as made:
        yield made


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
def test_shapes(child, what):
    right(child.measure(shape=what))


def _chosen():
    """The configs that ``choose`` gives on an SM12x GPU, at some call."""
    calls = [(1, 16), (8, 16), (64, 16), (4096, 16), (1, 64), (64, 64), (4096, 128)]
    return list(dict.fromkeys(planning.choose(*call, RTX_PRO_6000) for call in calls))


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(name, marks=() if name in _chosen() else pytest.mark.slow)
        for name in planning.CONFIGS
    ],
)
def test_every_config(child, config):
    what = shape(2, 20, 70, 64, 35, 32)
    found = right(child.measure(shape=what, config=config, sms=1))
    assert found["splits"] == 1
    right(child.measure(shape=what, config=config, sms=6))


@pytest.mark.parametrize("sms, splits", [(1, 1), (5, 4), (12, 12)])
def test_splits_change_nothing_and_the_sink_counts_once(child, sms, splits):
    config = "16 heads, 16 records, 8 warps"  # two programs on a multiprocessor
    what = shape(2, 8, 128, 64, 64, 64)
    found = child.measure(shape=what, config=config, sms=sms, twice=True)
    assert right(found)["splits"] == splits  # of 12 steps


@pytest.mark.parametrize("kind", cases.ROW_KINDS)
def test_kinds_of_rows(child, kind):
    """Holes, length 0, all invalid, one candidate, one cache alone: alone and split."""
    for sms in (1, 6):
        what = shape(2, 4, 70, 32, 40, 64, rows=(kind,))
        found = right(child.measure(shape=what, sms=sms))
        if kind in ("empty", "invalid"):
            assert found["zeros"] == found["invalid"] == 8  # exact, whatever the sink
        else:
            assert found["invalid"] == 0


@pytest.mark.parametrize("sink", [float("-inf"), -50.0, 0.0, 30.0, float("inf")])
def test_sinks(child, sink):
    for sms in (1, 6):
        found = child.measure(shape=shape(2, 4, 40, 32, 20, 64), sinks=sink, sms=sms)
        if sink == float("inf"):  # it takes everything
            assert found["zeros"] == 8 and found["worst"] == 0
        else:
            right(found)


def test_no_sinks_and_no_lengths(child):
    right(child.measure(shape=shape(2, 4, 40, 32, 20, 64, sinks=False)))
    every = shape(2, 4, 40, 32, 20, 64, rows=("full", "holes"))
    right(child.measure(shape=every, lens=False))


def test_a_candidate_that_outweighs_all_others(child):
    right(child.measure(shape=shape(3, 4, 40, 32, 20, 64), loud=16.0))


@pytest.mark.parametrize("page, stride", [(64, 138240), (64, 414720), (32, 19008), (2, 5760)])
def test_pages_apart(child, page, stride):
    what = shape(4, 8, 64, page, 64, page, stride=stride, extra_stride=stride, context=64)
    right(child.measure(shape=what))


@pytest.mark.parametrize("page, stride", [(1, 584), (3, 1752), (64, 37378), (1, 586)])
def test_pages_at_any_even_address(child, page, stride):
    """No multiple of 16: slower reads, the same values."""
    right(child.measure(shape=shape(2, 4, 20, page, 10, page, context=page * 8), stride=stride))


def test_addresses_past_4_gib(child):
    """Four pages 1.5 GB apart; memory that nobody touches is not taken."""
    what = shape(2, 4, 20, 8, 10, 8, context=32)
    right(child.measure(shape=what, stride=3 << 29))


@settings(
    deadline=None, max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture]
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
def test_any_shape(child, tokens, heads, width, page, extra, extra_page, sms, seed):
    what = shape(tokens, heads, width, page, extra, extra_page if extra else 0)
    right(child.measure(shape=what, seed=seed, sms=sms))


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
)
def test_plans(tokens, heads, width, extra, gpu, name):
    config = None if name is None else planning.CONFIGS[name]
    made = planning.plan(tokens, heads, width, extra, gpu, config)
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
    threads = config.warps * planning.WARP
    assert threads * config.registers * config.programs(SPARK) <= planning.REGISTERS
    assert config.programs(SPARK) >= 1


# --- the compiler's report ----------------------------------------------------------


def _fit(capability, configs):
    found = list(sparse_mla_compile.compiled(capability, configs))
    assert len(found) == 2 * len(configs) + 2
    for one in found:
        assert one.fits, one
        assert one.matrix["HGMMA"] == 0  # the same instructions on both
        name = one.name.removesuffix(", split")
        if name in planning.CONFIGS:
            config = planning.CONFIGS[name]
            assert one.matrix["HMMA"] > 0
            assert one.registers <= config.registers, one
            assert one.shared <= config.shared + planning.RESERVED_SHARED, one


def test_compiles_for_sm_120a_without_spills():
    _fit(120, _chosen())


@pytest.mark.slow
@pytest.mark.parametrize("capability", sparse_mla_compile.CAPABILITIES)
def test_every_config_compiles_without_spills(capability):
    _fit(capability, list(planning.CONFIGS))
