# SPDX-License-Identifier: Apache-2.0
"""Moving the pin to releases that the series was replayed on: ``rebase --write``.

UPSTREAM.toml gets the new bases with the index's hashes, CHANGELOG.md a line each, and the
variants that were tried get the wider range of bases. All of it is written, or nothing.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fork import ForkError, index, pin, transaction

_DEFAULT = re.compile(r'^base = "[^"]+"$', re.MULTILINE)
_BASES = re.compile(r"^Bases [^;]+; built by default: \S+\.$", re.MULTILINE)


def write(
    root: Path, the_pin: pin.Pin, found: Mapping[str, pin.BasePin], results: Sequence[dict]
) -> list[str]:
    """Writes what following ``found`` takes. Returns the paths written.

    Args:
        root: the checkout.
        found: the releases replayed, by version.
        results: their ``rebase.replay``.

    Raises:
        ForkError: a release is not clean, or a file is not in the form that this edits.
            Nothing was written.
    """
    unclean = [f"{r['version']}: {line}" for r in results for line in r["problems"]]
    if unclean:
        raise ForkError("nothing was written. Mend these first:\n  " + "\n  ".join(unclean))
    if any(result["patched"] is None for result in results):
        raise ForkError("nothing was written: the arms were left out, so nothing was shown")
    changes = {
        "UPSTREAM.toml": _pin(_read(root, "UPSTREAM.toml"), the_pin, found),
        "CHANGELOG.md": _changelog(_read(root, "CHANGELOG.md"), the_pin, found, results),
    }
    changes |= _ranges(root, results)
    changes = {path: text for path, text in changes.items() if text != _read(root, path)}
    transaction.write(root, {path: text.encode() for path, text in changes.items()})
    return sorted(changes)


def _read(root: Path, path: str) -> str:
    return (root / path).read_text(encoding="utf-8")


def _newest(the_pin: pin.Pin, found: Mapping[str, pin.BasePin]) -> str:
    return max(the_pin.base, *found, key=Version)


def _pin(text: str, the_pin: pin.Pin, found: Mapping[str, pin.BasePin]) -> str:
    """UPSTREAM.toml with new tables at its end: every comment stays where it is."""
    newest, wanted = _newest(the_pin, found), the_pin
    for version, base in found.items():
        if version not in the_pin.bases:
            text = f"{text.rstrip()}\n\n{_table(version, base)}"
            wanted = index.with_base(wanted, version, base)
    text, count = _DEFAULT.subn(f'base = "{newest}"', text)
    written = pin.parse(text)
    if count != 1 or written != wanted.model_copy(update={"base": newest}):
        raise ForkError("UPSTREAM.toml is not in the form that this edits: write the base by hand")
    return text


def _table(version: str, base: pin.BasePin) -> str:
    lines = [f'[bases."{version}"]']
    for name in ("flashinfer", "torch", "transformers", "deep_gemm"):
        lines.append(f'{name} = "{getattr(base, name)}"')
    files = {f"wheels.{name}": wheel for name, wheel in base.wheels.items()}
    for name, wheel in (files | {"flashinfer_wheel": base.flashinfer_wheel}).items():
        lines.append(f'{name} = {{ name = "{wheel.name}", sha256 = "{wheel.sha256}" }}')
    return "\n".join(lines) + "\n"


def _changelog(
    text: str, the_pin: pin.Pin, found: Mapping[str, pin.BasePin], results: Sequence[dict]
) -> str:
    """The newest section names the bases, and has a line for each new one."""
    new = [version for version in found if version not in the_pin.bases]
    bases = ", ".join([*the_pin.bases, *new])
    head, count = _BASES.subn(
        f"Bases {bases}; built by default: {_newest(the_pin, found)}.", text, count=1
    )
    if not count:
        raise ForkError("CHANGELOG.md has no line 'Bases …; built by default: ….': add it")
    by_version = {result["version"]: result for result in results}
    lines = [_entry(by_version[version], found[version]) for version in new]
    second = re.search(r"\n+(?=## )", head[head.index("\n## ") + 1 :])
    end = head.index("\n## ") + 1 + second.start() if second else len(head.rstrip())
    return head[:end].rstrip() + "\n" + "".join(lines) + head[end:].removeprefix("\n")


def _entry(result: dict[str, Any], base: pin.BasePin) -> str:
    needless = [
        row["name"] for row in result["patches"] if row["without"] and not row["without"]["needed"]
    ]
    landed = [row["name"] for row in result["patches"] if row["verdict"] == "upstream"]
    entry = f"- Base {result['version']} (FlashInfer {base.flashinfer}): every edit fits.\n"
    if landed:
        entry += f"  Landed upstream: {', '.join(landed)}.\n"
    if needless:
        entry += f"  Not needed there, by rule: {', '.join(needless)}.\n"
    return entry


def _ranges(root: Path, results: Sequence[dict]) -> dict[str, str]:
    """The patches whose variant was tried on a base that it does not declare yet."""
    wider: dict[tuple[str, str], Version] = {}
    for result in results:
        base = Version(Version(result["version"]).public)
        for row in result["patches"]:
            if not row["declared"] and row["variant"]:
                key = (row["name"], row["variant"])
                wider[key] = max(base, wider.get(key, base))
    changed = {}
    for (name, bases), newest in wider.items():
        path = f"patches/{name}.py"
        text = _read(root, path)
        new = re.sub(r"<[\d.]+", f"<{newest.major}.{newest.minor + 1}", bases)
        if text.count(f'"{bases}"') != 1 or not SpecifierSet(new).contains(newest, True):
            raise ForkError(f"{path}: the range {bases!r} cannot be widened to {newest}")
        changed[path] = text.replace(f'"{bases}"', f'"{new}"')
    return changed
