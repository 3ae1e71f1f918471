# SPDX-License-Identifier: Apache-2.0
"""What is known to hurt and cannot be refused: warnings, which never fail a launch."""

import importlib.util
import os
from argparse import Namespace
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement

# Reports of warm-ups that hang start at 128K tokens of context (vllm#56700).
_LONG_CONTEXT = 128 * 1024


def find(args: Namespace, config: Any, capability: tuple[int, int]) -> dict[str, str]:
    """Name to message.

    Args:
        args: the parsed argv.
        config: the VllmConfig.
        capability: of the target.
    """
    found: dict[str, str | None] = {
        "parser": _parser(args),
        "eager": _eager(args),
        "remote_code": _remote_code(args),
        "flashinfer_pin": _flashinfer_pin(),
        "jit_cache": _jit_cache(),
        "engram_memory": _engram(config, capability),
        "deep_gemm": _deep_gemm(config),
    }
    return {name: text for name, text in found.items() if text}


def _parser(args: Namespace) -> str | None:
    for option in ("tool_call_parser", "reasoning_parser"):
        if getattr(args, option, None) in ("deepseek_v4", "deepseek-v4"):
            flag = "--" + option.replace("_", "-")
            return f"{flag} is V4's; DeepSeek-V4.1 has its own: deepseek_v41"
    return None


def _eager(args: Namespace) -> str | None:
    if getattr(args, "enforce_eager", False):
        return "--enforce-eager: no CUDA graphs, so decoding is several times slower"
    return None


def _remote_code(args: Namespace) -> str | None:
    if getattr(args, "trust_remote_code", False):
        return (
            "--trust-remote-code: code of the checkpoint may run here, as the argv asks"
        )
    return None


def _flashinfer_pin() -> str | None:
    try:
        required = metadata.requires("vllm") or []
        installed = metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return None
    for line in required:
        wanted = Requirement(line)
        if wanted.name == "flashinfer-python" and wanted.marker is None:
            if wanted.specifier.contains(installed, prereleases=True):
                return None
            return f"FlashInfer {installed} is installed, vLLM pins {wanted.specifier}"
    return None


def _jit_cache() -> str | None:
    if importlib.util.find_spec("flashinfer_jit_cache") is None:
        return None
    return (
        "flashinfer-jit-cache is installed: its modules are loaded before the sources"
    )


def _engram(config: Any, capability: tuple[int, int]) -> str | None:
    layers = getattr(config.model_config.hf_config, "engram_layer_ids", None)
    if capability < (12, 1) or not layers:
        return None
    return (
        "Engram tables on unified memory (GB10): offloading them to the host frees "
        "nothing, GPU and host share it"
    )


def _deep_gemm(config: Any) -> str | None:
    if config.model_config.max_model_len < _LONG_CONTEXT:
        return None
    if os.environ.get("VLLM_DEEP_GEMM_WARMUP") == "skip":
        return None
    return (
        f"context of {config.model_config.max_model_len} tokens: DeepGEMM's warm-up is "
        "reported to hang at 128K and more; VLLM_DEEP_GEMM_WARMUP=skip turns it off"
    )
