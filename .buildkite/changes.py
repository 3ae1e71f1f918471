# SPDX-License-Identifier: Apache-2.0
"""What changed between two results of `fork rebase --json`, as Markdown.

    python .buildkite/changes.py PREVIOUS.json CURRENT.json

Releases, patches and edits are told apart by their names and not by their place. Times and
folders do not count. A PREVIOUS that is not there is a first run. Exit 2: not such results.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("version", "name", "edit", "layer_kind")
"""What an object of a list is called by, the first that it has."""

IGNORED = ("seconds", "tree")
"""What differs from run to run."""

LINES = 200
"""More than this is another thing altogether: read the table."""


def named(items: list[Any]) -> dict[str, Any]:
    """A list as an object: by name where all have one and no two the same, else by place."""
    for name in NAMES:
        keys = [item.get(name) for item in items if isinstance(item, dict)]
        if len(keys) == len(items) and None not in keys and len(set(map(str, keys))) == len(keys):
            return dict(zip(map(str, keys), items, strict=True))
    return {str(place): item for place, item in enumerate(items)}


def changes(old: Any, new: Any, where: tuple[str, ...] = ()) -> Iterator[str]:
    """A line for each thing that came, went or is another."""
    if isinstance(old, list) and isinstance(new, list):
        if not any(isinstance(item, dict | list) for item in (*old, *new)):
            yield from _plain_lists(old, new, where)
            return
        old, new = named(old), named(new)
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            if key in IGNORED:
                continue
            place = (*where, key)
            if key not in new:
                yield f"- gone: {_at(place)}"
            elif key not in old:
                yield f"- new: {_at(place)}{_short(new[key])}"
            else:
                yield from changes(old[key], new[key], place)
    elif old != new:
        yield f"- {_at(where)}: {_value(old)} → {_value(new)}"


def _plain_lists(old: list[Any], new: list[Any], where: tuple[str, ...]) -> Iterator[str]:
    yield from (f"- gone: {_at(where)}: {_value(x)}" for x in old if x not in new)
    yield from (f"- new: {_at(where)}: {_value(x)}" for x in new if x not in old)


def _at(where: tuple[str, ...]) -> str:
    return " › ".join(where) or "the result"


def _short(value: Any) -> str:
    return "" if isinstance(value, dict | list) else f": {_value(value)}"


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:119]}…"


def report(old: Any | None, new: Any) -> str:
    """The Markdown: ``old`` None is a first run."""
    if old is None:
        return "First run: nothing to compare with.\n"
    found = list(changes(old, new))
    if not found:
        return "Nothing has changed since the last run.\n"
    more = [f"- and {len(found) - LINES} more"] if len(found) > LINES else []
    return "\n".join(["Changed since the last run:", "", *found[:LINES], *more, ""])


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        sys.exit(_fault(f"{path} is not JSON ({error}); remove it to begin anew"))


def _fault(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def main() -> int:
    """Prints the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("previous", type=Path, help="the last run's; need not be there")
    parser.add_argument("current", type=Path)
    given = parser.parse_args()
    if not given.current.is_file():
        return _fault(f"{given.current}: no such file")
    old = _read(given.previous) if given.previous.is_file() else None
    print(report(old, _read(given.current)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
