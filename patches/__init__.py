# SPDX-License-Identifier: Apache-2.0
"""The series: in-place edits of upstream files, one module a patch.

Each module's docstring says why, what upstream has about it, when to retire it
and how to test it. Order matters only to the recipe: patches stand on their own.
"""

SERIES = (
    "sm120_swa_page_block_size",
    "sm120_compressed_page_states",
    "sm120_kv_layout",
    "sm120_page_geometry_check",
    "sm120_decode_shape_selftest",
)

PROPOSED = ("sm120_swa_page_block_size", "sm120_compressed_page_states")
"""What `fork export --upstream` proposes: the bug fix, and nothing that it does not need."""

PROPOSED_TESTS = ("v1/attention/test_deepseek_v41_sm120_pages.py",)
"""Its tests: below tests/upstream/ here, below tests/ there, the same bytes."""

KEPT = {
    "sm120_kv_layout": (
        "it gives the fix back its memory cost (3240 to 1800 B per token of context) by a "
        "general rule in the KV cache planner, a change to core files for every model: a "
        "proposal of its own, once the fix is in, after an RFC"
    ),
    "sm120_page_geometry_check": (
        "it guards this fork's own edits at start-up; upstream's tests do that for upstream"
    ),
    "sm120_decode_shape_selftest": (
        "a feature of its own, thousands of lines, which a bug fix must not carry along"
    ),
}
"""What it does not propose, and why."""
