# SPDX-License-Identifier: Apache-2.0
"""A user's TOML file, and refusals that name file, key and remedy."""

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sm120_launch.errors import LaunchError


def read_toml(path: Path) -> dict[str, Any]:
    """The file's content.

    Raises:
        LaunchError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}", "a TOML file", "Check the path.") from None
    except UnicodeDecodeError:
        raise LaunchError(f"{path}: not UTF-8", "a TOML file", "Check the path.") from None
    except tomllib.TOMLDecodeError as error:
        raise LaunchError(f"{path}: not TOML: {error}", "", "Mend that line.") from None
    except RecursionError:
        raise LaunchError(f"{path}: nested too deep", "a TOML file", "Mend it.") from None


def explain(path: Path, error: ValidationError, known: Iterable[str] = ()) -> LaunchError:
    """A validation error as one refusal, a line for each key.

    Args:
        known: keys that may be meant where an unknown one was found.
    """
    lines = [_line(e, list(known)) for e in error.errors(include_url=False)]
    more = f"\n  and {len(lines) - 8} more" if len(lines) > 8 else ""
    return LaunchError(f"{path}:\n  " + "\n  ".join(lines[:8]) + more)


def _line(error: Any, known: list[str]) -> str:
    key = ".".join(str(part) for part in error["loc"]) or "(the whole file)"
    last = str(error["loc"][-1]) if error["loc"] else ""
    match error["type"]:
        case "missing":
            return f"{key}: missing; add it"
        case "extra_forbidden":
            close = difflib.get_close_matches(last, known, 1)
            hint = f"did you mean {close[0]!r}? Else remove it" if close else "remove it"
            return f"{key}: no such key; {hint}"
        case "union_tag_not_found":
            return f"{key}: no 'kind'; needed: kind = one of {error['ctx'].get('discriminator')}"
        case "union_tag_invalid":
            context = error["ctx"]
            return f"{key}: kind {context['tag']!r}; needed: one of {context['expected_tags']}"
        case _:
            message = error["msg"].removeprefix("Value error, ")
            found = error["input"]
            shown = f" (found {found!r:.80})" if not isinstance(found, dict | list) else ""
            return f"{key}: {message}{shown}"
