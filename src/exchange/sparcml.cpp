// Sparse recursive doubling with a switch to dense (SparCML: Renggli et al., "SparCML:
// High-Performance Sparse Communication for Machine Learning", SC 2019, arXiv 1802.08021, its
// SSAR_Recursive_double). Exact. Any number of ranks.
//
// In round i, blocks of 2^i ranks hold the same partial sum. Each rank of a block swaps that sum
// with its partner in the neighbouring block and adds the two. The lower block's sum comes first,
// so all ranks do the same additions. If the two sums together could fill more than half of the
// gradient, the new sum becomes *full*: it holds all n entries, additions are plain loops, and
// frames need no bits for indices. If P is not a power of two, let Q be the largest power of two
// below it. The ranks from Q up first give their selections to the rank Q below, and later get the
// result from it.
//
// A block rounds its sum before it sends it. The block's lowest rank gets the rounding error back.
#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <vector>

#include "exchange/byte_counts.hpp"
#include "skim/error.hpp"
#include "skim/exchange.hpp"

namespace skim {
namespace {

// lower + upper.
void add(const SparseView& lower, const SparseView& upper, SparseBuffer& out) {
  const std::size_t n = lower.dim;
  if (lower.nnz() + upper.nnz() <= n / 2) {
    sum(std::array{lower, upper}, out);
    return;
  }
  out.set_dim(n);
  out.resize(n);
  std::iota(out.indices().begin(), out.indices().end(), Index{0});
  const std::span<float> total = out.values();
  if (lower.nnz() == n) {
    std::ranges::copy(lower.value, total.begin());
  } else {
    std::ranges::fill(total, 0.0F);
    for (std::size_t e = 0; e < lower.nnz(); ++e) total[lower.index[e]] = lower.value[e];
  }
  if (upper.nnz() == n) {
    for (std::size_t i = 0; i < n; ++i) total[i] += upper.value[i];
  } else {
    for (std::size_t e = 0; e < upper.nnz(); ++e) total[upper.index[e]] += upper.value[e];
  }
}

class SparCML final : public Exchange {
 public:
  explicit SparCML(const CodecOptions& codec) : codec_(codec) {}
  std::string_view name() const noexcept override { return name_of(ExchangeKind::sparcml); }

  ExchangeResult run(StepId id, const SparseView& mine, const Keep& keep, GroupStats& stats,
                     Communicator& comm) override {
    returned_.reset(mine.dim);
    if (comm.size() == 1) return {.sum = mine, .returned = returned_.view()};
    return or_abort(comm, [&] {
      const int rank = comm.rank();
      const int inner = static_cast<int>(std::bit_floor(static_cast<unsigned>(comm.size())));
      const int rounds = std::countr_zero(static_cast<unsigned>(inner));
      const bool folds = inner < comm.size();
      make_room(mine, keep, comm.size(), rounds);
      partial_.assign(mine);
      is_sum_ = false;
      if (folds) {
        comm.set_phase({"sparcml: fold"});
        if (rank >= inner) {
          send(stats, comm, rank - inner);
        } else if (rank + inner < comm.size()) {
          receive(mine.dim, comm, rank + inner);
          meet(stats, true);
        }
        comm.end_round();
      }
      for (int round = 0; round < rounds; ++round) {
        if (rank < inner) {
          comm.set_phase({"sparcml: add", round + 1, rounds});
          const int block = rank >> round << round;
          const int partner = rank ^ (1 << round);
          round_off(id, block, round, comm);
          frame_.clear();
          codec_.encode(partial_.view(), &stats, frame_);
          const Ticket sending = comm.isend(frame_, partner);
          receive(mine.dim, comm, partner);
          comm.wait(sending);
          meet(stats, rank < partner);
        }
        comm.end_round();
      }
      if (folds) {
        comm.set_phase({"sparcml: unfold"});
        // Round first, so that this rank keeps the same values as it sends.
        if (rank < inner) round_off(id, 0, rounds, comm);
        if (rank >= inner) {
          receive(mine.dim, comm, rank - inner);
          std::swap(partial_, incoming_);
          stats = of_peer_;
        } else if (rank + inner < comm.size()) {
          send(stats, comm, rank + inner);
        }
        comm.end_round();
      }
      if (!errors_.empty()) sum(errors_, returned_);
      ExchangeResult result{.sum = partial_.view(), .returned = returned_.view()};
      if (mine.dim > 0 && partial_.nnz() == mine.dim) {
        result.sum = {{}, {}, mine.dim};
        result.dense_sum = DenseView(partial_.values());
      }
      return result;
    });
  }

  // The worst case: selections without a common index. A rank below the largest power of two is
  // never idle, and rank 0's block is never smaller than another.
  double max_sent_bytes(std::size_t n, const Keep& keep, int ranks) const override {
    const auto size = [&](std::size_t nnz) {
      return static_cast<double>(codec_.max_encoded_bytes(nnz, n));
    };
    const auto frame = [&](int block) {
      const std::size_t most = keep.k * static_cast<std::size_t>(block);
      // Above n / 2 the sum is full, or just short of it.
      return block == 1 || most <= n / 2 ? size(most) : std::max(size(n / 2), size(n));
    };
    const int inner = static_cast<int>(std::bit_floor(static_cast<unsigned>(ranks)));
    const int outer = ranks - inner;
    double bytes = outer > 0 ? frame(ranks) : 0.0;
    for (int block = 1; block < inner; block *= 2) bytes += frame(block + std::min(block, outer));
    return bytes;
  }

 private:
  // Reserves for the largest sizes that can occur, so a warm run allocates nothing.
  void make_room(const SparseView& mine, const Keep& keep, int ranks, int rounds) {
    const std::size_t all = most_entries(keep) * static_cast<std::size_t>(ranks);
    const std::size_t most = all <= mine.dim / 2 ? all : mine.dim;
    for (SparseBuffer* s : {&partial_, &incoming_, &total_}) s->reserve(most);
    for (auto* m : {&frame_, &message_}) m->reserve(codec_.max_encoded_bytes(most, mine.dim));
    const std::size_t hops = static_cast<std::size_t>(rounds) + 1;
    error_.resize(hops);
    errors_.clear();
    errors_.reserve(hops);
    if (codec_.options().value == ValueCode::f32) return;
    for (SparseBuffer& error : error_) error.reserve(most);
    returned_.reserve(hops * most);
  }

  // Rounds the sum of the block that begins at rank `block`, before it is sent in `round`. All
  // ranks of the block round alike. A rank's own selection is rounded already.
  void round_off(StepId id, int block, int round, const Communicator& comm) {
    if (!is_sum_) return;
    SparseBuffer& error = error_[static_cast<std::size_t>(round)];
    codec_.quantize(partial_, id, stream_of_hop(comm, round + 1, block), error);
    if (comm.rank() == block) errors_.push_back(error.view());
  }

  void send(const GroupStats& stats, Communicator& comm, int to) {
    frame_.clear();
    codec_.encode(partial_.view(), &stats, frame_);
    comm.wait(comm.isend(frame_, to));
  }
  void receive(std::size_t dim, Communicator& comm, int from) {
    comm.wait(comm.ireceive(message_, from));
    decode_frame(codec_, message_, dim, incoming_, of_peer_, comm, from);
  }

  // Adds the sum that arrived. lower: it belongs to the ranks above this rank's block.
  void meet(GroupStats& stats, bool lower) {
    const SparseView mine = partial_.view(), theirs = incoming_.view();
    add(lower ? mine : theirs, lower ? theirs : mine, total_);
    std::swap(partial_, total_);
    GroupStats first = lower ? stats : of_peer_;
    combine(first, lower ? of_peer_ : stats);
    stats = first;
    is_sum_ = true;
  }

  Codec codec_;
  std::vector<std::byte> frame_, message_;
  GroupStats of_peer_;
  SparseBuffer partial_, incoming_, total_, returned_;
  bool is_sum_ = false;              // partial_ is more than this rank's selection
  std::vector<SparseBuffer> error_;  // [rounds + 1]
  std::vector<SparseView> errors_;   // the errors that this rank gets back
};

}  // namespace

// Assumes selections without a common index. The chain is what rank 0 sends, because its block is
// never smaller than another.
CostTerms sparcml_terms(const ExchangeOptions&, const Load& load) {
  const int inner = static_cast<int>(std::bit_floor(static_cast<unsigned>(load.ranks)));
  const double outer = load.ranks - inner;  // they give their selections away and get the result
  // Entries in the sum of that many ranks. A sum above n / 2 becomes full.
  const auto entries = [&](double ranks) {
    return ranks > 1 && ranks * load.k > load.n / 2 ? load.n : ranks * load.k;
  };
  CostTerms terms{.result = entries(load.ranks)};
  if (outer > 0) {
    terms.rounds += 1;
    terms.chain_bytes += frame_bytes(load, load.k);
    terms.merged += 2 * load.k;
  }
  for (int block = 1; block < inner; block *= 2) {
    const double held = entries(block + std::min<double>(block, outer));
    terms.rounds += 1;
    terms.sent_bytes += frame_bytes(load, held);
    terms.chain_bytes += frame_bytes(load, held);
    terms.merged += 2 * held;
  }
  if (outer > 0) {
    const double result = frame_bytes(load, terms.result);
    terms.rounds += 1;
    terms.sent_bytes += result;
    terms.chain_bytes += result;
  }
  return terms;
}

std::unique_ptr<Exchange> make_sparcml(const ExchangeOptions& options) {
  return std::make_unique<SparCML>(options.codec);
}

}  // namespace skim
