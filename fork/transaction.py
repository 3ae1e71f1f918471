# SPDX-License-Identifier: Apache-2.0
"""Many files written as one: all of them, or, after a kill at any point, none.

New contents and the old files are first laid down in a stage folder beside the
tree, then a journal is written, then each file is renamed into place, then the
stage is removed. A stage with a journal that is found later belongs to a run
that was killed: ``recover`` puts the old files back.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

STAGE = ".sm120-stage"


def write(root: Path, changes: Mapping[str, bytes | None]) -> None:
    """Writes ``changes`` (path under ``root`` to bytes, or None to remove).

    Files are replaced by rename, never written in place: an installer may have
    hard-linked them from its cache, which must stay as it is.
    """
    recover(root)
    stage = root / STAGE
    (stage / "new").mkdir(parents=True)
    (stage / "old").mkdir()
    entries = []
    for number, (path, data) in enumerate(sorted(changes.items())):
        target = root / path
        existed = target.is_file()
        if existed:
            shutil.copy2(target, stage / "old" / str(number))
        if data is not None:
            new = stage / "new" / str(number)
            new.write_bytes(data)
            if existed:
                shutil.copymode(target, new)
        folders = [str(x.relative_to(root)) for x in target.parents if not x.exists()]
        entries.append({"path": path, "existed": existed, "folders": folders})
    journal = stage / "journal.tmp"
    journal.write_text(json.dumps(entries))
    os.replace(journal, stage / "journal.json")

    for number, (path, data) in enumerate(sorted(changes.items())):
        target = root / path
        if data is None:
            target.unlink(missing_ok=True)
            _drop_bytecode(target)
            if target.parent.is_dir():
                _drop_empty_folders(root, target.parent)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(stage / "new" / str(number), target)
    _remove(stage)


def interrupted(root: Path) -> bool:
    """Whether a run on this tree was killed while it wrote."""
    return (root / STAGE).exists()


def recover(root: Path) -> bool:
    """Puts back what a killed run had begun to replace. True if there was one."""
    stage = root / STAGE
    if not stage.exists():
        return False
    journal = stage / "journal.json"
    if journal.is_file():
        for number, entry in enumerate(json.loads(journal.read_text())):
            target = root / entry["path"]
            old = stage / "old" / str(number)
            if entry["existed"]:
                if old.is_file():  # else a killed recovery already put it back
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(old, target)
            else:
                target.unlink(missing_ok=True)
                for folder in entry["folders"]:
                    if (root / folder).is_dir() and not any((root / folder).iterdir()):
                        (root / folder).rmdir()
    _remove(stage)
    return True


def _remove(stage: Path) -> None:
    # The journal goes first: a stage without one is rubbish, not a promise.
    (stage / "journal.json").unlink(missing_ok=True)
    shutil.rmtree(stage)


def _drop_bytecode(target: Path) -> None:
    for compiled in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
        compiled.unlink()


def _drop_empty_folders(root: Path, folder: Path) -> None:
    while folder != root:
        cache = folder / "__pycache__"
        if cache.is_dir() and not any(cache.iterdir()):
            cache.rmdir()
        if any(folder.iterdir()):
            return
        folder.rmdir()
        folder = folder.parent
