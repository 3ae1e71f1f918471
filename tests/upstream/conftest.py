# SPDX-License-Identifier: Apache-2.0
"""Tests that `fork export --upstream` sends along, byte for byte: nothing of the fork's
is known to them. They import vLLM at once, so without the fork's wheel none is
collected; tests/v1 says then what is missing."""

import importlib.util
import os
from importlib import metadata

from fork import pin

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def _installed() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    try:
        return metadata.version("vllm") == pin.load().fork_version()
    except metadata.PackageNotFoundError:
        return False


collect_ignore_glob = [] if _installed() else ["*"]
