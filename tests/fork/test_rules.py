# SPDX-License-Identifier: Apache-2.0
"""Pins how the libraries' own rules are read: FlashInfer's of three generations, and the
assert in DeepGEMM's binary. What the real ones take: facts, sections B and C."""

import json
import sys
from contextlib import suppress
from types import ModuleType, SimpleNamespace

import pytest

from fork import ForkError, fetch, pin, rules
from fork.rules import PageRule
from fork.tree import Overlay, WheelTree

INIT = pin.DEEP_GEMM_INIT
FOLDER = INIT.rpartition("/")[0]

TEN = "(arch_major == 10 and (block_kv == 32 or block_kv == 64 or block_kv == 128))"
NINE = "(arch_major == 9 and (block_kv == 32 or block_kv == 64))"
OLD = (
    "(arch_major == 12 and ((is_fp4 and (block_kv == 32 or block_kv == 64)) "
    "or (not is_fp4 and block_kv == 64)))"
)
NEW = "(arch_major == 12 and (block_kv == 32 or block_kv == 64))"


class TestPageRule:
    @pytest.mark.parametrize(
        ("pages", "page", "taken"),
        [
            ({64}, 64, True),
            ({64}, 32, False),
            ({32, 64}, 32, True),
            ({32, 64}, 128, False),
            ({64}, 0, False),
            (None, 128, True),
            (None, 1, True),
            (None, 0, False),
            (None, -64, False),
            (set(), 64, False),
        ],
    )
    def test_refuses(self, pages, page, taken):
        rule = PageRule("Lib 1.0", pages if pages is None else frozenset(pages), "a table")
        assert (rule.refuses(page) is None) is taken
        if not taken:
            assert "Lib 1.0" in rule.refuses(page) and "a table" in rule.refuses(page)

    @pytest.mark.parametrize(
        ("pages", "words"), [({128, 2, 64}, "takes 2 or 64 or 128"), (None, "takes any")]
    )
    def test_says_what_is_taken_in_order(self, pages, words):
        assert words in str(PageRule("L", pages and frozenset(pages), "s"))

    @pytest.mark.parametrize("pages", [None, frozenset(), frozenset({64}), frozenset({2, 64})])
    def test_json_and_back(self, pages):
        rule = PageRule("Lib 1.0", pages, "a table")
        text = json.dumps(rule.to_json())
        assert PageRule.from_json(json.loads(text)) == rule


def binary(*clauses):
    text = " or ".join(clauses).encode()
    return b"\x7fELF\x00arch_major == 12\x00block_kv > 0\x00" + text + b"\x00\xffmore\x00"


@pytest.fixture
def deep_gemm_tree(write_tree, tmp_path):
    """The miniature tree with a DeepGEMM of the given files."""
    tree = write_tree(tmp_path)
    init = b"x = 1\n__version__ = '2.8.7'\n"

    def make(files, init=init):
        return Overlay(
            tree, {f"{FOLDER}/{name}": data for name, data in files.items()} | {INIT: init}
        )

    return make


class TestDeepGemm:
    @pytest.mark.parametrize(
        ("clauses", "pages"),
        [((TEN, NINE, OLD), {64}), ((TEN, NINE, NEW), {32, 64})],
        ids=["0.30 and 0.31", "0.32 and 0.33"],
    )
    @pytest.mark.parametrize("name", ["_C.cpython-312-x86_64-linux-gnu.so", "_C_extension.abi3.so"])
    def test_both_forms(self, deep_gemm_tree, clauses, pages, name):
        rule = rules.deep_gemm(deep_gemm_tree({name: binary(*clauses), "_C.py": b""}))
        assert rule.pages == pages
        assert "DeepGEMM 2.8.7" in rule.library

    @pytest.mark.parametrize(
        "clauses",
        [
            (TEN, NEW.replace("block_kv == 32 or ", ""), NINE),
            (NEW.replace("block_kv == 32 or ", ""), TEN),
            (
                TEN,
                "(arch_major == 12 and ((not is_fp4 and block_kv == 64) "
                "or (is_fp4 and (block_kv == 32 or block_kv == 64))))",
            ),
        ],
        ids=["between", "first", "fp4 last"],
    )
    def test_other_order_of_clauses(self, deep_gemm_tree, clauses):
        """What another architecture or MXFP4 takes is not read as ours."""
        tree = deep_gemm_tree({"_C.so": binary(*clauses)})
        with suppress(ForkError):  # a form it does not know: refused is right as well
            assert rules.deep_gemm(tree).pages == {64}

    def test_form_without_sizes_is_refused(self, deep_gemm_tree):
        tree = deep_gemm_tree({"_C.so": binary("(arch_major == 12 and block_kv % 64 == 0)")})
        with pytest.raises(ForkError, match="block_kv"):
            rules.deep_gemm(tree)

    @pytest.mark.parametrize(
        "files",
        [
            {"_C.so": binary(TEN, NINE)},
            {"_C.so": b"\x7fELF"},
            {"other.so": binary(TEN, NEW)},
            {"sub/_C.so": binary(TEN, NEW)},
            {"_C.py": binary(TEN, NEW)},
            {},
        ],
        ids=["not for SM120", "no assert", "another library", "a folder below", "source", "none"],
    )
    def test_without_the_assert(self, deep_gemm_tree, files):
        tree = deep_gemm_tree(files)
        with pytest.raises(ForkError) as caught:
            rules.deep_gemm(tree)
        assert str(tree) in str(caught.value) and "block_kv" in str(caught.value)

    def test_without_a_version(self, deep_gemm_tree):
        with pytest.raises(ForkError):
            rules.deep_gemm(deep_gemm_tree({"_C.so": binary(TEN, NEW)}, init=b""))

    def test_the_library_beside_it_has_the_assert(self, deep_gemm_tree):
        tree = deep_gemm_tree({"_C.a.so": b"\x7fELF", "_C.b.so": binary(TEN, NEW)})
        assert rules.deep_gemm(tree).pages == {32, 64}

    @pytest.mark.bases
    @pytest.mark.parametrize(
        ("base", "pages"),
        [("0.30.0", {64}), ("0.31.0", {64}), ("0.32.0", {32, 64}), ("0.33.0", {32, 64})],
    )
    def test_real_wheels(self, base, pages):
        """Facts, section C, FP8 indexer cache."""
        rule = rules.deep_gemm(WheelTree(fetch.upstream_wheel(pin.load(), base)))
        assert rule.pages == pages
        assert rule.library == f"DeepGEMM {pin.load().of(base)[1].deep_gemm}"


PREFILL = """\
  if (topk % BI == 0 && (extra_page_block_size == 64 || extra_page_block_size == 2)) {
    if (extra_page_block_size == 64) { run<64>(page_block_size == 128); }
"""


@pytest.fixture
def flashinfer(tmp_path, monkeypatch):
    """Puts a FlashInfer with the given ``mla`` on the path, and its prefill source."""

    def install(version, prefill=PREFILL, **mla):
        package = ModuleType("flashinfer")
        package.__version__ = version
        package.__file__ = str(tmp_path / "__init__.py")
        package.__path__ = []
        package.mla = ModuleType("flashinfer.mla")
        package.mla.__path__ = []
        for name, value in mla.items():
            setattr(package.mla, name, value)
        for name in [n for n in sys.modules if n.partition(".")[0] == "flashinfer"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "flashinfer", package)
        monkeypatch.setitem(sys.modules, "flashinfer.mla", package.mla)
        if prefill is not None:
            source = tmp_path / "data/csrc/sparse_mla_sm120_prefill.cu"
            source.parent.mkdir(parents=True)
            source.write_text(prefill)
        return package

    return install


def install_0_6_18(install, monkeypatch, page=64, **more):
    """Its only table is a constant of a private module."""
    module = ModuleType("flashinfer.mla._sparse_mla_sm120")
    module._DECODE_DSV4_PAGE_BLOCK_SIZE = page
    install("0.6.18.post1", _sparse_mla_sm120=module, **more)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def configs(**dsv4):
    """``supported_sparse_mla_sm120_configs`` as 0.7.0 and later have it."""
    return lambda: {"dsv4": SimpleNamespace(**dsv4), "other": SimpleNamespace(page_block_size=1)}


class TestFlashInfer:
    # 48 is a page that no release has: the figure comes from the table, not from us.
    @pytest.mark.parametrize("page", [64, 48])
    def test_0_6_18(self, flashinfer, monkeypatch, page):
        install_0_6_18(flashinfer, monkeypatch, page)
        found = rules.flashinfer()
        assert {kind: rule.pages for kind, rule in found.items()} == {
            "swa": {page},
            "main": {2, 64},
        }
        assert "_DECODE_DSV4_PAGE_BLOCK_SIZE" in found["swa"].source
        assert "sparse_mla_sm120_prefill.cu" in found["main"].source

    @pytest.mark.parametrize("more", [{}, {"page_block_size_is_runtime": False}])
    @pytest.mark.parametrize("page", [64, 48])
    def test_0_7_0(self, flashinfer, page, more):
        table = configs(page_block_size=page, **more)
        flashinfer("0.7.0.post1", supported_sparse_mla_sm120_configs=table)
        found = rules.flashinfer()
        assert {kind: rule.pages for kind, rule in found.items()} == {
            "swa": {page},
            "main": {2, 64},
        }
        assert found["swa"].library == "FlashInfer 0.7.0.post1"
        assert "supported_sparse_mla_sm120_configs" in found["swa"].source

    def test_0_7_2(self, flashinfer):
        """Any page: the source is not looked at."""
        table = configs(page_block_size=64, page_block_size_is_runtime=True)
        flashinfer("0.7.2.post1", prefill=None, supported_sparse_mla_sm120_configs=table)
        found = rules.flashinfer()
        assert {kind: rule.pages for kind, rule in found.items()} == {"swa": None, "main": None}
        assert "page_block_size_is_runtime" in found["main"].source

    @pytest.mark.parametrize("prefill", ["extra_page_block_size > 0\n", ""])
    def test_prefill_source_without_a_rule(self, flashinfer, monkeypatch, prefill):
        install_0_6_18(flashinfer, monkeypatch, prefill=prefill)
        with pytest.raises(RuntimeError, match=r"FlashInfer 0\.6\.18\.post1.*no rule.*prefill"):
            rules.flashinfer()
