# SPDX-License-Identifier: Apache-2.0
"""Pins what ``rebase --write`` writes, and that it writes nothing where it refuses."""

import pytest

from fork import ROOT, ForkError, follow, pin

CHANGELOG = """# Changelog

## sm120.1

Bases 0.30.0, 0.31.0,
0.32.0, 0.33.0; built by default: 0.33.0.

- One thing.

## sm120.0

Bases 0.1; built by default: 0.1.
"""
PATCH = 'VARIANTS = (\n    Variant(">=0.30,<0.31", A),\n    Variant(">=0.31,<0.34", B),\n)\n'


@pytest.fixture
def root(tmp_path):
    """A checkout: this one's pin, a changelog of two releases, two patches."""
    (tmp_path / "patches").mkdir()
    (tmp_path / "UPSTREAM.toml").write_text((ROOT / "UPSTREAM.toml").read_text())
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "patches" / "one.py").write_text(PATCH)
    (tmp_path / "patches" / "two.py").write_text("MODULES = ()\n")
    return tmp_path


@pytest.fixture
def base():
    """A base that is not pinned yet."""
    given = pin.load().bases["0.33.0"]
    return given.model_copy(
        update={"flashinfer": "0.8.0", "wheels": {n: wheel(n) for n in pin.PLATFORMS}}
    )


def wheel(name):
    return pin.WheelPin(name=f"vllm-0.34.0-{name}.whl", sha256="0" * 64)


def row(name, variant=None, declared=True, needed=True, verdict="pending"):
    return {
        "name": name,
        "variant": variant,
        "declared": declared,
        "verdict": verdict,
        "without": {"needed": needed},
    }


def result(version="0.34.0", rows=None, problems=(), ran=True):
    rows = rows or [row("one", ">=0.31,<0.34", declared=False), row("two")]
    return {
        "version": version,
        "patches": rows,
        "problems": list(problems),
        "patched": {} if ran else None,
    }


def test_moves_the_pin_and_keeps_every_comment(root, base, snapshot):
    old = (root / "UPSTREAM.toml").read_text()
    written = follow.write(root, pin.load(), {"0.34.0": base}, [result()])
    assert written == ["CHANGELOG.md", "UPSTREAM.toml", "patches/one.py"]
    text = (root / "UPSTREAM.toml").read_text()
    new = pin.parse(text)
    assert new.base == "0.34.0" and new.bases == pin.load().bases | {"0.34.0": base}
    kept = text.replace('base = "0.34.0"', 'base = "0.33.0"')
    assert kept.startswith(old.rstrip())
    assert (root / "patches" / "one.py").read_text() == PATCH.replace("<0.34", "<0.35")
    changes = (root / "CHANGELOG.md").read_text()
    assert "Bases 0.30.0, 0.31.0, 0.32.0, 0.33.0, 0.34.0; built by default: 0.34.0.\n" in changes
    assert (
        "- One thing.\n- Base 0.34.0 (FlashInfer 0.8.0): every edit fits.\n\n## sm120.0" in changes
    )
    assert changes.endswith("\n\nBases 0.1; built by default: 0.1.\n")
    assert not [path for path in snapshot(root) if path.startswith(".")]


def test_twice_is_once(root, base):
    follow.write(root, pin.load(), {"0.34.0": base}, [result()])
    the_pin = pin.parse((root / "UPSTREAM.toml").read_text())
    rows = [row("one", ">=0.31,<0.35"), row("two")]
    assert follow.write(root, the_pin, {"0.34.0": base}, [result(rows=rows)]) == []


def test_says_what_is_not_needed_and_what_landed(root, base):
    rows = [row("one", verdict="upstream", needed=False), row("two", needed=False)]
    follow.write(root, pin.load(), {"0.34.0": base}, [result(rows=rows)])
    text = (root / "CHANGELOG.md").read_text()
    assert "Landed upstream: one." in text and "Not needed there, by rule: one, two." in text


def test_an_older_base_leaves_the_default(root, base):
    rows = [row("one"), row("two")]
    follow.write(root, pin.load(), {"0.30.1": base}, [result("0.30.1", rows)])
    assert pin.parse((root / "UPSTREAM.toml").read_text()).base == "0.33.0"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (result(problems=["one has drifted"]), "0.34.0: one has drifted"),
        (result(ran=False), "arms were left out"),
        (result(rows=[row("one", ">=0.32,<0.34", declared=False)]), "cannot be widened"),
    ],
)
def test_refuses_and_writes_nothing(root, base, snapshot, found, words):
    before = snapshot(root)
    with pytest.raises(ForkError, match=words):
        follow.write(root, pin.load(), {"0.34.0": base}, [found])
    assert snapshot(root) == before


@pytest.mark.parametrize("path", ["UPSTREAM.toml", "CHANGELOG.md"])
def test_a_file_of_another_form_is_left_to_a_person(root, base, snapshot, path):
    text = (root / path).read_text()
    (root / path).write_text(text.replace('base = "0.33.0"', "base='0.33.0'").replace("Bases", "X"))
    before = snapshot(root)
    with pytest.raises(ForkError, match=path):
        follow.write(root, pin.load(), {"0.34.0": base}, [result()])
    assert snapshot(root) == before
