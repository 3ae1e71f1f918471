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
    "sm120_sparse_mla",
    "sm120_decode_shape_selftest",
)

CHECKS = ("sm120_page_geometry_check", "sm120_decode_shape_selftest")
"""Members that change no page: they show that the others work, so no release of upstream
makes them unnecessary by what it plans."""
