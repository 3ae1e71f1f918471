# SPDX-License-Identifier: Apache-2.0
"""Times the sparse-MLA kernel on this GPU, beside its peers and beside two floors.

    python -m benchmarks.sparse_mla [--out DIR] [--tune] [--check] [--only NAME …]

Peers: FlashMLA (``vllm/_flashmla_C.abi3.so`` anywhere on the path, on SM90 and SM100) with 64
heads, which is what it pads to; FlashInfer's SM120 kernels, where vLLM and FlashInfer are
installed and the GPU is SM12x. Floors: the bytes that a call must read and write over this
GPU's measured copy bandwidth, and its multiplications over its measured bf16 matrix rate.

Each kernel is captured in a CUDA graph of as many calls as together touch four times the L2
with records of their own; the figure is the median over replays, a call. Data is random.
``--check`` compares each call with the float64 reference first; ``--tune`` times every config
and several numbers of splits instead, for ``choose`` in sm120_sparse_mla_plan.py. Needs torch,
triton and cuda-bindings.
"""

import argparse
import dataclasses
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.sparse_mla_compile import load

SLOTS = 1 << 18
"""Records of each cache: 153 MB, three times the L2 of an H200."""

MOST_SETS = 400
"""Calls of one graph at most."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape.

    Attributes:
        bar: how many times FlashMLA's time it may take at most, in one run; None: no bar.
    """

    name: str
    tokens: int
    heads: int = 16
    width: int = 128
    page: int = 64
    extra_width: int = 512
    extra_page: int = 64
    bar: float | None = None

    def bytes(self) -> int:
        """Read once and written once: records, indices, queries, outputs."""
        candidates = self.tokens * (self.width + self.extra_width)
        return candidates * (584 + 4) + 2 * 2 * self.tokens * self.heads * 512

    def operations(self) -> int:
        """Multiplications and additions of both products."""
        return 2 * 2 * self.tokens * self.heads * (self.width + self.extra_width) * 512


CASES = (
    Case("T=1", 1, bar=0.6),
    Case("T=8", 8, bar=0.6),
    Case("T=64", 64, bar=0.7),
    Case("T=256", 256, bar=0.9),
    Case("T=4096", 4096),
    Case("T=1, 64 heads", 1, heads=64),
    Case("T=64, 64 heads", 64, heads=64, bar=1.3),
    Case("T=256, 64 heads", 256, heads=64),
    Case("T=8, window alone", 8, extra_width=0, extra_page=0),
    Case("T=8, 1152 + 512, pages 32 and 128", 8, width=1152, page=32, extra_page=128),
    Case("T=64, 1152 + 512, pages 32 and 128", 64, width=1152, page=32, extra_page=128),
    Case("T=256, 1152 + 512, pages 32 and 128", 256, width=1152, page=32, extra_page=128),
)

WIDE = 1.25
"""What a wide case may take, beyond the time that its bytes predict from the narrow one."""


class Inputs:
    """Caches and as many sets of calls as touch four times the L2."""

    def __init__(self, case: Case, l2: int) -> None:
        import torch

        packed = load("sm120_packed_cache")
        rng = torch.Generator("cuda").manual_seed(case.tokens + case.width)

        def cache(page: int) -> Any:
            found = torch.zeros(SLOTS // page, packed.record_page_bytes(page), dtype=torch.uint8)
            found = found.cuda()
            step = max(1, (1 << 14) // page)
            for first in range(0, found.shape[0], step):
                part = found[first : first + step]
                values = torch.randn(part.shape[0] * page, 512, generator=rng, device="cuda")
                packed.pack_records(values, page, out=part)
            return found

        def indices(width: int) -> Any:
            shape = (case.tokens, width)
            return torch.randint(0, SLOTS, shape, generator=rng, device="cuda").int()

        each = case.tokens * (case.width + case.extra_width) * 584
        self.sets = max(3, min(MOST_SETS, -(-4 * l2 // each)))
        self.window = cache(case.page)
        self.extra = cache(case.extra_page) if case.extra_width else None
        shape = (case.tokens, case.heads, 512)
        self.sinks = torch.randn(case.heads, generator=rng, device="cuda")
        few = min(self.sets, 32)  # queries may repeat
        self.q = [torch.randn(shape, generator=rng, device="cuda").bfloat16() for _ in range(few)]
        self.out = torch.empty_like(self.q[0])
        self.indices = [
            (indices(case.width), indices(case.extra_width) if case.extra_width else None)
            for _ in range(self.sets)
        ]
        full = torch.full((case.tokens,), case.width, dtype=torch.int32, device="cuda")
        self.lens = full
        self.extra_lens = torch.full_like(full, case.extra_width)
        self.view = packed.record_view(self.window, case.page)
        self.extra_view = None
        if self.extra is not None:
            self.extra_view = packed.record_view(self.extra, case.extra_page)

    def query(self, number: int) -> Any:
        return self.q[number % len(self.q)]


SCALE = 512**-0.5

KERNELS = ("fork", "fork, Triton", "FlashMLA", "FlashMLA prefill", "FlashInfer")
"""What is timed, in the order of table and plot."""


def ours(inputs: Inputs, config: Any = None) -> Callable[[int], None]:
    """A call of the fork's kernel on one set."""
    kernel = load("ops.sm120_sparse_mla")

    def call(number: int) -> None:
        window, extra = inputs.indices[number]
        more = {}
        if extra is not None:
            more = {
                "extra_cache": inputs.extra_view,
                "extra_indices": extra,
                "extra_lens": inputs.extra_lens,
            }
        args = (inputs.query(number), inputs.view, window, inputs.lens, inputs.sinks, SCALE)
        kernel.sparse_mla(*args, inputs.out, config=config, **more)

    return call


def flashmla() -> Any:
    """FlashMLA's operators, or None."""
    import torch

    if torch.cuda.get_device_capability()[0] not in (9, 10):
        return None
    for folder in sys.path:
        library = Path(folder or ".") / "vllm" / "_flashmla_C.abi3.so"
        if library.is_file():
            torch.ops.load_library(str(library))
            return torch.ops._flashmla_C
    return None


def flashmla_decode(ops: Any, inputs: Inputs) -> Callable[[int], None]:
    """Its decode call, heads padded to 64, the plan of the grid made once, as vLLM does."""
    import torch

    tokens, heads, dim = inputs.out.shape
    most = -(-heads // 64) * 64
    queries = []
    for q in inputs.q:
        padded = q.new_zeros(tokens, 1, most, dim)
        padded[:, 0, :heads] = q
        queries.append(padded)
    sinks = inputs.sinks.new_full((most,), -torch.inf)
    sinks[:heads] = inputs.sinks
    out = torch.empty_like(queries[0])
    plan: list[Any] = [None, None]

    def call(number: int) -> None:
        window, extra = inputs.indices[number]
        more: list[Any] = [None, None, None]
        if extra is not None:
            more = [inputs.extra_view.unsqueeze(-2), extra.unsqueeze(1), inputs.extra_lens]
        made = ops.sparse_decode_fwd(
            *(queries[number % len(queries)], inputs.view.unsqueeze(-2), window.unsqueeze(1)),
            *(inputs.lens, sinks, *plan, *more, dim, SCALE, out, False),
        )
        plan[:] = made[2:4]
        inputs.out.copy_(out[:, 0, :heads]) if call.check else None

    call.check = False
    return call


def flashmla_prefill(ops: Any, inputs: Inputs) -> Callable[[int], None] | None:
    """Its prefill call, on records that were dequantised to bf16 before: the time of that is
    not in it."""
    import torch

    if inputs.extra is None:
        return None
    packed = load("sm120_packed_cache")
    tokens, heads, dim = inputs.out.shape
    most = -(-heads // 64) * 64
    flat = torch.empty(2 * SLOTS, 1, dim, dtype=torch.bfloat16, device="cuda")
    pages = (inputs.view.shape[1], inputs.extra_view.shape[1])
    for number, (cache, page) in enumerate(zip((inputs.window, inputs.extra), pages, strict=True)):
        for first in range(0, SLOTS, 1 << 14):
            slots = torch.arange(first, first + (1 << 14), device="cuda")
            part = packed.unpack_records(cache, page, slots).bfloat16()
            flat[number * SLOTS + first :][: 1 << 14, 0] = part
    query = inputs.q[0].new_zeros(tokens, most, dim)
    query[:, :heads] = inputs.q[0]
    sinks = inputs.sinks.new_full((most,), -torch.inf)
    sinks[:heads] = inputs.sinks
    lens = inputs.lens + inputs.extra_lens
    out = torch.empty_like(query)
    both = [torch.cat((window, extra + SLOTS), 1).unsqueeze(1) for window, extra in inputs.indices]

    def call(number: int) -> None:
        ops.sparse_prefill_fwd(query, flat, both[number], SCALE, dim, sinks, lens, out)

    return call


def flashinfer(case: Case, inputs: Inputs) -> Callable[[int], None] | None:
    """FlashInfer's SM120 entry point, where it has a kernel and can run."""
    import torch

    if torch.cuda.get_device_capability()[0] != 12 or not importlib.util.find_spec("flashinfer"):
        return None
    kernels = load("sm120_device_kernels")
    segment = load("sm120_reference").Segment
    kernel = kernels.flashinfer_kernel()

    def call(number: int) -> None:
        window, extra = inputs.indices[number]
        second = None
        if extra is not None:
            second = segment(inputs.extra, case.extra_page, extra, inputs.extra_lens)
        first = segment(inputs.window, case.page, window, inputs.lens)
        kernel(inputs.query(number), first, second, inputs.sinks, SCALE, inputs.out)

    try:
        call(0)
        torch.cuda.synchronize()
    except Exception as error:
        print(f"  FlashInfer: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return None
    return call


def graph_time(call: Callable[[int], None], sets: int, milliseconds: float = 150) -> float:
    """Microseconds a call, the median over replays of a graph of ``sets`` calls."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(min(3, sets)):
            call(number)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(sets):
            call(number)
    return event_time(graph.replay, milliseconds) / sets


def event_time(run: Callable[[], Any], milliseconds: float = 150) -> float:
    """Microseconds a run, by events on the stream: the median over about so long."""
    import torch

    times: list[float] = []
    for number in range(200):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if number >= 2:
            times.append(start.elapsed_time(end))
        if len(times) >= 7 and sum(times) > milliseconds:
            break
    return statistics.median(times) * 1e3


def host_time(call: Callable[[int], None], sets: int) -> float:
    """Microseconds a call outside a graph, one after the other: launch overhead."""
    import time

    import torch

    found = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for number in range(200):
            call(number % sets)
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / 200)
    return statistics.median(found) * 1e6


def ceilings() -> tuple[float, float]:
    """This GPU's bytes a second of a large copy (read and written), and its bf16
    multiplications and additions a second of a large product of random matrices."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    # Outside of a graph the driver may copy otherwise.
    plain = event_time(lambda: target.copy_(source))
    copy = min(plain, graph_time(lambda _: target.copy_(source), 2))
    matrix = graph_time(lambda _: torch.matmul(a, b, out=product), 2)
    return 2 * source.numel() / copy * 1e6, 2 * 8192**3 / matrix * 1e6


def error_of(case: Case, inputs: Inputs, call: Callable[[int], None]) -> float:
    """Relative error of one set's first 64 tokens against the float64 reference."""
    reference = load("sm120_reference")
    inputs.out.fill_(float("nan"))
    call(0)
    window, extra = inputs.indices[0]
    some = slice(0, 64)
    segments = [reference.Segment(inputs.window, case.page, window[some], inputs.lens[some])]
    segments.append(
        None
        if extra is None
        else reference.Segment(inputs.extra, case.extra_page, extra[some], inputs.extra_lens[some])
    )
    want, _ = reference.sparse_mla(inputs.q[0][some], *segments, inputs.sinks, SCALE)
    return float((inputs.out[some].double() - want).norm() / want.norm())


def measure(case: Case, limits: tuple[float, float], ops: Any, check: bool) -> dict[str, Any]:
    """One case's times in microseconds, by who."""
    import torch

    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    inputs = Inputs(case, l2)
    calls: dict[str, Callable[[int], None] | None] = {"fork": ours(inputs)}
    planning = load("ops.sm120_sparse_mla_plan")
    gpu = load("ops.sm120_sparse_mla").gpu_of(inputs.out.device)
    triton = planning.CONFIGS[planning.choose(case.tokens, case.heads, gpu, cuda=False)]
    calls["fork, Triton"] = ours(inputs, triton)
    if ops is not None:
        calls["FlashMLA"] = flashmla_decode(ops, inputs)
        if case.tokens > 256:
            calls["FlashMLA prefill"] = flashmla_prefill(ops, inputs)
    calls["FlashInfer"] = flashinfer(case, inputs)
    row: dict[str, Any] = {"case": case.name, "sets": inputs.sets}
    row["bytes floor"] = case.bytes() / limits[0] * 1e6
    row["operations floor"] = case.operations() / limits[1] * 1e6
    for name, call in calls.items():
        if call is None:
            continue
        try:
            if check and name != "FlashMLA prefill":
                if name == "FlashMLA":
                    call.check = True
                row[f"{name} error"] = error_of(case, inputs, call)
                if name == "FlashMLA":
                    call.check = False
            row[name] = graph_time(call, inputs.sets)
            if case.tokens == 1:
                row[f"{name} launched"] = host_time(call, inputs.sets)
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            row[f"{name} failed"] = f"{type(error).__name__}: {text[0][:200]}"
    if "fork" in row and "FlashMLA" in row:
        row["ratio"] = row["fork"] / row["FlashMLA"]
        row["bar"] = case.bar
    return row


def tune(case: Case, l2: int) -> list[dict[str, Any]]:
    """Every config with several numbers of splits: microseconds."""
    import torch

    kernel = load("ops.sm120_sparse_mla")
    planning = load("ops.sm120_sparse_mla_plan")
    inputs = Inputs(case, l2)
    device = inputs.out.device
    gpu = kernel.gpu_of(device)
    rows = []
    for name, config in planning.CONFIGS.items():
        if config.heads > 16 and case.heads <= 16:
            continue
        most = planning.plan(
            *(case.tokens, case.heads, case.width, case.extra_width), gpu, config
        ).splits
        seen = set()
        for factor in (0.25, 0.5, 1, 2, 4):
            # As if the GPU held more programs or fewer at once.
            kernel._gpus[device] = dataclasses.replace(gpu, sms=max(1, int(gpu.sms * factor)))
            splits = planning.plan(
                *(case.tokens, case.heads, case.width, case.extra_width),
                kernel._gpus[device],
                config,
            ).splits
            if splits in seen:
                continue
            seen.add(splits)
            kernel._workspaces.clear()
            try:
                taken = graph_time(ours(inputs, config), inputs.sets, 60)
                rows.append({"config": name, "splits": splits, "us": taken, "now": splits == most})
            except Exception as error:
                rows.append({"config": name, "splits": splits, "failed": str(error)[:200]})
        torch.cuda.empty_cache()
    kernel._gpus[device] = gpu
    kernel._workspaces.clear()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The report, plain text."""
    names = [n for n in KERNELS if any(n in row for row in rows)]
    heads = [*names, "bytes floor", "operations floor"]
    lines = [f"{'us a call':38}" + "".join(f"{h:>17}" for h in heads) + f"{'ratio':>8}{'bar':>6}"]
    for row in rows:
        cells = "".join(f"{row[h]:17.1f}" if h in row else f"{'':17}" for h in heads)
        ratio = f"{row['ratio']:8.2f}" if "ratio" in row else f"{'':8}"
        bar = ""
        if row.get("bar"):
            bar = f"{row['bar']:6.2f} {'met' if row['ratio'] <= row['bar'] else 'MISSED'}"
        lines.append(f"{row['case']:38}{cells}{ratio}{bar}")
        for key, value in row.items():
            if key.endswith((" error", " launched", " failed")):
                shown = value if isinstance(value, str) else f"{value:.3g}"
                lines.append(f"    {key}: {shown}")
    by_case = {row["case"]: row for row in rows}
    for case in CASES:
        narrow = by_case.get(f"T={case.tokens}")
        wide = by_case.get(case.name)
        if case.width == 1152 and narrow and wide and "fork" in narrow and "fork" in wide:
            by_bytes = narrow["fork"] * wide["bytes floor"] / narrow["bytes floor"]
            found = wide["fork"] / by_bytes
            said = "met" if found <= WIDE else "MISSED"
            lines.append(f"{case.name}: {found:.2f} of what its bytes predict, bar {WIDE} {said}")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path, gpu: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [n for n in KERNELS if any(n in row for row in rows)]
    figure, axis = pyplot.subplots(figsize=(9, 0.6 * len(rows) + 1.5))
    height = 0.8 / len(names)
    for at, name in enumerate(names):
        places = [n + at * height for n, row in enumerate(rows) if name in row]
        axis.barh(places, [row[name] for row in rows if name in row], height, label=name)
    for number, row in enumerate(rows):
        floor = max(row["bytes floor"], row["operations floor"])
        axis.plot([floor] * 2, [number - height / 2, number + 0.8 - height / 2], "k", lw=2)
    axis.set_yticks([n + 0.4 - height / 2 for n in range(len(rows))], [r["case"] for r in rows])
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel(f"microseconds a call, {gpu}; black: the larger floor")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sparse_mla",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="Exit code 0: every bar that could be measured is met; 1: one is missed.",
    )
    parser.add_argument("--out", type=Path, help="folder for sparse_mla.json, .txt and .png")
    parser.add_argument("--tune", action="store_true", help="every config and number of splits")
    parser.add_argument("--check", action="store_true", help="compare with float64 first")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[c.name for c in CASES])
    args = parser.parse_args()
    import torch
    import triton

    if not torch.cuda.is_available():
        sys.exit("error: no CUDA GPU here")
    chosen = [case for case in CASES if not args.only or case.name in args.only]
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}, Triton {triton.__version__}", flush=True)
    if load("ops.sm120_sparse_mla_cuda").kernels(torch.cuda.current_device()) is None:
        print("no CUDA kernel here (the log says why): fork is Triton's")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    if args.tune:
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        found = {}
        for case in chosen:
            found[case.name] = rows = tune(case, l2)
            print(case.name)
            for row in sorted(rows, key=lambda r: r.get("us", 1e9)):
                shown = f"{row['us']:9.1f}" if "us" in row else row["failed"]
                now = "  <- plan" if row.get("now") else ""
                print(f"  {row['config']:40}{row['splits']:4} splits {shown}{now}", flush=True)
            if args.out:
                (args.out / "sparse_mla_tune.json").write_text(json.dumps(found, indent=1))
        return
    limits = ceilings()
    print(f"copy {limits[0] / 1e12:.2f} TB/s, bf16 product {limits[1] / 1e12:.0f} TFLOP/s")
    ops, rows = flashmla(), []
    for case in chosen:
        rows.append(measure(case, limits, ops, args.check))
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    text = table(rows)
    print(text)
    if args.out:
        about = {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__}
        about |= {"copy": limits[0], "product": limits[1], "rows": rows}
        (args.out / "sparse_mla.json").write_text(json.dumps(about, indent=1))
        (args.out / "sparse_mla.txt").write_text(text + "\n")
        plot(rows, args.out / "sparse_mla.png", gpu)
    sys.exit(1 if "MISSED" in text else 0)


if __name__ == "__main__":
    main()
