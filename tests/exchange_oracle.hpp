// What the exchanges do, from above: all ranks' selections in, every rank's result out. Recursive
// and by maps, where the library works by rounds, frames and merges of lists.
#pragma once

#include <bit>
#include <cstdint>
#include <map>
#include <vector>

#include "oracle.hpp"
#include "skim/codec.hpp"
#include "skim/exchange.hpp"

namespace skim::test {

struct ExchangeOutcome {
  SparseBuffer sum;
  std::vector<SparseBuffer> returned;  // [rank]
  std::vector<Traffic> traffic;        // [rank], for frames with statistics
};

inline std::uint64_t frame_bytes(std::size_t nnz) { return 24 + 40 + 8 * nnz; }
inline std::uint64_t log2_ceil(std::size_t p) {
  return static_cast<std::uint64_t>(std::bit_width(p - 1));
}

// Every rank passes on, over P - 1 rounds, each frame but its right neighbour's.
inline ExchangeOutcome allgather_oracle(const std::vector<SparseView>& mine) {
  const std::size_t ranks = mine.size();
  ExchangeOutcome out{.sum = sum(mine), .returned = {}, .traffic = {}};
  std::uint64_t all = 0;
  for (const SparseView& s : mine) all += frame_bytes(s.nnz());
  for (std::size_t r = 0; r < ranks; ++r) {
    out.returned.emplace_back().reset(mine[r].dim);
    out.traffic.push_back({.sent_bytes = all - frame_bytes(mine[(r + 1) % ranks].nnz()),
                           .received_bytes = all - frame_bytes(mine[r].nnz()),
                           .messages = ranks - 1,
                           .rounds = ranks - 1});
  }
  return out;
}

class GTopKOracle {
 public:
  GTopKOracle(const std::vector<SparseView>& mine, std::size_t k, DropPolicy policy)
      : mine_(mine), k_(k), dropped_(mine.size()), up_(mine.size()) {
    out_.sum = node(0, std::bit_ceil(mine.size()));
    for (std::size_t r = 0; r < mine.size(); ++r) {
      out_.returned.push_back(returned(r, policy));
      out_.traffic.push_back(traffic(r));
    }
  }
  const ExchangeOutcome& outcome() const { return out_; }

 private:
  using Map = std::map<Index, float>;
  static Map map_of(const SparseView& s) {
    Map m;
    for (std::size_t e = 0; e < s.nnz(); ++e) m[s.index[e]] = s.value[e];
    return m;
  }

  // What rank `first` holds for the ranks [first, first + span).
  SparseBuffer node(std::size_t first, std::size_t span) {
    if (span == 1) {
      SparseBuffer s;
      s.assign(mine_[first]);
      return s;
    }
    const std::size_t half = span / 2, child = first + half;
    SparseBuffer lower = node(first, half);
    if (child >= mine_.size()) return lower;
    const SparseBuffer upper = node(child, half);
    up_[child] = upper.nnz();
    const SparseBuffer merged = sum({lower.view(), upper.view()});
    SparseBuffer kept = top_k(dense(merged.view()), k_);
    Map rest = map_of(merged.view());
    for (const Index i : kept.view().index) rest.erase(i);
    dropped_[first].push_back(rest);
    return kept;
  }

  SparseBuffer returned(std::size_t r, DropPolicy policy) const {
    const Map result = map_of(out_.sum.view());
    Map back;
    const auto add = [&](Index i, float v) {
      const auto [at, fresh] = back.try_emplace(i, v);
      if (!fresh) at->second += v;
    };
    if (policy != DropPolicy::merger_keeps) {
      for (const auto& [i, v] : map_of(mine_[r])) {
        if (!result.contains(i)) add(i, v);
      }
    }
    if (policy != DropPolicy::sender_keeps) {
      for (const Map& merge : dropped_[r]) {
        for (const auto& [i, v] : merge) {
          if (policy == DropPolicy::merger_keeps || result.contains(i)) add(i, v);
        }
      }
    }
    std::erase_if(back, [](const auto& e) { return e.second == 0.0F; });
    SparseBuffer s;
    s.reset(mine_[r].dim);
    for (const auto& [i, v] : back) s.append(i, v);
    return s;
  }

  // Once up the tree, except the root; then the result down a tree of the same height.
  Traffic traffic(std::size_t r) const {
    const std::uint64_t result = frame_bytes(out_.sum.nnz());
    Traffic t;
    t.rounds = 2 * log2_ceil(mine_.size());
    if (r > 0) {
      t.sent_bytes += frame_bytes(up_[r]);
      t.received_bytes += result;
      ++t.messages;
    }
    for (std::size_t below = 1; below < mine_.size(); below *= 2) {
      if (r % (2 * below) == 0 && r + below < mine_.size()) {
        t.received_bytes += frame_bytes(up_[r + below]);
      }
      if (r < below && r + below < mine_.size()) {
        t.sent_bytes += result;
        ++t.messages;
      }
    }
    return t;
  }

  const std::vector<SparseView>& mine_;
  std::size_t k_;
  std::vector<std::vector<Map>> dropped_;  // [rank]: of each merge
  std::vector<std::size_t> up_;            // [rank]: entries that it sent up
  ExchangeOutcome out_;
};

inline ExchangeOutcome oracle(const ExchangeOptions& options, const std::vector<SparseView>& mine,
                              std::size_t k) {
  if (mine.size() == 1) {
    ExchangeOutcome out{.sum = sum(mine), .returned = {}, .traffic = {{}}};
    out.returned.emplace_back().reset(mine[0].dim);
    return out;
  }
  if (options.kind == ExchangeKind::allgather) return allgather_oracle(mine);
  return GTopKOracle(mine, k, options.drop).outcome();
}

// Entries that are not zero: what the law of conservation sees.
inline SparseBuffer without_zeros(const SparseView& s) {
  SparseBuffer out;
  out.reset(s.dim);
  for (std::size_t e = 0; e < s.nnz(); ++e) {
    if (s.value[e] != 0.0F) out.append(s.index[e], s.value[e]);
  }
  return out;
}

inline std::vector<ExchangeOptions> sparse_exchanges() {
  return {{.kind = ExchangeKind::allgather},
          {.kind = ExchangeKind::gtopk, .drop = DropPolicy::survivors},
          {.kind = ExchangeKind::gtopk, .drop = DropPolicy::merger_keeps},
          {.kind = ExchangeKind::gtopk, .drop = DropPolicy::sender_keeps}};
}
inline std::string name_of(const ExchangeOptions& o) {
  std::string name(exchange_kind_names()[static_cast<std::size_t>(o.kind)]);
  if (o.kind == ExchangeKind::gtopk) {
    name += ' ';
    name += drop_policy_names()[static_cast<std::size_t>(o.drop)];
  }
  return name;
}

}  // namespace skim::test
