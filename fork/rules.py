# SPDX-License-Identifier: Apache-2.0
"""Which page sizes FlashInfer and DeepGEMM take on SM120, for the geometry.

The rules themselves are in the tree (sm120_kernel_limits.py), where the self-test has
them too. Level of evidence: *rule*.

    python -m fork.rules    FlashInfer's rules as JSON, from the FlashInfer on the path
"""

import importlib.util
import json
import re
import sys

from fork import ROOT, ForkError
from fork.pin import DEEP_GEMM_INIT
from fork.tree import Tree


def _limits():
    """The module, by its path: importing it by name would import vLLM."""
    name = "sm120_kernel_limits"
    path = ROOT / "vllm" / "models" / "deepseek_v41" / "nvidia" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_LIMITS = _limits()
PageRule = _LIMITS.PageRule


def flashinfer() -> dict[str, PageRule]:
    """The installed FlashInfer's rules: ``swa`` is the main cache, ``main`` the extra one."""
    return _LIMITS.FlashInferLimits().pages()


def deep_gemm(tree: Tree) -> PageRule:
    """DeepGEMM's rule for an FP8 indexer cache, from the binary that the tree vendors.

    Raises:
        ForkError: the tree has no such binary, or it has no such assert.
    """
    folder = DEEP_GEMM_INIT.rpartition("/")[0]
    init = (tree.read(DEEP_GEMM_INIT) or b"").decode()
    version = re.search(r"^__version__ = '([^']+)'", init, re.MULTILINE)
    for name in sorted(n for n in tree.names() if re.fullmatch(rf"{folder}/_C[^/]*\.so", n)):
        library = f"DeepGEMM {version.group(1)}" if version else "DeepGEMM"
        if version and (rule := _LIMITS.deep_gemm_pages(tree.read(name) or b"", library)):
            return rule
    raise ForkError(f"{tree}: no DeepGEMM binary with an assert on block_kv for SM120")


if __name__ == "__main__":
    print(json.dumps({kind: rule.to_json() for kind, rule in flashinfer().items()}))
