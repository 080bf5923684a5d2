// Value codes. The block codes share two ideas:
//   - The scale or levels of a block follow from its values alone, so the encoder needs only the
//     rounded values.
//   - A scale that is computed again from rounded values never gets coarser. So rounded values are
//     kept bit for bit.
// docs/wire-format.md has the layout and the bounds of the error.
#include "codec/value_codes.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "half.hpp"

namespace skim {

template <>
std::span<const std::string_view> names_of<ValueCode>() noexcept {
  static constexpr std::array<std::string_view, 6> kNames{"f32", "f16", "bf16", "q8", "q4", "q2"};
  return kNames;
}

template <>
std::span<const std::string_view> names_of<Rounding>() noexcept {
  static constexpr std::array<std::string_view, 2> kNames{"nearest", "stochastic"};
  return kNames;
}

}  // namespace skim

namespace skim::codes {
namespace {

constexpr std::uint32_t kInfinity = 0x7f800000U;

std::uint32_t magnitude(float v) noexcept { return std::bit_cast<std::uint32_t>(v) & 0x7fffffffU; }

// Decides how entries are rounded. floor(x + part()) rounds a number x >= 0 of steps to a whole
// number. part() is 1/2 to round to the nearest. If part() is random, x is rounded up with a
// probability equal to its fraction.
class Dither {
 public:
  explicit Dither(Random* random) noexcept : random_(random) {}
  bool random() const noexcept { return random_ != nullptr; }
  // A number in [0, 2^32): random, or 2^31 if rounding is to the nearest.
  std::uint32_t bits() noexcept {
    return random_ != nullptr ? static_cast<std::uint32_t>(random_->next() >> 32U) : 0x80000000U;
  }
  double part() noexcept { return bits() * 0x1p-32; }

 private:
  Random* random_;
};

// ---- 16 bits ------------------------------------------------------------------------------------

std::uint16_t with_sign_of(float v, std::uint32_t half) noexcept {
  return static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(v) >> 16U & 0x8000U) | half);
}

struct F16 {
  static float decoded(std::uint16_t bits) noexcept { return from_f16(bits); }
  static std::uint16_t nearest(float v) noexcept { return to_f16(v); }
  static std::uint16_t by_chance(float v, std::uint32_t random) noexcept {
    const std::uint32_t m = magnitude(v);
    if (m >= 0x477fe000U) return to_f16(v);  // 65504, the largest f16, and above
    // Below 2^-14, f16 numbers are multiples of 2^-24.
    if (m < 0x38800000U) {
      const double steps = std::bit_cast<float>(m) * 0x1p24F;
      return with_sign_of(v, static_cast<std::uint32_t>(steps + random * 0x1p-32));
    }
    return with_sign_of(v, (m - (112U << 23U) + (random >> 19U)) >> 13U);
  }
};

struct BF16 {
  static float decoded(std::uint16_t bits) noexcept { return from_bf16(bits); }
  static std::uint16_t nearest(float v) noexcept { return to_bf16(v); }
  static std::uint16_t by_chance(float v, std::uint32_t random) noexcept {
    const std::uint32_t m = magnitude(v);
    if (m >= 0x7f7f0000U) return to_bf16(v);  // the largest bf16, and above
    return with_sign_of(v, (m + (random >> 16U)) >> 16U);
  }
};

template <class Half>
void quantize16(std::span<float> value, Dither dither) noexcept {
  for (float& v : value) {
    v = Half::decoded(dither.random() ? Half::by_chance(v, dither.bits()) : Half::nearest(v));
  }
}

template <class Half>
void put16(std::span<const float> value, std::byte* out) noexcept {
  for (const float v : value) {
    const std::uint16_t bits = Half::nearest(v);
    std::memcpy(out, &bits, 2);
    out += 2;
  }
}

template <class Half>
void get16(const std::byte* in, std::span<float> value) noexcept {
  for (float& v : value) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, in, 2);
    in += 2;
    v = Half::decoded(bits);
  }
}

// ---- blocks -------------------------------------------------------------------------------------

using Codes = std::array<std::uint8_t, kBlock>;

constexpr std::size_t packed_bytes(int bits, std::size_t count) noexcept {
  return (static_cast<std::size_t>(bits) * count + 7) / 8;
}

// The first code is in the lowest bits of the first byte. The unused bits of the last byte are 0.
template <int kBits>
void pack(const Codes& code, std::size_t count, std::byte* out) noexcept {
  constexpr std::size_t kPerByte = 8 / kBits;
  for (std::size_t first = 0; first < count; first += kPerByte) {
    unsigned byte = 0;
    for (std::size_t i = first; i < std::min(first + kPerByte, count); ++i) {
      byte |= unsigned{code[i]} << (kBits * (i - first));
    }
    *out++ = static_cast<std::byte>(byte);
  }
}

// Returns false if the unused bits of the last byte are not 0.
template <int kBits>
bool unpack(const std::byte* in, std::size_t count, Codes& code) noexcept {
  constexpr std::size_t kPerByte = 8 / kBits;
  constexpr unsigned kMask = (1U << kBits) - 1;
  unsigned rest = 0;
  for (std::size_t first = 0; first < count; first += kPerByte) {
    rest = std::to_integer<unsigned>(*in++);
    for (std::size_t i = first; i < std::min(first + kPerByte, count); ++i) {
      code[i] = static_cast<std::uint8_t>(rest & kMask);
      rest >>= kBits;
    }
  }
  return rest == 0;
}

// q8 and q4: an entry is m * step. m is a whole number with |m| <= kMost. step is a power of two
// for the whole block, 2^(scale - 127 - (kBits - 2)). This is the layout of the OCP Microscaling
// (MX) formats, version 1.0 of 2023. Their MXINT8 has the same elements as q8, but blocks of 32.
template <int kWidth>
struct Integers {
  static constexpr int kBits = kWidth;
  static constexpr std::size_t kHead = 1;  // bytes before the codes
  static constexpr std::uint8_t kNoNumbers = 255, kHighest = 254;
  static constexpr std::uint32_t kMost = (1U << (kBits - 1)) - 1;

  static double step(std::uint8_t scale) noexcept {
    return std::ldexp(1.0, int{scale} - 127 - (kBits - 2));
  }

  // The smallest scale for which `largest` is at most kMost steps. The scale is limited to 254;
  // entries that are too large for it become kMost steps.
  static std::uint8_t scale_for(std::uint32_t largest) noexcept {
    if (largest <= kMost << (24 - kBits)) return 0;  // kMost steps of scale 0, a denormal
    // kMost steps are (2 - 2^(2 - kBits)) 2^(scale - 127). The addition carries into the exponent
    // if the fraction of `largest` exceeds this.
    const std::uint32_t scale = (largest + (1U << (25 - kBits)) - 1) >> 23U;
    return static_cast<std::uint8_t>(std::min<std::uint32_t>(scale, kHighest));
  }

  static void put(std::span<const float> value, Dither& dither, std::byte* out) noexcept {
    std::uint32_t largest = 0;
    for (const float v : value) largest = std::max(largest, magnitude(v));
    Codes code{};
    if (largest >= kInfinity) {
      *out = std::byte{kNoNumbers};
    } else {
      const std::uint8_t scale = scale_for(largest);
      const double steps = 1.0 / step(scale);  // exact
      for (std::size_t i = 0; i < value.size(); ++i) {
        const double x = double{std::abs(value[i])} * steps + dither.part();
        const int m = std::min(static_cast<int>(x), static_cast<int>(kMost));
        code[i] = static_cast<std::uint8_t>((value[i] < 0.0F ? -m : m) & ((1 << kBits) - 1));
      }
      *out = static_cast<std::byte>(scale);
    }
    pack<kBits>(code, value.size(), out + kHead);
  }

  static bool get(const std::byte* in, std::span<float> value) noexcept {
    const auto scale = std::to_integer<std::uint8_t>(*in);
    Codes code;
    if (!unpack<kBits>(in + kHead, value.size(), code)) return false;
    unsigned bad = 0;
    if (scale == kNoNumbers) {
      for (std::size_t i = 0; i < value.size(); ++i) {
        bad |= code[i];
        value[i] = std::numeric_limits<float>::quiet_NaN();
      }
      return bad == 0;
    }
    const double unit = step(scale);
    for (std::size_t i = 0; i < value.size(); ++i) {
      constexpr int kSign = 1 << (kBits - 1);
      const int m = (code[i] ^ kSign) - kSign;  // two's complement
      bad |= m == -kSign ? 1U : 0U;
      value[i] = static_cast<float>(std::max(m, 1 - kSign) * unit);
    }
    return bad == 0;
  }
};

// q2: each entry has a sign and one of the block's two magnitudes, called levels. Top-k selects no
// zeros; its magnitudes lie between a threshold and a few times the threshold. So both levels are
// in that range, and neither is zero.
//
// Rounding to the nearest: one level is the mean of the magnitudes below the middle between the
// smallest and the largest, and the other is the mean of the rest. This is one step of Lloyd's
// algorithm. (1-bit SGD, Seide et al., Interspeech 2014, uses the means on either side of zero.)
// Except for the rounding of the levels themselves, the squared error is at most the variance
// around the means, which is less than the block's squared norm. So q2 is a contraction for all
// values.
//
// Stochastic rounding: the levels are the smallest and the largest magnitude. Every entry lies
// between them, so the expected value of the result can equal the entry.
struct TwoLevels {
  static constexpr int kBits = 2;
  static constexpr std::size_t kHead = 4;  // lower and upper level, bf16
  static constexpr std::uint16_t kNoNumbers = 0x7fc0;

  struct Levels {
    std::uint16_t lower, upper;
  };

  static Levels means(std::span<const float> value, float smallest, float largest) noexcept {
    const double middle = 0.5 * (double{smallest} + double{largest});
    std::array<double, 2> total{};
    std::array<double, 2> count{};
    for (const float v : value) {
      const std::size_t upper = std::abs(v) >= middle ? 1 : 0;
      total[upper] += std::abs(v);
      count[upper] += 1.0;
    }
    const auto level = [&](std::size_t at) {
      return to_bf16(static_cast<float>(total[at] / count[at]));
    };
    // The upper level always has an entry, the largest. The lower level has none if all are equal.
    return {count[0] > 0.0 ? level(0) : level(1), level(1)};
  }

  static Levels around(float smallest, float largest) noexcept {
    const std::uint32_t below = magnitude(smallest) >> 16U;
    const std::uint32_t above = std::min((magnitude(largest) + 0xffffU) >> 16U, 0x7f7fU);
    return {static_cast<std::uint16_t>(below), static_cast<std::uint16_t>(above)};
  }

  static void put(std::span<const float> value, Dither& dither, std::byte* out) noexcept {
    std::uint32_t smallest = kInfinity, largest = 0;
    for (const float v : value) {
      smallest = std::min(smallest, magnitude(v));
      largest = std::max(largest, magnitude(v));
    }
    Codes code{};
    Levels levels{kNoNumbers, kNoNumbers};
    if (largest < kInfinity) {
      const auto low = std::bit_cast<float>(smallest), high = std::bit_cast<float>(largest);
      levels = dither.random() ? around(low, high) : means(value, low, high);
      const double lower = from_bf16(levels.lower), upper = from_bf16(levels.upper);
      for (std::size_t i = 0; i < value.size(); ++i) {
        const double above = double{std::abs(value[i])} - lower;
        const double part = dither.part();
        // Equivalent to x + part >= 1 with x = above / (upper - lower).
        const bool up = above > 0.0 && above >= (1.0 - part) * (upper - lower);
        code[i] = static_cast<std::uint8_t>((std::signbit(value[i]) ? 2 : 0) | (up ? 1 : 0));
      }
    }
    std::memcpy(out, &levels, kHead);
    pack<kBits>(code, value.size(), out + kHead);
  }

  static bool get(const std::byte* in, std::span<float> value) noexcept {
    Levels levels;
    std::memcpy(&levels, in, kHead);
    Codes code;
    if (!unpack<kBits>(in + kHead, value.size(), code)) return false;
    const bool numbers = levels.lower <= levels.upper && levels.upper < 0x7f80U;
    if (!numbers && (levels.lower != kNoNumbers || levels.upper != kNoNumbers)) return false;
    unsigned bad = 0;
    for (std::size_t i = 0; i < value.size(); ++i) {
      if (!numbers) bad |= code[i];
      const std::uint16_t level = (code[i] & 1) != 0 ? levels.upper : levels.lower;
      value[i] = from_bf16(static_cast<std::uint16_t>(level | (code[i] & 2) << 14U));
    }
    return bad == 0;
  }
};

template <class Block>
constexpr std::size_t block_bytes(std::size_t count) noexcept {
  return Block::kHead + packed_bytes(Block::kBits, count);
}

template <class Block>
std::size_t total_bytes(std::size_t nnz) noexcept {
  const std::size_t rest = nnz % kBlock;
  return nnz / kBlock * block_bytes<Block>(kBlock) + (rest > 0 ? block_bytes<Block>(rest) : 0);
}

template <class Block>
void quantize_blocks(std::span<float> value, Dither dither) noexcept {
  std::array<std::byte, block_bytes<Block>(kBlock)> bytes;
  for (std::size_t at = 0; at < value.size(); at += kBlock) {
    const std::span<float> block = value.subspan(at, std::min(kBlock, value.size() - at));
    Block::put(block, dither, bytes.data());
    Block::get(bytes.data(), block);
  }
}

template <class Block>
void put_blocks(std::span<const float> value, std::byte* out) noexcept {
  Dither to_nearest(nullptr);
  for (std::size_t at = 0; at < value.size(); at += kBlock) {
    const std::span<const float> block = value.subspan(at, std::min(kBlock, value.size() - at));
    Block::put(block, to_nearest, out);
    out += block_bytes<Block>(block.size());
  }
}

template <class Block>
bool get_blocks(const std::byte* in, std::span<float> value) noexcept {
  for (std::size_t at = 0; at < value.size(); at += kBlock) {
    const std::span<float> block = value.subspan(at, std::min(kBlock, value.size() - at));
    if (!Block::get(in, block)) return false;
    in += block_bytes<Block>(block.size());
  }
  return true;
}

}  // namespace

bool known(ValueCode code) noexcept { return is_named(code); }

std::size_t value_bytes(ValueCode code, std::size_t nnz) noexcept {
  switch (code) {
    case ValueCode::f32:
      return 4 * nnz;
    case ValueCode::f16:
    case ValueCode::bf16:
      return 2 * nnz;
    case ValueCode::q8:
      return total_bytes<Integers<8>>(nnz);
    case ValueCode::q4:
      return total_bytes<Integers<4>>(nnz);
    case ValueCode::q2:
      return total_bytes<TwoLevels>(nnz);
  }
  return 0;
}

void quantize_values(ValueCode code, std::span<float> value, Random* random) noexcept {
  const Dither dither(random);
  switch (code) {
    case ValueCode::f32:
      return;
    case ValueCode::f16:
      return quantize16<F16>(value, dither);
    case ValueCode::bf16:
      return quantize16<BF16>(value, dither);
    case ValueCode::q8:
      return quantize_blocks<Integers<8>>(value, dither);
    case ValueCode::q4:
      return quantize_blocks<Integers<4>>(value, dither);
    case ValueCode::q2:
      return quantize_blocks<TwoLevels>(value, dither);
  }
}

void put_values(ValueCode code, std::span<const float> value, std::span<std::byte> out) noexcept {
  switch (code) {
    case ValueCode::f32:
      if (!value.empty()) std::memcpy(out.data(), value.data(), value.size_bytes());
      return;
    case ValueCode::f16:
      return put16<F16>(value, out.data());
    case ValueCode::bf16:
      return put16<BF16>(value, out.data());
    case ValueCode::q8:
      return put_blocks<Integers<8>>(value, out.data());
    case ValueCode::q4:
      return put_blocks<Integers<4>>(value, out.data());
    case ValueCode::q2:
      return put_blocks<TwoLevels>(value, out.data());
  }
}

bool get_values(ValueCode code, Bytes in, std::span<float> value) noexcept {
  switch (code) {
    case ValueCode::f32:
      if (!value.empty()) std::memcpy(value.data(), in.data(), value.size_bytes());
      return true;
    case ValueCode::f16:
      get16<F16>(in.data(), value);
      return true;
    case ValueCode::bf16:
      get16<BF16>(in.data(), value);
      return true;
    case ValueCode::q8:
      return get_blocks<Integers<8>>(in.data(), value);
    case ValueCode::q4:
      return get_blocks<Integers<4>>(in.data(), value);
    case ValueCode::q2:
      return get_blocks<TwoLevels>(in.data(), value);
  }
  return false;
}

}  // namespace skim::codes
