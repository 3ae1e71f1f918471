# SPDX-License-Identifier: Apache-2.0
"""Gate `toolchain`: a machine that has everything, and one thing missing at a time."""

import os
import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def toolchain(platform):
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_toolchain

    return sm120_selftest_toolchain


def program(path, text="exit 0"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def nvcc(path, release):
    return program(path, f'echo "Cuda compilation tools, release {release}, V{release}.1"')


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with nvcc 13.0, ninja, c++ and a home of its own."""
    bin_folder = tmp_path / "cuda" / "bin"
    nvcc(bin_folder / "nvcc", "13.0")
    tools = tmp_path / "tools"
    for name in ("ninja", "c++"):
        program(tools / name)
    for name in list(os.environ):
        if name.startswith(("CUDA_", "DG_", "FLASHINFER_", "TRITON_C", "TILELANG_C", "CXX")):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(home / ".cache" / "vllm"))
    monkeypatch.setenv("PATH", f"{tools}:{bin_folder}")
    return SimpleNamespace(
        cuda=bin_folder.parent, tools=tools, home=home, env=monkeypatch.setenv, root=tmp_path
    )


def problems(toolchain, capability=(12, 0)):
    return list(toolchain.problems(capability, {}))


@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
def test_a_whole_machine(toolchain, machine, capability):
    found = {}
    assert list(toolchain.problems(capability, found)) == []
    assert found["DeepGEMM nvcc"] == f"{machine.cuda}/bin/nvcc 13.0"
    assert found["ninja"] == f"{machine.tools}/ninja"


def test_12_9_is_enough(toolchain, machine):
    nvcc(machine.cuda / "bin" / "nvcc", "12.9")
    assert problems(toolchain) == problems(toolchain, (12, 1)) == []


def _no_nvcc(machine):
    (machine.cuda / "bin" / "nvcc").unlink()
    machine.env("CUDA_HOME", str(machine.cuda))


def _file_in_the_way(machine):
    (machine.home / ".cache").write_text("")


FAULTS = {
    "no nvcc": (_no_nvcc, "found no nvcc that runs"),
    "nvcc 12.8": (lambda m: nvcc(m.cuda / "bin" / "nvcc", "12.8"), "DeepGEMM needs at least 12.9"),
    "nvcc that fails": (lambda m: program(m.cuda / "bin" / "nvcc", "exit 1"), "found no nvcc"),
    "nvcc that says nothing": (lambda m: program(m.cuda / "bin" / "nvcc"), "found no nvcc"),
    "an older one in CUDA_HOME": (
        lambda m: m.env("CUDA_HOME", str(nvcc(m.root / "old/bin/nvcc", "12.6").parents[1])),
        "12.6",
    ),
    "an older one in CUDA_PATH": (
        lambda m: m.env("CUDA_PATH", str(nvcc(m.root / "old/bin/nvcc", "12.6").parents[1])),
        "12.6",
    ),
    "an older one for DeepGEMM": (
        lambda m: m.env("DG_JIT_NVCC_COMPILER", str(nvcc(m.root / "old/nvcc", "12.8"))),
        "DeepGEMM needs at least 12.9",
    ),
    "none for FlashInfer": (
        lambda m: m.env("FLASHINFER_NVCC", "$cuda_home/nowhere/nvcc"),
        "where FlashInfer looks",
    ),
    "no ninja": (lambda m: (m.tools / "ninja").unlink(), "found no ninja"),
    "no host compiler": (lambda m: m.env("CXX", "g++-99 -O2"), "found no g++-99"),
    "a cache that is no folder": (_file_in_the_way, "is not a folder"),
    "DeepGEMM's own cache": (
        lambda m: m.env("DG_JIT_CACHE_DIR", str(m.tools / "ninja")),
        "DeepGEMM cannot keep",
    ),
    "Triton's own cache": (
        lambda m: m.env("TRITON_CACHE_DIR", str(m.tools / "c++" / "triton")),
        "Triton cannot keep",
    ),
}


@pytest.mark.parametrize("fault, said", FAULTS.values(), ids=FAULTS)
def test_one_thing_is_missing(toolchain, machine, fault, said):
    fault(machine)
    found = problems(toolchain)
    assert found and said in "\n".join(found)
    # Found, needed, what to do.
    assert all(why.rstrip(".").count(". ") >= 1 for why in found)


def test_what_12_1_needs_and_12_0_does_not(toolchain, machine):
    """FlashInfer compiles for 12.0 with CUDA 12.8, for 12.1 from 12.9 on."""
    machine.env("DG_JIT_NVCC_COMPILER", str(machine.cuda / "bin" / "nvcc"))
    machine.env("CUDA_HOME", str(nvcc(machine.root / "old/bin/nvcc", "12.8").parents[1]))
    assert problems(toolchain, (12, 0)) == []
    [why] = problems(toolchain, (12, 1))
    assert "FlashInfer" in why and "12.9" in why


def test_the_gate(toolchain, machine):
    from vllm.models.deepseek_v41.nvidia.sm120_selftest_report import Report

    for fault, gates in ((lambda m: None, []), (_no_nvcc, ["toolchain"])):
        fault(machine)
        report = Report([], rules_only=True, complete=True)
        toolchain.check(report, (12, 1))
        assert report.gates() == gates
        assert "DeepGEMM nvcc" in report.facts["toolchain"].value


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() == 0, reason="root writes anywhere")
def test_a_cache_that_cannot_be_written(toolchain, machine):
    machine.home.chmod(0o500)
    assert "is not writable" in "\n".join(problems(toolchain))
