# SPDX-License-Identifier: Apache-2.0
"""One engine in one process: started, asked, and where wanted hurt.

    python -m proof.engine JOB.json OUT.json

:mod:`proof.run` writes the job and gives the process its environment.
"""

import contextlib
import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import arms, model, scenarios
from .faults import FAULTS
from .scenarios import CHUNK, Request, Row

KV_BYTES = 6 << 30
"""KV cache of every engine. With --block-size 128 upstream's layout on SM90 asks for 4.4
GiB to admit one request of 8192 tokens."""


@dataclasses.dataclass
class Setup:
    """How an engine is started.

    Attributes:
        variant: of the checkpoint.
        scenarios: names, in order.
        repeats: how often they are asked in one process.
        options: of ``vllm.LLM``, beside the common ones.
        loads: False where loading is expected to fail; nothing is asked then.
        like: the set-up whose answers these should be, if another.
        faults: whether faults are planted; in eager mode, where Python runs every step.
        arms: those of a comparison with stock. Stock runs in two processes where most is
            asked: that starting again adds no noise to asking again shows there.
    """

    variant: str
    scenarios: tuple[str, ...]
    repeats: int = 2
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    loads: bool = True
    like: str | None = None
    faults: bool = False
    arms: tuple[str, ...] = ("stock", "fork")


_GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]},
}

SETUPS = {
    "eager": Setup(
        "text",
        ("few", "short", "long", "far", "decode", "warm", "evicted", "preempted", "mixed"),
        options={"enforce_eager": True},
        faults=True,
        arms=("stock", "stock-again", "fork", "fork-pages", "fork-units", "fork-sm120"),
    ),
    "graphs": Setup(
        "text",
        ("decode", "warm", "mixed", "preempted"),
        options=_GRAPHS,
        arms=("stock", "stock-again", "fork", "fork-units", "fork-sm120"),
    ),
    "block-128": Setup(
        "text",
        ("decode", "warm", "mixed"),
        options={**_GRAPHS, "block_size": 128},
        like="graphs",
        # On SM90 upstream's own layout refuses blocks of 128 tokens.
        arms=("fork-units",),
    ),
    "no-replay": Setup(
        "text",
        ("long", "decode", "warm"),
        options={"enforce_eager": True, "block_size": 64, "swa_bounded_replay": False},
    ),
    "dspark": Setup(
        "dspark",
        ("short", "drafted"),
        options={
            "enforce_eager": True,
            "speculative_config": {"method": "dspark", "num_speculative_tokens": 5},
        },
        faults=True,
        arms=("stock", "stock-again", "fork", "fork-units", "fork-sm120"),
    ),
    "offload": Setup(
        "text",
        ("offloaded",),
        options={
            "enforce_eager": True,
            "kv_transfer_config": {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": 2 << 30},
            },
        },
        arms=("stock", "fork-units"),
    ),
    "engram": Setup(
        "engram",
        ("short", "long", "decode", "warm"),
        options={"enforce_eager": True},
        arms=("stock", "fork", "fork-sm120"),
    ),
    "vision": Setup(
        "vision",
        ("short", "image"),
        options={
            "enforce_eager": True,
            "language_model_only": False,
            "limit_mm_per_prompt": {"image": 2},
            "mm_encoder_attn_backend": "TORCH_SDPA",
        },
        arms=("stock", "fork", "fork-sm120"),
    ),
    "no-vision-layers": Setup(
        "text",
        (),
        options={"enforce_eager": True, "hf_overrides": {"vision_n_layers": 0}},
        loads=False,
        arms=("stock",),
    ),
}


class Engine:
    """vLLM's engine in this process, and what the scenarios need of it."""

    def __init__(self, checkpoint: Path, setup: Setup) -> None:
        from vllm import LLM

        options: dict[str, Any] = {
            "model": str(checkpoint / setup.variant),
            "language_model_only": True,
            "kv_cache_dtype": "fp8",
            "max_model_len": 8192,
            "max_num_batched_tokens": CHUNK,
            "max_num_seqs": 8,
            "gpu_memory_utilization": 0.1,
            "kv_cache_memory_bytes": KV_BYTES,
            "seed": 0,
        }
        speculative = "speculative_config" in setup.options
        if not speculative:
            options["enable_trace_replay"] = True
        self.llm = LLM(**{**options, **setup.options})
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.pool = core.scheduler.kv_cache_manager.block_pool
        self.runner = core.model_executor.driver_worker.worker.model_runner
        whole = self.runner.model
        self.language_model = getattr(whole, "language_model", whole)
        self.preemptions = 0
        self.held: dict[str, tuple[list[int], ...]] = {}
        self._count_preemptions()
        self.forcing = None
        if speculative:
            from .forcing import Forcing

            self.forcing = Forcing(self.runner)

    def _count_preemptions(self) -> None:
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted

    def run(
        self,
        scenario: str,
        requests: Sequence[Request],
        later: Sequence[Request] = (),
        after_steps: int = 0,
    ) -> list[Row]:
        """Asks all ``requests`` at once, and ``later`` after some steps."""
        self.preemptions = 0
        if self.forcing:
            self.forcing.taken()
        asked = {self._add(request): request for request in requests}
        rows: dict[str, list[Row]] = {}
        steps = 0
        while self.llm.llm_engine.has_unfinished_requests():
            if steps == after_steps:
                asked |= {self._add(request): request for request in later}
            steps += 1
            for running in self.scheduler.running:
                name = asked[self._outer(running.request_id)].name
                self.held[name] = self.scheduler.kv_cache_manager.get_block_ids(running.request_id)
            for output in self.llm.llm_engine.step():
                if output.finished:
                    request = asked[output.request_id]
                    rows[request.name] = self._rows(scenario, request, output)
        found = [row for r in (*requests, *later) for row in rows[r.name]]
        if self.forcing:
            found.append(Row(scenario, "all", "draft", 0, self.forcing.taken()))
        return found

    def _add(self, request: Request) -> str:
        from vllm import SamplingParams

        params: dict[str, Any] = {"temperature": 0, "detokenize": False, "ignore_eos": True}
        if not request.forced:
            params |= {"max_tokens": 1, "prompt_logprobs": 0}
        else:
            params |= {"max_tokens": len(request.forced), "logprobs": 0}
            if self.forcing:
                from .forcing import KEY

                params["extra_args"] = {KEY: [*request.prompt, *request.forced]}
            else:
                params["trace_decode_token_ids"] = list(request.forced)
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt)}
        if request.images:
            prompt["multi_modal_data"] = {"image": [_picture(side) for side in request.images]}
        (name,) = self.llm.enqueue([prompt], SamplingParams(**params), use_tqdm=False)
        return self._outer(name)

    @staticmethod
    def _outer(name: str) -> str:
        """The caller's name of a request: the engine's adds a dash and a random part."""
        return name.rpartition("-")[0] or name

    def _rows(self, scenario: str, request: Request, output: Any) -> list[Row]:
        cached = output.num_cached_tokens or 0
        if not request.forced:
            answer, where, imposed = output.prompt_logprobs, "prompt", None
        else:
            answer, where, imposed = output.outputs[0].logprobs, "forced", request.forced
        said, values = [], []
        for position in answer:
            if position is not None:
                (token, logprob), *_ = position.items()
                said.append(token)
                values.append(round(float(logprob.logprob), 6))
        if imposed is not None and tuple(said) != imposed:
            raise RuntimeError(f"{scenario}/{request.name}: the continuation was not imposed")
        return [Row(scenario, request.name, where, cached, values[request.since :])]

    def forget(self, host: bool = False) -> None:
        """Empties the prefix cache, and what a KV connector keeps on the host."""
        if not self.llm.reset_prefix_cache(reset_connector=host):
            raise RuntimeError("the prefix cache could not be reset: blocks are in use")

    def evict_later_half(self, name: str) -> None:
        """Evicts the later half of the blocks that a finished request had last."""
        for blocks in self.held[name]:
            self.pool.evict_blocks({block for block in blocks[len(blocks) // 2 :] if block})

    def blocks_of(self, request: Request) -> int:
        """The most blocks that a request holds at once."""
        free = least = self.pool.get_num_free_blocks()
        self._add(request)
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()
            least = min(least, self.pool.get_num_free_blocks())
        return free - least

    @contextlib.contextmanager
    def blocks_taken(self, count: int) -> Iterator[None]:
        """Takes blocks out of the pool, those first that would be evicted first."""
        taken = self.pool.get_new_blocks(count)
        try:
            yield
        finally:
            self.pool.free_blocks(taken)

    def blocks_left(self, count: int) -> contextlib.AbstractContextManager[None]:
        return self.blocks_taken(self.pool.get_num_free_blocks() - count)


def _picture(side: int) -> Any:
    """A picture that depends on its size alone."""
    import numpy as np
    from PIL import Image

    pixels = np.random.Philox(key=side).random_raw(-(-side * side * 3 // 8)).view(np.uint8)
    return Image.fromarray(pixels[: side * side * 3].reshape(side, side, 3))


def ask(engine: Engine, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The scenarios' answers, as they come; an error in one is kept with it."""
    for name in names:
        start = time.monotonic()
        rows: list[Row] = []
        error = None
        try:
            rows = scenarios.SCENARIOS[name](engine)
        except Exception as raised:
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}"
        yield {
            "scenario": name,
            "seconds": round(time.monotonic() - start, 2),
            "preemptions": engine.preemptions,
            "error": error,
            "rows": [dataclasses.asdict(row) for row in rows],
        }


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Runs a job: starts the engine, asks, plants the faults and asks again."""
    setup = SETUPS[job["setup"]]
    result: dict[str, Any] = {**job, "variant": setup.variant, "like": setup.like}
    result |= {"runs": [], "failed": None}
    start = time.monotonic()
    try:
        arms.ARMS[job["arm"]].prepare()
        engine = Engine(Path(job["checkpoint"]), setup)
    except Exception as error:
        if setup.loads:
            raise
        result["failed"] = f"{type(error).__name__}: {error}"
        return result
    result |= _about(engine, time.monotonic() - start)
    if job.get("speed"):
        from .speed import measured

        return result | {"speed": measured(engine)}
    for repeat in range(setup.repeats):
        for answer in ask(engine, setup.scenarios):
            result["runs"].append({"repeat": repeat, "fault": None, **answer})
    for fault in FAULTS if job.get("faults") else ():
        here = fault.variant == setup.variant and fault.scenario in setup.scenarios
        if not here or job["arm"] not in fault.arms:
            continue
        engine.forget()
        with fault.plant(engine):
            for answer in ask(engine, [fault.scenario]):
                result["runs"].append({"repeat": 0, "fault": fault.name, **answer})
        engine.forget()
    # After the faults everything is as before, or they were not undone.
    if job.get("faults"):
        for answer in ask(engine, setup.scenarios[:1]):
            result["runs"].append({"repeat": setup.repeats, "fault": None, **answer})
    result["all_seconds"] = round(time.monotonic() - start, 1)
    result["gpu_gib"] = _gpu_gib()
    return result


def _about(engine: Engine, seconds: float) -> dict[str, Any]:
    import torch
    import vllm

    layer = engine.language_model.model.layers[0].attn
    return {
        "up_seconds": round(seconds, 1),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "attention": type(layer).__name__,
        "blocks": engine.pool.num_gpu_blocks,
        "swa_page": layer.swa_cache_layer.block_size,
        "pages": _pages(engine),
    }


def _gpu_gib() -> float:
    """The most GPU memory that torch held in this process, in GiB."""
    import torch

    return round(torch.cuda.max_memory_reserved() / (1 << 30), 1)


def _pages(engine: Engine) -> dict[str, list[int]]:
    """Cache to its kernel page in states and its page stride in bytes."""
    found = {}
    for index in model.KV_SOURCES:
        attn = engine.language_model.model.layers[index].attn
        for kind, cache in (
            ("compressed", attn.kv_cache),
            ("indexer", attn.indexer.k_cache.kv_cache),
        ):
            found[f"layer {index} {kind}"] = [cache.shape[1], cache.stride(0)]
    return found


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    try:
        result = run(job)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    beside = out.with_suffix(".part")
    beside.write_text(json.dumps(result))
    os.replace(beside, out)
    print(f"{job['name']}: written", flush=True)
    # vLLM's threads and CUDA's teardown have nothing more to say.
    os._exit(0)


if __name__ == "__main__":
    main()
