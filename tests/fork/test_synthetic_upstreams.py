# SPDX-License-Identifier: Apache-2.0
"""Twelve upstreams that do not exist, made from 0.33.0: each gets the verdict that is right.

Landed exactly, landed in the form of each open proposal, half landed, a moved file, a renamed
class, new arguments, a third compress ratio, another record, another default, newer syntax, a
deleted backend, a decoy. The proposals' changes are not public as text: the two forms
here are what their descriptions say, in our words.
"""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from fork import fetch, geometry, pin, rebase, series
from fork.tree import FolderTree, Overlay, WheelTree

BASE = "0.33.0"
ATTENTION = "vllm/models/deepseek_v41/attention.py"
FLASHINFER = "vllm/models/deepseek_v41/nvidia/flashinfer_sparse.py"
SPARSE = "vllm/models/deepseek_v41/sparse_mla.py"
COMPRESSOR = "vllm/models/deepseek_v41/compressor.py"
INDEXER = "vllm/v1/attention/backends/mla/indexer.py"
PLANNING = "vllm/v1/core/kv_cache_planning.py"
ENVS = "vllm/envs.py"

SWA, STATES, LAYOUT, CHECK, ANY_SHAPE, SELFTEST = (
    "sm120_swa_page_block_size",
    "sm120_compressed_page_states",
    "sm120_kv_layout",
    "sm120_page_geometry_check",
    "sm120_sparse_mla",
    "sm120_decode_shape_selftest",
)

pytestmark = pytest.mark.bases
needs_vllm = [
    pytest.mark.needs_vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="vLLM's dependencies are not installed"
    ),
]


@pytest.fixture(scope="module")
def stock():
    """The upstream wheel, read in place."""
    return WheelTree(fetch.upstream_wheel(pin.load(), BASE))


def changed(tree, path, *pairs):
    """``tree`` with text of a file replaced, each piece there exactly once."""
    text = tree.read(path).decode()
    for old, new in pairs:
        assert text.count(old) == 1, (path, old, text.count(old))
        text = text.replace(old, new)
    return Overlay(tree, getattr(tree, "changes", {}) | {path: text.encode()})


def verdicts(tree, variants_of=None):
    """Rows by member, from text alone."""
    found = rebase.replay(tree, pin.load().bases[BASE], series.members(), variants_of, run=False)
    assert found["clean"] == (not found["problems"])
    return {row["name"]: row for row in found["patches"]}


def drifted(row):
    return {edit["edit"]: edit["found"] for edit in row["edits"] if edit["state"] == "drift"}


def only(rows, *names):
    """Those members have drifted, and every other one is pending."""
    assert {n for n, row in rows.items() if row["verdict"] == "drift"} == set(names)
    assert {r["verdict"] for n, r in rows.items() if n not in names} <= {"pending"}


def test_untouched(stock):
    only(verdicts(stock))


def test_landed_exactly(stock):
    steps, _ = series.steps(stock, series.members())
    written = {path: data for _, changes in steps for path, data in changes.items()}
    rows = verdicts(Overlay(stock, written))
    assert {row["verdict"] for row in rows.values()} == {"upstream"}


def test_half_landed(stock):
    """The sliding window's two edits in attention.py are there, the SM120 class's is not."""
    [swa] = series.members([SWA])
    steps, _ = series.steps(stock, [swa])
    tree = Overlay(stock, {ATTENTION: steps[0][1][ATTENTION]})
    rows = verdicts(tree)
    only(rows, SWA)
    assert rows[SWA]["why"][0] == "half-landed:"
    assert [edit["state"] for edit in rows[SWA]["edits"]] == ["applied", "applied", "pending"]


def test_moved_file(stock):
    """Every edit of the file is named, and where its classes are now."""
    new = "vllm/models/deepseek_v41/nvidia/sparse_attention.py"
    tree = Overlay(stock, {FLASHINFER: None, new: stock.read(FLASHINFER)})
    rows = verdicts(tree)
    only(rows, SWA, STATES, ANY_SHAPE)
    for name, count in ((SWA, 1), (STATES, 2), (ANY_SHAPE, 6)):
        found = [edit for edit in rows[name]["edits"] if edit["state"] == "drift"]
        assert [edit["found"] for edit in found] == ["no such file"] * count
        assert all(edit["edit"].startswith(FLASHINFER) for edit in found)
    [moved] = [edit["now_in"] for edit in rows[SWA]["edits"] if edit["now_in"]]
    assert new in moved


def test_renamed_class(stock):
    text = stock.read(FLASHINFER).replace(b"DeepseekV4FlashInferSM120Attention", b"SM120Attention")
    rows = verdicts(Overlay(stock, {FLASHINFER: text}))
    only(rows, SWA, ANY_SHAPE)
    [(edit, found)] = drifted(rows[SWA]).items()
    assert "swa_block_size" in edit and "DeepseekV4FlashInferSM120Attention" in found


def test_new_arguments(stock):
    """A new keyword beside ours moves nothing; a new parameter of a replaced body stops."""
    tree = changed(stock, ATTENTION, ("block_size=32,", "block_size=32,\n            spare=None,"))
    only(verdicts(tree))
    signature = "    kv_cache_spec: dict[str, KVCacheSpec],\n) -> list[KVCacheGroupSpec]:"
    text = stock.read(PLANNING).decode()
    at = text.index(signature, text.index("def get_kv_cache_groups("))
    text = text[:at] + "    spare: bool,\n" + text[at:]
    rows = verdicts(Overlay(stock, {PLANNING: text.encode()}))
    only(rows, LAYOUT)
    [(edit, found)] = drifted(rows[LAYOUT]).items()
    assert "get_kv_cache_groups" in edit and "digest" in found


def test_default_is_64(stock):
    rows = verdicts(changed(stock, ATTENTION, ("block_size=32,", "block_size=64,")))
    only(rows, SWA)
    [(edit, found)] = drifted(rows[SWA]).items()
    assert "DeepseekV4SWACache(block_size=…)" in edit and "'64'" in found and "'32'" in found


def test_newer_syntax(stock):
    text = stock.read(SPARSE) + b"\nvalue = try read() else None\n"
    rows = verdicts(Overlay(stock, {SPARSE: text}))
    only(rows, STATES, LAYOUT)
    for name in (STATES, LAYOUT):
        found = drifted(rows[name])
        assert len(found) == 2 and all(edit.startswith(SPARSE) for edit in found)
        assert all("not understood" in why for why in found.values())


def test_deleted_backend(stock):
    """Every edit in it is named, not the first alone."""
    text = stock.read(INDEXER).replace(b"class DeepseekV41IndexerBackend", b"class _Gone")
    rows = verdicts(Overlay(stock, {INDEXER: text}))
    only(rows, STATES, LAYOUT)
    for name in (STATES, LAYOUT):
        [(edit, found)] = drifted(rows[name]).items()
        assert edit.startswith(f"{INDEXER}, DeepseekV41IndexerBackend") and "none" in found


def test_decoy(stock):
    """A copy of the class in the same file is ambiguous; in another it is nobody's business."""
    decoy = b"\n\nclass DeepseekV41IndexerBackend:\n    pass\n"
    only(verdicts(Overlay(stock, {"vllm/decoy.py": decoy})))
    rows = verdicts(Overlay(stock, {INDEXER: stock.read(INDEXER) + decoy}))
    only(rows, STATES, LAYOUT)
    assert all("found 2" in why for why in drifted(rows[STATES]).values())


def test_several_drifts_are_all_named(stock):
    tree = changed(stock, ATTENTION, ("block_size=32,", "block_size=48,"))
    tree = changed(tree, FLASHINFER, ("        return [128]\n", "        return [256]\n"))
    tree = changed(tree, ENVS, ("\nenvironment_variables:", "\nknown_variables:"))
    rows = verdicts(tree)
    only(rows, SWA, STATES, LAYOUT)
    assert "'48'" in str(drifted(rows[SWA])) and "'[256]'" in str(drifted(rows[STATES]))
    assert "assignment to environment_variables" in str(drifted(rows[LAYOUT]))


def test_edits_of_an_older_base_tell_what_moved(stock):
    """0.33 moved the planner out of kv_cache_utils.py: 0.32's edits do not find it there."""
    rows = verdicts(stock, variants_of="0.32.0")
    only(rows, LAYOUT)
    moved = [edit for edit in rows[LAYOUT]["edits"] if edit["state"] == "drift"]
    assert all(edit["edit"].startswith("vllm/v1/core/kv_cache_utils.py") for edit in moved)
    assert any(PLANNING in edit["now_in"] for edit in moved)
    assert rows[LAYOUT]["followed"]["variant"] == ">=0.33,<0.34"


# From here on the tree is run: what it does is the verdict.


@pytest.fixture
def laid_out(stock):
    """Writes an overlay down beside the unpacked wheels, where hard links are possible."""
    with tempfile.TemporaryDirectory(dir=fetch.cache_dir() / "trees", prefix=".made-") as folder:

        def lay(overlay):
            root = os.path.join(folder, "tree")
            shutil.copytree(geometry.stock_tree(stock), root, copy_function=os.link)
            tree = FolderTree(Path(root))
            tree.write(overlay.changes)  # by rename: the cache keeps its own
            return tree

        yield lay


def run(tree, members=None):
    found = rebase.replay(tree, pin.load().bases[BASE], series.members(members))
    return found, {row["name"]: row for row in found["patches"]}


FAMILY = "current_platform.is_device_capability_family(120)"
STOCK_SIZES = "[64 if current_platform.is_device_capability_family(90) else 128]"


def proposal(stock, sizes, block_size):
    """SWA pages of 64, the three declarations, and both specs' blocks, on family 120."""
    tree = changed(
        stock,
        ATTENTION,
        ("block_size=32,", f"block_size=64 if {FAMILY} else 32,"),
        (
            "block_size=vllm_config.cache_config.block_size,",
            f"block_size={block_size('vllm_config.cache_config')},",
        ),
        (
            "block_size=self.cache_config.block_size,",
            f"block_size={block_size('self.cache_config')},",
        ),
    )
    for path in (SPARSE, INDEXER):
        tree = changed(tree, path, (STOCK_SIZES, f"{sizes} if {FAMILY} else {STOCK_SIZES}"))
    own = ("        return [128]\n", f"        return {sizes} if {FAMILY} else [128]\n")
    imported = "from vllm.platforms.interface import DeviceCapability\n"
    platform = (imported, f"from vllm.platforms import current_platform\n{imported}")
    return changed(tree, FLASHINFER, own, platform)


@needs_vllm[0]
@needs_vllm[1]
def test_landed_as_56509_says(stock, laid_out):
    """64 states a page by blocks of 64 x ratio: drift as text, and not needed as it runs."""

    def block_size(config):
        return f"64 * self.compress_ratio if {FAMILY} else {config}.block_size"

    found, rows = run(laid_out(proposal(stock, "[64, 128]", block_size)))
    only(rows, SWA, STATES)
    assert len(drifted(rows[SWA])) == 1 and len(drifted(rows[STATES])) == 5
    for name in (SWA, STATES):
        assert not rows[name]["without"]["needed"], rows[name]["without"]
        assert rows[name]["without"]["differs"] == []
    assert {case["verdict"] for case in found["stock"]["cases"].values()} == {"PASS"}
    assert found["problems"] == [f"{SWA} has drifted", f"{STATES} has drifted"]


@needs_vllm[0]
@needs_vllm[1]
def test_landed_as_57292_says(stock, laid_out):
    """Everything 64: on 0.33 the libraries take it, but a ratio-2 page has 32 states, which
    the fork does not prove; the start-up check says so."""
    tree = laid_out(proposal(stock, "[64]", lambda config: f"{config}.block_size"))
    found, rows = run(tree)
    only(rows, SWA, STATES)
    assert {case["verdict"] for case in found["stock"]["cases"].values()} == {"PASS"}
    assert rows[STATES]["without"]["differs"] == [
        "main, ratio 2: 32 states a page",
        "indexer, ratio 2: 32 states a page",
    ]
    said = "\n".join(found["problems"])
    assert "PageGeometryError" in said and "found 32 states a page" in said


@needs_vllm[0]
@needs_vllm[1]
def test_third_ratio(stock, laid_out):
    text = "if self.compress_ratio not in (0, 1, 2):"
    tree = changed(stock, ATTENTION, (text, text.replace("(0, 1, 2)", "(0, 1, 2, 4)")))
    tree = changed(tree, COMPRESSOR, ("not in (1, 2):", "not in (1, 2, 4):"))
    found, rows = run(laid_out(tree), [SELFTEST])
    only(rows)
    assert "it builds layers of compress ratio 4, unknown to the fork" in found["problems"]
    assert not found["clean"]


@needs_vllm[0]
@needs_vllm[1]
def test_another_record(stock, laid_out):
    tree = changed(stock, ATTENTION, ("528 if self.kv_mxfp8 else 584", "600"))
    found, rows = run(laid_out(tree), [SELFTEST])
    only(rows)
    said = "\n".join(found["problems"])
    assert "states of 600 B are a record unknown to the fork" in said
    assert all(
        case["gates"] == ["block_size"] and case["verdict"] == "FAIL"
        for case in found["stock"]["cases"].values()
    )


@needs_vllm[0]
@needs_vllm[1]
def test_another_kind_of_cache(stock, laid_out):
    """A cache whose class the fork does not know is refused, not taken for a ring."""
    text = stock.read(ATTENTION).decode().replace("DeepseekV4IndexerCache", "NewIndexerCache")
    text += "\n\nclass DeepseekV4IndexerCache(NewIndexerCache):\n    pass\n"
    found, _ = run(laid_out(Overlay(stock, {ATTENTION: text.encode()})), [SELFTEST])
    said = "\n".join(found["problems"])
    assert "NewIndexerCache" in said and "a kind of cache unknown to the fork" in said
