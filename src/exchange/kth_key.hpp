// Internal: lists of numbers that ranks exchange, and the k-th largest entry of a sum that is
// spread over the ranks.
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

// Orders entries as selections do: larger magnitude first, then lower index, so no two are equal.
// Key 0 is a zero entry, which is never kept.
using Key = std::uint64_t;
inline Key key_of(Index index, float value) {
  const std::uint32_t order = kernels::order(value);
  return order == 0 ? 0 : Key{order} << 32U | (std::numeric_limits<Index>::max() - index);
}
inline Key key_of(std::uint32_t order) { return Key{order} << 32U; }

// Gathers a list of numbers from every rank, with a checksum.
class WordsOfRanks {
 public:
  // For lists of at most `most` numbers. `most` is equal on all ranks.
  void reserve(std::size_t most);
  // The most bytes that a rank sends to gather lists of at most `most` numbers, after
  // reserve(most).
  static double max_sent_bytes(std::size_t most, std::size_t ranks);
  // Collective.
  void gather(std::span<const std::uint64_t> mine, Communicator& comm);
  // Rank r's list, valid until the next call of of() or gather(). Throws: CommError if the message
  // is damaged or has fewer than `least` numbers.
  std::span<const std::uint64_t> of(std::size_t r, std::size_t least, const Communicator& comm);

 private:
  std::size_t most_ = 0;
  std::vector<std::byte> message_;
  MessageList all_;
  std::vector<std::uint64_t> words_;
};

// Finds the k-th largest key of all ranks by two small all-gathers. First each rank sends every
// step-th of its keys, as samples. The samples show between which two of them the k-th key lies.
// Then each rank sends its keys between those two.
class KthKey {
 public:
  // For at most `most` keys per rank on `ranks` ranks. Both are equal on all ranks.
  void reserve(std::size_t most, std::size_t ranks);
  // The most bytes that a rank sends in find().
  static double max_sent_bytes(std::size_t most, std::size_t ranks);
  // [r]: how many of rank r's keys reach the key that find() returned.
  const std::vector<std::size_t>& counts() const noexcept { return counts_; }
  // Returns 0 if there are k keys or fewer, and the largest number if k = 0. Sorts keys. keys may
  // be empty but must not contain 0. Collective. phase: for messages about failures; static
  // storage.
  Key find(std::vector<Key>& keys, std::size_t k, const char* phase, Communicator& comm);

 private:
  WordsOfRanks all_;
  std::vector<std::uint64_t> words_;
  std::vector<std::pair<Key, std::size_t>> told_;  // key, number of keys that it represents
  std::vector<Key> found_;
  std::vector<std::size_t> counts_;  // [P]
};

}  // namespace skim
