# SPDX-License-Identifier: Apache-2.0
"""The tree's own self-test over several argvs in one process, since importing costs.

    python -m fork.selftest_runner REQUEST.json RESULT.json

The request is a list of option and argv lists, each ``[option, …, "--", argument, …]``;
the result is a list of reports. Started by fork/probe.py with one tree first on the path.
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path


def _hide_foreign_b12x() -> None:
    """FlashInfer 0.7.2 installs a top-level stub ``b12x`` that loads from its own folder.
    With an older FlashInfer first on the path it would load from there, and fail."""
    flashinfer = importlib.util.find_spec("flashinfer")
    if flashinfer is None or importlib.util.find_spec("b12x") is None:
        return
    if not (Path(flashinfer.origin).parent / "experimental" / "b12x").is_dir():
        sys.modules["b12x"] = None


def reports(requests: list[list[str]]) -> list[dict]:
    """The self-test's report for each request."""
    _hide_foreign_b12x()
    from vllm.models.deepseek_v41.nvidia import sm120_decode_shape_selftest as selftest

    found = []
    with tempfile.TemporaryDirectory() as folder:
        for given in requests:
            path = Path(folder) / "report.json"
            path.unlink(missing_ok=True)
            said: list[str] = []
            code = selftest.main(["--json", str(path), *given], said.append)
            report = json.loads(path.read_text())
            found.append(report | {"exit": code, "output": "\n".join(said)})
    return found


def main() -> None:
    """Reads the request, runs each, writes the reports."""
    found = reports(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
