# SPDX-License-Identifier: Apache-2.0
"""Gate ``toolchain``: what SM12x kernels need to be compiled at first use.

FlashInfer, DeepGEMM, TileLang and Triton compile most of this model's kernels on the
machine that serves it. Everything is looked for where the installed libraries look:
FlashInfer's ``jit/cpp_ext.py`` and ``compilation_context.py``, the strings of
DeepGEMM's binary, vLLM's ``utils/deep_gemm.py``.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import vllm
from packaging.version import Version
from vllm import envs
from vllm.models.deepseek_v41.nvidia.sm120_selftest_report import (
    Fact,
    Refusal,
    Report,
)

# Where both look if neither CUDA_HOME, CUDA_PATH nor PATH says.
_CUDA = Path("/usr/local/cuda")

# DeepGEMM's assert, and what it says in every release from 0.30 to 0.33.
_NVCC_ASSERT = re.compile(rb"NVCC version must be at least (\d+\.\d+)")
_NVCC_NEEDED = Version("12.9")

_NVCC_TIMEOUT_S = 20


def check(report: Report, capability: tuple[int, int]) -> None:
    """Adds the fact ``toolchain``, and a refusal for each thing that is missing."""
    found: dict[str, str] = {}
    for why in problems(capability, found):
        report.refusals.append(Refusal("toolchain", why))
    report.facts["toolchain"] = Fact(found, "PATH, environment, nvcc --version")


def problems(capability: tuple[int, int], found: dict[str, str]) -> Iterator[str]:
    """What is missing: found, needed, what to do.

    Args:
        capability: of the GPU.
        found: gets what is there, for the report.
    """
    for library, path in {"DeepGEMM": _deep_gemm_nvcc(), "FlashInfer": _nvcc()}.items():
        version = _version(path)
        found[f"{library} nvcc"] = f"{path} {version or 'not there'}"
        if version is None:
            yield (
                f"found no nvcc that runs at {path}, where {library} looks; need "
                "CUDA's nvcc 12.9 or newer. Install the CUDA toolkit and set CUDA_HOME "
                "to it"
            )
            continue
        needed = _deep_gemm_needs() if library == "DeepGEMM" else None
        why = _flashinfer_refuses(capability, version) if needed is None else None
        if needed is not None and version < needed:
            why = f"DeepGEMM needs at least {needed}"
        if why:
            yield f"found nvcc {version} at {path}: {why}. Set CUDA_HOME to a newer one"
    ninja = shutil.which("ninja")
    found["ninja"] = ninja or "not there"
    if ninja is None and importlib.util.find_spec("flashinfer_jit_cache") is None:
        yield (
            "found no ninja on PATH; FlashInfer compiles with it, and vLLM treats "
            "FlashInfer as absent without it. Install ninja and put it on PATH"
        )
    compiler = os.environ.get("CXX", "c++").split()[:1] or ["c++"]
    found["c++"] = shutil.which(compiler[0]) or "not there"
    if shutil.which(compiler[0]) is None:
        yield f"found no {compiler[0]}; nvcc needs a host compiler. Install g++"
    for library, folder in cache_folders().items():
        found[f"{library} cache"] = str(folder)
        if why := _unusable(folder):
            yield (
                f"{library} cannot keep compiled kernels in {folder}: {why}. Make it "
                "writable, or set HOME or the library's own variable"
            )


def cache_folders() -> dict[str, Path]:
    """Where each library keeps what it compiled."""
    home = Path(os.path.expanduser("~"))
    root = Path(envs.VLLM_CACHE_ROOT)

    def given(name: str, default: Path) -> Path:
        return Path(os.environ.get(name) or default)

    return {
        "vLLM": root,
        "DeepGEMM": given("DG_JIT_CACHE_DIR", root / "deep_gemm"),
        "FlashInfer": given("FLASHINFER_WORKSPACE_BASE", home)
        / ".cache"
        / "flashinfer",
        "Triton": given("TRITON_CACHE_DIR", home / ".triton" / "cache"),
        "TileLang": given("TILELANG_CACHE_DIR", home / ".tilelang" / "cache"),
    }


def _unusable(folder: Path) -> str | None:
    """Why nothing can be compiled into a folder; it need not exist yet."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        return f"{there} is not a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} is not writable"
    if os.statvfs(there).f_flag & os.ST_NOEXEC:
        return f"{there} is mounted noexec, so that no library in it can be loaded"
    return None


def _cuda_home() -> Path:
    given = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if given:
        return Path(given)
    on_path = shutil.which("nvcc")
    return Path(on_path).parent.parent if on_path else _CUDA


def _nvcc() -> Path:
    """The nvcc that FlashInfer runs."""
    home = str(_cuda_home())
    given = os.environ.get("FLASHINFER_NVCC", "$cuda_home/bin/nvcc")
    return Path(given.replace("$cuda_home", home))


def _deep_gemm_nvcc() -> Path:
    """The nvcc that DeepGEMM runs."""
    given = os.environ.get("DG_JIT_NVCC_COMPILER")
    return Path(given) if given else _cuda_home() / "bin" / "nvcc"


def _version(nvcc: Path) -> Version | None:
    try:
        done = subprocess.run(
            [nvcc, "--version"],
            capture_output=True,
            text=True,
            timeout=_NVCC_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    release = re.search(r"release (\d+\.\d+)", done.stdout)
    return Version(release.group(1)) if release else None


def _deep_gemm_needs() -> Version:
    """The oldest nvcc that DeepGEMM's binary takes."""
    folder = Path(vllm.__file__).parent / "third_party" / "deep_gemm"
    for binary in sorted(folder.glob("_C*.so")):
        if stated := _NVCC_ASSERT.search(binary.read_bytes()):
            return Version(stated.group(1).decode())
    return _NVCC_NEEDED


def _flashinfer_refuses(capability: tuple[int, int], version: Version) -> str | None:
    """FlashInfer's own word on that nvcc for that capability."""
    try:
        from flashinfer.compilation_context import CompilationContext
        from flashinfer.jit import cpp_ext
    except ImportError as error:
        return f"FlashInfer cannot be imported: {error}"
    at_least = lambda wanted: version >= Version(wanted)  # noqa: E731
    with mock.patch.object(cpp_ext, "is_cuda_version_at_least", at_least):
        try:
            CompilationContext._normalize_cuda_arch(*capability)
        except RuntimeError as error:
            return f"FlashInfer: {error}"
        except (AttributeError, TypeError):  # another FlashInfer
            return None if version >= _NVCC_NEEDED else f"needs {_NVCC_NEEDED}"
    return None
