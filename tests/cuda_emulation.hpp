// Runs CUDA kernels on the CPU, so that their logic is tested where no GPU is: every CUDA thread is
// a fiber, and fibers change places only where threads wait for one another. What it cannot show:
// races between such places, memory order, alignment, speed. Include it before kernels, in one
// source file of a program.
#pragma once

#include <ucontext.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __launch_bounds__(...)
#define __forceinline__ inline

namespace emulation {

struct Dim {
  unsigned x = 0;
};

// Waiters pass when all have come.
struct Gate {
  unsigned size = 0, here = 0;
  std::uint64_t opened = 0;

  std::uint64_t arrivals() const { return opened * size + here; }
};

struct Warp {
  Gate gate;
  std::uint64_t slot[2][32] = {};  // what lanes give to one another, in turn
};
struct Block {
  Gate gate;
  std::vector<Warp> warps;
  std::unique_ptr<std::byte[]> shared;
};
// Where a fiber goes on. swapcontext alone would do, but makes system calls, which cost most of the
// time then. Sanitizers know no other way.
struct Place {
  ucontext_t context = {};
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  void* jump[5] = {};  // of __builtin_setjmp
  bool begun = false;
#endif
};
struct Thread {
  Place place;
  std::unique_ptr<std::byte[]> stack;
  Dim thread, block;
  std::uint64_t exchanges = 0;
  bool done = false;
};

struct Machine {
  Place scheduler;
  Gate grid;
  std::vector<Block> blocks;
  std::vector<Thread> threads;
  Thread* now = nullptr;
  const std::function<void()>* kernel = nullptr;
};
inline Machine machine;
inline std::mutex machine_is_taken;  // ranks that are threads take turns

}  // namespace emulation

inline emulation::Dim threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
[[gnu::noinline]] inline void change(Place& from, Place& to) {
  from.begun = true;
  if (__builtin_setjmp(from.jump) != 0) return;
  if (to.begun) __builtin_longjmp(to.jump, 1);
  setcontext(&to.context);
}
#else
inline void change(Place& from, Place& to) { swapcontext(&from.context, &to.context); }
#endif

inline void yield() { change(machine.now->place, machine.scheduler); }

inline void wait(Gate& gate) {
  const std::uint64_t before = gate.opened;
  if (++gate.here == gate.size) {
    gate.here = 0;
    ++gate.opened;
  }
  while (gate.opened == before) yield();
}

inline Block& block() { return machine.blocks[blockIdx.x]; }
inline Warp& warp() { return block().warps[threadIdx.x / 32]; }

// All lanes give a value and see all of them. Slots in turn: a lane may be one exchange ahead.
template <class T>
const std::uint64_t* exchange(T value) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  Warp& w = warp();
  std::uint64_t* const slot = w.slot[machine.now->exchanges++ % 2];
  slot[threadIdx.x % 32] = bits;
  wait(w.gate);
  return slot;
}
template <class T>
T taken(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void enter() {
  (*machine.kernel)();
  machine.now->done = true;
  yield();
}

// Not inlined: to the compiler getcontext may return twice, and loop variables would suffer.
[[gnu::noinline]] inline void prepare(Thread& thread, std::size_t stack) {
  thread.place = {};
  ucontext_t& context = thread.place.context;
  getcontext(&context);
  context.uc_stack.ss_sp = thread.stack.get();
  context.uc_stack.ss_size = stack;
  context.uc_link = nullptr;
  makecontext(&context, enter, 0);
}

// One launch; all blocks are there at once, as in a cooperative one. Throws: std::runtime_error if
// threads wait for ones that will not come. Requires: threads is a multiple of 32.
inline void launch(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
  constexpr std::size_t kStack = 64 << 10, kShared = 16 << 10;
  const std::lock_guard turn(machine_is_taken);
  Machine& m = machine;
  m.kernel = &kernel;
  m.grid = {.size = blocks * threads};
  m.blocks.clear();
  m.blocks.resize(blocks);
  for (Block& b : m.blocks) {
    b.gate.size = threads;
    b.warps.resize(threads / 32);
    for (Warp& w : b.warps) w.gate.size = 32;
    b.shared = std::make_unique<std::byte[]>(kShared);
    std::memset(b.shared.get(), 0xa5, kShared);  // shared memory starts with anything
  }
  m.threads.resize(std::size_t{blocks} * threads);
  for (std::size_t t = 0; t < m.threads.size(); ++t) {
    Thread& thread = m.threads[t];
    thread.thread.x = static_cast<unsigned>(t) % threads;
    thread.block.x = static_cast<unsigned>(t) / threads;
    thread.exchanges = 0;
    thread.done = false;
    if (!thread.stack) thread.stack = std::make_unique<std::byte[]>(kStack);
    prepare(thread, kStack);
  }
  blockDim.x = threads;
  gridDim.x = blocks;
  const auto progress = [&] {
    std::uint64_t sum = m.grid.arrivals();
    for (const Block& b : m.blocks) {
      sum += b.gate.arrivals();
      for (const Warp& w : b.warps) sum += w.gate.arrivals();
    }
    return sum;
  };
  for (bool any = true; any;) {
    any = false;
    const std::uint64_t before = progress();
    for (Thread& thread : m.threads) {
      if (thread.done) continue;
      m.now = &thread;
      threadIdx = thread.thread;
      blockIdx = thread.block;
      change(m.scheduler, thread.place);
      any = any || !thread.done;
    }
    if (any && progress() == before)
      throw std::runtime_error("emulation: the threads wait forever");
  }
}

}  // namespace emulation

// ---- what kernels call

inline void __syncthreads() { emulation::wait(emulation::block().gate); }

template <class T>
T __shfl_sync(unsigned, T value, int from) {
  return emulation::taken<T>(emulation::exchange(value)[from]);
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned by) {
  const unsigned lane = threadIdx.x % 32;
  const std::uint64_t* const all = emulation::exchange(value);
  return emulation::taken<T>(all[lane >= by ? lane - by : lane]);
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned by) {
  const unsigned lane = threadIdx.x % 32;
  const std::uint64_t* const all = emulation::exchange(value);
  return emulation::taken<T>(all[lane + by < 32 ? lane + by : lane]);
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const std::uint64_t* const all = emulation::exchange(value);
  unsigned mask = 0;
  for (unsigned i = 0; i < 32; ++i) mask |= static_cast<unsigned>(all[i] & 1U) << i;
  return mask;
}
inline bool __all_sync(unsigned, bool value) { return __ballot_sync(0, value) == 0xffffffffU; }
inline bool __any_sync(unsigned, bool value) { return __ballot_sync(0, value) != 0; }
inline int __popc(unsigned v) { return std::popcount(v); }
inline int __ffs(unsigned v) { return v == 0 ? 0 : std::countr_zero(v) + 1; }
template <class T>
T atomicAdd(T* at, T v) {
  const T before = *at;
  *at += v;
  return before;
}

namespace skim::cuda {
inline void grid_sync() { emulation::wait(emulation::machine.grid); }
template <class T>
T& shared() {
  static_assert(sizeof(T) <= (16 << 10));
  return *reinterpret_cast<T*>(emulation::block().shared.get());
}
}  // namespace skim::cuda
