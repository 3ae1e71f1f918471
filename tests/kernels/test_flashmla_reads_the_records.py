# SPDX-License-Identifier: Apache-2.0
"""A real kernel reads the reference's bytes: FlashMLA from vLLM's wheel, on SM90 or SM100.

Needs a GPU, torch, and vLLM's ``_flashmla_C`` (its extension alone will do, anywhere on
the path as ``vllm/_flashmla_C.abi3.so``). FlashMLA accumulates in fp32 and rounds
probabilities to bf16: 2**-8 at most, about 2e-3 in norm.
"""

import importlib
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

MODELS = str(Path(__file__).resolve().parents[2] / "vllm" / "models")
PADDED_HEADS = 64
BOUND = 2**-8


def _op():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here: that real kernels read these bytes is unproven in this run")
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("FlashMLA's sparse decode has SM90 and SM100 kernels only")
    for folder in sys.path:
        library = Path(folder or ".") / "vllm" / "_flashmla_C.abi3.so"
        if library.is_file():
            torch.ops.load_library(str(library))
            return torch.ops._flashmla_C.sparse_decode_fwd
    pytest.skip("vLLM's _flashmla_C is not on the path")


def _load(name):
    if MODELS not in sys.path:
        sys.path.append(MODELS)
    return importlib.import_module(f"deepseek_v41.nvidia.{name}")


class FlashMLA:
    """As the protocol of sm120_device_kernels wants it; heads are padded to 64."""

    name = "FlashMLA"

    def __init__(self, op):
        self.op = op
        self.bound = _load("sm120_device_kernels").BF16_BOUND
        self.view = _load("sm120_packed_cache").record_view

    def __call__(self, q, window, compressed, sinks, scale, out):
        tokens, heads, dim = q.shape
        padded = q.new_zeros(tokens, PADDED_HEADS, dim)
        padded[:, :heads] = q
        if sinks is not None:
            real, sinks = sinks, sinks.new_full((PADDED_HEADS,), -torch.inf)
            sinks[:heads] = real
        extra = [None, None, None] if compressed is None else self._segment(compressed)
        cache, indices, lengths = self._segment(window)
        result = torch.empty_like(padded).unsqueeze(1)
        self.op(
            *(padded.unsqueeze(1), cache, indices, lengths, sinks, None, None, *extra),
            *(dim, scale, result, False),
        )
        out.copy_(result[:, 0, :heads])

    def _segment(self, segment):
        view = self.view(segment.cache, segment.page).unsqueeze(-2)
        return view, segment.indices.unsqueeze(1), segment.lengths


SHAPES = {
    "one token": {"tokens": 1},
    "eight": {"tokens": 8},
    "sixty-four": {"tokens": 64},
    "way A's stride": {"tokens": 64, "stride": 138240, "extra_stride": 138240},
    "other pages": {"tokens": 8, "page": 32, "extra_page": 128},
    "all heads": {"tokens": 8, "heads": 64},
    "no sink": {"tokens": 8, "sinks": False},
    "window only": {"tokens": 8, "extra_width": 0, "extra_page": 0},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_reads(shape):
    kernel = FlashMLA(_op())
    given = {"heads": 16, "width": 128, "page": 64, "extra_width": 512, "extra_page": 64} | shape
    case = _load("sm120_device_cases").random_case(
        _load("sm120_device_cases").AttentionShape(**given), 0, "cuda"
    )
    result = _load("sm120_device_calls").run_attention(case, kernel)
    assert result.ok, result.reason
    assert result.error_norm < BOUND
