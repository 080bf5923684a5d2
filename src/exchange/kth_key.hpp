// Internal: numbers that ranks tell one another, and the k-th largest entry of a sum that is spread
// over them.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "select/kernels.hpp"
#include "skim/communicator.hpp"
#include "skim/types.hpp"

namespace skim {

// Orders entries as selections do: larger magnitude first, then lower index, so that no two are
// equal. 0: a zero, which is never kept.
using Key = std::uint64_t;
inline Key key_of(Index index, float value) {
  const std::uint32_t order = kernels::order(value);
  return order == 0 ? 0 : Key{order} << 32U | (std::numeric_limits<Index>::max() - index);
}
inline Key key_of(std::uint32_t order) { return Key{order} << 32U; }

// Everybody's list of numbers, by all-gather, with a checksum.
class WordsOfRanks {
 public:
  // For lists of at most `most` numbers; equal on all ranks.
  void reserve(std::size_t most);
  // The most bytes that a rank sends to gather lists of at most `most` numbers, for which room was
  // made.
  static double max_sent_bytes(std::size_t most, std::size_t ranks);
  // Collective.
  void gather(std::span<const std::uint64_t> mine, Communicator& comm);
  // Of rank r, at least `least` of them; valid until the next call of of() or gather(). Throws:
  // CommError for a message that is damaged or shorter.
  std::span<const std::uint64_t> of(std::size_t r, std::size_t least, const Communicator& comm);

 private:
  std::size_t most_ = 0;
  std::vector<std::byte> message_;
  MessageList all_;
  std::vector<std::uint64_t> words_;
};

// The k-th largest key of all ranks, by two small all-gathers: first each rank tells every step-th
// of its own, which says between which two of all of these the k-th lies; then those between.
class KthKey {
 public:
  // For at most `most` keys a rank, on so many ranks; equal on all ranks.
  void reserve(std::size_t most, std::size_t ranks);
  // The most bytes that a rank sends in find().
  static double max_sent_bytes(std::size_t most, std::size_t ranks);
  // Of rank r, how many of its keys reach the one that was found.
  const std::vector<std::size_t>& counts() const noexcept { return counts_; }
  // 0 if there are k or fewer; the largest number if k = 0. Sorts keys, which may be none but not
  // 0. Collective. phase: for messages about failures, static storage.
  Key find(std::vector<Key>& keys, std::size_t k, const char* phase, Communicator& comm);

 private:
  WordsOfRanks all_;
  std::vector<std::uint64_t> words_;
  std::vector<std::pair<Key, std::size_t>> told_;  // key, keys that it stands for
  std::vector<Key> found_;
  std::vector<std::size_t> counts_;  // [P]
};

}  // namespace skim
