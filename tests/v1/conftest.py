# SPDX-License-Identifier: Apache-2.0
"""vLLM as installed here, with a CPU that passes for a GPU of the capability a test wants."""

import importlib.util
import os
from importlib import metadata

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import pytest

from fork import geometry, pin, planner


def _missing() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "vLLM's dependencies are not installed here: ./build.sh makes .venv with them"
    try:
        found = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        found = "none"
    wanted = pin.load().fork_version()
    return None if found == wanted else f"needs vllm {wanted} installed, found {found}"


def pytest_collection_modifyitems(items):
    """Marks this folder's tests, and skips them where they cannot run."""
    missing = _missing()
    for item in items:
        if "tests/v1" not in item.path.as_posix():
            continue
        item.add_marker(pytest.mark.needs_vllm)
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session")
def platform():
    """vLLM's platform class, set up as capability 12.0."""
    planner.set_up_platform((12, 0))
    planner.planned_caches_module()  # and with it this checkout's modules, after the tree's own
    from vllm.platforms import current_platform

    return type(current_platform)


@pytest.fixture
def capability(platform, monkeypatch):
    """Sets the capability for one test: ``capability(9, 0)``; ``capability(None)`` is a
    platform that has none (XPU and CPU answer so)."""
    from vllm.platforms.interface import DeviceCapability

    def be(*version):
        found = None if version == (None,) else DeviceCapability(*version)
        monkeypatch.setattr(
            platform, "get_device_capability", classmethod(lambda cls, device_id=0: found)
        )

    return be


@pytest.fixture
def engine_config(capability):
    """The VllmConfig of ``vllm serve <V4.1> --kv-cache-dtype fp8 <more>`` on 12.0."""

    def make(*more):
        capability(12, 0)
        return planner.vllm_config([*geometry.default_argv(), *map(str, more)])

    return make


@pytest.fixture
def kv_plan(platform):
    """The module that plans with vLLM's own layers."""
    from vllm.models.deepseek_v41.nvidia import sm120_kv_plan

    return sm120_kv_plan
