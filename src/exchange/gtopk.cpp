// gTop-k (arXiv 1901.04359): partial sums meet pairwise, and each merge keeps its k largest
// entries. Any number of ranks.
//
// Vocabulary: a `merge` adds the partial sums of two neighbouring *blocks* of ranks, the lower
// block's first. It splits the sum into `kept` (k entries) and `dropped`. The `result` is the
// `kept` of the merge of all ranks.
//
//   tree       (gtopk_tree) as published: the lowest rank of the upper block sends to the lowest
//              rank of the lower block, which merges; at the end rank 0 broadcasts the result
//   butterfly  (gtopk) all ranks of both blocks swap in pairs, and all of them merge; every rank
//              does the same merges, so no broadcast is needed (pairwise.hpp)
//
// The tree cannot broadcast before its reduction ends, because the result depends on every frame.
// The butterfly does both at once: it also uses the tree's links in the other direction.
//
// Every dropped entry has one *keeper*. In the tree the keeper is the rank that merged. In the
// butterfly a whole block did the merge, so its ranks take turns, entry by entry.
//
// DropPolicy says who re-queues a dropped entry. `mine` is a rank's own selection.
//   survivors     index in the result:     the keeper, because this part of the sum never arrived
//                 index not in the result: every rank re-queues its own entry of `mine`
//   merger_keeps  always the keeper
//   sender_keeps  as published: every rank re-queues its own entry if the index is not in the
//                 result; if the index survived elsewhere, the entry that the merge dropped is lost
//
// A sum is rounded before it is sent. The rounding error (`errors_`) has a keeper, too. With
// merger_keeps the keeper always gets it back. With the other policies the keeper gets it back only
// if the index is in the result; otherwise the ranks take back their whole entries.
#include <algorithm>
#include <array>
#include <bit>
#include <deque>
#include <vector>

#include "exchange/byte_counts.hpp"
#include "exchange/pairwise.hpp"
#include "numbers.hpp"
#include "skim/error.hpp"
#include "skim/exchange.hpp"
#include "skim/select.hpp"

namespace skim {
namespace {

class GTopK final : public PairwiseExchange {
 public:
  explicit GTopK(const ExchangeOptions& options)
      : PairwiseExchange(options.codec), drop_(options.drop), kind_(options.kind) {}
  std::string_view name() const noexcept override { return name_of(kind_); }

  ExchangeResult run(StepId id, const SparseView& mine, const Keep& keep, GroupStats& stats,
                     Communicator& comm) override {
    returned_.reset(mine.dim);
    if (comm.size() == 1) return {.sum = mine, .returned = returned_.view()};
    return or_abort(comm, [&] {
      make_room(mine, most_entries(keep));
      const Run run{id, keep.k, stats, comm};
      if (kind_ == ExchangeKind::gtopk_tree) {
        tree(run);
      } else {
        butterfly(run, {"gtopk: fold", "gtopk: merge", "gtopk: unfold"});
      }
      put_back(mine);
      return ExchangeResult{.sum = partial_, .returned = returned_.view()};
    });
  }

  // In the tree, the root has one child per round. In the butterfly, the busiest rank also sends
  // the result to one of the ranks from the largest power of two up.
  double max_sent_bytes(std::size_t n, const Keep& keep, int ranks) const override {
    const auto p = static_cast<unsigned>(ranks);
    int frames = std::countr_zero(p);
    if (kind_ == ExchangeKind::gtopk_tree || !std::has_single_bit(p)) {
      frames = log2_ceil(ranks);
    }
    return frames * static_cast<double>(codec_.max_encoded_bytes(keep.k, n));
  }

 private:
  // Reserves for the largest sizes that can occur, so a warm step allocates nothing, however much
  // the ranks' selections overlap.
  void make_room(const SparseView& mine, std::size_t most) {
    begin(mine, std::max(most, mine.nnz()));
    const bool is_tree = kind_ == ExchangeKind::gtopk_tree;
    result_frame_.reserve(is_tree ? codec_.max_encoded_bytes(room_, mine.dim) : 0);
    mine_lost_.reserve(room_);
    merged_.reserve(2 * room_);
    scratch_.reserve(2 * room_);
  }

  void keep_own(SparseBuffer& s, const Block& block, int rank) override {
    if (block.size == 1) return;
    const auto turn = static_cast<std::size_t>(rank - block.first);
    const std::span<Index> index = s.indices();
    const std::span<float> value = s.values();
    std::size_t own = 0;
    for (std::size_t e = turn; e < value.size(); e += static_cast<std::size_t>(block.size)) {
      index[own] = index[e];
      value[own++] = value[e];
    }
    s.resize(own);
  }

  void merge(const Run& run, const SparseView& lower, const SparseView& upper, const Block& block,
             SparseBuffer& kept) override {
    sum(std::array{lower, upper}, merged_);
    SparseBuffer& dropped = nth(dropped_, merges_, 2 * room_);
    split_top_k(merged_.view(), run.k, kept, dropped, scratch_);
    keep_own(dropped, block, run.comm.rank());
  }

  // In round r, a rank that is an odd multiple of 2^r sends its sum to the rank 2^r below it and is
  // done.
  void tree(const Run& run) {
    Communicator& comm = run.comm;
    const int rounds = log2_ceil(comm.size());
    const int rank = comm.rank();
    bool active = true;
    for (int round = 0; round < rounds; ++round) {
      comm.set_phase({"gtopk: merge", round + 1, rounds});
      const int distance = 1 << round;
      if (active && (rank & distance) != 0) {
        round_off(run, {rank, 1}, 0);
        comm.wait(start_send(run, rank - distance));
        active = false;
      } else if (active && rank + distance < comm.size()) {
        receive(comm, rank + distance);
        meet(run, true, {rank, 1});
      }
      comm.end_round();
    }
    comm.set_phase({"gtopk: broadcast"});
    if (rank == 0) {
      round_off(run, {0, 1}, 0);
      result_frame_.clear();
      codec_.encode(partial_, &run.stats, result_frame_);
    }
    comm.broadcast(result_frame_, 0);
    if (rank == 0) return;
    decode_frame(codec_, result_frame_, partial_.dim, incoming_, of_peer_, comm, 0);
    take(run.stats);
  }

  // Expects the result in partial_.
  void put_back(const SparseView& mine) {
    parts_.clear();
    if (drop_ != DropPolicy::merger_keeps) {
      entries_not_in(mine, partial_, mine_lost_);
      parts_.push_back(mine_lost_.view());
    }
    const auto add = [&](const SparseView& kept_here) {
      if (drop_ == DropPolicy::merger_keeps) {
        parts_.push_back(kept_here);
      } else {
        SparseBuffer& arrived = nth(arrived_, parts_.size() - 1, room_);
        entries_in(kept_here, partial_, arrived);
        parts_.push_back(arrived.view());
      }
    };
    if (drop_ != DropPolicy::sender_keeps) {
      for (std::size_t m = 0; m < merges_; ++m) add(dropped_[m].view());
    }
    for (const SparseView& error : errors_) add(error);
    returned_.reserve((2 * parts_.size() + 1) * room_);
    if (!parts_.empty()) sum(parts_, returned_);
  }

  DropPolicy drop_;
  ExchangeKind kind_;                    // gtopk or gtopk_tree
  std::vector<std::byte> result_frame_;  // of the tree's broadcast
  SparseBuffer merged_, mine_lost_, returned_;
  std::deque<SparseBuffer> dropped_;  // [merges_]: the entries that this rank keeps
  std::vector<SparseView> parts_;
  std::deque<SparseBuffer> arrived_;  // entries of dropped_ and errors_ that are in the result
  std::vector<std::uint32_t> scratch_;
};

}  // namespace

// A merge adds two lists of k entries. Cutting the sum costs as much as adding k more. At the end,
// two lists are put back. own: entries of a rank's own selection, at least k. Every list after its
// first merge has k.
CostTerms gtopk_terms_of(const ExchangeOptions& options, const Load& load, double own) {
  const double frame = frame_bytes(load, load.k), first = frame_bytes(load, own);
  const double log = log2_ceil(load.ranks), more = 3 * (own - load.k);
  if (options.kind == ExchangeKind::gtopk_tree) {
    return {.rounds = 2 * log,
            .sent_bytes = first + (log - 1) * frame,
            .chain_bytes = first + (2 * log - 1) * frame,
            .merged = (3 * log + 2) * load.k + more,
            .result = load.k};
  }
  const double inner = std::bit_width(static_cast<unsigned>(load.ranks)) - 1.0;
  // Ranks from the largest power of two up give their selections and get the result.
  const double folds = inner < log ? 1.0 : 0.0;
  return {.rounds = inner + 2 * folds,
          .sent_bytes = std::max(first + (inner - 1) * frame, (inner + folds) * frame),
          .chain_bytes = first + (inner - 1 + 2 * folds) * frame,
          .merged = (3 * (inner + folds) + 2) * load.k + more,
          .result = load.k};
}
CostTerms gtopk_terms(const ExchangeOptions& options, const Load& load) {
  return gtopk_terms_of(options, load, load.k);
}

std::unique_ptr<Exchange> make_gtopk(const ExchangeOptions& options) {
  SKIM_EXPECTS(is_named(options.drop), "gtopk: unknown drop policy (" +
                                           std::to_string(static_cast<int>(options.drop)) + ")");
  return std::make_unique<GTopK>(options);
}

}  // namespace skim
