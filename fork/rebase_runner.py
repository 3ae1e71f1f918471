# SPDX-License-Identifier: Apache-2.0
"""One tree's self-test, plan, library rules and compress ratios, in one process.

    python -m fork.rebase_runner REQUEST.json RESULT.json

Started by fork/trial.py with the tree first on the path: importing vLLM is what costs. The
request has ``requests`` (as fork/selftest_runner.py), ``argv`` (what is planned),
``capability`` and ``ratios`` (compress ratios that the fork does not know); each part of the
result is what was found, or ``{"error": message}``.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fork import planner, rules, selftest_runner


def main() -> None:
    """Reads the request, asks the tree, writes the result."""
    request = json.loads(Path(sys.argv[1]).read_text())
    argv = request["argv"]
    result = {
        "reports": _tried(lambda: selftest_runner.reports(request["requests"])),
        "plan": _tried(lambda: _plan(argv, tuple(request["capability"]))),
        "rules": _tried(lambda: {k: r.to_json() for k, r in rules.flashinfer().items()}),
        "ratios": _tried(lambda: [r for r in request["ratios"] if _takes(argv, r)]),
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


def _tried(what: Callable[[], Any]) -> Any:
    try:
        return what()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _plan(argv: list[str], capability: tuple[int, int]) -> dict[str, Any]:
    planner.set_up_platform(capability)
    found = planner.planned(argv, planner.planned_caches_module())
    return found.get("plan") or found


def _takes(argv: list[str], ratio: int) -> bool:
    """Whether this vLLM builds a layer of that compress ratio: only a refusal that names
    the ratio counts as one."""
    from vllm.models.deepseek_v41.nvidia.sm120_kv_plan import build_layers

    config = json.loads((Path(argv[0]) / "config.json").read_text())
    text = config["text_config"]
    text["compress_ratios"] = [ratio if r == 2 else r for r in text["compress_ratios"]]
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(config))
        try:
            build_layers(planner.vllm_config([model, *argv[1:]]))
        except Exception as error:
            return "compress_ratio" not in str(error)
    return True


if __name__ == "__main__":
    main()
