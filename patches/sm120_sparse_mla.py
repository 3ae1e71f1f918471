# SPDX-License-Identifier: Apache-2.0
"""[Attention] DeepSeek-V4.1: the fork's sparse-MLA kernel, where FlashInfer has none on SM12x

Why: FlashInfer 0.6.18 and 0.7.0 refuse widths, pages and head counts on SM120, in the
    middle of serving: on 0.30 every image (width 1152). A kernel of the fork's takes any
    page, width and up to 128 heads: a refused shape is no dead engine then.
    VLLM_SM120_SPARSE_MLA=auto takes FlashInfer wherever its own rules have a kernel, and
    says each decision once in the log; flashinfer and fork take one alone. With fork the
    SM120 attention class needs no FlashInfer and runs on other GPUs, for tests.
Upstream: vllm-project/vllm#56837 (report), flashinfer-ai/flashinfer#5323 (report).
Retire: when every base still served pins a FlashInfer whose SM120 kernels take any page,
    width and head count that the self-test's rules ask for.
Test: pytest tests/v1/attention/test_sm120_sparse_mla.py
    tests/v1/attention/test_sm120_sparse_mla_route.py
"""

from fork.edits import (
    AddImport,
    Assigns,
    Defines,
    Imports,
    InsertAfter,
    InsertBefore,
    ReplaceMethod,
)
from fork.patch import Variant

_NVIDIA = "vllm/models/deepseek_v41/nvidia"

MODULES = (
    f"{_NVIDIA}/sm120_sparse_mla_route.py",
    f"{_NVIDIA}/ops/sm120_sparse_mla.py",
    f"{_NVIDIA}/ops/sm120_sparse_mla.cu",
    f"{_NVIDIA}/ops/sm120_sparse_mla_cuda.py",
    f"{_NVIDIA}/ops/sm120_sparse_mla_operands.py",
    f"{_NVIDIA}/ops/sm120_sparse_mla_plan.py",
    f"{_NVIDIA}/ops/sm120_sparse_mla_triton.py",
)

_FILE = f"{_NVIDIA}/flashinfer_sparse.py"
_CLASS = "DeepseekV4FlashInferSM120Attention"
_ENTRY = "flashinfer_trtllm_batch_decode_sparse_mla_dsv4"


def _routed(method: str, anchor: str) -> InsertBefore:
    """In one method, FlashInfer's entry point becomes the route's."""
    return InsertBefore(
        _FILE,
        f"{_CLASS}.{method}",
        anchor=Assigns(anchor),
        code=f"{_ENTRY} = sparse_mla_dsv4",
    )


VARIANTS = (
    Variant(
        ">=0.30,<0.34",
        (
            # Beside other statements than sm120_kv_layout's variable: either may be alone.
            InsertBefore(
                "vllm/envs.py",
                "",
                anchor=Assigns("VLLM_KV_CACHE_LAYOUT"),
                code='VLLM_SM120_SPARSE_MLA: Literal["auto", "flashinfer", "fork"] = "auto"',
            ),
            InsertAfter(
                "vllm/envs.py",
                "",
                anchor=Defines("__getattr__"),
                code="""


                # Which kernel DeepSeek-V4.1's sparse MLA takes on SM12x.
                environment_variables["VLLM_SM120_SPARSE_MLA"] = env_with_choices(
                    "VLLM_SM120_SPARSE_MLA",
                    "auto",
                    ["auto", "flashinfer", "fork"],
                )
                """,
            ),
            AddImport(
                _FILE,
                "",
                code=f"""
                from {_NVIDIA.replace("/", ".")}.sm120_sparse_mla_route import (
                    has_sparse_mla,
                    has_sparse_mla_config,
                    sparse_mla_dsv4,
                    workspace,
                )
                """,
                after="vllm.platforms.interface",
            ),
            InsertAfter(
                _FILE,
                "DeepseekV4FlashInferMLASparseBackend.supports_combination",
                anchor=Imports("vllm.utils.flashinfer"),
                code="has_flashinfer_sparse_mla_sm120 = has_sparse_mla",
            ),
            InsertAfter(
                _FILE,
                f"{_CLASS}.__init__",
                anchor=Imports("vllm.utils.flashinfer"),
                code="has_flashinfer_sparse_mla_sm120_config = has_sparse_mla_config",
            ),
            ReplaceMethod(
                _FILE,
                f"{_CLASS}._get_workspace",
                digest="90145a26027b4958",
                code=f"""
                @staticmethod
                def _get_workspace(device: torch.device) -> torch.Tensor:
                    return workspace(device, {_CLASS}._stock__get_workspace)
                """,
            ),
            _routed("_forward_decode", "num_decodes"),
            _routed("_forward_prefill", "swa_only"),
        ),
    ),
)
