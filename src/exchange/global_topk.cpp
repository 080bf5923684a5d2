// Exact global top-k ("naive gTop-k" in arXiv 1901.04359): all-gather, then the k largest of the
// exact sum. What gtopk approximates and oktopk computes in parts.
#include <vector>

#include "exchange/factories.hpp"
#include "exchange/frames.hpp"
#include "skim/select.hpp"

namespace skim {
namespace {

class GlobalTopK final : public Exchange {
 public:
  explicit GlobalTopK(const ExchangeOptions& options) : allgather_(make_allgather(options)) {}
  std::string_view name() const noexcept override { return "global-topk"; }

  ExchangeResult run(StepId id, const SparseView& mine, const Keep& keep, GroupStats& stats,
                     Communicator& comm) override {
    ExchangeResult result = allgather_->run(id, mine, keep, stats, comm);
    if (comm.size() == 1) return result;
    // Every rank has the whole sum, so none holds what others gave: an entry that is dropped goes
    // back to its owners.
    const std::size_t most = keep.k * static_cast<std::size_t>(comm.size());
    dropped_.reserve(most);
    scratch_.reserve(most);
    split_top_k(result.sum, entries_of_result(keep), kept_, dropped_, scratch_);
    returned_.reserve(mine.nnz());
    filter(mine, kept_.view(), false, returned_);
    result.sum = kept_.view();
    result.returned = returned_.view();
    return result;
  }

  double most_bytes(std::size_t n, const Keep& keep, int ranks) const override {
    return allgather_->most_bytes(n, keep, ranks);
  }

 private:
  std::unique_ptr<Exchange> allgather_;
  SparseBuffer kept_, dropped_, returned_;
  std::vector<std::uint32_t> scratch_;
};

}  // namespace

std::unique_ptr<Exchange> make_global_topk(const ExchangeOptions& options) {
  return std::make_unique<GlobalTopK>(options);
}

}  // namespace skim
