// All that the tool does with libtorch. Loading libtorch takes 0.4 s, so this is in a library of its
// own, which the tool loads when it first needs it (tools/torch_part.hpp).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>

#include "skim/communicator.hpp"
#include "skim/select.hpp"
#include "train/simulation.hpp"
#include "train/trainer.hpp"

namespace skim::train {

inline constexpr std::string_view kTorchTopk = "torch.topk";  // the name of TorchPart::topk's selector

// Errors of libtorch are thrown as Error, in one line. Threads: each function says how many threads
// libtorch computes with from then on.
class TorchPart {
 public:
  virtual ~TorchPart() = default;
  // train::train, on options.threads threads.
  virtual Summary train(const TrainOptions& options, const Dataset& data, Communicator& comm,
                        const std::atomic<bool>& stop, const Observer& observer) const = 0;
  // train::simulate, on options.threads threads.
  virtual SimulationSummary simulate(const TrainOptions& options, const Dataset& data,
                                     const SimulationOptions& simulation,
                                     const std::atomic<bool>& stop,
                                     const SimulationObserver& observer) const = 0;
  // The parameters of the options' model. On one thread, so a process may fork afterwards.
  virtual std::uint64_t count_parameters(const TrainOptions& options,
                                         const DataInfo& data) const = 0;
  // A selector, named kTorchTopk, that selects by torch.topk on so many threads.
  virtual std::unique_ptr<Selector> topk(int threads) const = 0;
};

}  // namespace skim::train

// The one of this library.
extern "C" const skim::train::TorchPart* skim_torch_part();
