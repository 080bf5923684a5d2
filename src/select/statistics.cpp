// Moments and counts over n values, compiled for every CPU target like kernels.cpp. All targets
// give the same bits, because they all sum in 32 virtual lanes over blocks of kBlock.
#include "select/statistics.hpp"

// Vectors of unknown length cannot be stored in arrays. CPUs with such vectors run the fixed-length
// target.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "select/statistics.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>
//
#include "select/lanes-inl.hpp"

#ifndef SKIM_SELECT_STATISTICS_ONCE
#define SKIM_SELECT_STATISTICS_ONCE
namespace skim::kernels {
namespace {

// Entries [at, at + n) as floats, followed by zeros up to a multiple of kVirtualLanes. Returns a
// pointer into the values, or `room` if it had to copy.
const float* block_of(const Pass& values, std::size_t at, std::size_t n, float (&room)[kBlock]) {
  if (values.type == DType::f32 && values.reciprocal == 1.0F && n % kVirtualLanes == 0) {
    return static_cast<const float*>(values.grad) + at;
  }
  for (std::size_t i = 0; i < n; ++i) room[i] = result(values, at + i);
  std::fill(room + n, room + kBlock, 0.0F);
  return room;
}

// For a block whose sums overflow in float.
HWY_NOINLINE void add_in_double(const float* x, std::size_t n, std::uint32_t above, Moments& to) {
  for (std::size_t i = 0; i < n; ++i) {
    if (!std::isfinite(x[i]) || order(x[i]) <= above) continue;
    to.sum += static_cast<double>(x[i]);
    to.sum_abs += static_cast<double>(std::abs(x[i]));
  }
}

}  // namespace
}  // namespace skim::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace skim::kernels::HWY_NAMESPACE {
namespace {

template <class F>
HWY_INLINE std::uint32_t Reduced(VI v, F combine) {
  std::int32_t lanes[kLanes];
  hn::StoreU(v, DI(), lanes);
  auto total = static_cast<std::uint32_t>(lanes[0]);
  for (std::size_t i = 1; i < kLanes; ++i) {
    total = combine(total, static_cast<std::uint32_t>(lanes[i]));
  }
  return total;
}

HWY_INLINE std::uint32_t Total(VI v) {
  return Reduced(v, [](std::uint32_t a, std::uint32_t b) { return a + b; });
}

}  // namespace

Moments MomentsOf(const Pass& values, std::uint32_t above) {
  const DF d;
  const DI di;
  const VI gate = Signed(above), largest_finite = Signed(kLargestFinite);
  Moments result;
  VI least = Signed(kAboveAll), largest = Signed(0);
  float room[kBlock];
  for (std::size_t at = 0; at < values.n; at += kBlock) {
    const std::size_t n = std::min(kBlock, values.n - at);
    const float* const x = block_of(values, at, n, room);
    VF sum[kSums], sum_abs[kSums];
#pragma GCC unroll 32
    for (std::size_t v = 0; v < kSums; ++v) sum[v] = sum_abs[v] = hn::Zero(d);
    VI count = Signed(0);
    for (std::size_t i = 0; i < n; i += kVirtualLanes) {
#pragma GCC unroll 32
      for (std::size_t v = 0; v < kSums; ++v) {
        const VF entry = hn::LoadU(d, x + i + v * kLanes);
        const VI o = Order(entry);
        const VI taken = hn::AndNot(hn::VecFromMask(di, hn::Gt(o, largest_finite)),
                                    hn::VecFromMask(di, hn::Gt(o, gate)));
        count = hn::Sub(count, taken);
        const VF kept = hn::And(entry, hn::BitCast(d, taken));
        sum[v] = hn::Add(sum[v], kept);
        sum_abs[v] = hn::Add(sum_abs[v], hn::Abs(kept));
        largest = hn::Max(largest, hn::And(o, taken));
        least = hn::Min(least, hn::Or(hn::And(o, taken), hn::AndNot(taken, Signed(kAboveAll))));
      }
    }
    result.count += Total(count);
    float lanes[kVirtualLanes], lanes_abs[kVirtualLanes];
#pragma GCC unroll 32
    for (std::size_t v = 0; v < kSums; ++v) {
      hn::StoreU(sum[v], d, lanes + v * kLanes);
      hn::StoreU(sum_abs[v], d, lanes_abs + v * kLanes);
    }
    const double of_abs = fold(lanes_abs);
    if (HWY_LIKELY(std::isfinite(of_abs))) {
      result.sum += fold(lanes);
      result.sum_abs += of_abs;
    } else {
      add_in_double(x, n, above, result);
    }
  }
  const std::uint32_t largest_order =
      Reduced(largest, [](std::uint32_t a, std::uint32_t b) { return std::max(a, b); });
  if (largest_order > 0) {
    result.largest_abs = std::bit_cast<float>(largest_order);
    result.least_abs = std::bit_cast<float>(
        Reduced(least, [](std::uint32_t a, std::uint32_t b) { return std::min(a, b); }));
  }
  return result;
}

void CountAbove(const Pass& values, const std::uint32_t* above, std::size_t thresholds,
                std::size_t* counts) {
  const DI di;
  float room[kBlock];
  for (std::size_t at = 0; at < values.n; at += kBlock) {
    const std::size_t n = std::min(kBlock, values.n - at);
    const float* const x = block_of(values, at, n, room);  // stays in the cache
    for (std::size_t t = 0; t < thresholds; ++t) {
      const VI gate = Signed(above[t]);
      VI count = Signed(0);
      for (std::size_t i = 0; i < n; i += kLanes) {
        const auto passes = hn::Gt(Order(hn::LoadU(DF(), x + i)), gate);
        count = hn::Sub(count, hn::VecFromMask(di, passes));
      }
      counts[t] += Total(count);
    }
  }
}

}  // namespace skim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace skim::kernels {

HWY_EXPORT(MomentsOf);
HWY_EXPORT(CountAbove);

Moments moments(const Pass& values, std::uint32_t above) {
  return HWY_DYNAMIC_DISPATCH(MomentsOf)(values, above);
}

void count_above(const Pass& values, std::span<const std::uint32_t> above,
                 std::span<std::size_t> counts) {
  std::fill(counts.begin(), counts.end(), std::size_t{0});
  HWY_DYNAMIC_DISPATCH(CountAbove)(values, above.data(), above.size(), counts.data());
}

}  // namespace skim::kernels
#endif
