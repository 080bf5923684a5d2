// An exchange of your own. An entry is delivered if at least two ranks selected its index. Every
// other entry goes back to its rank and waits in the residual.
#include <cstdio>
#include <memory>
#include <skim/reducer.hpp>
#include <thread>
#include <vector>

class Agreed final : public skim::Exchange {
 public:
  explicit Agreed(const skim::CodecOptions& codec) : codec_(codec) {}
  std::string_view name() const noexcept override { return "agreed"; }

  skim::ExchangeResult run(skim::StepId, const skim::SparseView& mine, const skim::Keep& keep,
                           skim::GroupStats& stats, skim::Communicator& comm) override {
    returned_.reset(mine.dim);
    if (comm.size() == 1) return {.sum = mine, .returned = returned_.view()};
    return skim::or_abort(comm, [&] {  // if this rank throws, no other rank waits for it
      comm.set_phase({"agreed: frames"});
      frame_.clear();
      codec_.encode(mine, &stats, frame_);
      comm.allgather(frame_, frames_, codec_.max_encoded_bytes(keep.k, mine.dim));

      parts_.resize(frames_.size());
      parts_views_.clear();
      votes_views_.clear();
      stats = {};
      for (std::size_t r = 0; r < frames_.size(); ++r) {  // in rank order, so all sums are equal
        skim::GroupStats of_rank;
        const int peer = static_cast<int>(r);
        skim::decode_frame(codec_, frames_[r], mine.dim, parts_[r], of_rank, comm, peer);
        skim::combine(stats, of_rank);
        const skim::SparseView part = parts_[r].view();
        if (ones_.size() < part.nnz()) ones_.resize(part.nnz(), 1.0F);
        parts_views_.push_back(part);
      }
      for (const skim::SparseView& part : parts_views_) {
        votes_views_.push_back({part.index, std::span(ones_).first(part.nnz()), part.dim});
      }
      skim::sum(parts_views_, sum_);
      skim::sum(votes_views_, votes_);  // has the indices of sum_

      agreed_.reset(mine.dim);
      const skim::SparseView sum = sum_.view(), votes = votes_.view();
      for (std::size_t e = 0; e < sum.nnz(); ++e) {
        if (votes.value[e] >= 2.0F) agreed_.append(sum.index[e], sum.value[e]);
      }
      skim::entries_not_in(mine, agreed_.view(), returned_);
      return skim::ExchangeResult{.sum = agreed_.view(), .returned = returned_.view()};
    });
  }

 private:
  skim::Codec codec_;
  std::vector<std::byte> frame_;
  skim::MessageList frames_;
  std::vector<skim::SparseBuffer> parts_;  // [rank]
  std::vector<skim::SparseView> parts_views_, votes_views_;
  std::vector<float> ones_;
  skim::SparseBuffer sum_, votes_, agreed_, returned_;
};

int main() {
  constexpr std::size_t n = 1000, ranks = 3;
  const auto group = skim::make_in_process_group(ranks);
  std::vector<std::unique_ptr<skim::Reducer>> reducers;
  for (const auto& comm : group) {
    skim::ReducerOptions options{.dense_below = 0};  // also this short bucket is compressed
    skim::ReducerParts parts;
    parts.schedule = skim::constant_density(0.05);
    parts.exchange = std::make_unique<Agreed>(options.exchange.codec);
    reducers.push_back(std::make_unique<skim::Reducer>(options, std::move(parts), *comm));
    reducers.back()->set_layout(std::vector<skim::Bucket>{{0, {{"weights", 0, n}}}});
  }

  std::size_t delivered = 0;
  for (std::size_t step = 0; step < 5; ++step) {
    // Multiples of 3: float sums are then exact, and so is the mean over 3 ranks.
    std::vector grads(ranks, std::vector<float>(n));
    std::vector<float> owed(n);  // residuals and gradients over the ranks, less what comes out
    for (std::size_t r = 0; r < ranks; ++r) {
      const std::span<const float> residual = reducers[r]->local().residual(0).span();
      for (std::size_t i = 0; i < n; ++i) {
        const std::size_t common = i * 7919 % 401, own = (i * 31 + r * 17 + step) % 53;
        grads[r][i] = 3.0F * (static_cast<float>(common + own) - 226.0F);
        owed[i] += residual[i] + grads[r][i];
      }
    }
    {
      std::vector<std::jthread> threads;
      for (std::size_t r = 0; r < ranks; ++r) {
        threads.emplace_back([&, r] {
          const skim::StepReport report = reducers[r]->reduce(0, std::span(grads[r]));
          reducers[r]->end_step(/*epoch=*/0.0);
          if (r == 0) delivered += report.sum_entries;
        });
      }
    }
    for (std::size_t r = 0; r < ranks; ++r) {
      if (grads[r] != grads[0]) return std::puts("the ranks differ"), 1;
      const std::span<const float> residual = reducers[r]->local().residual(0).span();
      for (std::size_t i = 0; i < n; ++i) owed[i] -= residual[i] + grads[r][i];
    }
    if (owed != std::vector<float>(n)) return std::puts("gradient mass is not conserved"), 1;
  }
  std::printf("%zu entries delivered in 5 steps; the ranks agree; nothing is lost\n", delivered);
}
