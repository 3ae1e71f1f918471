# SPDX-License-Identifier: Apache-2.0
"""The self-test on both sides of the patches: ``python -m fork probe``.

Arms: {unpatched, patched} x {multimodal, text-only as first launched, text-only safe}.
The unpatched arm is upstream plus the self-test member alone. Each tree runs in a child
process of its own, with the FlashInfer that its base pins; argvs on one tree share it.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from packaging.version import Version

from fork import ROOT, fetch, geometry, pin, series
from fork.patch import Patch
from fork.tree import WheelTree

SELFTEST = "sm120_decode_shape_selftest"


def modalities(base: str) -> dict[str, list[str]]:
    """What each arm adds to the argv. The safe text-only form keeps every parameter that
    the checkpoint fills; from 0.31 on the flag alone is safe."""
    text = ["--language-model-only"]
    safe = list(text)
    if Version(base) < Version("0.31"):
        safe += ["--hf-overrides.vision_max_n_token", "0"]
    return {
        "multimodal": [],
        "text-only": [*text, "--hf-overrides.vision_n_layers", "0"],
        "text-only safe": safe,
    }


def reports(
    the_pin: pin.Pin,
    base: str,
    members: Sequence[Patch],
    requests: Sequence[Sequence[str]],
) -> list[dict[str, Any]]:
    """The self-test's reports on ``base`` with ``members`` applied.

    Args:
        requests: each the self-test's own command line: options, ``--``, argv.

    Raises:
        ForkError: the process died, or this environment lacks vLLM's dependencies.
    """
    geometry.need_dependencies()
    version, base_pin = the_pin.of(base)
    wheel = WheelTree(fetch.upstream_wheel(the_pin, version))
    tree = geometry.patched_tree(wheel, members, the_pin)
    path = [tree, *geometry.flashinfer_overlay(base_pin), ROOT]
    return geometry.answer("fork.selftest_runner", [list(r) for r in requests], path)


def run(
    the_pin: pin.Pin,
    bases: Sequence[str],
    argv: Sequence[str],
    options: Sequence[str],
    members: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Every arm of every base: ``{"base", "tree", "modality", "report"}`` each.

    Args:
        argv: what follows ``vllm serve``, without the arms' own arguments.
        options: the self-test's own, without ``--json``.
        members: of the patched arm; the whole series if None.
    """
    patched = series.members(None if members is None else {*members, SELFTEST})
    trees = {"unpatched": series.members([SELFTEST]), "patched": patched}
    rows = []
    with ThreadPoolExecutor(max_workers=2) as pool:
        waiting = []
        for base in bases:
            arms = modalities(base)
            requests = [[*options, "--", *argv, *more] for more in arms.values()]
            for tree, chosen in trees.items():
                found = pool.submit(reports, the_pin, base, chosen, requests)
                waiting.append((base, tree, list(arms), found))
        for base, tree, arms, found in waiting:
            for modality, report in zip(arms, found.result(), strict=True):
                rows.append({"base": base, "tree": tree, "modality": modality, "report": report})
    return rows
