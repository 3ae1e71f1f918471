# SPDX-License-Identifier: Apache-2.0
"""What an engine is asked: scenarios, each a few requests whose log-probabilities are kept.

Every position is teacher-forced: a prompt's own tokens, or a continuation that vLLM's
trace replay (or :mod:`proof.forcing`, under speculative decoding) imposes. So an early
difference cannot hide the rest, and position i of two runs is always the same question.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from . import model

CHUNK = 1024
"""max_num_batched_tokens of every engine: longer prompts are prefilled in chunks."""
ASKED = 2826
"""A few tokens more than 22 * 128: hits end at the same token for blocks of 64 and 128."""
_SPOKEN = 4000
"""Tokens are drawn below this: the last ones are the draft's noise and the like."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        name: unique in its scenario.
        prompt: token ids; an image position is ``model.IMAGE_TOKEN``.
        forced: the continuation; empty asks for the prompt's own log-probabilities,
            which switches prefix hits off (vLLM's rule).
        images: side lengths in pixels, one image a placeholder.
        since: answers at earlier positions are left out.
    """

    name: str
    prompt: tuple[int, ...]
    forced: tuple[int, ...] = ()
    images: tuple[int, ...] = ()
    since: int = 0


@dataclasses.dataclass
class Row:
    """What one request answered: log-probabilities, one a position.

    Attributes:
        where: ``prompt``, ``forced`` or ``draft`` (the draft model's own).
        cached: prefix-cache hits in tokens.
    """

    scenario: str
    request: str
    where: str
    cached: int
    logprobs: list[float]


def tokens(name: str, count: int) -> tuple[int, ...]:
    draw = random.Random(name)
    return tuple(draw.randrange(3, _SPOKEN) for _ in range(count))


def few(engine: Any) -> list[Row]:
    """Prompts of a few tokens, where every single one counts."""
    engine.forget()
    lengths = (1, 2, 3, 4, 5, 6, 7, 9)
    return engine.run(
        "few", [Request(f"{n}", tokens(f"few{n}", n), tokens(f"little{n}", 12)) for n in lengths]
    )


def short(engine: Any) -> list[Row]:
    """Prompts around the window (128) and page (32, 64) boundaries."""
    lengths = (5, 64, 127, 129, 300)
    return engine.run("short", [Request(f"{n}", tokens(f"short{n}", n)) for n in lengths])


def long(engine: Any) -> list[Row]:
    """Prompts of one to three chunks, together."""
    lengths = (700, 1500, 3000)
    return engine.run("long", [Request(f"{n}", tokens(f"long{n}", n)) for n in lengths])


def far(engine: Any) -> list[Row]:
    """Where indexer (512 states, so 1024 tokens of ratio 2) and candidates (1024) choose."""
    return engine.run("far", [Request("4000", tokens("far", 4000), since=1100)])


def decode(engine: Any) -> list[Row]:
    """One token a step, from prompts of several lengths, cold."""
    engine.forget()
    asked = [
        Request(f"{n}", tokens(f"decode{n}", n), tokens(f"said{n}", 64))
        for n in (40, 200, 600, 1700)
    ]
    return engine.run("decode", asked)


def warm(engine: Any) -> list[Row]:
    """A prompt asked again, with more at its end: answered from the prefix cache."""
    engine.forget()
    prompt = tokens("warm", ASKED)
    engine.run("cold", [Request("cold", prompt, tokens("first", 8))])
    again = Request("again", prompt + tokens("more", 60), tokens("second", 96))
    return engine.run("warm", [again])


def evicted(engine: Any) -> list[Row]:
    """The same after the later half of what it left in the cache was evicted."""
    engine.forget()
    prompt = tokens("evicted", ASKED)
    engine.run("cold", [Request("cold", prompt, tokens("first", 8))])
    engine.evict_later_half("cold")
    again = Request("again", prompt + tokens("more", 60), tokens("second", 96))
    return engine.run("evicted", [again])


def offloaded(engine: Any) -> list[Row]:
    """The same after the GPU's cache was emptied: vLLM's offloading connector brings the
    blocks back from the host."""
    engine.forget(host=True)
    prompt = tokens("offloaded", ASKED)
    engine.run("cold", [Request("cold", prompt, tokens("first", 8))])
    # Stores end in steps that come after the one that they are asked for in.
    for number in range(2):
        engine.run("wait", [Request("wait", tokens(f"wait{number}", 5), tokens("on", 16))])
    engine.forget()
    again = Request("again", prompt + tokens("more", 60), tokens("second", 96))
    rows = engine.run("offloaded", [again])
    if not any(row.cached for row in rows):
        raise RuntimeError("nothing came back from the host")
    return rows


def preempted(engine: Any) -> list[Row]:
    """More requests than a tiny pool can hold: some are preempted and start again."""
    engine.forget()
    asked = [
        Request(f"{i}", tokens(f"preempted{i}", 60), tokens(f"kept{i}", 110)) for i in range(6)
    ]
    most = engine.blocks_of(asked[0])
    engine.forget()
    with engine.blocks_left(3 * most):
        rows = engine.run("preempted", asked)
    if not engine.preemptions:
        raise RuntimeError(f"nothing was preempted: {3 * most} blocks, {most} for one request")
    return rows


def mixed(engine: Any) -> list[Row]:
    """Long prompts arrive, in chunks, while others decode."""
    engine.forget()
    running = [
        Request(f"{i}", tokens(f"running{i}", 30 + 17 * i), tokens(f"on{i}", 48)) for i in range(5)
    ]
    arriving = [
        Request(f"late{n}", tokens(f"late{n}", n), tokens(f"then{n}", 12)) for n in (1300, 2500)
    ]
    return engine.run("mixed", running, later=arriving, after_steps=8)


def drafted(engine: Any) -> list[Row]:
    """DSpark drafts five tokens a step; target and draft are both asked."""
    engine.forget()
    asked = [
        Request(f"{n}", tokens(f"drafted{n}", n), tokens(f"spoken{n}", 60)) for n in (40, 200, 600)
    ]
    return engine.run("drafted", asked)


def image(engine: Any) -> list[Row]:
    """Images in the prompt, then text; asked of the prompt and of a continuation."""
    engine.forget()
    before, after = tokens("before", 40), tokens("after", 90)
    one = (*before, model.IMAGE_TOKEN, *after)
    two = (*before, model.IMAGE_TOKEN, *before, model.IMAGE_TOKEN, *after)
    return engine.run(
        "image",
        [
            Request("one", one, images=(224,)),
            Request("two", two, images=(160, 400)),
            Request("said", one, tokens("seen", 24), images=(320,)),
        ],
    )


SCENARIOS: dict[str, Callable[[Any], list[Row]]] = {
    scenario.__name__: scenario
    for scenario in (
        few,
        short,
        long,
        far,
        decode,
        warm,
        evicted,
        offloaded,
        preempted,
        mixed,
        drafted,
        image,
    )
}
