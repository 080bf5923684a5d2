#include "train/torch_part.hpp"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <tuple>

#include "bench/local_step.hpp"
#include "skim/error.hpp"
#include "train/loop.hpp"

namespace skim::train {
namespace {

// The line of an error of libtorch.
std::string line_of(const c10::Error& error) {
  const std::string why = error.what_without_backtrace();
  if (why.find("Storage size calculation overflowed") != why.npos) {
    return "out of memory: a tensor is larger than any memory";
  }
  if (why.find("DefaultCPUAllocator") != why.npos) {
    constexpr std::string_view kBefore = "you tried to allocate ";
    const std::size_t at = why.find(kBefore);
    if (at == why.npos) return "out of memory";
    const std::size_t begin = at + kBefore.size();
    return "out of memory: no room for " +
           why.substr(begin, why.find_first_not_of("0123456789", begin) - begin) + " bytes";
  }
  return why.substr(0, why.find('\n'));
}

template <class F>
auto translating_errors(F f) {
  try {
    return f();
  } catch (const c10::Error& e) {
    throw Error(line_of(e));
  }
}

class Topk final : public Selector {
 public:
  std::string_view name() const noexcept override { return kTorchTopk; }
  SelectReport select(const SelectTask& task, SparseBuffer& out) override {
    const at::NoGradGuard no_grad;
    const auto n = static_cast<std::int64_t>(task.grad.n);
    const auto k = static_cast<std::int64_t>(task.keep.k);
    const at::Tensor r = at::from_blob(task.residual.data, {n});
    r.add_(at::from_blob(task.grad.data, {n}));
    const auto top = r.abs().topk(k, 0, true, /*sorted=*/false);
    const at::Tensor index = std::get<0>(std::get<1>(top).sort());
    const at::Tensor value = r.index_select(0, index);
    out.reset(task.grad.n);
    out.resize(task.keep.k);
    std::copy_n(index.data_ptr<std::int64_t>(), k, out.indices().begin());
    std::copy_n(value.data_ptr<float>(), k, out.values().begin());
    SelectReport report;
    report.threshold = bench::smallest_magnitude(out.view().value);
    return report;
  }
};

class Part final : public TorchPart {
 public:
  Summary train(const TrainOptions& options, const Dataset& data, Communicator& comm,
                const std::atomic<bool>& stop, const Observer& observer) const override {
    at::set_num_threads(options.threads);
    return translating_errors([&] { return train::train(options, data, comm, stop, observer); });
  }

  SimulationSummary simulate(const TrainOptions& options, const Dataset& data,
                             const SimulationOptions& simulation, const std::atomic<bool>& stop,
                             const SimulationObserver& observer) const override {
    at::set_num_threads(options.threads);
    return translating_errors(
        [&] { return train::simulate(options, data, simulation, stop, observer); });
  }

  std::uint64_t count_parameters(const TrainOptions& options, const DataInfo& data) const override {
    at::set_num_threads(1);
    return translating_errors([&] {
      std::uint64_t count = 0;
      for (const at::Tensor& p : make_model(options, data)->parameters()) {
        count += static_cast<std::uint64_t>(p.numel());
      }
      return count;
    });
  }

  std::unique_ptr<Selector> topk(int threads) const override {
    at::set_num_threads(threads);
    return std::make_unique<Topk>();
  }
};

}  // namespace
}  // namespace skim::train

const skim::train::TorchPart* skim_torch_part() {
  static const skim::train::Part part;
  return &part;
}
