// Frames whose checksum is right, whatever else they are: what a hostile peer sends.
#pragma once

#include <cstring>
#include <optional>
#include <span>

#include "codec/index_codes.hpp"
#include "codec/value_codes.hpp"
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace skim::test {

// Writes the checksum, where the frame says how long it is and is not longer than `frame`.
inline void seal(std::span<std::byte> frame) {
  if (frame.size() < kFrameHeaderBytes) return;
  std::uint32_t dim = 0, nnz = 0;
  std::memcpy(&dim, &frame[8], 4);
  std::memcpy(&nnz, &frame[12], 4);
  const std::size_t index_at =
      kFrameHeaderBytes + ((frame[3] & std::byte{1}) != std::byte{0} ? kFrameStatsBytes : 0);
  const auto index_code = static_cast<IndexCode>(frame[4]);
  const auto value_code = static_cast<ValueCode>(frame[5]);
  if (frame.size() < index_at || !codes::known(index_code) || !codes::known(value_code)) return;
  const std::optional<std::size_t> index_bytes =
      codes::index_bytes(index_code, frame.subspan(index_at), nnz, dim);
  if (!index_bytes) return;
  const std::size_t length = index_at + *index_bytes + codes::value_bytes(value_code, nnz);
  if (length > frame.size()) return;
  std::memset(&frame[16], 0, 8);
  const XXH64_hash_t seed = XXH3_64bits(frame.data(), kFrameHeaderBytes);
  const XXH64_hash_t sum =
      XXH3_64bits_withSeed(frame.data() + kFrameHeaderBytes, length - kFrameHeaderBytes, seed);
  std::memcpy(&frame[16], &sum, 8);
}

}  // namespace skim::test
