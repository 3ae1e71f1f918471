# SPDX-License-Identifier: Apache-2.0
"""What can be asked of the engine, as typed requests, and the one form they render to.

    [[requests]]
    kind = "kv_cache"
    dtype = "fp8"

renders ``--kv-cache-dtype fp8``. A kind is asked for once or not at all. Order in the
profile does not matter: kinds render in the order of ``KINDS``, fields in theirs, and
what belongs to one rank last. Dotted arguments are vLLM's own short form of JSON.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, model_validator

from sm120_launch.plan import Address, Strict

Scalar = bool | int | float | str | None
# Text that stands alone as an argument: argparse would take a dash for another option.
Word = Annotated[str, StringConstraints(pattern=r"^[^\s-]\S*$")]


@dataclass(frozen=True)
class Context:
    """What rendering depends on besides the request.

    Attributes:
        base: upstream release, for instance ``(0, 33)``.
        rank: number of the rank.
    """

    base: tuple[int, int]
    rank: int = 0


class Request(Strict):
    """One kind of request.

    Attributes:
        flags: the arguments that are its alone, once it is made.
    """

    flags: ClassVar[frozenset[str]] = frozenset()

    def render(self, context: Context) -> list[str]:
        """The arguments."""
        raise NotImplementedError

    def content(self) -> dict[str, Any]:
        """What was asked, for the profile key: no field that was not given."""
        return self.model_dump(mode="json", exclude_none=True, exclude={"kind"})

    @model_validator(mode="after")
    def _says_something(self):
        if not self.content():
            raise ValueError("this request asks for nothing: give a field, or leave it out")
        return self


class Modality(Request):
    """Text only, or with images.

    Text-only renders what leaves every parameter of the checkpoint in place: before 0.31
    the flag alone does not narrow the window (facts: 1152 wide instead of 128), and
    ``vision_n_layers 0`` removes parameters that the loader then looks for.
    """

    kind: Literal["modality"] = "modality"
    modality: Literal["text-only", "multimodal"]
    flags: ClassVar = frozenset({"--language-model-only", "--limit-mm-per-prompt"})

    def render(self, context: Context) -> list[str]:
        return ["--language-model-only"] if self.modality == "text-only" else []

    def overrides(self, context: Context) -> dict[str, Scalar]:
        """What it adds to the HF overrides."""
        narrow = self.modality == "text-only" and context.base < (0, 31)
        return {"vision_max_n_token": 0} if narrow else {}


class ImageLimit(Request):
    """Images per prompt."""

    kind: Literal["image_limit"] = "image_limit"
    images: int = Field(ge=0)
    flags: ClassVar = frozenset({"--limit-mm-per-prompt"})

    def render(self, context: Context) -> list[str]:
        return [*_dotted("--limit-mm-per-prompt", {"image": self.images})]


OverrideName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")
]


class HfOverrides(Request):
    """Fields of the checkpoint's config.json, by (dotted) name."""

    kind: Literal["hf_overrides"] = "hf_overrides"
    values: dict[OverrideName, Scalar] = Field(min_length=1)
    flags: ClassVar = frozenset({"--hf-overrides"})

    def content(self) -> dict[str, Any]:
        return {"values": dict(self.values)}  # a null that was given is asked for

    def render(self, context: Context) -> list[str]:
        return []  # with the modality's, by render()


class Engram(Request):
    """Where the Engram tables live (vLLM's EngramConfig)."""

    kind: Literal["engram"] = "engram"
    cpu_offload: bool | None = None
    embedding_across_dp: bool | None = None
    dp_shared_memory: bool | None = None
    use_thp: bool | None = None
    flags: ClassVar = frozenset({"--engram-config"})

    def render(self, context: Context) -> list[str]:
        return [*_dotted("--engram-config", self.content())]


class KvCache(Request):
    """The KV cache."""

    kind: Literal["kv_cache"] = "kv_cache"
    dtype: Word | None = None
    block_size: int | None = Field(default=None, gt=0)
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    memory_bytes: int | None = Field(default=None, gt=0)
    prefix_caching: bool | None = None
    flags: ClassVar = frozenset(
        {
            "--kv-cache-dtype",
            "--block-size",
            "--gpu-memory-utilization",
            "--kv-cache-memory-bytes",
            "--enable-prefix-caching",
        }
    )

    def render(self, context: Context) -> list[str]:
        return [
            *_option("--kv-cache-dtype", self.dtype),
            *_option("--block-size", self.block_size),
            *_option("--gpu-memory-utilization", self.gpu_memory_utilization),
            *_option("--kv-cache-memory-bytes", self.memory_bytes),
            *_switch("enable-prefix-caching", self.prefix_caching),
        ]


class Limits(Request):
    """How much is served at once."""

    kind: Literal["limits"] = "limits"
    max_model_len: int | None = Field(default=None, gt=0)
    max_num_seqs: int | None = Field(default=None, gt=0)
    max_num_batched_tokens: int | None = Field(default=None, gt=0)
    flags: ClassVar = frozenset({"--max-model-len", "--max-num-seqs", "--max-num-batched-tokens"})

    def render(self, context: Context) -> list[str]:
        return [
            *_option("--max-model-len", self.max_model_len),
            *_option("--max-num-seqs", self.max_num_seqs),
            *_option("--max-num-batched-tokens", self.max_num_batched_tokens),
        ]


class Speculative(Request):
    """Speculative decoding (vLLM's SpeculativeConfig), for instance method ``dspark``."""

    kind: Literal["speculative"] = "speculative"
    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = Field(default=None, gt=0)
    flags: ClassVar = frozenset({"--speculative-config", "-sc"})

    def render(self, context: Context) -> list[str]:
        return [*_dotted("--speculative-config", self.content())]


class Server(Request):
    """The API server, on the rank that has one."""

    kind: Literal["server"] = "server"
    host: Address | None = None
    port: int | None = Field(default=None, ge=1024, le=65535)
    served_model_name: Word | None = None
    flags: ClassVar = frozenset({"--host", "--port", "--served-model-name"})

    def render(self, context: Context) -> list[str]:
        return [
            *_option("--host", self.host),
            *_option("--port", self.port),
            *_option("--served-model-name", self.served_model_name),
        ]


class Parallel(Request):
    """The layout. With ``nnodes`` above 1, rank n is node n, and all but the first are
    headless; with executor ``ray`` there is one driver, and Ray places the workers."""

    kind: Literal["parallel"] = "parallel"
    tensor: int = Field(gt=0)
    pipeline: int | None = Field(default=None, gt=0)
    executor: Literal["mp", "ray"] | None = None
    nnodes: int | None = Field(default=None, gt=1)
    master_address: Word | None = None
    master_port: int | None = Field(default=None, ge=1024, le=65535)

    @model_validator(mode="after")
    def _whole(self):
        if self.nnodes is None and (self.master_address or self.master_port):
            raise ValueError("master_address and master_port go with nnodes: give it, or drop them")
        if self.nnodes is not None:
            if self.executor == "ray":
                raise ValueError("with executor ray, Ray places the workers: drop nnodes")
            if self.master_address is None:
                raise ValueError("nnodes needs master_address: rank 0's, as the others reach it")
            if self.gpus % self.nnodes:
                raise ValueError(f"{self.gpus} GPUs do not divide by nnodes {self.nnodes}")
        return self

    @property
    def gpus(self) -> int:
        """GPUs of the whole layout."""
        return self.tensor * (self.pipeline or 1)

    def render(self, context: Context) -> list[str]:
        out = [
            *_option("--tensor-parallel-size", self.tensor),
            *_option("--pipeline-parallel-size", self.pipeline),
            *_option("--distributed-executor-backend", self.executor),
        ]
        if self.nnodes is None:
            return out
        return [
            *out,
            *_option("--nnodes", self.nnodes),
            *_option("--node-rank", context.rank),
            *_option("--master-addr", self.master_address),
            *_option("--master-port", self.master_port),
            *(["--headless"] if context.rank else []),
        ]


class Extra(Request):
    """Arguments as they are, for what no kind covers; none may be a request's own."""

    kind: Literal["extra"] = "extra"
    arguments: tuple[str, ...] = Field(min_length=1)

    def render(self, context: Context) -> list[str]:
        return list(self.arguments)


KINDS: tuple[type[Request], ...] = (
    Modality,
    ImageLimit,
    HfOverrides,
    Engram,
    KvCache,
    Limits,
    Speculative,
    Server,
    Parallel,
    Extra,
)

AnyRequest = Annotated[
    Modality
    | ImageLimit
    | HfOverrides
    | Engram
    | KvCache
    | Limits
    | Speculative
    | Server
    | Parallel
    | Extra,
    Field(discriminator="kind"),
]


def render(requests: Sequence[Request], context: Context) -> list[str]:
    """The arguments of one rank, in their one form, after the model."""
    made = by_kind(requests)
    out: list[str] = []
    for kind in KINDS:
        request = made.get(kind_of(kind))
        if request is not None:
            out += request.render(context)
        if kind is HfOverrides:
            out += _dotted("--hf-overrides", overrides(requests, context))
    return out


def overrides(requests: Sequence[Request], context: Context) -> dict[str, Scalar]:
    """All HF overrides: the modality's and the requested, by name."""
    made = by_kind(requests)
    modality, asked = made.get("modality"), made.get("hf_overrides")
    found = modality.overrides(context) if isinstance(modality, Modality) else {}
    more = asked.values if isinstance(asked, HfOverrides) else {}
    return dict(sorted({**found, **more}.items()))


def by_kind(requests: Sequence[Request]) -> dict[str, Request]:
    """Kind to request."""
    return {kind_of(type(r)): r for r in requests}


def contents(requests: Sequence[Request]) -> dict[str, Any]:
    """Kind to what was asked: what the profile key is made of."""
    return {kind: request.content() for kind, request in by_kind(requests).items()}


def kind_of(cls: type[Request]) -> str:
    """The kind's name."""
    return cls.model_fields["kind"].default


def _option(flag: str, value: Scalar) -> list[str]:
    return [] if value is None else [flag, str(value)]


def _switch(name: str, value: bool | None) -> list[str]:
    return [] if value is None else [f"--{name}" if value else f"--no-{name}"]


def _dotted(flag: str, values: Mapping[str, Scalar]) -> list[str]:
    return [part for k, v in values.items() for part in (f"{flag}.{k}", _dotted_value(v))]


def _dotted_value(value: Scalar) -> str:
    """vLLM reads JSON, then numbers with a suffix (``1k``), then text: text that could be
    either of the first two goes as JSON."""
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z/_][A-Za-z0-9_./:@-]*", value)
    if plain and value not in ("true", "false", "null", "NaN", "Infinity"):
        return str(value)
    return json.dumps(value, ensure_ascii=False)
