// Sparse gradient <-> bytes. The byte layout is specified in docs/wire-format.md.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "skim/types.hpp"

namespace skim {

inline constexpr std::uint8_t kFrameVersion = 1;
inline constexpr std::size_t kFrameHeaderBytes = 24;  // without statistics
inline constexpr std::size_t kFrameStatsBytes = 40;   // where a frame carries GroupStats

// Values are written on the wire: never renumber, only append.
enum class IndexCode : std::uint8_t { raw32 = 0 };
enum class ValueCode : std::uint8_t { f32 = 0 };

struct CodecOptions {
  IndexCode index = IndexCode::raw32;
  ValueCode value = ValueCode::f32;
};

enum class DecodeError : std::uint8_t {
  none = 0,
  truncated,            // the input ends before the frame does
  bad_magic,            // not a frame
  unsupported_version,  // of another release
  unsupported_code,     // an index or value code, or a flag, that this release does not know
  bad_index,            // not ascending, or >= dim
  bad_length,           // dim is not the expected one, or nnz > dim
  bad_checksum,
};
std::string_view to_string(DecodeError e) noexcept;

struct [[nodiscard]] DecodeResult {
  DecodeError error = DecodeError::none;
  std::size_t bytes_read = 0;  // frame length on success, else 0
  explicit operator bool() const noexcept { return error == DecodeError::none; }
};

// Immutable after construction, so safe to share between threads.
class Codec {
 public:
  // Throws: InvalidArgument: a code that does not exist.
  explicit Codec(CodecOptions options = {});

  // Rounds values to wire precision: the only lossy step of a sender. id and rank seed stochastic
  // rounding. Idempotent. With f32 values: nothing to do.
  void quantize(SparseBuffer& s, StepId id, int rank) const noexcept;

  // Upper bound for encode() of any s with this nnz and dim.
  std::size_t max_encoded_bytes(std::size_t nnz, std::size_t dim) const noexcept;

  // Appends one self-describing frame to out; returns its length in bytes. Lossless if s was
  // quantized. Requires: s canonical. stats may be null.
  std::size_t encode(const SparseView& s, const GroupStats* stats,
                     std::vector<std::byte>& out) const;

  // Reads the frame at the front of `in`, which may be hostile: never reads past in.end(), never
  // allocates more than a constant times in.size(), and yields a canonical out or an error (out
  // then empty). stats may be null; a frame without statistics leaves *stats as it was.
  DecodeResult decode(Bytes in, std::size_t expected_dim, SparseBuffer& out,
                      GroupStats* stats) const;

 private:
  CodecOptions options_;
};

// GroupStats alone, for a dense sum: kFrameStatsBytes bytes, little-endian.
void encode_stats(const GroupStats& stats, std::span<std::byte, kFrameStatsBytes> out) noexcept;
GroupStats decode_stats(std::span<const std::byte, kFrameStatsBytes> in) noexcept;

}  // namespace skim
