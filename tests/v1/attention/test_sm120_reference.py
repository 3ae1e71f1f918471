# SPDX-License-Identifier: Apache-2.0
"""The packed bytes and the float64 reference, against computations written otherwise."""

import math
import struct
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))

import sm120_fake_device as fake  # noqa: E402

packed = fake.packed
reference = fake.reference
Segment = reference.Segment


def e4m3(byte):
    """The value of one e4m3fn byte, from its definition."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2 ** (exponent - 7)
    return -size if sign else size


def bf16(low, high):
    return struct.unpack("<f", bytes([0, 0, low, high]))[0]


def read_record(page_bytes, page, row):
    """One record's 512 values from a page's bytes, value by value."""
    data = page_bytes[row * 576 : row * 576 + 576]
    scales = page_bytes[page * 576 + row * 8 : page * 576 + row * 8 + 8]
    nope = [e4m3(data[i]) * 2.0 ** (scales[i // 64] - 127) for i in range(448)]
    rope = [bf16(data[448 + 2 * i], data[449 + 2 * i]) for i in range(64)]
    return nope + rope


def random_values(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 512, generator=generator)


# The record.


def test_bytes_of_a_small_page():
    """Two records, by hand: 2 x 576 B of data, 2 x 8 B of scales, padded to 1728 B."""
    values = torch.zeros(2, 512)
    values[0, 0] = 448.0  # scale 1: 0x7E at byte 0
    values[0, 64] = -3.5  # scale 2**-7, -448: 0xFE at byte 64
    values[0, 447] = 2.0**-9  # scale 2**-17, 256: 0x78 at byte 447
    values[0, 448] = 1.0  # bf16 0x3F80, little-endian, at byte 448
    values[0, 511] = -2.5  # bf16 0xC020 at byte 574
    values[1, 1] = 449.0  # scale 2, 224.5 rounds to 224: 0x76 at byte 577
    values[1, 128] = 7.0  # scale 2**-6, 448: 0x7E at byte 704
    expected = bytearray(1728)
    expected[0], expected[64], expected[447] = 0x7E, 0xFE, 0x78
    expected[448:450] = b"\x80\x3f"
    expected[574:576] = b"\x20\xc0"
    expected[577], expected[704] = 0x76, 0x7E
    expected[1152:1160] = bytes([127, 120, 127, 127, 127, 127, 110, 0])
    expected[1160:1168] = bytes([128, 127, 121, 127, 127, 127, 127, 0])
    cache = packed.pack_records(values, 2)
    assert cache.shape == (1, 1728)
    assert bytes(cache[0].tolist()) == bytes(expected)


@pytest.mark.parametrize("page", [1, 2, 32, 64, 128])
def test_every_value_is_read_where_it_lies(page):
    """Random bytes, read one by one."""
    generator = torch.Generator().manual_seed(page)
    size = packed.record_page_bytes(page)
    cache = torch.randint(0, 256, (3, size), generator=generator, dtype=torch.uint8)
    cache[:, page * 576 : page * 584].clamp_(100, 150)
    got = packed.unpack_records(cache, page)
    for slot in {0, page - 1, page, 3 * page - 1}:
        want = read_record(cache[slot // page].tolist(), page, slot % page)
        assert torch.equal(
            torch.nan_to_num(got[slot]), torch.nan_to_num(torch.tensor(want, dtype=torch.float64))
        )


@pytest.mark.parametrize("page", [1, 3, 32, 64, 128])
@pytest.mark.parametrize("gap", [0, 576, 57600])
def test_packed_values_come_back(page, gap):
    """Exactly, once they are representable, between the pages of other layers."""
    size = packed.record_page_bytes(page)
    pool = torch.full((4, size + gap), 0x77, dtype=torch.uint8)
    first = min(gap, 576)
    cache = pool[:, first : first + size]
    once = packed.unpack_records(packed.pack_records(random_values(4 * page), page), page)
    assert packed.pack_records(once, page, out=cache).data_ptr() == cache.data_ptr()
    assert torch.equal(packed.unpack_records(cache, page), once)
    slots = torch.tensor([[0, 4 * page - 1], [page - 1, page]])
    assert torch.equal(packed.unpack_records(cache, page, slots), once[slots])
    used = pool.clone()
    used[:, first : first + page * 584] = 0x77
    assert (used == 0x77).all()  # nothing beside the records was written


def test_rounding():
    """bf16 exactly as PyTorch rounds; e4m3 within half a step of a scale that fits."""
    values = random_values(64) * torch.logspace(-6, 6, 64)[:, None]
    got = packed.unpack_records(packed.pack_records(values, 64), 64)
    assert torch.equal(got[:, 448:], values[:, 448:].bfloat16().double())
    groups = values[:, :448].double().unflatten(1, (7, 64))
    error = (got[:, :448].unflatten(1, (7, 64)) - groups).abs()
    largest = groups.abs().amax(-1, keepdim=True)
    # Half a step: 2**-4 of the value, or of e4m3's smallest normal at that scale.
    assert (error <= groups.abs() * 2**-4 + largest / 224 * 2**-10).all()


def test_every_power_of_two_is_a_scale():
    """UE8M0 has 2**-127 to 2**127, and 255 is NaN."""
    cache = packed.pack_records(torch.ones(1, 512), 1)
    for byte in (0, 1, 126, 127, 254):
        cache[0, 576:583] = byte
        got = packed.unpack_records(cache, 1)[0, :448]
        assert (got == 256.0 * 2.0 ** (byte - 127)).all()
    cache[0, 576:583] = 255
    assert packed.unpack_records(cache, 1)[0, :448].isnan().all()


def test_kernel_view():
    pool = torch.arange(3 * 40320, dtype=torch.int64).to(torch.uint8).view(3, 40320)
    cache = pool[:, 576 : 576 + 37440]
    view = packed.record_view(cache, 64)
    assert view.shape == (3, 64, 584) and view.stride() == (40320, 584, 1)
    assert view.data_ptr() == cache.data_ptr()
    assert torch.equal(view[2].flatten(), cache[2, : 64 * 584])
    assert packed.index_view(pool, 64).stride() == (40320, 132, 1)


@pytest.mark.parametrize(
    ("page", "record", "index"), [(32, 19008, 4608), (64, 37440, 8640), (128, 74880, 17280)]
)
def test_page_sizes_are_the_planned_ones(page, record, index):
    """As vLLM's own specs have them."""
    assert packed.record_page_bytes(page) == record
    assert packed.index_page_bytes(page) == index


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="65 slots do not fill pages of 64"):
        packed.pack_records(torch.zeros(65, 512), 64)
    with pytest.raises(ValueError, match=r"need \[slots, 512\], found \(64, 576\)"):
        packed.pack_records(torch.zeros(64, 576), 64)
    with pytest.raises(ValueError, match="takes 37376 bytes, the cache's rows have 19008"):
        packed.unpack_records(torch.zeros(2, 19008, dtype=torch.uint8), 64)
    with pytest.raises(ValueError, match="a cache is uint8"):
        packed.unpack_records(torch.zeros(2, 37440), 64)


# The indexer's keys.


def test_bytes_of_a_small_index_page():
    keys = torch.zeros(2, 128)
    keys[0, 0], keys[0, 127] = 448.0, -1.0
    keys[1, 2] = 0.875  # 448 * 2**-9
    cache = packed.pack_index_keys(keys, 2)
    expected = bytearray(576)
    expected[0], expected[127], expected[130] = 0x7E, 0xB8, 0x7E
    expected[256:264] = struct.pack("<ff", 1.0, 2.0**-9)
    assert cache.shape == (1, 576) and bytes(cache[0].tolist()) == bytes(expected)


def test_packed_index_keys_come_back():
    pool = torch.full((3, 20000), 0x77, dtype=torch.uint8)
    keys = torch.randn(192, 128, generator=torch.Generator().manual_seed(0))
    once = packed.unpack_index_keys(packed.pack_index_keys(keys, 64), 64)
    cache = packed.pack_index_keys(once, 64, out=pool[:, 1000:9640])
    assert torch.equal(packed.unpack_index_keys(cache, 64), once)
    assert float((once - keys).norm() / keys.norm()) < 0.03


# Sparse MLA.


def by_loops(q, segments, sinks, scale):
    """The definition: token by token, head by head, candidate by candidate."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for token in range(q.shape[0]):
        rows = []
        for segment in segments:
            length = segment.indices.shape[1] if segment.lengths is None else segment.lengths[token]
            for slot in segment.indices[token, : int(length)].tolist():
                if slot >= 0:
                    block, row = divmod(slot, segment.page)
                    rows.append(read_record(segment.cache[block].tolist(), segment.page, row))
        if not rows:
            continue
        records = torch.tensor(rows, dtype=torch.float64)
        for head in range(q.shape[1]):
            powers = [math.exp(scale * float(q[token, head].double() @ r)) for r in records]
            total = sum(powers)
            lse[token, head] = math.log(total)
            if sinks is not None:
                total += math.exp(float(sinks[head]))
            for power, record in zip(powers, records, strict=True):
                out[token, head] += power / total * record
    return out, lse


def small_segment(tokens, width, page, blocks, seed):
    generator = torch.Generator().manual_seed(seed)
    cache = packed.pack_records(random_values(blocks * page, seed), page)
    indices = torch.randint(-1, blocks * page, (tokens, width), generator=generator)
    lengths = torch.randint(0, width + 1, (tokens,), generator=generator)
    return Segment(cache, page, indices.int(), lengths.int())


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("extra", [False, True])
def test_reference_agrees_with_loops(sink, extra):
    tokens, heads = 5, 3
    q = random_values(tokens * heads, 9).view(tokens, heads, 512).bfloat16()
    window = small_segment(tokens, 7, 4, 3, 1)
    compressed = small_segment(tokens, 9, 2, 5, 2) if extra else None
    sinks = torch.tensor([0.5, -1.0, 2.0]) if sink else None
    got, lse = reference.sparse_mla(q, window, compressed, sinks, 512**-0.5)
    want, want_lse = by_loops(q, [s for s in (window, compressed) if s], sinks, 512**-0.5)
    assert reference.relative_norm(got, want) < 1e-13
    torch.testing.assert_close(lse, want_lse, rtol=1e-13, atol=1e-13)


def test_reference_is_the_same_in_chunks(monkeypatch):
    q = random_values(12, 3).view(6, 2, 512)
    window = small_segment(6, 16, 4, 4, 1)
    whole, _ = reference.sparse_mla(q, window, None, None, 0.05)
    monkeypatch.setattr(reference, "CHUNK_BYTES", 1)
    parts, _ = reference.sparse_mla(q, window, None, None, 0.05)
    torch.testing.assert_close(parts, whole, rtol=1e-14, atol=1e-15)


@pytest.fixture
def one_page():
    """64 records in one page, of which the value is the slot."""
    values = torch.arange(64.0)[:, None].expand(64, 512)
    return packed.pack_records(values, 64)


def attend(cache, indices, lengths=None, sinks=None, extra=None, q=0.0):
    q = torch.full((1, 1, 512), q)
    window = Segment(cache, 64, torch.tensor([indices]), lengths and torch.tensor(lengths))
    return reference.sparse_mla(q, window, extra, sinks, 512**-0.5)


def test_all_indices_invalid(one_page):
    out, lse = attend(one_page, [-1, -1, -7], sinks=torch.tensor([1.0]))
    assert (out == 0).all() and lse.item() == -math.inf


def test_zero_length(one_page):
    out, lse = attend(one_page, [3, 4], lengths=[0])
    assert (out == 0).all() and lse.item() == -math.inf


def test_zero_width(one_page):
    q = torch.ones(1, 1, 512)
    empty = Segment(one_page, 64, torch.zeros(1, 0, dtype=torch.int32))
    assert (reference.sparse_mla(q, empty, None, None, 1.0)[0] == 0).all()


def test_last_slot_of_the_last_page(one_page):
    two = torch.cat((one_page, one_page))
    two[1, 63 * 576 + 448 : 64 * 576] = torch.tensor([0x80, 0x3F] * 64, dtype=torch.uint8)
    out, lse = attend(two, [127])
    assert (out[..., :448] == 64.0).all()  # 63 has no e4m3 value
    assert (out[..., 448:] == 1.0).all() and lse.item() == 0.0


def test_candidates_past_the_length_are_ignored(one_page):
    assert torch.equal(attend(one_page, [2, 9], lengths=[1])[0], attend(one_page, [2])[0])


def test_slot_listed_twice_counts_twice(one_page):
    assert torch.allclose(attend(one_page, [3, 3, 6])[0], torch.tensor(4.0).double())


@pytest.mark.parametrize(("sink", "share"), [(-math.inf, 1.0), (0.0, 0.5), (math.inf, 0.0)])
def test_sink_takes_its_share(one_page, sink, share):
    """One candidate of logit 0 against a sink."""
    out, lse = attend(one_page, [8], sinks=torch.tensor([sink]))
    assert torch.allclose(out, torch.tensor(8.0 * share).double()) and lse.item() == 0.0


def test_both_segments_share_one_softmax(one_page):
    extra = Segment(one_page, 64, torch.tensor([[12]]))
    out, lse = attend(one_page, [2, 4], extra=extra, sinks=torch.tensor([0.0]))
    assert torch.allclose(out, torch.tensor((2 + 4 + 12) / 4).double())
    assert math.isclose(lse.item(), math.log(3))


def test_garbage_that_is_not_listed_does_not_matter(one_page):
    """Slot 0 stands in for invalid entries, and may hold NaN."""
    one_page[0, :448] = 0x7F
    out, _ = attend(one_page, [-1, 8, 0], lengths=[2])
    assert torch.allclose(out, torch.tensor(8.0).double())


def test_wrong_arguments_are_refused(one_page):
    with pytest.raises(ValueError, match="slot 64 is past the end of a cache of 64 records"):
        attend(one_page, [64])
    with pytest.raises(ValueError, match=r"lengths are \(2,\), need \[1\]"):
        attend(one_page, [0], lengths=[1, 1])


# Indexer logits.


def test_index_logits_agree_with_loops():
    generator = torch.Generator().manual_seed(4)
    tokens, heads, page, pages = 4, 3, 4, 3
    keys = torch.randn(5 * page, 128, generator=generator)
    pool = torch.full((5, 2000), 0x77, dtype=torch.uint8)
    cache = packed.pack_index_keys(keys, page, out=pool[:, 64:640])
    q = torch.randn(tokens, heads, 128, generator=generator).to(torch.float8_e4m3fn)
    table = torch.randint(0, 5, (tokens, pages), generator=generator, dtype=torch.int32)
    table[1, 1:] = 99  # past the context: never read
    lengths = torch.tensor([12, 4, 0, 7], dtype=torch.int32)
    weights = torch.randn(tokens, heads, generator=generator)
    got = reference.paged_index_logits(q, cache, page, table, lengths, weights)
    assert got.shape == (tokens, pages * page)
    for token in range(tokens):
        for column in range(pages * page):
            if column >= lengths[token]:
                assert got[token, column] == -math.inf
                continue
            block, row = int(table[token, column // page]), column % page
            data = cache[block, row * 128 : row * 128 + 128].tolist()
            scale_at = page * 128 + row * 4
            (scale,) = struct.unpack("<f", bytes(cache[block, scale_at : scale_at + 4].tolist()))
            want = 0.0
            for head in range(heads):
                dot = sum(
                    float(a) * e4m3(b) for a, b in zip(q[token, head].double(), data, strict=True)
                )
                want += float(weights[token, head]) * max(dot, 0.0) * scale
            assert math.isclose(float(got[token, column]), want, rel_tol=1e-12, abs_tol=1e-12)


# The measure.


def test_relative_norm_is_the_worst_row():
    want = torch.ones(1000, 4, dtype=torch.float64)
    got = want.clone()
    got[17, 2] = 3.0
    assert reference.relative_norm(got, want) == 1.0
    assert reference.relative_norm(want, want) == 0.0
    assert reference.relative_norm(torch.zeros(0, 4), torch.zeros(0, 4)) == 0.0


def test_relative_norm_of_zeros_and_nan():
    zero = torch.zeros(2, 4)
    assert reference.relative_norm(zero, zero) == 0.0
    assert reference.relative_norm(torch.full((2, 4), 1e-30), zero) == math.inf
    assert reference.relative_norm(torch.full((2, 4), math.nan), torch.ones(2, 4)) == math.inf
    with pytest.raises(ValueError, match="shapes differ"):
        reference.relative_norm(zero, zero[:1])
