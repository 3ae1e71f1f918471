# SPDX-License-Identifier: Apache-2.0
"""A small wheel that passes for the fork's: its recipe, and what gate and engine name."""

import zipfile
from pathlib import Path

from fork import recipe, record


def small_wheel(path: Path, tag: str = "py3-none-any", **changes: bytes) -> Path:
    """Writes it; ``changes`` replaces files by their path."""
    version = "0.33.0+sm120.1"
    built = {"schema": 1, "base": {"version": "0.33.0"}, "members": []}
    info = f"vllm-{version}.dist-info"
    files = {
        "vllm/__init__.py": b"def main():\n    print('vllm')\n",
        "vllm/_version.py": f"__version__ = '{version}'\n".encode(),
        "vllm/sm120_recipe.json": recipe.document(built),
        "vllm/models/deepseek_v41/nvidia/sm120_decode_shape_selftest.py": b"",
        "vllm/entrypoints/cli/main.py": b"",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
        f"{info}/entry_points.txt": b"[console_scripts]\nvllm = vllm:main\n",
    } | changes
    lines = [record.line(name, data) for name, data in files.items()] + [f"{info}/RECORD,,", ""]
    with zipfile.ZipFile(path, "w") as file:
        for name, data in (files | {f"{info}/RECORD": "\n".join(lines).encode()}).items():
            file.writestr(name, data)
    return path
