# SPDX-License-Identifier: Apache-2.0
"""Answers of upstream's own engine on an H200, kept for machines that cannot start it.

One file a set-up in ``expected/``, made by ``python -m proof.report FOLDER --store`` from
a run there: one run's log-probabilities, the noise that repeats of it showed, and the
digests of the checkpoint that gave them.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from . import model
from .compare import ROUNDING, Line, Result, at_least, differences

FOLDER = Path(__file__).with_name("expected")
_DIGITS = 4
"""Decimals kept of a log-probability: a hundredth of the noise's median."""


def store(lines: list[Line], results: list[Result], digests: dict[str, str], folder: Path) -> None:
    """Writes the files from the arm ``stock`` of a complete proof."""
    folder.mkdir(exist_ok=True)
    own = (line for line in lines if line.verdict == "-")
    noise = {(line.setup, line.scenario): (line.noise, line.noise_size) for line in own}
    for result in results:
        if result.arm != "stock" or not result.scenarios():
            continue
        kept = {
            "setup": result.setup,
            "vllm": result.record["vllm"],
            "gpu": result.record["gpu"],
            "attention": result.record["attention"],
            "checkpoint": _digest(result.record["variant"], digests),
            "scenarios": {
                scenario: {
                    "noise": [round(value, 6) for value in noise[result.setup, scenario][0]],
                    "noise_size": noise[result.setup, scenario][1],
                    "hits": list(result.hits(scenario)),
                    "logprobs": np.round(result.answers(scenario)[0], _DIGITS).tolist(),
                }
                for scenario in result.scenarios()
            },
        }
        (folder / f"{result.setup}.json").write_text(json.dumps(kept) + "\n")


def against(results: list[Result], arm: str, digests: dict[str, str], most: float) -> list[Line]:
    """An arm's answers beside the stored ones; within ``most`` they count as the same.
    Attention was another kernel there: noise is never less than rounding's.

    A set-up of which no answers are stored is left out.

    Raises:
        ValueError: the checkpoint is another one, or a scenario is not stored.
    """
    found = []
    for result in results:
        path = FOLDER / f"{result.record['like'] or result.setup}.json"
        if result.arm != arm or not result.scenarios() or not path.exists():
            continue
        kept: dict[str, Any] = json.loads(path.read_text())
        if kept["checkpoint"] != _digest(result.record["variant"], digests):
            raise ValueError(
                f"{result.setup}: the checkpoint written here is not the one that the stored "
                "answers belong to; compare digests.txt and report it"
            )
        for scenario in result.scenarios():
            right = kept["scenarios"].get(scenario)
            if right is None:
                raise ValueError(f"no stored answers of {scenario} in {path}; store them again")
            wanted = np.asarray(right["logprobs"])
            noise = tuple(right["noise"])
            if rounding := kept["scenarios"].get(ROUNDING):
                noise = at_least(noise, rounding["noise"])
            line = Line(
                setup=result.setup,
                scenario=scenario,
                compared=f"{arm} and {kept['gpu']}",
                differences=differences(result.answers(scenario), [wanted]),
                noise=noise,
                noise_size=right["noise_size"],
                verdict="",
                hits=result.hits(scenario),
                wanted=tuple(right["hits"]),
                positions=len(wanted),
            )
            found.append(line.judged(most))
    return found


def _digest(variant: str, digests: dict[str, str]) -> dict[str, str]:
    shards = model.tensors(variant)
    if missing := [shard for shard in shards if shard not in digests]:
        raise ValueError(f"no digest of {', '.join(missing)}; python -m proof.run writes them")
    return {shard: digests[shard] for shard in shards}
