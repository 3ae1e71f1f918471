# SPDX-License-Identifier: Apache-2.0
"""Where libraries keep what they compiled at first use, and how much that is.

A second run on the same host finds it there: minutes become seconds.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def folders(given: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """Each library's cache folder, as its documentation and vLLM set it."""
    home = Path(given.get("HOME") or Path.home())
    cache = Path(given.get("XDG_CACHE_HOME") or home / ".cache")
    vllm = Path(given.get("VLLM_CACHE_ROOT") or cache / "vllm")
    flashinfer = Path(given.get("FLASHINFER_WORKSPACE_BASE") or home)
    user = given.get("USER") or "user"
    return {
        "DeepGEMM": Path(given.get("DG_JIT_CACHE_DIR") or vllm / "deep_gemm"),
        "FlashInfer": flashinfer / ".cache" / "flashinfer",
        "Triton": Path(given.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"),
        "TileLang": Path(
            given.get("TILELANG_CACHE_DIR") or home / ".tilelang" / "cache"
        ),
        "CuTe DSL": Path(
            given.get("CUTE_DSL_CACHE_DIR")
            or Path(tempfile.gettempdir()) / user / "cutlass_python_cache"
        ),
    }


def count(where: Mapping[str, Path]) -> dict[str, int]:
    """Files below each folder; 0 where there is none, or it cannot be read."""
    return {
        name: sum(len(files) for _, _, files in os.walk(folder))
        for name, folder in where.items()
    }


def compared(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """One line: whether anything was compiled, and what was found."""
    new = {name: after[name] - n for name, n in before.items() if after[name] > n}
    if new:
        said = ", ".join(f"{name} {n} files" for name, n in new.items())
        return f"compiled for the first time on this host: {said}"
    had = ", ".join(f"{name} {n} files" for name, n in before.items() if n)
    if not had:
        return "nothing was compiled"
    return f"nothing was compiled: the kernel caches of this host were reused ({had})"
