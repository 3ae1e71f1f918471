# SPDX-License-Identifier: Apache-2.0
"""Runs one attention or indexer call on a device and compares it with the reference.

The self-test's device part; tests may run it on any device, with any kernel::

    case = random_case(AttentionShape(8, 16, 128, 64, 512, 64), device="cuda")
    result = run_attention(case, flashinfer_kernel())

``sm120_child_process.in_child`` does the same in a child process, for kernels that may
crash or hang.
"""

from dataclasses import dataclass, replace

import torch

from .sm120_device_cases import AttentionCase, IndexerCase
from .sm120_device_kernels import AttentionKernel, Bound, IndexerKernel
from .sm120_reference import (
    Segment,
    paged_index_logits,
    relative_norms,
    sparse_mla,
)

# The poison of an output before a call: NaNs of a payload that no arithmetic makes, so
# that "not written" and "written as NaN" can be told apart.
_POISON_BF16 = 0x7FA5
_POISON_FP32 = 0x7FA5A5A5
# Tokens looked at together: the reference's float64 output of 128 heads is 64 MiB then.
_TOGETHER = 128


@dataclass(frozen=True)
class CallResult:
    """What one call came to.

    Attributes:
        call: which kernel and which shape.
        ok: it ran, wrote everything, and agreed.
        error_norm: the worst row's relative norm; None where nothing was compared.
        bound: what it may be at most, and why; None where nothing was compared.
        reason: why not ``ok``; empty otherwise.
        first_s: seconds of the first call, which compiles; None where not timed.
        rest_s: seconds of everything else: inputs, reference, comparison, repeats.
        peak_bytes: GPU memory that was allocated at most; None where not measured.
    """

    call: str
    ok: bool
    error_norm: float | None = None
    bound: Bound | None = None
    reason: str = ""
    first_s: float | None = None
    rest_s: float | None = None
    peak_bytes: int | None = None


def run_attention(case: AttentionCase, kernel: AttentionKernel) -> CallResult:
    """Poisons the output, runs the kernel, checks every element.

    Peak memory beside the case: the output, and about 0.6 GiB.
    """
    call = f"{kernel.name}: attention, {case.shape}"
    tokens, heads, dim = case.q.shape
    # One row of poison before and after: a kernel that writes outside its output.
    rows = case.q.new_empty((tokens + 2, heads, dim))
    rows.view(torch.int16).fill_(_POISON_BF16)
    out = rows[1:-1]
    try:
        kernel(case.q, case.window, case.compressed, case.sinks, case.scale, out)
        _synchronize(case.q)
    except Exception as error:
        return failed(call, error)
    edges = rows[:: tokens + 1].view(torch.int16)
    if not (edges == _POISON_BF16).all():
        return failed(call, "wrote outside its output")
    bits = out.view(torch.int16)
    if reason := _unwritten(out, bits, _POISON_BF16):
        return failed(call, reason)
    norms = []
    for start in range(0, tokens, _TOGETHER):
        part = slice(start, start + _TOGETHER)
        want, _ = sparse_mla(
            case.q[part],
            _rows(case.window, part),
            case.compressed and _rows(case.compressed, part),
            case.sinks,
            case.scale,
        )
        norms.append(relative_norms(out[part], want))
    return _judged(call, kernel.bound, torch.cat(norms), ("token", "head"))


def run_indexer(
    case: IndexerCase, kernel: IndexerKernel, repeats: int = 1
) -> CallResult:
    """Runs the kernel, checks every logit of every context, page by page.

    ``repeats`` calls must agree to the bit: a race shows as a difference.

    The kernel allocates its own output, so poison is laid where PyTorch's allocator is
    likely to put it; where it hands out other memory, that one check is weaker.

    Peak memory beside the case: four times the logits in float64, and about 0.3 GiB.
    """
    shape = case.shape
    call = f"{kernel.name}: indexer, {shape}"
    tokens, pages = case.block_table.shape
    inputs = (case.q, case.cache, shape.page, case.block_table, case.context_lengths)
    _lay_poison(tokens, pages * shape.page, case.q.device)
    try:
        logits = kernel(*inputs, case.weights)
        _synchronize(case.q)
    except Exception as error:
        return failed(call, error)
    if (
        logits.dim() != 2
        or logits.shape[0] != tokens
        or logits.shape[1] < shape.context
    ):
        found = tuple(logits.shape)
        return failed(
            call, f"returned logits {found}, need [{tokens}, >= {shape.context}]"
        )
    want = paged_index_logits(*inputs, case.weights)
    outside = torch.isinf(want)
    logits = logits[:, : want.shape[1]]
    logits = torch.nn.functional.pad(logits, (0, want.shape[1] - logits.shape[1]))
    got = logits.masked_fill(outside, 0.0)
    bits = got.view(torch.int32) if got.dtype == torch.float32 else None
    if reason := _unwritten(got, bits, _POISON_FP32):
        return failed(call, reason)
    by_page = (tokens, pages, shape.page)
    norms = relative_norms(
        got.view(by_page), want.masked_fill(outside, 0.0).view(by_page)
    )
    result = _judged(call, kernel.bound, norms, ("row", "page"))
    for number in range(2, repeats + 1 if result.ok else 0):
        again = kernel(*inputs, case.weights)[:, : got.shape[1]]
        again = torch.nn.functional.pad(again, (0, got.shape[1] - again.shape[1]))
        differs = again.masked_fill(outside, 0.0).view(torch.uint8)
        differs = differs != got.contiguous().view(torch.uint8)
        if differs.any():
            reason = (
                f"call {number} of {repeats} on the same inputs differs from the first "
                f"in {int(differs.sum())} bytes, as after a race"
            )
            return replace(result, ok=False, reason=reason)
    return result


def failed(call: str, why: str | Exception) -> CallResult:
    """The result of a call that nothing could be compared of."""
    if isinstance(why, Exception):
        lines = str(why).strip().splitlines() or ["no message"]
        # Compilers print their input first.
        telling = next((line for line in lines if "error:" in line), lines[0])
        if telling.rstrip().endswith(":"):
            telling = " ".join(" ".join(lines).split())
        why = f"raised {type(why).__name__}: {telling.strip()[:500]}"
    return CallResult(call, False, reason=why)


def _rows(segment: Segment, part: slice) -> Segment:
    lengths = None if segment.lengths is None else segment.lengths[part]
    return Segment(segment.cache, segment.page, segment.indices[part], lengths)


def _unwritten(values: torch.Tensor, bits: torch.Tensor | None, poison: int) -> str:
    """What is wrong with elements that were not written, or are not finite; or ""."""
    counts, first = [0, 0], [None, None]
    for start in range(0, values.shape[0], _TOGETHER):
        part = slice(start, start + _TOGETHER)
        wrong = (
            None if bits is None else bits[part] == poison,
            ~torch.isfinite(values[part]),
        )
        for kind, found in enumerate(wrong):
            if found is None or not found.any():
                continue
            counts[kind] += int(found.sum())
            if first[kind] is None:
                row, *rest = found.nonzero()[0].tolist()
                first[kind] = [start + row, *rest]
    for kind, what in enumerate(("were not written", "are not finite")):
        if counts[kind]:
            return (
                f"{counts[kind]} of {values.numel()} elements {what}, the first at "
                f"{first[kind]}"
            )
    return ""


def _judged(
    call: str, bound: Bound, norms: torch.Tensor, names: tuple[str, str]
) -> CallResult:
    worst = float(norms.max()) if norms.numel() else 0.0
    if worst <= bound.value:
        return CallResult(call, True, worst, bound)
    at = divmod(int(norms.argmax()), norms.shape[1])
    reason = (
        f"relative norm {worst:.3g} at {names[0]} {at[0]}, {names[1]} {at[1]}, above "
        f"{bound.value:g}; {int((norms > bound.value).sum())} of {norms.numel()} wrong"
    )
    return CallResult(call, False, worst, bound, reason)


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _lay_poison(rows: int, columns: int, device: torch.device) -> None:
    """Leaves poison in freed memory of the size that the logits will have.

    Libraries round rows up before they allocate: 1 column, 256 and 1024 are tried.
    """
    for step in (1, 256, 1024):
        width = -(-columns // step) * step
        torch.full((rows, width), _POISON_FP32, dtype=torch.int32, device=device)
