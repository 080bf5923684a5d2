// Internal: the vectors that the loops of selection are written in. Include it after
// hwy/highway.h, which compiles it once for each CPU target.
#if defined(SKIM_SELECT_LANES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef SKIM_SELECT_LANES_INL_HPP
#undef SKIM_SELECT_LANES_INL_HPP
#else
#define SKIM_SELECT_LANES_INL_HPP
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "select/kernels.hpp"

HWY_BEFORE_NAMESPACE();
namespace skim::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

using DF = hn::CappedTag<float, kVirtualLanes>;
using DI = hn::RebindToSigned<DF>;
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;

constexpr std::size_t kLanes = hn::MaxLanes(DF());
constexpr std::size_t kSums = kVirtualLanes / kLanes;  // accumulators of one sum

// Signed comparisons: orders have no sign bit, and Gt on int32 exists on every target.
HWY_INLINE VI Signed(std::uint32_t order) {
  return hn::Set(DI(), static_cast<std::int32_t>(order));
}
HWY_INLINE VI Magnitude(VF v) { return hn::And(hn::BitCast(DI(), v), Signed(0x7fffffffU)); }
HWY_INLINE VI Order(VF v) { return hn::Min(Magnitude(v), Signed(kOrderOfNan)); }

}  // namespace
}  // namespace skim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
