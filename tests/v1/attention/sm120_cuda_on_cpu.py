# SPDX-License-Identifier: Apache-2.0
"""Compiles CUDA C++ of this fork for the CPU, with sm120_emulated_cuda.h for the device.

Level of evidence: *emulated*.
"""

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Kernels read shared memory as several types, as they may on the GPU; they carry its pragmas.
FLAGS = ["-std=c++20", "-O2", "-shared", "-fPIC", "-DSM120_EMULATED", "-fno-strict-aliasing"]
FLAGS += ["-Wall", "-Werror", "-Wno-unknown-pragmas"]


def compiler() -> str | None:
    """The C++ compiler's path, or None where there is none."""
    return shutil.which("g++") or shutil.which("c++")


def build(source: str, folder: Path) -> ctypes.CDLL:
    """The library of this C++ source, built in the folder."""
    # Named by its text: a library loaded twice under one name would be the first one.
    name = hashlib.sha256(source.encode()).hexdigest()[:16]
    text, library = folder / f"{name}.cpp", folder / f"{name}.so"
    text.write_text(source, encoding="utf-8")
    command = [compiler() or "g++", *FLAGS, f"-I{HERE}", str(text), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return ctypes.CDLL(str(library))
