# SPDX-License-Identifier: Apache-2.0
"""Checks the fork as installed here, with the standard library alone.

    python3 verify_installed.py --runtime-key KEY --out RESULT.json

Every file of the wheel is there with the hash that RECORD gives, the recipe has the runtime
key wanted and is what it says, foreign diffs are those of the recipe, there is one version,
what gate and engine run is there, and the tools that they call are on PATH. With a wheel
that `python -m fork verify` passed, this says that the same bytes are installed. Exit 1 and
a line a fault otherwise.
"""

import argparse
import base64
import hashlib
import json
import shutil
import sys
from importlib import metadata
from pathlib import Path

RECIPE = "vllm/sm120_recipe.json"
FOREIGN = "vllm/sm120_foreign"
CALLED = (
    "vllm/models/deepseek_v41/nvidia/sm120_decode_shape_selftest.py",
    "vllm/entrypoints/cli/main.py",
)
"""What they run: runtime.SELFTEST and runtime.SERVE."""
TOOLS = ("python3", "sh", "timeout", "mktemp", "head", "mkdir", "rm")
"""What sm120_launch/runtime.py calls in a container."""


def faults(wanted):
    """What is wrong, one line each, and what was checked."""
    try:
        found = metadata.distribution("vllm")
    except metadata.PackageNotFoundError:
        return ["vllm is not installed for this Python"], {}
    wrong = []
    checked = 0
    for file in found.files or ():
        if file.hash is None:
            continue
        checked += 1
        path = Path(found.locate_file(file))
        if not path.is_file():
            wrong.append(f"{file}: missing")
        elif _digest(path, file.hash.mode) != file.hash.value:
            wrong.append(f"{file}: its hash is not the one in RECORD")
    if not checked:
        wrong.append("RECORD lists no file")
    text = Path(found.locate_file("vllm/_version.py"))
    if not text.is_file() or f"'{found.version}'" not in text.read_text(encoding="utf-8"):
        wrong.append(f"vllm/_version.py does not say {found.version}")
    wrong += [f"{f}: missing" for f in CALLED if not Path(found.locate_file(f)).is_file()]
    wrong += _recipe_faults(found, wanted)
    wrong += [f"{tool}: not on PATH" for tool in TOOLS if shutil.which(tool) is None]
    return wrong, {"version": found.version, "runtime_key": wanted, "files": checked}


def _recipe_faults(found, wanted):
    try:
        said = json.loads(Path(found.locate_file(RECIPE)).read_text(encoding="utf-8"))
        key, members = said["runtime_key"], said["recipe"]["members"]
        computed = hashlib.sha256(_canonical(said["recipe"])).hexdigest()
    except (OSError, ValueError, KeyError, TypeError):
        return [f"{RECIPE}: missing or damaged"]
    wrong = []
    if key != computed:
        wrong.append(f"{RECIPE}: it says key {key}, its content has {computed}")
    if key != wanted:
        wrong.append(f"{RECIPE}: key {key}, wanted {wanted}")
    for member in members:
        diff = Path(found.locate_file(f"{FOREIGN}/{member['name']}.diff"))
        if diff.is_file():
            content = {"diff": hashlib.sha256(diff.read_bytes()).hexdigest()}
            if hashlib.sha256(_canonical(content)).hexdigest() != member["sha256"]:
                wrong.append(f"{FOREIGN}/{member['name']}.diff: not the recipe's")
    return wrong


def _canonical(value):
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8")


def _digest(path, mode):
    digest = hashlib.new(mode)
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()


def main():
    """Checks, writes the result, and exits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtime-key", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    wrong, checked = faults(options.runtime_key)
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong:
        sys.exit(1)
    options.out.write_text(json.dumps(checked, indent=1) + "\n")
    print(f"verified: vLLM {checked['version']}, {checked['files']} files")


if __name__ == "__main__":
    main()
