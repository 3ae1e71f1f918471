# SPDX-License-Identifier: Apache-2.0
"""[Attention] DeepSeek-V4.1: the sliding-window page is the backend's, 64 on SM12x

Why: the attention layer gives its sliding-window cache pages of 32 tokens, whatever
    the platform. FlashInfer before 0.7.2 has SM120 decode kernels for pages of 64
    only, and its prefill kernel is compiled for 64 without comparing: pages of 32 are
    refused at decode and read from wrong addresses at prefill. The page becomes a
    class attribute that a platform class may set; the default stays 32.
Upstream: vllm-project/vllm#56837 (report), flashinfer-ai/flashinfer#5323 (report).
Retire: when upstream gives the SM120 class pages of 64 tokens, or when every base
    still served pins FlashInfer 0.7.2 or newer and pages of 32 are proven on SM12x.
Test: pytest tests/v1/attention/test_sm120_swa_page_block_size.py
"""

from fork.edits import AddClassAttribute, SetKeyword
from fork.patch import Variant

_ATTENTION = "vllm/models/deepseek_v41/attention.py"
_FLASHINFER = "vllm/models/deepseek_v41/nvidia/flashinfer_sparse.py"

VARIANTS = (
    Variant(
        ">=0.30,<0.34",
        (
            AddClassAttribute(
                _ATTENTION,
                "DeepseekV4Attention",
                code="""
                # Tokens in a page of the sliding-window cache.
                swa_block_size: ClassVar[int] = 32
                """,
                after="PREFILL_CHUNK_SIZE",
            ),
            SetKeyword(
                _ATTENTION,
                "DeepseekV4Attention.__init__",
                call="DeepseekV4SWACache",
                keyword="block_size",
                old="32",
                new="self.swa_block_size",
            ),
            AddClassAttribute(
                _FLASHINFER,
                "DeepseekV4FlashInferSM120Attention",
                code="""
                # FlashInfer's SM120 kernels before 0.7.2 take pages of 64 tokens only.
                swa_block_size: ClassVar[int] = 64
                """,
                after="use_fp8_ds_mla_layout",
            ),
        ),
    ),
)
