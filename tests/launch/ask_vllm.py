# SPDX-License-Identifier: Apache-2.0
"""What the installed vLLM makes of arguments: run by test_with_vllm.py, once.

    python ask_vllm.py REQUEST.json RESULT.json

The request is ``{"parse": [argv, …], "selftest": [argv, …]}``; the result has the parsed
arguments of each of the first and the self-test's report on each of the second.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Reads the request, asks, writes the result."""
    request = json.loads(Path(sys.argv[1]).read_text())
    from vllm.models.deepseek_v41.nvidia import sm120_decode_shape_selftest as selftest
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_argv as from_argv

    reports = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        for argv in request["selftest"]:
            options = ["--rules-only", "--capability", "12.0", "--json", str(path)]
            selftest.main([*options, "--", *argv], lambda line: None)
            reports.append(json.loads(path.read_text()))

    # What parse() does, with one parser: it takes longer to build than to use.
    from_argv.set_up_platform((12, 0))
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    parsed = [vars(parser.parse_args(argv)) for argv in request["parse"]]
    result = {"parse": parsed, "selftest": reports}
    Path(sys.argv[2]).write_text(json.dumps(result, default=_plain))


def _plain(value):
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)


if __name__ == "__main__":
    main()
