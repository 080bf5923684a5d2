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
//              does the same merges, so no broadcast is needed
//
// If P is not a power of two, let Q be the largest power of two below it. In the butterfly, the
// ranks from Q up first give their selections to the rank Q below, and later get the result from
// it.
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
// A sum is rounded before it is sent. The rounding error (`error_`) has a keeper, too. With
// merger_keeps the keeper always gets it back. With the other policies the keeper gets it back only
// if the index is in the result; otherwise the ranks take back their whole entries.
#include <algorithm>
#include <array>
#include <bit>
#include <deque>
#include <vector>

#include "exchange/byte_counts.hpp"
#include "numbers.hpp"
#include "skim/error.hpp"
#include "skim/exchange.hpp"
#include "skim/select.hpp"

namespace skim {
namespace {

class GTopK final : public Exchange {
 public:
  explicit GTopK(const ExchangeOptions& options)
      : codec_(options.codec), drop_(options.drop), kind_(options.kind) {}
  std::string_view name() const noexcept override { return name_of(kind_); }

  ExchangeResult run(StepId id, const SparseView& mine, const Keep& keep, GroupStats& stats,
                     Communicator& comm) override {
    returned_.reset(mine.dim);
    if (comm.size() == 1) return {.sum = mine, .returned = returned_.view()};
    return or_abort(comm, [&] {
      make_room(mine, most_entries(keep));
      partial_ = mine;
      merges_ = 0;
      errors_.clear();
      if (kind_ == ExchangeKind::gtopk_tree) {
        tree(id, keep.k, stats, comm);
      } else {
        butterfly(id, keep.k, stats, comm);
      }
      put_back(mine);
      return ExchangeResult{.sum = partial_, .returned = returned_.view()};
    });
  }

  // In the tree, the root has one child per round. In the butterfly, the busiest rank also sends
  // the result to one of the ranks from Q up.
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
    room_ = std::max(most, mine.nnz());
    const std::size_t most_bytes = codec_.max_encoded_bytes(room_, mine.dim);
    for (auto* frame : {&frame_out_, &frame_in_}) frame->reserve(most_bytes);
    result_frame_.reserve(kind_ == ExchangeKind::gtopk_tree ? most_bytes : 0);
    for (SparseBuffer* s : {&incoming_, &kept_[0], &kept_[1], &mine_lost_}) s->reserve(room_);
    merged_.reserve(2 * room_);
    scratch_.reserve(2 * room_);
  }
  // Returns the i-th buffer. Every run of a group asks for the same buffers in the same order, so
  // only the first run allocates.
  static SparseBuffer& nth(std::deque<SparseBuffer>& buffers, std::size_t i, std::size_t room) {
    if (buffers.size() == i) buffers.emplace_back();
    buffers[i].reserve(room);
    return buffers[i];
  }

  // Sends partial_. This rank's selection is rounded already, but a sum is not.
  void send(StepId id, const GroupStats& stats, Communicator& comm, int to) {
    if (merges_ > 0) round_off(id, comm, {comm.rank(), 1}, 0);
    encode(stats, frame_out_);
    comm.wait(comm.isend(frame_out_, to));
  }
  void encode(const GroupStats& stats, std::vector<std::byte>& frame) {
    frame.clear();
    codec_.encode(partial_, &stats, frame);
  }
  void receive(Communicator& comm, int from) {
    comm.wait(comm.ireceive(frame_in_, from));
    decode_frame(codec_, frame_in_, partial_.dim, incoming_, of_peer_, comm, from);
  }

  // Ranks first .. first + size - 1, which did the same merges.
  struct Block {
    int first = 0, size = 1;
  };
  // Leaves in s the entries that this rank keeps.
  static void take_turns(SparseBuffer& s, const Block& block, int rank) {
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

  // Rounds partial_, a sum, to the values that a frame keeps. All ranks of the block round alike.
  void round_off(StepId id, const Communicator& comm, const Block& block, int hop) {
    if (codec_.options().value == ValueCode::f32) return;
    SparseBuffer& error = nth(error_, errors_.size(), room_);
    codec_.quantize(kept_[merges_ % 2], id, stream_of_hop(comm, hop + 1, block.first), error);
    partial_ = kept_[merges_ % 2].view();
    take_turns(error, block, comm.rank());
    errors_.push_back(error.view());
  }

  // Merges partial_ with the sum that arrived. All ranks of the block do the same merge. lower:
  // partial_ belongs to the lower half.
  void merge(std::size_t k, GroupStats& stats, bool lower, const Block& block, int rank) {
    const SparseView theirs = incoming_.view();
    sum(lower ? std::array{partial_, theirs} : std::array{theirs, partial_}, merged_);
    SparseBuffer& dropped = nth(dropped_, merges_, 2 * room_);
    SparseBuffer& kept = kept_[++merges_ % 2];
    split_top_k(merged_.view(), k, kept, dropped, scratch_);
    take_turns(dropped, block, rank);
    partial_ = kept.view();
    GroupStats first = lower ? stats : of_peer_;
    combine(first, lower ? of_peer_ : stats);
    stats = first;
  }

  // In round r, a rank that is an odd multiple of 2^r sends its sum to the rank 2^r below it and is
  // done.
  void tree(StepId id, std::size_t k, GroupStats& stats, Communicator& comm) {
    const int rounds = log2_ceil(comm.size());
    const int rank = comm.rank();
    bool active = true;
    for (int round = 0; round < rounds; ++round) {
      comm.set_phase({"gtopk: merge", round + 1, rounds});
      const int distance = 1 << round;
      if (active && (rank & distance) != 0) {
        send(id, stats, comm, rank - distance);
        active = false;
      } else if (active && rank + distance < comm.size()) {
        receive(comm, rank + distance);
        merge(k, stats, true, {rank, 1}, rank);
      }
      comm.end_round();
    }
    comm.set_phase({"gtopk: broadcast"});
    if (rank == 0) {
      round_off(id, comm, {0, 1}, 0);
      encode(stats, result_frame_);
    }
    comm.broadcast(result_frame_, 0);
    if (rank == 0) return;
    decode_frame(codec_, result_frame_, partial_.dim, incoming_, stats, comm, 0);
    partial_ = incoming_.view();
  }

  void butterfly(StepId id, std::size_t k, GroupStats& stats, Communicator& comm) {
    const int rank = comm.rank();
    const int inner = static_cast<int>(std::bit_floor(static_cast<unsigned>(comm.size())));
    const int rounds = std::countr_zero(static_cast<unsigned>(inner));
    const bool folds = inner < comm.size();
    if (folds) {
      comm.set_phase({"gtopk: fold"});
      if (rank >= inner) {
        send(id, stats, comm, rank - inner);
      } else if (rank + inner < comm.size()) {
        receive(comm, rank + inner);
        merge(k, stats, true, {rank, 1}, rank);
      }
      comm.end_round();
    }
    for (int round = 0; round < rounds; ++round) {
      if (rank < inner) {
        comm.set_phase({"gtopk: merge", round + 1, rounds});
        const int size = 1 << round;
        const int partner = rank ^ size;
        const Block mine{rank & ~(size - 1), size};
        if (merges_ > 0) round_off(id, comm, mine, round);
        encode(stats, frame_out_);
        const Ticket sending = comm.isend(frame_out_, partner);
        receive(comm, partner);
        comm.wait(sending);
        merge(k, stats, rank < partner, {rank & ~(2 * size - 1), 2 * size}, rank);
      }
      comm.end_round();
    }
    if (folds) {
      comm.set_phase({"gtopk: unfold"});
      if (rank >= inner) {
        receive(comm, rank - inner);
        partial_ = incoming_.view();
        stats = of_peer_;
      } else {
        // Round first, so that this rank keeps the same values as it sends.
        round_off(id, comm, {0, inner}, rounds);
        if (rank + inner < comm.size()) {
          encode(stats, frame_out_);
          comm.wait(comm.isend(frame_out_, rank + inner));
        }
      }
      comm.end_round();
    }
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

  Codec codec_;
  DropPolicy drop_;
  ExchangeKind kind_;  // gtopk or gtopk_tree
  std::vector<std::byte> frame_out_, frame_in_;
  std::vector<std::byte> result_frame_;  // of the tree's broadcast
  GroupStats of_peer_;
  SparseView partial_;      // this rank's partial sum
  std::size_t merges_ = 0;  // merges that made partial_
  std::size_t room_ = 0;    // the most entries of a frame
  SparseBuffer incoming_, merged_, mine_lost_, returned_;
  std::array<SparseBuffer, 2> kept_;  // of alternate merges: one reads the other
  std::deque<SparseBuffer> dropped_;  // [merges_]: the entries that this rank keeps
  std::deque<SparseBuffer> error_;    // [errors_.size()]: the entries that this rank keeps
  std::vector<SparseView> errors_, parts_;
  std::deque<SparseBuffer> arrived_;  // entries of dropped_ and error_ that are in the result
  std::vector<std::uint32_t> scratch_;
};

}  // namespace

// A merge adds two lists of k entries. Cutting the sum costs as much as adding k more. At the end,
// two lists are put back.
CostTerms gtopk_terms(const ExchangeOptions& options, const Load& load) {
  const double frame = frame_bytes(load, load.k), log = log2_ceil(load.ranks);
  if (options.kind == ExchangeKind::gtopk_tree) {
    return {.rounds = 2 * log,
            .sent_bytes = log * frame,
            .chain_bytes = 2 * log * frame,
            .merged = (3 * log + 2) * load.k,
            .result = load.k};
  }
  const double inner = std::bit_width(static_cast<unsigned>(load.ranks)) - 1.0;
  // Ranks from the largest power of two up give their selections and get the result.
  const double folds = inner < log ? 1.0 : 0.0;
  return {.rounds = inner + 2 * folds,
          .sent_bytes = (inner + folds) * frame,
          .chain_bytes = (inner + 2 * folds) * frame,
          .merged = (3 * (inner + folds) + 2) * load.k,
          .result = load.k};
}

std::unique_ptr<Exchange> make_gtopk(const ExchangeOptions& options) {
  SKIM_EXPECTS(is_named(options.drop), "gtopk: unknown drop policy (" +
                                           std::to_string(static_cast<int>(options.drop)) + ")");
  return std::make_unique<GTopK>(options);
}

}  // namespace skim
