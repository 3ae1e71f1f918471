# SPDX-License-Identifier: Apache-2.0
"""What is compared: upstream as it is, the fork as it is, and the fork with its layout
opted in on a GPU that does not need it.

An arm is a tree of vLLM (``stock``, or the fork's) and what is done to it before the
engine starts, in the engine's own process.
"""

import dataclasses
import os
from collections.abc import Callable

SAME = 1.5
"""An arm within noise stays below this excess (:mod:`proof.compare`). Quantiles of the same
noise, from a few hundred to a few thousand positions, differ by less."""

OTHER_SPLIT = 2.5
"""Where blocks have another size, hits and preemptions fall on other tokens, so that some
are computed by the prefill kernel instead of the decode kernel, which round differently."""

OTHER_KERNEL = 5.0
"""Another attention kernel sums in another order and rounds its operands otherwise: an
untuned Triton kernel in FlashMLA's place was seen to double stock's noise, where a slot
fault was 30 times it. Between the two: 5. (The fork's kernel: 1.0 to 2.6.)"""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One side of a comparison.

    Attributes:
        stock: True where upstream's own files are used.
        prepare: called in the engine's process before vLLM builds anything.
        about: one line for the reader.
        same: the excess up to which it counts as the same as stock.
        same_hits: False where pages, and so prefix hits, differ on purpose.
        other_kernel: True where attention is another kernel than stock's.
    """

    stock: bool
    prepare: Callable[[], None]
    about: str
    same: float = SAME
    same_hits: bool = True
    other_kernel: bool = False


def _nothing() -> None:
    pass


def _opt_in(layout: str) -> Callable[[], None]:
    """SM12x's pages on SM90, where FlashMLA and DeepGEMM read them too: 64 states in every
    compressed page and 64-token window pages, in one of the fork's KV cache layouts."""

    def prepare() -> None:
        os.environ["VLLM_SM120_KV_LAYOUT"] = layout
        from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention
        from vllm.v1.attention.backends.mla import sm120_compressed_pages, sm120_kv_layout

        for module in (sm120_compressed_pages, sm120_kv_layout):
            module.CAPABILITY_FAMILIES = (*module.CAPABILITY_FAMILIES, 90)
        DeepseekV4FlashMLAAttention.swa_block_size = 64

    return prepare


def _sm120_class() -> None:
    """SM12x's attention class on another GPU, with the fork's sparse MLA in FlashInfer's
    place, and SM12x's pages."""
    os.environ["VLLM_SM120_SPARSE_MLA"] = "fork"
    _opt_in("kernel-page-units")()
    from vllm.models.deepseek_v41.nvidia import model
    from vllm.models.deepseek_v41.nvidia.flashinfer_sparse import DeepseekV4FlashInferSM120Attention

    model._select_dsv4_attn_cls = lambda vllm_config: DeepseekV4FlashInferSM120Attention


ARMS = {
    "stock": Arm(True, _nothing, "upstream's files"),
    "stock-again": Arm(True, _nothing, "upstream's files, in another process"),
    "fork": Arm(False, _nothing, "the fork's wheel"),
    "fork-again": Arm(False, _nothing, "the fork's wheel, in another process"),
    "fork-pages": Arm(
        False,
        _opt_in("spec-blocks"),
        "the fork's wheel, SM12x's pages opted in on SM90, a block for each spec",
        same=OTHER_SPLIT,
        same_hits=False,
    ),
    "fork-units": Arm(
        False,
        _opt_in("kernel-page-units"),
        "the fork's wheel, SM12x's pages opted in on SM90, in kernel-page units",
        same=OTHER_SPLIT,
        same_hits=False,
    ),
    "fork-sm120": Arm(
        False,
        _sm120_class,
        "the fork's wheel, SM12x's attention class and pages, the fork's sparse MLA",
        same=OTHER_KERNEL,
        same_hits=False,
        other_kernel=True,
    ),
}
