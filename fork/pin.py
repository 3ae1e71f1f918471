# SPDX-License-Identifier: Apache-2.0
"""The pin: UPSTREAM.toml as typed data, and its check against the wheel itself."""

import re
import tomllib
from email import message_from_bytes
from functools import cache
from pathlib import Path
from typing import Annotated

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from fork import ROOT, ForkError

PLATFORMS = ("x86_64", "aarch64")
"""Machine names as in wheel file names; upstream publishes CUDA wheels for both."""

DEEP_GEMM_INIT = "vllm/third_party/deep_gemm/__init__.py"
"""The wheel member whose ``__version__`` names the vendored DeepGEMM."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WheelPin(_Strict):
    """One file of the package index."""

    name: str
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class BasePin(_Strict):
    """One upstream release that the fork serves, and what it requires."""

    flashinfer: str
    torch: str
    transformers: str
    deep_gemm: str
    wheels: dict[str, WheelPin]
    flashinfer_wheel: WheelPin
    sdist: WheelPin | None = None
    """The source distribution, which has upstream's tests; `export --upstream` alone uses it."""


class Pin(_Strict):
    """UPSTREAM.toml."""

    release: int
    base: str
    bases: dict[str, BasePin]

    def of(self, base: str | None = None) -> tuple[str, BasePin]:
        """The version and pin of ``base`` (the default base if None).

        Raises:
            ForkError: the fork does not serve that base.
        """
        version = base or self.base
        if version not in self.bases:
            raise ForkError(
                f"base {version} is not served. Served: {', '.join(self.bases)}. "
                "Add it to UPSTREAM.toml to serve it (CONTRIBUTING, 'Following upstream')."
            )
        return version, self.bases[version]

    def fork_version(self, base: str | None = None) -> str:
        """The fork's version on ``base``: ``0.33.0+sm120.1``."""
        return f"{self.of(base)[0]}+sm120.{self.release}"


def parse(text: str, where: str = "UPSTREAM.toml") -> Pin:
    """Parses a pin.

    Raises:
        ForkError: not TOML, a missing or unknown key, a malformed hash, or a
            default base that is not among the bases.
    """
    try:
        pin = Pin.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ForkError(f"{where} is not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ForkError(f"{where}: {key}: {first['msg']}") from None
    pin.of()
    return pin


@cache
def load(path: Path = ROOT / "UPSTREAM.toml") -> Pin:
    """The pin of this checkout."""
    return parse(path.read_text(encoding="utf-8"), str(path.name))


def check_against_wheel(pin: BasePin, metadata: bytes, deep_gemm_init: bytes) -> None:
    """Compares what the pin says with what the wheel says.

    Args:
        pin: one base's pin.
        metadata: the wheel's METADATA.
        deep_gemm_init: ``__init__.py`` of the DeepGEMM that the wheel vendors.

    Raises:
        ForkError: any figure differs.
    """
    required: dict[str, SpecifierSet] = {}
    for line in message_from_bytes(metadata).get_all("Requires-Dist", []):
        requirement = Requirement(line)
        if requirement.marker is None:
            required[canonicalize_name(requirement.name)] = requirement.specifier
    vendored = re.search(rb"^__version__ = '([^']+)'", deep_gemm_init, re.MULTILINE)
    found = {
        "flashinfer": str(required.get("flashinfer-python")),
        "torch": str(required.get("torch")),
        "transformers": str(required.get("transformers")),
        "deep_gemm": vendored.group(1).decode() if vendored else "none",
    }
    wanted = {
        "flashinfer": str(SpecifierSet(f"=={pin.flashinfer}")),
        "torch": str(SpecifierSet(f"=={pin.torch}")),
        "transformers": str(SpecifierSet(pin.transformers)),
        "deep_gemm": pin.deep_gemm,
    }
    wrong = [
        f"{name}: UPSTREAM.toml says {wanted[name]}, the wheel says {found[name]}"
        for name in wanted
        if wanted[name] != found[name]
    ]
    if wrong:
        raise ForkError("the pin disagrees with the wheel. " + "; ".join(wrong))
