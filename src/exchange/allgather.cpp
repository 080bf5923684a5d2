// All-gather: every rank sends its frame to all, and all add the frames in rank order. Exact.
#include <vector>

#include "exchange/byte_counts.hpp"
#include "skim/error.hpp"
#include "skim/exchange.hpp"

namespace skim {
namespace {

class Allgather final : public Exchange {
 public:
  explicit Allgather(const CodecOptions& codec) : codec_(codec) {}
  std::string_view name() const noexcept override { return name_of(ExchangeKind::allgather); }

  ExchangeResult run(StepId, const SparseView& mine, const Keep& keep, GroupStats& stats,
                     Communicator& comm) override {
    const auto ranks = static_cast<std::size_t>(comm.size());
    returned_.reset(mine.dim);
    if (ranks == 1) return {.sum = mine, .returned = returned_.view()};
    return or_abort(comm, [&] {
      comm.set_phase({"allgather: frames"});
      frame_.clear();
      codec_.encode(mine, &stats, frame_);
      comm.allgather(frame_, frames_, codec_.max_encoded_bytes(most_entries(keep), mine.dim));

      parts_.resize(ranks);
      views_.resize(ranks);
      const GroupStats own = stats;
      stats = {};
      for (std::size_t r = 0; r < ranks; ++r) {
        const int rank = static_cast<int>(r);
        // No need to decode this rank's own frame.
        if (rank == comm.rank()) {
          combine(stats, own);
          views_[r] = mine;
          continue;
        }
        GroupStats of_rank;
        decode_frame(codec_, frames_[r], mine.dim, parts_[r], of_rank, comm, rank);
        combine(stats, of_rank);
        views_[r] = parts_[r].view();
      }
      sum(views_, sum_);
      return ExchangeResult{.sum = sum_.view(), .returned = returned_.view()};
    });
  }

  double max_sent_bytes(std::size_t n, const Keep& keep, int ranks) const override {
    const std::size_t most = codec_.max_encoded_bytes(keep.k, n);
    const auto frame = static_cast<double>(most);
    return max_gathered_bytes(ranks, frame, ranks * frame, most);
  }

 private:
  Codec codec_;
  std::vector<std::byte> frame_;
  MessageList frames_;
  std::vector<SparseBuffer> parts_;  // [P]
  std::vector<SparseView> views_;    // [P]
  SparseBuffer sum_, returned_;
};

}  // namespace

CostTerms allgather_terms(const ExchangeOptions& options, const Load& load) {
  CostTerms terms{.merged = load.ranks * load.k, .result = std::min(load.n, load.ranks * load.k)};
  add_allgather(terms, form_of_frames(options.codec, load, load.k), load.ranks,
                frame_bytes(load, load.k), load.frame.length_bytes);
  return terms;
}

std::unique_ptr<Exchange> make_allgather(const ExchangeOptions& options) {
  return std::make_unique<Allgather>(options.codec);
}

}  // namespace skim
