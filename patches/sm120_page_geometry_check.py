# SPDX-License-Identifier: Apache-2.0
"""[Attention] DeepSeek-V4.1: refuse a wrong page geometry on SM12x at start-up

Why: a page the kernels do not take is refused only when they first run, after
    hundreds of GiB of weights were loaded, or is read from wrong addresses in silence.
    Two hooks check that every compressed cache has 64 states a page and the
    sliding-window cache 64 tokens: while the configuration is validated, on the specs
    that it would plan, and in both model runners where kernel block sizes are finally
    chosen, before the KV cache is allocated. From 0.32 on, a third checks the allocated
    caches: one stride a layer, aligned, no two pages in one place. A failure names the
    layer, the spec, what was found, what is needed and what to change.
Upstream: none known.
Retire: not while the fork is needed: it is what shows that the other patches work.
Test: pytest tests/v1/attention/test_sm120_page_geometry_check.py
"""

from fork.edits import AddImport, Assigns, Defines, InsertAfter, InsertBefore, SetReturn
from fork.patch import Variant

MODULES = (
    "vllm/v1/attention/backends/mla/sm120_page_geometry.py",
    "vllm/models/deepseek_v41/nvidia/sm120_planned_caches.py",
    "vllm/models/deepseek_v41/nvidia/sm120_block_places.py",
)

_CHECK = "vllm.v1.attention.backends.mla.sm120_page_geometry"
_UTILS = "vllm/v1/worker/utils.py"

_EVERYWHERE = (
    InsertAfter(
        "vllm/config/vllm.py",
        "VllmConfig",
        anchor=Defines("validate_block_size"),
        code=f"""

        @model_validator(mode="after")
        def validate_sm120_page_geometry(self) -> "VllmConfig":
            from {_CHECK} import (
                check_planned_pages,
            )

            check_planned_pages(self)
            return self
        """,
    ),
    # Both model runners create their metadata builders here, with the kernel block size
    # that the builder and the cache's views will use.
    InsertBefore(
        _UTILS,
        "AttentionGroup.create_metadata_builders",
        anchor=Assigns("builder_cls"),
        code="""
        check_kernel_pages(
            vllm_config, self.backend, self.layer_names, kv_cache_spec_builder
        )
        """,
    ),
)

# Both model runners map the allocated caches here before they bind them.
_PLACES = (
    InsertBefore(
        _UTILS,
        "map_kv_caches_to_kernel_blocks",
        anchor=Assigns("mapped"),
        code="attn_groups = list(attn_groups)",
    ),
    SetReturn(
        _UTILS,
        "map_kv_caches_to_kernel_blocks",
        old="mapped",
        new="checked_places(mapped, kv_caches, attn_groups)",
    ),
)


def _import(*names: str) -> AddImport:
    code = f"from {_CHECK} import {', '.join(names)}"
    if len(code) > 88:
        lines = "".join(f"    {name},\n" for name in names)
        code = f"from {_CHECK} import (\n{lines})"
    return AddImport(_UTILS, "", code=code, after="vllm.v1.kv_cache_interface")


VARIANTS = (
    Variant(">=0.30,<0.32", (*_EVERYWHERE, _import("check_kernel_pages"))),
    Variant(
        ">=0.32,<0.34",
        (*_EVERYWHERE, *_PLACES, _import("check_kernel_pages", "checked_places")),
    ),
)
