// Gradients fused into buckets, in the order in which backward produces them. Each bucket is
// reduced as soon as its last gradient is there.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <optional>
#include <vector>

#include "skim/reducer.hpp"
#include "train/models.hpp"

namespace skim::train {

// The entries of a contiguous float32 tensor, which owns them.
std::span<float> entries(const torch::Tensor& t);

// A model's gradients as flat buffers, one per bucket. Every parameter's grad is a view into one.
struct FlatGradients {
  std::vector<Bucket> layout;          // slot b is bucket b, parameters by their name in the model
  std::vector<torch::Tensor> buffers;  // [buckets]
  std::vector<std::vector<torch::Tensor>> members;  // the parameters of a bucket
  std::vector<std::vector<torch::Tensor>> views;    // their grads
  std::size_t parameters = 0;                       // n, over all buckets

  // From now on, the model's gradients are these buffers, and not those of another FlatGradients.
  void attach();
};
// Returns attached gradients. bucket_bytes: a bucket is closed once it holds that many; 0: one
// bucket.
FlatGradients flatten_gradients(Model& model, std::size_t bucket_bytes);
// The lengths of the model's buckets, in entries. The model does not change.
std::vector<std::size_t> bucket_lengths(Model& model, std::size_t bucket_bytes);

// The flat gradients of one rank, which this object keeps flat. Not thread-safe. model and reducer
// must outlive it.
class GradientBuckets {
 public:
  // As flatten_gradients. Declares the layout to the reducer.
  GradientBuckets(Model& model, std::size_t bucket_bytes, Reducer& reducer);
  ~GradientBuckets();
  GradientBuckets(const GradientBuckets&) = delete;
  GradientBuckets& operator=(const GradientBuckets&) = delete;

  // The gradients; after finish() their means.
  const FlatGradients& flat() const noexcept { return flat_; }

  // Call before backward. Sets the gradients to zero; no bucket has started. scale: GradView::scale
  // of this step. None: backward starts no bucket, and finish() must not be called: gradients stay
  // this rank's own.
  void begin_step(std::optional<float> scale);
  // Call after backward. Starts the buckets that still wait for gradients (missing gradients are
  // zero), and waits for all buckets. Then every grad is the group's mean. reports: one per bucket.
  void finish(std::vector<StepReport>& reports);
  // Call after a failure between begin_step and finish. Waits for the started buckets and ignores
  // their errors.
  void drain() noexcept;

 private:
  struct Hook;
  // An owning pointer to autograd's node. Its type depends on the version of torch.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(torch::Tensor()));
  void gradient_is_there(std::size_t bucket);
  void start_ready();

  Reducer& reducer_;
  FlatGradients flat_;
  std::optional<float> scale_;
  std::vector<std::size_t> sizes_;    // parameters of a bucket
  std::vector<std::size_t> missing_;  // parameters without a gradient so far in this step
  std::size_t next_ = 0;              // the first bucket not started; buckets start in order
  std::vector<BucketTicket> tickets_;
  std::vector<Accumulator> accumulators_;  // keeps the hooks alive
};

}  // namespace skim::train
