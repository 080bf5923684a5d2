// Exact global top-k ("naive gTop-k" in arXiv 1901.04359): all-gather, then keep the k largest
// entries of the exact sum. gtopk approximates this result. oktopk computes it region by region.
#include <vector>

#include "exchange/byte_counts.hpp"
#include "skim/error.hpp"
#include "skim/exchange.hpp"
#include "skim/select.hpp"

namespace skim {
namespace {

class GlobalTopK final : public Exchange {
 public:
  explicit GlobalTopK(const ExchangeOptions& options)
      : allgather_(make_exchange(allgather(options))) {}
  std::string_view name() const noexcept override { return name_of(ExchangeKind::global_topk); }

  ExchangeResult run(StepId id, const SparseView& mine, const Keep& keep, GroupStats& stats,
                     Communicator& comm) override {
    ExchangeResult result = allgather_->run(id, mine, keep, stats, comm);
    if (comm.size() == 1) return result;
    // Every rank has the whole sum, so no rank holds another's entries. Each dropped entry goes
    // back to the ranks that selected it.
    const std::size_t most = most_entries(keep) * static_cast<std::size_t>(comm.size());
    dropped_.reserve(most);
    scratch_.reserve(most);
    split_top_k(result.sum, result_entries(keep), kept_, dropped_, scratch_);
    returned_.reserve(mine.nnz());
    entries_not_in(mine, kept_.view(), returned_);
    result.sum = kept_.view();
    result.returned = returned_.view();
    return result;
  }

  double max_sent_bytes(std::size_t n, const Keep& keep, int ranks) const override {
    return allgather_->max_sent_bytes(n, keep, ranks);
  }

 private:
  static ExchangeOptions allgather(ExchangeOptions options) {
    options.kind = ExchangeKind::allgather;
    return options;
  }

  std::unique_ptr<Exchange> allgather_;
  SparseBuffer kept_, dropped_, returned_;
  std::vector<std::uint32_t> scratch_;
};

}  // namespace

// The cost of all-gather, and once more its summing for the cut.
CostTerms global_topk_terms(const ExchangeOptions& options, const Load& load) {
  CostTerms terms{.merged = 2 * load.ranks * load.k,
                  .result = std::min(load.ranks * load.k, result_of(load))};
  add_allgather(terms, form_of_frames(options.codec, load, load.k), load.ranks,
                frame_bytes(load, load.k), load.frame.length_bytes);
  return terms;
}

std::unique_ptr<Exchange> make_global_topk(const ExchangeOptions& options) {
  return std::make_unique<GlobalTopK>(options);
}

}  // namespace skim
