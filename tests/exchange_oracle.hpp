// What the exchanges do, from above: all ranks' selections in, every rank's result out. Recursive
// and by maps, where the library works by rounds, frames and merges of lists.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "oracle.hpp"
#include "skim/codec.hpp"
#include "skim/exchange.hpp"

namespace skim::test {

struct ExchangeOutcome {
  SparseBuffer sum;                    // if dense: all n entries
  bool dense = false;                  // ExchangeResult::dense_sum
  std::vector<SparseBuffer> returned;  // [rank]
  std::vector<Traffic> traffic;        // [rank], for raw frames
};

// With raw indices and f32 values.
inline std::uint64_t frame_bytes(std::size_t nnz, bool stats = true) {
  return 24 + (stats ? 48U : 0U) + 8 * nnz;
}
inline std::uint64_t log2_ceil(std::size_t p) {
  return static_cast<std::uint64_t>(std::bit_width(p - 1));
}
inline void add(Traffic& to, const Traffic& t) {
  to.sent_bytes += t.sent_bytes;
  to.received_bytes += t.received_bytes;
  to.messages += t.messages;
  to.rounds += t.rounds;
}

// Of an all-gather of short messages: up to 3 ranks pass on each message but their right
// neighbour's, around a ring. More double what they hold in every round; a message of m others has
// m - 1 lengths in front.
inline Traffic gather_traffic(const std::vector<std::uint64_t>& length, std::size_t r) {
  const std::size_t p = length.size();
  std::uint64_t all = 0;
  for (const std::uint64_t l : length) all += l;
  if (p <= 3) {
    return {.sent_bytes = all - length[(r + 1) % p],
            .received_bytes = all - length[r],
            .messages = p - 1,
            .rounds = p - 1};
  }
  Traffic t;
  const bool pairs = std::has_single_bit(p);
  for (std::size_t have = 1; have < p; have *= 2) {
    const std::size_t count = std::min(have, p - have);
    const std::size_t own = pairs ? r / have * have : r;
    const std::size_t others = pairs ? own ^ have : r + have;
    t.sent_bytes += 8 * (count - 1);
    t.received_bytes += 8 * (count - 1);
    for (std::size_t i = 0; i < count; ++i) {
      t.sent_bytes += length[(own + i) % p];
      t.received_bytes += length[(others + i) % p];
    }
    ++t.messages;
    ++t.rounds;
  }
  return t;
}

// Of rank r in a broadcast from rank 0, down a binomial tree. A long message goes to one child
// after the other, and all but the last one say that they have it.
inline Traffic broadcast_traffic(std::uint64_t bytes, std::size_t r, std::size_t p) {
  Traffic t{.received_bytes = r > 0 ? bytes : 0, .rounds = log2_ceil(p)};
  for (std::size_t below = std::bit_ceil(r + 1); r + below < p; below *= 2) {
    t.sent_bytes += bytes;
    ++t.messages;
  }
  const bool is_last_child = r == 0 || r + std::bit_floor(r) >= p;
  if (bytes >= 65536 && !is_last_child) ++t.messages;
  return t;
}

// Of rank r in a dense sum of n entries around a ring, with the statistics of every rank.
inline Traffic ring_traffic(std::size_t n, std::size_t r, std::size_t p) {
  if (p == 1) return {};
  const auto chunk = [&](std::size_t c) { return n * (c % p + 1) / p - n * (c % p) / p; };
  return {.sent_bytes = 4 * (2 * n - chunk(r) - chunk(r + 1)) + 48 * (p - 1),
          .received_bytes = 4 * (2 * n - chunk(r) - chunk(r + p - 1)) + 48 * (p - 1),
          .messages = 2 * (p - 1),
          .rounds = 2 * (p - 1)};
}

inline ExchangeOutcome allgather_oracle(const std::vector<SparseView>& mine) {
  ExchangeOutcome out{.sum = sum(mine), .returned = {}, .traffic = {}};
  std::vector<std::uint64_t> lengths;
  for (const SparseView& s : mine) lengths.push_back(frame_bytes(s.nnz()));
  for (std::size_t r = 0; r < mine.size(); ++r) {
    out.returned.emplace_back().reset(mine[r].dim);
    out.traffic.push_back(gather_traffic(lengths, r));
  }
  return out;
}

inline std::set<Index> indices_of(const SparseView& s) { return {s.index.begin(), s.index.end()}; }
inline SparseBuffer entries_where(const SparseView& s, const std::function<bool(Index)>& wanted) {
  SparseBuffer out;
  out.reset(s.dim);
  for (std::size_t e = 0; e < s.nnz(); ++e) {
    if (wanted(s.index[e])) out.append(s.index[e], s.value[e]);
  }
  return out;
}

inline ExchangeOutcome global_topk_oracle(const std::vector<SparseView>& mine, std::size_t k) {
  ExchangeOutcome out = allgather_oracle(mine);
  out.sum = top_k(dense(out.sum.view()), k);
  const std::set<Index> kept = indices_of(out.sum.view());
  for (std::size_t r = 0; r < mine.size(); ++r) {
    out.returned[r] = entries_where(mine[r], [&](Index i) { return !kept.contains(i); });
  }
  return out;
}

// Regions of positions in the list begin at multiples of 64 if each of p has 64 of them.
inline std::size_t region_begin(std::size_t positions, std::size_t region, std::size_t p) {
  const std::size_t unit = positions >= 64 * p ? 64 : 1;
  return std::min(positions, (positions + unit - 1) / unit * region / p * unit);
}

inline ExchangeOutcome shared_indices_oracle(const std::vector<SparseView>& mine, std::size_t k) {
  const std::size_t p = mine.size();
  const bool has_all = k >= mine[0].dim;
  std::set<Index> list;
  std::vector<std::uint64_t> lists;
  for (std::size_t i = 0; has_all && i < mine[0].dim; ++i) list.insert(static_cast<Index>(i));
  for (const SparseView& s : mine) {
    const SparseBuffer named = top_k(dense(s), (k + p - 1) / p);
    list.merge(indices_of(named.view()));
    lists.push_back(24 + 4 * named.nnz());
  }
  const auto is_shared = [&](Index i) { return list.contains(i); };
  std::vector<SparseBuffer> sent;
  std::vector<SparseView> views;
  ExchangeOutcome out;
  out.traffic.resize(p);
  for (const SparseView& s : mine) {
    sent.push_back(entries_where(s, is_shared));
    out.returned.push_back(entries_where(s, [&](Index i) { return !is_shared(i); }));
  }
  for (const SparseBuffer& s : sent) views.push_back(s.view());
  out.sum = sum(views);
  const std::vector<Index> positions(list.begin(), list.end());
  std::vector<std::uint64_t> shares;
  for (std::size_t o = 0; o < p; ++o) {
    const std::set<Index> region(
        positions.begin() + static_cast<std::ptrdiff_t>(region_begin(list.size(), o, p)),
        positions.begin() + static_cast<std::ptrdiff_t>(region_begin(list.size(), o + 1, p)));
    const auto bytes = [&](const SparseBuffer& s, bool stats) {
      return frame_bytes(
          entries_where(s.view(), [&](Index i) { return region.contains(i); }).nnz(), stats);
    };
    for (std::size_t r = 0; r < p; ++r) {
      if (r == o) continue;
      add(out.traffic[r], {.sent_bytes = bytes(sent[r], true), .messages = 1, .rounds = 1});
      out.traffic[o].received_bytes += bytes(sent[r], true);
    }
    shares.push_back(bytes(out.sum, false));
  }
  for (std::size_t r = 0; r < p; ++r) {
    if (!has_all) add(out.traffic[r], gather_traffic(lists, r));
    add(out.traffic[r], gather_traffic(shares, r));
  }
  return out;
}

// What the Reducer gives to shared_indices: every rank's entries, zeros too, where any rank has one
// of its k / P largest.
inline std::vector<SparseBuffer> at_shared_indices(const std::vector<std::vector<float>>& of_ranks,
                                                   std::size_t k) {
  const std::size_t p = of_ranks.size();
  std::set<Index> list;
  for (const auto& x : of_ranks) list.merge(indices_of(top_k(x, (k + p - 1) / p).view()));
  std::vector<SparseBuffer> all(p);
  for (std::size_t r = 0; r < p; ++r) {
    all[r].reset(of_ranks[r].size());
    for (const Index i : list) all[r].append(i, of_ranks[r][i]);
  }
  return all;
}

// The order of the k-th largest key of all owners, and what they tell each other to find it: `keys`
// of each owner, largest first; gathered(words) for an all-gather of so many words of each.
template <class Keys, class Gathered>
std::uint32_t kth_key(const Keys& keys, std::size_t k, const Gathered& gathered) {
  std::vector<std::uint64_t> words;
  std::map<typename Keys::value_type::value_type, std::size_t, std::greater<>> told;
  std::size_t count = 0, slack = 0;
  typename Keys::value_type all;
  for (const auto& of_owner : keys) {
    const auto step = std::max<std::size_t>(
        1, static_cast<std::size_t>(std::sqrt(static_cast<double>(of_owner.size()) / 2)));
    words.push_back(1 + of_owner.size() / step);
    for (std::size_t i = step; i <= of_owner.size(); i += step) told[of_owner[i - 1]] = step;
    count += of_owner.size();
    slack += step - 1;
    all.insert(all.end(), of_owner.begin(), of_owner.end());
  }
  gathered(words);
  std::ranges::sort(all, std::greater<>{});
  if (k == 0) return ~0U;
  if (count <= k) return 0;
  auto low = all.back(), high = std::pair{~0U, std::int64_t{0}};
  std::size_t reach = 0;
  for (const auto& [key, step] : told) {
    reach += step;
    if (reach + slack < k) high = key;
    if (reach >= k) {
      low = key;
      break;
    }
  }
  words.clear();
  for (const auto& of_owner : keys) {
    words.push_back(1 + static_cast<std::uint64_t>(std::ranges::count_if(
                            of_owner, [&](const auto& key) { return low <= key && key < high; })));
  }
  gathered(words);
  return all[k - 1].first;
}

// Runs of one slot, one after the other: regions and the cut stay.
class OkTopKOracle {
 public:
  explicit OkTopKOracle(OkTopKOptions options) : options_(options) {}

  ExchangeOutcome run(const std::vector<SparseView>& mine, std::size_t k) {
    const std::size_t p = mine.size(), n = mine[0].dim;
    ExchangeOutcome out;
    out.traffic.resize(p);
    const auto gathered = [&](const std::vector<std::uint64_t>& words) {
      std::vector<std::uint64_t> lengths;
      for (const std::uint64_t w : words) lengths.push_back(8 * (w + 1));
      for (std::size_t r = 0; r < p; ++r) add(out.traffic[r], gather_traffic(lengths, r));
    };

    if (begin_.size() != p || region_age_ >= options_.regions_every) {
      std::vector<std::uint64_t> words;
      for (const SparseView& s : mine) words.push_back(1 + std::min(s.nnz(), 2 * p));
      gathered(words);
      find_regions(mine);
    }
    const auto owner = [&](Index i) {
      return static_cast<std::size_t>(std::upper_bound(begin_.begin(), begin_.end(), i) -
                                      begin_.begin() - 1);
    };

    // Parts: [rank][owner], the largest ones of each.
    const std::size_t limit = options_.exact ? n : (4 * k + 3 * p - 1) / (3 * p);
    std::vector<std::set<Index>> sent(p);
    std::vector<SparseBuffer> sendings;
    for (std::size_t r = 0; r < p; ++r) {
      for (std::size_t o = 0; o < p; ++o) {
        SparseBuffer part = entries_where(mine[r], [&](Index i) { return owner(i) == o; });
        if (o != r && part.nnz() > limit) part = top_k(dense(part.view()), limit);
        sent[r].merge(indices_of(part.view()));
        if (o == r) continue;
        add(out.traffic[r], {.sent_bytes = frame_bytes(part.nnz()), .messages = 1, .rounds = 1});
        add(out.traffic[o], {.received_bytes = frame_bytes(part.nnz())});
      }
      sendings.push_back(entries_where(mine[r], [&](Index i) { return sent[r].contains(i); }));
    }
    std::vector<SparseView> views;
    for (const auto& s : sendings) views.push_back(s.view());
    const SparseBuffer total = entries_where(
        sum(views).view(), [](Index) { return true; });  // zeros are never kept, below
    const std::vector<float> all = dense(total.view());

    // Cut.
    std::vector<std::vector<std::pair<std::uint32_t, std::int64_t>>> keys(p);  // of each owner
    for (const Index i : total.view().index) {
      if (order(all[i]) > 0) keys[owner(i)].emplace_back(order(all[i]), -std::int64_t{i});
    }
    std::size_t count = 0, reached = 0;
    for (auto& of_owner : keys) {
      std::ranges::sort(of_owner, std::greater<>{});
      count += of_owner.size();
      for (const auto& key : of_owner) reached += key.first >= cut_ ? 1U : 0U;
    }
    bool exact = options_.exact || cut_age_ >= options_.cut_every;
    if (!exact) {
      gathered(std::vector<std::uint64_t>(p, 2));
      exact = reached > 4 * k / 3 || (3 * reached < 2 * k && reached < count);
    }
    if (exact) {
      out.sum = top_k(all, k);
      cut_ = kth_key(keys, k, gathered);
      cut_age_ = 0;
    } else {
      out.sum = entries_where(total.view(),
                              [&](Index i) { return order(all[i]) > 0 && order(all[i]) >= cut_; });
    }

    // To all.
    const std::size_t whole = out.sum.nnz();
    std::vector<std::uint64_t> share;
    std::vector<std::size_t> first(p + 1, 0);
    std::size_t longest = 0;
    for (const Index i : out.sum.view().index) ++first[owner(i) + 1];
    for (std::size_t o = 0; o < p; ++o) {
      longest = std::max(longest, first[o + 1]);
      share.push_back(first[o + 1]);
    }
    for (std::size_t o = 0; o < p; ++o) first[o + 1] += first[o];
    if ((p - 1) * (longest - whole / p) * 8 > 8192) {
      ++balanced;
      std::uint64_t rounds = 0;
      std::vector<std::uint64_t> in(p, 0), gone(p, 0);
      for (std::size_t o = 0; o < p; ++o) {
        for (std::size_t j = 0; j < p; ++j) {
          std::size_t moved = 0;
          for (std::size_t e = first[o]; e < first[o + 1]; ++e) {
            moved += whole * j / p <= e && e < whole * (j + 1) / p ? 1U : 0U;
          }
          if (j == o || moved == 0) continue;
          rounds = std::max({rounds, ++gone[o], ++in[j]});
          add(out.traffic[o], {.sent_bytes = frame_bytes(moved, false), .messages = 1});
          add(out.traffic[j], {.received_bytes = frame_bytes(moved, false)});
        }
      }
      for (std::size_t j = 0; j < p; ++j) {
        share[j] = whole * (j + 1) / p - whole * j / p;
        out.traffic[j].rounds += rounds;
      }
    }
    std::vector<std::uint64_t> lengths;
    for (const std::uint64_t s : share) lengths.push_back(frame_bytes(s, false));
    for (std::size_t r = 0; r < p; ++r) add(out.traffic[r], gather_traffic(lengths, r));

    const std::set<Index> kept = indices_of(out.sum.view());
    for (std::size_t r = 0; r < p; ++r) {
      out.returned.push_back(entries_where(
          mine[r], [&](Index i) { return !kept.contains(i) || !sent[r].contains(i); }));
    }
    ++region_age_;
    ++cut_age_;
    return out;
  }

  std::size_t balanced = 0;  // runs with a round of balancing

 private:
  void find_regions(const std::vector<SparseView>& mine) {
    const std::size_t p = mine.size();
    std::multiset<std::pair<Index, double>> weight;
    double total = 0.0;
    for (const SparseView& s : mine) {
      const std::size_t told = std::min(s.nnz(), 2 * p);
      for (std::size_t i = 0; i < told; ++i) {
        weight.emplace(s.index[i * s.nnz() / told],
                       static_cast<double>(s.nnz()) / static_cast<double>(told));
      }
      total += static_cast<double>(s.nnz());
    }
    begin_.assign(1, 0);
    region_age_ = total == 0.0 ? options_.regions_every : 0;
    for (std::size_t o = 1; o < p; ++o) {
      const double goal = total * static_cast<double>(o) / static_cast<double>(p);
      Index at = static_cast<Index>(total == 0.0 ? mine[0].dim * o / p : mine[0].dim);
      double before = 0.0;
      for (const auto& [index, w] : weight) {
        if (before >= goal) {
          at = index;
          break;
        }
        before += w;
      }
      begin_.push_back(at);
    }
  }

  OkTopKOptions options_;
  std::vector<Index> begin_;  // [P]
  std::uint32_t cut_ = 0, region_age_ = 0, cut_age_ = ~0U / 2;
};

// Recursive doubling among the first Q ranks, Q the largest power of two; rank Q + i counts with i.
class SparCMLOracle {
 public:
  explicit SparCMLOracle(const std::vector<SparseView>& mine)
      : mine_(mine), inner_(std::bit_floor(mine.size())) {
    out_.traffic.resize(mine.size());
    const std::size_t n = mine[0].dim;
    out_.sum = node(0, inner_);
    for (std::size_t r = 0; r < mine.size(); ++r) {
      out_.returned.emplace_back().reset(n);
      out_.traffic[r].rounds = log2_ceil(inner_) + (mine.size() > inner_ ? 2U : 0U);
      if (r >= inner_) {
        move(r, r - inner_, mine[r].nnz());
        move(r - inner_, r, out_.sum.nnz());
      }
    }
    out_.dense = n > 0 && out_.sum.nnz() == n;
  }
  const ExchangeOutcome& outcome() const { return out_; }

 private:
  void move(std::size_t from, std::size_t to, std::size_t nnz) {
    add(out_.traffic[from], {.sent_bytes = frame_bytes(nnz), .messages = 1});
    add(out_.traffic[to], {.received_bytes = frame_bytes(nnz)});
  }
  SparseBuffer node(std::size_t first, std::size_t span) {
    if (span == 1) {
      SparseBuffer s;
      s.assign(mine_[first]);
      if (first + inner_ >= mine_.size()) return s;
      return joined(s.view(), mine_[first + inner_]);
    }
    const SparseBuffer lower = node(first, span / 2), upper = node(first + span / 2, span / 2);
    for (std::size_t r = first; r < first + span / 2; ++r) {
      move(r, r + span / 2, lower.nnz());
      move(r + span / 2, r, upper.nnz());
    }
    return joined(lower.view(), upper.view());
  }
  static SparseBuffer joined(const SparseView& a, const SparseView& b) {
    if (a.nnz() + b.nnz() <= a.dim / 2) return sum({a, b});
    const std::vector<float> x = dense(a), y = dense(b);
    SparseBuffer full;
    full.reset(a.dim);
    for (std::size_t i = 0; i < x.size(); ++i) full.append(static_cast<Index>(i), x[i] + y[i]);
    return full;
  }

  const std::vector<SparseView>& mine_;
  std::size_t inner_;
  ExchangeOutcome out_;
};

// Merges of neighbouring blocks of ranks. The tree: rank r counts with itself, and the block of a
// rank beyond P is empty. The butterfly: among the first Q ranks, Q the largest power of two; rank
// Q + i counts with i.
class GTopKOracle {
 public:
  GTopKOracle(const std::vector<SparseView>& mine, std::size_t k, const ExchangeOptions& options)
      : mine_(mine),
        k_(k),
        tree_(options.kind == ExchangeKind::gtopk_tree),
        inner_(tree_ ? std::bit_ceil(mine.size()) : std::bit_floor(mine.size())),
        codec_(options.codec),
        dropped_(mine.size()),
        errors_(mine.size()) {
    const std::size_t p = mine.size();
    out_.traffic.resize(p);
    Block all = node(0, inner_);
    if (tree_) {
      all.keepers = 1;
      round(all);
      for (std::size_t below = 1; below < p; below *= 2) {
        for (std::size_t r = 0; r < below && r + below < p; ++r) move(r, r + below, all.sum.nnz());
      }
    } else if (inner_ < p) {
      round(all);
      for (std::size_t r = inner_; r < p; ++r) move(r - inner_, r, all.sum.nnz());
    }
    out_.sum = all.sum;
    for (std::size_t r = 0; r < p; ++r) {
      out_.returned.push_back(returned(r, options.drop));
      out_.traffic[r].rounds =
          tree_ ? 2 * log2_ceil(p) : log2_ceil(inner_) + (inner_ < p ? 2U : 0U);
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

  // What ranks of a block hold alike: `keepers` of them, from `first` on.
  struct Block {
    std::size_t first = 0, keepers = 1;
    SparseBuffer sum = {};
    bool merged = false;
  };
  void move(std::size_t from, std::size_t to, std::size_t nnz) {
    add(out_.traffic[from], {.sent_bytes = frame_bytes(nnz), .messages = 1});
    add(out_.traffic[to], {.received_bytes = frame_bytes(nnz)});
  }
  // The e-th entry of a list is the keeper's whose turn it is.
  static void share_out(const Block& block, const Map& list, std::vector<std::vector<Map>>& to) {
    for (std::size_t r = 0; r < block.keepers; ++r) to[block.first + r].emplace_back();
    std::size_t e = 0;
    for (const auto& entry : list) to[block.first + e++ % block.keepers].back().insert(entry);
  }

  Block node(std::size_t first, std::size_t span) {
    if (span == 1) {
      Block leaf{.first = first};
      leaf.sum.assign(mine_[first]);
      if (first + inner_ >= mine_.size()) return leaf;
      move(first + inner_, first, mine_[first + inner_].nnz());
      SparseBuffer above;
      above.assign(mine_[first + inner_]);
      return merge(leaf, above, 1);
    }
    const std::size_t half = span / 2;
    Block lower = node(first, half);
    if (first + half >= mine_.size()) return lower;
    Block upper = node(first + half, half);
    if (!tree_) round(lower);
    round(upper);
    for (std::size_t r = 0; r < (tree_ ? 1 : half); ++r) {
      move(first + half + r, first + r, upper.sum.nnz());
      if (!tree_) move(first + r, first + half + r, lower.sum.nnz());
    }
    return merge(lower, upper.sum, tree_ ? 1 : span);
  }
  Block merge(const Block& lower, const SparseBuffer& upper, std::size_t keepers) {
    const SparseBuffer merged = sum({lower.sum.view(), upper.view()});
    Block block{lower.first, keepers, top_k(dense(merged.view()), k_), true};
    Map rest = map_of(merged.view());
    for (const Index i : block.sum.view().index) rest.erase(i);
    std::erase_if(rest, [](const auto& e) { return e.second == 0.0F; });
    share_out(block, rest, dropped_);
    return block;
  }

  // What is sent on after a merge, to the nearest.
  void round(Block& block) {
    if (!block.merged) return;
    Map before = map_of(block.sum.view());
    codec_.quantize(block.sum, {}, 0);
    for (const auto& [i, v] : map_of(block.sum.view())) before[i] -= v;
    std::erase_if(before, [](const auto& e) { return e.second == 0.0F; });
    share_out(block, before, errors_);
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
    for (const Map& error : errors_[r]) {
      for (const auto& [i, v] : error) {
        if (policy == DropPolicy::merger_keeps || result.contains(i)) add(i, v);
      }
    }
    std::erase_if(back, [](const auto& e) { return e.second == 0.0F; });
    SparseBuffer s;
    s.reset(mine_[r].dim);
    for (const auto& [i, v] : back) s.append(i, v);
    return s;
  }

  const std::vector<SparseView>& mine_;
  std::size_t k_;
  bool tree_;
  std::size_t inner_;
  Codec codec_;
  std::vector<std::vector<Map>> dropped_, errors_;  // [rank]: of each merge, and each rounding
  ExchangeOutcome out_;
};

// Runs of one slot, one after the other: the server's mass stays.
class ParamServerOracle {
 public:
  explicit ParamServerOracle(bool sharded) : sharded_(sharded) {}

  ExchangeOutcome run(const std::vector<SparseView>& mine, std::size_t k_down) {
    const std::size_t p = mine.size(), n = mine[0].dim;
    ExchangeOutcome out;
    out.traffic.resize(p);
    held_.resize(n);
    const SparseBuffer came = sum(mine);
    for (std::size_t e = 0; e < came.nnz(); ++e) {
      held_[came.view().index[e]] += came.view().value[e];
    }
    if (k_down >= n && !cut_) {  // zeros, too
      out.sum = came;
      for (std::size_t e = 0; e < came.nnz(); ++e)
        out.sum.values()[e] = held_[came.view().index[e]];
    } else {
      out.sum = top_k(held_, std::min(k_down, n));
      cut_ = k_down < n;
    }
    if (sharded_) {
      traffic_of_shards(mine, out, k_down);
    } else {
      traffic_of_rank_0(mine, out);
    }
    for (const Index i : out.sum.view().index) held_[i] = 0.0F;
    for (std::size_t r = 0; r < p; ++r) out.returned.emplace_back().reset(n);
    return out;
  }
  const std::vector<float>& held() const { return held_; }

 private:
  static void traffic_of_rank_0(const std::vector<SparseView>& mine, ExchangeOutcome& out) {
    const std::size_t p = mine.size();
    for (std::size_t r = 0; r < p; ++r) {
      Traffic& t = out.traffic[r];
      const std::uint64_t up = frame_bytes(mine[r].nnz()), down = frame_bytes(out.sum.nnz());
      add(t, broadcast_traffic(down, r, p));
      ++t.rounds;
      if (r > 0) {
        add(t, {.sent_bytes = up, .messages = 1});
        out.traffic[0].received_bytes += up;
      }
    }
  }
  void traffic_of_shards(const std::vector<SparseView>& mine, ExchangeOutcome& out,
                         std::size_t k_down) const {
    const std::size_t p = mine.size(), n = mine[0].dim;
    const auto count_in = [&](const SparseView& s, std::size_t owner) {
      return static_cast<std::size_t>(std::ranges::count_if(
          s.index, [&](Index i) { return n * owner / p <= i && i < n * (owner + 1) / p; }));
    };
    const auto gathered = [&](const std::vector<std::uint64_t>& bytes) {
      for (std::size_t r = 0; r < p; ++r) add(out.traffic[r], gather_traffic(bytes, r));
    };
    std::vector<std::uint64_t> shares;
    std::vector<std::vector<std::pair<std::uint32_t, std::int64_t>>> keys(p);
    for (std::size_t o = 0; o < p; ++o) {
      for (std::size_t r = 0; r < p; ++r) {
        if (r == o) continue;
        const std::uint64_t part = frame_bytes(count_in(mine[r], o));
        add(out.traffic[r], {.sent_bytes = part, .messages = 1, .rounds = 1});
        add(out.traffic[o], {.received_bytes = part});
      }
      for (std::size_t i = n * o / p; i < n * (o + 1) / p; ++i) {
        if (order(held_[i]) > 0)
          keys[o].emplace_back(order(held_[i]), -static_cast<std::int64_t>(i));
      }
      std::ranges::sort(keys[o], std::greater<>{});
      if (keys[o].size() > k_down) keys[o].resize(k_down);  // what may be among the largest of all
      shares.push_back(frame_bytes(count_in(out.sum.view(), o), false));
    }
    if (k_down < n) {
      kth_key(keys, k_down, [&](std::vector<std::uint64_t> words) {
        for (std::uint64_t& w : words) w = 8 * (w + 1);
        gathered(words);
      });
    }
    gathered(shares);
  }

  bool sharded_, cut_ = false;
  std::vector<float> held_;
};

// One exchange on all ranks, run after run of one slot. Values that are rounded to the nearest are
// modelled for allgather, gtopk and global_topk.
class ExchangeOracle {
 public:
  using HostOf = std::function<std::size_t(std::size_t rank)>;
  explicit ExchangeOracle(
      ExchangeOptions options, HostOf host_of = [](std::size_t) { return 0U; })
      : options_(std::move(options)),
        host_of_(std::move(host_of)),
        oktopk_(options_.oktopk),
        server_(options_.server.placement == ServerPlacement::sharded) {}

  ExchangeOutcome run(const std::vector<SparseView>& mine, std::size_t k) {
    if (mine.size() == 1) {
      ExchangeOutcome out{.sum = sum(mine), .returned = {}, .traffic = {{}}};
      out.returned.emplace_back().reset(mine[0].dim);
      return out;
    }
    switch (options_.kind) {
      case ExchangeKind::allgather:
        return allgather_oracle(mine);
      case ExchangeKind::gtopk:
      case ExchangeKind::gtopk_tree:
        return GTopKOracle(mine, k, options_).outcome();
      case ExchangeKind::global_topk:
        return global_topk_oracle(mine, k);
      case ExchangeKind::oktopk:
        return oktopk_.run(mine, k);
      case ExchangeKind::sparcml:
        return SparCMLOracle(mine).outcome();
      case ExchangeKind::shared_indices:
        return shared_indices_oracle(mine, k);
      case ExchangeKind::hierarchical:
        return hierarchical(mine, k);
      case ExchangeKind::param_server:
        return server_.run(mine, k);
      case ExchangeKind::dense:
        break;
    }
    return {};
  }
  std::size_t balanced() const { return oktopk_.balanced; }

 private:
  ExchangeOutcome hierarchical(const std::vector<SparseView>& mine, std::size_t k) {
    std::map<std::size_t, std::vector<std::size_t>> hosts;  // ranks
    for (std::size_t r = 0; r < mine.size(); ++r) hosts[host_of_(r)].push_back(r);
    std::vector<std::vector<std::size_t>> by_leader;
    for (const auto& [host, ranks] : hosts) by_leader.push_back(ranks);
    std::ranges::sort(by_leader);
    const auto part = [&](ExchangeKind kind, std::size_t which) -> ExchangeOracle& {
      ExchangeOptions options = options_;
      options.kind = kind;
      while (parts_.size() <= which) parts_.emplace_back(options);
      return parts_[which];
    };
    const auto nonzero = [](const ExchangeOutcome& o) {
      return o.dense ? entries_where(o.sum.view(),
                                     [&](Index i) { return o.sum.view().value[i] != 0.0F; })
                     : o.sum;
    };
    std::vector<ExchangeOutcome> inside;
    std::vector<SparseBuffer> sums;
    std::vector<SparseView> host_sums;
    for (std::size_t h = 0; h < by_leader.size(); ++h) {
      std::vector<SparseView> theirs;
      for (const std::size_t r : by_leader[h]) theirs.push_back(mine[r]);
      inside.push_back(part(options_.hierarchy.inside, h).run(theirs, k));
      sums.push_back(nonzero(inside[h]));
    }
    for (const auto& s : sums) host_sums.push_back(s.view());
    if (!between_) {
      ExchangeOptions options = options_;
      options.kind = options_.hierarchy.between;
      between_ = std::make_unique<ExchangeOracle>(options);
    }
    const ExchangeOutcome all = between_->run(host_sums, k);

    ExchangeOutcome out;
    out.sum = nonzero(all);
    out.returned.resize(mine.size());
    out.traffic.resize(mine.size());
    const std::set<Index> kept = indices_of(out.sum.view());
    const auto arrived = [&](Index i) { return kept.contains(i); };
    for (std::size_t h = 0; h < by_leader.size(); ++h) {
      const std::size_t size = by_leader[h].size();
      for (std::size_t m = 0; m < size; ++m) {
        const std::size_t r = by_leader[h][m];
        SparseBuffer none;
        none.reset(mine[r].dim);
        const auto lost = entries_where(mine[r], [&](Index i) { return !kept.contains(i); });
        const auto from_host = entries_where(inside[h].returned[m].view(), arrived);
        const auto from_all = m == 0 ? entries_where(all.returned[h].view(), arrived) : none;
        out.returned[r] = sum({lost.view(), from_host.view(), from_all.view()});
        add(out.traffic[r], inside[h].traffic[m]);
        if (m == 0) add(out.traffic[r], all.traffic[h]);
        add(out.traffic[r], broadcast_traffic(frame_bytes(out.sum.nnz()), m, size));
      }
    }
    return out;
  }

  ExchangeOptions options_;
  HostOf host_of_;
  OkTopKOracle oktopk_;
  ParamServerOracle server_;
  std::vector<ExchangeOracle> parts_;  // inside each host
  std::unique_ptr<ExchangeOracle> between_;
};

// Entries that are not zero: what the law of conservation sees.
inline SparseBuffer without_zeros(const SparseView& s) {
  SparseBuffer out;
  out.reset(s.dim);
  for (std::size_t e = 0; e < s.nnz(); ++e) {
    if (s.value[e] != 0.0F) out.append(s.index[e], s.value[e]);
  }
  return out;
}

// Frames are raw, so that their lengths are a formula.
inline std::vector<ExchangeOptions> sparse_exchanges() {
  std::vector<ExchangeOptions> all = {
      {.kind = ExchangeKind::allgather},
      {.kind = ExchangeKind::gtopk, .drop = DropPolicy::survivors},
      {.kind = ExchangeKind::gtopk, .drop = DropPolicy::merger_keeps},
      {.kind = ExchangeKind::gtopk, .drop = DropPolicy::sender_keeps},
      {.kind = ExchangeKind::gtopk_tree, .drop = DropPolicy::survivors},
      {.kind = ExchangeKind::gtopk_tree, .drop = DropPolicy::merger_keeps},
      {.kind = ExchangeKind::gtopk_tree, .drop = DropPolicy::sender_keeps},
      {.kind = ExchangeKind::global_topk},
      {.kind = ExchangeKind::oktopk},
      {.kind = ExchangeKind::oktopk, .oktopk = {.exact = true}},
      {.kind = ExchangeKind::sparcml},
      {.kind = ExchangeKind::hierarchical},
      {.kind = ExchangeKind::param_server},
      {.kind = ExchangeKind::param_server, .server = {.placement = ServerPlacement::sharded}},
      {.kind = ExchangeKind::shared_indices},
  };
  for (ExchangeOptions& o : all) o.codec.index = IndexCode::raw32;
  return all;
}
inline std::string name_of(const ExchangeOptions& o) {
  std::string name(name_of(o.kind));
  if (o.kind == ExchangeKind::gtopk || o.kind == ExchangeKind::gtopk_tree) {
    name += ' ';
    name += name_of(o.drop);
  }
  if (o.kind == ExchangeKind::oktopk && o.oktopk.exact) name += " exact";
  if (o.kind == ExchangeKind::param_server) {
    name += ' ';
    name += name_of(o.server.placement);
  }
  return name;
}

}  // namespace skim::test
