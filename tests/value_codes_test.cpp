// Value codes: each against a slow oracle, its bounds, chance without bias, and the frames of
// yesterday.
#include "codec/value_codes.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "allocations.hpp"
#include "golden.hpp"
#include "half.hpp"
#include "oracle.hpp"
#include "skim/error.hpp"

namespace skim {
namespace {

using Floats = std::vector<float>;
using Message = std::vector<std::byte>;

constexpr std::size_t kBlock = 64;
constexpr float kMax = std::numeric_limits<float>::max();
constexpr std::array kLossy = {ValueCode::f16, ValueCode::bf16, ValueCode::q8, ValueCode::q4,
                               ValueCode::q2};
constexpr std::array kRoundings = {Rounding::nearest, Rounding::stochastic};

CodecOptions options(ValueCode code, Rounding rounding = Rounding::nearest,
                     std::uint64_t seed = 0) {
  CodecOptions o;
  o.value = code;
  o.rounding = rounding;
  o.seed = seed;
  return o;
}

SparseBuffer entries(const Floats& x) {
  SparseBuffer s;
  s.reset(3 * x.size());
  for (std::size_t e = 0; e < x.size(); ++e) s.append(static_cast<Index>(3 * e), x[e]);
  return s;
}
Floats quantized(const CodecOptions& o, const Floats& x, StepId id = {}, int stream = 0) {
  SparseBuffer s = entries(x);
  Codec(o).quantize(s, id, stream);
  return {s.values().begin(), s.values().end()};
}
bool same_bits(const Floats& a, const Floats& b) {
  return std::ranges::equal(a, b, [](float x, float y) {
    return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y);
  });
}
std::vector<Floats> blocks_of(const Floats& x) {
  std::vector<Floats> all;
  for (std::size_t at = 0; at < x.size(); at += kBlock) {
    all.emplace_back(x.begin() + static_cast<std::ptrdiff_t>(at),
                     x.begin() + static_cast<std::ptrdiff_t>(std::min(at + kBlock, x.size())));
  }
  return all;
}

// Finite values of every kind, 0 to 200 of them.
Floats hard_values(std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  const std::size_t n = rng() % 4 == 0 ? kBlock * (rng() % 3) + rng() % 2 : rng() % 201;
  Floats x = test::normal(n, seed);
  const std::uint64_t kind = rng() % 10;
  const int shift = static_cast<int>(rng() % 280) - 150;
  for (float& v : x) {
    switch (kind) {
      case 0:  // as top-k selects: from a threshold upwards
        v = std::copysign(3.0F - std::log(0.001F + std::fabs(std::remainder(v, 1.0F))), v);
        break;
      case 1:  // over all orders of magnitude
        v = std::ldexp(v, static_cast<int>(rng() % 270) - 145);
        break;
      case 2:  // some of any bits
        v = std::bit_cast<float>(static_cast<std::uint32_t>(rng()));
        break;
      case 3:
        v = std::round(20.0F * v);
        break;
      case 4:  // all equal but for the sign
        v = std::copysign(0.3F, v);
        break;
      case 5:  // powers of two and their neighbours, where scales change
        v = std::ldexp(1.0F + static_cast<float>(rng() % 3) * 0x1p-23F,
                       static_cast<int>(rng() % 9));
        if (rng() % 2 == 0) v = std::nextafter(v, 0.0F);
        break;
      case 6:  // one that hides all others
        v *= rng() % 60 == 0 ? 1e6F : 1.0F;
        break;
      case 7:  // what is nearly the limit of a scale: 127 or 7 steps
        v = std::ldexp(rng() % 2 == 0 ? 127.0F : 7.0F, static_cast<int>(rng() % 4)) +
            static_cast<float>(rng() % 3) * 0x1p-16F;
        break;
      case 8:  // small or large as a whole, down to denormals, up to the largest floats
        v = std::ldexp(v, shift);
        break;
      default:
        if (rng() % 3 == 0) v = rng() % 2 == 0 ? 0.0F : -0.0F;
    }
    if (!std::isfinite(v)) v = rng() % 2 == 0 ? kMax : -kMax;
  }
  return x;
}
constexpr std::uint64_t kSeeds = 600;

// ---- what is stored, by the book ----------------------------------------------------------------

Floats integers_oracle(const Floats& block, int bits) {
  const double most = std::ldexp(1.0, bits - 1) - 1.0;
  double largest = 0.0, step = 0.0;
  for (const float v : block) largest = std::max(largest, std::fabs(double{v}));
  for (int scale = 0; scale < 255; ++scale) {
    step = std::ldexp(1.0, scale - 127 - (bits - 2));
    if (largest <= most * step) break;
  }
  Floats out;
  for (const float v : block) {
    const double m = std::min(most, std::floor(std::fabs(v) / step + 0.5));
    out.push_back(static_cast<float>(v < 0.0F && m > 0.0 ? -m * step : m * step));
  }
  return out;
}

// The nearest bfloat16, ties to even.
double bf16_oracle(double v) {
  const auto down =
      static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(v)) >> 16U);
  const auto up = static_cast<std::uint16_t>(down + 1U);
  const double low = test::meaning(down, DType::bf16), high = test::meaning(up, DType::bf16);
  if (std::isinf(high)) return low;
  if (v - low == high - v) return down % 2 == 0 ? low : high;
  return v - low < high - v ? low : high;
}

Floats two_levels_oracle(const Floats& block) {
  double smallest = INFINITY, largest = 0.0;
  for (const float v : block) {
    smallest = std::min(smallest, std::fabs(double{v}));
    largest = std::max(largest, std::fabs(double{v}));
  }
  std::array<double, 2> total{}, count{};
  for (const float v : block) {
    const std::size_t group = std::fabs(double{v}) >= (smallest + largest) / 2 ? 1 : 0;
    total[group] += std::fabs(double{v});
    count[group] += 1.0;
  }
  const double upper = bf16_oracle(static_cast<float>(total[1] / count[1]));
  const double lower =
      count[0] > 0.0 ? bf16_oracle(static_cast<float>(total[0] / count[0])) : upper;
  Floats out;
  for (const float v : block) {
    const double m = std::fabs(double{v});
    out.push_back(std::copysign(static_cast<float>(m - lower < upper - m ? lower : upper), v));
  }
  return out;
}

Floats oracle(ValueCode code, const Floats& x) {
  Floats out;
  for (const Floats& block : blocks_of(x)) {
    Floats rounded = block;
    for (float& v : rounded) {
      if (code == ValueCode::f16) v = from_f16(to_f16(v));
      if (code == ValueCode::bf16) v = from_bf16(to_bf16(v));
    }
    if (code == ValueCode::q8) rounded = integers_oracle(block, 8);
    if (code == ValueCode::q4) rounded = integers_oracle(block, 4);
    if (code == ValueCode::q2) rounded = two_levels_oracle(block);
    out.insert(out.end(), rounded.begin(), rounded.end());
  }
  return out;
}

TEST(value_codes, nearest_is_the_oracle) {
  for (const ValueCode code : kLossy) {
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      const Floats x = hard_values(seed);
      EXPECT_TRUE(same_bits(quantized(options(code), x), oracle(code, x)))
          << name_of(code) << " seed " << seed;
    }
  }
}

std::size_t bytes_by_the_book(ValueCode code, std::size_t nnz) {
  if (code == ValueCode::f32) return 4 * nnz;
  if (code == ValueCode::f16 || code == ValueCode::bf16) return 2 * nnz;
  std::size_t bytes = 0;
  for (std::size_t at = 0; at < nnz; at += kBlock) {
    const std::size_t count = std::min(kBlock, nnz - at);
    bytes += code == ValueCode::q8   ? 1 + count
             : code == ValueCode::q4 ? 1 + (count + 1) / 2
                                     : 4 + (count + 3) / 4;
  }
  return bytes;
}

// What is quantized stays, bit for bit, whatever is drawn, quantized again or sent.
TEST(value_codes, quantized_values_survive_everything) {
  for (const ValueCode code : kLossy) {
    for (const Rounding rounding : kRoundings) {
      for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
        SCOPED_TRACE(std::string(name_of(code)) + " seed " + std::to_string(seed));
        const Floats q = quantized(options(code, rounding, seed), hard_values(seed), {seed, 3}, 5);
        for (const Rounding again : kRoundings) {
          EXPECT_TRUE(same_bits(quantized(options(code, again, seed + 1), q), q));
        }
        EXPECT_TRUE(std::ranges::all_of(q, [](float v) { return std::isfinite(v); }));

        const Codec codec(options(code, rounding));
        const SparseBuffer s = entries(q);
        Message frame;
        codec.encode(s.view(), nullptr, frame);
        EXPECT_LE(frame.size(), codec.max_encoded_bytes(q.size(), s.view().dim));
        SparseBuffer out;
        EXPECT_EQ(Codec().decode(frame, s.view().dim, out, nullptr).error, DecodeError::none);
        EXPECT_TRUE(test::same(out.view(), s.view()));
      }
    }
  }
}

TEST(value_codes, lengths_are_exact) {
  for (std::size_t code = 0; code < names_of<ValueCode>().size(); ++code) {
    for (std::size_t nnz = 0; nnz < 3 * kBlock + 2; ++nnz) {
      const auto c = static_cast<ValueCode>(code);
      const std::size_t bytes = codes::value_bytes(c, nnz);
      EXPECT_EQ(bytes, bytes_by_the_book(c, nnz)) << name_of(c) << " " << nnz;
      // One byte more, which must stay as it is.
      const std::unique_ptr<std::byte[]> out(new std::byte[bytes + 1]);
      std::fill_n(out.get(), bytes + 1, std::byte{0xa5});
      codes::put_values(c, Floats(nnz, -1.0F), {out.get(), bytes});
      EXPECT_EQ(out[bytes], std::byte{0xa5});
      Floats back(nnz);
      EXPECT_TRUE(codes::get_values(c, {out.get(), bytes}, back));
      EXPECT_EQ(back, Floats(nnz, -1.0F));
    }
  }
}

// ---- bounds of the error ------------------------------------------------------------------------

// Of one entry, as docs/wire-format.md states it. Chance may go to the farther neighbour.
double bound(ValueCode code, Rounding rounding, float v, const Floats& block) {
  double largest = 0.0, smallest = INFINITY;
  for (const float w : block) {
    largest = std::max(largest, std::fabs(double{w}));
    smallest = std::min(smallest, std::fabs(double{w}));
  }
  const double farther = rounding == Rounding::stochastic ? 2.0 : 1.0;
  switch (code) {
    case ValueCode::f16:
      return std::fabs(v) > 65504.0F ? std::fabs(double{v}) - 65504.0
                                     : farther * std::max(0x1p-11 * std::fabs(double{v}), 0x1p-25);
    case ValueCode::bf16:
      return farther * std::max(0x1p-8 * std::fabs(double{v}), 0x1p-134);
    case ValueCode::q8:
      return farther * std::max(largest / 127.0, 0x1p-134);
    case ValueCode::q4:
      return farther * std::max(largest / 7.0, 0x1p-130);
    default:
      return farther * (0.5 * (largest - smallest) + std::max(0x1p-8 * largest, 0x1p-134));
  }
}

TEST(value_codes, errors_stay_within_their_bounds) {
  for (const ValueCode code : kLossy) {
    for (const Rounding rounding : kRoundings) {
      double worst = 0.0;
      for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
        const Floats x = hard_values(seed), q = quantized(options(code, rounding), x, {seed, 0});
        const std::vector<Floats> before = blocks_of(x), after = blocks_of(q);
        for (std::size_t b = 0; b < before.size(); ++b) {
          for (std::size_t i = 0; i < before[b].size(); ++i) {
            const double error = std::fabs(double{before[b][i]} - double{after[b][i]});
            const double most = bound(code, rounding, before[b][i], before[b]);
            EXPECT_LE(error, most) << name_of(code) << " seed " << seed << " of " << before[b][i];
            worst = std::max(worst, error / most);
          }
        }
      }
      EXPECT_GT(worst, 0.9) << name_of(code) << ": the bound could be smaller";
    }
  }
}

// To the nearest, no block gains: |x - q|^2 < |x|^2, so error feedback contracts.
TEST(value_codes, rounding_to_the_nearest_contracts) {
  for (const ValueCode code : {ValueCode::q8, ValueCode::q4, ValueCode::q2}) {
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      const Floats x = hard_values(seed), q = quantized(options(code), x);
      const std::vector<Floats> before = blocks_of(x), after = blocks_of(q);
      for (std::size_t b = 0; b < before.size(); ++b) {
        double norm = 0.0, error = 0.0;
        for (std::size_t i = 0; i < before[b].size(); ++i) {
          norm += std::pow(double{before[b][i]}, 2);
          error += std::pow(double{before[b][i]} - double{after[b][i]}, 2);
        }
        if (norm < 0x1p-240) continue;  // below what scales reach, where all may become 0
        EXPECT_LT(error, norm) << name_of(code) << " seed " << seed;
      }
    }
  }
}

// ---- chance -------------------------------------------------------------------------------------

// The mean over many seeds is the value, within five standard deviations of that mean; what is
// between two neighbours takes both of them.
TEST(value_codes, stochastic_rounding_has_no_bias) {
  constexpr std::size_t kDraws = 4000;
  Floats x = test::normal(2 * kBlock + 6, 1);
  for (std::size_t i = 0; i < kBlock; ++i) x[i] = std::copysign(2.0F + std::fabs(x[i]), x[i]);
  for (std::size_t i = 0; i < 10; ++i) x[kBlock + i] *= 0x1p-20F;  // small halves, and 0 steps
  for (const ValueCode code : kLossy) {
    std::vector<double> mean(x.size(), 0.0);
    Floats low = quantized(options(code, Rounding::stochastic), x), high = low;
    for (std::uint64_t draw = 0; draw < kDraws; ++draw) {
      const Floats q = quantized(options(code, Rounding::stochastic, draw % 7), x,
                                 {draw / 49, static_cast<Slot>(draw / 7 % 7)}, 2);
      for (std::size_t i = 0; i < x.size(); ++i) {
        mean[i] += double{q[i]} / kDraws;
        low[i] = std::min(low[i], q[i]);
        high[i] = std::max(high[i], q[i]);
      }
    }
    std::size_t between = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double v = x[i], below = v - low[i], above = high[i] - v;
      if (low[i] == high[i]) {  // hit exactly, or nearly so: then the other neighbour is rare
        EXPECT_LE(std::fabs(v - low[i]), 1e-3 * bound(code, Rounding::stochastic, x[i], x))
            << name_of(code) << " entry " << i;
        continue;
      }
      ++between;
      EXPECT_GE(below, 0.0);
      EXPECT_GE(above, 0.0);
      EXPECT_NEAR(mean[i], v, 5.0 * std::sqrt(below * above / kDraws))
          << name_of(code) << " entry " << i;
    }
    EXPECT_GT(between, x.size() * 3 / 4) << name_of(code);
  }
}

// Chance depends on seed, step, slot, stream and place, and on nothing else.
TEST(value_codes, draws_are_a_function_of_their_key) {
  const Floats x = test::normal(300, 4);
  for (const ValueCode code : kLossy) {
    const auto draw = [&](std::uint64_t seed, StepId id, int stream) {
      return quantized(options(code, Rounding::stochastic, seed), x, id, stream);
    };
    const Floats one = draw(1, {2, 3}, 4);
    EXPECT_EQ(draw(1, {2, 3}, 4), one);
    EXPECT_NE(draw(2, {2, 3}, 4), one);
    EXPECT_NE(draw(1, {3, 3}, 4), one);
    EXPECT_NE(draw(1, {2, 4}, 4), one);
    EXPECT_NE(draw(1, {2, 3}, 5), one);
    EXPECT_NE(draw(1, {3, 2}, 4), one);
    // Not one number for all entries either: equal ones are rounded both ways.
    const Floats equal = quantized(options(code, Rounding::stochastic), [] {
      Floats e(kBlock, 1.001F);
      e[0] = 1.5F;
      e[1] = 0.1F;
      return e;
    }());
    EXPECT_FALSE(std::ranges::all_of(equal.begin() + 2, equal.end(), [&](float v) {
      return v == equal[2];
    })) << name_of(code);
  }
}

// ---- NaN, infinity, zero ------------------------------------------------------------------------

TEST(value_codes, non_finite_values) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const float bad : {inf, -inf, std::numeric_limits<float>::quiet_NaN()}) {
    for (const Rounding rounding : kRoundings) {
      for (const ValueCode code : kLossy) {
        SCOPED_TRACE(name_of(code));
        Floats x = test::normal(3 * kBlock, 9);
        x[kBlock + 5] = bad;
        const Floats q = quantized(options(code, rounding), x);
        EXPECT_TRUE(same_bits(quantized(options(code, rounding), q), q));
        const bool whole_block = code != ValueCode::f16 && code != ValueCode::bf16;
        for (std::size_t i = 0; i < x.size(); ++i) {
          if (whole_block && i / kBlock == 1) {
            EXPECT_TRUE(std::isnan(q[i])) << i;
          } else if (i == kBlock + 5) {
            EXPECT_TRUE(std::isnan(bad) ? std::isnan(q[i]) : q[i] == bad);
          } else {
            EXPECT_TRUE(std::isfinite(q[i])) << i;
          }
        }
        const SparseBuffer s = entries(q);
        Message frame;
        Codec(options(code)).encode(s.view(), nullptr, frame);
        SparseBuffer out;
        EXPECT_EQ(Codec().decode(frame, s.view().dim, out, nullptr).error, DecodeError::none);
        EXPECT_TRUE(test::same(out.view(), s.view()));
      }
    }
  }
}

// An entry that becomes 0 is still one, and small values are not lost for having large neighbours
// at 2 bits.
TEST(value_codes, what_becomes_zero_stays_an_entry) {
  Floats x(kBlock, 1e-3F);
  x[7] = 1000.0F;
  for (const ValueCode code : {ValueCode::q8, ValueCode::q4}) {
    const Floats q = quantized(options(code), x);
    EXPECT_EQ(q.size(), x.size());
    EXPECT_EQ(std::ranges::count(q, 0.0F), static_cast<std::ptrdiff_t>(kBlock - 1));
  }
  const Floats q = quantized(options(ValueCode::q2), x);
  EXPECT_NEAR(q[0], 1e-3F, 1e-5F);
  EXPECT_EQ(q[7], 1000.0F);
}

// ---- frames of yesterday ------------------------------------------------------------------------

const std::filesystem::path kGolden = std::filesystem::path(SKIM_GOLDEN_DIR) / "values";

Message golden(const std::string& name) { return test::read_hex(kGolden / (name + ".hex")); }

// 67 entries: a whole block, and one of three, with a 0.
Floats golden_values() {
  Floats x;
  for (int e = 0; e < 67; ++e) {
    x.push_back((e % 3 == 1 ? -0.3F : 0.3F) * static_cast<float>(200 + 7 * (e * 11 % 64)));
  }
  x[66] = 0.0F;
  return x;
}

std::string hex(const Message& bytes) {
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    const auto b = std::to_integer<unsigned>(bytes[i]);
    text += kDigits[b >> 4U];
    text += kDigits[b & 15U];
    text += i % 16 == 15 ? '\n' : ' ';
  }
  return text;
}

// docs/wire-format.md, worked by hand.
TEST(value_codes, the_example_of_the_specification) {
  const auto bytes = [](ValueCode code) {
    Message out(codes::value_bytes(code, 2));
    codes::put_values(code, Floats{1.5F, -2.0F}, out);
    return hex(out);
  };
  EXPECT_EQ(bytes(ValueCode::f16), "00 3e 00 c0 ");
  EXPECT_EQ(bytes(ValueCode::bf16), "c0 3f 00 c0 ");
  EXPECT_EQ(bytes(ValueCode::q8), "80 30 c0 ");
  EXPECT_EQ(bytes(ValueCode::q4), "80 c3 ");
  EXPECT_EQ(bytes(ValueCode::q2), "c0 3f 00 40 0c ");
}

struct Good {
  std::string name;
  ValueCode code;
  Rounding rounding;
};
std::vector<Good> good_frames() {
  std::vector<Good> all;
  for (const ValueCode code : kLossy) {
    all.push_back({"good_" + std::string(name_of(code)), code, Rounding::nearest});
    all.push_back(
        {"good_" + std::string(name_of(code)) + "_stochastic", code, Rounding::stochastic});
  }
  return all;
}

TEST(value_codes, golden_frames_decode_today_and_are_what_is_written) {
  for (const Good& good : good_frames()) {
    CodecOptions o = options(good.code, good.rounding, 11);
    o.index = IndexCode::raw32;
    SparseBuffer s = entries(golden_values());
    Codec(o).quantize(s, {5, 6}, 7);
    Message written;
    Codec(o).encode(s.view(), nullptr, written);
    const Message frame = golden(good.name);
    EXPECT_EQ(written, frame) << good.name << ".hex should be\n" << hex(written);
    SparseBuffer out;
    EXPECT_EQ(Codec().decode(frame, s.view().dim, out, nullptr).error, DecodeError::none);
    EXPECT_TRUE(test::same(out.view(), s.view())) << good.name;
  }
}

// Frames whose checksum is right and whose values no encoder writes.
TEST(value_codes, golden_bad_frames_give_their_error) {
  const std::vector<std::string> names = {
      "bad_q8_lowest_code",     // -128
      "bad_q8_codes_of_nan",    // scale 255, codes that are not 0
      "bad_q4_lowest_code",     // -8
      "bad_q4_codes_of_nan",    //
      "bad_q4_padding",         // of an odd number of entries
      "bad_q2_padding",         //
      "bad_q2_levels_descend",  // lower > upper
      "bad_q2_level_negative",  //
      "bad_q2_level_infinite",  //
      "bad_q2_one_nan",         // of the two levels
      "bad_q2_codes_of_nan",    //
  };
  std::size_t files = 0;
  for (const auto& file : std::filesystem::directory_iterator(kGolden)) {
    files += file.path().extension() == ".hex" ? 1U : 0U;
  }
  EXPECT_EQ(files, names.size() + good_frames().size()) << "a golden file that no test reads";
  for (const std::string& name : names) {
    SparseBuffer out;
    const DecodeResult got = Codec().decode(golden(name), 10, out, nullptr);
    EXPECT_EQ(to_string(got.error), to_string(DecodeError::bad_value)) << name;
    EXPECT_EQ(got.bytes_read, 0U);
    EXPECT_EQ(out.nnz(), 0U);
  }
}

// Any bytes: refused, or values that the code can write again, bit for bit. Nothing is read behind
// the section (the address sanitizer sees it).
TEST(value_codes, any_bytes_are_refused_or_mean_something) {
  for (const ValueCode code : {ValueCode::q8, ValueCode::q4, ValueCode::q2}) {
    std::size_t taken = 0, refused = 0;
    for (std::uint64_t seed = 0; seed < 4000; ++seed) {
      std::mt19937_64 rng(seed);
      const std::size_t nnz = rng() % (seed % 4 == 0 ? 200 : 8);
      const std::size_t bytes = codes::value_bytes(code, nnz);
      const std::unique_ptr<std::byte[]> in(new std::byte[bytes]);
      for (std::size_t i = 0; i < bytes; ++i) in[i] = static_cast<std::byte>(rng());
      Floats value(nnz);
      if (!codes::get_values(code, {in.get(), bytes}, value)) {
        ++refused;
        continue;
      }
      ++taken;
      for (const Floats& block : blocks_of(value)) {
        const auto nans = std::ranges::count_if(block, [](float v) { return std::isnan(v); });
        EXPECT_TRUE(nans == 0 || nans == static_cast<std::ptrdiff_t>(block.size()));
        EXPECT_TRUE(std::ranges::none_of(block, [](float v) { return std::isinf(v); }));
      }
      EXPECT_TRUE(same_bits(quantized(options(code), value), value)) << name_of(code) << seed;
    }
    EXPECT_GT(taken, 200U) << name_of(code);
    EXPECT_GT(refused, 200U) << name_of(code);
  }
}

TEST(value_codes, names_and_refusals) {
  ASSERT_EQ(names_of<ValueCode>().size(), 6U);
  EXPECT_EQ(name_of(ValueCode::f32), "f32");
  EXPECT_EQ(name_of(ValueCode::bf16), "bf16");
  EXPECT_EQ(name_of(ValueCode::q2), "q2");
  ASSERT_EQ(names_of<Rounding>().size(), 2U);
  EXPECT_EQ(name_of(Rounding::stochastic), "stochastic");
  EXPECT_THROW(Codec(options(static_cast<ValueCode>(6))), InvalidArgument);
  EXPECT_THROW(Codec(options(ValueCode::q8, static_cast<Rounding>(2))), InvalidArgument);
}

TEST(value_codes, nothing_is_allocated) {
  SparseBuffer s = entries(test::normal(1000, 1));
  for (const ValueCode code : kLossy) {
    for (const Rounding rounding : kRoundings) {
      const Codec codec(options(code, rounding));
      const std::uint64_t before = test::allocations();
      codec.quantize(s, {1, 2}, 3);
      EXPECT_EQ(test::allocations(), before) << name_of(code);
    }
  }
}

}  // namespace
}  // namespace skim
