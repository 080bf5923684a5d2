// Google Benchmark over the cases of cases.hpp: BM_Select/ALGO/SHAPE/N/DENSITY, and the bare pass
// as BM_Add/N. Times are of the steady state: 20 steps before, 4 gradients in turn. A subset by
// default; --benchmark_filter takes others, as in bench_select
// --benchmark_filter=BM_Select/exact/normal. What is checked and compared in one run:
// `skim bench select`.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "bench/cases.hpp"
#include "bench/local_step.hpp"
#include "skim/schedule.hpp"

namespace skim::bench {
namespace {

constexpr std::uint64_t kStepsBefore = 20;

void select(benchmark::State& state, SelectRule rule, std::string_view shape, std::size_t n,
            double density) {
  SelectOptions options;
  options.rule = rule;
  options.threshold = 1.0F;  // of the rule that is told one
  const Gradients gradients(shape, n);
  LocalStep step(make_selector(options), gradients, 0, n, entries(density, n));
  std::uint64_t t = 0;
  for (; t < kStepsBefore; ++t) {
    step.load(t);
    step.select();
  }
  int passes = 0;
  for (auto _ : state) {
    state.PauseTiming();
    step.load(t++);
    state.ResumeTiming();
    passes = std::max(passes, step.select().passes);
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(12 * n) * state.iterations());
  state.counters["selected"] = static_cast<double>(step.selection().nnz());
  state.counters["passes"] = passes;
}

void add_pass(benchmark::State& state, std::size_t n) {
  const Gradients gradients("normal", n);
  LocalStep step(make_selector({}), gradients, 0, n, 1);
  step.load(0);
  for (auto _ : state) step.bare();
  state.SetBytesProcessed(static_cast<std::int64_t>(12 * n) * state.iterations());
}

template <class... Parts>
std::string name(std::string_view first, const Parts&... parts) {
  std::ostringstream out;
  out << first;
  ((out << '/' << parts), ...);
  return out.str();
}

void register_all() {
  for (const std::size_t n : kLengths) {
    if (n > std::size_t{1} << 24U) continue;
    benchmark::RegisterBenchmark(name("BM_Add", n).c_str(),
                                 [=](benchmark::State& s) { add_pass(s, n); });
    for (const SelectRule rule : enumerators<SelectRule>()) {
      for (const Shape& shape : kShapes) {
        for (const double density : kDensities) {
          benchmark::RegisterBenchmark(
              name("BM_Select", name_of(rule), shape.name, n, density).c_str(),
              [=](benchmark::State& s) { select(s, rule, shape.name, n, density); });
        }
      }
    }
  }
}

}  // namespace
}  // namespace skim::bench

int main(int argc, char** argv) {
  std::string subset = "--benchmark_filter=BM_Add|BM_Select/.*/normal/(65536|4194304)/0.001";
  std::vector<char*> arguments{argv[0], subset.data()};  // a filter that is given comes later
  for (int i = 1; i < argc; ++i) arguments.push_back(argv[i]);
  int count = static_cast<int>(arguments.size());
  skim::bench::register_all();
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 2;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
