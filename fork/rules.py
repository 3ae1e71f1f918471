# SPDX-License-Identifier: Apache-2.0
"""Which page sizes the installed FlashInfer and DeepGEMM take on SM120, as they say.

Level of evidence: *rule* — the libraries' own host-side tables, source and assert
strings; no kernel ran.

    python -m fork.rules    FlashInfer's rules as JSON, from the FlashInfer on the path
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from fork import ForkError
from fork.pin import DEEP_GEMM_INIT
from fork.tree import Tree

_PREFILL_SOURCE = "data/csrc/sparse_mla_sm120_prefill.cu"

_DEEP_GEMM_ASSERT = re.compile(rb"[\x20-\x7e]*arch_major == 12[\x20-\x7e]*block_kv[\x20-\x7e]*")


@dataclass(frozen=True)
class PageRule:
    """Pages one library takes in one role.

    Attributes:
        library: name and version.
        pages: the sizes taken, in states; None is any size above zero.
        source: where that stands.
    """

    library: str
    pages: frozenset[int] | None
    source: str

    def refuses(self, page: int) -> str | None:
        """Why ``page`` is refused, or None."""
        return None if page > 0 and (self.pages is None or page in self.pages) else str(self)

    def __str__(self) -> str:
        taken = "any" if self.pages is None else " or ".join(map(str, sorted(self.pages)))
        return f"{self.library} takes {taken} ({self.source})"

    def to_json(self) -> dict[str, object]:
        """Plain data, which ``from_json`` reads."""
        pages = None if self.pages is None else sorted(self.pages)
        return {"library": self.library, "pages": pages, "source": self.source}

    @classmethod
    def from_json(cls, data: dict) -> "PageRule":
        pages = None if data["pages"] is None else frozenset(data["pages"])
        return cls(data["library"], pages, data["source"])


def flashinfer() -> dict[str, PageRule]:
    """FlashInfer's DSv4 rules: ``swa`` is the main cache, ``main`` the extra one."""
    import flashinfer
    import flashinfer.mla as mla

    library = f"FlashInfer {flashinfer.__version__}"
    table = "supported_sparse_mla_sm120_configs"
    if hasattr(mla, table):  # 0.7.0 on
        config = getattr(mla, table)()["dsv4"]
        if getattr(config, "page_block_size_is_runtime", False):  # 0.7.2 on
            source = f"{table}()['dsv4'].page_block_size_is_runtime"
            rule = PageRule(library, None, source)
            return {"swa": rule, "main": rule}
        pages, source = {config.page_block_size}, f"{table}()['dsv4'].page_block_size"
    else:
        from flashinfer.mla import _sparse_mla_sm120 as sm120

        source = "_sparse_mla_sm120._DECODE_DSV4_PAGE_BLOCK_SIZE"
        pages = {sm120._DECODE_DSV4_PAGE_BLOCK_SIZE}
    text = (Path(flashinfer.__file__).parent / _PREFILL_SOURCE).read_text()
    extra = {int(n) for n in re.findall(r"extra_page_block_size == (\d+)", text)}
    if not extra:
        raise RuntimeError(f"{library}: no rule for the extra page in {_PREFILL_SOURCE}")
    return {
        "swa": PageRule(library, frozenset(pages), source),
        "main": PageRule(library, frozenset(extra), f"prefill, {_PREFILL_SOURCE}"),
    }


def deep_gemm(tree: Tree) -> PageRule:
    """DeepGEMM's rule for an FP8 indexer cache, from the host assert in the binary that
    the tree vendors.

    Raises:
        ForkError: the tree has no such binary, or it has no such assert.
    """
    folder = DEEP_GEMM_INIT.rpartition("/")[0]
    init = (tree.read(DEEP_GEMM_INIT) or b"").decode()
    version = re.search(r"^__version__ = '([^']+)'", init, re.MULTILINE)
    for name in sorted(n for n in tree.names() if re.fullmatch(rf"{folder}/_C[^/]*\.so", n)):
        found = _DEEP_GEMM_ASSERT.search(tree.read(name) or b"")
        if found is None or version is None:
            continue
        sm120 = _clause(found.group().decode(), "arch_major == 12")
        if "not is_fp4" in sm120:  # 0.30 and 0.31: FP8 apart from MXFP4
            sm120 = _clause(sm120, "not is_fp4")
        pages = frozenset(int(n) for n in re.findall(r"block_kv == (\d+)", sm120))
        if not pages:
            continue
        return PageRule(f"DeepGEMM {version.group(1)}", pages, "host assert on block_kv")
    raise ForkError(f"{tree}: no DeepGEMM binary with an assert on block_kv for SM120")


def _clause(text: str, start: str) -> str:
    """What follows ``start`` up to the parenthesis that closes its clause."""
    rest, depth = text.split(start, 1)[1], 1
    for at, letter in enumerate(rest):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return rest[:at]
    return rest


if __name__ == "__main__":
    print(json.dumps({kind: rule.to_json() for kind, rule in flashinfer().items()}))
