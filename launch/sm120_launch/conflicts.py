# SPDX-License-Identifier: Apache-2.0
"""Requests that cannot both hold, and what an operator should know of the others."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from sm120_launch.requests import Context, Extra, HfOverrides, Modality, Request, by_kind, kind_of

_LAYOUT = frozenset(
    {
        *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
        *("--distributed-executor-backend", "--nnodes", "-n", "--node-rank", "-r"),
        *("--master-addr", "--master-port", "--headless", "--device-ids"),
    }
)
_DATA_PARALLEL = frozenset(
    {
        *("--data-parallel-size", "-dp", "--data-parallel-size-local", "-dpl"),
        *("--data-parallel-rank", "-dpn", "--data-parallel-start-rank", "-dpr"),
        *("--data-parallel-address", "-dpa", "--data-parallel-rpc-port", "-dpp"),
        *("--data-parallel-backend", "-dpb", "--data-parallel-external-lb", "-dpe"),
        *("--data-parallel-hybrid-lb", "-dph"),
        *("--data-parallel-multi-port-external-lb", "-dpm"),
    }
)
_SERVER = ("--host", "--port")
_TLS = ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers",
        "--enable-ssl-refresh")  # fmt: skip
# Why no profile may say this in `extra`, whatever else it asks for. What an argument says
# is not repeated: it may be a secret.
_NEVER = {
    **dict.fromkeys(_LAYOUT, "the layout is the launcher's: use kind 'parallel'"),
    **dict.fromkeys(
        _DATA_PARALLEL, "the gate does not count data-parallel GPUs: use a profile a replica"
    ),
    **dict.fromkeys(_SERVER, "where the engine answers is asked there: use kind 'server'"),
    "--grpc": "a launch sees that the engine is up by HTTP: drop it",
    "--uds": "a launch sees that the engine is up by TCP: use kind 'server'",
    **dict.fromkeys(_TLS, "a launch sees that the engine is up by HTTP: end TLS before it"),
    "--model": "the model is the profile's: use key 'model'",
    "--config": "a file of arguments could contradict any request: name them here",
    "--api-key": "a secret in an argv is seen by all: pass_env VLLM_API_KEY",
    "--hf-token": "a secret in an argv is seen by all: pass_env HF_TOKEN",
}


def conflicts(requests: Sequence[Request], context: Context) -> list[str]:
    """Requests that cannot both hold, one line each: which, and what to do."""
    made = by_kind(requests)
    kinds = [kind_of(type(r)) for r in requests]
    out = [
        f"{kind} is asked for {kinds.count(kind)} times: make it one"
        for kind in made
        if kinds.count(kind) > 1
    ]
    modality, asked = made.get("modality"), made.get("hf_overrides")
    text_only = isinstance(modality, Modality) and modality.modality == "text-only"
    if text_only and "image_limit" in made:
        out.append("modality text-only and image_limit contradict each other: drop one of them")
    if isinstance(modality, Modality) and isinstance(asked, HfOverrides):
        for name, value in modality.overrides(context).items():
            if asked.values.get(name, value) != value:
                out.append(
                    f"modality text-only needs {name} {value} on this base, hf_overrides says "
                    f"{asked.values[name]}: drop one of them"
                )
        if not text_only and asked.values.get("vision_n_layers") == 0:
            out.append(
                "modality multimodal and hf_overrides vision_n_layers 0 contradict each other: "
                "drop one of them"
            )
    extra = made.get("extra")
    if isinstance(extra, Extra):
        out += _extra_conflicts(extra, made)
    return out


def _extra_conflicts(extra: Extra, made: Mapping[str, Request]) -> Iterator[str]:
    owner = {flag: kind for kind, request in made.items() for flag in type(request).flags}
    if "modality" in made:
        owner.setdefault("--hf-overrides", "modality")
    first = extra.arguments[0] if extra.arguments else "-"
    if not first.startswith("-"):
        yield f"extra begins with {first!r}, which vLLM would take for a second model: drop it"
    for argument in extra.arguments:
        if has_login(argument):
            yield (
                f"extra holds {flag_of(argument) or 'an argument'} with a URL that has a login: "
                "an argv is seen by all, so drop that part"
            )
        if argument == "--":
            yield "extra holds '--', after which vLLM reads no arguments: drop it"
        elif never := _meant(argument, _NEVER):
            yield f"extra holds {flag_of(argument)}: {_NEVER[never]}"
        elif owned := _meant(argument, owner):
            kind, flag = owner[owned], flag_of(argument)
            yield f"extra holds {flag}, which is request {kind}'s: ask for it there"


def _meant(argument: str, flags: Iterable[str]) -> str | None:
    """The one of ``flags`` that vLLM's parser may read ``argument`` as. It takes
    abbreviations, and values glued to one-letter options."""
    flag = flag_of(argument)
    for known in flags if flag else ():
        glued = len(known) == 2 and flag.startswith(known)
        if known.startswith(flag) or (glued and not flag.startswith("--")):
            return known
    return None


def has_login(text: str) -> bool:
    """Whether a URL in it has a user's name or password: ``http://user:secret@host``."""
    return re.search(r"://[^/?#\s]*@", text) is not None


def flag_of(argument: str) -> str:
    """An argument's name as vLLM reads it: dashes for underscores, no value, no field,
    the positive of ``--no-…``; "" for what is no option."""
    if not re.match(r"--?[A-Za-z]", argument):
        return ""
    flag = argument.split("=", 1)[0].split(".", 1)[0].replace("_", "-")
    return "--" + flag.removeprefix("--no-") if flag.startswith("--no-") else flag


def warnings(requests: Sequence[Request]) -> list[str]:
    """What an operator should know; none of it stops a launch."""
    asked = by_kind(requests).get("hf_overrides")
    if isinstance(asked, HfOverrides) and asked.values.get("vision_n_layers") == 0:
        return [
            "hf_overrides vision_n_layers 0 removes parameters (ffn.gate.bias_vl) that the "
            "checkpoint fills, so loading ends in a KeyError: use modality text-only instead"
        ]
    return []
