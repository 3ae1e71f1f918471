# SPDX-License-Identifier: Apache-2.0
"""The fork's machinery: from the pinned upstream wheel to a patched vLLM.

pin.py      what UPSTREAM.toml says, checked against the wheel
fetch.py    a wheel by name, version and hash, through pip, into the user's cache
tree.py     an upstream tree: a wheel, an unpacked wheel, an installed environment
edits.py    the verbs: one structural edit of one file, found exactly once
patch.py    a patch: edits and new modules, and its verdict on a tree
foreign.py  a user's own unified diff, placed before the patches
series.py   the ordered patches: status, apply, revert, verify
recipe.py   what the fork is made of, as one digest (the runtime key)
record.py   RECORD, kept right under edits
transaction.py  many files written as one, or none
wheel.py    the patched wheel
git.py      git without the user's configuration
history.py  the delta as a git branch, a unified diff, a format-patch series
proposal.py the bug fix as a series for a person to submit upstream
geometry.py pages and states that vLLM itself plans, stock and patched
capacity.py what fits into a KV cache, by layout (kv_capacity.py inside a tree)
overview.py the fork in one picture
plots.py    geometry and capacity, drawn
probe.py    the self-test on unpatched and patched trees
index.py    what the package index has: releases, files, hashes, requirements
trial.py    arms: some members on one release, run in scratch copies
rebase.py   the series on another release: verdicts, and what still is needed
follow.py   moving the pin to a release that is clean
cli.py      python -m fork
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout: where UPSTREAM.toml, patches/ and vllm/ are."""


class ForkError(Exception):
    """A refusal a user can act on: what was found, what is needed, what to do."""
