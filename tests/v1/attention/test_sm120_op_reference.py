# SPDX-License-Identifier: Apache-2.0
"""The ops' references against float64 computations written otherwise: value by value."""

import math
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))

import sm120_fake_device as fake  # noqa: E402

reference = fake.load("sm120_op_reference")
hyper = fake.load("sm120_op_hyper")
gemm = fake.load("sm120_op_gemm")
logits_op = fake.load("sm120_op_logits")
packed = fake.packed


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(5)


def normal(rng, *shape):
    return torch.randn(shape, generator=rng, dtype=torch.float64)


def close(got, want):
    want = torch.as_tensor(want, dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def e2m1(code):
    """The value of one e2m1 code, from its definition."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def e4m3(byte):
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2 ** (exponent - 7)
    return -size if sign else size


def test_mxfp4_values(rng):
    data = torch.randint(256, (3, 32), generator=rng).to(torch.uint8)
    scales = torch.tensor([[127, 120], [130, 0], [254, 1]], dtype=torch.uint8)
    want = torch.zeros(3, 64, dtype=torch.float64)
    for row in range(3):
        for column in range(64):
            byte = int(data[row, column // 2])
            code = byte >> 4 if column % 2 else byte & 15
            want[row, column] = e2m1(code) * 2.0 ** (int(scales[row, column // 32]) - 127)
    assert torch.equal(reference.mxfp4_values(data, scales), want)


def test_mxfp8_values_and_nan_scale(rng):
    bytes_ = torch.randint(0, 127, (2, 64), generator=rng).to(torch.uint8)
    bytes_[1] += 128
    scales = torch.tensor([[127, 100], [140, 255]], dtype=torch.uint8)
    got = reference.mxfp8_values(bytes_.view(torch.float8_e4m3fn), scales)
    for row in range(2):
        for column in range(64):
            scale = int(scales[row, column // 32])
            value = float(got[row, column])
            if scale == 255:
                assert math.isnan(value)
            else:
                assert value == e4m3(int(bytes_[row, column])) * 2.0 ** (scale - 127)


def test_rms_norm(rng):
    x, weight = normal(rng, 3, 7), normal(rng, 7)
    want = []
    for row in x.tolist():
        size = math.sqrt(sum(v * v for v in row) / 7 + 0.25)
        want.append([v / size * w for v, w in zip(row, weight.tolist(), strict=True)])
    close(reference.rms_norm(x, weight, 0.25), want)


@pytest.mark.parametrize("shape", [(4, 12), (4, 3, 12)])
def test_rope(rng, shape):
    """As complex numbers: neighbours are real and imaginary part."""
    x, cos_sin = normal(rng, *shape), normal(rng, 9, 8)
    positions = torch.tensor([3, 0, 8, 3])
    got = reference.rope(x, positions, cos_sin)
    for token in range(4):
        rows = x[token].view(-1, 12).tolist()
        outs = got[token].view(-1, 12).tolist()
        for row, out in zip(rows, outs, strict=True):
            assert out[:4] == row[:4]
            for pair in range(4):
                angle = cos_sin[positions[token]]
                by = complex(float(angle[pair]), float(angle[4 + pair]))
                turned = complex(row[4 + 2 * pair], row[5 + 2 * pair]) * by
                assert math.isclose(out[4 + 2 * pair], turned.real, abs_tol=1e-12)
                assert math.isclose(out[5 + 2 * pair], turned.imag, abs_tol=1e-12)


def test_prefill_logits(rng):
    q, keys, weights = normal(rng, 4, 3, 6), normal(rng, 9, 6), normal(rng, 4, 3)
    starts, ends = torch.tensor([0, 0, 4, 7]), torch.tensor([1, 9, 8, 7])
    got = reference.prefill_logits(q, keys, weights, starts, ends)
    for row in range(4):
        for key in range(9):
            if not starts[row] <= key < ends[row]:
                assert float(got[row, key]) == -math.inf
                continue
            want = 0.0
            for head in range(3):
                dot = sum(float(q[row, head, d]) * float(keys[key, d]) for d in range(6))
                want += float(weights[row, head]) * max(dot, 0.0)
            assert math.isclose(float(got[row, key]), want, abs_tol=1e-12)


def test_hyper_connection(rng):
    tokens, m, dim, rounds = 2, 3, 5, 4
    residual = normal(rng, tokens, m, dim)
    fn, base = normal(rng, m * (m + 2), m * dim), normal(rng, m * (m + 2))
    scale = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)
    norm_eps, eps, factor = 0.1, 0.01, 2.0
    pre, post, mixture = reference.hyper_connection(
        residual, fn, scale, base, norm_eps, eps, factor, rounds
    )
    for token in range(tokens):
        x = [v for stream in residual[token].tolist() for v in stream]
        size = math.sqrt(sum(v * v for v in x) / len(x) + norm_eps)
        mixes = [sum(f * v for f, v in zip(row, x, strict=True)) / size for row in fn.tolist()]
        for i in range(m):
            one = 1 / (1 + math.exp(-(mixes[i] * 0.5 + float(base[i])))) + eps
            two = 1 / (1 + math.exp(-(mixes[m + i] * 2 + float(base[m + i])))) * factor
            assert math.isclose(float(pre[token, i]), one, rel_tol=1e-12)
            assert math.isclose(float(post[token, i]), two, rel_tol=1e-12)
        table = []
        for i in range(m):
            at = [2 * m + i * m + j for j in range(m)]
            row = [math.exp(mixes[k] * 3 + float(base[k])) for k in at]
            table.append([v / sum(row) + eps for v in row])
        for turn in range(rounds):
            if turn:
                table = [[v / (sum(row) + eps) for v in row] for row in table]
            sums = [sum(table[i][j] for i in range(m)) + eps for j in range(m)]
            table = [[table[i][j] / sums[j] for j in range(m)] for i in range(m)]
        close(mixture[token], table)


def test_hyper_post(rng):
    x, residual = normal(rng, 2, 5), normal(rng, 2, 3, 5)
    post, mixture = normal(rng, 2, 3), normal(rng, 2, 3, 3)
    want = torch.zeros(2, 3, 5, dtype=torch.float64)
    for t in range(2):
        for to in range(3):
            for d in range(5):
                value = float(post[t, to]) * float(x[t, d])
                for source in range(3):
                    value += float(mixture[t, source, to]) * float(residual[t, source, d])
                want[t, to, d] = value
    close(reference.hyper_post(x, residual, post, mixture), want)


@pytest.mark.parametrize("first", [6, 7])
def test_pooled_pairs(rng, first):
    rows, before = normal(rng, 5, 6), normal(rng, 6)
    got = reference.pooled_pairs(rows, before, range(first, first + 5))
    everything = [before.tolist(), *rows.tolist()]
    for token in range(5):
        for d in range(3):
            want = 0.0
            if (first + token) % 2:
                old, new = everything[token], everything[token + 1]
                weights = [math.exp(old[3 + d]), math.exp(new[3 + d])]
                want = (weights[0] * old[d] + weights[1] * new[d]) / sum(weights)
            assert math.isclose(float(got[token, d]), want, abs_tol=1e-12)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 12])
def test_block_scores(rng, length):
    logits = torch.randn(20, generator=rng)
    got = reference.block_scores(logits, length, 4).tolist()
    values = logits.tolist()
    want = [max(values[start : min(start + 4, length)]) for start in range(0, length, 4)]
    assert got == [*want[:-1], *[math.inf] * (length > 0)]


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 0.9), (5, 0.5), (2, 1.0), (8, 0.01)])
def test_sampling_probabilities(rng, top_k, top_p):
    logits = torch.randn(8, generator=rng)
    got = reference.sampling_probabilities(logits, top_k, top_p)
    order = sorted(range(8), key=lambda i: -float(logits[i]))[:top_k]
    sizes = [math.exp(float(logits[i])) for i in order]
    kept, reached = [], 0.0
    for place, size in zip(order, sizes, strict=True):
        if reached >= top_p:
            break
        kept.append(place)
        reached += size / sum(sizes)
    total = sum(math.exp(float(logits[i])) for i in kept)
    for place in range(8):
        want = math.exp(float(logits[place])) / total if place in kept else 0.0
        assert math.isclose(float(got[place]), want, abs_tol=1e-12)


# Expectations that are put together in an op's class.


def test_prenorm_expects_each_sum(rng):
    op = hyper.Prenorm(2, 40, 3, 4)
    given = op.inputs(rng)
    want = op.expected(given, {})
    for row in range(2):
        x = given["x"][row].tolist()
        assert math.isclose(float(want["sqrsum"].value[row, 0]), sum(v * v for v in x))
        for out in range(3):
            fn = given["fn"][out].tolist()
            value = sum(a * b for a, b in zip(x, fn, strict=True))
            assert math.isclose(float(want["out"].value[row, out]), value, abs_tol=1e-12)


def test_experts_expect_each_chosen_expert(rng):
    op = gemm.Experts(2, 2, 5, 128, 128)
    given = op.inputs(rng)
    got = {"x8": given["x"], "middle8": given["middle"]}
    want = op.expected(given, got)
    ids = given["ids"]
    assert set(ids.flatten().tolist()) <= {0, 2, 4}  # nobody chose 1 and 3
    assert all(len(set(row)) == 2 for row in ids.tolist())
    token, slot, row = 1, 0, 77
    expert = int(ids[token, slot])
    value = 0.0
    for k in range(128):
        byte = int(given["w2"][expert, row, k // 2])
        scale = 2.0 ** (int(given["s2"][expert, row, k // 32]) - 127)
        weight = e2m1(byte >> 4 if k % 2 else byte & 15) * scale
        value += weight * float(given["middle"][token, slot, k])
    assert math.isclose(float(want["second"].value[token, slot, row]), value, rel_tol=1e-12)


def test_packed_scales_are_read_from_the_low_byte():
    packed_scales = torch.tensor([[0x7F807E7D, 0x81]], dtype=torch.int32)
    got = gemm._unpacked(packed_scales, 5)
    assert got.tolist() == [[0.25, 0.5, 2.0, 1.0, 4.0]]


def test_gathered_keys_are_read_where_they_lie(rng):
    """Each key's bytes, found by hand in its block."""
    op = logits_op.PrefillLogits(6, 2, 16, 40, 9216)
    given = op.inputs(rng)
    want = op.expected(given, {})["keys"].value
    lengths = given["bounds"].diff().tolist()
    at = 0
    for request, length in enumerate(lengths):
        for key in (0, 15, 16, length - 1):
            block = int(given["table"][request, key // 16])
            data = given["cache"][block].tolist()
            row = data[key % 16 * 128 : key % 16 * 128 + 128]
            start = 16 * 128 + key % 16 * 4
            scale = torch.tensor(data[start : start + 4], dtype=torch.uint8).view(torch.float32)
            values = [e4m3(byte) * float(scale) for byte in row]
            assert want[at + key].tolist() == values
        at += length
