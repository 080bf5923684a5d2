// Converts sparse gradients to bytes and back. docs/wire-format.md specifies the byte layout.
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
inline constexpr std::size_t kFrameStatsBytes = 48;   // more, if the frame carries GroupStats

// The codes are written on the wire: never renumber them, only append.
enum class IndexCode : std::uint8_t {
  raw32 = 0,
  packed = 1,   // gaps between indices, each with as many bits as the largest gap needs
  rice = 2,     // gaps in a Golomb-Rice code: for indices drawn uniformly
  bitmap = 3,   // one bit for each of dim entries: for high densities
  huffman = 4,  // Huffman codes of the gaps' sizes, given the sizes before: for clustered indices
};
// The names that the command line knows, in enumerator order.
template <>
std::span<const std::string_view> names_of<IndexCode>() noexcept;

enum class ValueCode : std::uint8_t {
  f32 = 0,
  f16 = 1,   // IEEE 754 binary16; values beyond its range become its largest number
  bf16 = 2,  // the upper half of a float
  // The codes below use blocks of 64 entries.
  q8 = 3,  // whole numbers from -127 to 127, times the block's power of two
  q4 = 4,  // whole numbers from -7 to 7, likewise
  q2 = 5,  // a sign, and one of the block's two magnitudes
};
// The names that the command line knows, in enumerator order.
template <>
std::span<const std::string_view> names_of<ValueCode>() noexcept;

enum class Rounding : std::uint8_t {
  nearest,
  stochastic,  // to one of the two neighbours, so that the mean over many seeds is the exact value
};
template <>
std::span<const std::string_view> names_of<Rounding>() noexcept;

struct CodecOptions {
  // Empty: each frame gets the code that makes it smallest. huffman must also save a bit for each
  // entry beyond the first 4096, because it is the slowest to write and read.
  std::optional<IndexCode> index = {};
  ValueCode value = ValueCode::f32;
  Rounding rounding = Rounding::nearest;
  std::uint64_t seed = 0;  // for stochastic rounding
};

enum class DecodeError : std::uint8_t {
  none = 0,
  truncated,            // the input ends before the frame does
  bad_magic,            // not a frame
  unsupported_version,  // written by another release
  unsupported_code,     // an index or value code, or a flag, that this release does not know
  bad_index,            // not ascending, or >= dim, or a damaged index section
  bad_length,           // dim is not the expected one, or nnz > dim
  bad_checksum,
  bad_value,  // a value section that no encoder writes
};
std::string_view to_string(DecodeError e) noexcept;

struct [[nodiscard]] DecodeResult {
  DecodeError error = DecodeError::none;
  std::size_t bytes_read = 0;  // length of the frame; 0 after an error
  bool has_stats = false;      // the frame carries GroupStats
  explicit operator bool() const noexcept { return error == DecodeError::none; }
};

// Immutable after construction, so safe to share between threads.
class Codec {
 public:
  // Throws: InvalidArgument: an option names a code that does not exist.
  explicit Codec(CodecOptions options = {});

  const CodecOptions& options() const noexcept { return options_; }

  // Rounds values to wire precision. This is the only lossy step of a sender. It is idempotent. A
  // finite value stays finite, and an entry that becomes 0 stays an entry. f32 values do not
  // change. docs/wire-format.md has the bounds of the error, and the rules for NaN and infinity.
  // Blocks begin with the first entry, so a part of a quantized gradient is not itself quantized.
  // Stochastic rounding draws from the seed, id, stream and the entry's place in s. Two gradients
  // that are rounded in one step and slot therefore need two streams. (The Reducer uses the rank.)
  void quantize(SparseBuffer& s, StepId id, int stream) const noexcept;

  // The same, for a rank that sends a sum or a part of a selection instead of its whole quantized
  // selection. Blocks of a sum or a part begin elsewhere, so its values must be rounded again.
  //   error  the rounding error: s before minus s after, without zeros. Empty for f32 values.
  // The caller must decide for each index i of `error` who owns its mass:
  //   - If some rank uses s_i as it was sent, in the result or in the entries that a merger keeps,
  //     this rank adds error_i to ExchangeResult::returned.
  //   - If every owner takes back its part of index i instead, nothing is missing. Returning
  //     error_i would then create mass.
  // Errors that are not finite are left out, because a residual must not hold them.
  // Cost: O(nnz). No allocation once warm.
  void quantize(SparseBuffer& s, StepId id, int stream, SparseBuffer& error) const;

  // An upper bound for encode() and encode_indices() of any s of this dim with at most nnz entries.
  std::size_t max_encoded_bytes(std::size_t nnz, std::size_t dim) const noexcept;

  // Appends one self-describing frame to out and returns the frame's length in bytes. Lossless if s
  // was quantized. Requires: s canonical. stats may be null.
  std::size_t encode(const SparseView& s, const GroupStats* stats,
                     std::vector<std::byte>& out) const;

  // Reads the frame at the front of `in`. The input may be hostile: decode never reads past
  // in.end(), and never allocates more than a constant times in.size(). It returns either a
  // canonical out, or an error and an empty out. stats may be null; a frame without statistics
  // leaves *stats unchanged.
  DecodeResult decode(Bytes in, std::size_t expected_dim, SparseBuffer& out,
                      GroupStats* stats) const;

  // The same for a frame of indices alone, without values and statistics. Requires: index ascends
  // strictly below dim. decode_indices gives each entry the value 0, and may allocate room for
  // expected_dim entries.
  std::size_t encode_indices(std::span<const Index> index, std::size_t dim,
                             std::vector<std::byte>& out) const;
  DecodeResult decode_indices(Bytes in, std::size_t expected_dim, SparseBuffer& out) const;

 private:
  std::size_t put_frame(std::span<const Index> index, std::size_t dim,
                        const std::span<const float>* value, const GroupStats* stats,
                        std::vector<std::byte>& out) const;

  CodecOptions options_;
};

// GroupStats without a frame, for a dense sum: kFrameStatsBytes bytes, little-endian.
void encode_stats(const GroupStats& stats, std::span<std::byte, kFrameStatsBytes> out) noexcept;
GroupStats decode_stats(std::span<const std::byte, kFrameStatsBytes> in) noexcept;

}  // namespace skim
