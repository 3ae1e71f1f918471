# SPDX-License-Identifier: Apache-2.0
"""Pages and states that vLLM itself plans for DeepSeek-V4.1 on SM12x, stock and patched.

Two child processes (fork/planner.py), each with one tree first on its path, plan the
same argv; a third asks FlashInfer for its rules. Level of evidence: *planned* for the
geometry, *rule* for what is legal.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from fork import ROOT, ForkError, fetch, pin, recipe, rules, series
from fork.patch import Patch
from fork.tree import FolderTree, WheelTree

SCHEMA = 1

MODEL = ROOT / "fork" / "model"
"""A config.json with DeepSeek-V4.1's dimensions, and no weights."""

SOURCES = re.compile(
    r".*(\.py|\.json|\.txt|\.toml|/METADATA|/RECORD|/WHEEL)|vllm/third_party/deep_gemm/_C.*\.so"
)
"""What a tree needs to be imported on a CPU: no native library but DeepGEMM's, whose
assert strings are read."""

_TIMEOUT_S = 900


def default_argv(block_size: int | None = None) -> list[str]:
    """The launch that is planned where the user names none: TP 4, fp8 KV cache."""
    argv = [str(MODEL), "--tensor-parallel-size", "4", "--kv-cache-dtype", "fp8"]
    argv += ["--skip-tokenizer-init"]
    return argv + (["--block-size", str(block_size)] if block_size else [])


def measure(
    the_pin: pin.Pin,
    members: Sequence[Patch],
    base: str | None = None,
    argv: Sequence[str] | None = None,
    capability: tuple[int, int] = (12, 0),
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The geometry of ``argv`` on ``base``, stock and patched.

    Returns:
        ``{"schema", "base", "argv", "capability", "rules", "trees": {"stock": …,
        "patched": …}}``. A tree that vLLM refuses to plan has ``{"error": message}``.

    Raises:
        ForkError: this environment has no vLLM dependencies, or a child died.
    """
    version, base_pin = the_pin.of(base)
    need_dependencies()
    wheel = WheelTree(fetch.upstream_wheel(the_pin, version))
    say(f"unpacking vLLM {version}")
    folders = {
        "stock": stock_tree(wheel),
        "patched": patched_tree(wheel, members, the_pin),
    }
    argv = list(argv) if argv is not None else default_argv()
    say(f"planning on stock and patched vLLM {version}, on this CPU")
    with ThreadPoolExecutor() as pool:
        taken = pool.submit(_flashinfer_rules, base_pin)
        plans = {n: pool.submit(plan, f, [argv], capability) for n, f in folders.items()}
        page_rules = taken.result() | {"indexer": rules.deep_gemm(wheel)}
        trees = {name: judged(found.result()[0], page_rules) for name, found in plans.items()}
    return {
        "schema": SCHEMA,
        "base": version,
        "argv": argv,
        "capability": ".".join(str(part) for part in capability),
        "rules": {kind: str(rule) for kind, rule in page_rules.items()},
        "trees": trees,
    }


def judged(plan: dict[str, Any], page_rules: dict[str, rules.PageRule]) -> dict[str, Any]:
    for row in plan.get("specs", ()):
        refused = page_rules[row["layer_kind"]].refuses(row["states"])
        row |= {"legal": refused is None, "refused_by": refused}
    return plan


def need_dependencies() -> None:
    """Raises ForkError where vLLM's dependencies are not installed."""
    try:
        metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise ForkError(
            "planning needs vLLM's dependencies (torch and others), which this "
            f"environment ({sys.prefix}) lacks. Run ./build.sh, or install the fork's wheel here."
        ) from None


def stock_tree(wheel: WheelTree) -> Path:
    """The upstream sources, unpacked once into the cache."""
    return made_once(f"stock-{wheel.version}-{_digest(wheel)}", lambda f: _unpack(wheel, f))


def patched_tree(wheel: WheelTree, members: Sequence[Patch], the_pin: pin.Pin) -> Path:
    """The upstream sources with ``members`` applied, made once for each recipe."""
    key = recipe.runtime_key(recipe.build(the_pin, members, wheel.version))

    def make(folder: Path) -> None:
        shutil.copytree(stock_tree(wheel), folder, copy_function=os.link, dirs_exist_ok=True)
        series.apply(FolderTree(folder), members, the_pin)

    return made_once(f"patched-{wheel.version}-{_digest(wheel)}-{key[:16]}", make)


def _digest(wheel: WheelTree) -> str:
    return wheel.path.parent.name  # the cache names the folder by the wheel's hash


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """A folder under the cache that is whole or absent."""
    folder = fetch.cache_dir() / "trees" / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as partial:
        fresh = Path(partial) / "tree"
        fresh.mkdir()
        make(fresh)
        try:
            os.replace(fresh, folder)
        except OSError:
            if not folder.is_dir():  # else another process made it meanwhile
                raise
    return folder


def _unpack(wheel: WheelTree, folder: Path) -> None:
    with zipfile.ZipFile(wheel.path) as archive:
        names = [n for n in archive.namelist() if SOURCES.fullmatch(n)]
        archive.extractall(folder, names)


def child(
    command: list[str],
    path: Sequence[Path],
    environment: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> subprocess.CompletedProcess:
    """Runs Python with that path first, without a GPU and without a hub.

    Args:
        environment: what to add to this process's own.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_CACHE_ROOT": str(fetch.cache_dir() / "vllm"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "HF_HUB_OFFLINE": "1",
        **(environment or {}),
    }
    try:
        return subprocess.run(
            [sys.executable, *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            **kwargs,
        )
    except subprocess.TimeoutExpired:
        raise ForkError(f"{' '.join(command)} did not end in {_TIMEOUT_S} s") from None


def plan(
    tree: Path,
    argvs: Sequence[Sequence[str]],
    capability: tuple[int, int] = (12, 0),
    layout: str | None = None,
    **more: Any,
) -> list[dict[str, Any]]:
    """What vLLM in ``tree`` plans for each argv: a plan, or ``{"error": message}``.

    Args:
        layout: of V4.1's compressed caches, as VLLM_SM120_KV_LAYOUT names it; what the
            environment says if None.
        more: what else the request has (fork/planner.py).

    Raises:
        ForkError: the process died.
    """
    request = {"argvs": argvs, "capability": capability, **more}
    environment = {"VLLM_SM120_KV_LAYOUT": layout} if layout else {}
    results = answer("fork.planner", request, [tree, ROOT], environment)
    return [result.get("plan") or {"error": result["error"]} for result in results]


def _flashinfer_rules(base_pin: pin.BasePin) -> dict[str, rules.PageRule]:
    path = [*flashinfer_overlay(base_pin), ROOT]
    done = child(["-m", "fork.rules"], path, cwd=tempfile.gettempdir())
    if done.returncode:
        raise ForkError(f"FlashInfer {base_pin.flashinfer} gave no rules:\n{tail(done)}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {kind: rules.PageRule.from_json(rule) for kind, rule in found.items()}


def answer(
    module: str,
    request: Any,
    path: Sequence[Path],
    environment: Mapping[str, str] | None = None,
) -> Any:
    """What ``python -m module REQUEST.json RESULT.json`` writes, as JSON.

    Args:
        path: the child's, the tree it is about first.
        environment: what to add to this process's own.

    Raises:
        ForkError: the child died.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, result = Path(folder) / "request.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(request))
        done = child(["-m", module, str(asked), str(result)], path, environment, cwd=folder)
        if not result.is_file():
            raise ForkError(f"{module} on {path[0].name} died:\n{tail(done)}")
        return json.loads(result.read_text())


def flashinfer_overlay(base_pin: pin.BasePin) -> list[Path]:
    """What to put on a child's path so that it imports the FlashInfer a base pins:
    nothing where that is the one installed."""
    if _installed("flashinfer-python") == base_pin.flashinfer:
        return []
    wheel = fetch.flashinfer_wheel(base_pin)
    name = f"flashinfer-{base_pin.flashinfer}-{wheel.parent.name}"
    return [made_once(name, lambda folder: zipfile.ZipFile(wheel).extractall(folder))]


def _installed(project: str) -> str | None:
    try:
        return metadata.version(project)
    except metadata.PackageNotFoundError:
        return None


def tail(done: subprocess.CompletedProcess) -> str:
    """The last lines a child said."""
    lines = (done.stderr or done.stdout).strip().splitlines()
    return "\n".join(lines[-5:])
