// The loops over n of selection, compiled for every CPU target and dispatched per loop at run time.
//
// All targets give the same bits for two reasons. Sums are added in virtual lanes (see Sums). And
// no multiplication is fused with an addition: this file is compiled with -ffp-contract=off,
// because g++ contracts even intrinsics.
#include "select/kernels.hpp"

#include <cstddef>
#include <cstring>

// Vectors of unknown length cannot be stored in arrays. CPUs with such vectors run the fixed-length
// target.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "select/kernels.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>
//
#include "select/lanes-inl.hpp"

#ifndef SKIM_SELECT_KERNELS_ONCE
#define SKIM_SELECT_KERNELS_ONCE
namespace skim::kernels {
namespace {

constexpr std::size_t kWord = 64;  // entries for each 64-bit word of a bit mask
static_assert(kBlock % kWord == 0 && kBlock / kWord <= 32 && kWord % kVirtualLanes == 0);

// A float sum of squares below this may have lost terms to underflow. Each of the block's 1024
// terms loses at most 2^-150, which is negligible in a sum of 2^-100 or more.
constexpr float kTinySum = 0x1p-100F;

// The set lanes of each mask of up to 8 lanes, in order. Highway 1.0.3 has such tables, too. But
// they are local constants that g++ copies to the stack for every vector, which is 10 times slower.
struct PackTable {
  std::uint8_t lane[256][8] = {};
  constexpr PackTable() {
    for (unsigned bits = 0; bits < 256; ++bits) {
      for (unsigned i = 0, to = 0; i < 8; ++i) {
        if ((bits >> i & 1U) != 0) lane[bits][to++] = static_cast<std::uint8_t>(i);
      }
    }
  }
};
constexpr PackTable kPack;

bool trusted(double sum) {
  return sum >= static_cast<double>(kTinySum) &&
         sum <= static_cast<double>(std::numeric_limits<float>::max());
}

HWY_NOINLINE double norm2_in_double(const float* x, std::size_t n, float reciprocal) {
  double sum = 0.0;
  for (std::size_t i = 0; i < n; ++i) {
    if (!std::isfinite(x[i])) continue;
    const double v = static_cast<double>(scaled(x[i], reciprocal));
    sum += v * v;
  }
  return sum;
}

}  // namespace
}  // namespace skim::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace skim::kernels::HWY_NAMESPACE {
namespace {

using MI = hn::Mask<DI>;

// Entries between two checks for non-finite values: as many as the registers hold.
constexpr std::size_t kRow = kLanes >= 16 ? 64 : 32;
static_assert(kRow % kVirtualLanes == 0 && kWord % kRow == 0);
constexpr std::size_t kVectors = kRow / kLanes;  // in one row
static_assert(kLanes <= kSlack);

// Moves the lanes in `keep` to the front.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Pack(D d, V v, MI keep) {
  if constexpr (kLanes == 4 || kLanes == 8) {
    std::uint8_t bits = 0;
    hn::StoreMaskBits(DI(), keep, &bits);
    const hn::Rebind<std::uint8_t, DI> bytes;
    const VI lanes = hn::PromoteTo(DI(), hn::LoadU(bytes, kPack.lane[bits]));
    return hn::TableLookupLanes(v, hn::IndicesFromVec(d, lanes));
  } else {
    return hn::Compress(v, hn::RebindMask(d, keep));
  }
}

// Appends the lanes in `keep`. It writes a whole vector, so the arrays need kSlack entries after
// the room.
HWY_INLINE void Append(VF value, VI index, MI keep, Candidates& to) {
  const std::size_t count = hn::CountTrue(DI(), keep);
  const VF values = Pack(DF(), value, keep);
  const VI indices = Pack(DI(), index, keep);
  auto* const at = reinterpret_cast<std::int32_t*>(to.index + to.count);
  if (kLanes == 16 && count <= 8) {
    const hn::Half<DF> df;
    const hn::Half<DI> di;
    hn::StoreU(hn::LowerHalf(df, values), df, to.value + to.count);
    hn::StoreU(hn::LowerHalf(di, indices), di, at);
  } else {
    hn::StoreU(values, DF(), to.value + to.count);
    hn::StoreU(indices, DI(), at);
  }
  to.count += count;
}

// One bit for each lane. The first lane is the lowest bit.
HWY_INLINE std::uint64_t Bits(MI mask) {
  std::uint8_t bytes[8] = {};
  hn::StoreMaskBits(DI(), mask, bytes);
  return kLanes > 8 ? std::uint64_t{bytes[0]} | std::uint64_t{bytes[1]} << 8U : bytes[0];
}

// The repaired values of a row in which a NaN, an infinity or an overflow was found.
struct Repaired {
  float x[kRow];      // adds to the gradient's norm
  float value[kRow];  // the result; without a residual it may be non-finite
};
template <bool kResidual>
HWY_NOINLINE void Repair(const Pass& pass, const float* grad, const float* residual, Repaired& out,
                         Sums& sums) {
  const DF d;
  const DI di;
  const VI largest = Signed(kLargestFinite), infinity = Signed(kLargestFinite + 1);
  const auto clamp = [&](VF v) {  // replaces infinities; NaN stays
    const auto infinite = hn::RebindMask(d, hn::Eq(Magnitude(v), infinity));
    return hn::IfThenElse(infinite, hn::CopySign(hn::BitCast(d, largest), v), v);
  };
  for (std::size_t i = 0; i < kRow; i += kLanes) {
    const VF g = hn::LoadU(d, grad + i);
    const MI bad = hn::Gt(Magnitude(g), largest);
    const VF product = hn::Mul(g, hn::Set(d, pass.reciprocal));
    const VF x = hn::IfThenZeroElse(hn::RebindMask(d, bad), clamp(product));
    sums.non_finite += hn::CountTrue(di, bad);
    hn::StoreU(x, d, out.x + i);
    VF value = hn::IfThenElse(hn::RebindMask(d, bad), product, x);
    if constexpr (kResidual) {
      value = clamp(hn::Add(hn::Mul(hn::LoadU(d, residual + i), hn::Set(d, pass.decay)), x));
      value = hn::IfThenZeroElse(hn::RebindMask(d, hn::Gt(Magnitude(value), infinity)), value);
    }
    hn::StoreU(value, d, out.value + i);
  }
}

// Processes one row of a pass. Returns a bit mask of its candidates. `values` gets the results.
template <bool kResidual, bool kScaled>
HWY_INLINE std::uint64_t Row(const Pass& pass, const float* HWY_RESTRICT grad,
                             float* HWY_RESTRICT values, std::uint32_t above, Sums& sums,
                             VF (&gradient_sum)[kSums], VF (&total_sum)[kSums]) {
  const DF d;
  const DI di;
  const VI threshold = Signed(above);
  VF x[kVectors], value[kVectors];
  VI largest = Signed(0);
  std::uint64_t candidates = 0;
#pragma GCC unroll 16
  for (std::size_t v = 0; v < kVectors; ++v) {
    x[v] = hn::LoadU(d, grad + v * kLanes);
    if constexpr (kScaled) x[v] = hn::Mul(x[v], hn::Set(d, pass.reciprocal));
    value[v] = x[v];
    if constexpr (kResidual) {
      VF r = hn::LoadU(d, values + v * kLanes);
      if constexpr (kScaled) r = hn::Mul(r, hn::Set(d, pass.decay));
      value[v] = hn::Add(r, x[v]);
    }
    const VI magnitude = Magnitude(value[v]);
    largest = hn::Max(largest, magnitude);
    candidates |= Bits(hn::Gt(magnitude, threshold)) << v * kLanes;
  }
  // Non-finite gradient entries and overflows have a larger magnitude here than any finite float.
  if (HWY_UNLIKELY(!hn::AllFalse(di, hn::Gt(largest, Signed(kLargestFinite))))) {
    Repaired good;
    Repair<kResidual>(pass, grad, values, good, sums);
    candidates = 0;
#pragma GCC unroll 16
    for (std::size_t v = 0; v < kVectors; ++v) {
      x[v] = hn::LoadU(d, good.x + v * kLanes);
      value[v] = hn::LoadU(d, good.value + v * kLanes);
      candidates |= Bits(hn::Gt(Order(value[v]), threshold)) << v * kLanes;
    }
  }
#pragma GCC unroll 16
  for (std::size_t v = 0; v < kVectors; ++v) {
    VF& g = gradient_sum[v % kSums];
    g = hn::Add(g, hn::Mul(x[v], x[v]));
    if constexpr (kResidual || kScaled) hn::StoreU(value[v], d, values + v * kLanes);
    if constexpr (kResidual) {
      VF& t = total_sum[v % kSums];
      t = hn::Add(t, hn::Mul(value[v], value[v]));
    }
  }
  return candidates;
}

// Appends the candidates of a block that starts at entry `at`. bits: [kBlock / kWord] words.
// filled: has a bit for each word that is not zero. A word with few candidates writes 2 or 8
// entries even if it has fewer, which is cheaper than a branch that is often mispredicted.
HWY_INLINE void AppendBlock(const std::uint64_t* bits, std::uint32_t filled, const float* value,
                            Index at, Candidates& to) {
  for (; filled != 0; filled &= filled - 1) {
    const auto w = static_cast<std::size_t>(std::countr_zero(filled));
    std::uint64_t word = bits[w];
    const auto count = static_cast<std::size_t>(std::popcount(word));
    const float* const from = value + w * kWord;
    const Index first = at + static_cast<Index>(w * kWord);
    if (count > 8) {
#pragma GCC unroll 16
      for (std::size_t v = 0; v < kWord; v += kLanes) {
        const std::uint64_t lanes = word >> v;
        const std::uint8_t bytes[8] = {static_cast<std::uint8_t>(lanes),
                                       static_cast<std::uint8_t>(lanes >> 8U)};
        Append(hn::LoadU(DF(), from + v),
               hn::Iota(DI(), static_cast<std::int32_t>(first + static_cast<Index>(v))),
               hn::LoadMaskBits(DI(), bytes), to);
      }
      continue;
    }
    Index* const index = to.index + to.count;
    float* const out = to.value + to.count;
    to.count += count;
    const auto write = [&](std::size_t e) HWY_ATTR {
      const auto bit = static_cast<Index>(std::countr_zero(word)) % Index{kWord};
      index[e] = first + bit;
      out[e] = from[bit];
      word &= word - 1;
    };
#pragma GCC unroll 2
    for (std::size_t e = 0; e < 2; ++e) write(e);
    if (count <= 2) continue;
#pragma GCC unroll 6
    for (std::size_t e = 2; e < 8; ++e) write(e);
  }
}

HWY_NOINLINE bool AllZero(const float* x, std::size_t n) {
  VI any = Signed(0);
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) any = hn::Or(any, Magnitude(hn::LoadU(DF(), x + i)));
  bool zero = hn::AllTrue(DI(), hn::Eq(any, Signed(0)));
  for (; i < n; ++i) zero = zero && x[i] == 0.0F;
  return zero;
}

// The sum of squares over a block [n]. It is computed again in double if the lanes' sum has over-
// or underflowed.
HWY_INLINE double BlockNorm2(const float* x, std::size_t n, float reciprocal,
                             const VF (&sum)[kSums]) {
  float lanes[kVirtualLanes];
#pragma GCC unroll 16
  for (std::size_t v = 0; v < kSums; ++v) hn::StoreU(sum[v], DF(), lanes + v * kLanes);
  const double fast = fold(lanes);
  if (HWY_LIKELY(trusted(fast))) return fast;
  if (fast == 0.0 && AllZero(x, n)) return 0.0;
  return norm2_in_double(x, n, reciprocal);
}

// Converts n entries of a 16-bit gradient to floats, with the arithmetic of from_f16 and from_bf16.
template <bool kHalf>
HWY_INLINE void Widen(const std::uint16_t* from, std::size_t n, float* to) {
  const DF d;
  const hn::RebindToUnsigned<DF> du;
  const hn::Rebind<std::uint16_t, DF> d16;
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const auto bits = hn::PromoteTo(du, hn::LoadU(d16, from + i));
    if constexpr (kHalf) {
      const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffU));
      const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000U)));
      const VF value = hn::Mul(hn::BitCast(d, hn::ShiftLeft<13>(magnitude)), hn::Set(d, 0x1p112F));
      const VI special = hn::IfThenElseZero(hn::Gt(hn::BitCast(DI(), magnitude), Signed(0x7bffU)),
                                            Signed(0x7f800000U));
      hn::StoreU(
          hn::BitCast(d, hn::Or(hn::BitCast(du, value), hn::Or(sign, hn::BitCast(du, special)))), d,
          to + i);
    } else {
      hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(bits)), d, to + i);
    }
  }
  for (; i < n; ++i) to[i] = kHalf ? from_f16(from[i]) : from_bf16(from[i]);
}

// Entries [at, end) of the gradient as floats. Returns a pointer into the gradient, or `widened` if
// it had to convert.
HWY_INLINE const float* BlockOf(const Pass& pass, std::size_t at, std::size_t end, float* widened) {
  if (HWY_LIKELY(pass.type == DType::f32)) return static_cast<const float*>(pass.grad) + at;
  const std::uint16_t* from = static_cast<const std::uint16_t*>(pass.grad) + at;
  if (pass.type == DType::f16) {
    Widen<true>(from, end - at, widened);
  } else {
    Widen<false>(from, end - at, widened);
  }
  return widened;
}

template <bool kResidual, bool kScaled>
HWY_INLINE std::size_t CollectAs(const Pass& pass, std::size_t first, std::uint32_t above,
                                 Candidates& candidates, Sums& sums) {
  Candidates to = candidates;  // a local copy, so that the compiler can keep it in registers
  float widened[kBlock], made[kBlock];
  std::size_t at = first;
  for (; at < pass.n && to.count + kBlock <= to.room; at += kBlock) {
    const std::size_t size = std::min(kBlock, pass.n - at);
    const std::size_t padded = (size + kWord - 1) / kWord * kWord;
    const float* grad = BlockOf(pass, at, at + size, widened);
    float* values = kResidual ? pass.residual + at : made;
    if (size < padded) {  // zeros fill the last word: no candidates, no effect on norms
      if (grad != widened) std::copy_n(grad, size, widened);
      std::fill(widened + size, widened + padded, 0.0F);
      grad = widened;
      if constexpr (kResidual) {
        std::copy_n(values, size, made);
        std::fill(made + size, made + padded, 0.0F);
        values = made;
      }
    }
    VF gradient_sum[kSums], total_sum[kSums];
#pragma GCC unroll 16
    for (std::size_t v = 0; v < kSums; ++v) gradient_sum[v] = total_sum[v] = hn::Zero(DF());
    std::uint64_t bits[kBlock / kWord];
    std::uint32_t filled = 0;
    for (std::size_t i = 0; i < padded; i += kWord) {
      std::uint64_t word = 0;
#pragma GCC unroll 2
      for (std::size_t row = 0; row < kWord; row += kRow) {
        word |= Row<kResidual, kScaled>(pass, grad + i + row, values + i + row, above, sums,
                                        gradient_sum, total_sum)
                << row;
      }
      bits[i / kWord] = word;
      filled |= static_cast<std::uint32_t>(word != 0) << i / kWord;
    }
    AppendBlock(bits, filled, kResidual || kScaled ? values : grad, static_cast<Index>(at), to);
    sums.gradient.add(BlockNorm2(grad, size, pass.reciprocal, gradient_sum));
    if constexpr (kResidual) {
      sums.total.add(BlockNorm2(values, size, 1.0F, total_sum));
      if (values == made) std::copy_n(made, size, pass.residual + at);
      if (pass.clear != nullptr) {
        const std::size_t bytes = bytes_of(pass.type);
        std::memset(static_cast<std::byte*>(pass.clear) + at * bytes, 0, size * bytes);
      }
    }
  }
  candidates.count = to.count;
  return std::min(at, pass.n);
}

}  // namespace

std::size_t Collect(const Pass& pass, std::size_t first, std::uint32_t above,
                    Candidates& candidates, Sums& sums) {
  const bool is_scaled = pass.reciprocal != 1.0F || pass.decay != 1.0F;
  if (pass.residual != nullptr) {
    return is_scaled ? CollectAs<true, true>(pass, first, above, candidates, sums)
                     : CollectAs<true, false>(pass, first, above, candidates, sums);
  }
  return is_scaled ? CollectAs<false, true>(pass, first, above, candidates, sums)
                   : CollectAs<false, false>(pass, first, above, candidates, sums);
}

std::uint32_t Smallest(const float* x, std::size_t n) {
  VI least = Signed(kOrderOfNan);
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) least = hn::Min(least, Order(hn::LoadU(DF(), x + i)));
  std::int32_t lanes[kLanes];
  hn::StoreU(least, DI(), lanes);
  auto result = static_cast<std::uint32_t>(*std::min_element(lanes, lanes + kLanes));
  for (; i < n; ++i) result = std::min(result, order(x[i]));
  return result;
}

Bracket BracketOf(const float* x, std::size_t n, std::uint32_t low, std::uint32_t high,
                  std::uint32_t* middle) {
  const DI di;
  const VI vlow = Signed(low), vhigh = Signed(high);
  Bracket result;
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const VI o = Order(hn::LoadU(DF(), x + i));
    const MI above = hn::Gt(o, vhigh);
    result.above += hn::CountTrue(di, above);
    const MI inside = hn::Not(hn::Or(above, hn::Gt(vlow, o)));
    if (kLanes < 4 && hn::AllFalse(di, inside)) continue;
    hn::StoreU(Pack(di, o, inside), di, reinterpret_cast<std::int32_t*>(middle + result.inside));
    result.inside += hn::CountTrue(di, inside);
  }
  for (; i < n; ++i) {
    const std::uint32_t o = order(x[i]);
    if (o > high) ++result.above;
    if (o >= low && o <= high) middle[result.inside++] = o;
  }
  return result;
}

void KeepAbove(const Candidates& from, std::uint32_t cut, std::size_t ties, Candidates& into) {
  const DF d;
  const DI di;
  const VI vcut = Signed(cut);
  const Candidates candidates = from;  // `from` and `into` may be the same object
  Candidates to = into;
  to.count = 0;
  // This works in place: a vector is written at or before the place where it was read.
  for (std::size_t i = 0; i < candidates.count; i += kLanes) {
    if (i + kLanes <= candidates.count) {
      const VF value = hn::LoadU(d, candidates.value + i);
      const VI index = hn::LoadU(di, reinterpret_cast<const std::int32_t*>(candidates.index + i));
      const VI o = Order(value);
      MI keep = hn::Gt(o, vcut);
      std::size_t equal = 0;
      if (ties > 0) {
        keep = hn::Or(keep, hn::Eq(o, vcut));
        equal = hn::CountTrue(di, hn::Eq(o, vcut));
      }
      if (equal <= ties) {
        ties -= equal;
        Append(value, index, keep, to);
        continue;
      }
    }
    // One by one: the last vector, and vectors with more ties than may be kept.
    for (std::size_t j = i; j < std::min(i + kLanes, candidates.count); ++j) {
      const std::uint32_t o = order(candidates.value[j]);
      if (o < cut || (o == cut && ties == 0)) continue;
      if (o == cut) --ties;
      to.index[to.count] = candidates.index[j];
      to.value[to.count] = candidates.value[j];
      ++to.count;
    }
  }
  into.count = to.count;
}

std::int64_t RunningTarget() { return HWY_TARGET; }

}  // namespace skim::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace skim::kernels {

HWY_EXPORT(Collect);
HWY_EXPORT(Smallest);
HWY_EXPORT(BracketOf);
HWY_EXPORT(KeepAbove);
HWY_EXPORT(RunningTarget);

std::size_t collect(const Pass& pass, std::size_t first, std::uint32_t above,
                    Candidates& candidates, Sums& sums) {
  return HWY_DYNAMIC_DISPATCH(Collect)(pass, first, above, candidates, sums);
}

double norm2(const float* x, std::size_t n) {
  Index index[kSlack];  // stays empty, but Append may write a vector past its end
  float value[kSlack];
  Candidates none{index, value, 0, kBlock};
  Sums sums;
  collect({.grad = x, .n = n}, 0, kAboveAll, none, sums);
  return sums.gradient;
}

std::uint32_t smallest(const float* x, std::size_t n) {
  return HWY_DYNAMIC_DISPATCH(Smallest)(x, n);
}

Bracket bracket(const float* x, std::size_t n, std::uint32_t low, std::uint32_t high,
                std::uint32_t* middle) {
  return HWY_DYNAMIC_DISPATCH(BracketOf)(x, n, low, high, middle);
}

void keep_above(const Candidates& candidates, std::uint32_t cut, std::size_t ties, Candidates& to) {
  HWY_DYNAMIC_DISPATCH(KeepAbove)(candidates, cut, ties, to);
}

std::int64_t compiled_targets() noexcept { return HWY_TARGETS; }
std::int64_t running_target() noexcept { return HWY_DYNAMIC_DISPATCH(RunningTarget)(); }

}  // namespace skim::kernels
#endif
