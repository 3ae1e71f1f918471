# SPDX-License-Identifier: Apache-2.0
"""What vLLM in one tree plans for the KV cache specs of other models, as text.

    python -m tests.v1.core.spec_sets RESULT.json

With a tree first on the path. Layers, heads and sizes are those of the models' published
configurations; nothing here is about DeepSeek-V4.1 on SM12x.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core import kv_cache_utils

try:
    from vllm.v1.core import kv_cache_planning as planning  # 0.33
except ImportError:
    planning = kv_cache_utils

LAYOUTS = ("LBNHC", "LBHNC", "BLHNC", "BHLNC")
MEMORY = 1 << 30
BF16, U8 = torch.bfloat16, torch.uint8


def full(heads: int, size: int, block: int = 16, **more: Any) -> kv.FullAttentionSpec:
    return kv.FullAttentionSpec(
        block_size=block, num_kv_heads=heads, head_size=size, dtype=BF16, **more
    )


def window(heads: int, size: int, tokens: int, block: int = 16) -> kv.SlidingWindowSpec:
    return kv.SlidingWindowSpec(
        block_size=block, num_kv_heads=heads, head_size=size, dtype=BF16, sliding_window=tokens
    )


def mla(block: int, size: int, cls: type = kv.MLAAttentionSpec, **more: Any) -> Any:
    more = {"dtype": BF16} | more
    return cls(block_size=block, num_kv_heads=1, head_size=size, **more)


def mamba(state: int, block: int = 16, **more: Any) -> kv.MambaSpec:
    shapes = ((3, 8192), (32, state, 128))
    return kv.MambaSpec(block_size=block, shapes=shapes, dtypes=(BF16, torch.float32), **more)


def mixed(count: int, period: int, common: Any, rare: Any) -> dict[str, Any]:
    """``count`` layers, every ``period``-th of them rare."""
    return {f"layers.{n}": rare if (n + 1) % period == 0 else common for n in range(count)}


def deepseek_v4(main: dict[str, Any], block: int, ratios: tuple[int, int]) -> dict[str, Any]:
    """Sliding windows, compressed records of two ratios, and indexer keys beside one."""
    record = {"dtype": U8, "state_content_bytes": 584, "alignment": 576}
    specs: dict[str, Any] = {}
    for n in range(12):
        specs[f"layers.{n}.swa"] = mla(
            64,
            512,
            kv.SlidingWindowMLASpec,
            sliding_window=128,
            model_version="deepseek_v4",
            **record,
        )
        ratio = ratios[n % 2]
        specs[f"layers.{n}"] = mla(
            block, 512, tokens_per_state=ratio, model_version="deepseek_v4", **record, **main
        )
        if ratio == ratios[0]:
            specs[f"layers.{n}.indexer"] = mla(
                block, 132, dtype=U8, tokens_per_state=ratio, alignment=576, **main
            )
    return specs


def spec_sets() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "Llama 3 8B", mixed(32, 99, full(8, 128), None)
    yield "Llama 3 8B, FP8", mixed(32, 99, full(8, 128, block=32), None)
    yield "Mistral 7B", mixed(32, 99, window(8, 128, 4096), None)
    yield "Gemma 3 27B", mixed(62, 6, window(16, 128, 1024), full(16, 128))
    yield "gpt-oss 20B", mixed(24, 2, window(8, 64, 128), full(8, 64))
    chunked = kv.ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=8, head_size=128, dtype=BF16, attention_chunk_size=8192
    )
    yield "Llama 4 Scout", mixed(48, 4, chunked, full(8, 128))
    yield "two head sizes", mixed(12, 3, full(8, 128), full(4, 256, block=16))
    yield "DeepSeek-V3", mixed(61, 99, mla(64, 576), None)
    sparse = mla(64, 576, dtype=U8, state_content_bytes=656)
    indexer = mla(64, 132, dtype=U8)
    yield (
        "DeepSeek-V3.2",
        mixed(61, 99, sparse, None) | {f"layers.{n}.indexer": indexer for n in range(61)},
    )
    yield "DeepSeek-V4", deepseek_v4({}, 256, (4, 128))
    yield "DeepSeek-V4.1's ratios, no opt-in", deepseek_v4({}, 128, (1, 2))
    yield "Qwen3-Next", mixed(48, 4, mamba(128), full(2, 256, block=544))
    padded = mamba(16, page_size_padded=4_194_304)
    yield "Jamba", mixed(32, 8, padded, full(8, 128, block=1024))
    cross = kv.CrossAttentionSpec(block_size=16, num_kv_heads=20, head_size=64, dtype=BF16)
    yield "Whisper", mixed(32, 2, full(20, 64), cross)
    draft = {"draft.0": full(8, 128, is_draft=True) if _has_draft() else full(8, 128)}
    yield "Llama 3 8B with EAGLE", mixed(32, 99, full(8, 128), None) | draft
    ring = kv.CircularBufferSpec(
        block_size=8, num_kv_heads=1, head_size=1024, head_size_v=0, dtype=torch.float32
    )
    tail = {f"layers.{n}.tail": ring for n in range(4)}
    yield "MLA with rings", mixed(16, 99, mla(64, 576), None) | tail
    hidden = mla(16, 4096, kv.HiddenStateCacheSpec)
    yield "hidden states", mixed(24, 2, window(8, 128, 512), full(8, 128)) | {"hidden": hidden}


def _has_draft() -> bool:
    return any(f == "is_draft" for f in kv.FullAttentionSpec.__dataclass_fields__)


def planned(config: Any, specs: dict[str, Any], layout: str) -> str:
    """Groups, tensors and blocks, or why vLLM does not plan them."""
    config.cache_config.kv_cache_layout = layout
    try:
        groups = planning.get_kv_cache_groups(config, dict(specs))
        return repr(planning.get_kv_cache_config_from_groups(config, groups, MEMORY))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    type(current_platform).device_type = "cpu"  # without a GPU there is none
    config = VllmConfig()
    config.scheduler_config.disable_hybrid_kv_cache_manager = False  # as with a GPU
    found = {
        f"{name}, {layout}": planned(config, specs, layout)
        for name, specs in spec_sets()
        for layout in LAYOUTS
    }
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
