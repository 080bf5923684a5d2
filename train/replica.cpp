#include "train/replica.hpp"

#include <algorithm>

#include "skim/error.hpp"

namespace skim::train {
namespace {

// Flat buffers like these.
std::vector<torch::Tensor> buffers_like(const std::vector<torch::Tensor>& buffers) {
  std::vector<torch::Tensor> made;
  for (const torch::Tensor& b : buffers) made.push_back(torch::empty_like(b));
  return made;
}

}  // namespace

Replica::Replica(const LocalStepsOptions& options, const GradientBuckets& buckets, Reducer& reducer)
    : flat_(buckets.flat()), local_(options, reducer) {
  take_shared();
}

bool Replica::exchange(double epoch, std::vector<StepReport>& reports) {
  copy_from_model(flat_.buffers);
  std::vector<std::span<float>> replicas;
  for (const torch::Tensor& b : flat_.buffers) replicas.push_back(entries(b));
  bool applied = false;
  try {
    applied = local_.exchange(replicas, epoch, reports);
  } catch (const NonFiniteError&) {
    copy_to_model(flat_.buffers);
    throw;
  }
  copy_to_model(flat_.buffers);
  return applied;
}

Replica::Shared::Shared(Replica& replica)
    : replica_(replica), own_(buffers_like(replica.flat_.buffers)) {
  replica_.copy_from_model(own_);
  const std::vector<torch::Tensor> x = buffers_like(own_);
  for (std::size_t b = 0; b < x.size(); ++b) {
    std::ranges::copy(replica_.local_.shared(static_cast<Slot>(b)), entries(x[b]).begin());
  }
  replica_.copy_to_model(x);
}

Replica::Shared::~Shared() { replica_.copy_to_model(own_); }

void Replica::resume(const std::vector<torch::Tensor>& replica) {
  take_shared();
  copy_to_model(replica);
}

void Replica::take_shared() {
  const std::vector<torch::Tensor> x = buffers_like(flat_.buffers);
  copy_from_model(x);
  for (std::size_t b = 0; b < x.size(); ++b) {
    local_.set_shared(static_cast<Slot>(b), entries(x[b]));
  }
}

void Replica::copy_from_model(const std::vector<torch::Tensor>& flat) const {
  const torch::NoGradGuard no_grad;
  for (std::size_t b = 0; b < flat.size(); ++b) {
    for (std::size_t m = 0; m < flat_.members[b].size(); ++m) {
      const Segment& at = flat_.layout[b].parameters[m];
      flat[b]
          .narrow(0, static_cast<std::int64_t>(at.offset), static_cast<std::int64_t>(at.length))
          .copy_(flat_.members[b][m].flatten());
    }
  }
}

void Replica::copy_to_model(const std::vector<torch::Tensor>& flat) const {
  const torch::NoGradGuard no_grad;
  for (std::size_t b = 0; b < flat.size(); ++b) {
    for (std::size_t m = 0; m < flat_.members[b].size(); ++m) {
      const Segment& at = flat_.layout[b].parameters[m];
      torch::Tensor parameter = flat_.members[b][m];
      parameter.copy_(
          flat[b]
              .narrow(0, static_cast<std::int64_t>(at.offset), static_cast<std::int64_t>(at.length))
              .view(parameter.sizes()));
    }
  }
}

}  // namespace skim::train
