# SPDX-License-Identifier: Apache-2.0
"""Pins the series on the real wheels: it fits every base, and a changed upstream stops it."""

import re

import pytest

from fork import fetch, pin, recipe, series
from fork.patch import Verdict
from fork.tree import FolderTree, WheelTree

pytestmark = pytest.mark.bases

BASES = list(pin.load().bases)
BASE = "0.33.0"

ATTENTION = "vllm/models/deepseek_v41/attention.py"
FLASHINFER = "vllm/models/deepseek_v41/nvidia/flashinfer_sparse.py"
SPARSE = "vllm/models/deepseek_v41/sparse_mla.py"
INDEXER = "vllm/v1/attention/backends/mla/indexer.py"
CONFIG = "vllm/config/vllm.py"
UTILS = "vllm/v1/worker/utils.py"
PLANNING = "vllm/v1/core/kv_cache_planning.py"
GEOMETRY = "vllm/v1/attention/backends/mla/sm120_page_geometry.py"


@pytest.fixture(scope="module")
def wheel():
    """The upstream wheel of a base, read in place."""
    return lambda base: WheelTree(fetch.upstream_wheel(pin.load(), base))


@pytest.fixture(scope="module")
def touched(wheel):
    """The files of a base that the series edits, and its dist-info."""

    def of(base):
        tree = wheel(base)
        paths = {e.file for p in series.members() for e in p.variant(tree.base).edits}
        paths |= {"vllm/__init__.py", "vllm/_version.py"}
        paths |= {name for name in tree.names() if name.startswith(f"{tree.dist_info}/")}
        return {path: tree.read(path) for path in sorted(paths)}

    return of


@pytest.fixture(scope="module")
def stock(touched):
    """The touched files of the default base."""
    return touched(BASE)


def lay_down(root, files):
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return FolderTree(root)


@pytest.mark.parametrize("base", BASES)
def test_series_fits_the_base_and_comes_out_again(wheel, touched, tmp_path, snapshot, base):
    members = series.members()
    for standing in series.status(wheel(base), members).values():
        assert (standing.verdict, standing.why) == (Verdict.PENDING, ())
    tree = lay_down(tmp_path, touched(base))
    pristine = snapshot(tmp_path)
    written = series.apply(tree, members, pin.load())
    edits = [edit for member in members for edit in member.variant(tree.base).edits]
    modules = [path for member in members for path in member.modules]
    assert set(written) == {*(edit.file for edit in edits), *modules, recipe.PATH}
    for standing in series.status(tree, members).values():
        assert standing.verdict is Verdict.APPLIED
    for path in written:
        if path.endswith(".py"):
            compile((tmp_path / path).read_bytes(), path, "exec")
    assert series.apply(tree, members, pin.load()) == []
    series.revert(tree, members, pin.load())
    assert snapshot(tmp_path) == pristine


def replaced(path, *pairs, count=None):
    """Replaces text of a file, each piece there at least once (or ``count`` times)."""

    def mutate(files):
        text = files[path].decode()
        for old, new in pairs:
            assert text.count(old) == count if count else old in text
            text = text.replace(old, new)
        files[path] = text.encode()

    return mutate


def appended(path, text):
    def mutate(files):
        files[path] += text.encode()

    return mutate


def removed(path):
    def mutate(files):
        del files[path]

    return mutate


def added(path, data):
    def mutate(files):
        assert path not in files
        files[path] = data

    return mutate


# A mutation of 0.33.0, and what the refusal must say: the file, the edit, what was found.
MUTATIONS = {
    "class of the SM120 attention renamed": (
        replaced(FLASHINFER, ("DeepseekV4FlashInferSM120Attention", "DeepseekV4SM120Attention")),
        [FLASHINFER, "DeepseekV4FlashInferSM120Attention", "'swa_block_size'", "none"],
    ),
    "sliding window's default 32 is 48": (
        replaced(ATTENTION, ("block_size=32,", "block_size=48,"), count=1),
        [ATTENTION, "DeepseekV4SWACache(block_size=…)", "'48'", "'32'"],
    ),
    "second sliding-window cache": (
        replaced(
            ATTENTION,
            (
                "        self.swa_cache_layer = DeepseekV4SWACache(",
                "        self.other = DeepseekV4SWACache(block_size=32)\n"
                "        self.swa_cache_layer = DeepseekV4SWACache(",
            ),
            count=1,
        ),
        [ATTENTION, "call of DeepseekV4SWACache", "found 2"],
    ),
    "sliding-window cache is made elsewhere": (
        replaced(ATTENTION, ("= DeepseekV4SWACache(", "= make_swa_cache("), count=1),
        [ATTENTION, "call of DeepseekV4SWACache", "none"],
    ),
    "validate_block_size renamed": (
        replaced(CONFIG, ("def validate_block_size(", "def check_block_size("), count=1),
        [CONFIG, "validate_sm120_page_geometry", "definition of validate_block_size", "none"],
    ),
    "kernel block sizes [128] are [256]": (
        replaced(FLASHINFER, ("        return [128]\n", "        return [256]\n"), count=1),
        [FLASHINFER, "get_supported_kernel_block_sizes", "'[256]'", "'[128]'"],
    ),
    "indexer's family 90 is 100": (
        replaced(
            INDEXER,
            (
                "[64 if current_platform.is_device_capability_family(90)",
                "[64 if current_platform.is_device_capability_family(100)",
            ),
            count=1,
        ),
        [INDEXER, "DeepseekV41IndexerBackend", "family(100)", "family(90)"],
    ),
    "second return in a backend": (
        replaced(
            SPARSE,
            (
                "        return [64 if current_platform",
                "        if kv_cache_spec is None:\n            return [64]\n"
                "        return [64 if current_platform",
            ),
            count=1,
        ),
        [SPARSE, "DeepseekV4SparseMLABackend.get_supported_kernel_block_sizes", "found 2"],
    ),
    "no builder_cls where builders are made": (
        replaced(UTILS, ("builder_cls", "builder_type")),
        [UTILS, "create_metadata_builders", "assignment to builder_cls", "none"],
    ),
    "import to stand after is relative": (
        replaced(UTILS, ("from vllm.v1.kv_cache_interface import", "from ..kv_cache import")),
        [UTILS, "check_kernel_pages", "import from vllm.v1.kv_cache_interface", "none"],
    ),
    "another body of get_kv_cache_groups": (
        replaced(
            PLANNING, ("    hidden_specs = {\n", "    more = 1\n    hidden_specs = {\n"), count=1
        ),
        [PLANNING, "body of get_kv_cache_groups has digest"],
    ),
    "tensors are placed by another offset": (
        replaced(PLANNING, ("offset=byte_offset,", "offset=place,"), count=1),
        [PLANNING, "KVCacheTensor(offset=…)", "'place'", "'byte_offset'"],
    ),
    "file missing": (removed(INDEXER), [INDEXER, "DeepseekV41IndexerBackend", "no such file"]),
    "syntax error": (
        appended(SPARSE, "\nmatch x:\n  case 1\n"),
        [SPARSE, "DeepseekV4SparseMLABackend", "not understood"],
    ),
    "half-landed: the class attribute is there, as we add it": (
        replaced(
            FLASHINFER,
            (
                "    use_fp8_ds_mla_layout: ClassVar[bool] = True\n",
                "    use_fp8_ds_mla_layout: ClassVar[bool] = True\n"
                "    # FlashInfer's SM120 kernels before 0.7.2 take pages of 64 tokens only.\n"
                "    swa_block_size: ClassVar[int] = 64\n",
            ),
            count=1,
        ),
        [FLASHINFER, "half-landed", "'swa_block_size': applied", "'swa_block_size': pending"],
    ),
    "half-landed: the class attribute is there, another way": (
        replaced(
            ATTENTION,
            (
                "    PREFILL_CHUNK_SIZE: ClassVar[int] = 4\n",
                "    swa_block_size = 32\n    PREFILL_CHUNK_SIZE: ClassVar[int] = 4\n",
            ),
            count=1,
        ),
        [ATTENTION, "already has 'swa_block_size'", "swa_block_size = 32"],
    ),
    "decoy of the indexer's cache": (
        appended(
            ATTENTION,
            "\n\nclass DeepseekV4IndexerCache:\n    def get_kv_cache_spec(self, vllm_config):\n"
            "        return MLAAttentionSpec(block_size=self.cache_config.block_size)\n",
        ),
        [ATTENTION, "'DeepseekV4IndexerCache'", "found 2"],
    ),
    "hook imported by another name": (
        replaced(UTILS, ("import torch\n", "import torch\nimport hooks as check_kernel_pages\n")),
        [UTILS, "already imports check_kernel_pages"],
    ),
    "new module there with other contents": (
        added(GEOMETRY, b"# another\n"),
        [GEOMETRY, "new module", "other contents"],
    ),
}


@pytest.mark.parametrize(("mutate", "words"), MUTATIONS.values(), ids=MUTATIONS)
def test_changed_upstream_stops_the_series(stock, tmp_path, snapshot, mutate, words):
    files = dict(stock)
    mutate(files)
    assert files != stock
    tree = lay_down(tmp_path, files)
    before = snapshot(tmp_path)
    with pytest.raises(series.Drift) as caught:
        series.apply(tree, series.members(), pin.load())
    assert snapshot(tmp_path) == before
    text = str(caught.value)
    # One reason has all the words; half-landed is several reasons.
    reasons = [text] if "half-landed" in words else re.split(r"\n  (?=sm120_\w+: )", text)
    assert any(all(word in reason for word in words) for reason in reasons), text


@pytest.mark.parametrize("base", BASES)
def test_the_pin_agrees_with_the_wheel(wheel, base):
    tree = wheel(base)
    _, base_pin = pin.load().of(base)
    metadata = tree.read(f"{tree.dist_info}/METADATA")
    deep_gemm = tree.read("vllm/third_party/deep_gemm/__init__.py")
    assert tree.version == base
    pin.check_against_wheel(base_pin, metadata, deep_gemm)
