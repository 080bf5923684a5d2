// Sparse recursive doubling with a switch to dense (SparCML: Renggli et al., "SparCML:
// High-Performance Sparse Communication for Machine Learning", SC 2019, arXiv 1802.08021, its
// SSAR_Recursive_double). Exact. Any number of ranks.
//
// The ranks swap partial sums in a butterfly (pairwise.hpp) and add them. The lower block's sum
// comes first, so all ranks do the same additions. If the two sums together could fill more than
// half of the gradient, the new sum becomes *full*: it holds all n entries, additions are plain
// loops, and frames need no bits for indices.
//
// A block rounds its sum before it sends it. The block's lowest rank gets the rounding error back.
#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <vector>

#include "exchange/byte_counts.hpp"
#include "exchange/pairwise.hpp"
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

class SparCML final : public PairwiseExchange {
 public:
  explicit SparCML(const CodecOptions& codec) : PairwiseExchange(codec) {}
  std::string_view name() const noexcept override { return name_of(ExchangeKind::sparcml); }

  ExchangeResult run(StepId id, const SparseView& mine, const Keep& keep, GroupStats& stats,
                     Communicator& comm) override {
    returned_.reset(mine.dim);
    if (comm.size() == 1) return {.sum = mine, .returned = returned_.view()};
    return or_abort(comm, [&] {
      const std::size_t all = most_entries(keep) * static_cast<std::size_t>(comm.size());
      begin(mine, all <= mine.dim / 2 ? all : mine.dim);
      butterfly({id, keep.k, stats, comm}, {"sparcml: fold", "sparcml: add", "sparcml: unfold"});
      returned_.reserve(errors_.size() * room_);
      if (!errors_.empty()) sum(errors_, returned_);
      ExchangeResult result{.sum = partial_, .returned = returned_.view()};
      if (mine.dim > 0 && partial_.nnz() == mine.dim) {
        result.sum = {{}, {}, mine.dim};
        result.dense_sum = DenseView(last_sum().values());
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
  void merge(const Run&, const SparseView& lower, const SparseView& upper, const Block&,
             SparseBuffer& out) override {
    add(lower, upper, out);
  }
  void keep_own(SparseBuffer& error, const Block& block, int rank) override {
    if (rank != block.first) error.resize(0);
  }

  SparseBuffer returned_;
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
