# SPDX-License-Identifier: Apache-2.0
"""The CPU stand-in for the device's primitives: it computes as they do, and finds misuse."""

import ctypes
import re

import numpy as np
import pytest

from tests.v1.attention import sm120_cuda_on_cpu

pytestmark = pytest.mark.skipif(
    sm120_cuda_on_cpu.compiler() is None, reason="needs a C++ compiler (g++ or c++)"
)

SEEDS = (0, 1, 2, 3)  # forward, reverse, two random orders
LANES = np.arange(32)
G, Q = LANES // 4, LANES % 4

SOURCE = """
#include "sm120_emulated_cuda.h"
#define RUN(name, grid_x, grid_y, threads, bytes, ...)                                    \\
  extern "C" const char* name(unsigned seed, const u32* in, u32* out, int way) {          \\
    static std::string error;                                                             \\
    error = run_grid(grid_x, grid_y, threads, bytes, seed, [&] {                          \\
      u32 i = thread_index();                                                             \\
      u32* shared = reinterpret_cast<u32*>(shared_memory());                              \\
      (void)shared, (void)i, (void)way;                                                   \\
      __VA_ARGS__                                                                         \\
    });                                                                                   \\
    return error.c_str();                                                                 \\
  }
KERNEL(32, 1) multiply(const u32* in, u32* out) {
  u32 i = thread_index(), a[4]; float c[4];
  for (int k = 0; k < 4; ++k) a[k] = in[10 * i + k], c[k] = bits_float(in[10 * i + 6 + k]);
  mma(c, a, in[10 * i + 4], in[10 * i + 5]);
  for (int k = 0; k < 4; ++k) out[4 * i + k] = float_bits(c[k]);
}
DEVICE void two_places(u32 i) {
  if (i % 2) sync_warp();
  else sync_warp();
}
RUN(run_mma, 1, 1, 32, 0, multiply(in, out);)
RUN(run_transposed, 1, 1, 32, 0, out[i] = transposed(in[i]);)
RUN(run_load_matrices, 1, 1, 32, 1024,
  u32 at = i * 5 % 32;  // rows anywhere
  for (int k = 0; k < 4; ++k) shared[4 * (way == 1 ? (at + 5) % 32 : at) + k] = in[4 * i + k];
  if (way != 1) sync_warp();
  u32 r[4];
  load_matrices(r, shared + (way == 2 ? 4 * at + 2 : way == 3 ? 4 * at + 256 : 4 * at));
  for (int k = 0; k < 4; ++k) out[4 * i + k] = r[k];)
RUN(run_words, 1, 1, 32, 0,
  for (u32 k = i; k < u32(way); k += 32) {
    const u32* w = in + 3 * k;
    out[4 * k] = multiply_bf16x2(w[0], w[1]);
    out[4 * k + 1] = pack_bf16(bits_float(w[0]), bits_float(w[1]));
    out[4 * k + 2] = permute(w[0], w[1], w[2]);
  })
RUN(run_warp, 1, 1, 64, 0,
  u32* o = out + 8 * i;
  o[0] = float_bits(shuffle_xor(float(i), 5)), o[1] = u32(shuffle(i64(i) - 100, 31 - i % 32));
  i64 wide = shuffle(i64(i) << 32 | 7, 3); o[2] = u32(wide >> 32), o[3] = u32(wide);
  o[4] = ballot(i == 40) != 0, o[5] = all_in_warp(i != 40), o[6] = ballot(i % 32 % 3 == 0);
  o[7] = float_bits(shuffle(float(i), 9));)
RUN(run_copy, 1, 1, 32, 512,
  const u32* from = in + 4 * i; u32* to = shared + 4 * i;
  from += way == 1, to += way == 2 ? 1 : way == 3 ? 32 : 0;
  if (way == 5) to[0] = 5;  // poisoned by the copy, until the wait
  copy_async<16>(to, from, i % 2 == 0);
  copy_commit();
  if (way == 4) { copy_async<4>(to, from + 3, true); copy_commit(); }
  if (way >= 4) { copy_wait<1>(); out[128 + i] = to[1]; }
  if (way != 5) copy_wait<0>();
  for (int k = 0; k < 4; ++k) out[4 * i + k] = to[k];)
RUN(run_misuse, 1, 1, 64, 1024,
  if ((way == 0 && i == 37) || (way == 1 && i < 32)) return;
  if (way == 2 && i == 5) ballot(true);
  if (way == 3) i == 5 ? all_in_warp(true) : ballot(true) != 0;
  if (way == 4) permute(1, 2, 0x8000);
  if (way == 5) load(reinterpret_cast<const u32x4*>(in + 1)); else if (way == 7) throw 1;
  if (way == 6 && i == 0) shared[256] = 1; else if (way == 8) two_places(i);
  sync_block();)
// Each thread reads what the next thread (way 0), or that of the next warp, wrote.
RUN(run_race, 2, 2, 256, 1024,
  u32 block = block_y() * 2 + block_x();
  u32 other = way % 2 ? (i + 32) % 256 : i / 32 * 32 + (i + 1) % 32;
  shared[i] = block * 1000 + i;
  if (way == 0) sync_warp();
  if (way == 1) sync_block();
  out[block * 256 + i] = shared[other];
  if (blocks_y() != 2 || reinterpret_cast<size_t>(shared) % 1024) out[0] = 12345;)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    library = sm120_cuda_on_cpu.build(SOURCE, tmp_path_factory.mktemp("emulated"))

    def call(name, inputs, count, way=0, seed=0):
        """The words written, and the error text."""
        inputs = np.ascontiguousarray(inputs, np.uint32)
        room = np.zeros(inputs.size + 8, np.uint32)  # its 16-byte aligned part is used
        start = -room.ctypes.data % 16 // 4
        room[start : start + inputs.size] = inputs.ravel()
        out = np.zeros(count, np.uint32)
        function = getattr(library, name)
        function.restype = ctypes.c_char_p
        pointers = [ctypes.c_void_p(x.ctypes.data) for x in (room[start:], out)]
        return out, function(seed, *pointers, way).decode()

    return call


def pairs(low, high):
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


def widened(halves):
    return (halves.astype(np.uint32) << 16).view(np.float32)


def rounded(exact):
    """The bf16 bits of these float64, to nearest even, by another way than the emulator's."""
    with np.errstate(all="ignore"):
        exponent = np.maximum(np.frexp(exact)[1] - 1, -126)
        unit = np.ldexp(1.0, exponent - 7)
        value = np.where(np.isfinite(exact), np.rint(exact / unit) * unit, exact)
        bits = value.astype(np.float32).view(np.uint32) >> 16
    return np.where(np.isnan(exact), 0x7FFF, bits)


@pytest.mark.parametrize("seed", SEEDS)
def test_mma(run, seed):
    random = np.random.default_rng(seed)
    a, b = (random.standard_normal(s).astype(np.float32) for s in ((16, 16), (16, 8)))
    a, b = (x.view(np.uint32) >> 16 for x in (a, b))
    c = random.standard_normal((16, 8)).astype(np.float32)
    words = [pairs(a[G + r, 2 * Q + k], a[G + r, 2 * Q + k + 1]) for k in (0, 8) for r in (0, 8)]
    words += [pairs(b[2 * Q + k, G], b[2 * Q + k + 1, G]) for k in (0, 8)]
    places = [(G + r, 2 * Q + n) for r in (0, 8) for n in (0, 1)]
    words += [c[place].view(np.uint32) for place in places]
    out, error = run("run_mma", np.stack(words, 1), 128, seed=seed)
    assert error == ""
    expected = widened(a).astype(np.float64) @ widened(b) + c
    expected = np.stack([expected[place] for place in places], 1).ravel()
    np.testing.assert_allclose(out.view(np.float32), expected, rtol=1e-5, atol=1e-5)


def test_transposed(run):
    m = np.arange(64).reshape(8, 8) + 0x8000
    out, error = run("run_transposed", pairs(m[G, 2 * Q], m[G, 2 * Q + 1]), 32)
    assert error == ""
    assert (out == pairs(m[2 * Q, G], m[2 * Q + 1, G])).all()


def test_load_matrices(run):
    words = np.arange(128).reshape(4, 8, 4) + 0x12340000  # matrix, row, word
    expected = words.transpose(1, 2, 0).ravel()  # row g, word q: lane 4g+q
    out, error = run("run_load_matrices", words, 128)
    assert error == "" and (out == expected).all()
    # Rows written by another lane, and no sync_warp: wrong in one order of the lanes at least.
    results = [run("run_load_matrices", words, 128, 1, seed)[0] for seed in SEEDS]
    assert any((out != expected).any() for out in results)
    assert "load_matrices" in run("run_load_matrices", words, 128, 2)[1]
    assert "not in shared memory" in run("run_load_matrices", words, 128, 3)[1]


def test_words(run):
    edges = [0, 1, 2, 3, 0x3F, 0x7F, 0x80, 0x81, 0x100, 0x1F80, 0x2000, 0x3F00, 0x3F7F, 0x3F80]
    edges += [0x3F81, 0x3FFF, 0x4000, 0x5F80, 0x5FFF, 0x7F00, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0]
    edges = np.array(edges + [x | 0x8000 for x in edges])
    random = np.random.default_rng(1)
    left, right = np.meshgrid(edges, edges)
    left = np.concatenate([left.ravel(), random.integers(0, 1 << 16, 20000)])
    right = np.concatenate([right.ravel(), random.integers(0, 1 << 16, 20000)])
    # As a word of fp32, the first half is the upper one, and the second the bits to round.
    a, b = pairs(right, left), pairs(left, right)
    selector = sum(random.integers(0, 8, left.size) << 4 * i for i in range(4))
    out, error = run("run_words", np.stack([a, b, selector], 1), 4 * left.size, left.size)
    assert error == ""
    out = out.reshape(-1, 4).T
    with np.errstate(all="ignore"):
        product = rounded(widened(left).astype(np.float64) * widened(right))
        assert (out[0] == pairs(product, product)).all()
        floats = [rounded(x.view(np.float32).astype(np.float64)) for x in (a, b)]
    assert (out[1] == pairs(*floats)).all()
    places = np.stack([selector >> 4 * i & 7 for i in range(4)], 1)
    chosen = np.take_along_axis(np.stack([a, b], 1).view(np.uint8).reshape(-1, 8), places, 1)
    assert (out[2] == np.ascontiguousarray(chosen).view(np.uint32).ravel()).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_shuffles_and_votes(run, seed):
    out, error = run("run_warp", [0], 512, seed=seed)
    assert error == ""
    out, i = out.reshape(64, 8).T, np.arange(64)
    assert (out[0].view(np.float32) == (i ^ 5)).all()
    assert (out[1].view(np.int32) == i // 32 * 32 + 31 - i % 32 - 100).all()
    assert (out[2] == i // 32 * 32 + 3).all() and (out[3] == 7).all()
    assert (out[4] == i // 32).all() and (out[5] == 1 - i // 32).all()
    assert (out[6] == 0x49249249).all() and (out[7].view(np.float32) == i // 32 * 32 + 9).all()


def test_copy_async(run):
    words = np.arange(128).reshape(32, 4) + 1
    expected = np.where(LANES[:, None] % 2, 0, words)
    out, error = run("run_copy", words, 128)
    assert error == "" and (out.reshape(32, 4) == expected).all()
    out, error = run("run_copy", words, 160, 5)  # a wait for all groups but the last one
    assert error == "" and (out == 0xFFFFFFFF).all()
    out, error = run("run_copy", words, 160, 4)  # two groups, and a wait for the first one
    assert error == "" and (out[128:] == expected[:, 1]).all()
    assert (out[:128].reshape(32, 4)[:, 0] == words[:, 3]).all()
    assert all("copy_async (line" in run("run_copy", words, 128, way)[1] for way in (1, 2))
    assert "not in shared memory: offset 512" in run("run_copy", words, 128, 3)[1]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "way, said",
    [
        (0, "warp 1, lane .*its end.*sync_block|sync_block on line .*its end"),
        (1, "sync_block: warp 1 waits in it and warp 0 has ended"),
        (2, "ballot on line .*sync_block|sync_block on line .*ballot"),
        (3, "ballot on line .*all_in_warp|all_in_warp on line .*ballot"),
        (4, "permute .*selector 32768"),
        (5, "load .*not aligned to 16"),
        (6, r"block \(0, 0\): a write just outside shared memory"),
        (7, "the kernel threw"),
        (8, "it reached sync_warp on line .* sync_warp on line"),
    ],
)
def test_misuse_is_an_error_text(run, way, said, seed):
    _, error = run("run_misuse", [0] * 8, 1, way, seed)
    assert re.search(said, error), error
    assert run("run_misuse", [0] * 8, 1, 9, seed)[1] == ""  # and the next run is clean


def test_a_missing_sync_shows(run):
    block, i = np.arange(4)[:, None] * 1000, np.arange(256)
    near, far = (block + i // 32 * 32 + (i + 1) % 32).ravel(), (block + (i + 32) % 256).ravel()
    for way, expected in ((0, near), (1, far)):
        results = [run("run_race", [0], 1024, way, seed) for seed in SEEDS]
        assert all(error == "" and (out == expected).all() for out, error in results)
        results = [run("run_race", [0], 1024, way + 2, seed)[0] for seed in SEEDS]
        assert all((out != expected).any() for out in results)
        assert (results[0] != results[1]).any()
