# SPDX-License-Identifier: Apache-2.0
"""What the documentation says of the code, and its links."""

import re

import pytest

from fork import ROOT, overview, pin, series

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("*/*.md"))]


def test_the_picture_is_the_codes():
    picture = overview.mermaid(series.members(), pin.load().base)
    page = (ROOT / "docs/how-it-works.md").read_text()
    assert f"```mermaid\n{picture}\n```" in page, "python -m fork patches --diagram"


def _anchors(text: str) -> set[str]:
    """Of headings, as they are rendered: small letters, no punctuation, dashes for blanks."""
    heads = re.findall(r"(?m)^#+ (.+)$", text)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), target
        if anchor:
            assert anchor in _anchors(found.read_text()), target
