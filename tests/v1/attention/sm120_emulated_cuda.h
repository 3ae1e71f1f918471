// SPDX-License-Identifier: Apache-2.0
// The device primitives of sm120_sparse_mla.cu on a CPU, for tests without a GPU.
//
// Every CUDA thread is a fiber on the one OS thread. A fiber runs until it reaches a warp
// collective; the last lane to arrive computes for all 32. What a GPU would leave undefined is
// made to show:
// - shared memory starts as 0xFF bytes (NaN), and so does the target of a copy_async until the
//   copy_wait that covers it; nothing may be written just outside it;
// - all lanes of a warp must reach the same collective on the same source line, and all threads
//   sync_block; misaligned addresses and a misused permute are errors;
// - the seed chooses the order of blocks, warps and lanes: 0 forward, 1 reverse, others random.
//   Forward and reverse let a warp run on until sync_block stops it, so that a missing
//   sync_block changes the result; random switches warps between collectives.
// What it cannot see: a warp collective orders memory here, as only sync_warp does on a GPU (but
// load_matrices reads a lane's row when that lane arrives); a loop without a collective hangs;
// a stack beyond 128 KiB ends the process.
//
// One translation unit a library: the state is static, so libraries do not share it.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

// The switch in assembly is for ELF systems; elsewhere ucontext does it, with two system calls.
#if defined(__ELF__) && !defined(SM120_EMULATED_UCONTEXT) && \
    (defined(__x86_64__) || defined(__aarch64__))
#define SM120_EMULATED_ASSEMBLY 1
#else
#include <ucontext.h>
#endif

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using i32 = std::int32_t;
using u64 = unsigned long long;  // as CUDA has it: `long` is 32 bits on some systems
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

#define DEVICE inline  // of members too, so not static
#define KERNEL(threads, blocks_per_sm) void

// ---------------------------------------------------------------- switching between fibers

#ifdef SM120_EMULATED_ASSEMBLY

// Saves what a call must keep on the running stack, writes its pointer to *from, goes on at to.
extern "C" __attribute__((visibility("hidden"))) void sm120_emulated_switch(void** from, void* to);

#if defined(__x86_64__)
__asm__(
    ".pushsection .text\n"
    ".p2align 4\n"
    ".globl sm120_emulated_switch\n"
    ".hidden sm120_emulated_switch\n"
    ".type sm120_emulated_switch, @function\n"
    "sm120_emulated_switch:\n"
    "  pushq %rbp\n"
    "  pushq %rbx\n"
    "  pushq %r12\n"
    "  pushq %r13\n"
    "  pushq %r14\n"
    "  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n"
    "  popq %r14\n"
    "  popq %r13\n"
    "  popq %r12\n"
    "  popq %rbx\n"
    "  popq %rbp\n"
    "  popq %rcx\n"
    "  jmp *%rcx\n"  // not ret: the processor would guess the caller on the stack just left
    ".size sm120_emulated_switch, . - sm120_emulated_switch\n"
    ".popsection\n");
#else
__asm__(
    ".pushsection .text\n"
    ".p2align 4\n"
    ".globl sm120_emulated_switch\n"
    ".hidden sm120_emulated_switch\n"
    ".type sm120_emulated_switch, %function\n"
    "sm120_emulated_switch:\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n"
    "  stp x21, x22, [sp, #16]\n"
    "  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n"
    "  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n"
    "  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n"
    "  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n"
    "  str x9, [x0]\n"
    "  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n"
    "  ldp x21, x22, [sp, #16]\n"
    "  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n"
    "  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n"
    "  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n"
    "  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n"
    "  ret\n"
    ".size sm120_emulated_switch, . - sm120_emulated_switch\n"
    ".popsection\n");
#endif
#endif

namespace sm120_emulated {
namespace {

class Context {
 public:
#ifdef SM120_EMULATED_ASSEMBLY
  // The next switch here calls entry, which must not return, on an empty stack below top.
  void start(u8* bottom, u8* top, void (*entry)()) {
    (void)bottom;
    void** words = reinterpret_cast<void**>(top);
#if defined(__x86_64__)
    constexpr int FRAME = 8, ENTRY = 6;  // 6 registers, the entry, and no return address
#else
    constexpr int FRAME = 20, ENTRY = 11;  // 160 bytes, x30 the twelfth
#endif
    std::fill(words - FRAME, words, nullptr);
    words[ENTRY - FRAME] = reinterpret_cast<void*>(entry);
    stack_pointer_ = words - FRAME;
  }
  void switch_to(Context& to) { sm120_emulated_switch(&stack_pointer_, to.stack_pointer_); }

 private:
  void* stack_pointer_ = nullptr;
#else
  void start(u8* bottom, u8* top, void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = bottom;
    context_.uc_stack.ss_size = static_cast<size_t>(top - bottom);
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }
  void switch_to(Context& to) { swapcontext(&context_, &to.context_); }

 private:
  ucontext_t context_;
#endif
};

// ---------------------------------------------------------------- the machine

constexpr u32 LANES = 32;
constexpr u32 MAX_THREADS = 1024;
constexpr size_t MAX_SHARED = 101376;  // the most that a block of SM12x can have
constexpr size_t SHARED_ALIGNMENT = 1024;
constexpr size_t GUARD = 1024;  // bytes on both sides of shared memory that must stay poison
constexpr u8 POISON = 0xFF;
constexpr size_t STACK = 128 * 1024;

enum Kind {
  EXIT, SYNC_BLOCK, SYNC_WARP, MMA, TRANSPOSED, LOAD_MATRICES, SHUFFLE, ALL, BALLOT
};
constexpr const char* KIND_NAMES[] = {
    "its end",       "sync_block", "sync_warp",   "mma",         "transposed",
    "load_matrices", "a shuffle",  "all_in_warp", "ballot"};

struct Copy {
  u8* target;
  const void* source;  // null: zeros
  u32 bytes;
  u32 group;
};

struct Fiber {
  Context context;
  u32 index = 0;   // threadIdx.x
  u32 groups = 0;  // copy groups committed
  bool waited = false;  // for the grid before
  std::vector<Copy> copies;
  u8* stack = nullptr;
};

struct Warp {
  u32 arrived = 0;  // lanes that wait at the collective below
  Kind kind = EXIT;
  int line = 0;
  u32 first = 0;  // the lane that came first
  u32 step = 1, offset = 0, flip = 0;
  u32 in[LANES][10];
  u32 out[LANES][4];

  u32 lane(u32 position) const { return ((position * step + offset) % LANES) ^ flip; }
};

struct Machine {
  Fiber* fiber = nullptr;  // the running one; null outside a run
  Warp* warp = nullptr;    // its warp
  Context host;
  const std::function<void()>* kernel = nullptr;
  u32 block_x = 0, block_y = 0, blocks_y = 0;
  u32 runnable = 0, waiting = 0, finished = 0;  // sets of warps; waiting: in sync_block
  u32 seed = 0;
  u64 random_state = 0;
  u8* shared = nullptr;
  size_t shared_bytes = 0;
  bool early = false;  // the grid before may still run
  std::string error;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
};

Machine machine;

inline u32 random_bits() {  // xorshift64
  u64 x = machine.random_state;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  machine.random_state = x;
  return static_cast<u32>(x >> 32);
}

// Ends the run with this error. The fibers are abandoned where they are: kernels own nothing.
[[noreturn, gnu::noinline, maybe_unused]] void fail(const char* what, int line,
                                                    const std::string& why) {
  if (!machine.fiber) {  // a primitive outside of run_grid: no caller to report to
    std::fprintf(stderr, "%s (line %d): %s\n", what, line, why.c_str());
    std::abort();
  }
  u32 index = machine.fiber->index;
  machine.error = "block (" + std::to_string(machine.block_x) + ", " +
                  std::to_string(machine.block_y) + "), warp " + std::to_string(index / LANES) +
                  ", lane " + std::to_string(index % LANES) + ": " + what +
                  (line ? " (line " + std::to_string(line) + "): " : ": ") + why;
  machine.fiber->context.switch_to(machine.host);
  __builtin_unreachable();
}

inline void resume(u32 warp, u32 lane) {
  Fiber* from = machine.fiber;
  Fiber* to = &machine.fibers[warp * LANES + lane];
  if (from == to) return;
  machine.warp = &machine.warps[warp];
  machine.fiber = to;
  from->context.switch_to(to->context);
}

inline u32 next_warp(u32 running) {
  u32 runnable = machine.runnable;
  if (machine.seed == 0) return static_cast<u32>(__builtin_ctz(runnable));
  if (machine.seed == 1) return 31u - static_cast<u32>(__builtin_clz(runnable));
  u32 bits = random_bits();
  // Mostly the same warp again: races need one that is far ahead.
  if (bits % 8 && (runnable >> running & 1)) return running;
  for (u32 skip = (bits >> 8) % static_cast<u32>(__builtin_popcount(runnable)); skip; --skip)
    runnable &= runnable - 1;
  return static_cast<u32>(__builtin_ctz(runnable));
}

inline void shuffle_lanes(Warp& warp) {
  if (machine.seed == 1) {
    warp.flip = 31;
  } else if (machine.seed > 1) {
    u32 bits = random_bits();
    warp.step = bits | 1;
    warp.offset = bits >> 8 & 31;
    warp.flip = bits >> 16 & 31;
  }
}

inline float from_bf16(u32 half) {
  u32 bits = half << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline u32 to_bf16(float value) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;  // the NaN that the GPU writes
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

[[maybe_unused]] void multiply_matrices(Warp& warp) {
  typedef float Four __attribute__((vector_size(16)));
  float a[16][16];
  alignas(16) float b[16][8];
  for (u32 lane = 0; lane < LANES; ++lane) {
    const u32* in = warp.in[lane];
    u32 g = lane / 4, k = lane % 4 * 2;
    for (u32 part = 0; part < 4; ++part) {
      float* pair = &a[g + part % 2 * 8][k + part / 2 * 8];
      pair[0] = from_bf16(in[part] & 0xFFFF);
      pair[1] = from_bf16(in[part] >> 16);
    }
    for (u32 part = 0; part < 2; ++part) {
      b[k + part * 8][g] = from_bf16(in[4 + part] & 0xFFFF);
      b[k + part * 8 + 1][g] = from_bf16(in[4 + part] >> 16);
    }
  }
  for (u32 row = 0; row < 16; ++row) {
    // Columns 2q, 2q+1 of this row are c[0], c[1] (rows 0-7) or c[2], c[3] of lane 4g+q.
    u32 at = row / 8 * 2, lane = row % 8 * 4;
    float c[8];
    for (u32 q = 0; q < 4; ++q) std::memcpy(c + 2 * q, &warp.in[lane + q][6 + at], 8);
    Four low, high;
    std::memcpy(&low, c, 16);
    std::memcpy(&high, c + 4, 16);
    for (u32 k = 0; k < 16; ++k) {
      Four left, right;
      std::memcpy(&left, b[k], 16);
      std::memcpy(&right, b[k] + 4, 16);
      low += left * a[row][k];
      high += right * a[row][k];
    }
    std::memcpy(c, &low, 16);
    std::memcpy(c + 4, &high, 16);
    for (u32 q = 0; q < 4; ++q) std::memcpy(&warp.out[lane + q][at], c + 2 * q, 8);
  }
}

// What a collective gives each lane, once all have arrived.
[[maybe_unused]] void compute(Warp& warp) {
  auto& in = warp.in;
  auto& out = warp.out;
  switch (warp.kind) {
    case EXIT:
    case SYNC_BLOCK:
    case SYNC_WARP:
      break;
    case MMA:
      multiply_matrices(warp);
      break;
    case TRANSPOSED:
      for (u32 lane = 0; lane < LANES; ++lane) {
        u32 row = lane / 4, column = lane % 4 * 2, shift = row % 2 * 16;
        u32 low = in[column * 4 + row / 2][0] >> shift;
        u32 high = in[column * 4 + 4 + row / 2][0] >> shift;
        out[lane][0] = (low & 0xFFFF) | high << 16;
      }
      break;
    case LOAD_MATRICES:
      for (u32 lane = 0; lane < LANES; ++lane)
        for (u32 matrix = 0; matrix < 4; ++matrix)
          out[lane][matrix] = in[matrix * 8 + lane / 4][lane % 4];
      break;
    case SHUFFLE:
      for (u32 lane = 0; lane < LANES; ++lane) {
        u32 source = in[lane][2];
        out[lane][0] = in[source][0];
        out[lane][1] = in[source][1];
      }
      break;
    case ALL:
    case BALLOT: {
      u32 votes = 0;
      for (u32 lane = 0; lane < LANES; ++lane) votes |= in[lane][0] << lane;
      u32 result = warp.kind == BALLOT ? votes : votes == ~0u;
      for (u32 lane = 0; lane < LANES; ++lane) out[lane][0] = result;
    }
  }
}

// The running lane has left its operands in warp.in and waits for the others of its warp.
[[gnu::noinline, maybe_unused]] void arrive(Kind kind, int line) {
  if (!machine.fiber) fail(KIND_NAMES[kind], line, "called outside of run_grid");
  Warp& warp = *machine.warp;
  u32 index = machine.fiber->index, number = index / LANES;
  if (warp.arrived == 0) {
    warp.kind = kind;
    warp.line = line;
    warp.first = index % LANES;
  } else if (kind != warp.kind || line != warp.line) {
    auto at = [](Kind k, int l) {
      return KIND_NAMES[k] + (l ? " on line " + std::to_string(l) : std::string());
    };
    fail("divergence", 0, "it reached " + at(kind, line) + " and lane " +
                              std::to_string(warp.first) + " " + at(warp.kind, warp.line));
  }
  if (++warp.arrived < LANES) return resume(number, warp.lane(warp.arrived));

  warp.arrived = 0;
  compute(warp);
  u32 self = 1u << number;
  if (kind == EXIT || kind == SYNC_BLOCK) {
    machine.runnable &= ~self;
    (kind == EXIT ? machine.finished : machine.waiting) |= self;
    if (!machine.runnable) {
      if (!machine.waiting) {  // the block is done; nobody comes back here
        machine.fiber->context.switch_to(machine.host);
        __builtin_unreachable();
      }
      if (machine.finished)
        fail("sync_block", 0,
             "warp " + std::to_string(__builtin_ctz(machine.waiting)) + " waits in it and warp " +
                 std::to_string(__builtin_ctz(machine.finished)) + " has ended");
      machine.runnable = machine.waiting;
      machine.waiting = 0;
    }
  }
  if (machine.seed > 1) shuffle_lanes(warp);
  u32 next = next_warp(number);
  resume(next, machine.warps[next].lane(0));
}

inline u32 lane_index() { return machine.fiber->index % LANES; }

[[maybe_unused]] void fiber_main() {
  bool thrown = false;
  try {
    (*machine.kernel)();
  } catch (...) {
    thrown = true;  // fail switches away, which a handler must not
  }
  if (thrown) fail("exception", 0, "the kernel threw");
  arrive(EXIT, 0);
  __builtin_unreachable();
}

// Stacks live as long as the library. The page below each is a guard.
[[maybe_unused]] bool allocate_stacks(u32 count) {
  size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (machine.fibers.size() < count) machine.fibers.resize(count);
  for (Fiber& fiber : machine.fibers) {
    if (fiber.stack) continue;
    void* at = mmap(nullptr, page + STACK, PROT_NONE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (at == MAP_FAILED) return false;
    u8* stack = static_cast<u8*>(at) + page;
    if (mprotect(stack, STACK, PROT_READ | PROT_WRITE)) return false;
    fiber.stack = stack;
  }
  return true;
}

[[maybe_unused]] void run_block(u32 threads) {
  machine.warps.resize(threads / LANES);
  machine.runnable = threads == MAX_THREADS ? ~0u : (1u << threads / LANES) - 1;
  machine.waiting = machine.finished = 0;
  for (u32 index = 0; index < threads; ++index) {
    Fiber& fiber = machine.fibers[index];
    fiber.index = index;
    fiber.groups = 0;
    fiber.waited = false;
    fiber.copies.clear();
    // Tops at different offsets, or the live ends of all stacks would share a few cache sets.
    size_t stagger = index % 64 * 17 * 64;
    fiber.context.start(fiber.stack, fiber.stack + STACK - stagger, fiber_main);
  }
  for (Warp& warp : machine.warps) {
    warp.arrived = warp.offset = warp.flip = 0;
    warp.step = 1;
    shuffle_lanes(warp);
  }
  u32 warp = next_warp(0);
  machine.warp = &machine.warps[warp];
  machine.fiber = &machine.fibers[warp * LANES + machine.warp->lane(0)];
  machine.host.switch_to(machine.fiber->context);
  machine.fiber = nullptr;
}

// One error text for every address that a GPU would refuse; null is one here.
inline void check_address(const void* address, size_t alignment, const char* what, int line) {
  auto value = reinterpret_cast<std::uintptr_t>(address);
  if (value % alignment || value < 4096)
    fail(what, line, (value < 4096 ? "null address" : "address not aligned to " +
                                                          std::to_string(alignment) + " bytes"));
}

inline void check_shared(const void* address, size_t bytes, const char* what, int line) {
  check_address(address, bytes, what, line);
  auto offset = static_cast<const u8*>(address) - machine.shared;
  if (offset < 0 || static_cast<size_t>(offset) + bytes > machine.shared_bytes)
    fail(what, line, "not in shared memory: offset " + std::to_string(offset) + " of " +
                         std::to_string(machine.shared_bytes) + " bytes");
}

}  // namespace
}  // namespace sm120_emulated

// ---------------------------------------------------------------- the primitives

static inline u32 thread_index() { return sm120_emulated::machine.fiber->index; }
static inline u32 block_x() { return sm120_emulated::machine.block_x; }
static inline u32 block_y() { return sm120_emulated::machine.block_y; }
static inline u32 blocks_y() { return sm120_emulated::machine.blocks_y; }
static inline u8* shared_memory() { return sm120_emulated::machine.shared; }

static inline void wait_for_previous_grid() { sm120_emulated::machine.fiber->waited = true; }
static inline void let_next_grid_start() {}

static inline void sync_block(int line = __builtin_LINE()) {
  sm120_emulated::arrive(sm120_emulated::SYNC_BLOCK, line);
}
static inline void sync_warp(int line = __builtin_LINE()) {
  sm120_emulated::arrive(sm120_emulated::SYNC_WARP, line);
}

template <int BYTES>
static inline void copy_async(void* shared, const void* global, bool valid,
                              int line = __builtin_LINE()) {
  static_assert(BYTES == 4 || BYTES == 16, "copies of 4 or 16 bytes");
  using namespace sm120_emulated;
  check_shared(shared, BYTES, "copy_async", line);
  check_address(global, BYTES, "copy_async", line);
  std::memset(shared, POISON, BYTES);
  Fiber& fiber = *machine.fiber;
  fiber.copies.push_back({static_cast<u8*>(shared), valid ? global : nullptr, BYTES, fiber.groups});
}

static inline void copy_commit() { ++sm120_emulated::machine.fiber->groups; }

template <int PENDING>
static inline void copy_wait() {
  static_assert(PENDING >= 0);
  using namespace sm120_emulated;
  Fiber& fiber = *machine.fiber;
  auto copy = fiber.copies.begin();
  // Copies lie in the order of their groups; those not committed have group == fiber.groups.
  for (; copy != fiber.copies.end() && copy->group + PENDING < fiber.groups; ++copy) {
    if (copy->source)
      std::memcpy(copy->target, copy->source, copy->bytes);
    else
      std::memset(copy->target, 0, copy->bytes);
  }
  fiber.copies.erase(fiber.copies.begin(), copy);
}

static inline void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1,
                       int line = __builtin_LINE()) {
  using namespace sm120_emulated;
  Warp& warp = *machine.warp;
  u32 lane = lane_index();
  u32* in = warp.in[lane];
  std::memcpy(in, a, 16);
  in[4] = b0;
  in[5] = b1;
  std::memcpy(in + 6, c, 16);
  arrive(MMA, line);
  std::memcpy(c, warp.out[lane], 16);
}

static inline u32 transposed(u32 row, int line = __builtin_LINE()) {
  using namespace sm120_emulated;
  Warp& warp = *machine.warp;
  u32 lane = lane_index();
  warp.in[lane][0] = row;
  arrive(TRANSPOSED, line);
  return warp.out[lane][0];
}

static inline void load_matrices(u32 (&r)[4], const void* shared, int line = __builtin_LINE()) {
  using namespace sm120_emulated;
  Warp& warp = *machine.warp;
  u32 lane = lane_index();
  check_shared(shared, 16, "load_matrices", line);
  std::memcpy(warp.in[lane], shared, 16);  // now, so that a missing sync_warp shows
  arrive(LOAD_MATRICES, line);
  std::memcpy(r, warp.out[lane], 16);
}

namespace sm120_emulated {
namespace {
template <class T>
inline T shuffle_any(T value, u32 source, int line) {
  static_assert(sizeof(T) <= 8);
  Warp& warp = *machine.warp;
  u32 lane = lane_index();
  std::memcpy(warp.in[lane], &value, sizeof(T));
  warp.in[lane][2] = source;
  arrive(SHUFFLE, line);
  std::memcpy(&value, warp.out[lane], sizeof(T));
  return value;
}

inline u32 vote(Kind kind, bool value, int line) {
  Warp& warp = *machine.warp;
  u32 lane = lane_index();
  warp.in[lane][0] = value;
  arrive(kind, line);
  return warp.out[lane][0];
}

inline float flushed(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? 0 : value; }
}  // namespace
}  // namespace sm120_emulated

static inline float shuffle_xor(float value, int mask, int line = __builtin_LINE()) {
  using namespace sm120_emulated;
  if (mask < 0 || mask > 31) fail("shuffle_xor", line, "mask " + std::to_string(mask));
  return shuffle_any(value, lane_index() ^ static_cast<u32>(mask), line);
}
static inline float shuffle(float value, int lane, int line = __builtin_LINE()) {
  return sm120_emulated::shuffle_any(value, static_cast<u32>(lane) % 32, line);
}
static inline i64 shuffle(i64 value, int lane, int line = __builtin_LINE()) {
  return sm120_emulated::shuffle_any(value, static_cast<u32>(lane) % 32, line);
}

static inline bool all_in_warp(bool vote, int line = __builtin_LINE()) {
  return sm120_emulated::vote(sm120_emulated::ALL, vote, line);
}
// Bit i: the vote of lane i.
static inline u32 ballot(bool vote, int line = __builtin_LINE()) {
  return sm120_emulated::vote(sm120_emulated::BALLOT, vote, line);
}

// The product of two bf16 is exact in fp32, but for the smallest, whose bf16 is the same anyway.
static inline u32 multiply_bf16x2(u32 a, u32 b) {
  using namespace sm120_emulated;
  u32 low = to_bf16(from_bf16(a & 0xFFFF) * from_bf16(b & 0xFFFF));
  u32 high = to_bf16(from_bf16(a >> 16) * from_bf16(b >> 16));
  return low | high << 16;
}

static inline u32 pack_bf16(float low, float high) {
  return sm120_emulated::to_bf16(low) | sm120_emulated::to_bf16(high) << 16;
}

static inline u32 permute(u32 a, u32 b, u32 selector, int line = __builtin_LINE()) {
  if (selector & 0xFFFF8888)
    sm120_emulated::fail("permute", line, "selector " + std::to_string(selector) +
                                              " is not four nibbles of 0 to 7");
  u64 bytes = a | static_cast<u64>(b) << 32;
  u32 result = 0;
  for (u32 i = 0; i < 4; ++i)
    result |= static_cast<u32>(bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return result;
}

// As ex2.approx.ftz and lg2.approx.ftz: subnormals are zeros.
static inline float exp2_fast(float x) { return sm120_emulated::flushed(std::exp2(x)); }
static inline float log2_fast(float x) { return std::log2(sm120_emulated::flushed(x)); }
static inline float maximum(float a, float b) { return std::fmax(a, b); }
static inline float bits_float(u32 bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
static inline u32 float_bits(float value) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

template <class T>
static inline T load(const T* address, int line = __builtin_LINE()) {
  static_assert(std::is_trivially_copyable_v<T>);
  using namespace sm120_emulated;
  check_address(address, alignof(T), "load", line);
  if (machine.early && !machine.fiber->waited) fail("load", line, "before wait_for_previous_grid");
  T value;
  std::memcpy(&value, address, sizeof(T));
  return value;
}

// ---------------------------------------------------------------- the host's side

// Runs the kernel's blocks one after another. Returns "", or what was wrong. Early: launched while
// the grid before may still run, so that nothing may be loaded before it is waited for.
static inline std::string run_grid(unsigned grid_x, unsigned grid_y, unsigned threads,
                                   size_t shared_bytes, unsigned seed,
                                   const std::function<void()>& kernel, bool early = false) {
  using namespace sm120_emulated;
  if (machine.fiber || machine.kernel) return "run_grid: a grid is running";
  if (threads == 0 || threads % LANES || threads > MAX_THREADS)
    return "run_grid: " + std::to_string(threads) + " threads a block: not whole warps, up to 1024";
  if (shared_bytes > MAX_SHARED)
    return "run_grid: " + std::to_string(shared_bytes) + " bytes of shared memory: at most " +
           std::to_string(MAX_SHARED);
  if (!allocate_stacks(threads)) return "run_grid: no memory for the stacks";

  std::vector<u32> blocks(static_cast<size_t>(grid_x) * grid_y);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<u32>(i);
  machine.seed = seed;
  machine.random_state = 0x9E3779B97F4A7C15ull * (seed + 1ull);
  if (seed == 1) std::reverse(blocks.begin(), blocks.end());
  if (seed > 1)
    for (size_t i = blocks.size(); i > 1; --i) std::swap(blocks[i - 1], blocks[random_bits() % i]);

  std::vector<u8> memory(SHARED_ALIGNMENT + 2 * GUARD + shared_bytes);
  auto start = reinterpret_cast<std::uintptr_t>(memory.data()) + GUARD;
  machine.shared = memory.data() + GUARD + (SHARED_ALIGNMENT - start % SHARED_ALIGNMENT) %
                                               SHARED_ALIGNMENT;
  machine.shared_bytes = shared_bytes;
  machine.kernel = &kernel;
  machine.blocks_y = grid_y;
  machine.early = early;
  machine.error.clear();
  // The caller's library may have set flush-to-zero.
  std::fenv_t environment;
  std::fegetenv(&environment);
  std::fesetenv(FE_DFL_ENV);
  auto poison = [](u8 byte) { return byte == POISON; };
  for (u32 block : blocks) {
    machine.block_x = block % grid_x;
    machine.block_y = block / grid_x;
    std::fill(memory.begin(), memory.end(), POISON);
    run_block(threads);
    u8* end = machine.shared + shared_bytes;
    if (machine.error.empty() && !(std::all_of(machine.shared - GUARD, machine.shared, poison) &&
                                   std::all_of(end, end + GUARD, poison)))
      machine.error = "block (" + std::to_string(machine.block_x) + ", " +
                      std::to_string(machine.block_y) + "): a write just outside shared memory";
    if (!machine.error.empty()) break;
  }
  std::fesetenv(&environment);
  machine.kernel = nullptr;
  machine.shared = nullptr;
  return machine.error;
}
