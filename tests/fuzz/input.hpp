// What a fuzz target needs: bytes made into a sparse gradient and codes for it, and a check.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <span>

#include "skim/codec.hpp"

namespace skim::fuzz {

using Input = std::span<const std::uint8_t>;

inline void require(bool holds) {
  if (!holds) std::abort();
}

// The next byte; 0 behind the end.
inline std::uint8_t take(Input& in) {
  if (in.empty()) return 0;
  const std::uint8_t first = in.front();
  in = in.subspan(1);
  return first;
}

struct Case {
  CodecOptions options;
  SparseBuffer s;
};

// Codes in one byte, two for the length, then three for each entry: its gap of up to 31 bits and a
// value. A bitmap stays small.
inline Case take_case(Input in) {
  Case c;
  const std::uint8_t codes = take(in);
  const std::size_t index = codes % 8, value = codes / 8 % names_of<ValueCode>().size();
  if (index < names_of<IndexCode>().size()) c.options.index = static_cast<IndexCode>(index);
  c.options.value = static_cast<ValueCode>(value);
  c.options.rounding = codes >= 128 ? Rounding::stochastic : Rounding::nearest;
  const unsigned scales = c.options.index == IndexCode::bitmap ? 6 : 24;
  constexpr std::uint64_t kMost = std::numeric_limits<Index>::max();
  std::uint64_t next = 0;
  const std::uint64_t behind = std::uint64_t{take(in)} << (take(in) % scales);
  while (!in.empty()) {
    const unsigned scale = take(in) % scales;
    next += std::uint64_t{take(in)} << scale;
    if (next >= kMost) break;
    const auto high = std::uint32_t{take(in)} << 24U;
    c.s.append(static_cast<Index>(next++), std::bit_cast<float>(high | scale << 19U));
  }
  c.s.set_dim(std::min(kMost, next + behind));
  Codec(c.options).quantize(c.s, {}, 0);
  return c;
}

// In a heap block of their size, so that the address sanitizer sees a read too far.
class Exact {
 public:
  explicit Exact(Bytes bytes) : size_(bytes.size()), copy_(new std::byte[bytes.size()]) {
    std::ranges::copy(bytes, copy_.get());
  }
  std::span<std::byte> span() { return {copy_.get(), size_}; }

 private:
  std::size_t size_;
  std::unique_ptr<std::byte[]> copy_;
};

// What holds of every decode.
inline DecodeResult decode(Bytes frame, std::size_t dim, SparseBuffer& out) {
  const DecodeResult got = Codec().decode(frame, dim, out, nullptr);
  require(is_canonical(out.view()) && out.view().dim == dim);
  if (got) {
    require(got.bytes_read <= frame.size() && out.nnz() <= 4 * frame.size());
  } else {
    require(got.bytes_read == 0 && out.nnz() == 0);
  }
  return got;
}

// Bit for bit, but that one NaN is as good as another: no encoder writes all of them.
inline bool same(const SparseView& a, const SparseView& b) {
  const auto equal = [](float x, float y) {
    return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y) ||
           (std::isnan(x) && std::isnan(y));
  };
  return a.dim == b.dim && std::ranges::equal(a.index, b.index) &&
         std::ranges::equal(a.value, b.value, equal);
}

}  // namespace skim::fuzz
