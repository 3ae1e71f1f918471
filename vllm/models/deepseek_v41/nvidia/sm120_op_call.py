# SPDX-License-Identifier: Apache-2.0
"""One call of an op on the model's path, compared with a plain reference.

An *op* is a frozen dataclass that says which shape is called: what the inputs are, what
comes out right, how much memory that takes, and how vLLM calls the library::

    op = Prenorm(tokens=65, width=20480, outputs=24, splits=4)
    result = run_op(op, op.library(), device="cuda")

``OpCall`` is the same for ``sm120_child_process.in_child``, where a crash, a hang or a
missing library becomes a row.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from .sm120_device_calls import CallResult, failed
from .sm120_device_kernels import Bound
from .sm120_reference import relative_norms

Tensors = dict[str, torch.Tensor]

EXACT = Bound(0.0, "copied or selected, not computed")

# What a call may take on a GPU, its inputs and its reference included.
MEMORY_LIMIT = 2 << 30
# How often a call is repeated, to the bit: a race shows as a difference.
REPEATS = 20
FIRST_ENDED = "the first call has ended"
# How a result's reason begins where the library is not here, so that nothing ran.
CANNOT = "cannot be called"


class Unavailable(Exception):
    """The installed tree has no such entry point, or its library is not here."""


@dataclass(frozen=True)
class Expected:
    """One output as it should be.

    Attributes:
        value: what is right, float64 or, where ``bound`` is ``EXACT``, of any type.
        bound: of the relative norm of each row, a row being the last dimension.
        where: bool, broadcast against ``value``: the elements that are defined. None:
            all of them.
    """

    value: torch.Tensor
    bound: Bound
    where: torch.Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """Of one call's outputs: empty ``reason`` where they are right."""

    norm: float
    bound: Bound
    reason: str = ""


class Op:
    """Base of the ops. Subclasses are frozen dataclasses, picklable.

    Attributes:
        name: as ``--calls`` and rows have it.
        entry: the library's entry point, for rows and messages.
        repeats: calls on the same inputs, which must agree to the bit.
        tokens: query tokens of the call, for rows.
    """

    name: ClassVar[str]
    entry: ClassVar[str]
    repeats: ClassVar[int] = REPEATS
    tokens: int

    def gpu_bytes(self) -> int:
        """Peak GPU memory of inputs, outputs and reference together."""
        raise NotImplementedError

    def inputs(self, rng: torch.Generator) -> Tensors:
        """Random inputs on the generator's device."""
        raise NotImplementedError

    def library(self) -> "Kernel":
        """The library's kernel, called as vLLM calls it.

        Raises:
            Unavailable: it cannot be called here.
        """
        raise NotImplementedError

    def expected(self, given: Tensors, got: Tensors) -> Mapping[str, Expected]:
        """The outputs as they should be; ``got`` where one follows from another."""
        raise NotImplementedError

    def judge(self, given: Tensors, got: Tensors) -> Verdict:
        """Whether the outputs are right."""
        return compare(got, self.expected(given, got))

    def defined(self, given: Tensors, got: Tensors) -> Tensors:
        """The part of the outputs that must not change from repeat to repeat."""
        return got


# Takes the op's inputs, which it leaves as they are, and returns named outputs.
Kernel = Callable[[Tensors], Tensors]


def run_op(
    op: Op,
    kernel: Kernel,
    device: str = "cuda",
    seed: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> CallResult:
    """Makes random inputs, runs the kernel, compares, and repeats.

    Args:
        op: the call.
        kernel: what is called.
        device: torch device.
        seed: of the inputs.
        tell: is told ``FIRST_ENDED`` when the first call, which compiles, has ended.

    Returns:
        Its ``first_s`` is the first call's time and ``rest_s`` that of everything else.
    """
    call = f"{op.name}: {op}"
    began = time.monotonic()
    given = op.inputs(torch.Generator(device).manual_seed(seed))
    made = time.monotonic()
    try:
        got = kernel(given)
        _synchronize(device)
    except Unavailable as missing:
        return failed(call, f"{CANNOT}: {missing}")
    except Exception as error:
        return failed(call, error)
    first = time.monotonic()
    tell(FIRST_ENDED)
    try:
        verdict = op.judge(given, got)
        reason = verdict.reason
        if not reason and op.repeats > 1:
            reason = _repeated(op, kernel, given, got)
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return failed(call, f"its outputs cannot be compared, or a repeat raised {why}")
    end = time.monotonic()
    peak = None
    if torch.device(device).type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    return CallResult(
        call,
        not reason,
        verdict.norm,
        verdict.bound,
        reason,
        first_s=first - made,
        rest_s=end - first + made - began,
        peak_bytes=peak,
    )


def _repeated(op: Op, kernel: Kernel, given: Tensors, got: Tensors) -> str:
    """What differs from the first call in later ones; "" where nothing does."""
    first = {name: _bits(t) for name, t in op.defined(given, got).items()}
    for number in range(2, op.repeats + 1):
        again = op.defined(given, kernel(given))
        for name, bits in first.items():
            differs = _bits(again[name]) != bits
            if differs.any():
                return (
                    f"{name}: call {number} of {op.repeats} on the same inputs differs "
                    f"from the first in {int(differs.sum())} of {bits.numel()} bytes, "
                    f"as after a race"
                )
    return ""


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).clone()


def compare(got: Tensors, expected: Mapping[str, Expected]) -> Verdict:
    """The worst output: its norm, its bound and, if it is wrong, where and how much."""
    worst = Verdict(0.0, EXACT)
    for name, want in expected.items():
        verdict = _compare_one(name, got[name], want)
        if verdict.reason:
            return verdict
        if verdict.norm >= worst.norm and want.bound is not EXACT:
            worst = verdict
    return worst


def _compare_one(name: str, got: torch.Tensor, want: Expected) -> Verdict:
    bound = want.bound
    if got.shape != want.value.shape:
        shapes = f"{tuple(got.shape)}, need {tuple(want.value.shape)}"
        return Verdict(float("inf"), bound, f"{name} has the shape {shapes}")
    value = want.value
    if want.where is not None:
        where = want.where.expand(value.shape)
        # Not by masked_fill: what is undefined may be NaN.
        got = torch.where(where, got, torch.zeros_like(got))
        value = torch.where(where, value, torch.zeros_like(value))
    if bound is EXACT:
        wrong = got != value.to(got.dtype)
        count = int(wrong.sum())
        reason = ""
        if count:
            at = wrong.nonzero()[0].tolist()
            reason = f"{name}: {count} of {wrong.numel()} elements differ, first {at}"
        return Verdict(count / max(wrong.numel(), 1), bound, reason)
    bad = ~torch.isfinite(got)
    if bad.any():
        at = bad.nonzero()[0].tolist()
        reason = f"{name}: {int(bad.sum())} of {bad.numel()} not finite, first {at}"
        return Verdict(float("inf"), bound, reason)
    norms = relative_norms(got, value)
    norm = float(norms.max()) if norms.numel() else 0.0
    if norm <= bound.value:
        return Verdict(norm, bound)
    at = (norms == norms.max()).nonzero()[0].tolist()
    many = f"{int((norms > bound.value).sum())} of {norms.numel()} rows wrong"
    reason = f"{name}: relative norm {norm:.3g} in row {at}, above {bound.value:g}"
    return Verdict(norm, bound, f"{reason}; {many}")


@dataclass(frozen=True)
class OpCall:
    """One op to call in a child process. Everything in it is picklable.

    Attributes:
        op: the call.
        kernel: makes the kernel, in the child; None: the op's library. A function at a
            module's top level that takes the op.
        seed: of the inputs.
        device: torch device.
        name: how results name the call; empty: op and shape.
    """

    op: Op
    kernel: Callable[[Any], Kernel] | None = None
    seed: int = 0
    device: str = "cuda"
    name: str = ""

    def __str__(self) -> str:
        return self.name or f"{self.op.name}: {self.op}"

    def run(self, tell: Callable[[str], None]) -> CallResult:
        """Makes the call; what goes wrong is a result."""
        device = torch.device(self.device)
        if device.type == "cuda":
            if device.index is not None:  # set_device takes no plain "cuda"
                torch.cuda.set_device(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        make = self.kernel or type(self.op).library
        try:
            kernel = make(self.op)
        except (Unavailable, ImportError, AttributeError) as missing:
            # AttributeError: torch.ops has no such op in this build.
            return failed(str(self), f"{CANNOT}: {missing}")
        result = run_op(self.op, kernel, self.device, self.seed, tell)
        return replace(result, call=str(self))


def _synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
