# SPDX-License-Identifier: Apache-2.0
"""What the installed FlashInfer and DeepGEMM take on SM120, as they say themselves.

Level of evidence: *rule* — the libraries' own host-side tables and functions, their
source, and the assert strings of their binaries. No kernel runs. Imports neither vLLM
nor the libraries until asked.

FlashInfer's DSv4 call has two caches: the main one (sliding window) and the extra one
(compressed KV). Up to ``decode_tokens`` query tokens take its decode kernel, where it
has one for the shape; more take its prefill kernel.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

_PREFILL_SOURCE = "data/csrc/sparse_mla_sm120_prefill.cu"
_RESOLVER_SOURCE = "data/csrc/sparse_mla_sm120/attention_resolve.cu"

_DEEP_GEMM_ASSERT = re.compile(
    rb"[\x20-\x7e]*arch_major == 12[\x20-\x7e]*block_kv[\x20-\x7e]*"
)

# DSv4's query width and the id FlashInfer gives the model family.
_D_QK = 512


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
        taken = page > 0 and (self.pages is None or page in self.pages)
        return None if taken else str(self)

    def __str__(self) -> str:
        taken = "any"
        if self.pages is not None:
            taken = " or ".join(map(str, sorted(self.pages)))
        return f"{self.library} takes {taken} ({self.source})"

    def to_json(self) -> dict[str, object]:
        """Plain data, which ``from_json`` reads."""
        pages = None if self.pages is None else sorted(self.pages)
        return {"library": self.library, "pages": pages, "source": self.source}

    @classmethod
    def from_json(cls, data: dict) -> "PageRule":
        """Reads what ``to_json`` wrote."""
        pages = None if data["pages"] is None else frozenset(data["pages"])
        return cls(data["library"], pages, data["source"])


@dataclass(frozen=True)
class AttentionShape:
    """One DSv4 call.

    Attributes:
        tokens: query tokens.
        heads: query heads of this rank, after padding.
        width: candidates of the sliding-window segment (FlashInfer's topk).
        page: tokens in a page of the sliding-window cache.
        extra_width: candidates of the compressed segment; 0 where there is none.
        extra_page: states in a page of the compressed cache.
    """

    tokens: int
    heads: int
    width: int
    page: int
    extra_width: int = 0
    extra_page: int = 64


# A value of each dimension that every FlashInfer since 0.6.18 takes.
_SAFE = {"heads": 64, "width": 128, "page": 64, "extra_page": 64}


class FlashInferLimits:
    """Asks the installed FlashInfer whether it has a kernel for a shape.

    Raises:
        ImportError: FlashInfer is not installed, or has no SM120 sparse MLA.
    """

    def __init__(self) -> None:
        import flashinfer
        import flashinfer.mla as mla

        self.library = f"FlashInfer {flashinfer.__version__}"
        self.root = Path(flashinfer.__file__).parent
        self.configs = None
        table = "supported_sparse_mla_sm120_configs"
        if hasattr(mla, table):  # 0.7.0 on
            self.configs = getattr(mla, table)()["dsv4"]
            self.source = f"{table}()['dsv4']"
        else:
            self.source = "_sparse_mla_sm120._decode_dsv4_dispatchable"
        self.runtime_pages = bool(
            getattr(self.configs, "page_block_size_is_runtime", False)
        )
        if self.runtime_pages:  # 0.7.2 on
            self._takes = self._takes_runtime_pages
        elif self.configs is not None:
            self._takes = self._takes_planned
        else:
            self._takes = self._takes_listed

    @property
    def decode_tokens(self) -> int:
        """Most query tokens that the decode kernel takes."""
        if self.configs is not None:
            return int(self.configs.max_num_tokens)
        from flashinfer.mla import _sparse_mla_sm120 as sm120

        return int(sm120._DECODE_MAX_TOKENS)

    def takes(self, shape: AttentionShape) -> bool:
        """Whether there is a kernel for the shape."""
        return self._takes(shape)

    def route(self, shape: AttentionShape) -> str:
        """Which kernel the shape is for."""
        small = shape.tokens <= self.decode_tokens
        return f"FlashInfer {'decode' if small else 'prefill'}"

    def refused(self, shape: AttentionShape) -> list[str]:
        """The dimensions that are refused: of ``heads``, ``width``, ``page`` and
        ``extra_page``; empty where the shape is taken.

        Each is tried alone, the others at values that are taken.
        """
        if self.takes(shape):
            return []
        safe = replace(shape, **_SAFE)
        alone = [
            name
            for name in _SAFE
            if (name != "extra_page" or shape.extra_width)
            and not self.takes(replace(safe, **{name: getattr(shape, name)}))
        ]
        return alone or ["width"]  # only together: no kernel for the combination

    def pages(self) -> dict[str, PageRule]:
        """Page rules of the main cache (``swa``) and the extra one (``main``)."""
        if self.runtime_pages:
            source = f"{self.source}.page_block_size_is_runtime"
            rule = PageRule(self.library, None, source)
            return {"swa": rule, "main": rule}
        if self.configs is not None:
            page, source = (
                self.configs.page_block_size,
                f"{self.source}.page_block_size",
            )
        else:
            from flashinfer.mla import _sparse_mla_sm120 as sm120

            page = sm120._DECODE_DSV4_PAGE_BLOCK_SIZE
            source = "_sparse_mla_sm120._DECODE_DSV4_PAGE_BLOCK_SIZE"
        extra = self._extra_pages()
        return {
            "swa": PageRule(self.library, frozenset({page}), source),
            "main": PageRule(self.library, extra, f"prefill, {_PREFILL_SOURCE}"),
        }

    # 0.7.2 on: pages are run-time arguments; decode is asked, prefill's compiled
    # resolver is read.
    def _takes_runtime_pages(self, shape: AttentionShape) -> bool:
        if shape.page < 1 or (shape.extra_width and shape.extra_page < 1):
            return False
        decode = self.configs.supports_decode(
            shape.heads,
            shape.width,
            num_tokens=shape.tokens,
            page_block_size=shape.page,
        )
        return decode or self._runtime_prefill(shape)

    def _runtime_prefill(self, shape: AttentionShape) -> bool:
        from flashinfer.mla._sparse_mla_sm120 import _policy

        text = self._text(_RESOLVER_SOURCE)
        tile = int(self._one(r"m\.topk % (\d+) == 0", text, _RESOLVER_SOURCE))
        model = _policy._MODEL_TYPE_DSV4
        heads = _policy._STATIC_DECODE_ENVELOPE[model].dedicated_heads
        return shape.heads in heads and shape.width % tile == 0

    # 0.7.0: both kernels have a Python function.
    def _takes_planned(self, shape: AttentionShape) -> bool:
        from flashinfer.mla import _sparse_mla_sm120_plan as plan

        extra = shape.extra_width > 0
        common = (plan._MODEL_TYPE_DSV4, shape.heads, shape.width, shape.page, extra)
        if plan.decode_splitk_eligible(*common, shape.tokens):
            return True
        if extra and shape.extra_page not in self._extra_pages():
            return False
        dual = plan.prefill_mg_dual_eligible(*common)
        return plan.prefill_mg_eligible(*common) or dual

    # 0.6.18: decode has a function, prefill is compiled for listed shapes.
    def _takes_listed(self, shape: AttentionShape) -> bool:
        from flashinfer.mla import _sparse_mla_sm120 as sm120

        if shape.tokens <= self.decode_tokens:
            return sm120._decode_dsv4_dispatchable(
                shape.tokens,
                shape.heads,
                shape.width,
                _D_QK,
                shape.page,
                shape.extra_width,
            )
        text = self._text(_PREFILL_SOURCE)
        single = text.split("dispatch_dsv4_single", 1)[1]
        single, dual = single.split("dispatch_dsv4_dual", 1)
        heads = {int(n) for n in re.findall(r"case (\d+):", single)}
        body = dual if shape.extra_width else single
        widths = {int(n) for n in re.findall(r"topk == (\d+)", body)}
        if shape.extra_width and shape.extra_page not in self._extra_pages():
            return False
        # Compiled for this page and never compared: others are read from wrong places.
        page = shape.page == sm120._DECODE_DSV4_PAGE_BLOCK_SIZE
        return page and shape.heads in heads and shape.width in widths

    def _extra_pages(self) -> frozenset[int]:
        text = self._text(_PREFILL_SOURCE)
        found = re.findall(r"extra_page_block_size == (\d+)", text)
        if not found:
            raise RuntimeError(
                f"{self.library}: no rule for the extra page in {_PREFILL_SOURCE}"
            )
        return frozenset(map(int, found))

    def _text(self, path: str) -> str:
        return (self.root / path).read_text(encoding="utf-8")

    def _one(self, pattern: str, text: str, path: str) -> str:
        found = re.search(pattern, text)
        if found is None:
            raise RuntimeError(f"{self.library}: nothing like {pattern!r} in {path}")
        return found.group(1)


def deep_gemm_pages(binary: bytes, library: str) -> PageRule | None:
    """Pages of an FP8 indexer cache that DeepGEMM's paged MQA logits take on SM120.

    Args:
        binary: the extension, whose host assert names the sizes.
        library: name and version.

    Returns:
        None where the binary has no such assert.
    """
    found = _DEEP_GEMM_ASSERT.search(binary)
    if found is None:
        return None
    sm120 = _clause(found.group().decode(), "arch_major == 12")
    if "not is_fp4" in sm120:  # 0.30 and 0.31: FP8 apart from MXFP4
        sm120 = _clause(sm120, "not is_fp4")
    pages = frozenset(int(n) for n in re.findall(r"block_kv == (\d+)", sm120))
    return PageRule(library, pages, "host assert on block_kv") if pages else None


def _clause(text: str, start: str) -> str:
    """What follows ``start`` up to the parenthesis that closes its clause."""
    rest, depth = text.split(start, 1)[1], 1
    for at, letter in enumerate(rest):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return rest[:at]
    return rest
