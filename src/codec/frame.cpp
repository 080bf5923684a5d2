// Frames: header, checksum, bounded decode. docs/wire-format.md describes the layout.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "assert.hpp"
#include "codec/index_codes.hpp"
#include "codec/value_codes.hpp"
#include "skim/codec.hpp"
#include "skim/error.hpp"
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace skim {
namespace {

static_assert(std::endian::native == std::endian::little, "frames are little-endian");

constexpr std::uint16_t kFrameMagic = 0x4b53;  // "SK"
constexpr std::uint8_t kHasStats = 1, kIndicesOnly = 2;  // flags

struct Header {
  std::uint16_t magic;
  std::uint8_t version, flags, index_code, value_code;
  std::uint16_t reserved;  // 0
  std::uint32_t dim, nnz;
  std::uint64_t checksum;  // XXH3-64 of the frame, with this field set to 0
};
static_assert(sizeof(Header) == kFrameHeaderBytes && std::is_trivially_copyable_v<Header>);

std::uint64_t checksum(Header header, Bytes rest) {
  header.checksum = 0;
  const std::uint64_t seed = XXH3_64bits(&header, sizeof header);
  return XXH3_64bits_withSeed(rest.data(), rest.size(), seed);
}

// The parts of a frame whose checksum fits.
struct Sections {
  DecodeError error = DecodeError::none;
  Header header = {};
  Bytes index = {}, value = {}, stats = {};
  std::size_t length = 0;
};

Sections split(Bytes in, std::size_t expected_dim, bool indices_only) {
  const auto refuse = [](DecodeError e) { return Sections{.error = e}; };
  if (in.size() < kFrameHeaderBytes) return refuse(DecodeError::truncated);
  Sections s;
  Header& header = s.header;
  std::memcpy(&header, in.data(), sizeof header);
  const auto index_code = static_cast<IndexCode>(header.index_code);
  const auto value_code = static_cast<ValueCode>(header.value_code);
  if (header.magic != kFrameMagic) return refuse(DecodeError::bad_magic);
  if (header.version != kFrameVersion) return refuse(DecodeError::unsupported_version);
  const bool has_stats = !indices_only && (header.flags & kHasStats) != 0;
  const int flags = indices_only ? kIndicesOnly : has_stats ? kHasStats : 0;
  if (header.flags != flags || header.reserved != 0 || !codes::known(index_code) ||
      (indices_only ? value_code != ValueCode::f32 : !codes::known(value_code))) {
    return refuse(DecodeError::unsupported_code);
  }
  if (header.dim != expected_dim || header.nnz > header.dim) return refuse(DecodeError::bad_length);

  const std::size_t index_at = kFrameHeaderBytes + (has_stats ? kFrameStatsBytes : 0);
  if (in.size() < index_at) return refuse(DecodeError::truncated);
  const std::optional<std::size_t> index_bytes =
      codes::index_bytes(index_code, in.subspan(index_at), header.nnz, header.dim);
  if (!index_bytes) return refuse(DecodeError::truncated);
  const std::size_t value_at = index_at + *index_bytes;
  const std::size_t value_bytes = indices_only ? 0 : codes::value_bytes(value_code, header.nnz);
  s.length = value_at + value_bytes;
  if (in.size() < s.length) return refuse(DecodeError::truncated);
  if (checksum(header, in.first(s.length).subspan(kFrameHeaderBytes)) != header.checksum) {
    return refuse(DecodeError::bad_checksum);
  }
  s.index = in.subspan(index_at, *index_bytes);
  s.value = in.subspan(value_at, value_bytes);
  if (has_stats) s.stats = in.subspan(kFrameHeaderBytes, kFrameStatsBytes);
  return s;
}

}  // namespace

std::string_view to_string(DecodeError e) noexcept {
  switch (e) {
    case DecodeError::none:
      return "no error";
    case DecodeError::truncated:
      return "truncated frame";
    case DecodeError::bad_magic:
      return "not a frame";
    case DecodeError::unsupported_version:
      return "frame of another version";
    case DecodeError::unsupported_code:
      return "unknown index code, value code or flag";
    case DecodeError::bad_index:
      return "indices not ascending, out of range or badly coded";
    case DecodeError::bad_length:
      return "another dense length, or more entries than that";
    case DecodeError::bad_checksum:
      return "checksum does not fit";
    case DecodeError::bad_value:
      return "values that no encoder writes";
  }
  return "unknown error";
}

Codec::Codec(CodecOptions options) : options_(options) {
  SKIM_EXPECTS(!options.index || codes::known(*options.index), "codec: unknown index code");
  SKIM_EXPECTS(codes::known(options.value), "codec: unknown value code");
  SKIM_EXPECTS(is_named(options.rounding), "codec: unknown rounding");
}

void Codec::quantize(SparseBuffer& s, StepId id, int stream) const noexcept {
  Random random(options_.seed, id, static_cast<std::uint64_t>(stream));
  codes::quantize_values(options_.value, s.values(),
                         options_.rounding == Rounding::stochastic ? &random : nullptr);
}

void Codec::quantize(SparseBuffer& s, StepId id, int stream, SparseBuffer& error) const {
  error.reset(s.view().dim);
  if (options_.value == ValueCode::f32) return;
  error.assign(s.view());
  quantize(s, id, stream);
  const std::span<Index> index = error.indices();
  const std::span<float> value = error.values();
  std::size_t kept = 0;
  for (std::size_t e = 0; e < value.size(); ++e) {
    const float off = value[e] - s.values()[e];
    if (off == 0.0F || !std::isfinite(off)) continue;
    index[kept] = index[e];
    value[kept++] = off;
  }
  error.resize(kept);
}

std::size_t Codec::max_encoded_bytes(std::size_t nnz, std::size_t dim) const noexcept {
  return kFrameHeaderBytes + kFrameStatsBytes + codes::max_index_bytes(options_.index, nnz, dim) +
         codes::value_bytes(options_.value, nnz);
}

void encode_stats(const GroupStats& s, std::span<std::byte, kFrameStatsBytes> out) noexcept {
  const std::array<double, 3> norms{s.gradient_norm2, s.accumulated_norm2, s.sent_norm2};
  std::memcpy(out.data(), norms.data(), 24);
  std::memcpy(out.data() + 24, &s.sent_bytes, 8);
  std::memcpy(out.data() + 32, &s.non_finite, 4);
  std::memcpy(out.data() + 36, &s.signals, 4);
  std::memcpy(out.data() + 40, &s.bucket_s, 4);
  std::memcpy(out.data() + 44, &s.pair_s, 4);
}

GroupStats decode_stats(std::span<const std::byte, kFrameStatsBytes> in) noexcept {
  std::array<double, 3> norms{};
  GroupStats s;
  std::memcpy(norms.data(), in.data(), 24);
  std::memcpy(&s.sent_bytes, in.data() + 24, 8);
  std::memcpy(&s.non_finite, in.data() + 32, 4);
  std::memcpy(&s.signals, in.data() + 36, 4);
  std::memcpy(&s.bucket_s, in.data() + 40, 4);
  std::memcpy(&s.pair_s, in.data() + 44, 4);
  s.gradient_norm2 = norms[0];
  s.accumulated_norm2 = norms[1];
  s.sent_norm2 = norms[2];
  return s;
}

std::size_t Codec::encode(const SparseView& s, const GroupStats* stats,
                          std::vector<std::byte>& out) const {
  SKIM_ASSERT(is_canonical(s));
  return put_frame(s.index, s.dim, &s.value, stats, out);
}

std::size_t Codec::encode_indices(std::span<const Index> index, std::size_t dim,
                                  std::vector<std::byte>& out) const {
  return put_frame(index, dim, nullptr, nullptr, out);
}

// value: null for a frame of indices alone.
std::size_t Codec::put_frame(std::span<const Index> index, std::size_t dim,
                             const std::span<const float>* value, const GroupStats* stats,
                             std::vector<std::byte>& out) const {
  SKIM_EXPECTS(dim <= std::numeric_limits<Index>::max(), "codec: dim must be < 2^32");
  const std::size_t begin = out.size();
  const std::size_t stats_bytes = stats != nullptr ? kFrameStatsBytes : 0;
  const codes::IndexPlan plan = options_.index ? codes::plan_indices(*options_.index, index, dim)
                                               : codes::cheapest_plan(index, dim);
  const std::size_t value_bytes =
      value != nullptr ? codes::value_bytes(options_.value, index.size()) : 0;
  const std::size_t length = kFrameHeaderBytes + stats_bytes + plan.bytes + value_bytes;
  if (out.capacity() < begin + length) {
    // Reserve for the longest frame. So later steps allocate nothing if their indices take more
    // bytes.
    out.reserve(begin + max_encoded_bytes(index.size(), dim));
  }
  out.resize(begin + length);
  const std::span<std::byte> frame = std::span(out).subspan(begin);

  std::span<std::byte> rest = frame.subspan(kFrameHeaderBytes);
  if (stats != nullptr) {
    encode_stats(*stats, rest.first<kFrameStatsBytes>());
    rest = rest.subspan(kFrameStatsBytes);
  }
  codes::put_indices(plan, index, dim, rest.first(plan.bytes));
  if (value != nullptr) codes::put_values(options_.value, *value, rest.subspan(plan.bytes));

  const bool has_values = value != nullptr;
  Header header{
      .magic = kFrameMagic,
      .version = kFrameVersion,
      .flags = !has_values ? kIndicesOnly : stats != nullptr ? kHasStats : std::uint8_t{0},
      .index_code = static_cast<std::uint8_t>(plan.code),
      .value_code = has_values ? static_cast<std::uint8_t>(options_.value) : std::uint8_t{0},
      .reserved = 0,
      .dim = static_cast<std::uint32_t>(dim),
      .nnz = static_cast<std::uint32_t>(index.size()),
      .checksum = 0};
  header.checksum = checksum(header, frame.subspan(kFrameHeaderBytes));
  std::memcpy(frame.data(), &header, sizeof header);
  return length;
}

DecodeResult Codec::decode(Bytes in, std::size_t expected_dim, SparseBuffer& out,
                           GroupStats* stats) const {
  out.reset(expected_dim);
  const auto refuse = [&](DecodeError e) {
    out.reset(expected_dim);
    return DecodeResult{.error = e};
  };
  const Sections s = split(in, expected_dim, false);
  if (s.error != DecodeError::none) return refuse(s.error);
  out.resize(s.header.nnz);  // at most 4 * in.size(), as every value takes at least 2 bits
  if (!codes::get_indices(static_cast<IndexCode>(s.header.index_code), s.index, s.header.dim,
                          out.indices())) {
    return refuse(DecodeError::bad_index);
  }
  if (!codes::get_values(static_cast<ValueCode>(s.header.value_code), s.value, out.values())) {
    return refuse(DecodeError::bad_value);
  }
  if (!s.stats.empty() && stats != nullptr) {
    *stats = decode_stats(s.stats.first<kFrameStatsBytes>());
  }
  return {.error = DecodeError::none, .bytes_read = s.length, .has_stats = !s.stats.empty()};
}

DecodeResult Codec::decode_indices(Bytes in, std::size_t expected_dim, SparseBuffer& out) const {
  out.reset(expected_dim);
  const Sections s = split(in, expected_dim, true);
  if (s.error != DecodeError::none) return {.error = s.error};
  out.resize(s.header.nnz);
  if (!codes::get_indices(static_cast<IndexCode>(s.header.index_code), s.index, s.header.dim,
                          out.indices())) {
    out.reset(expected_dim);
    return {.error = DecodeError::bad_index};
  }
  std::ranges::fill(out.values(), 0.0F);
  return {.error = DecodeError::none, .bytes_read = s.length};
}

}  // namespace skim
