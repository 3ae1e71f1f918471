# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's values, decoded here by another decoder, and the files around them.

Nothing large is written: the values are those of the real table with fewer rows, the
files those of a table of a few kilobytes.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from proof import checkpoint, model, stored

safetensors = pytest.importorskip("safetensors.torch")

VALUES = 1 << 21
"""Of a tensor, about: more than 2000 scales, which the spread of a matrix depends on."""

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# --- values ------------------------------------------------------------------------


def _e4m3(made):
    return made.to(torch.float64).numpy()


def _e2m1(made):
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = np.concatenate([magnitudes, -magnitudes])
    packed = made.numpy()
    return np.stack([table[packed & 15], table[packed >> 4]], -1).reshape(len(packed), -1)


def _decoded(weight, scale):
    """Values of a quantized matrix: every scale is 2 ** (byte - 127)."""
    values = _e2m1(weight) if weight.dtype == torch.uint8 else _e4m3(weight)
    scales = 2.0 ** (scale.view(torch.uint8).numpy().astype(int) - 127)
    for axis in (0, 1):
        assert values.shape[axis] % scales.shape[axis] == 0
        scales = scales.repeat(values.shape[axis] // scales.shape[axis], axis)
    return values * scales


def _fewer(*tensors):
    """A weight and its scale, or one tensor, with fewer rows, or more where it is small."""
    first, *scale = tensors
    columns = math.prod(first.shape[1:])
    step = first.shared.head if first.shared else model.BLOCK
    rows = -(-VALUES // columns // step) * step
    if columns > 1 and rows > first.shape[0] >= step:
        rows = first.shape[0]
    made = [dataclasses.replace(first, shape=(rows, *first.shape[1:]))]
    for tensor in scale:
        kept = rows * tensor.shape[0] // first.shape[0]
        made.append(dataclasses.replace(tensor, shape=(kept, *tensor.shape[1:])))
    return made


def _table():
    """One tensor of each kind, by name: what differs in the number of a layer or an expert
    is made alike."""
    found = {}
    for variant in model.VARIANTS:
        for part in model.tensors(variant).values():
            for tensor in part:
                kind = re.sub(r"^(layers|mtp)\.\d+\.", "", tensor.name)
                found.setdefault(re.sub(r"\.\d+\.", ".", kind), tensor)
    return found.values()


_TENSORS = {tensor.name: tensor for tensor in _table()}


def _scale_of(name):
    return _TENSORS[name.removesuffix("weight") + "scale"]


def _of(*kinds):
    return [pytest.param(t, id=name) for name, t in _TENSORS.items() if t.kind in kinds]


@pytest.mark.parametrize("weight", _of("fp8", "fp4"))
def test_a_quantized_matrix_has_the_declared_spread(weight):
    weight, scale = _fewer(weight, _scale_of(weight.name))
    (_, values), (_, scales) = checkpoint.shard([weight, scale])
    assert values.shape == weight.shape and scales.shape == scale.shape
    found = _decoded(values, scales)
    assert np.isfinite(found).all()
    assert len(np.unique(scales.view(torch.uint8).numpy())) >= 3
    if weight.shared:
        heads = found.reshape(-1, weight.shared.head, found.shape[1])
        shared = heads[:, : weight.shared.rows]
        own = heads[:, weight.shared.rows :]
        louder = 2.0**weight.shared.louder
        # The shared rows of all heads are the same few, so that fewer scales count.
        assert shared.std() == pytest.approx(weight.spread * louder, rel=0.1)
        if not own.size:
            return
        found = own
    most = math.sqrt(2) if weight.kind == "fp4" else 1.03
    assert 1 / most <= found.std() / weight.spread <= most
    assert abs(found.mean()) <= 0.03 * weight.spread


@pytest.mark.parametrize("tensor", _of("bf16", "f32"))
def test_a_plain_tensor_has_the_declared_spread_and_mean(tensor):
    (tensor,) = _fewer(tensor)
    made = checkpoint.make(tensor)
    assert made.dtype == (torch.float32 if tensor.kind == "f32" else torch.bfloat16)
    assert made.shape == tensor.shape
    found = made.to(torch.float64).numpy()
    assert found.std() == pytest.approx(tensor.spread, rel=0.03)
    assert found.mean() == pytest.approx(tensor.middle, abs=0.03 * tensor.spread)


def test_eye_has_ones_on_its_diagonal():
    tensor = _TENSORS["layers.2.attn.indexer.wk.weight"]
    found = checkpoint.make(tensor).to(torch.float64).numpy()
    assert found.shape == (model.INDEX_DIM, model.HEAD_DIM)
    assert (np.diagonal(found) == 1).all()
    off = found[~np.eye(*found.shape, dtype=bool)]
    assert off.std() == pytest.approx(tensor.spread, rel=0.03)


def _heads(layer, owner, head):
    """The decoded query projection of a layer, (heads, head, Q_LORA)."""
    table = {t.name: t for t in model.tensors("text")[f"layer-{layer}"]}
    names = [f"layers.{layer}.{owner}.wq_b.{kind}" for kind in ("weight", "scale")]
    (_, weight), (_, scale) = checkpoint.shard(_fewer(*(table[name] for name in names)))
    return _decoded(weight, scale).reshape(-1, head, model.Q_LORA)


def test_heads_and_indexer_share_the_rows_that_the_indexer_sees():
    heads = _heads(2, "attn", model.HEAD_DIM)
    known, rest = heads[:, : model.KNOWN], heads[:, model.KNOWN :]
    assert len(heads) > 1
    assert (known == known[:1]).all()
    indexer = _heads(2, "attn.indexer", model.INDEX_DIM)
    assert (indexer[:, : model.KNOWN] == known[:1]).all()
    # What is not shared differs between heads, rows and layers.
    assert _alike(rest[0], rest[1]) < 0.05
    assert _alike(known[0, 0], known[0, 1]) < 0.05
    assert _alike(known[0], _heads(4, "attn", model.HEAD_DIM)[0, : model.KNOWN]) < 0.05


def _alike(one, other):
    """The share of equal values; of independent ones some are (256 bytes make fewer
    e4m3 values, and scales are one of three)."""
    return (one == other).mean()


# --- bits --------------------------------------------------------------------------

SMALL = [
    model.Tensor("a.weight", (64, 64), "fp8", 0.1),
    model.Tensor("a.scale", (2, 2), "e8m0", 0.1),
    model.Tensor("b.weight", (32, 32), "fp4", 0.1),
    model.Tensor("b.scale", (32, 2), "e8m0", 0.1),
    model.Tensor("c", (33,), "bf16", 1.0, 2.0),
    model.Tensor("d", (33,), "f32", 1.0),
    model.Tensor("e", (33,), "f32", 1.0),
    model.Tensor("f", (8, 16), "eye", 0.1),
]


def _bytes(made):
    return made.contiguous().view(torch.uint8).numpy().tobytes()


def test_bits_do_not_depend_on_the_order():
    one = {name: _bytes(made) for name, made in checkpoint.shard(SMALL)}
    other = {name: _bytes(made) for name, made in checkpoint.shard(SMALL[::-1])}
    assert one == other
    assert one["d"] != one["e"]


def _digest(tensors):
    """As checkpoint.digest's docstring describes it."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        made = tensors[name]
        found.update(f"{name} {tuple(made.shape)} {made.dtype}\n".encode())
        found.update(_bytes(made))
    return found.hexdigest()


def test_a_digest_sees_names_shapes_and_every_bit():
    made = dict(checkpoint.shard(SMALL))
    assert checkpoint.digest(made) == _digest(made)
    changed = [
        {("x" if name == "d" else name): tensor for name, tensor in made.items()},
        {**made, "f": made["f"].reshape(16, 8)},
        {**made, "d": made["d"] + 2**-10},
    ]
    digests = {checkpoint.digest(tensors) for tensors in (made, *changed)}
    assert len(digests) == 4


EXPECTED = sorted(stored.FOLDER.glob("*.json"))


@pytest.mark.skipif(not EXPECTED, reason=f"{stored.FOLDER.name}/ holds no digests yet")
def test_a_shard_has_the_bits_that_another_machine_wrote():
    """The smallest shard of the real table."""
    kept = json.loads(EXPECTED[0].read_text())["checkpoint"]
    part = model.tensors("text")["vision"]
    assert checkpoint.digest(dict(checkpoint.shard(part))) == kept["vision"]


# --- files -------------------------------------------------------------------------


def _tiny(name):
    return [dataclasses.replace(tensor, name=f"{name}.{tensor.name}") for tensor in SMALL]


@pytest.fixture
def tables(monkeypatch):
    """Two variants that share a shard, of a few kilobytes."""
    shared, text, engram = _tiny("shared"), _tiny("text"), _tiny("engram")
    found = {
        "text": {"layer-0": shared, "words": text},
        "engram": {"layer-0": shared, "words": text, "engram": engram},
        "dspark": {"layer-0": shared, "draft": _tiny("draft")},
    }
    monkeypatch.setattr(model, "tensors", found.__getitem__)
    return found


@pytest.fixture
def in_threads(monkeypatch):
    """Shards are written in this process, one after the other, so that a test can end it."""
    pool = lambda jobs: concurrent.futures.ThreadPoolExecutor(1)  # noqa: E731
    monkeypatch.setattr(checkpoint.concurrent.futures, "ProcessPoolExecutor", pool)


@pytest.fixture
def written(monkeypatch):
    """Names of the shards that are written, as they come."""
    names, write = [], checkpoint.write_shard

    def noted(path, tensors):
        names.append(path.stem)
        return write(path, tensors)

    monkeypatch.setattr(checkpoint, "write_shard", noted)
    return names


def test_files_of_a_checkpoint(tables, tmp_path):
    """By the real processes; the digests are of the tensors that the files hold."""
    digests = checkpoint.write(tmp_path, ("text", "engram"), 2)
    assert set(digests) == {"layer-0", "words", "engram"}
    kept = json.loads((tmp_path / "digests.json").read_text())
    assert {name: shard["sha256"] for name, shard in kept.items()} == digests
    for variant in ("text", "engram"):
        folder = tmp_path / variant
        assert json.loads((folder / "config.json").read_text()) == model.config(variant)
        assert (folder / "tokenizer.json").is_file()
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        found = {}
        for file in sorted(set(index.values())):
            loaded = safetensors.load_file(folder / file)
            assert _digest(loaded) == digests[Path(file).stem]
            found |= dict.fromkeys(loaded, file)
        assert found == index
        assert set(index) == {t.name for part in tables[variant].values() for t in part}
        # Nothing else lies there that a loader could take for a shard.
        assert {p.name for p in folder.glob("*.safetensors")} == set(index.values())
    parent = {
        shard: _digest(dict(checkpoint.shard(tensors)))
        for shard, tensors in tables["engram"].items()
    }
    assert parent == digests
    assert not list(tmp_path.rglob("*.part"))


def test_variants_share_links(tables, in_threads, tmp_path):
    checkpoint.write(tmp_path, ("text", "engram"), 1)
    for shard in ("layer-0", "words"):
        files = [tmp_path / where / f"{shard}.safetensors" for where in ("shards", *tables)][:3]
        assert len({file.stat().st_ino for file in files}) == 1


def test_what_is_there_is_kept(tables, in_threads, written, tmp_path):
    first = checkpoint.write(tmp_path, ("text",), 1)
    assert sorted(written) == ["layer-0", "words"]
    written.clear()
    assert checkpoint.write(tmp_path, ("text",), 1) == first
    assert written == []
    more = checkpoint.write(tmp_path, ("text", "engram"), 1)
    assert written == ["engram"]
    assert first.items() < more.items()
    # Only the digests of what was asked for.
    assert set(checkpoint.write(tmp_path, ("dspark",), 1)) == {"layer-0", "draft"}


def test_a_shard_that_was_lost_is_written_again(tables, in_threads, written, tmp_path):
    first = checkpoint.write(tmp_path, ("text",), 1)
    (tmp_path / "shards" / "words.safetensors").unlink()
    written.clear()
    assert checkpoint.write(tmp_path, ("text",), 1) == first
    assert written == ["words"]
    kept = safetensors.load_file(tmp_path / "text" / "words.safetensors")
    assert _digest(kept) == first["words"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("half", [False, True], ids=["between shards", "within a shard"])
def test_a_kill_loses_nothing(tables, in_threads, written, monkeypatch, tmp_path, after, half):
    whole = checkpoint.write(tmp_path / "whole", ("engram",), 1)
    written.clear()
    save, count = checkpoint.save_file, 0

    def dying(made, path):
        nonlocal count
        count += 1
        if count > after:
            if half:
                path.write_bytes(b"half")
            raise Killed
        save(made, path)

    cut = tmp_path / "cut"
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", dying)
        with pytest.raises(Killed):
            checkpoint.write(cut, ("engram",), 1)
    assert len(list((cut / "shards").glob("*.safetensors"))) == after
    assert len(list((cut / "shards").glob("*.part"))) >= half
    done = set(json.loads((cut / "digests.json").read_text())) if after else set()
    assert len(done) <= after
    written.clear()
    assert checkpoint.write(cut, ("engram",), 1) == whole
    assert set(written) == set(whole) - done
    for shard in whole:
        kept = safetensors.load_file(cut / "engram" / f"{shard}.safetensors")
        assert _digest(kept) == whole[shard]


def test_a_shard_without_a_digest_is_not_trusted(tables, in_threads, written, tmp_path):
    """Killed after a shard took its place and before that was noted."""
    store = tmp_path / "shards"
    store.mkdir()
    (store / "words.safetensors").write_bytes(b"anything")
    digests = checkpoint.write(tmp_path, ("text",), 1)
    assert "words" in written
    kept = safetensors.load_file(tmp_path / "text" / "words.safetensors")
    assert _digest(kept) == digests["words"]
