// Internal: the kernels of selection on a CUDA device, and of delivery (scatter, commit).
//
// select_entries is one cooperative launch. The whole grid synchronises between its steps:
//   1. If there is no threshold yet, a sample suggests one. (select_order)
//   2. One pass adds the gradient to the residual. A warp processes a block of 1024 entries. Lane j
//      has entries j, j + 32, ..., so it is virtual lane j of the CPU's sums of squares. Entries
//      above the threshold become candidates. The candidates of one block are contiguous and
//      ascending, but the blocks are in any order. (accumulate, append)
//   3. Three histograms over the digits of the orders find the cut below the k largest. They cover
//      the candidates only. If the threshold was too high, or left too many candidates, they cover
//      the whole result. (select_order)
//   4. The kept entries are counted for each unit of 8 blocks. Then every unit writes its entries
//      after those of the units before it, so that the output is ascending. (count, emit)
// No step involves the host. Everything is deterministic, except where the candidates of a block
// are stored.
//
// Without nvcc this is host code that uses tests/cuda_emulation.hpp, which must be included first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "select/cuda_math.hpp"
#include "select/kernels.hpp"
#ifdef __CUDACC__
#include <cooperative_groups.h>
#endif

namespace skim::cuda {

#ifdef __CUDACC__
__device__ inline void grid_sync() { cooperative_groups::this_grid().sync(); }
// The T that the threads of a thread block share.
template <class T>
__device__ T& shared() {
  __shared__ T s;
  return s;
}
#endif

inline constexpr unsigned kWarp = 32, kAllLanes = 0xffffffffU;
inline constexpr unsigned kThreads = 512,
                          kGridsPerProcessor = 2;         // 2 x 512 threads of 64 registers
inline constexpr std::uint32_t kBlock = kernels::kBlock;  // entries that share a float sum
inline constexpr std::uint32_t kRows = kBlock / kWarp;
static_assert(kRows == kWarp, "a lane keeps the mask of one row");
inline constexpr std::uint32_t kBlocksOfGroup = kernels::Norm2::kGroup;  // see Norm2
inline constexpr std::uint32_t kBlocksOfUnit = 8;
inline constexpr std::size_t kUnit = std::size_t{kBlocksOfUnit} * kBlock;

// An order has 31 bits, which are processed in three digits.
inline constexpr unsigned kDigits = 3, kBins = 2048;
inline constexpr unsigned kSample = 16384;

// ---- input from the host, and output to it

struct Wanted {
  std::uint32_t k = 0;
  std::uint32_t most = 0;         // >= k; with more candidates, only the k largest are kept
  std::uint32_t floor = 0;        // entries up to this order are never kept
  std::uint32_t above = 0;        // candidates have a larger order; >= floor
  std::uint32_t sample_rank = 0;  // if > 0, `above` becomes the order of this rank in a sample
  bool accumulates = true;        // false: the gradient has been added already
  bool falls_back = true;         // with fewer than k candidates, select from all entries
};

struct Norms {
  double gradient, total;
};
struct Report {  // stored before the entries, so that one copy transfers both
  std::uint32_t kept;
  std::uint32_t found;  // candidates
  std::uint32_t dense;  // 1: selected from all entries, not from the candidates
  std::uint64_t non_finite;
  Norms norms;
};
struct Run {  // the positions of a block's candidates
  std::uint32_t first, count;
};
struct Counts {
  std::uint32_t above, ties;  // entries above the cut, and equal to it
};
struct Cut {
  std::uint32_t order, ties;
};

struct Board {  // must be zeroed before a launch
  std::uint32_t found;
  unsigned long long non_finite;               // the type that atomicAdd takes
  std::uint32_t histogram[2][kDigits][kBins];  // [0]: for the sample; [1]: for the cut
};

struct Work {  // device memory
  Board* board = nullptr;
  Norms* block_norms = nullptr;  // [blocks]
  Norms* group_norms = nullptr;  // [groups]
  Run* runs = nullptr;           // [blocks]
  Counts* counts = nullptr;      // [units]
  Index* index = nullptr;        // [room]  candidates
  float* value = nullptr;        // [room]
  std::uint32_t room = 0;
  Report* report = nullptr;
  std::uint32_t* body = nullptr;  // [2 most]  kept indices, then kept values: the body of a frame
};

SKIM_HOST_DEVICE std::uint32_t parts(std::size_t n, std::size_t of) {
  return static_cast<std::uint32_t>((n + of - 1) / of);
}

// ---- threads

__device__ inline unsigned lane() { return threadIdx.x % kWarp; }
__device__ inline unsigned warp() { return threadIdx.x / kWarp; }
__device__ inline unsigned warps() { return blockDim.x / kWarp; }
__device__ inline unsigned grid_warp() { return blockIdx.x * warps() + warp(); }
__device__ inline unsigned grid_warps() { return gridDim.x * warps(); }
__device__ inline unsigned lanes_below() { return (1U << lane()) - 1U; }
__device__ inline std::uint32_t ones(unsigned mask) {
  return static_cast<std::uint32_t>(__popc(mask));
}
__device__ inline unsigned lowest(unsigned mask) { return static_cast<unsigned>(__ffs(mask)) - 1U; }

// The sum over the lanes up to and including this one.
__device__ inline std::uint32_t warp_scan(std::uint32_t v) {
  for (unsigned by = 1; by < kWarp; by *= 2) {
    const std::uint32_t before = __shfl_up_sync(kAllLanes, v, by);
    if (lane() >= by) v += before;
  }
  return v;
}

struct Shared {
  std::uint32_t bins[kBins];
  std::uint32_t of_warp[kWarp];
  std::uint32_t digit, above;
  Counts before[kThreads];
};

// Returns the sum over the threads before this one. `total` gets the sum over all threads.
__device__ inline std::uint32_t block_scan(std::uint32_t v, std::uint32_t& total) {
  Shared& s = shared<Shared>();
  const std::uint32_t inclusive = warp_scan(v);
  if (lane() == kWarp - 1) s.of_warp[warp()] = inclusive;
  __syncthreads();
  std::uint32_t before = 0;
  total = 0;
  for (unsigned w = 0; w < warps(); ++w) {
    if (w == warp()) before = total;
    total += s.of_warp[w];
  }
  __syncthreads();  // before of_warp is written again
  return before + inclusive - v;
}

// ---- entries

template <DType kType, bool kResidual>
struct Values {
  kernels::Pass pass;

  // The scaled gradient entry, or 0 if the entry is not finite.
  __device__ float gradient(std::size_t i) const {
    const float g = entry<kType>(pass.grad, i);
    return is_finite(g) ? scaled(g, pass.reciprocal) : 0.0F;
  }
  // Entry i of the result: will_be() before the pass, is() after it, made_of() from values that are
  // already loaded.
  __device__ float will_be(std::size_t i) const {
    return made_of(entry<kType>(pass.grad, i), kResidual ? pass.residual[i] : 0.0F);
  }
  __device__ float is(std::size_t i) const { return kResidual ? pass.residual[i] : will_be(i); }
  __device__ float made_of(float g, float r) const {
    const bool finite = is_finite(g);
    const float x = finite ? scaled(g, pass.reciprocal) : 0.0F;
    if constexpr (kResidual) return accumulated(pass.decay * r, x);
    return finite ? x : g * pass.reciprocal;
  }
};

// ---- step 3: the order of the k-th largest of m entries

// Counts one digit, of every order that begins with `prefix`, in a histogram.
template <class Orders>
__device__ void tally(const Orders& orders, std::size_t m, unsigned digit_end, unsigned digit_begin,
                      std::uint32_t prefix, std::uint32_t* histogram) {
  constexpr std::uint32_t kNone = 0xffffffffU;
  Shared& s = shared<Shared>();
  const unsigned bins = 1U << (digit_end - digit_begin);
  for (unsigned b = threadIdx.x; b < bins; b += blockDim.x) s.bins[b] = 0;
  __syncthreads();
  constexpr unsigned kAhead = 4;  // rows to load before the first is used
  const std::size_t step = std::size_t{grid_warps()} * kAhead * kWarp;
  for (std::size_t at = std::size_t{grid_warp()} * kAhead * kWarp; at < m; at += step) {
    std::uint32_t o[kAhead];
#pragma unroll
    for (unsigned j = 0; j < kAhead; ++j) {
      const std::size_t i = at + j * kWarp + lane();
      o[j] = i < m ? orders(i) : kNone;  // orders have 31 bits, so kNone matches no prefix
    }
#pragma unroll
    for (unsigned j = 0; j < kAhead; ++j) {
      const bool counts = o[j] >> digit_end == prefix;
      const std::uint32_t bin = counts ? o[j] >> digit_begin & (bins - 1) : kNone;
      // If all lanes have the same bin, one lane counts for all. Otherwise they would queue at one
      // counter.
      const std::uint32_t first = __shfl_sync(kAllLanes, bin, 0);
      if (__all_sync(kAllLanes, bin == first)) {
        if (lane() == 0 && first != kNone) atomicAdd(&s.bins[first], kWarp);
      } else if (bin != kNone) {
        atomicAdd(&s.bins[bin], 1U);
      }
    }
  }
  __syncthreads();
  for (unsigned b = threadIdx.x; b < bins; b += blockDim.x) {
    if (s.bins[b] > 0) atomicAdd(&histogram[b], s.bins[b]);
  }
}

// Returns the largest digit such that at least k orders have this digit or a larger one. `above`
// gets the number of orders with a larger digit. Requires: k > 0; the histogram counts at least k
// orders; blockDim.x divides bins.
__device__ inline std::uint32_t find_digit(const std::uint32_t* histogram, unsigned bins,
                                           std::uint32_t k, std::uint32_t& above) {
  Shared& s = shared<Shared>();
  const unsigned each = bins / blockDim.x;
  const unsigned top =
      bins - 1 - threadIdx.x * each;  // this thread has the digits (top - each, top]
  std::uint32_t sum = 0, total = 0;
  for (unsigned j = 0; j < each; ++j) sum += histogram[top - j];
  std::uint32_t before = block_scan(sum, total);
  if (before < k && k - before <= sum) {
    unsigned digit = top;
    while (k - before > histogram[digit]) before += histogram[digit--];
    s.digit = digit;
    s.above = before;
  }
  __syncthreads();
  above = s.above;
  return s.digit;  // the next write comes after the barriers of block_scan
}

// Finds the cut below the k largest of m orders. Collective over the grid. Requires: 0 < k <= m;
// histogram is all zeros.
template <class Orders>
__device__ Cut select_order(const Orders& orders, std::size_t m, std::uint32_t k,
                            std::uint32_t (*histogram)[kBins]) {
  std::uint32_t prefix = 0;
#pragma unroll 1
  for (unsigned d = 0; d < kDigits; ++d) {  // bits 30 to 20, 19 to 10, 9 to 0
    const unsigned begin = 20 - 10 * d, bits = d == 0 ? 11 : 10;
    tally(orders, m, begin + bits, begin, prefix, histogram[d]);
    grid_sync();
    std::uint32_t above = 0;
    const std::uint32_t digit = find_digit(histogram[d], 1U << bits, k, above);
    prefix = prefix << bits | digit;
    k -= above;
  }
  return {prefix, k};
}

// ---- step 2: the pass

// The sum of squares of a block, from the sums of its lanes. All lanes get the result. If the float
// sum may have over- or underflowed, the sum is computed again in double, in the order of the
// entries. any: the bits of the lane's entries, or-ed.
template <class Entry>
__device__ double block_norm2(float sum, std::uint32_t any, std::uint32_t size,
                              const Entry& entry_of) {
  for (unsigned width = kWarp / 2; width > 0; width /= 2) {
    sum += __shfl_down_sync(kAllLanes, sum, width);
  }
  sum = __shfl_sync(kAllLanes, sum, 0);
  if (trusted(sum)) return static_cast<double>(sum);
  if (!__any_sync(kAllLanes, any != 0)) return 0.0;
  double exact = 0.0;
  for (std::uint32_t row = 0; row < size; row += kWarp) {
    const std::uint32_t i = row + lane();
    const double v = i < size ? static_cast<double>(entry_of(i)) : 0.0;
    const double square = v * v;
    for (unsigned left = __ballot_sync(kAllLanes, v != 0.0); left != 0; left &= left - 1) {
      exact += __shfl_sync(kAllLanes, square, static_cast<int>(lowest(left)));
    }
  }
  return exact;
}

// Appends the candidates of a block. passed: lane j holds the mask of the lanes whose entry in row
// j passed the threshold.
template <class V>
__device__ void append(const V& values, std::size_t first, std::uint32_t block, unsigned passed,
                       const Work& work) {
  const std::uint32_t inclusive = warp_scan(ones(passed));
  const std::uint32_t count = __shfl_sync(kAllLanes, inclusive, kWarp - 1);
  std::uint32_t at = 0;
  if (count > 0) {
    if (lane() == 0) at = atomicAdd(&work.board->found, count);
    at = __shfl_sync(kAllLanes, at, 0);
    if (at + count <= work.room) {
      for (unsigned rows = __ballot_sync(kAllLanes, passed != 0); rows != 0; rows &= rows - 1) {
        const unsigned row = lowest(rows);
        const unsigned mask = __shfl_sync(kAllLanes, passed, static_cast<int>(row));
        const std::uint32_t before =
            __shfl_sync(kAllLanes, inclusive, static_cast<int>(row)) - ones(mask);
        if ((mask >> lane() & 1U) == 0) continue;
        const std::size_t i = first + row * kWarp + lane();
        const std::uint32_t to = at + before + ones(mask & lanes_below());
        work.index[to] = static_cast<Index>(i);
        work.value[to] = values.is(i);  // safe: if this pass wrote entry i, this lane did
      }
    }
  }
  if (lane() == 0) work.runs[block] = {at, count};
}

template <DType kType, bool kResidual>
__device__ void accumulate(const Values<kType, kResidual>& values, std::uint32_t above,
                           const Work& work) {
  constexpr unsigned kAhead = 8;  // rows to load before the first is used
  const kernels::Pass& pass = values.pass;
  const std::uint32_t blocks = parts(pass.n, kBlock);
  std::uint32_t non_finite = 0;
  for (std::uint32_t block = grid_warp(); block < blocks; block += grid_warps()) {
    const std::size_t first = std::size_t{block} * kBlock;
    const std::uint32_t size =
        pass.n - first < kBlock ? static_cast<std::uint32_t>(pass.n - first) : kBlock;
    float gradient_sum = 0.0F, total_sum = 0.0F;
    std::uint32_t any_gradient = 0, any_total = 0;
    unsigned passed = 0;
#pragma unroll 1
    for (unsigned row = 0; row < kRows; row += kAhead) {
      float g[kAhead], r[kAhead];
#pragma unroll
      for (unsigned j = 0; j < kAhead; ++j) {
        const std::uint32_t i = (row + j) * kWarp + lane();
        // The zeros after the end never become candidates and add nothing to a norm.
        g[j] = i < size ? entry<kType>(pass.grad, first + i) : 0.0F;
        r[j] = kResidual && i < size ? pass.residual[first + i] : 0.0F;
      }
#pragma unroll
      for (unsigned j = 0; j < kAhead; ++j) {
        const std::uint32_t i = (row + j) * kWarp + lane();
        const bool finite = is_finite(g[j]);
        const float x = finite ? scaled(g[j], pass.reciprocal) : 0.0F;
        const float v = values.made_of(g[j], r[j]);
        if (!finite) ++non_finite;
        gradient_sum += x * x;
        any_gradient |= bits_of(x) << 1U;  // without the sign
        if constexpr (kResidual) {
          if (i < size) pass.residual[first + i] = v;
          total_sum += v * v;
          any_total |= bits_of(v) << 1U;
        }
        const unsigned mask = __ballot_sync(kAllLanes, order(v) > above);
        if (lane() == row + j) passed = mask;
      }
    }
    Norms norms;
    norms.gradient = block_norm2(gradient_sum, any_gradient, size,
                                 [&](std::uint32_t i) { return values.gradient(first + i); });
    norms.total = norms.gradient;
    if constexpr (kResidual) {
      norms.total = block_norm2(total_sum, any_total, size,
                                [&](std::uint32_t i) { return values.is(first + i); });
    }
    if (lane() == 0) work.block_norms[block] = norms;
    append(values, first, block, passed, work);
  }
  non_finite = __shfl_sync(kAllLanes, warp_scan(non_finite), kWarp - 1);
  if (lane() == 0 && non_finite > 0) {
    atomicAdd(&work.board->non_finite, 0ULL + non_finite);
  }
}

// Finds the candidates of a result that an earlier run accumulated.
template <class V>
__device__ void collect(const V& values, std::uint32_t above, const Work& work) {
  const std::uint32_t blocks = parts(values.pass.n, kBlock);
  for (std::uint32_t block = grid_warp(); block < blocks; block += grid_warps()) {
    const std::size_t first = std::size_t{block} * kBlock;
    unsigned passed = 0;
#pragma unroll 8
    for (unsigned row = 0; row < kRows; ++row) {
      const std::size_t i = first + row * kWarp + lane();
      const float v = i < values.pass.n ? values.is(i) : 0.0F;
      const unsigned mask = __ballot_sync(kAllLanes, order(v) > above);
      if (lane() == row) passed = mask;
    }
    append(values, first, block, passed, work);
  }
}

// The sum of n norms, added in order. All lanes get the result.
__device__ inline Norms add_in_order(const Norms* norms, std::uint32_t n) {
  Norms sum = {0.0, 0.0};
  for (std::uint32_t at = 0; at < n; at += kWarp) {
    Norms mine = {0.0, 0.0};
    if (at + lane() < n) mine = norms[at + lane()];
    const std::uint32_t here = n - at < kWarp ? n - at : kWarp;
    for (std::uint32_t j = 0; j < here; ++j) {
      sum.gradient += __shfl_sync(kAllLanes, mine.gradient, static_cast<int>(j));
      sum.total += __shfl_sync(kAllLanes, mine.total, static_cast<int>(j));
    }
  }
  return sum;
}

__device__ inline void add_groups(std::uint32_t blocks, const Work& work) {
  const std::uint32_t groups = parts(blocks, kBlocksOfGroup);
  for (std::uint32_t group = grid_warp(); group < groups; group += grid_warps()) {
    const std::uint32_t first = group * kBlocksOfGroup;
    const std::uint32_t size = blocks - first < kBlocksOfGroup ? blocks - first : kBlocksOfGroup;
    const Norms sum = add_in_order(work.block_norms + first, size);
    if (lane() == 0) work.group_norms[group] = sum;
  }
}

// ---- step 4: the kept entries, in ascending order

// The walk_ functions call visit(index, value) with the entries of a unit in ascending order, 32 at
// a time, in whole warps. Lanes without an entry get the value 0. This one walks over the whole
// result.
template <class V, class Visit>
__device__ void walk_result(const V& values, std::uint32_t unit, const Visit& visit) {
  const std::size_t n = values.pass.n, begin = unit * kUnit;
  const std::size_t end = n - begin < kUnit ? n : begin + kUnit;
  constexpr unsigned kAhead = 8;
  for (std::size_t at = begin; at < end; at += kAhead * kWarp) {
    float v[kAhead];
#pragma unroll
    for (unsigned j = 0; j < kAhead; ++j) {
      const std::size_t i = at + j * kWarp + lane();
      v[j] = i < end ? values.is(i) : 0.0F;
    }
#pragma unroll
    for (unsigned j = 0; j < kAhead; ++j) {
      visit(static_cast<Index>(at + j * kWarp + lane()), v[j]);
    }
  }
}
// Walks over the candidates: the runs of the unit's blocks, one after the other.
template <class Visit>
__device__ void walk_candidates(const Work& work, std::uint32_t blocks, std::uint32_t unit,
                                const Visit& visit) {
  Run run = {0, 0};
  const std::uint32_t block = unit * kBlocksOfUnit + lane();
  if (lane() < kBlocksOfUnit && block < blocks) run = work.runs[block];
  const std::uint32_t end = warp_scan(run.count);
  const std::uint32_t shift = run.first - (end - run.count);  // place in the unit -> candidate
  const std::uint32_t total = __shfl_sync(kAllLanes, end, kWarp - 1);
  for (std::uint32_t at = 0; at < total; at += kWarp) {
    const std::uint32_t place = at + lane();
    std::uint32_t candidate = 0;
    for (int b = kBlocksOfUnit - 1; b >= 0; --b) {
      const std::uint32_t end_of_b = __shfl_sync(kAllLanes, end, b);
      const std::uint32_t shift_of_b = __shfl_sync(kAllLanes, shift, b);
      if (place < end_of_b) candidate = place + shift_of_b;
    }
    const bool there = place < total;
    visit(there ? work.index[candidate] : 0U, there ? work.value[candidate] : 0.0F);
  }
}

// A thread block works on the units [first_unit, end_unit).
__device__ inline std::uint32_t first_unit(std::uint32_t units) {
  return static_cast<std::uint32_t>(std::uint64_t{units} * blockIdx.x / gridDim.x);
}
__device__ inline std::uint32_t end_unit(std::uint32_t units) {
  return static_cast<std::uint32_t>(std::uint64_t{units} * (blockIdx.x + 1) / gridDim.x);
}

template <class Walk>
__device__ void count(const Walk& walk, std::uint32_t units, const Cut& cut, const Work& work) {
  for (std::uint32_t unit = first_unit(units) + warp(); unit < end_unit(units); unit += warps()) {
    Counts counts = {0, 0};
    walk(unit, [&](Index, float v) {
      counts.above += ones(__ballot_sync(kAllLanes, order(v) > cut.order));
      counts.ties += ones(__ballot_sync(kAllLanes, order(v) == cut.order));
    });
    if (lane() == 0) work.counts[unit] = counts;
  }
}

// Writes the entries above the cut and the first cut.ties entries that equal it. Returns the number
// of entries that all thread blocks write together.
template <class Walk>
__device__ std::uint32_t emit(const Walk& walk, std::uint32_t units, const Cut& cut,
                              const Work& work) {
  Shared& s = shared<Shared>();
  const std::uint32_t first = first_unit(units), end = end_unit(units);
  Counts mine = {0, 0}, before = {0, 0}, all = {0, 0};
  for (std::uint32_t unit = threadIdx.x; unit < units; unit += blockDim.x) {
    const Counts c = work.counts[unit];
    all.above += c.above;
    all.ties += c.ties;
    if (unit < first) {
      mine.above += c.above;
      mine.ties += c.ties;
    }
  }
  block_scan(all.above, all.above);
  block_scan(all.ties, all.ties);
  block_scan(mine.above, before.above);
  block_scan(mine.ties, before.ties);
  const std::uint32_t kept = all.above + (all.ties < cut.ties ? all.ties : cut.ties);

  for (std::uint32_t chunk = first; chunk < end; chunk += blockDim.x) {
    const std::uint32_t unit = chunk + threadIdx.x;
    Counts c = {0, 0}, chunk_total = {0, 0};
    if (unit < end) c = work.counts[unit];
    s.before[threadIdx.x].above = before.above + block_scan(c.above, chunk_total.above);
    s.before[threadIdx.x].ties = before.ties + block_scan(c.ties, chunk_total.ties);
    __syncthreads();
    for (unsigned u = warp(); u < blockDim.x && chunk + u < end; u += warps()) {
      Counts at = s.before[u];
      walk(chunk + u, [&](Index index, float v) {
        const std::uint32_t o = order(v);
        const unsigned above = __ballot_sync(kAllLanes, o > cut.order);
        const unsigned ties = __ballot_sync(kAllLanes, o == cut.order);
        const std::uint32_t ties_before = at.ties + ones(ties & lanes_below());
        if (o > cut.order || (o == cut.order && ties_before < cut.ties)) {
          const std::uint32_t to = at.above + ones(above & lanes_below()) +
                                   (ties_before < cut.ties ? ties_before : cut.ties);
          work.body[to] = index;
          work.body[kept + to] = bits_of(v);
        }
        at.above += ones(above);
        at.ties += ones(ties);
      });
    }
    before.above += chunk_total.above;
    before.ties += chunk_total.ties;
    __syncthreads();  // before s.before is written again
  }
  return kept;
}

// ---- the kernels

template <DType kType, bool kResidual>
__global__ void __launch_bounds__(kThreads, kGridsPerProcessor)
    select_entries(kernels::Pass pass, Wanted wanted, Work work) {
  const Values<kType, kResidual> values{pass};
  const std::uint32_t blocks = parts(pass.n, kBlock), units = parts(pass.n, kUnit);
  Board& board = *work.board;

  std::uint32_t above = wanted.above;
  if (wanted.sample_rank > 0) {
    const std::size_t stride = pass.n / kSample;
    const auto sample = [&](std::size_t s) { return order(values.will_be(s * stride)); };
    const Cut cut = select_order(sample, kSample, wanted.sample_rank, board.histogram[0]);
    // Entries that equal the threshold must pass as well.
    above = cut.order > wanted.floor ? cut.order - 1 : wanted.floor;
  }
  if (wanted.accumulates) {
    accumulate(values, above, work);
  } else {
    collect(values, above, work);
  }
  grid_sync();
  if (wanted.accumulates) add_groups(blocks, work);

  const std::uint32_t found = board.found;
  const bool dense =
      found > work.room || (wanted.falls_back && found < wanted.k && above > wanted.floor);
  Cut cut = {wanted.floor, 0};
  const auto walk = [&](std::uint32_t unit, const auto& visit) {
    if (dense) {
      walk_result(values, unit, visit);
    } else {
      walk_candidates(work, blocks, unit, visit);
    }
  };
  if (dense) {
    const auto result = [&](std::size_t i) { return order(values.is(i)); };
    cut = select_order(result, pass.n, wanted.k, board.histogram[1]);
    if (cut.order <= wanted.floor) cut = {wanted.floor, 0};
  } else if (found > wanted.most) {
    const auto candidate = [&](std::size_t i) { return order(work.value[i]); };
    cut = select_order(candidate, found, wanted.k, board.histogram[1]);
  }
  count(walk, units, cut, work);
  grid_sync();
  const std::uint32_t kept = emit(walk, units, cut, work);

  if (grid_warp() == grid_warps() - 1) {  // the warp with the fewest units
    Norms norms = {0.0, 0.0};
    if (wanted.accumulates) norms = add_in_order(work.group_norms, parts(blocks, kBlocksOfGroup));
    if (lane() == 0) {
      *work.report = {kept, found, dense ? 1U : 0U, board.non_finite, norms};
    }
  }
}

template <DType kType>
__global__ void scatter_entries(const Index* index, const float* value, std::uint32_t count,
                                float factor, void* dense) {
  const std::uint32_t e = blockIdx.x * blockDim.x + threadIdx.x;
  if (e >= count) return;
  // Like scatter() on the CPU, this clamps only values that are then rounded to 16 bits.
  const float v = kType == DType::f32 ? factor * value[e] : product(value[e], factor);
  set_entry<kType>(dense, index[e], v);
}

// residual += kSign * entries. kSign is 1 or -1. It is a template so that a header can define it.
template <int kSign>
__global__ void add_entries(const Index* index, const float* value, std::uint32_t count,
                            float* residual) {
  const std::uint32_t e = blockIdx.x * blockDim.x + threadIdx.x;
  if (e < count) residual[index[e]] = finite_sum(residual[index[e]], kSign * value[e]);
}

// The same, and writes the old value of each entry to before[e].
template <int kSign>
__global__ void commit_entries(const Index* index, const float* value, std::uint32_t count,
                               float* residual, float* before) {
  const std::uint32_t e = blockIdx.x * blockDim.x + threadIdx.x;
  if (e >= count) return;
  const float old = residual[index[e]];
  before[e] = old;
  residual[index[e]] = finite_sum(old, kSign * value[e]);
}

// residual[index] = value.
template <class T>
__global__ void put_entries(const Index* index, const T* value, std::uint32_t count, T* residual) {
  const std::uint32_t e = blockIdx.x * blockDim.x + threadIdx.x;
  if (e < count) residual[index[e]] = value[e];
}

}  // namespace skim::cuda
