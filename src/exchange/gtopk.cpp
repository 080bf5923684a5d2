// gTop-k (arXiv 1901.04359): partial sums go up a binary tree, each merge keeps its k largest
// entries, and the root's result is broadcast. Any number of ranks.
//
// Vocabulary: a `merge` adds the frame of a child to what a rank holds and splits the sum into
// `kept` (k entries) and `dropped`. The `result` is what the root kept last.
//
// Who re-queues a dropped entry (DropPolicy), with `mine` this rank's selection:
//   survivors     index in the result:     the merger that dropped it (its part never arrived)
//                 index not in the result: every owner its own part of `mine`
//   merger_keeps  the merger, always
//   sender_keeps  every owner, if the index is not in the result (as published): what a merger
//                 dropped of an index that survived elsewhere is lost
//
// What a rank rounds off the sum that it sends on (`error_`) comes back to that rank: with
// merger_keeps always, otherwise if the index is in the result, because if it is not, its owners
// take back what they gave, whole.
#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "exchange/factories.hpp"
#include "exchange/frames.hpp"
#include "skim/select.hpp"

namespace skim {
namespace {

class GTopK final : public Exchange {
 public:
  explicit GTopK(const ExchangeOptions& options) : codec_(options.codec), drop_(options.drop) {}
  std::string_view name() const noexcept override { return "gtopk"; }

  ExchangeResult run(StepId id, const SparseView& mine, const Keep& keep, GroupStats& stats,
                     Communicator& comm) override {
    returned_.reset(mine.dim);
    if (comm.size() == 1) return {.sum = mine, .returned = returned_.view(), .contributors = 1};
    return or_abort(comm, [&] {
      const std::size_t merges = reduce(id, mine, keep.k, stats, comm);
      comm.set_phase({"gtopk: broadcast"});
      comm.broadcast(frame_, 0);
      decode_message(codec_, frame_, mine.dim, result_, stats, comm, 0);
      put_back(mine, merges);
      return ExchangeResult{
          .sum = result_.view(), .returned = returned_.view(), .contributors = comm.size()};
    });
  }

 private:
  // Up the tree: in round r a rank that is an odd multiple of 2^r sends what it holds to the rank
  // 2^r below it and is done. Leaves frame_ of the root holding the result. Returns the number of
  // merges that this rank made; dropped_ has one list for each.
  std::size_t reduce(StepId id, const SparseView& mine, std::size_t k, GroupStats& stats,
                     Communicator& comm) {
    const int rounds = static_cast<int>(std::bit_width(static_cast<unsigned>(comm.size() - 1)));
    const int rank = comm.rank();
    SparseView held = mine;
    std::size_t merges = 0;
    bool active = true;
    // Room for the most that may come, not for what comes: a warm step allocates nothing, however
    // much the ranks' selections overlap.
    const std::size_t room = std::max(k, mine.nnz());
    returned_room_ = 2 * room;
    frame_.reserve(codec_.max_encoded_bytes(room, mine.dim));
    for (SparseBuffer* s : {&incoming_, &kept_, &result_, &error_arrived_}) s->reserve(room);
    error_.reset(mine.dim);
    // Only a sum: what this rank selected is quantized.
    const auto encode = [&] {
      if (merges > 0) quantize_to_send(codec_, id, 1, comm, kept_, error_);
      frame_.clear();
      codec_.encode(held, &stats, frame_);
    };
    for (int round = 0; round < rounds; ++round) {
      comm.set_phase({"gtopk: merge", round + 1, rounds});
      const int distance = 1 << round;
      if (active && (rank & distance) != 0) {
        encode();
        comm.wait(comm.isend(frame_, rank - distance));
        active = false;
      } else if (active && rank + distance < comm.size()) {
        const int child = rank + distance;
        comm.wait(comm.ireceive(frame_, child));
        GroupStats of_child;
        decode_message(codec_, frame_, mine.dim, incoming_, of_child, comm, child);
        combine(stats, of_child);
        if (dropped_.size() == merges) dropped_.emplace_back();
        const std::size_t most = std::max(2 * room, held.nnz() + incoming_.nnz());
        returned_room_ += most;
        dropped_[merges].reserve(most);
        scratch_.reserve(most);
        error_.reserve(most);
        merged_.reserve(most);
        sum(std::array{held, incoming_.view()}, merged_);
        split_top_k(merged_.view(), k, kept_, dropped_[merges], scratch_);
        held = kept_.view();
        ++merges;
      }
      comm.end_round();
    }
    if (rank == 0) encode();
    return merges;
  }

  void put_back(const SparseView& mine, std::size_t merges) {
    const SparseView result = result_.view();
    parts_.clear();
    if (drop_ != DropPolicy::merger_keeps) {
      filter(mine, result, false, mine_lost_);
      parts_.push_back(mine_lost_.view());
    }
    if (drop_ != DropPolicy::sender_keeps) {
      survived_.resize(std::max(survived_.size(), merges));
      for (std::size_t m = 0; m < merges; ++m) {
        if (drop_ == DropPolicy::survivors) {
          survived_[m].reserve(mine.nnz());
          filter(dropped_[m].view(), result, true, survived_[m]);
          parts_.push_back(survived_[m].view());
        } else {
          parts_.push_back(dropped_[m].view());
        }
      }
    }
    if (drop_ == DropPolicy::merger_keeps) {
      parts_.push_back(error_.view());
    } else {
      filter(error_.view(), result, true, error_arrived_);
      parts_.push_back(error_arrived_.view());
    }
    returned_.reserve(returned_room_);
    sum(parts_, returned_);
  }

  Codec codec_;
  DropPolicy drop_;
  std::vector<std::byte> frame_;
  SparseBuffer incoming_, merged_, kept_, result_, mine_lost_, error_, error_arrived_, returned_;
  std::vector<SparseBuffer> dropped_, survived_;  // [merges]
  std::vector<SparseView> parts_;
  std::vector<std::uint32_t> scratch_;
  std::size_t returned_room_ = 0;
};

}  // namespace

std::unique_ptr<Exchange> make_gtopk(const ExchangeOptions& options) {
  SKIM_EXPECTS(
      static_cast<std::size_t>(options.drop) < drop_policy_names().size(),
      "gtopk: unknown drop policy (" + std::to_string(static_cast<int>(options.drop)) + ")");
  return std::make_unique<GTopK>(options);
}

}  // namespace skim
