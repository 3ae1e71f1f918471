# SPDX-License-Identifier: Apache-2.0
"""The compiler's report on the sparse-MLA kernel, for sm_120a and sm_90a. No GPU needed.

    python -m benchmarks.sparse_mla_compile [--capability 120] [--json PATH]

NVRTC compiles sm120_sparse_mla.cu, and Triton each config of its own in
``sm120_sparse_mla_plan.CONFIGS``, with the ptxas that it carries; cuobjdump reads registers,
stack and shared memory from the cubins. Exits 1 if one spills or takes more than the 99 KiB that
a block of SM12x may have. Level of evidence: *compiled*.
"""

import argparse
import dataclasses
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODELS = str(Path(__file__).resolve().parents[1] / "vllm" / "models")

SHARED_LIMIT = 99 << 10
"""Bytes of shared memory that a block may have on compute capability 12.0 and 12.1 (CUDA C++
Programming Guide, technical specifications)."""

CAPABILITIES = (120, 90)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One kernel as ptxas left it.

    Attributes:
        stack: bytes of stack of a thread; spills live there.
        spills: instructions that load or store local memory.
        shared: bytes, static and dynamic.
        matrix: tensor-core instructions, ``HMMA`` (any GPU) and ``HGMMA`` (sm_90a alone).
    """

    name: str
    capability: int
    registers: int
    stack: int
    spills: int
    shared: int
    matrix: dict[str, int]

    @property
    def fits(self) -> bool:
        return not self.stack and not self.spills and self.shared <= SHARED_LIMIT


def load(name: str) -> Any:
    """A module of ``vllm/models/deepseek_v41/nvidia``, without importing vLLM."""
    if MODELS not in sys.path:
        sys.path.append(MODELS)
    return importlib.import_module(f"deepseek_v41.nvidia.{name}")


_POINTERS = {
    "q": "*bf16",
    "out": "*bf16",
    "swa": "*u8",
    "extra": "*u8",
    "sinks": "*fp32",
    "lse": "*fp32",
    "parts": "*fp32",
}

_ALIGNED = ("q_token", "q_head", "out_token", "out_head", "swa_stride", "extra_stride")
"""Arguments that a launch specializes, and finds to be multiples of 16 in the engine."""


def _kind(argument: str) -> str:
    if argument in _POINTERS:
        return _POINTERS[argument]
    if argument.endswith(("_indices", "_lens")):
        return "*i32"
    if argument.endswith("_stride"):
        return "i64"
    return "fp32" if argument == "scale_log2" else "i32"


def build(
    kernel: Any,
    constants: dict[str, Any],
    capability: int,
    warps: int,
    registers: int = 255,
) -> Any:
    """A compiled kernel of Triton's, without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else _kind(n) for n in names}
    attributes = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if signature[name] != "constexpr" and (signature[name][0] == "*" or name in _ALIGNED)
    }
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=fixed, attrs=attributes)
    options = {"num_warps": warps, "num_stages": 1, "maxnreg": registers}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def read(
    name: str, capability: int, cubin: bytes, shared: int, function: str | None = None
) -> Compiled:
    """What cuobjdump finds in a cubin.

    Args:
        shared: bytes of dynamic shared memory.
        function: the kernel; None: the only one.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    only = [] if function is None else ["--function", function]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([tool, *what, file.name], capture_output=True, text=True, check=True)
            for what in (["--dump-resource-usage"], ["--dump-sass", *only])
        )
    about = usage.stdout[usage.stdout.index(f"Function {function or ''}") :]
    figures = dict(re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", about.split("Function")[1]))
    count = lambda word: len(re.findall(rf"\b{word}\b", sass.stdout))  # noqa: E731
    return Compiled(
        name,
        capability,
        int(figures["REG"]),
        int(figures["STACK"]) + int(figures["LOCAL"]),
        count("LDL") + count("STL"),
        int(figures["SHARED"]) + shared,
        {word: count(word) for word in ("HMMA", "HGMMA")},
    )


def compiled(capability: int, configs: list[str] | None = None) -> Iterator[Compiled]:
    """Every config and what merges its splits; Triton's as a split and as a whole call."""
    table = load("ops.sm120_sparse_mla_plan").CONFIGS
    names = list(table) if configs is None else configs
    if cuda := [name for name in names if table[name].function]:
        host = load("ops.sm120_sparse_mla_cuda")
        cubin = host.build(divmod(capability, 10))
        for name in cuda:
            config = table[name]
            yield read(name, capability, cubin, config.shared, config.function)
        yield read("CUDA, merge", capability, cubin, host.MERGE_SHARED, host.MERGE)
    if triton := [name for name in names if not table[name].function]:
        yield from _triton(capability, {name: table[name] for name in triton})


def _triton(capability: int, configs: dict[str, Any]) -> Iterator[Compiled]:
    kernels = load("ops.sm120_sparse_mla_triton")
    for name, config in configs.items():
        for split in (False, True):
            constants = {
                "HAS_SWA_LENS": True,
                "HAS_EXTRA": True,
                "HAS_EXTRA_LENS": True,
                "HAS_SINKS": True,
                "HAS_LSE": True,
                "SPLIT": split,
                "AHEAD": config.ahead,
                "HEADS": config.heads,
                "CANDIDATES": config.candidates,
                "WIDE_SCALES": True,
                "EMULATED": False,
            }
            made = constants, capability, kernels.WARPS, config.registers
            built = build(kernels._candidates_kernel, *made)
            shown = name + (", split" if split else "")
            yield read(shown, capability, built.asm["cubin"], int(built.metadata.shared))
    for splits in (2, 64):
        constants = {
            "HAS_SINKS": True,
            "HAS_LSE": True,
            "SPLITS": splits,
            "COLUMNS": kernels._MERGE_COLUMNS,
            "EMULATED": False,
        }
        built = build(kernels._merge_kernel, constants, capability, 4)
        shown = f"Triton, merge of {splits}"
        yield read(shown, capability, built.asm["cubin"], int(built.metadata.shared))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sparse_mla_compile",
        description=(__doc__ or "").split("\n\n")[0],
    )
    parser.add_argument("--capability", type=int, choices=CAPABILITIES, action="append")
    parser.add_argument("--json", type=Path, help="write the figures")
    args = parser.parse_args()
    import triton

    found = []
    print(f"Triton {triton.__version__}")
    head = f"{'kernel':46}{'for':>9}{'registers':>11}{'spills':>8}{'shared KiB':>12}"
    print(f"{head}{'HMMA':>7}{'HGMMA':>7}")
    for capability in args.capability or CAPABILITIES:
        for one in compiled(capability):
            found.append(one)
            print(
                f"{one.name:46}{f'sm_{capability}a':>9}{one.registers:11}{one.spills:8}"
                f"{one.shared / 1024:12.1f}{one.matrix['HMMA']:7}{one.matrix['HGMMA']:7}"
                f"{'' if one.fits else '  DOES NOT FIT'}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(one) for one in found], indent=1))
    sys.exit(0 if all(one.fits for one in found) else 1)


if __name__ == "__main__":
    main()
