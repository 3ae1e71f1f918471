# SPDX-License-Identifier: Apache-2.0
"""Does this argv, on this build, on this GPU, have a kernel for every shape?

    python -m vllm.models.deepseek_v41.nvidia.sm120_decode_shape_selftest \\
        [options] -- <exactly what follows "vllm serve">

Answers in seconds, before a weight is read. The last line is the verdict (see
sm120_selftest_report.py). ``--rules-only`` needs no GPU: the libraries' own rules
against the shapes that vLLM plans.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.models.deepseek_v41.nvidia import sm120_selftest_argv as from_argv
from vllm.models.deepseek_v41.nvidia.sm120_selftest_report import (
    CALLS,
    Fact,
    Refusal,
    Report,
)


def _say(line: str) -> None:
    print(line, flush=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise Refusal("arguments", f"{message} (options of the self-test; --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="sm120_decode_shape_selftest", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report")
    parser.add_argument(
        "--tokens", type=_counts, metavar="N,N", help="token counts to try"
    )
    parser.add_argument(
        "--calls",
        type=_calls,
        metavar="A,B",
        help=f"of {', '.join(CALLS)}; all if not given",
    )
    parser.add_argument(
        "--rules-only", action="store_true", help="no GPU: the libraries' rules alone"
    )
    parser.add_argument(
        "--capability",
        type=_capability,
        metavar="12.0",
        help="with --rules-only: a hypothetical target",
    )
    parser.add_argument(
        "--device-memory-gib",
        type=_gib,
        metavar="N",
        help="memory of a GPU, for gate memory; what it has if not given",
    )
    parser.add_argument(
        "--host-memory-gib",
        type=_gib,
        metavar="N",
        help="memory of the host, for gate memory; what it has if not given",
    )
    parser.add_argument("--quiet", action="store_true", help="the last line only")
    return parser


def _counts(text: str) -> list[int]:
    counts = sorted({int(n) for n in text.split(",")})
    if not counts or counts[0] < 1 or counts[-1] > 1 << 20:
        raise argparse.ArgumentTypeError("token counts are 1 to 1048576")
    return counts


def _calls(text: str) -> list[str]:
    calls = text.split(",")
    if unknown := set(calls) - set(CALLS):
        raise argparse.ArgumentTypeError(f"unknown call {sorted(unknown)[0]!r}")
    return calls


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal() and len(text) < 6):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 12.0")
    return int(major), int(minor)


def _gib(text: str) -> float:
    size = float(text)
    if not 0 < size < 1 << 20:
        raise argparse.ArgumentTypeError("memory is more than 0 and below 1048576 GiB")
    return size


def main(given: Sequence[str] | None = None, say: Callable[[str], None] = _say) -> int:
    """Runs the self-test, says the verdict last, and returns the exit code.

    Args:
        given: options, ``--``, argv; the process's own if None.
        say: gets each line of the output.
    """
    given = list(sys.argv[1:] if given is None else given)
    split = given.index("--") if "--" in given else len(given)
    argv = given[split + 1 :]
    report = Report(argv, rules_only=True, complete=True)
    options = argparse.Namespace(json=None, quiet=False)
    try:
        options = _parser().parse_args(given[:split])
        report.rules_only = options.rules_only
        report.complete = options.tokens is None and options.calls is None
        check(report, options, argv)
    except Refusal as refusal:
        report.refusals.append(refusal)
    except Exception as error:  # vLLM met something it does not expect
        said = " ".join(str(error).split())[:300]
        report.not_run = f"vLLM cannot use this: {type(error).__name__}: {said}"
    if options.json is not None:
        try:
            report.write(options.json)
        except OSError as error:
            report.not_run = f"the report cannot be written: {error}"
    _tell(report, options.quiet, say)
    return report.exit_code()


def check(report: Report, options: Any, argv: Sequence[str]) -> None:
    """Everything between the options and the verdict.

    Raises:
        Refusal: at a gate behind which nothing more can be said.
    """
    if options.capability is not None and not options.rules_only:
        raise Refusal("arguments", "--capability is for --rules-only")
    capability = options.capability or _real_capability()
    report.facts["capability"] = Fact(
        ".".join(map(str, capability)),
        "--capability" if options.capability else "vllm.platforms",
    )
    if capability[0] != 12:
        raise Refusal(
            "device", f"capability {capability[0]}.{capability[1]}, need 12.x"
        )
    if not argv:
        raise Refusal("arguments", "nothing after --: give what follows `vllm serve`")
    if options.capability:
        from_argv.set_up_platform(capability)
    else:
        from_argv.register_model()
    args = from_argv.parse(argv)
    plan = judge(report, options, args, capability)
    if not options.rules_only:
        quiet = (lambda _: None) if options.quiet else _say
        _on_each_gpu(report, plan, args, options.calls, quiet)


def judge(
    report: Report, options: Any, args: argparse.Namespace, capability: tuple[int, int]
) -> Any:
    """One parsed argv against the rules. Returns what vLLM plans for it.

    Raises:
        Refusal: at a gate behind which nothing more can be said.
    """
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_rules as rules
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_warnings as warnings
    from vllm.models.deepseek_v41.nvidia.sm120_selftest_path import Path as RestOfPath

    checkpoint = from_argv.check_checkpoint(args.model)
    from_argv.check_heads(args, checkpoint)
    config = from_argv.engine_config(args)
    report.warnings |= warnings.find(args, config, capability)
    rest = RestOfPath(report, options, config, capability)
    _backend(config, capability)
    rules.parallel_layout(report, config)
    _weights(report, args.model, config)
    rest.select()
    plan = _plan(config)
    rest.remember(plan)
    ranks = int(args.tensor_parallel_size)
    rules.run(report, plan, ranks, options.tokens, options.calls or CALLS)
    return plan


def _on_each_gpu(
    report: Report,
    plan: Any,
    args: argparse.Namespace,
    calls: Sequence[str] | None = None,
    say: Callable[[str], None] = _say,
) -> None:
    """The device rows, on every GPU of this host that the argv uses.

    With Ray the argv does not say how many of its GPUs a host has: all that are visible
    here, up to the whole layout.

    Raises:
        Refusal: ``device``: there are fewer GPUs, or one of another capability.
    """
    from vllm.models.deepseek_v41.nvidia import sm120_selftest_device as device
    from vllm.platforms import current_platform

    wanted = int(args.tensor_parallel_size) * int(args.pipeline_parallel_size)
    wanted //= max(1, int(args.nnodes))
    present = current_platform.device_count()
    if args.distributed_executor_backend == "ray":
        wanted = min(wanted, max(present, 1))
    if present < wanted:
        raise Refusal(
            "device", f"{present} GPUs here, this argv uses {wanted} on each host"
        )
    for number in range(wanted):
        _real_capability(number)
    ops = device.op_rows(report, plan, calls)
    for number in range(wanted):
        device.run(report, plan, f"cuda:{number}", ops=ops, say=say)


def _real_capability(number: int = 0) -> tuple[int, int]:
    from vllm.platforms import current_platform

    found = current_platform.get_device_capability(number)
    if found is not None and found.major != 12:
        raise Refusal(
            "device", f"GPU {number} has capability {found.as_version_str()}, need 12.x"
        )
    if found is None:
        raise Refusal(
            "device", "no GPU here; --rules-only --capability 12.0 asks the rules alone"
        )
    return found.major, found.minor


def _backend(config: Any, capability: tuple[int, int]) -> None:
    from vllm.models.deepseek_v41 import attention
    from vllm.models.deepseek_v41.nvidia.model import _select_dsv4_attn_cls
    from vllm.platforms.interface import DeviceCapability

    dtype = config.cache_config.cache_dtype
    try:
        cls = _select_dsv4_attn_cls(config)
        name = cls.backend_cls.get_name()
        if not cls.backend_cls.supports_compute_capability(
            DeviceCapability(*capability)
        ):
            raise ValueError(f"attention backend {name} does not run on SM12x")
        if not dtype.endswith("_ds_mla"):
            packed = cls.use_fp8_ds_mla_layout
            attention._resolve_dsv4_kv_cache_dtype(packed, dtype, None)
        elif dtype != "fp8_ds_mla":
            raise ValueError(f"KV records of {dtype} need SM100")
    except (ValueError, NotImplementedError) as error:
        raise Refusal(
            "backend",
            f"{error} Use --kv-cache-dtype fp8 and leave the attention backend out",
        ) from None


def _plan(config: Any) -> Any:
    from vllm.models.deepseek_v41.nvidia.sm120_kv_plan import KVPlan

    try:
        with from_argv.without_start_up_check():
            return KVPlan(config)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise Refusal("block_size", f"vLLM cannot plan these pages: {error}") from None


def _weights(report: Report, model: str, config: Any) -> None:
    from vllm.models.deepseek_v41.nvidia import sm120_checkpoint_names as checkpoint

    try:
        names = checkpoint.read_index(Path(model))
    except ValueError as error:
        raise Refusal("checkpoint", f"{model}: {error}") from None
    if names is None:
        report.warnings["weights_unchecked"] = (
            "the checkpoint has no index file to read"
        )
        return
    try:
        found = checkpoint.check(config, names)
    except checkpoint.CannotCheck as error:
        report.warnings["weights_unchecked"] = str(error)
        return
    if found.homeless:
        shown = ", ".join(found.homeless[:3])
        report.refusals.append(
            Refusal(
                "weights",
                f"{len(found.homeless)} tensors have no parameter in this model, so "
                f"loading would end in a KeyError: {shown}. {found.advice or ''}",
            )
        )
    if found.unfed:
        shown = ", ".join(found.unfed[:3])
        report.warnings["weights_unfed"] = (
            f"{len(found.unfed)} parameters that no tensor feeds: {shown}"
        )


def _tell(report: Report, quiet: bool, say: Callable[[str], None]) -> None:
    if not quiet:
        for name, text in sorted(report.warnings.items()):
            say(f"warning {name}: {text}")
        for refusal in report.refusals:
            say(f"refused {refusal.gate}: {refusal.why}")
        failed = sum(not row.ok for row in report.rows)
        if report.rows:
            say(f"{len(report.rows)} rows, {failed} refused")
        if report.selection:
            refused = sum(not row.ok for row in report.selection)
            say(f"{len(report.selection)} ops selected, {refused} refused")
        if memory := report.facts.get("memory"):
            say(f"memory: {memory.value['says']}")
        left = report.facts.get("not_evaluated")
        if left and left.value:
            say(f"not evaluated: {', '.join(left.value)} ({left.source})")
        assumed = [f"{n} ({f.assumed})" for n, f in report.facts.items() if f.assumed]
        if assumed:
            say(f"assumed: {'; '.join(assumed)}")
    say(report.line())


if __name__ == "__main__":
    sys.exit(main())
