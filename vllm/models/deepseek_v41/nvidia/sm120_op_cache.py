# SPDX-License-Identifier: Apache-2.0
"""What writes the caches: KV insert, the compressor, and the indexer's keys.

Written records are decoded from their bytes (sm120_packed_cache.py), and bytes that no
token owns must be as they were.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .sm120_device_cases import GUARD_BYTE
from .sm120_device_kernels import Bound
from .sm120_op_call import EXACT, Expected, Kernel, Op, Tensors
from .sm120_op_reference import pooled_pairs, rms_norm, rope
from .sm120_packed_cache import (
    HEAD_DIM,
    INDEX_DIM,
    NOPE,
    RECORD_BYTES,
    ROPE,
    index_page_bytes,
    index_view,
    pack_index_keys,
    pack_records,
    record_page_bytes,
    record_view,
    unpack_index_keys,
    unpack_records,
)

RECORD_BOUND = Bound(
    1e-2,
    "the same quantisation of values that may differ by one bf16 step: one e4m3 step "
    "of 2**-3 in 448 values is 6e-3, RoPE rounds to bf16",
)
LATENT_BOUND = Bound(2**-8, "fp32 pooling and norm, rounded to bf16")
KEY_BOUND = Bound(
    2e-2, "bf16 rounding before e4m3: a few values of 128 may fall a step aside"
)
# Positions of the rotation table; V4.1's own has a row for each position.
_POSITIONS = 512


def _cos_sin(rng: torch.Generator) -> torch.Tensor:
    """fp32 ``[positions, 64]`` as vLLM lays it out, of arbitrary angles."""
    angles = (
        torch.rand((_POSITIONS, ROPE // 2), generator=rng, device=rng.device) * 6.28
    )
    return torch.cat((angles.cos(), angles.sin()), 1)


def _slots(count: int, slots: int, rng: torch.Generator) -> torch.Tensor:
    """int64: distinct slots in no order, the last one among them, each fifth -1."""
    found = torch.randperm(slots, generator=rng, device=rng.device)[:count]
    found[0] = slots - 1 if not bool((found == slots - 1).any()) else found[0]
    found[torch.arange(count, device=rng.device) % 5 == 3] = -1
    return found


def _pool(blocks: int, size: int, stride: int, rng: torch.Generator) -> torch.Tensor:
    """uint8 ``[blocks, size]`` of guard bytes, the last of every ``stride``."""
    stride = stride or size
    shape = (blocks, stride)
    pool = torch.full(shape, GUARD_BYTE, dtype=torch.uint8, device=rng.device)
    return pool[:, stride - size :]


def _copy(cache: torch.Tensor) -> torch.Tensor:
    """The cache again, with what lies between its pages."""
    size, stride = cache.shape[1], cache.stride(0)
    whole = cache.as_strided((cache.shape[0], stride), (stride, 1), 0).clone()
    return whole[:, stride - size :]


def _untouched(
    before: torch.Tensor,
    after: torch.Tensor,
    page: int,
    slots: torch.Tensor,
    keys: bool,
) -> torch.Tensor:
    """int64 ``[1]``: bytes outside of the written slots that changed."""
    size, stride = before.shape[1], before.stride(0)
    wide = (before.shape[0], stride)
    old = before.as_strided(wide, (stride, 1), 0)
    new = after.as_strided(wide, (stride, 1), 0)
    changed = (old != new)[:, stride - size :].clone()
    between = int((old != new)[:, : stride - size].sum())
    parts = (INDEX_DIM, 4) if keys else (RECORD_BYTES - 8, 8)
    written = slots[slots >= 0]
    block, row = written // page, written % page
    first = 0
    for part in parts:
        area = changed[:, first : first + page * part].unflatten(1, (page, part))
        area[block, row] = False
        first += page * part
    count = int(changed.sum()) + between
    return torch.tensor([count], device=before.device)


def _records(cache: torch.Tensor, page: int, slots: torch.Tensor) -> Tensors:
    found = unpack_records(cache, page, slots[slots >= 0])
    return {"nope": found[:, :NOPE], "rope": found[:, NOPE:]}


def _wanted_records(values: torch.Tensor) -> dict[str, Expected]:
    """As the bytes of these values read; ``values`` float64, one row a written slot."""
    read = unpack_records(pack_records(values, 1), 1)
    return {
        "nope": Expected(read[:, :NOPE], RECORD_BOUND),
        "rope": Expected(values[:, NOPE:], RECORD_BOUND),
    }


def _nothing_else(device: torch.device) -> Expected:
    return Expected(torch.zeros(1, dtype=torch.int64, device=device), EXACT)


@dataclass(frozen=True)
class KVInsert(Op):
    """Queries rotated and padded, keys rotated, quantised and written to their slots.

    Attributes:
        tokens: query tokens.
        heads: query heads of a rank.
        padded_heads: heads that attention is handed.
        page: records in a page of the sliding-window cache.
        stride: bytes from one block to the next; 0: the page's own.
        eps: of the query norm, which V4.1 does not ask for.
    """

    name: ClassVar[str] = "kv_insert"
    entry: ClassVar[str] = "_C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"

    tokens: int
    heads: int
    padded_heads: int
    page: int
    stride: int = 0
    eps: float = 1e-6

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens x {self.heads} of {self.padded_heads} heads, page "
            f"{self.page}"
        )

    def _blocks(self) -> int:
        return -(-2 * self.tokens // self.page) + 1

    def gpu_bytes(self) -> int:
        pool = self._blocks() * (self.stride or record_page_bytes(self.page))
        queries = self.tokens * self.padded_heads * HEAD_DIM
        return pool * 5 + queries * 80 + self.tokens * HEAD_DIM * 80 + (4 << 20)

    def inputs(self, rng: torch.Generator) -> Tensors:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=rng, device=rng.device)

        sizes = torch.exp2(
            (torch.arange(HEAD_DIM, device=rng.device) // 64 - 3).float()
        )
        blocks = self._blocks()
        positions = torch.randint(
            _POSITIONS, (self.tokens,), generator=rng, device=rng.device
        )
        return {
            "q": normal(self.tokens, self.heads, HEAD_DIM).to(torch.bfloat16),
            "kv": (normal(self.tokens, HEAD_DIM) * sizes).to(torch.bfloat16),
            "cache": _pool(blocks, record_page_bytes(self.page), self.stride, rng),
            "slots": _slots(self.tokens, blocks * self.page, rng),
            "positions": positions,
            "cos_sin": _cos_sin(rng),
        }

    def expected(self, given: Tensors, got: Tensors) -> dict[str, Expected]:
        turned = rope(given["q"], given["positions"], given["cos_sin"])
        padding = self.padded_heads - self.heads
        q = torch.nn.functional.pad(turned, (0, 0, 0, padding))
        values = rope(given["kv"], given["positions"], given["cos_sin"])
        return {
            "q": Expected(q, LATENT_BOUND),
            **_wanted_records(values[given["slots"] >= 0]),
            "elsewhere": _nothing_else(q.device),
        }

    def library(self) -> Kernel:
        """vLLM's CUDA op.

        Raises:
            AttributeError: the build has no such op.
        """
        import vllm._custom_ops  # noqa: F401 (loads vllm._C)

        op = torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert

        def call(given: Tensors) -> Tensors:
            cache = _copy(given["cache"])
            records = record_view(cache, self.page)
            # V4 records, no query norm (vLLM norms before wq_b), query RoPE by default.
            q = op(
                given["q"],
                given["kv"],
                records.flatten(1),
                given["slots"],
                given["positions"],
                given["cos_sin"],
                self.padded_heads,
                self.eps,
                self.page,
                False,
                False,
            )
            return self.outputs(given, q, cache)

        return call

    def outputs(self, given: Tensors, q: torch.Tensor, cache: torch.Tensor) -> Tensors:
        """What is compared, of a padded query and a written cache."""
        slots, page = given["slots"], self.page
        elsewhere = _untouched(given["cache"], cache, page, slots, keys=False)
        return {"q": q, **_records(cache, page, slots), "elsewhere": elsewhere}


@dataclass(frozen=True)
class Compressor(Op):
    """Pooling, norm and ring of the compressor, then the insert of its latents.

    Three requests of unequal length, at even and odd positions; padding tokens have no
    slot.

    Attributes:
        tokens: of the three requests together, at least 6.
        ratio: 1 or 2.
        page: records in a page of the compressed cache.
        stride: bytes from one block to the next; 0: the page's own.
        capacity: rows of a request's ring.
        eps: of the norm.
    """

    name: ClassVar[str] = "compressor"
    entry: ClassVar[str] = "fused_save_compress_norm, rope_quant_insert"

    tokens: int
    ratio: int
    page: int
    stride: int = 0
    capacity: int = 8
    eps: float = 1e-6

    def __str__(self) -> str:
        return f"{self.tokens} tokens, ratio {self.ratio}, page {self.page}"

    def _blocks(self) -> int:
        return -(-2 * self.tokens // self.page) + 1

    def _requests(self) -> list[tuple[int, int, int]]:
        """First token, tokens and first position of each request."""
        sizes = [1, 2, self.tokens - 5]  # two tokens are padding
        firsts = [0, 1, 3]
        return list(zip(firsts, sizes, (7, 10, 33), strict=True))

    def gpu_bytes(self) -> int:
        pool = self._blocks() * (self.stride or record_page_bytes(self.page))
        return pool * 5 + self.tokens * HEAD_DIM * 160 + (4 << 20)

    def inputs(self, rng: torch.Generator) -> Tensors:
        device = rng.device

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=rng, device=device)

        positions = torch.zeros(self.tokens, dtype=torch.int64, device=device)
        requests = torch.zeros(self.tokens, dtype=torch.int32, device=device)
        ring = torch.full((self.tokens,), -1, dtype=torch.int64, device=device)
        for number, (first, size, position) in enumerate(self._requests()):
            part = slice(first, first + size)
            positions[part] = torch.arange(size, device=device) + position
            requests[part] = number
            # Blocks of the ring are not in the requests' order.
            ring[part] = (3 - number) * self.capacity + positions[part] % self.capacity
        blocks = self._blocks()
        slots = _slots(self.tokens, blocks * self.page, rng)
        slots[ring < 0] = -1
        ends = [first + size for first, size, _ in self._requests()]
        return {
            "rows": normal(self.tokens, HEAD_DIM * self.ratio),
            "positions": positions,
            "ring": normal(4, self.capacity, 2 * HEAD_DIM),
            "ring_slots": ring,
            "starts": torch.tensor([0, *ends], dtype=torch.int32, device=device),
            "requests": requests,
            "norm": (1 + 0.1 * normal(HEAD_DIM)).to(torch.bfloat16),
            "cos_sin": _cos_sin(rng),
            "cache": _pool(blocks, record_page_bytes(self.page), self.stride, rng),
            "slots": slots,
        }

    def closing(self, given: Tensors) -> torch.Tensor:
        """bool ``[T]``: the tokens that close a group and have a latent."""
        closes = (given["positions"] + 1) % self.ratio == 0
        # Ratio 1 has no ring: its latents follow the main cache's slots.
        valid = given["slots"] if self.ratio == 1 else given["ring_slots"]
        return closes & (valid >= 0)

    def expected(self, given: Tensors, got: Tensors) -> dict[str, Expected]:
        if self.ratio == 1:
            pooled = given["rows"].to(torch.float64)
        else:
            pooled = torch.zeros_like(given["rows"][:, :HEAD_DIM], dtype=torch.float64)
        ring = given["ring"].clone()
        for number, (first, size, position) in enumerate(self._requests()):
            if self.ratio == 1:
                break
            rows = given["rows"][first : first + size]
            block = ring[3 - number]
            before = block[(position - 1) % self.capacity].clone()
            places = range(position, position + size)
            pooled[first : first + size] = pooled_pairs(rows, before, places)
            for token in range(max(0, size - self.capacity), size):
                block[(position + token) % self.capacity] = rows[token]
        closing = self.closing(given)
        latent = rms_norm(pooled, given["norm"], self.eps)
        # Records hold the latent as it was rounded.
        rounded = got["latent"].to(torch.float64)
        group = given["positions"] // self.ratio * self.ratio
        values = rope(rounded, group, given["cos_sin"])
        written = closing & (given["slots"] >= 0)
        return {
            "latent": Expected(latent, LATENT_BOUND, closing.unsqueeze(1)),
            "ring": Expected(ring, EXACT),
            **_wanted_records(values[written]),
            "elsewhere": _nothing_else(latent.device),
        }

    def library(self) -> Kernel:
        """vLLM's two Triton kernels.

        Raises:
            ImportError: no vLLM.
        """
        from vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache import (
            fused_save_compress_norm,
            rope_quant_insert,
        )

        def call(given: Tensors) -> Tensors:
            cache, ring = _copy(given["cache"]), given["ring"].clone()
            rows = given["rows"]
            latent = rows.new_zeros((self.tokens, HEAD_DIM), dtype=torch.bfloat16)
            two = self.ratio == 2
            fused_save_compress_norm(
                rows,
                given["positions"],
                ring if two else None,
                given["ring_slots"] if two else given["slots"],
                given["starts"] if two else None,
                given["requests"] if two else None,
                given["norm"],
                self.eps,
                self.ratio,
                latent,
            )
            rope_quant_insert(
                latent,
                given["positions"],
                given["cos_sin"],
                record_view(cache, self.page),
                given["slots"],
                self.ratio,
            )
            return self.outputs(given, latent, ring, cache)

        return call

    def outputs(
        self,
        given: Tensors,
        latent: torch.Tensor,
        ring: torch.Tensor,
        cache: torch.Tensor,
    ) -> Tensors:
        """What is compared, of latents, ring and cache."""
        slots = torch.where(self.closing(given), given["slots"], -1)
        elsewhere = _untouched(given["cache"], cache, self.page, slots, keys=False)
        records = _records(cache, self.page, slots)
        return {"latent": latent, "ring": ring, **records, "elsewhere": elsewhere}


@dataclass(frozen=True)
class IndexerStore(Op):
    """Indexer keys: norm, rotation, fp8 quantisation, and their slots.

    Attributes:
        tokens: rows.
        ratio: 1 or 2.
        page: keys in a page.
        stride: bytes from one block to the next; 0: the page's own.
        eps: of the norm.
    """

    name: ClassVar[str] = "indexer_store"
    entry: ClassVar[str] = "indexer_k_norm_rope_store"

    tokens: int
    ratio: int
    page: int
    stride: int = 0
    eps: float = 1e-6

    def __str__(self) -> str:
        return f"{self.tokens} tokens, ratio {self.ratio}, page {self.page}"

    def _blocks(self) -> int:
        return -(-2 * self.tokens // self.page) + 1

    def gpu_bytes(self) -> int:
        pool = self._blocks() * (self.stride or index_page_bytes(self.page))
        return pool * 5 + self.tokens * INDEX_DIM * 120 + (4 << 20)

    def inputs(self, rng: torch.Generator) -> Tensors:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=rng, device=rng.device)

        blocks = self._blocks()
        positions = torch.arange(self.tokens, device=rng.device) + 5
        return {
            "rows": normal(self.tokens, INDEX_DIM).to(torch.bfloat16),
            "positions": positions % _POSITIONS,
            "norm": (1 + 0.1 * normal(INDEX_DIM)).to(torch.bfloat16),
            "cos_sin": _cos_sin(rng),
            "cache": _pool(blocks, index_page_bytes(self.page), self.stride, rng),
            "slots": _slots(self.tokens, blocks * self.page, rng),
        }

    def written(self, given: Tensors) -> torch.Tensor:
        """int64 ``[T]``: slots that are written, -1 elsewhere."""
        closes = (given["positions"] + 1) % self.ratio == 0
        return torch.where(closes, given["slots"], -1)

    def expected(self, given: Tensors, got: Tensors) -> dict[str, Expected]:
        normed = rms_norm(given["rows"], given["norm"], self.eps).to(torch.bfloat16)
        group = given["positions"] // self.ratio * self.ratio
        turned = rope(normed, group, given["cos_sin"]).to(torch.bfloat16)
        keys = turned[self.written(given) >= 0]
        read = unpack_index_keys(pack_index_keys(keys, 1), 1)
        return {
            "keys": Expected(read, KEY_BOUND),
            "elsewhere": _nothing_else(keys.device),
        }

    def library(self) -> Kernel:
        """vLLM's Triton kernel.

        Raises:
            ImportError: no vLLM.
        """
        from vllm.models.deepseek_v41.common.ops.indexer_k_store import (
            indexer_k_norm_rope_store,
        )

        def call(given: Tensors) -> Tensors:
            cache = _copy(given["cache"])
            indexer_k_norm_rope_store(
                given["rows"],
                given["positions"],
                given["cos_sin"],
                given["norm"],
                self.eps,
                index_view(cache, self.page),
                given["slots"],
                self.ratio,
                False,
            )
            return self.outputs(given, cache)

        return call

    def outputs(self, given: Tensors, cache: torch.Tensor) -> Tensors:
        """What is compared, of a written cache."""
        slots = self.written(given)
        keys = unpack_index_keys(cache, self.page, slots[slots >= 0])
        elsewhere = _untouched(given["cache"], cache, self.page, slots, keys=True)
        return {"keys": keys, "elsewhere": elsewhere}
