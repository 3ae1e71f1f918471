# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""DeepSeek-V4.1's cache pages on SM120 are those that its kernels take."""

from types import SimpleNamespace

import pytest
import torch

from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.models.deepseek_v41 import attention, sparse_mla
from vllm.models.deepseek_v41.nvidia import flashinfer_sparse
from vllm.v1.attention.backends.mla import indexer

BACKENDS = [
    sparse_mla.DeepseekV4SparseMLABackend,
    flashinfer_sparse.DeepseekV4FlashInferMLASparseBackend,
    indexer.DeepseekV41IndexerBackend,
]

# DeepGEMM's paged MQA logits and FlashInfer's sparse MLA both take pages of 64 states.
STATES = 64


@pytest.fixture
def family(monkeypatch):
    """Make the platform a CUDA GPU of that capability family."""

    def use(wanted: int) -> None:
        platform = type(sparse_mla.current_platform)
        is_family = classmethod(lambda cls, family, device_id=0: family == wanted)
        monkeypatch.setattr(platform, "is_device_capability_family", is_family)
        monkeypatch.setattr(platform, "is_rocm", lambda self: False)

    return use


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compress_ratio", [1, 2])
def test_sm120_kernel_page_has_64_states(family, backend, compress_ratio):
    family(120)
    spec = SimpleNamespace(tokens_per_state=compress_ratio)
    pages = backend.get_supported_kernel_block_sizes(spec)
    assert [page / compress_ratio for page in pages] == [STATES]


@pytest.mark.parametrize("compress_ratio", [1, 2])
def test_sm120_block_holds_whole_kernel_pages(family, compress_ratio):
    """Every compressed spec's block divides into the kernel pages that its backend
    declares: vLLM would find no common block size otherwise."""
    family(120)
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.cache_config.block_size = 128
    with set_current_vllm_config(config):
        cache = attention.DeepseekV4IndexerCache(
            head_dim=132,
            dtype=torch.uint8,
            prefix="model.layers.0.indexer.k_cache",
            cache_config=config.cache_config,
            compress_ratio=compress_ratio,
        )
        spec = cache.get_kv_cache_spec(config)
    for page in cache.get_attn_backend().get_supported_kernel_block_sizes(spec):
        assert page / spec.tokens_per_state == STATES
        assert spec.block_size % page == 0


@pytest.mark.parametrize("capability_family, page", [(90, 64), (100, 128)])
@pytest.mark.parametrize("compress_ratio", [1, 2])
def test_other_families_keep_their_pages(
    family, capability_family, page, compress_ratio
):
    family(capability_family)
    spec = SimpleNamespace(tokens_per_state=compress_ratio)
    main, flashinfer, index = (
        backend.get_supported_kernel_block_sizes(spec) for backend in BACKENDS
    )
    assert (main, flashinfer, index) == ([page], [128], [page])


def test_sliding_window_page():
    assert attention.DeepseekV4Attention.swa_block_size == 32
    sm120 = flashinfer_sparse.DeepseekV4FlashInferSM120Attention
    assert sm120.swa_block_size == STATES
