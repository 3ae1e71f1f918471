# SPDX-License-Identifier: Apache-2.0
"""What some members of the series do on one upstream tree, in scratch copies of it.

An *arm* is the tree with some members applied. Each runs in a child process
(fork/rebase_runner.py): the self-test's cases, the geometry that this release itself plans,
and the compress ratios that it builds. Level of evidence: *planned* and *rule*.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fork import ROOT, ForkError, fetch, geometry, probe, rules, series
from fork.patch import Patch
from fork.pin import BasePin
from fork.tree import FolderTree, Tree, WheelTree

CAPABILITY = (12, 0)

# Ratios that vLLM 0.30 to 0.33 refuse by name. 4 and 128 are V4's; the others are likely.
UNKNOWN_RATIOS = (3, 4, 8, 16, 32, 64, 128)


class Trial:
    """Arms on one release.

    Args:
        tree: upstream, as it was given. It is never written.
        base_pin: the FlashInfer that it requires.
        argv: what is planned, and what every case starts with.
    """

    def __init__(self, tree: Tree, base_pin: BasePin, argv: Sequence[str], scratch: Path) -> None:
        self.tree, self.base_pin, self.argv = tree, base_pin, list(argv)
        self.cases = probe.modalities(str(tree.base))
        self._scratch = scratch
        self._stock = self._unpacked()
        self._indexer = self._indexer_rule()

    def arms(
        self, wanted: dict[str, Sequence[Patch]], say: Callable[[str], None]
    ) -> dict[str, dict[str, Any]]:
        """What this release does with each group of members, two at a time.

        Returns:
            For each name ``{"cases": {name: {"verdict", "gates", "line"}}, "plan": a plan or
            {"error"}, "ratios": those of UNKNOWN_RATIOS that it builds, asked only without
            members that edit}``; a part that died is ``{"error": message}``.
        """
        keys = {name: tuple(m.name for m in members) for name, members in wanted.items()}
        groups = {keys[name]: members for name, members in wanted.items()}
        say(f"vLLM {self.tree.version}: {len(groups)} arms")
        with ThreadPoolExecutor(max_workers=2) as pool:
            found = dict(zip(groups, pool.map(self._run, groups, groups.values()), strict=True))
        return {name: found[key] for name, key in keys.items()}

    def _run(self, key: tuple[str, ...], members: Sequence[Patch]) -> dict[str, Any]:
        folder = self._scratch / ("-".join(key) or "none")[:200]
        shutil.copytree(self._stock, folder, copy_function=os.link)
        try:
            steps, _ = series.steps(FolderTree(folder), members)
            FolderTree(folder).write({p: d for _, written in steps for p, d in written.items()})
            found = self._asked(folder, members)
        except (ForkError, ValueError) as error:  # one arm's death is a finding, not the end
            return {part: {"error": str(error)} for part in ("cases", "plan", "ratios")}
        finally:
            shutil.rmtree(folder)
        return {
            "cases": self._cases(found["reports"]),
            "plan": self._judged(found["plan"], found["rules"]),
            "ratios": found["ratios"],
        }

    def _asked(self, folder: Path, members: Sequence[Patch]) -> dict[str, Any]:
        options = ["--rules-only", "--capability", ".".join(map(str, CAPABILITY)), "--"]
        request = {
            "requests": [[*options, *self.argv, *more] for more in self.cases.values()],
            "argv": self.argv,
            "capability": CAPABILITY,
            # A patched tree refuses them for reasons of its own.
            "ratios": [] if any(m.variants for m in members) else UNKNOWN_RATIOS,
        }
        path = [folder, *geometry.flashinfer_overlay(self.base_pin), ROOT]
        return geometry.answer("fork.rebase_runner", request, path)

    def _cases(self, reports: Any) -> dict[str, Any]:
        if isinstance(reports, dict):
            return reports
        kept = ("verdict", "gates", "line")
        return {
            name: {key: report[key] for key in kept}
            for name, report in zip(self.cases, reports, strict=True)
        }

    def _judged(self, plan: dict[str, Any], taken: dict[str, Any]) -> dict[str, Any]:
        if "error" in plan or "error" in taken:
            return {"error": plan.get("error") or f"FlashInfer gave no rules: {taken['error']}"}
        page_rules = {kind: rules.PageRule.from_json(rule) for kind, rule in taken.items()}
        return geometry.judged(plan, page_rules | {"indexer": self._indexer})

    def _unpacked(self) -> Path:
        if isinstance(self.tree, WheelTree) and fetch.cache_dir() in self.tree.path.parents:
            return geometry.stock_tree(self.tree)  # kept there under the wheel's hash
        folder = self._scratch / "given"
        for path in self.tree.names():
            if geometry.SOURCES.fullmatch(path) and (data := self.tree.read(path)) is not None:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(data)
        return folder

    def _indexer_rule(self) -> rules.PageRule:
        try:
            return rules.deep_gemm(self.tree)
        except ForkError:  # a source checkout: nothing is built there
            return rules.PageRule("DeepGEMM", frozenset({64}), "assumed: none in this tree")


@contextmanager
def trial(tree: Tree, base_pin: BasePin, argv: Sequence[str]) -> Iterator[Trial]:
    """A Trial whose scratch copies are gone afterwards."""
    geometry.need_dependencies()
    trees = fetch.cache_dir() / "trees"  # beside the unpacked wheels: hard links need that
    trees.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".rebase-", dir=trees) as scratch:
        yield Trial(tree, base_pin, argv, Path(scratch))
