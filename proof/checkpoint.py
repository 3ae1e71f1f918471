# SPDX-License-Identifier: Apache-2.0
"""Writes the tiny checkpoints: the same bits on every machine, from a seed.

    python -m proof.checkpoint OUT [--variant text …]

Bits come from numpy's Philox generator as raw integers, one stream a tensor, keyed by
the tensor's name; values are made from them by table or by one rounding, never by a
machine's mathematical functions. Shards that variants share are written once and linked.
Each shard's digest (SHA-256 over names, shapes and bytes) is kept in ``digests.json``.
"""

import argparse
import concurrent.futures
import hashlib
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from . import model
from .tokenizer import write_tokenizer

SEED = 41
_UNIFORM = 255 / math.sqrt(3)
"""Standard deviation of 2u - 255 for a byte u, within 1e-5."""
_JITTER = math.sqrt((0.25 + 1 + 4) / 3)
"""What scales that are one exponent lower, right or higher add to the spread."""
_E2M1 = math.sqrt(sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)
_E4M3 = 256 / math.sqrt(3)
"""About what e4m3 values spread by: 181 to 362 at most, none of them clipped at 448."""


def raw(name: str, count: int) -> np.ndarray:
    """``count`` random bytes of a tensor."""
    key = int.from_bytes(hashlib.sha256(f"{SEED}/{name}".encode()).digest()[:16], "little")
    words = np.random.Philox(key=key).random_raw(-(-count // 8))
    return words.astype("<u8", copy=False).view(np.uint8)[:count]


def exponent(spread: float, unit: float) -> int:
    """The power of two by which values that spread by ``unit`` come near ``spread``."""
    fraction, power = math.frexp(spread / (unit * _JITTER))
    return power if fraction >= math.sqrt(0.5) else power - 1


def bits(tensor: model.Tensor) -> np.ndarray:
    """The random bytes of a tensor, one a value (of ``fp4``, one for two)."""
    own = raw(tensor.name, math.prod(tensor.shape))
    shared = tensor.shared
    if shared is None:
        return own
    columns = tensor.shape[1]
    rows = raw(f"{shared.name}.{tensor.kind}", shared.rows * columns)
    own = own.reshape(-1, shared.head, columns).copy()
    own[:, : shared.rows] = rows.reshape(shared.rows, columns)
    return own.reshape(-1)


def make(tensor: model.Tensor, scaled: str | None = None) -> torch.Tensor:
    """A tensor of the checkpoint.

    Args:
        tensor: what to make.
        scaled: for ``e8m0``, the kind of the values that the scales belong to.
    """
    drawn = bits(tensor)
    if tensor.kind == "fp4":
        return torch.from_numpy(drawn.copy()).view(tensor.shape)
    if tensor.kind == "e8m0":
        middle = 127 + exponent(tensor.spread, _E2M1 if scaled == "fp4" else _E4M3)
        scales = (middle - 1 + drawn % 3).astype(np.uint8).reshape(tensor.shape)
        if tensor.shared:
            heads = scales.reshape(-1, tensor.shared.head, tensor.shape[1])
            heads[:, : tensor.shared.rows] += tensor.shared.louder
        return torch.from_numpy(scales).view(torch.float8_e8m0fnu)
    steps = 2.0 * np.arange(256) - 255
    if tensor.kind == "fp8":
        spread = tensor.spread / (math.ldexp(1, exponent(tensor.spread, _E4M3)) * _JITTER)
        values = torch.from_numpy(steps * (spread / _UNIFORM)).to(torch.float8_e4m3fn)
    else:
        exact = tensor.middle + steps * (tensor.spread / _UNIFORM)
        dtype = torch.float32 if tensor.kind == "f32" else torch.bfloat16
        values = torch.from_numpy(exact).to(dtype)
    width = {1: np.uint8, 2: np.uint16, 4: np.uint32}[values.element_size()]
    table = values.view(torch.uint8).numpy().view(width)
    made = torch.from_numpy(table[drawn].view(np.uint8))
    made = made.view(values.dtype).view(tensor.shape)
    if tensor.kind == "eye":
        made.fill_diagonal_(1)
    return made


def shard(tensors: list[model.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    kinds = {tensor.name: tensor.kind for tensor in tensors}
    for tensor in tensors:
        owner = tensor.name.removesuffix(".scale") + ".weight"
        yield tensor.name, make(tensor, kinds.get(owner))


def digest(made: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names, shapes, dtypes and bytes, by name."""
    found = hashlib.sha256()
    for name in sorted(made):
        tensor = made[name]
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        found.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def recipe(tensors: list[model.Tensor]) -> str:
    """A digest of what a shard is made of: another table or seed makes another shard."""
    return hashlib.sha256(f"{SEED} {tensors}".encode()).hexdigest()


def write_shard(path: Path, tensors: list[model.Tensor]) -> str:
    """Writes a shard beside its place, then renames it; returns its digest."""
    torch.set_num_threads(1)
    made = dict(shard(tensors))
    beside = path.with_suffix(f".{os.getpid()}.part")
    save_file(made, beside)
    os.replace(beside, path)
    return digest(made)


def write(out: Path, variants: tuple[str, ...], jobs: int) -> dict[str, str]:
    """Writes the variants below ``out``; shards that are there are kept.

    Returns:
        Shard to digest, of every shard that the variants have.
    """
    store = out / "shards"
    store.mkdir(parents=True, exist_ok=True)
    for part in store.glob("*.part"):
        part.unlink()
    record = out / "digests.json"
    known = json.loads(record.read_text()) if record.exists() else {}
    needed: dict[str, list[model.Tensor]] = {}
    for variant in variants:
        needed |= model.tensors(variant)
    made_of = {name: recipe(tensors) for name, tensors in needed.items()}
    missing = [
        name
        for name in needed
        if known.get(name, {}).get("made_of") != made_of[name]
        or not (store / f"{name}.safetensors").exists()
    ]
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        waiting = {
            pool.submit(write_shard, store / f"{name}.safetensors", needed[name]): name
            for name in missing
        }
        for number, done in enumerate(concurrent.futures.as_completed(waiting), 1):
            name = waiting[done]
            known[name] = {"made_of": made_of[name], "sha256": done.result()}
            _write_json(record, known)
            print(f"shard {number} of {len(missing)}: {name}", file=sys.stderr)
    for variant in variants:
        _assemble(out / variant, variant, store)
    return {name: known[name]["sha256"] for name in sorted(needed)}


def _assemble(folder: Path, variant: str, store: Path) -> None:
    """A variant's folder: links to its shards, index, config and tokenizer."""
    folder.mkdir(exist_ok=True)
    shards = model.tensors(variant)
    index = {}
    for name, tensors in shards.items():
        file = f"{name}.safetensors"
        (folder / file).unlink(missing_ok=True)
        os.link(store / file, folder / file)
        index |= {tensor.name: file for tensor in tensors}
    size = sum((folder / f"{name}.safetensors").stat().st_size for name in shards)
    config = model.config(variant)
    write_tokenizer(folder, config["text_config"]["vocab_size"])
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))},
    )
    _write_json(folder / "config.json", config)


def _write_json(path: Path, content: object) -> None:
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(beside, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m proof.checkpoint",
        description="Writes the proof's tiny checkpoints (about 3 GB, 6 GB with vision).",
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--variant", action="append", choices=model.VARIANTS)
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    args = parser.parse_args()
    # numpy's arrays are not written to here.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    digests = write(args.out, tuple(args.variant or model.VARIANTS), args.jobs)
    for name, value in digests.items():
        print(value, name)


if __name__ == "__main__":
    main()
