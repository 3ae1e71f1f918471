# SPDX-License-Identifier: Apache-2.0
"""[Core] KV cache groups in kernel-page units: DeepSeek-V4.1's 64-state pages at no cost

Why: a block of 64 states for each compressed spec (sm120_compressed_page_states alone)
    takes 3240 B per token of context where stock vLLM takes 1800 B. What the kernels
    need is 64 states a page and one stride, and a page stride only has to divide the
    block stride. A packed group with a spec whose kernel page is smaller than its block
    is laid out in units of one kernel page of every size; V4.1's 230400 B block is five
    of them. The planner has one general rule, backends opt in through the spec, and
    both model runners map views, block tables and slots. VLLM_SM120_KV_LAYOUT=spec-blocks
    goes back; releases before 0.32 have no kernel blocks in packed groups and know that
    value only. KV connectors that do not copy whole blocks are refused at start-up.
Upstream: vllm-project/vllm#44577 (packed KV blocks); none known about page strides.
Retire: when upstream plans several kernel pages a block in packed groups, for caches
    with one state a token too, at the stock bytes per token (`python -m fork geometry`).
Test: pytest tests/v1/core tests/v1/worker tests/v1/attention/test_sm120_kv_layout.py
"""

from fork.edits import (
    AddClassAttribute,
    AddImport,
    Assigns,
    Defines,
    InsertAfter,
    InsertBefore,
    ReplaceMethod,
    SetKeyword,
)
from fork.patch import Variant

MODULES = (
    "vllm/v1/core/sm120_kernel_page_units.py",
    "vllm/v1/worker/sm120_kernel_pages.py",
    "vllm/v1/attention/backends/mla/sm120_kv_layout.py",
)

_UNITS = "vllm.v1.core.sm120_kernel_page_units"
_PAGES = "vllm.v1.worker.sm120_kernel_pages"
_LAYOUT = "vllm.v1.attention.backends.mla.sm120_kv_layout"

_INTERFACE = "vllm/v1/kv_cache_interface.py"
_WORKER = "vllm/v1/worker/utils.py"


def _environment(*values: str) -> tuple:
    """VLLM_SM120_KV_LAYOUT in vLLM's own table; the first value is the default."""
    choices = ", ".join(f'"{value}"' for value in values)
    return (
        InsertAfter(
            "vllm/envs.py",
            "",
            anchor=Assigns("VLLM_KV_CACHE_LAYOUT"),
            code=f'VLLM_SM120_KV_LAYOUT: Literal[{choices}] = "{values[0]}"',
        ),
        InsertAfter(
            "vllm/envs.py",
            "",
            anchor=Assigns("environment_variables"),
            code=f"""

            # How DeepSeek-V4.1's compressed KV caches are laid out on SM12x.
            environment_variables["VLLM_SM120_KV_LAYOUT"] = env_with_choices(
                "VLLM_SM120_KV_LAYOUT",
                "{values[0]}",
                [{choices}],
            )
            """,
        ),
    )


_SPEC = (
    AddImport(
        _INTERFACE,
        "",
        code=f"from {_UNITS} import keep_kernel_pages",
        after="vllm.v1.kv_cache_spec_registry",
    ),
    InsertAfter(
        _INTERFACE,
        "MLAAttentionSpec",
        anchor=Assigns("head_size_v"),
        code="""
        # Tokens in a page of the kernels, where the backend opts in to kernel-page units.
        kernel_page_tokens: int | None = None
        # Bytes from one kernel page to the next, once the planner laid them out.
        kernel_page_stride: int | None = None
        """,
    ),
    InsertAfter(
        _INTERFACE,
        "MLAAttentionSpec.merge",
        anchor=Assigns("merged_spec"),
        code="keep_kernel_pages(merged_spec, specs)",
    ),
    InsertBefore(
        _INTERFACE,
        "KVCacheSpec.get_block_stride_alignment",
        anchor=Assigns("alignment"),
        code="""
        if stride := getattr(self, "kernel_page_stride", None):
            return stride  # whole units, which hold every alignment asked for
        """,
    ),
)


def _planner(file: str, after: str, digest: str) -> tuple:
    """The rule in the planner.

    Args:
        file: where this release plans.
        after: the import that ours follows.
        digest: of its ``get_kv_cache_groups``.
    """
    return (
        AddImport(
            file,
            "",
            code=f"""
            from {_UNITS} import (
                lay_out_in_kernel_page_units,
                unit_layer_stride,
                unit_offset,
                unit_padding,
            )
            """,
            after=after,
        ),
        ReplaceMethod(
            file,
            "get_kv_cache_groups",
            digest=digest,
            code="""
            def get_kv_cache_groups(
                vllm_config: VllmConfig,
                kv_cache_spec: dict[str, KVCacheSpec],
            ) -> list[KVCacheGroupSpec]:
                groups = _stock_get_kv_cache_groups(vllm_config, kv_cache_spec)
                return lay_out_in_kernel_page_units(groups, vllm_config)
            """,
        ),
        InsertAfter(
            file,
            "_get_kv_cache_bytes_per_block",
            anchor=Assigns("bytes_per_block"),
            code="bytes_per_block += unit_padding(kv_cache_groups, bytes_per_block)",
        ),
        SetKeyword(
            file,
            "get_kv_cache_config_from_groups",
            call="KVCacheTensor",
            keyword="layer_stride",
            old="layer_stride",
            new="unit_layer_stride(spec, layer_names, layer_stride)",
        ),
        SetKeyword(
            file,
            "get_kv_cache_config_from_groups",
            call="KVCacheTensor",
            keyword="offset",
            old="byte_offset",
            new="unit_offset(layers_by_spec, spec, byte_offset)",
        ),
    )


_GROUP = "AttentionGroup"
_RUNNERS = (
    AddImport(
        _WORKER,
        "",
        code=f"""
        from {_PAGES} import (
            KernelSlots,
            block_page_view,
            in_units,
            kernel_page_view,
        )
        """,
        after="vllm.v1.worker.block_table",
    ),
    AddClassAttribute(
        _WORKER,
        _GROUP,
        code="""
        # Slots in kernel pages, for caches in kernel-page units with one state a token.
        kernel_slots: KernelSlots | None = None
        """,
        after="kernel_block_offsets",
    ),
    InsertAfter(
        _WORKER,
        f"{_GROUP}.create_metadata_builders",
        anchor=Assigns("self.metadata_builders"),
        code="""
        self.kernel_slots = KernelSlots.make(
            spec, vllm_config, device, num_metadata_builders
        )
        """,
    ),
    ReplaceMethod(
        _WORKER,
        f"{_GROUP}._with_kernel_block_table",
        digest="d2963b7d11fa441e",
        code="""
        def _with_kernel_block_table(
            self, common_attn_metadata: CommonAttentionMetadata, ubatch_idx: int = 0
        ) -> CommonAttentionMetadata:
            mapped = self._stock__with_kernel_block_table(
                common_attn_metadata, ubatch_idx
            )
            if self.kernel_slots is None:
                return mapped
            slots = self.kernel_slots.map(
                mapped.slot_mapping, self.kernel_block_stride, ubatch_idx
            )
            return replace(mapped, slot_mapping=slots)
        """,
    ),
    InsertBefore(
        _WORKER,
        f"{_GROUP}.map_kv_cache_to_kernel_blocks",
        anchor=Assigns("kernel_rows"),
        code="""
        if in_units(spec):
            view, self.kernel_block_stride = kernel_page_view(kv_cache, spec)
            return view
        """,
    ),
    InsertBefore(
        _WORKER,
        f"{_GROUP}.map_kv_cache_to_manager_blocks",
        anchor=Assigns("rows"),
        code="""
        if in_units(spec):
            return block_page_view(
                kv_cache, spec, self.kernel_block_stride, num_blocks
            )
        """,
    ),
    InsertBefore(
        _WORKER,
        f"{_GROUP}.update_draft_decode_metadata",
        anchor=Assigns("metadata"),
        code="""
        if self.kernel_slots is not None:
            self.kernel_slots.refresh(self.kernel_block_stride)
        """,
    ),
)


def _opt_in(file: str, backend: str, after: str) -> tuple:
    return (
        AddImport(file, "", code=f"from {_LAYOUT} import with_kernel_pages", after=after),
        InsertAfter(
            file,
            backend,
            anchor=Defines("get_supported_kernel_block_sizes"),
            code="""

            @classmethod
            def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
                return with_kernel_pages(cls, spec)
            """,
        ),
    )


_BACKENDS = (
    *_opt_in(
        "vllm/models/deepseek_v41/sparse_mla.py",
        "DeepseekV4SparseMLABackend",
        after="vllm.v1.attention.backends.mla.sparse_swa",
    ),
    *_opt_in(
        "vllm/v1/attention/backends/mla/indexer.py",
        "DeepseekV41IndexerBackend",
        after="vllm.v1.attention.backends.mla.sparse_utils",
    ),
)

_CONNECTORS = (
    InsertAfter(
        "vllm/config/vllm.py",
        "VllmConfig",
        anchor=Defines("validate_mamba_block_size"),
        code=f"""

        @model_validator(mode="after")
        def validate_sm120_kv_connectors(self) -> "VllmConfig":
            from {_LAYOUT} import (
                check_kv_connectors,
            )

            check_kv_connectors(self)
            return self
        """,
    ),
)

_EVERYWHERE = (
    *_environment("kernel-page-units", "spec-blocks"),
    *_SPEC,
    *_RUNNERS,
    *_BACKENDS,
    *_CONNECTORS,
)

VARIANTS = (
    Variant(">=0.30,<0.32", _environment("spec-blocks")),
    Variant(
        ">=0.32,<0.33",
        _EVERYWHERE
        + _planner(
            "vllm/v1/core/kv_cache_utils.py",
            "vllm.v1.hisparse.layout",
            "ddbefaed7fed7cb3",
        ),
    ),
    Variant(
        ">=0.33,<0.34",
        _EVERYWHERE
        + _planner(
            "vllm/v1/core/kv_cache_planning.py",
            "vllm.v1.core.kv_cache_utils",
            "7e4062a72aa5cbc1",
        ),
    ),
)
