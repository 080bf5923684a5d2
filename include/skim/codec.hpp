// Sparse gradient <-> bytes. The byte layout is specified in docs/wire-format.md.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "skim/names.hpp"
#include "skim/types.hpp"

namespace skim {

inline constexpr std::uint8_t kFrameVersion = 1;
inline constexpr std::size_t kFrameHeaderBytes = 24;  // without statistics
inline constexpr std::size_t kFrameStatsBytes = 48;   // where a frame carries GroupStats

// Values are written on the wire: never renumber, only append.
enum class IndexCode : std::uint8_t {
  raw32 = 0,
  packed = 1,   // gaps between indices, all in as many bits as the largest needs
  rice = 2,     // gaps in a Golomb-Rice code: for indices drawn uniformly
  bitmap = 3,   // a bit for each of dim: for high densities
  huffman = 4,  // Huffman-coded sizes of gaps, given those before: for indices that cluster
};
// The names that the command line knows, in enumerator order.
template <>
std::span<const std::string_view> names_of<IndexCode>() noexcept;

enum class ValueCode : std::uint8_t {
  f32 = 0,
  f16 = 1,   // IEEE 754 binary16; beyond its range: its largest number
  bf16 = 2,  // the upper half of a float
  // Blocks of 64 entries.
  q8 = 3,  // whole numbers of -127 to 127 times the block's power of two
  q4 = 4,  // of -7 to 7
  q2 = 5,  // sign, and one of the block's two magnitudes
};
// The names that the command line knows, in enumerator order.
template <>
std::span<const std::string_view> names_of<ValueCode>() noexcept;

enum class Rounding : std::uint8_t {
  nearest,
  stochastic,  // to one of the two neighbours, so that the mean over many seeds is the value
};
template <>
std::span<const std::string_view> names_of<Rounding>() noexcept;

struct CodecOptions {
  // None: for each frame the smallest, but huffman beyond 4096 entries only where it saves a bit an
  // entry: it takes longest to write and read.
  std::optional<IndexCode> index = {};
  ValueCode value = ValueCode::f32;
  Rounding rounding = Rounding::nearest;
  std::uint64_t seed = 0;  // of stochastic rounding
};

enum class DecodeError : std::uint8_t {
  none = 0,
  truncated,            // the input ends before the frame does
  bad_magic,            // not a frame
  unsupported_version,  // of another release
  unsupported_code,     // an index or value code, or a flag, that this release does not know
  bad_index,            // not ascending, or >= dim, or an index section that is damaged
  bad_length,           // dim is not the expected one, or nnz > dim
  bad_checksum,
  bad_value,  // a value section that no encoder writes
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

  const CodecOptions& options() const noexcept { return options_; }

  // Rounds values to wire precision: the only lossy step of a sender. Idempotent. What is finite
  // stays finite, and an entry that becomes 0 stays an entry. Bounds of the error, NaN and
  // infinity: docs/wire-format.md. With f32 values: nothing to do.
  // Blocks begin with the first entry, so a part of what was quantized is not quantized.
  // Stochastic rounding draws from the seed, id, stream and the entry's place in s: two gradients
  // rounded in one step and slot need two streams (the Reducer takes the rank).
  void quantize(SparseBuffer& s, StepId id, int stream) const noexcept;

  // The same, for a rank that sends something else than its quantized selection: a sum, or a part
  // of a selection, whose blocks begin elsewhere.
  //   error  what was rounded off: s before less s after, without zeros. Empty for f32 values.
  // The mass of error belongs to nobody yet. Take an index i of it. If some rank has s_i as it was
  // sent, in the result or in what a merger keeps, this rank puts error_i into
  // ExchangeResult::returned. If instead every owner takes back its part of index i, nothing is
  // missing, and returning error_i would create mass. Non-finite errors are left out: they belong
  // to no residual. Cost: O(nnz). No allocation once warm.
  void quantize(SparseBuffer& s, StepId id, int stream, SparseBuffer& error) const;

  // Upper bound for encode() of any s of this dim with at most nnz entries.
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
