// Finds the k-th largest of keys that are spread over ranks.
#include "exchange/kth_key.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "exchange/byte_counts.hpp"
#include "skim/error.hpp"

namespace skim {
namespace {

// Each rank first sends every step-th of its `count` sorted keys, and later the keys between two of
// those. A step of about sqrt(count / 2) moves the fewest keys.
std::size_t step_of(std::uint64_t count) {
  return std::max<std::size_t>(1,
                               static_cast<std::size_t>(std::sqrt(static_cast<double>(count) / 2)));
}

// The most numbers in one list of KthKey: one number in front, then keys. The keys are samples
// (every step-th key), or they lie between two samples. At most twice `slack` keys lie between two.
std::size_t longest_list(std::size_t most, std::size_t ranks) {
  const std::size_t step = step_of(most);
  return 1 + std::max(4 * (step + 1), std::min(most, 2 * (ranks + 1) * step));
}

// The most words that a rank sends for lists of at most `each` numbers and `all` numbers together,
// plus their checksums. `most` is the size given to reserve().
double max_gathered_words(std::size_t ranks, std::size_t each, std::size_t all, std::size_t most) {
  const auto bytes = [](std::size_t words) {
    return static_cast<double>(sizeof(std::uint64_t) * words);
  };
  return max_gathered_bytes(static_cast<int>(ranks), bytes(each + 1), bytes(all + ranks),
                            sizeof(std::uint64_t) * (most + 1));
}

}  // namespace

void WordsOfRanks::reserve(std::size_t most) {
  most_ = most;
  message_.reserve(sizeof(std::uint64_t) * (most + 1));
  words_.reserve(most);
}

double WordsOfRanks::max_sent_bytes(std::size_t most, std::size_t ranks) {
  return max_gathered_words(ranks, most, ranks * most, most);
}

void WordsOfRanks::gather(std::span<const std::uint64_t> mine, Communicator& comm) {
  const auto bytes = std::as_bytes(mine);
  message_.assign(bytes.begin(), bytes.end());
  const std::uint64_t sum = XXH3_64bits(bytes.data(), bytes.size());
  const auto tail = std::as_bytes(std::span(&sum, 1));
  message_.insert(message_.end(), tail.begin(), tail.end());
  comm.allgather(message_, all_, sizeof(std::uint64_t) * (most_ + 1));
}

std::span<const std::uint64_t> WordsOfRanks::of(std::size_t r, std::size_t least,
                                                const Communicator& comm) {
  const Bytes in = all_[r];
  std::uint64_t sum = 0;
  const bool whole = in.size() >= sizeof sum * (least + 1) && in.size() % sizeof sum == 0;
  if (whole) {
    const Bytes body = in.first(in.size() - sizeof sum);
    words_.resize(body.size() / sizeof(std::uint64_t));
    std::memcpy(words_.data(), body.data(), body.size());
    std::memcpy(&sum, in.data() + body.size(), sizeof sum);
    if (XXH3_64bits(body.data(), body.size()) == sum) return words_;
  }
  refuse_message(comm, static_cast<int>(r), "message",
                 whole ? "checksum does not fit" : "truncated");
}

void KthKey::reserve(std::size_t most, std::size_t ranks) {
  const std::size_t step = step_of(most), words = longest_list(most, ranks);
  all_.reserve(words);
  words_.reserve(words);
  told_.reserve(ranks * 4 * (step + 1));
  found_.reserve(ranks * words);
  counts_.resize(ranks);
}

double KthKey::max_sent_bytes(std::size_t most, std::size_t ranks) {
  const std::size_t step = step_of(most), longest = longest_list(most, ranks);
  const std::size_t told = 2 * step + 6, between = std::min(ranks * most, 2 * (ranks + 1) * step);
  return max_gathered_words(ranks, told, ranks * told, longest) +
         max_gathered_words(ranks, std::min(most, between) + 1, between + ranks, longest);
}

Key KthKey::find(std::vector<Key>& keys, std::size_t k, const char* phase, Communicator& comm) {
  const auto ranks = static_cast<std::size_t>(comm.size());
  comm.set_phase({phase, 1, 2});
  std::ranges::sort(keys, std::greater<>{});
  const std::size_t step = step_of(keys.size());
  words_.assign(1, keys.size());
  for (std::size_t i = step; i <= keys.size(); i += step) words_.push_back(keys[i - 1]);
  all_.gather(words_, comm);
  told_.clear();
  std::size_t all = 0, slack = 0;  // slack: keys that may reach a bound uncounted
  for (std::size_t r = 0; r < ranks; ++r) {
    const auto words = all_.of(r, 1, comm);
    const std::size_t its_step = step_of(words[0]);
    if (words.size() != 1 + words[0] / its_step)
      refuse_message(comm, static_cast<int>(r), "message", "not a list of keys");
    all += counts_[r] = words[0];
    slack += its_step - 1;
    for (const Key key : words.subspan(1)) told_.emplace_back(key, its_step);
  }
  if (k == 0) {
    std::ranges::fill(counts_, 0U);
    return std::numeric_limits<Key>::max();
  }
  if (all <= k) return 0;

  // At least `reach` and at most reach + slack keys reach the sample.
  std::ranges::sort(told_, std::greater<>{});
  Key low = 0, high = std::numeric_limits<Key>::max();  // low <= k-th key < high
  std::size_t reach = 0;
  for (const auto& [key, its_step] : told_) {
    reach += its_step;
    if (reach + slack < k) high = key;
    if (reach >= k) {
      low = key;
      break;
    }
  }
  comm.set_phase({phase, 2, 2});
  const auto first = std::ranges::upper_bound(keys, high, std::greater<>{});
  words_.assign(1, static_cast<std::uint64_t>(first - keys.begin()));
  for (auto at = first; at != keys.end() && *at >= low; ++at) words_.push_back(*at);
  all_.gather(words_, comm);
  found_.clear();
  std::size_t above = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    const auto words = all_.of(r, 1, comm);
    above += counts_[r] = words[0];
    found_.insert(found_.end(), words.begin() + 1, words.end());
  }
  if (above >= k || found_.size() < k - above) {
    refuse_message(comm, comm.rank(), "message", "no k-th key");
  }
  const auto kth = found_.begin() + static_cast<std::ptrdiff_t>(k - above - 1);
  std::ranges::nth_element(found_, kth, std::greater<>{});
  const Key cut = *kth;
  for (std::size_t r = 0; r < ranks; ++r) {
    counts_[r] += static_cast<std::size_t>(
        std::ranges::count_if(all_.of(r, 1, comm).subspan(1), [&](Key key) { return key >= cut; }));
  }
  return cut;
}

}  // namespace skim
