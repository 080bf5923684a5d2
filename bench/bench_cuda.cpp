// `skim bench select --device cuda` without libtorch: the shape normal, k = 0.1 %, as JSON lines,
// one for each rule and for CUB. Usage: bench_cuda [n...], by default 25000000 268435456.
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "bench/cuda_step.hpp"
#include "skim/cuda.hpp"
#include "skim/error.hpp"

namespace skim::bench {
namespace {

constexpr double kDensity = 0.001, kSeconds = 2.0;

void run(const std::string& device, const Gradients& gradients, std::unique_ptr<Selector> selector,
         bool is_exact, std::uint64_t steps_before) {
  const std::size_t n = gradients.n();
  const std::string rule(selector->name());
  const auto step = make_cuda_step(std::move(selector), is_exact, gradients, kept(kDensity, n));
  const Times t = measure(*step, steps_before, kSeconds);
  std::printf(
      "{\"select\": \"%s\", \"n\": %zu, \"k\": %zu, \"selected\": %zu, \"shape\": \"normal\", "
      "\"target\": \"cuda\", \"device\": \"%s\", \"ns\": %.0f, \"worst_ns\": %.0f, "
      "\"add_pass_ns\": %.0f, \"ratio\": %.3f, \"local_step_ratio\": %.3f, \"cold_ns\": %.0f, "
      "\"memory_bytes_per_second\": %.3g, \"passes\": %d}\n",
      rule.c_str(), n, t.k, t.selected, device.c_str(), t.ns, t.worst_ns, t.add_ns, t.ratio(),
      t.local_ratio(), t.cold_ns, t.memory_rate, t.passes);
  std::fflush(stdout);
}

std::size_t length(const std::string& text) {
  char* end = nullptr;
  const unsigned long long n = std::strtoull(text.c_str(), &end, 10);
  if (*end != '\0' || n == 0 || n > std::numeric_limits<Index>::max()) {
    throw InvalidArgument("n: expected 1 to 4294967295, got '" + text + "'");
  }
  return n;
}

void run_all(const std::vector<std::string>& arguments) {
  const std::string device = cuda_device();
  std::vector<std::size_t> lengths;
  for (const std::string& a : arguments) lengths.push_back(length(a));
  if (lengths.empty()) lengths = {kMiddleLength, kLengths.back()};
  for (const std::size_t n : lengths) {
    const Gradients gradients("normal", n);
    for (const SelectRule rule : {SelectRule::exact, SelectRule::gaussian}) {
      run(device, gradients, make_cuda_selector({.rule = rule}), rule == SelectRule::exact,
          kStepsBefore);
    }
    run(device, gradients, make_cub_selector(), true, Gradients::kInTurn);
  }
}

}  // namespace
}  // namespace skim::bench

int main(int argc, char** argv) try {
  skim::bench::run_all({argv + 1, argv + argc});
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "bench_cuda: %s\n", e.what());
  return 1;
}
