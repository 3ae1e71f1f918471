# SPDX-License-Identifier: Apache-2.0
"""[Attention] DeepSeek-V4.1: 64 states in every compressed page on SM12x

Why: a compressed page holds --block-size tokens over the compress ratio, so the
    ratio-1 caches get 128 states a page. DeepGEMM's paged MQA logits take 32 or 64 on
    SM120, FlashInfer before 0.7.2 takes 64, and the refusal comes after the weights
    were loaded. On capability family 120 the spec's block becomes 64 x ratio, so that
    kernel page and manager block are one and every page has 64 states, whatever
    --block-size says. Four declarations have to agree, or vLLM finds no common block.
Upstream: vllm-project/vllm#56509 (open proposal), #57292 (open proposal),
    flashinfer-ai/flashinfer#5192 and #5121 (reports).
Retire: when upstream plans 64 states a page for all four compressed specs on family
    120 (`python -m fork geometry` shows it without this patch).
Test: pytest tests/v1/attention/test_sm120_compressed_page_states.py
"""

from fork.edits import AddImport, SetKeyword, SetReturn
from fork.patch import Variant

MODULES = ("vllm/v1/attention/backends/mla/sm120_compressed_pages.py",)

_HOOKS = "vllm.v1.attention.backends.mla.sm120_compressed_pages"
_ATTENTION = "vllm/models/deepseek_v41/attention.py"
_FAMILY_90 = "[64 if current_platform.is_device_capability_family(90) else 128]"
_IMPORT = f"""
from {_HOOKS} import (
    compressed_kernel_block_sizes,
)
"""

_SPECS = (
    AddImport(
        _ATTENTION,
        "",
        code=f"from {_HOOKS} import compressed_block_size",
        after="vllm.v1.kv_cache_interface",
    ),
    SetKeyword(
        _ATTENTION,
        "DeepseekV4Attention.get_kv_cache_spec",
        call="MLAAttentionSpec",
        keyword="block_size",
        old="vllm_config.cache_config.block_size",
        new="""compressed_block_size(
                vllm_config.cache_config, self.compress_ratio
            )""",
    ),
    SetKeyword(
        _ATTENTION,
        "DeepseekV4IndexerCache.get_kv_cache_spec",
        call="MLAAttentionSpec",
        keyword="block_size",
        old="self.cache_config.block_size",
        new="compressed_block_size(self.cache_config, self.compress_ratio)",
    ),
)


def _declaration(path: str, backend: str, stock: str, spec: str | None) -> tuple:
    """A backend's declared kernel block sizes go through the hook.

    ``spec`` is the parameter that carries the KV cache spec: 0.30 has none.
    """
    arguments = [stock, *([spec] if spec else [])]
    hooked = f"compressed_kernel_block_sizes({', '.join(arguments)})"
    if len(hooked) > 70:
        lines = "".join(f"            {argument},\n" for argument in arguments)
        hooked = f"compressed_kernel_block_sizes(\n{lines}        )"
    return (
        AddImport(path, "", code=_IMPORT, after="vllm.v1.attention.backends.mla.compressor_utils"),
        SetReturn(path, f"{backend}.get_supported_kernel_block_sizes", old=stock, new=hooked),
    )


def _declarations(spec: str | None) -> tuple:
    return (
        *_declaration(
            "vllm/models/deepseek_v41/sparse_mla.py",
            "DeepseekV4SparseMLABackend",
            _FAMILY_90,
            spec,
        ),
        *_declaration(
            "vllm/models/deepseek_v41/nvidia/flashinfer_sparse.py",
            "DeepseekV4FlashInferMLASparseBackend",
            "[128]",
            spec,
        ),
        *_declaration(
            "vllm/v1/attention/backends/mla/indexer.py",
            "DeepseekV41IndexerBackend",
            _FAMILY_90,
            spec,
        ),
    )


VARIANTS = (
    Variant(">=0.30,<0.31", _SPECS + _declarations(None)),
    Variant(">=0.31,<0.34", _SPECS + _declarations("kv_cache_spec")),
)
