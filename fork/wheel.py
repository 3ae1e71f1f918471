# SPDX-License-Identifier: Apache-2.0
"""The patched wheel: the pinned upstream wheel, edited and packed again.

Native files are copied compressed as they are. What differs from upstream: the
edited modules, the fork's new ones, the recipe, the version (folder name, METADATA,
_version.py), the platform tag inside (upstream's says linux, its file name says
manylinux), a NOTICE, and RECORD.
"""

import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from packaging.version import Version

from fork import ForkError, fetch, foreign, pin, record, series, zipcopy
from fork.edits import SetValue, State, splice
from fork.source import parsed
from fork.tree import WheelTree

_VERSION_FILE = "vllm/_version.py"

_NOTICE = """\
vLLM for DeepSeek-V4.1 on SM12x
{version}, made from vLLM {base}

This is vLLM {base} as its project published it ({wheel},
sha256 {sha256}),
licensed under the Apache License, Version 2.0, and modified. As section 4(b) of the
License asks, the files that were changed or added:

Changed:
{changed}

Added:
{added}

The wheel's own metadata (METADATA, WHEEL, RECORD) says the fork's version and tag. The
changes are structural edits, each with its reason, in the fork's patches/ folder;
`vllm/sm120_recipe.json` lists them by digest. The fork is not affiliated with the vLLM
project; report faults of this build to the fork first.
"""


def build(
    the_pin: pin.Pin,
    members: Sequence[series.Member],
    folder: Path,
    base: str | None = None,
    platform: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Path:
    """Builds the patched wheel into ``folder`` and returns its path.

    Equal input gives equal bytes, on any machine. The file gets its name only when
    it is whole.

    Raises:
        ForkError: base or platform not served, the wheel cannot be had, the pin
            disagrees with it.
        series.Drift: a patch does not fit.
    """
    version, base_pin = the_pin.of(base)
    platform = platform or fetch.machine()
    source = fetch.upstream_wheel(the_pin, version, platform)
    tree = WheelTree(source)
    check_pin(tree, base_pin)
    new_version = the_pin.fork_version(version) + foreign.label(members)
    tag = source.name.removesuffix(".whl").split("-", 2)[2]

    edits = series.plan_apply(tree, members, the_pin)
    edits[_VERSION_FILE] = _version_file(tree, version, new_version)
    replaced = dict(edits)
    old_info, new_info = tree.dist_info, f"vllm-{new_version}.dist-info"
    for name in tree.names():
        if name.startswith(f"{old_info}/"):
            replaced[name] = None
            replaced[name.replace(old_info, new_info, 1)] = tree.read(name)
    replaced[f"{new_info}/METADATA"] = _metadata(tree, new_version)
    replaced[f"{new_info}/WHEEL"] = _wheel_file(tree, tag)
    notice = _notice(tree, source, base_pin.wheels[platform].sha256, new_version, edits)
    replaced[f"{new_info}/licenses/NOTICE"] = notice
    replaced[f"{new_info}/RECORD"] = _record(tree, replaced, new_info)

    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"vllm-{new_version}-{tag}.whl"
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".partial-", delete=False) as file:
        try:
            zipcopy.rewrite(source, file, replaced, _newest(source), progress)
            file.flush()
            os.chmod(file.name, 0o644)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise
    return target


def check_pin(tree: WheelTree, base_pin: pin.BasePin) -> None:
    """The pin's figures against the wheel's own.

    Raises:
        ForkError: they differ.
    """
    metadata = tree.read(f"{tree.dist_info}/METADATA") or b""
    pin.check_against_wheel(base_pin, metadata, tree.read(pin.DEEP_GEMM_INIT) or b"")


def metadata(the_pin: pin.Pin, base: str | None = None) -> bytes:
    """METADATA of the patched wheel, for a build front end that asks before it builds."""
    version, _ = the_pin.of(base)
    tree = WheelTree(fetch.upstream_wheel(the_pin, version))
    return _metadata(tree, the_pin.fork_version(version))


def _newest(source: Path) -> tuple[int, int, int, int, int, int]:
    """The newest date among the upstream wheel's members: ours get the same."""
    with zipfile.ZipFile(source) as old:
        return max(info.date_time for info in old.infolist())


def _version_file(tree: WheelTree, base: str, version: str) -> bytes:
    """_version.py with the fork's version: compile caches use it as a key."""
    data = tree.read(_VERSION_FILE) or b""
    release = Version(base).release
    old = ", ".join(str(part) for part in release)
    local = Version(version).local
    edits = [
        SetValue(_VERSION_FILE, "", target="__version__", old=f"'{base}'", new=f"'{version}'"),
        SetValue(
            _VERSION_FILE, "", target="__version_tuple__", old=f"({old})", new=f"({old}, '{local}')"
        ),
    ]
    source = parsed(data)
    found = [edit.find(source) for edit in edits]
    for edit, result in zip(edits, found, strict=True):
        if result.state is not State.PENDING:
            raise ForkError(f"{edit.describe()}: {result.why or result.state}")
    return splice(data, [part for result in found for part in result.splices])


def _metadata(tree: WheelTree, version: str) -> bytes:
    text = (tree.read(f"{tree.dist_info}/METADATA") or b"").decode("utf-8")
    text = _once(rf"^Version: {re.escape(tree.version)}$", f"Version: {version}", text)
    return _once(
        r"^License-File: LICENSE$", "License-File: LICENSE\nLicense-File: NOTICE", text
    ).encode()


def _wheel_file(tree: WheelTree, tag: str) -> bytes:
    text = (tree.read(f"{tree.dist_info}/WHEEL") or b"").decode("utf-8")
    return _once(r"^Tag: .*$", f"Tag: {tag}", text).encode()


def _once(pattern: str, new: str, text: str) -> str:
    text, count = re.subn(pattern, new, text, flags=re.MULTILINE)
    if count != 1:
        raise ForkError(f"the wheel's metadata has {count} lines like {pattern!r}, need one")
    return text


def _notice(tree: WheelTree, source: Path, sha256: str, version: str, edits) -> bytes:
    changed = sorted(p for p in edits if tree.read(p) is not None)
    added = sorted(p for p in edits if tree.read(p) is None)
    return _NOTICE.format(
        version=version,
        base=tree.version,
        wheel=source.name,
        sha256=sha256,
        changed="\n".join(f"  {p}" for p in changed),
        added="\n".join(f"  {p}" for p in added),
    ).encode()


def _record(tree: WheelTree, replaced: dict[str, bytes | None], new_info: str) -> bytes:
    listing = f"{new_info}/RECORD"
    text = (tree.read(f"{tree.dist_info}/RECORD") or b"").decode("utf-8")
    renamed = text.replace(f"{tree.dist_info}/", f"{new_info}/").encode()
    changes = {p: d for p, d in replaced.items() if d is not None and p != listing}
    return record.update(renamed, changes)


def check(path: Path, members: Sequence[series.Member], the_pin: pin.Pin) -> list[str]:
    """What is wrong with a built wheel; empty if nothing."""
    return series.verify(WheelTree(path), members, the_pin)
