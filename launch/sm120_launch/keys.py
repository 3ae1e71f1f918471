# SPDX-License-Identifier: Apache-2.0
"""Digests that everyone must agree on: recipe, profile, argv, environment.

One canonical form for all: JSON with keys sorted, no white space, no ASCII escapes,
UTF-8; the digest is its SHA-256 in hex. Fork (docs/recipe.md) and self-test use the same.
"""

import hashlib
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120_launch.errors import LaunchError

RECIPE = "vllm/sm120_recipe.json"
"""Where a wheel of the fork carries its recipe."""

ENVIRONMENT = (
    "VLLM_SM120_",
    "VLLM_KV_CACHE_",
    "VLLM_USE_",
    "VLLM_ENABLE_",
    "VLLM_MXFP8_",
    "VLLM_MOE_",
    "VLLM_DEEP_GEMM_",
    "VLLM_BATCH_INVARIANT",
    "DG_",
    "FLASHINFER_",
)
"""Prefixes of the environment that changes what runs: the self-test's own list."""


def digest(value: Any) -> str:
    """SHA-256 of a value's canonical form, in hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def argv_sha256(argv: Sequence[str]) -> str:
    """Of what follows ``vllm serve``, as the self-test's report says it."""
    return digest(list(argv))


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that changes what runs."""
    return {k: v for k, v in given.items() if k.startswith(ENVIRONMENT)}


def env_sha256(given: Mapping[str, str]) -> str:
    """Of that part, as the self-test's report says it."""
    return digest(environment(given))


def profile_key(model: str, requests: Mapping[str, Any]) -> str:
    """Of what is asked of the engine: the model and the requests that were made.

    A kind of request that was not made, and a field that was not given, are not in it:
    a new kind or field changes no key that exists.

    Args:
        requests: kind to what was given.
    """
    return digest({"schema": 1, "model": model, "requests": dict(requests)})


@dataclass(frozen=True)
class Recipe:
    """What a build of the fork is made of.

    Attributes:
        runtime_key: the digest of the recipe.
        base: the upstream release.
        members: names, in order; a user's own (foreign) members first.
    """

    runtime_key: str
    base: str
    members: tuple[str, ...]


def load_recipe(path: Path) -> Recipe:
    """Reads a recipe: ``sm120_recipe.json``, what ``python -m fork recipe --json``
    prints, or a wheel that carries one.

    Raises:
        LaunchError: no such file, no recipe in it, or its key is not its digest.
    """
    remedy = "Give a wheel of the fork, or what `python -m fork recipe --json` prints."
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as wheel:
                data = wheel.read(RECIPE)
        else:
            data = path.read_bytes()
        found = json.loads(data)
        recipe, key = found["recipe"], found["runtime_key"]
        schema, base = recipe["schema"], recipe["base"]["version"]
        members = tuple(member["name"] for member in recipe["members"])
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}", "a recipe", remedy) from None
    except (KeyError, TypeError, ValueError, zipfile.BadZipFile):
        raise LaunchError(f"{path}: no recipe in it", "a recipe", remedy) from None
    if schema != 1 or not re.fullmatch(r"\d+(\.\d+)+", str(base)):
        raise LaunchError(
            f"{path}: a recipe of schema {schema!r} on base {base!r}",
            "schema 1 on a released base",
            "Update sm120-launch, or make the recipe again.",
        )
    if digest(recipe) != key:
        raise LaunchError(
            f"{path}: it says runtime key {str(key)[:16]}, its content has {digest(recipe)[:16]}",
            "the two to be equal",
            "The file was edited or damaged: make it again.",
        )
    return Recipe(key, base, members)
