# SPDX-License-Identifier: Apache-2.0
"""The planner's rule is opt-in: what other models get is stock's, value for value."""

import json
import re
from collections import Counter

import pytest

from fork import ROOT, fetch, geometry, pin, series
from fork.tree import WheelTree

# What the interface prints of its two new fields where nobody opted in.
NEW_FIELDS = ", kernel_page_tokens=None, kernel_page_stride=None"


def plans(tree, folder):
    result = folder / f"{tree.name}.json"
    done = geometry.child(["-m", "tests.v1.core.spec_sets", str(result)], [tree, ROOT], cwd=folder)
    assert result.is_file(), done.stderr[-3000:]
    return json.loads(result.read_text())


@pytest.mark.bases
@pytest.mark.parametrize("base", ["0.32.0", "0.33.0"])
def test_planned_as_by_stock(base, tmp_path):
    wheel = WheelTree(fetch.upstream_wheel(pin.load(), base))
    stock = plans(geometry.stock_tree(wheel), tmp_path)
    patched = plans(geometry.patched_tree(wheel, series.members(), pin.load()), tmp_path)
    models = {name.rpartition(",")[0] for name in stock}
    assert len(models) >= 12
    assert {n: p.replace(NEW_FIELDS, "") for n, p in patched.items()} == stock
    # Most are planned, not refused the same way; and the fields are where they belong.
    verdicts = Counter(bool(re.match(r"\w+Error: ", plan)) for plan in stock.values())
    assert verdicts[False] > 3 * verdicts[True]
    assert any(NEW_FIELDS in plan for plan in patched.values())
