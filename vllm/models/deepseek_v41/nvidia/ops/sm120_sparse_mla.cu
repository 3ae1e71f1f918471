// SPDX-License-Identifier: Apache-2.0
// Sparse MLA over fp8_ds_mla records in CUDA C++: sm120_sparse_mla.py says what it computes.
//
// One source for sm_90 and sm_120 (mma.sync and cp.async: no wgmma, no bulk copies), compiled by
// NVRTC when first used, without headers. With SM120_EMULATED it is C++ for a CPU: tests run it.
//
// A record's 512 values are eight slices of 64: seven of e4m3 with a scale each, and the bf16
// RoPE part. Eight warps own a slice each, of the query, of each record and of the output. A
// thread copies the 16 bytes of each record that it needs itself, several steps ahead; it
// turns them into bf16 once, in the registers that tensor cores want for the logits, and
// transposes these for the output: a record's values never pass through shared memory but as
// the raw bytes. Warps exchange the logits alone: each adds up what all found for two heads of
// every 16, does their softmax, and hands the weights back.

#ifdef SM120_EMULATED
#include "sm120_emulated_cuda.h"
#else

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

struct alignas(16) u32x4 {
  u32 x, y, z, w;
};
struct alignas(16) f32x4 {
  float x, y, z, w;
};
struct alignas(8) f32x2 {
  float x, y;
};

#define DEVICE __device__ __forceinline__
#define KERNEL(threads, blocks) \
  extern "C" __global__ void __launch_bounds__(threads, blocks)

extern __shared__ __align__(1024) u8 dynamic_shared[];

DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_x() { return blockIdx.x; }
DEVICE u32 block_y() { return blockIdx.y; }
DEVICE u32 blocks_y() { return gridDim.y; }
DEVICE u8* shared_memory() { return dynamic_shared; }
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE u32 shared_address(const void* at) { return u32(__cvta_generic_to_shared(at)); }

// cp.async; nothing is read where not valid, and zeros are written.
template <int BYTES>
DEVICE void copy_async(void* shared, const void* global, bool valid) {
  u32 bytes = valid ? BYTES : 0;
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)),
                 "l"(global), "n"(BYTES), "r"(bytes)
                 : "memory");
  }
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// c += a b: a is 16x16 by rows, b 16x8 by columns, both bf16.
DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// An 8x8 matrix of 16-bit values, a row of which four lanes hold, transposed.
DEVICE u32 transposed(u32 row) {
  u32 column;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(row));
  return column;
}
DEVICE void load_matrices(u32 (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared))
               : "memory");
}
DEVICE u32 multiply_bf16x2(u32 a, u32 b) {
  u32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
DEVICE u32 pack_bf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
DEVICE u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
DEVICE float shuffle_xor(float v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
DEVICE float shuffle(float v, int lane) { return __shfl_sync(~0u, v, lane); }
DEVICE i64 shuffle(i64 v, int lane) { return __shfl_sync(~0u, v, lane); }
DEVICE u32 ballot(bool v) { return __ballot_sync(~0u, v); }
DEVICE bool all_in_warp(bool v) { return __all_sync(~0u, v); }
DEVICE float exp2_fast(float v) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
}
DEVICE float log2_fast(float v) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
}
DEVICE float maximum(float a, float b) { return fmaxf(a, b); }
DEVICE float bits_float(u32 bits) { return __uint_as_float(bits); }
template <class T>
DEVICE T load(const T* at) {
  return *at;
}
// Programmatic dependent launch: the next kernel of the stream may start, and waits.
DEVICE void let_next_grid_start() { asm volatile("griddepcontrol.launch_dependents;"); }
DEVICE void wait_for_previous_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

#endif

// Candidates of one cache.
struct Segment {
  const u8* cache;     // page 0
  const i32* indices;  // [T, width]: slots; others than 0 to slots - 1 are skipped
  const i32* lengths;  // [T]; null: every entry counts
  i64 stride;          // bytes from page to page, a multiple of 16
  i64 row;             // entries from token to token
  i32 width;           // 0: there is no such cache
  u32 page;            // records
  u32 magic;           // slot / page = slot * magic >> shift, for slots below 2**31
  u32 shift;
  u32 slots;
  u32 unused;
};

// One call; as sm120_sparse_mla_cuda.py packs it.
struct Call {
  Segment segments[2];
  const u16* q;        // bf16 [T, heads, 512], as out: rows are multiples of 16 B
  u16* out;
  const float* sinks;  // [heads] or null
  float* lse;          // [T, heads] or null
  float* parts;        // splits > 1: [T, splits, heads, 512], and then [T, splits, heads]
  i64 q_token, q_head, out_token, out_head;  // values
  float scale_log2;    // what q k is multiplied by, times log2(e)
  i32 heads;
  i32 splits;
  i32 head_blocks;
};

constexpr int WARPS = 8;
constexpr int SLICE = 64;        // values of a record that a warp owns
constexpr int DATA_BYTES = 576;  // of a record: 448 of e4m3, 64 bf16; scales lie apart
constexpr int STEP = 32;         // records
constexpr int TILES_8 = STEP / 8;
constexpr int STAGES = 2;  // of copies: one step is under way while one is computed
constexpr int MERGE_GROUPS = 4;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
DEVICE float negative_infinity() { return bits_float(0xff800000u); }

// Where things lie in shared memory. TILES: of 16 heads.
template <int TILES>
struct Layout {
  static constexpr int WEIGHTS = STEP + 8;  // bf16 of a head's row: a multiple of 16 B
  // A warp's logits of 16 heads take as much as its bytes of a step's records, and take
  // their place, once these are in registers. With more heads they have their own.
  static constexpr bool SHARED = TILES == 1;
  static constexpr int raw = 0;
  static constexpr int scales = raw + STAGES * STEP * DATA_BYTES;
  static constexpr int logits = scales + WARPS * STAGES * STEP * 4;
  static constexpr int weights = logits + (SHARED ? 0 : WARPS * TILES * 16 * STEP * 4);
  static constexpr int shrinks = weights + TILES * 16 * WEIGHTS * 2;
  static constexpr int factors = shrinks + TILES * 16 * 4;
  static constexpr int bytes = factors + TILES * 16 * 4;

  // A warp's logits of a tile, [16][STEP].
  static DEVICE float* logits_of(u8* shared, u32 warp, int tile, int stage) {
    u32 rope = warp == WARPS - 1 ? 2 : 1;
    u32 at = SHARED ? raw + (warp * STAGES + rope * stage) * (STEP * SLICE)
                    : logits + (warp * TILES + tile) * (16 * STEP * 4);
    return reinterpret_cast<float*>(shared + at);
  }
  // Where in them: rows are permuted, so that neither writing nor reading meets a bank twice.
  static DEVICE u32 logit(u32 head, u32 record) {
    return head * STEP + (record ^ head % 4 * 8);
  }
};

// What the sink leaves of the weights.
DEVICE float kept(float sink_log2, float lse_log2) {
  return lse_log2 == negative_infinity() ? 0.f : 1.f / (1.f + exp2_fast(sink_log2 - lse_log2));
}

// Four e4m3 values as two pairs of bf16, scaled: bytes 1 and 3, bytes 0 and 2. An e4m3's
// exponent and mantissa in a bf16's place are its value / 2**120. NaN (0x7f) becomes 480.
DEVICE void dequantise(u32 bytes, u32 scale, u32& odd, u32& even) {
  odd = ((bytes >> 4) & 0x07f007f0u) | (bytes & 0x80008000u);
  even = ((bytes << 4) & 0x07f007f0u) | ((bytes << 8) & 0x80008000u);
  odd = multiply_bf16x2(multiply_bf16x2(odd, 0x7b807b80u), scale);
  even = multiply_bf16x2(multiply_bf16x2(even, 0x7b807b80u), scale);
}

// A UE8M0 byte as a pair of equal bf16: 2**(byte - 127); 0 is subnormal, 255 is NaN.
DEVICE u32 scale_pair(u32 byte) {
  u32 bits = byte == 0 ? 0x0040u : byte == 255 ? 0x7fc0u : byte << 7;
  return bits | bits << 16;
}

// One warp's slice of the records.
struct Gather {
  u8* raw;
  u32* scales;
  u32 warp, lane;

  DEVICE Gather(u8* shared_raw, u8* shared_scales) {
    warp = thread_index() / 32;
    lane = thread_index() % 32;
    raw = shared_raw + warp * (STAGES * STEP * SLICE);
    scales = reinterpret_cast<u32*>(shared_scales) + warp * (STAGES * STEP);
  }
  DEVICE bool rope() const { return warp == WARPS - 1; }

  // Starts copying a step's records, each lane knowing one's slot: -1 is none.
  DEVICE void start(int stage, const Segment& from, i32 slot) const {
    bool valid = slot >= 0;
    u32 index = valid ? u32(slot) : 0u;
    u32 block = u32(u64(index) * from.magic >> from.shift);
    u32 row = index - block * from.page;
    const u8* page = from.cache + i64(block) * from.stride;
    const u8* scale = page + i64(from.page) * DATA_BYTES + row * 8 + (warp & 4);
    copy_async<4>(scales + stage * STEP + lane, scale, valid);
    i64 record = valid ? reinterpret_cast<i64>(page + i64(row) * DATA_BYTES) : 0;
    u32 part = lane % 4;
#pragma unroll
    for (int tile = 0; tile < TILES_8; ++tile) {
      i64 at = shuffle(record, tile * 8 + lane / 4);
      bool some = at != 0;
      const u8* data = some ? reinterpret_cast<const u8*>(at) : from.cache;
      if (rope()) {
        u8* to = raw + stage * (STEP * SLICE * 2) + (tile * 32 + lane) * 16;
        copy_async<16>(to, data + 448 + part * 32, some);
        copy_async<16>(to + STEP * SLICE, data + 448 + part * 32 + 16, some);
      } else {
        u8* to = raw + stage * (STEP * SLICE) + (tile * 32 + lane) * 16;
        copy_async<16>(to, data + warp * SLICE + part * 16, some);
      }
    }
  }

  // A step's records as bf16: of record 8 * tile + lane / 4, columns 16 * (lane % 4) + 4 * t
  // + 1 and + 3 in [tile][t][0], + 0 and + 2 in [tile][t][1].
  DEVICE void values(int stage, u32 (&found)[TILES_8][4][2]) const {
#pragma unroll
    for (int tile = 0; tile < TILES_8; ++tile) {
      if (rope()) {
        const u8* at = raw + stage * (STEP * SLICE * 2) + (tile * 32 + lane) * 16;
        u32x4 a = load(reinterpret_cast<const u32x4*>(at));
        u32x4 b = load(reinterpret_cast<const u32x4*>(at + STEP * SLICE));
        u32 words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          found[tile][t][0] = permute(words[2 * t], words[2 * t + 1], 0x7632);
          found[tile][t][1] = permute(words[2 * t], words[2 * t + 1], 0x5410);
        }
      } else {
        const u8* at = raw + stage * (STEP * SLICE) + (tile * 32 + lane) * 16;
        u32x4 a = load(reinterpret_cast<const u32x4*>(at));
        u32 four = load(scales + stage * STEP + tile * 8 + lane / 4);
        u32 scale = scale_pair(four >> (warp % 4 * 8) & 255);
        u32 words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int t = 0; t < 4; ++t)
          dequantise(words[t], scale, found[tile][t][0], found[tile][t][1]);
      }
    }
  }
};

// One split of one token's candidates, for 16 * TILES heads: grid (splits * head_blocks, T).
template <int TILES>
DEVICE void candidates(const Call& call) {
  using At = Layout<TILES>;
  u8* shared = shared_memory();
  u16* weights = reinterpret_cast<u16*>(shared + At::weights);
  float* shrinks = reinterpret_cast<float*>(shared + At::shrinks);
  float* factors = reinterpret_cast<float*>(shared + At::factors);
  Gather gather(shared + At::raw, shared + At::scales);
  const u32 warp = gather.warp, lane = gather.lane;
  const u32 row = lane / 4, part = lane % 4;

  if (call.splits > 1) let_next_grid_start();  // the merge, which waits
  const i64 token = block_y();
  const i32 split = block_x() / call.head_blocks;
  const i32 first_head = (block_x() - split * call.head_blocks) * (16 * TILES);

  // Steps are counted by width, so that indices are read without waiting for lengths.
  i32 lengths[2], steps[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const Segment& segment = call.segments[n];
    steps[n] = (segment.width + STEP - 1) / STEP;
    lengths[n] = segment.width;
    if (segment.width > 0 && segment.lengths != nullptr)
      lengths[n] = load(segment.lengths + token);
  }
  const i32 all = steps[0] + steps[1];
  const i32 each = (all + call.splits - 1) / call.splits;
  const i32 first = split * each;
  const i32 last = first + each < all ? first + each : all;

  // The lane's candidate of a step; -1 past the width, or past the row's length. Not looked
  // at here, or the warp would wait for it.
  auto slot_of = [&](i32 step, bool by_length) -> i32 {
    const bool second = step >= steps[0];
    const Segment& segment = call.segments[second];
    const i32 column = (second ? step - steps[0] : step) * STEP + i32(lane);
    const i32 length = second ? lengths[1] : lengths[0];
    const bool some = step < last && column < segment.width && (!by_length || column < length);
    return some ? load(segment.indices + token * segment.row + column) : -1;
  };
  // Starts a step's copies; returns which of its records are valid.
  auto start = [&](int stage, i32 step, i32 slot) -> u32 {
    const Segment& segment = call.segments[step >= steps[0]];
    const bool some = u32(slot) < segment.slots;
    const u32 valid = ballot(some);
    if (valid != 0) gather.start(stage, segment, some ? slot : -1);
    copy_commit();
    return valid;
  };
  // Both without waiting for lengths.
  i32 now = slot_of(first, false), slot = slot_of(first + 1, false);

  // The query in the order of Gather::values.
  u32 query[TILES][4][4];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      i32 head = first_head + tile * 16 + half * 8 + i32(row);
      const u16* at = call.q + token * call.q_token + head * call.q_head + warp * SLICE + part * 16;
      u32x4 a = {0, 0, 0, 0}, b = {0, 0, 0, 0};
      if (head < call.heads) {
        a = load(reinterpret_cast<const u32x4*>(at));
        b = load(reinterpret_cast<const u32x4*>(at + 8));
      }
      u32 words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        query[tile][t][half] = permute(words[2 * t], words[2 * t + 1], 0x7632);
        query[tile][t][half + 2] = permute(words[2 * t], words[2 * t + 1], 0x5410);
      }
    }
  }

  auto within = [&](i32 step) -> bool {
    const bool second = step >= steps[0];
    return (second ? step - steps[0] : step) * STEP + i32(lane) < (second ? lengths[1] : lengths[0]);
  };
  if (!within(first)) now = -1;
  if (!within(first + 1)) slot = -1;
  u32 next_valid = start(0, first, now);

  float output[TILES][4][2][4];
  float largest[TILES], total[TILES];  // of head 16 * tile + 2 * warp + lane / 16
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    largest[tile] = negative_infinity();
    total[tile] = 0.f;
#pragma unroll
    for (int n = 0; n < 32; ++n) output[tile][n / 8][n / 4 % 2][n % 4] = 0.f;
  }

  int stage = 1;
  for (i32 step = first; step < last; ++step) {
    stage ^= 1;
    const u32 valid = next_valid;
    copy_wait<0>();
    sync_warp();  // scales are copied by other lanes
    u32 values[TILES_8][4][2];
    if (valid != 0) gather.values(stage, values);
    // Into the other stage, where nobody reads since the last barrier.
    next_valid = start(stage ^ 1, step + 1, slot);
    slot = slot_of(step + 2, true);
    if (valid == 0) continue;  // in every warp
    sync_warp();  // all lanes have their values: logits may take their place

#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      float* to = At::logits_of(shared, warp, tile, stage);
#pragma unroll
      for (int near = 0; near < TILES_8; ++near) {
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int t = 0; t < 4; ++t)
          mma(sum, query[tile][t], values[near][t][0], values[near][t][1]);
        f32x2* upper = reinterpret_cast<f32x2*>(to + At::logit(row, near * 8 + part * 2));
        f32x2* lower = reinterpret_cast<f32x2*>(to + At::logit(row + 8, near * 8 + part * 2));
        *upper = {sum[0], sum[1]};
        *lower = {sum[2], sum[3]};
      }
    }
    sync_block();

#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const u32 mine = warp * 2 + lane / 16;
      const u32 head = tile * 16 + mine;
      const u32 record = lane % 16 * 2;
      f32x2 x = {0.f, 0.f};
#pragma unroll
      for (int from = 0; from < WARPS; ++from) {
        const float* at = At::logits_of(shared, from, tile, stage) + At::logit(mine, record);
        const f32x2 part_of = load(reinterpret_cast<const f32x2*>(at));
        x.x += part_of.x;
        x.y += part_of.y;
      }
      x.x = valid >> record & 1 ? x.x * call.scale_log2 : negative_infinity();
      x.y = valid >> record & 2 ? x.y * call.scale_log2 : negative_infinity();
      float most = maximum(largest[tile], maximum(x.x, x.y));
#pragma unroll
      for (int mask = 8; mask > 0; mask /= 2) most = maximum(most, shuffle_xor(most, mask));
      const float finite = most == negative_infinity() ? 0.f : most;
      const float shrink = exp2_fast(largest[tile] - finite);
      largest[tile] = most;
      x.x = exp2_fast(x.x - finite);
      x.y = exp2_fast(x.y - finite);
      total[tile] = total[tile] * shrink + (x.x + x.y);
      *reinterpret_cast<u32*>(weights + head * At::WEIGHTS + record) = pack_bf16(x.x, x.y);
      if (lane % 16 == 0) shrinks[head] = shrink;
    }
    sync_block();

#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const float upper = shrinks[tile * 16 + row], lower = shrinks[tile * 16 + 8 + row];
      if (!all_in_warp(upper == 1.f && lower == 1.f)) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          output[tile][n / 2][n % 2][0] *= upper;
          output[tile][n / 2][n % 2][1] *= upper;
          output[tile][n / 2][n % 2][2] *= lower;
          output[tile][n / 2][n % 2][3] *= lower;
        }
      }
    }
#pragma unroll
    for (int pair = 0; pair < STEP / 16; ++pair) {
      u32 weight[TILES][4];
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
        load_matrices(weight[tile], weights + (tile * 16 + lane % 16) * At::WEIGHTS + pair * 16 +
                                        lane / 16 * 8);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const u32 b0 = transposed(values[2 * pair][n / 2][n % 2]);
        const u32 b1 = transposed(values[2 * pair + 1][n / 2][n % 2]);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) mma(output[tile][n / 2][n % 2], weight[tile], b0, b1);
      }
    }
  }

#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    float sum = total[tile];
#pragma unroll
    for (int mask = 8; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    const bool some = sum > 0.f;
    const float lse_log2 = some ? largest[tile] + log2_fast(sum) : negative_infinity();
    float factor = some ? 1.f / sum : 0.f;
    const u32 at = tile * 16 + warp * 2 + lane / 16;
    const i32 head = first_head + i32(at);
    if (lane % 16 == 0 && head < call.heads) {
      if (call.splits > 1) {
        float* lses = call.parts + i64(blocks_y()) * call.splits * call.heads * 512;
        lses[(token * call.splits + split) * call.heads + head] = lse_log2;
      } else {
        if (call.sinks != nullptr) factor *= kept(load(call.sinks + head) * LOG2_E, lse_log2);
        if (call.lse != nullptr) call.lse[token * call.heads + head] = lse_log2 * LN_2;
      }
    }
    if (lane % 16 == 0) factors[at] = factor;
  }
  sync_block();

#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 at = tile * 16 + half * 8 + i32(row);
      const i32 head = first_head + at;
      if (head >= call.heads) continue;
      const float factor = factors[at];
      const i32 column = warp * SLICE + part * 16;
      float v[16];
#pragma unroll
      for (int n = 0; n < 16; ++n)
        v[n] = output[tile][n / 4][1 - n % 2][half * 2 + n % 4 / 2] * factor;
      if (call.splits > 1) {
        f32x4* to = reinterpret_cast<f32x4*>(call.parts);
        to += ((token * call.splits + split) * call.heads + head) * 128 + warp * 4 + part;
#pragma unroll
        for (int n = 0; n < 4; ++n)
          to[n * 32] = {v[4 * n], v[4 * n + 1], v[4 * n + 2], v[4 * n + 3]};
      } else {
        u16* to = call.out + token * call.out_token + head * call.out_head + column;
        u32 packed[8];
#pragma unroll
        for (int n = 0; n < 8; ++n) packed[n] = pack_bf16(v[2 * n], v[2 * n + 1]);
#pragma unroll
        for (int n = 0; n < 2; ++n)
          reinterpret_cast<u32x4*>(to)[n] = {packed[4 * n], packed[4 * n + 1], packed[4 * n + 2],
                                             packed[4 * n + 3]};
      }
    }
  }
}

// The splits of one token and head, and then the sink: grid (heads, T). Four parts of the
// splits are added up side by side; always the same, so that equal inputs give equal bits.
DEVICE void merge(const Call& call) {
  f32x4* sums = reinterpret_cast<f32x4*>(shared_memory());
  const i64 token = block_y();
  const i32 head = block_x();
  const u32 lane = thread_index() % 32, place = thread_index() % 128, group = thread_index() / 128;
  const float* lses = call.parts + i64(blocks_y()) * call.splits * call.heads * 512;
  const i64 first = token * call.splits * call.heads + head;
  const f32x4* part = reinterpret_cast<const f32x4*>(call.parts) + first * 128 + place;
  wait_for_previous_grid();

  // Each warp has all weights, two a lane.
  float lse[2], weight[2], most = negative_infinity(), total = 0.f;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const i32 split = i32(lane) + 32 * n;
    lse[n] = split < call.splits ? load(lses + first + i64(split) * call.heads)
                                 : negative_infinity();
  }
  f32x4 sum = {0.f, 0.f, 0.f, 0.f};
  constexpr int FLIGHT = 4;  // loads under way before weights are known
  f32x4 ahead[FLIGHT];
#pragma unroll
  for (int n = 0; n < FLIGHT; ++n) {
    const i32 split = i32(group) + MERGE_GROUPS * n;
    ahead[n] = split < call.splits ? load(part + i64(split) * call.heads * 128) : sum;
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) most = maximum(most, lse[n]);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) most = maximum(most, shuffle_xor(most, mask));
  const float finite = most == negative_infinity() ? 0.f : most;
#pragma unroll
  for (int n = 0; n < 2; ++n) total += weight[n] = exp2_fast(lse[n] - finite);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) total += shuffle_xor(total, mask);

  auto add = [&](i32 split, const f32x4& v) {
    const float w = shuffle(split < 32 ? weight[0] : weight[1], split % 32);
    sum.x += v.x * w;
    sum.y += v.y * w;
    sum.z += v.z * w;
    sum.w += v.w * w;
  };
#pragma unroll
  for (int n = 0; n < FLIGHT; ++n) {
    const i32 split = i32(group) + MERGE_GROUPS * n;
    if (split < call.splits) add(split, ahead[n]);
  }
#pragma unroll 4
  for (i32 split = i32(group) + MERGE_GROUPS * FLIGHT; split < call.splits; split += MERGE_GROUPS)
    add(split, load(part + i64(split) * call.heads * 128));
  if (group > 0) sums[(group - 1) * 128 + place] = sum;
  sync_block();
  if (group > 0) return;
#pragma unroll
  for (int n = 0; n < MERGE_GROUPS - 1; ++n) {
    const f32x4 v = load(sums + n * 128 + place);
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
  }

  const bool some = total > 0.f;
  const float lse_log2 = some ? finite + log2_fast(total) : negative_infinity();
  float factor = some ? 1.f / total : 0.f;
  if (call.sinks != nullptr) factor *= kept(load(call.sinks + head) * LOG2_E, lse_log2);
  // As candidates() laid them out: four columns of a lane in each quarter of the row.
  const u32 column = place / 4 % 8 * SLICE + place % 4 * 16 + place / 32 * 4;
  u32* to = reinterpret_cast<u32*>(call.out + token * call.out_token + head * call.out_head + column);
  to[0] = pack_bf16(sum.x * factor, sum.y * factor);
  to[1] = pack_bf16(sum.z * factor, sum.w * factor);
  if (call.lse != nullptr && place == 0) call.lse[token * call.heads + head] = lse_log2 * LN_2;
}

KERNEL(WARPS * 32, 2) candidates_16(const Call call) { candidates<1>(call); }
KERNEL(WARPS * 32, 1) candidates_32(const Call call) { candidates<2>(call); }
KERNEL(MERGE_GROUPS * 128, 1) merge_splits(const Call call) { merge(call); }
