# SPDX-License-Identifier: Apache-2.0
"""From what follows ``vllm serve`` to vLLM's own configuration, with clear refusals.

The argv and the checkpoint's config.json are untrusted: whatever is wrong with them
ends in a Refusal at gate ``arguments`` or ``checkpoint``. Code of a checkpoint is not
executed unless the argv itself asks for it.
"""

import contextlib
import io
import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.models.deepseek_v41.nvidia.sm120_selftest_report import Refusal

_MODEL_TYPE = "deepseek_v41"

# A config.json is a few kB; more than this is not one.
_CONFIG_LIMIT = 8 << 20

# What the rules divide by and count with: name, smallest legal value.
_TEXT_FIELDS = {
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "head_dim": 1,
    "sliding_window": 1,
    "index_topk": 1,
    "index_n_heads": 1,
    "index_head_dim": 1,
    "o_groups": 1,
}


def set_up_platform(capability: tuple[int, int]) -> None:
    """Makes vLLM believe in a CUDA device of that capability.

    The order matters: the model is imported first, on whatever platform there is, and
    only then is a capability named.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    register_model()
    from vllm.platforms.interface import DeviceCapability

    platform.device_type = "cuda"
    # As CudaPlatform answers; without it every layer is planned with a full context.
    platform.support_hybrid_kv_cache = classmethod(lambda cls: True)
    # Metadata builders size buffers by it (here an RTX PRO 6000's); no rule does.
    platform.num_compute_units = classmethod(lambda cls, device_id=0: 188)
    platform.get_device_capability = classmethod(
        lambda cls, device_id=0: DeviceCapability(*capability)
    )


def register_model() -> None:
    """Imports the model and its draft here: else vLLM imports them again in other
    processes, to ask what they can do."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.models.deepseek_v41 import (
        DeepseekV41ForCausalLM,
        DSparkDeepseekV4ForCausalLM,
    )

    register = ModelRegistry.register_model
    register("DeepseekV41ForCausalLM", DeepseekV41ForCausalLM)
    register("DSparkV41DraftModel", DSparkDeepseekV4ForCausalLM)


def parse(argv: Sequence[str]) -> Namespace:
    """The argv through vLLM's own serve parser.

    Raises:
        Refusal: ``arguments``, with the parser's own message.
    """
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:  # before 0.33
        from vllm.entrypoints.launchers.cli_args import make_arg_parser

    if any(not isinstance(a, str) or "\0" in a for a in argv):
        raise Refusal("arguments", "an argument is not text, or holds a NUL byte")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            args = make_arg_parser(FlexibleArgumentParser()).parse_args(list(argv))
    except SystemExit:
        lines = [x for x in said.getvalue().splitlines() if "error:" in x]
        why = lines[-1].split("error:", 1)[1] if lines else "no model to serve is named"
        raise Refusal("arguments", f"vLLM's parser: {why}") from None
    except Exception as error:
        raise Refusal("arguments", f"vLLM's parser: {error}") from None
    args.model = args.model_tag or args.model
    return args


def check_checkpoint(model: str) -> dict[str, Any]:
    """The checkpoint's config.json, as far as the rules rely on it.

    Raises:
        Refusal: ``checkpoint``: no readable config.json, not DeepSeek-V4.1, or a field
            that is missing, of another type or inconsistent.
    """

    def refuse(why: str) -> Refusal:
        return Refusal("checkpoint", f"{model}: {why}")

    path = Path(model) / "config.json"
    try:
        if path.stat().st_size > _CONFIG_LIMIT:
            raise refuse(f"config.json has more than {_CONFIG_LIMIT >> 20} MiB")
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        kind = "no readable" if isinstance(error, OSError) else "not JSON in"
        raise refuse(
            f"{kind} config.json ({type(error).__name__}). Give the folder of a "
            "downloaded DeepSeek-V4.1 checkpoint"
        ) from None
    if not isinstance(config, dict) or config.get("model_type") != _MODEL_TYPE:
        found = config.get("model_type") if isinstance(config, dict) else None
        raise refuse(f"model_type is {str(found)[:40]!r}, need {_MODEL_TYPE!r}")
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise refuse("text_config is not an object")
    for name, least in _TEXT_FIELDS.items():
        value = text.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise refuse(f"{name} is {str(value)[:40]!r}, need a whole number")
        if not least <= value < 1 << 31:
            raise refuse(f"{name} is {str(value)[:40]}, need {least} or more")
    _check_layers(text, refuse)
    return config


def _check_layers(text: dict[str, Any], refuse: Any) -> None:
    layers = text["num_hidden_layers"]
    if layers > 4096:
        raise refuse(f"num_hidden_layers is {layers}: not a DeepSeek-V4.1")
    ratios = text.get("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < layers:
        raise refuse(f"compress_ratios has no entry for each of {layers} layers")
    if any(type(ratio) is not int or ratio not in (0, 1, 2) for ratio in ratios):
        raise refuse("compress_ratios holds another ratio than 0, 1 or 2")
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids = text.get(name)
        if not isinstance(ids, list) or any(type(i) is not int for i in ids):
            raise refuse(f"{name} is not a list of layer numbers")
        if any(not 0 <= i < layers or ratios[i] == 0 for i in ids):
            raise refuse(f"{name} names a layer that has no compressed cache")
    first = next((i for i, ratio in enumerate(ratios[:layers]) if ratio), layers)
    sources = text["kv_source_layer_ids"], text["index_source_layer_ids"]
    if first < layers and any(not ids or min(ids) > first for ids in sources):
        raise refuse(f"layer {first} is compressed and has no KV or index source")


def check_heads(args: Namespace, config: dict[str, Any]) -> None:
    """Query heads and output groups over the tensor-parallel ranks.

    Raises:
        Refusal: ``heads``.
    """
    text = config.get("text_config", config)
    ranks = int(args.tensor_parallel_size)
    for name, what in (
        ("num_attention_heads", "query heads"),
        ("o_groups", "o_groups"),
    ):
        if ranks < 1 or text[name] % ranks:
            legal = [n for n in range(1, text[name] + 1) if text[name] % n == 0]
            raise Refusal(
                "heads",
                f"{text[name]} {what} do not divide by --tensor-parallel-size {ranks}; "
                f"use one of {', '.join(map(str, legal))}",
            )


def engine_config(args: Namespace) -> Any:
    """vLLM's own VllmConfig.

    Raises:
        Refusal: ``arguments`` with vLLM's message, or ``checkpoint`` where it is about
            the checkpoint's own code.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    with without_start_up_check():
        try:
            return AsyncEngineArgs.from_cli_args(args).create_engine_config()
        except (Exception, SystemExit) as error:
            message = str(error)
            if "trust_remote_code" in message:
                raise Refusal(
                    "checkpoint",
                    "the checkpoint asks to run code of its own; it is not run. Add "
                    "--trust-remote-code to the argv if you do trust it",
                ) from None
            raise Refusal("arguments", f"vLLM: {_first_message(message)}") from None


def _first_message(text: str) -> str:
    """A validation error's message without pydantic's dump of the input."""
    if "Value error, " in text:
        text = text.split("Value error, ", 1)[1].split(" [type=", 1)[0]
    elif "Assertion failed, " in text:
        text = text.split("Assertion failed, ", 1)[1].split(" [type=", 1)[0]
    return text[:600]


@contextlib.contextmanager
def without_start_up_check():
    """The fork's own start-up check does not stop what happens inside: the self-test
    judges pages itself, and says more."""
    try:
        from vllm.v1.attention.backends.mla import sm120_page_geometry as check
    except ImportError:  # a tree without the fork's check
        yield
        return
    applies = check.applies_to
    check.applies_to = lambda _: False
    try:
        yield
    finally:
        check.applies_to = applies
