# SPDX-License-Identifier: Apache-2.0
"""Compares what two engines answered, position by position.

Two runs of one build never answer bit for bit alike (kernels sum in an order that
varies, logits are bf16), so a difference means something only beside the differences of
a build with itself. Every position gives one absolute difference of log-probabilities;
their distribution is compared, not one number: a fault in paging may leave most
positions alone (then its tail is long) or shift all of them a little (then its median
moves). For each of the quantiles 50, 90 and 99 %::

    excess = quantile(one arm against stock) / max(quantile(stock against stock), FLOOR)

and the verdict is the largest. ``stock against stock`` pairs runs of two processes, so
that what differs from start to start counts as noise too.
"""

import dataclasses
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import arms, faults

QUANTILES = (0.5, 0.9, 0.99)

ABOVE = 10
"""A quantile counts where at least so many differences lie above it, in the noise and in what
is compared: what 99 % of a few hundred stay below is the accident of two or three."""

FLOOR = 2**-7
"""Half a step between bf16 logits in [2, 4), where this model's largest lie, in nats:
differences below it are rounding, even where stock repeats itself exactly."""

FOUND = 10.0
"""A planted fault has to reach this excess in the scenario made for it."""

STANDS_OUT = 3.0
"""And so many times the excess that its arm has there unbroken, beside the same noise: more than
1 where the arm runs another kernel."""

ROUNDING = "short"
"""Another kernel rounds otherwise everywhere, also where stock repeats itself exactly. What
rounding alone makes of answers is stock's noise here, from kernels whose order of summing varies:
no arm of another kernel is measured by less, in set-ups that ask it."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What one engine process answered (the file that :mod:`proof.engine` writes)."""

    arm: str
    setup: str
    record: dict[str, Any]

    def answers(self, scenario: str, fault: str | None = None) -> list[np.ndarray]:
        """One array of log-probabilities a run of the scenario."""
        return [
            np.concatenate([np.asarray(row["logprobs"]) for row in run["rows"]])
            for run in self.record["runs"]
            if run["scenario"] == scenario and run["fault"] == fault and not run["error"]
        ]

    def errors(self) -> list[str]:
        """What went wrong while asking."""
        return [
            f"{self.setup}, {self.arm}, {run['scenario']}"
            + (f", {run['fault']} planted" if run["fault"] else "")
            + f": {run['error']}"
            for run in self.record["runs"]
            if run["error"]
        ]

    def hits(self, scenario: str) -> tuple[int, ...]:
        """Prefix-cache hits in tokens, one a request."""
        for run in self.record["runs"]:
            if run["scenario"] == scenario and not run["fault"] and not run["error"]:
                return tuple(row["cached"] for row in run["rows"])
        return ()

    def scenarios(self) -> list[str]:
        """Those that were answered."""
        good = (
            run["scenario"] for run in self.record["runs"] if not (run["fault"] or run["error"])
        )
        return list(dict.fromkeys(good))

    def faults(self) -> list[tuple[str, str]]:
        """(fault, scenario), in the order in which they were planted."""
        runs = (run for run in self.record["runs"] if run["fault"] and not run["error"])
        pairs = [(run["fault"], run["scenario"]) for run in runs]
        return list(dict.fromkeys(pairs))


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the table: an arm, or a fault planted in one, against the reference.

    Attributes:
        compared: the arm or the fault.
        differences: |difference| in nats, at every position of every pair of runs.
        noise: quantiles of the reference against itself, in nats, of ``noise_size``
            differences.
        verdict: ``same``, ``differs``, ``found``, ``missed``, ``blind`` (missed, and known
            to be), or ``-`` for the noise itself.
        hits: prefix-cache hits in tokens, one a request; ``wanted`` the reference's.
        positions: positions of one run.
    """

    setup: str
    scenario: str
    compared: str
    differences: np.ndarray = dataclasses.field(repr=False)
    noise: tuple[float, ...]
    noise_size: int
    verdict: str
    hits: tuple[int, ...]
    wanted: tuple[int, ...]
    positions: int

    @property
    def quantiles(self) -> tuple[float, ...]:
        return quantiles(self.differences)

    @property
    def excess(self) -> float:
        """The largest ratio of a quantile to the noise's, of those that count."""
        size = min(len(self.differences), self.noise_size)
        return excess(self.quantiles, self.noise, size)

    def judged(self, same: float) -> "Line":
        """With the verdict of an arm: the same up to that excess."""
        word = "same" if self.excess <= same else "differs"
        return dataclasses.replace(self, verdict=word)

    def summary(self) -> dict[str, Any]:
        """What a program reads: everything but the differences themselves. An infinite
        figure is None."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del found["differences"]
        at = tuple(value if np.isfinite(value) else None for value in self.quantiles)
        above = self.excess if np.isfinite(self.excess) else None
        return {**found, "quantiles": at, "excess": above}


def load(folder: Path) -> list[Result]:
    """Every result below a folder.

    Raises:
        ValueError: a file is not a result; names it.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text())
            found.append(Result(record["arm"], record["setup"], record))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: not a result of proof.engine ({type(error).__name__}: {error}); "
                "delete it and run again"
            ) from None
    return found


def differences(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> np.ndarray:
    """|log-probability - log-probability| at every position, for every pair of runs;
    infinite where ``one`` has no number.

    Raises:
        ValueError: runs of different length, or no number in ``other``.
    """
    lengths = {len(run) for run in (*one, *other)}
    if len(lengths) != 1:
        raise ValueError(f"runs of {sorted(lengths)} positions cannot be compared")
    if not all(np.isfinite(run).all() for run in other):
        raise ValueError("a log-probability of the reference is not a finite number")
    found = np.concatenate([np.abs(a - b) for a in one for b in other])
    return np.where(np.isfinite(found), found, np.inf)


def quantiles(found: np.ndarray) -> tuple[float, ...]:
    # Not interpolated: between two infinite values that gives no number.
    return tuple(float(value) for value in np.quantile(found, QUANTILES, method="higher"))


def at_least(noise: Sequence[float], rounding: Sequence[float]) -> tuple[float, ...]:
    """Quantiles of noise, none below those of rounding."""
    return tuple(max(pair) for pair in zip(noise, rounding, strict=True))


def excess(found: Sequence[float], noise: Sequence[float], size: int) -> float:
    """The largest ratio of ``found`` to ``noise``, quantile by quantile.

    Args:
        size: differences behind the smaller of the two; the median always counts.
    """
    ratios = [f / max(n, FLOOR) for f, n in zip(found, noise, strict=True)]
    counted = [True, *(round(size * (1 - q), 6) >= ABOVE for q in QUANTILES[1:])]
    return max(ratio for ratio, counts in zip(ratios, counted, strict=True) if counts)


def table(results: Iterable[Result], reference: str = "stock") -> list[Line]:
    """Compares every arm with the reference arm, scenario by scenario.

    Args:
        results: of engine processes; the reference's second process is the arm
            ``<reference>-again``, and without one its runs are compared with each other.
        reference: the arm that the others are compared with.

    Raises:
        ValueError: two results do not have the same positions, or the reference answered
            too seldom to know its noise.
    """
    by_setup: dict[str, dict[str, Result]] = defaultdict(dict)
    for result in results:
        if result.record["runs"]:
            other = result.record["like"]
            name = f"{result.arm}, {result.setup}" if other else result.arm
            by_setup[other or result.setup][name] = result
    lines: list[Line] = []
    for found in by_setup.values():
        if reference in found:
            right, again = found.pop(reference), found.pop(f"{reference}-again", None)
            for scenario in right.scenarios():
                lines += _scenario(scenario, right, again, found)
    return lines


def _noise(scenario: str, right: Result, again: Result | None) -> np.ndarray:
    """Differences of the reference with itself, of two processes where there are two."""
    runs = right.answers(scenario)
    others = again.answers(scenario) if again else []
    pairs = [(a, b) for a in runs for b in others] or list(itertools.combinations(runs, 2))
    if not pairs:
        raise ValueError(
            f"{right.setup}/{scenario}: {right.arm} answered {len(runs)} time(s), noise needs "
            "two; delete its result and run again"
        )
    if not all(np.isfinite(run).all() for pair in pairs for run in pair):
        raise ValueError(f"{right.setup}/{scenario}: {right.arm} answered something not finite")
    return np.concatenate([differences([a], [b]) for a, b in pairs])


def _scenario(
    scenario: str, right: Result, again: Result | None, others: dict[str, Result]
) -> Iterator[Line]:
    runs = right.answers(scenario)
    pairs = _noise(scenario, right, again)
    noise, wanted = quantiles(pairs), right.hits(scenario)
    size, count = len(pairs), len(runs[0])

    def line(compared: str, found: np.ndarray, hits: tuple[int, ...]) -> Line:
        place = right.setup, scenario
        return Line(*place, compared, found, noise, size, "-", hits, wanted, count)

    yield line(f"{right.arm} itself", pairs, wanted)
    for name, arm in {right.arm: right, **others}.items():
        unbroken = 0.0
        if arm is not right and scenario in arm.scenarios():
            made = line(name, differences(arm.answers(scenario), runs), arm.hits(scenario))
            other_blocks = arms.OTHER_SPLIT if arm.record["like"] else 0.0
            unbroken = made.excess  # as a fault's: beside this scenario's own noise
            if arms.ARMS[arm.arm].other_kernel and ROUNDING in right.scenarios():
                rounding = quantiles(_noise(ROUNDING, right, again))
                made = dataclasses.replace(made, noise=at_least(noise, rounding))
            yield made.judged(max(arms.ARMS[arm.arm].same, other_blocks))
        for fault, place in arm.faults():
            if place == scenario:
                planted = fault if arm.arm == "fork" else f"{fault} ({arm.arm})"
                made = line(planted, differences(arm.answers(scenario, fault), runs), wanted)
                enough = max(FOUND, STANDS_OUT * unbroken)
                word = "found" if made.excess >= enough else "missed"
                if word == "missed" and faults.known_blind(fault):
                    word = "blind"
                yield dataclasses.replace(made, verdict=word)
