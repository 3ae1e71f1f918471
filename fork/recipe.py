# SPDX-License-Identifier: Apache-2.0
"""The recipe: what a patched vLLM is made of, and its digest, the runtime key.

Canonical form, version 1 (docs/recipe.md): a JSON object, keys sorted, no white
space, no ASCII escapes, UTF-8. The runtime key is its SHA-256 in hex.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

from packaging.version import Version

from fork.pin import Pin
from fork.tree import Tree

PATH = "vllm/sm120_recipe.json"
"""Where a patched tree carries its recipe."""

SCHEMA = 1


class Member(Protocol):
    """A patch of the fork, or a user's own diff."""

    @property
    def name(self) -> str: ...

    def digest(self, base: Version) -> str:
        """Of what it does to ``base``."""
        ...


def build(pin: Pin, members: Sequence[Member], base: str | None = None) -> dict[str, Any]:
    """The recipe of ``members`` on ``base``: base pins, then members in order."""
    version, base_pin = pin.of(base)
    return {
        "schema": SCHEMA,
        "release": pin.release,
        "base": {
            "version": version,
            "wheels": {name: w.sha256 for name, w in base_pin.wheels.items()},
            "flashinfer": base_pin.flashinfer,
            "torch": base_pin.torch,
            "transformers": base_pin.transformers,
            "deep_gemm": base_pin.deep_gemm,
        },
        "members": [
            {"name": member.name, "sha256": member.digest(Version(version))} for member in members
        ],
    }


def canonical(recipe: dict[str, Any]) -> bytes:
    """The recipe's canonical form."""
    text = json.dumps(recipe, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8")


def runtime_key(recipe: dict[str, Any]) -> str:
    """64 hex digits that change with any pin, member, content or order."""
    return hashlib.sha256(canonical(recipe)).hexdigest()


def document(recipe: dict[str, Any]) -> bytes:
    """The file that a patched tree carries: the recipe and its key, for people to read."""
    body = {"runtime_key": runtime_key(recipe), "recipe": recipe}
    return (json.dumps(body, indent=1, ensure_ascii=False) + "\n").encode("utf-8")


def carried_by(tree: Tree) -> dict[str, Any] | None:
    """The document in ``tree``, or None where there is none or it is damaged."""
    data = tree.read(PATH)
    if data is None:
        return None
    try:
        found = json.loads(data)
        if found["runtime_key"] == runtime_key(found["recipe"]):
            return found
    except (ValueError, TypeError, KeyError):
        pass
    return None


def members_of(tree: Tree) -> list[str]:
    """Names of the patches that the tree's recipe lists."""
    found = carried_by(tree)
    return [m["name"] for m in found["recipe"]["members"]] if found else []
