# SPDX-License-Identifier: Apache-2.0
"""The drawings: they are made, whole or not at all, and matplotlib is optional."""

import sys

import pytest

from fork import ForkError, plots

PLACE = {"name": "model.layers.20.attn", "offset": 0, "stride": 46080, "alignment": 576}
PLAN = {
    "layout": "kernel-page-units",
    "block_stride": 230400,
    "bytes_per_token": 1800.0,
    "groups": [
        {"places": [PLACE | {"kind": "main", "page_bytes": 37376, "pages": 2}]},
        {"places": [PLACE | {"kind": "swa", "page_bytes": 37376, "pages": 1}]},
        {"places": [PLACE | {"kind": "ring", "page_bytes": 32768, "pages": 1}]},
    ],
}
GEOMETRY = {"base": "0.33.0", "trees": {"stock": {"error": "no"}, "patched": PLAN}}
LAYOUT = {"tokens": 97408, "requests": {"8192": 9}}
CAPACITY = {
    "base": "0.33.0",
    "memory_gib": 20.0,
    "layouts": {"stock": LAYOUT, "spec-blocks": {"error": "no"}, "kernel-page-units": LAYOUT},
}
DRAWINGS = [(plots.block, GEOMETRY), (plots.capacity, CAPACITY)]


@pytest.mark.parametrize(("draw", "result"), DRAWINGS)
class TestDrawn:
    @pytest.fixture(autouse=True)
    def matplotlib(self):
        pytest.importorskip("matplotlib", reason="the plot group is not installed")

    def test_svg(self, draw, result, tmp_path):
        draw(result, tmp_path / "p.svg")
        assert b"<svg" in (tmp_path / "p.svg").read_bytes()
        assert [p.name for p in tmp_path.iterdir()] == ["p.svg"]

    def test_an_unknown_format_leaves_nothing(self, draw, result, tmp_path):
        with pytest.raises(ForkError, match=r"p\.nonsense"):
            draw(result, tmp_path / "p.nonsense")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("draw", "result"), DRAWINGS)
def test_without_matplotlib(draw, result, tmp_path, monkeypatch):
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ForkError, match="--group plot"):
        draw(result, tmp_path / "p.svg")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("draw", "result"),
    [(plots.block, {"trees": {"stock": {"error": "no"}}}), (plots.capacity, {"layouts": {}})],
)
def test_nothing_to_draw(draw, result, tmp_path):
    with pytest.raises(ForkError, match="nothing to draw"):
        draw(result, tmp_path / "p.svg")
