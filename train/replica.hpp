// A rank's own parameters in a run with local steps.
#pragma once

#include <vector>

#include "skim/local_steps.hpp"
#include "train/buckets.hpp"
#include "train/options.hpp"

namespace skim::train {

// The model holds the replica, and this object the shared parameters x. Not thread-safe. Buckets
// and reducer must outlive it.
class Replica {
 public:
  // x is what the model holds now, equal on all ranks.
  Replica(const LocalStepsOptions& options, const GradientBuckets& buckets, Reducer& reducer);

  // LocalSteps::exchange. Uses the gradients' buffers, so their values are lost.
  bool exchange(double epoch, std::vector<StepReport>& reports);

  // While this object lives, the model holds x. Afterwards it holds the replica again.
  class Shared {
   public:
    explicit Shared(Replica& replica);
    ~Shared();
    Shared(const Shared&) = delete;
    Shared& operator=(const Shared&) = delete;
    const std::vector<torch::Tensor>& own() const noexcept {
      return own_;
    }  // the replica [buckets]

   private:
    Replica& replica_;
    std::vector<torch::Tensor> own_;
  };

  // To resume: the model holds the saved x. replica: as own(), of this rank.
  void resume(const std::vector<torch::Tensor>& replica);
  LocalSteps& local() noexcept { return local_; }

 private:
  void take_shared();
  void copy_from_model(const std::vector<torch::Tensor>& flat) const;
  void copy_to_model(const std::vector<torch::Tensor>& flat) const;

  const FlatGradients& flat_;
  LocalSteps local_;
};

}  // namespace skim::train
