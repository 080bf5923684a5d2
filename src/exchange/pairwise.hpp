// Internal: the exchanges in which ranks add partial sums in pairs (gtopk, sparcml).
//
// In the *butterfly*, blocks of 2^i ranks hold the same partial sum before round i. Each rank of a
// block swaps that sum with its partner in the neighbouring block, and both merge the two sums. If
// P is not a power of two, let Q be the largest power of two below it. The ranks from Q up first
// give their selections to the rank Q below, and later get the result from it.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <deque>
#include <utility>
#include <vector>

#include "skim/exchange.hpp"

namespace skim {

class PairwiseExchange : public Exchange {
 protected:
  explicit PairwiseExchange(const CodecOptions& codec) : codec_(codec) {}

  struct Run {
    StepId id;
    std::size_t k;
    GroupStats& stats;
    Communicator& comm;
  };
  // Ranks first .. first + size - 1, which did the same merges.
  struct Block {
    int first = 0, size = 1;
  };
  struct Phases {
    const char *fold, *merge, *unfold;
  };

  // out = lower + upper, by all ranks of `block` alike.
  virtual void merge(const Run& run, const SparseView& lower, const SparseView& upper,
                     const Block& block, SparseBuffer& out) = 0;
  // Leaves in `error` the entries that this rank gets back. All ranks of the block have the same.
  virtual void keep_own(SparseBuffer& error, const Block& block, int rank) = 0;

  // room: the most entries of a frame. Reserves for it, so a warm run allocates nothing.
  void begin(const SparseView& mine, std::size_t room) {
    room_ = room;
    for (SparseBuffer* s : {&incoming_, &sums_[0], &sums_[1]}) s->reserve(room);
    for (auto* frame : {&frame_out_, &frame_in_}) {
      frame->reserve(codec_.max_encoded_bytes(room, mine.dim));
    }
    partial_ = mine;
    merges_ = 0;
    errors_.clear();
  }

  void butterfly(const Run& run, const Phases& phases) {
    Communicator& comm = run.comm;
    const int rank = comm.rank();
    const int inner = static_cast<int>(std::bit_floor(static_cast<unsigned>(comm.size())));
    const int rounds = std::countr_zero(static_cast<unsigned>(inner));
    const bool folds = inner < comm.size();
    if (folds) {
      comm.set_phase({phases.fold});
      if (rank >= inner) {
        comm.wait(start_send(run, rank - inner));
      } else if (rank + inner < comm.size()) {
        receive(comm, rank + inner);
        meet(run, true, {rank, 1});
      }
      comm.end_round();
    }
    for (int round = 0; round < rounds; ++round) {
      if (rank < inner) {
        comm.set_phase({phases.merge, round + 1, rounds});
        const int size = 1 << round;
        const int partner = rank ^ size;
        round_off(run, {rank & ~(size - 1), size}, round);
        const Ticket sending = start_send(run, partner);
        receive(comm, partner);
        comm.wait(sending);
        meet(run, rank < partner, {rank & ~(2 * size - 1), 2 * size});
      }
      comm.end_round();
    }
    if (folds) {
      comm.set_phase({phases.unfold});
      if (rank >= inner) {
        receive(comm, rank - inner);
        take(run.stats);
      } else {
        // Round first, so that this rank keeps the same values as it sends.
        round_off(run, {0, inner}, rounds);
        if (rank + inner < comm.size()) comm.wait(start_send(run, rank + inner));
      }
      comm.end_round();
    }
  }

  Ticket start_send(const Run& run, int to) {
    frame_out_.clear();
    codec_.encode(partial_, &run.stats, frame_out_);
    return run.comm.isend(frame_out_, to);
  }
  void receive(Communicator& comm, int from) {
    comm.wait(comm.ireceive(frame_in_, from));
    decode_frame(codec_, frame_in_, partial_.dim, incoming_, of_peer_, comm, from);
  }

  // Rounds partial_ before it is sent. All ranks of the block round alike. This rank's selection is
  // rounded already, but a sum is not.
  void round_off(const Run& run, const Block& block, int hop) {
    if (merges_ == 0 || codec_.options().value == ValueCode::f32) return;
    SparseBuffer& error = nth(error_, errors_.size(), room_);
    codec_.quantize(last_sum(), run.id, stream_of_hop(run.comm, hop + 1, block.first), error);
    partial_ = last_sum().view();
    keep_own(error, block, run.comm.rank());
    errors_.push_back(error.view());
  }

  // Merges partial_ with the sum that arrived. lower: partial_ is of the lower half of the block.
  void meet(const Run& run, bool lower, const Block& block) {
    const SparseView theirs = incoming_.view();
    SparseBuffer& out = sums_[(merges_ + 1) % 2];
    merge(run, lower ? partial_ : theirs, lower ? theirs : partial_, block, out);
    ++merges_;
    partial_ = out.view();
    GroupStats first = lower ? run.stats : of_peer_;
    combine(first, lower ? of_peer_ : run.stats);
    run.stats = first;
  }

  // The result has arrived.
  void take(GroupStats& stats) {
    std::swap(last_sum(), incoming_);
    partial_ = last_sum().view();
    stats = of_peer_;
  }

  // The buffer of partial_, unless that is this rank's selection.
  SparseBuffer& last_sum() { return sums_[merges_ % 2]; }

  // Returns the i-th buffer. Every run of a group asks for the same buffers in the same order, so
  // only the first run allocates.
  static SparseBuffer& nth(std::deque<SparseBuffer>& buffers, std::size_t i, std::size_t room) {
    if (buffers.size() == i) buffers.emplace_back();
    buffers[i].reserve(room);
    return buffers[i];
  }

  Codec codec_;
  std::size_t room_ = 0;    // the most entries of a frame
  SparseView partial_;      // this rank's partial sum
  std::size_t merges_ = 0;  // merges that made partial_
  std::vector<std::byte> frame_out_, frame_in_;
  GroupStats of_peer_;
  SparseBuffer incoming_;
  std::array<SparseBuffer, 2> sums_;  // of alternate merges: one reads the other
  std::deque<SparseBuffer> error_;    // [errors_.size()]
  std::vector<SparseView> errors_;    // the rounding errors that this rank gets back
};

}  // namespace skim
