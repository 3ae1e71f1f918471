# SPDX-License-Identifier: Apache-2.0
"""The fork's sparse-MLA kernel on a real GPU: shapes as large as serving's, CUDA graphs, bits.

Needs a GPU of compute capability 8.9 or newer, torch, triton and cuda-bindings (without it, or
below 9.0, Triton's kernel alone is tested); vLLM is not imported.
``compute-sanitizer --report-api-errors no python3 -m pytest tests/kernels/test_sparse_mla.py
-k sanitized`` runs a small set under the memory checker.
"""

import importlib
import itertools
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

MODELS = str(Path(__file__).resolve().parents[2] / "vllm" / "models")

WHOLE = 3e-3
"""Of everything together: probabilities and output round to bf16. FlashMLA has 2e-3."""

TOKENS = (1, 2, 7, 8, 64, 65, 257, 4096)
HEADS = (4, 8, 12, 16, 32, 64, 128)
WIDTHS = (1, 63, 128, 192, 512, 1152, 2176)
EXTRAS = (0, 1, 512, 2048)
PAGES = (1, 2, 32, 64, 128, 256)


def _capable():
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


pytestmark = pytest.mark.skipif(
    not _capable(), reason="no CUDA GPU here: the kernel is unproven on a GPU in this run"
)


def _load(name):
    if MODELS not in sys.path:
        sys.path.append(MODELS)
    return importlib.import_module(f"deepseek_v41.nvidia.{name}")


def _case(seed=0, **given):
    cases = _load("sm120_device_cases")
    shape = {"heads": 16, "width": 128, "page": 64, "extra_width": 512, "extra_page": 64}
    return cases.random_case(cases.AttentionShape(**(shape | given)), seed, "cuda")


def _call(case, out, lse=None, **more):
    view = _load("sm120_packed_cache").record_view
    window, extra = case.window, case.compressed
    if extra is not None:
        more |= {
            "extra_cache": view(extra.cache, extra.page),
            "extra_indices": extra.indices,
            "extra_lens": extra.lengths,
        }
    _load("ops.sm120_sparse_mla").sparse_mla(
        *(case.q, view(window.cache, window.page), window.indices, window.lengths),
        *(case.sinks, case.scale, out),
        lse=lse,
        **more,
    )


def _wrong(case, **more):
    """What is wrong with a call, or None."""
    reference = _load("sm120_reference")
    out = torch.full_like(case.q, torch.nan)
    lse = torch.full(case.q.shape[:2], torch.nan, device="cuda")
    _load("ops.sm120_sparse_mla").default_workspace(out.device).fill_(torch.nan)
    _call(case, out, lse, **more)
    args = case.q, case.window, case.compressed, case.sinks, case.scale
    want, want_lse = reference.sparse_mla(*args)
    whole = float((out.double() - want).norm() / want.norm().clamp_min(1e-30))
    worst = reference.relative_norm(out, want)
    bound = _load("sm120_device_kernels").BF16_BOUND.value
    if not (whole <= WHOLE and worst <= bound):
        return f"relative error {whole:.2e}, worst row {worst:.2e}"
    none = torch.isinf(want_lse)
    if not torch.equal(none, lse == -torch.inf):
        return "log-sum-exp is infinite elsewhere"
    off = (lse.double() - want_lse)[~none].abs()
    return f"log-sum-exp off by {float(off.max()):.2e}" if (off > 1e-4).any() else None


def _mixed():
    """Every count of tokens with every count of heads, twice; the rest dealt in turn."""
    widths, extras, pages = (itertools.cycle(x) for x in (WIDTHS, EXTRAS, PAGES))
    for number, (tokens, heads) in enumerate(itertools.product(TOKENS, HEADS * 2)):
        width, extra, page = next(widths), next(extras), next(pages)
        if number % 5 == 0:  # or cycles would always meet alike
            next(widths)
        if number % 7 == 0:
            next(extras)
        extra_page = PAGES[(number // 6 + number) % len(PAGES)] if extra else 0
        shape = {"tokens": tokens, "heads": heads, "width": width, "page": page}
        yield shape | {"extra_width": extra, "extra_page": extra_page}


@pytest.mark.parametrize("shape", list(_mixed()), ids=lambda s: "-".join(map(str, s.values())))
def test_shapes(shape):
    context = max(4096, shape["page"], shape["extra_page"])
    assert _wrong(_case(**shape, context=context)) is None


@pytest.mark.parametrize("width, extra", itertools.product(WIDTHS, EXTRAS))
def test_widths(width, extra):
    assert _wrong(_case(tokens=9, width=width, extra_width=extra)) is None


@pytest.mark.parametrize("page, extra_page", itertools.product(PAGES, PAGES))
def test_pages(page, extra_page):
    assert _wrong(_case(tokens=9, page=page, extra_page=extra_page)) is None


CONFIGS = _load("ops.sm120_sparse_mla_plan").CONFIGS


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_every_config(name, tokens):
    if CONFIGS[name].function and _load("ops.sm120_sparse_mla_cuda").kernels(0) is None:
        pytest.skip("no CUDA kernel on this GPU: Triton's serves")
    assert _wrong(_case(tokens=tokens, heads=20), config=CONFIGS[name]) is None


@pytest.mark.parametrize("shape", list(_mixed())[::5], ids=lambda s: "-".join(map(str, s.values())))
def test_shapes_by_triton(shape):
    planning = _load("ops.sm120_sparse_mla_plan")
    gpu = _load("ops.sm120_sparse_mla").gpu_of(torch.device("cuda", 0))
    name = planning.choose(shape["tokens"], shape["heads"], gpu, cuda=False)
    context = max(4096, shape["page"], shape["extra_page"])
    assert _wrong(_case(**shape, context=context), config=CONFIGS[name]) is None


@pytest.mark.parametrize("heads", [1, 3, 17, 33, 127])
def test_odd_heads(heads):
    assert _wrong(_case(tokens=9, heads=heads)) is None


SANITIZED = {
    "kinds of rows": {"tokens": 8, "heads": 4},
    "one row, split": {"tokens": 1},
    "no sink": {"tokens": 8, "heads": 4, "sinks": False},
    "window only": {"tokens": 8, "heads": 4, "extra_width": 0, "extra_page": 0},
    "one candidate": {"tokens": 8, "heads": 4, "width": 1, "extra_width": 1, "page": 1},
    "pages apart": {"tokens": 8, "heads": 4, "stride": 414720, "extra_stride": 414720},
    "32 heads": {"tokens": 3, "heads": 24, "width": 63, "extra_width": 33, "page": 32},
    "128 heads": {"tokens": 200, "heads": 128, "width": 5, "extra_width": 3, "context": 64},
}


@pytest.mark.parametrize("shape", SANITIZED.values(), ids=SANITIZED)
def test_sanitized(shape):
    assert _wrong(_case(**shape)) is None


def test_addresses_past_4_gib():
    """64 pages, 201 MB apart."""
    case = _case(tokens=9, stride=576 * 350_000)
    assert case.window.cache.stride(0) * case.window.cache.shape[0] > 1 << 32
    assert _wrong(case) is None


def test_equal_inputs_give_equal_bits():
    for tokens in (1, 8, 64, 300):
        case = _case(tokens=tokens)
        outs = [torch.full_like(case.q, torch.nan) for _ in range(5)]
        for out in outs:
            _call(case, out)
        assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_a_graph_sees_what_changed_since_its_capture(tokens):
    """Other queries, records, indices and lengths, in the same memory."""
    first, second = _case(0, tokens=tokens), _case(1, tokens=tokens)
    out = torch.empty_like(first.q)
    _call(first, out)  # compiles, and allocates the workspace
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_allocated()
        _call(first, out)
        assert torch.cuda.memory_allocated() == before
    for into, new in (
        (first.q, second.q),
        (first.sinks, second.sinks),
        *((getattr(first.window, n), getattr(second.window, n)) for n in ("cache", "indices")),
        *((getattr(first.compressed, n), getattr(second.compressed, n)) for n in ("cache",)),
        (first.compressed.indices, second.compressed.indices),
        (first.window.lengths, second.window.lengths),
        (first.compressed.lengths, second.compressed.lengths),
    ):
        into.copy_(new)
    out.fill_(torch.nan)
    graph.replay()
    want = torch.empty_like(out)
    _call(second, want)
    assert torch.equal(out, want)


def test_the_self_tests_own_call_passes():
    calls, kernels = _load("sm120_device_calls"), _load("sm120_device_kernels")
    for tokens in (1, 8, 64, 65, 512):
        result = calls.run_attention(_case(tokens=tokens), kernels.fork_kernel())
        assert result.ok, result.reason
