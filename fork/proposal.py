# SPDX-License-Identifier: Apache-2.0
"""The bug fix as a series for a person to submit upstream: ``fork export --upstream``.

    0001-Bugfix-….patch … 000N-Test-….patch   for `git am` on the release's own sources
    cover-letter.md                           the pull request's text, and what to do first

``PROPOSED`` and ``KEPT`` say what is proposed, and why the rest is not. A fix is one commit,
the tests are another. Neither author nor sign-off is the person's yet: both are a
statement that only the person can make.
"""

import re
import shutil
import subprocess
import tarfile
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fork import ROOT, ForkError, fetch, geometry, history, pin, series
from fork.patch import Patch
from fork.series import Changes
from fork.tree import FolderTree, Tree, WheelTree

PROPOSED = ("sm120_swa_page_block_size", "sm120_compressed_page_states")
"""The bug fix, and nothing that it does not need."""

KEPT = {
    "sm120_kv_layout": (
        "it gives the fix back its memory cost (3240 to 1800 B per token of context) by a "
        "general rule in the KV cache planner, a change to core files for every model: a "
        "proposal of its own, once the fix is in, after an RFC"
    ),
    "sm120_page_geometry_check": (
        "it guards this fork's own edits at start-up; upstream's tests do that for upstream"
    ),
    "sm120_decode_shape_selftest": (
        "a feature of its own, thousands of lines, which a bug fix must not carry along"
    ),
}
"""What is not proposed, and why."""

PROPOSED_TESTS = ("v1/attention/test_deepseek_v41_sm120_pages.py",)
"""Below tests/upstream/ here, below tests/ there, the same bytes."""

TESTS = ROOT / "tests" / "upstream"
"""Has the proposed tests, at the path that they get below upstream's ``tests/``."""

COVER = "cover-letter.md"

_READ_ON = "2026-11-30"

DUPLICATES = f"""\
Open proposals for the same geometry, as their public descriptions stood in copies read on
{_READ_ON}; look again before anything is sent:

- vllm-project/vllm#56509 (open since 2026-09-11, fixes #56461). Kernel pages of 64 tokens for
  ratio 1 and of 128 for ratio 2, so 64 states in each; sliding-window pages of 64 on SM120
  and SM121. The same geometry as this series.
- vllm-project/vllm#57292 (draft since 2026-09-17; #56461, #56702). Kernel pages of 64 tokens
  for both ratios, so 64 and 32 states; sliding-window pages of 64. It says of itself that
  DeepGEMM's SM120 FP8 path refuses pages of 32, that it overlaps #56509, and that the two
  should be consolidated.
- vllm-project/vllm#57028 (open since 2026-09-15) touches the same pages, among other fixes.

Upstream's rule is not to open another pull request where an open one addresses the same fix.
So offer this series, or its tests, in #56509; open a pull request only if that one is closed
or its author asks for it. What this series has besides: the spec's own block follows the
kernel page (one kernel page, one block), the sliding-window page is the attention class's
own, and both are tested without a GPU."""


@dataclass(frozen=True)
class Results:
    """What the proposed tests did, as pytest sums it up.

    Attributes:
        version: of vLLM.
        without: on the release as it is.
        fixed: with the series.
    """

    version: str
    without: str
    fixed: str


def tests() -> Changes:
    """The proposed tests: upstream's path to bytes."""
    return {f"tests/{name}": (TESTS / name).read_bytes() for name in PROPOSED_TESTS}


def sources(the_pin: pin.Pin, base: str | None = None) -> Tree:
    """The release as a person has it who develops on it: the source distribution,
    unpacked once into the cache; the wheel, which has no tests, where none is pinned."""
    archive = fetch.upstream_sdist(the_pin, base)
    if archive is None:
        return WheelTree(fetch.upstream_wheel(the_pin, base))

    def unpack(folder: Path) -> None:
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
        [top] = folder.iterdir()
        for path in top.iterdir():
            path.rename(folder / path.name)
        top.rmdir()

    name = archive.name.removesuffix(".tar.gz")
    return FolderTree(geometry.made_once(f"sdist-{name}-{archive.parent.name}", unpack))


def run_tests(the_pin: pin.Pin, chosen: Sequence[Patch], base: str | None = None) -> Results:
    """Runs the proposed tests on the release's own Python files, without and with the
    series, on this machine's CPU.

    Raises:
        ForkError: no pytest or no dependencies of vLLM here, a test fails with the series,
            or none fails without it.
    """
    geometry.need_dependencies()
    if find_spec("pytest") is None:
        raise ForkError("the tests need pytest: ./build.sh --tests, or give --no-tests")
    version, base_pin = the_pin.of(base)
    wheel = WheelTree(fetch.upstream_wheel(the_pin, version))
    overlay = geometry.flashinfer_overlay(base_pin)
    trees = (geometry.stock_tree(wheel), geometry.patched_tree(wheel, chosen, the_pin))
    (_, without), (code, fixed) = (run_on([tree, *overlay]) for tree in trees)
    if code or "passed" not in fixed:
        raise ForkError(f"the proposed tests do not pass with the series: {fixed}")
    if "failed" not in without:
        raise ForkError(
            f"the proposed tests do not fail on vLLM {version} as it is ({without}): either the "
            "fix has landed, or they test nothing. Nothing was written."
        )
    return Results(version, without, fixed)


def run_on(path: Sequence[Path]) -> tuple[int, str]:
    """Exit code and summary of the proposed tests, in a process of their own, away from
    every conftest and setting.

    Args:
        path: what comes before the installed packages, a vLLM for instance.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in PROPOSED_TESTS:
            shutil.copy(TESTS / name, folder)
        names = [Path(name).name for name in PROPOSED_TESTS]
        options = ["-q", "--noconftest", "-p", "no:cacheprovider", "--rootdir", folder]
        command = ["-m", "pytest", *options, *names]
        done: subprocess.CompletedProcess[str] = geometry.child(command, path, cwd=folder)
    found = re.search(r"^=*\s*(\d+ (?:passed|failed|error).*?) in ", done.stdout, re.MULTILINE)
    return done.returncode, found.group(1) if found else geometry.tail(done)


def commits(
    tree: Tree, chosen: Sequence[Patch], results: Results | None
) -> list[tuple[str, Changes]]:
    """Message and changes of each commit: the fixes in their order, then the tests.

    Raises:
        series.Drift: a patch does not fit the release.
        ForkError: a fix is there already, or upstream has a file where a test goes.
    """
    steps, standings = series.steps(tree, chosen)
    landed = [name for name, standing in standings.items() if standing.verdict != "pending"]
    if landed:
        raise ForkError(f"{', '.join(landed)}: not pending on {tree}, so there is nothing to send")
    found = [(_message(f"[Bugfix]{p.title}", _purpose(p), results), w) for p, w in steps]
    added = tests()
    if there := [path for path in added if tree.read(path) is not None]:
        raise ForkError(f"{tree} has {', '.join(there)} already: rename the fork's test")
    title = "[Test][Attention] DeepSeek-V4.1: page geometry on SM120"
    purpose = (
        "pins the pages that DeepGEMM's paged MQA logits and FlashInfer's sparse MLA take on "
        "SM120, and that other families keep theirs. No GPU is needed."
    )
    return [*found, (_message(title, [purpose], results), added)]


def export(
    the_pin: pin.Pin,
    folder: Path,
    base: str | None = None,
    test: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Writes the series and its cover letter into ``folder``; returns their paths.

    Args:
        test: run the proposed tests first, for the messages' test result.
        say: told what is under way.

    Raises:
        ForkError: see ``run_tests``, ``commits`` and ``history.export``. Nothing was
            written.
    """
    history.ready(folder)
    if (folder.expanduser() / COVER).exists():
        raise ForkError(f"{folder / COVER} is there already. Give another folder.")
    chosen = series.members(PROPOSED)
    say("unpacking upstream's sources")
    tree = sources(the_pin, base)
    if test:
        say("running the proposed tests, without and with the series")
    results = run_tests(the_pin, chosen, base) if test else None
    say("writing the series")
    files = history.format_patch(tree, commits(tree, chosen, results))
    cover = _cover(tree, chosen, results)
    return history.write(folder, {**files, COVER: cover.encode("utf-8")})


def _command() -> str:
    return " ".join(["pytest", *tests()])


def _purpose(patch: Patch) -> list[str]:
    return [patch.why, f"Related: {patch.upstream}"]


def _message(title: str, purpose: Sequence[str], results: Results | None) -> str:
    first, *more = purpose
    parts = [
        f"Purpose: {first}",
        *more,
        f"Test plan: {_command()}",
        f"Test result: {_said(results)}",
    ]
    return "\n\n".join([title, *(_filled(part) for part in parts)]) + "\n"


def _said(results: Results | None) -> str:
    if results is None:
        return "not run when this was exported."
    return (
        f"on vLLM {results.version}'s own files, CPU, no GPU: {results.without} without the "
        f"series, {results.fixed} with it. No SM12x kernel ran."
    )


def _filled(text: str) -> str:
    return textwrap.fill(
        " ".join(text.split()), width=72, break_long_words=False, break_on_hyphens=False
    )


def _cover(tree: Tree, chosen: Sequence[Patch], results: Results | None) -> str:
    fixes = "\n".join(f"- {p.title.partition('] ')[2]}" for p in chosen)
    kept = "\n".join(f"- `{name}`: {why}." for name, why in KEPT.items())
    return _COVER.format(
        version=tree.version,
        duplicates=DUPLICATES,
        fixes=fixes,
        command=_command(),
        result=_said(results),
        kept=kept,
    )


_COVER = """\
# For the person who submits this (not part of the pull request's text)

The series applies to vLLM {version}'s own sources. In a checkout of that release:

    git am --keep-non-patch --signoff DIR/*.patch

`--keep-non-patch` keeps `[Bugfix]` and the like in the titles. `--signoff` adds your
Signed-off-by, your word on upstream's DCO: the series has none, for nobody else can give it.
Make yourself the author, too, which the DCO check compares:

    git rebase HEAD~N --exec 'git commit --amend --no-edit --reset-author'

with N the number of patches, then rebase onto upstream's main. Before you send anything:

1. Read every line, run the tests, and run a model end to end on an SM12x GPU: the project
   that made this series had none.
2. Look for duplicates again (`gh pr list --search`), see below.
3. `pre-commit run --all-files`: it moves one import in `attention.py`, and adds blank lines to
   docstrings and a copyright line to the new module.
4. `sm120_compressed_pages.py` asks for a layout switch, VLLM_SM120_KV_LAYOUT, that this series
   does not bring: the default is what the series means, and the branch can go.
5. Say in the pull request which AI assistance was used, and mark the commits, as upstream's
   contributing guide asks.

# Pull request

## Overview

On SM120 and SM121, DeepSeek-V4.1's caches get pages that the kernels refuse, after the weights
were loaded. This gives every compressed page 64 states and the sliding window pages of 64
tokens there. Other platforms keep what they had.

### Duplicate work

{duplicates}

## Claims

{fixes}
- Classes of other families keep their values; tested for 90 and 100.

## Validation

Test plan: `{command}`

Test result: {result}

Pages as vLLM itself plans and allocates them, on a CPU (`python -m fork geometry` in the fork
vLLM for DeepSeek-V4.1 on SM12x, with VLLM_SM120_KV_LAYOUT=spec-blocks): stock has 128 states in
the ratio-1 pages, which DeepGEMM's paged MQA logits refuse on SM120; with the series every
compressed page has 64.

Not validated: no SM12x GPU was at hand. Model evaluation is the submitter's to add.

## Details

Four declarations have to agree, or vLLM finds no common block size: the two specs' block sizes
and the backends' kernel block sizes. The sliding-window page is a class attribute, so that a
platform's attention class can set it.

Tradeoff: on SM12x the KV cache takes 3240 B per token of context in place of 1800, as vLLM plans
it for tensor parallel 4 and fp8: the specs' blocks differ, and so fewer caches share a group.

Left out, on purpose:

{kept}
"""
