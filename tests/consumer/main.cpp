// Includes every installed header and runs one step on two ranks.
#include <cstdio>
#include <skim/analysis.hpp>
#include <skim/c_api.h>
#include <skim/chooser.hpp>
#include <skim/codec.hpp>
#include <skim/communicator.hpp>
#include <skim/cost.hpp>
#include <skim/error.hpp>
#include <skim/exchange.hpp>
#include <skim/feedback.hpp>
#include <skim/fields.hpp>
#include <skim/local_half.hpp>
#include <skim/names.hpp>
#include <skim/reducer.hpp>
#include <skim/report.hpp>
#include <skim/schedule.hpp>
#include <skim/select.hpp>
#include <skim/types.hpp>
#include <skim/version.hpp>
#include <thread>
#include <vector>

int main() {
  const auto group = skim::make_in_process_group(2);
  std::vector<std::vector<float>> grads = {{1.0F, 0.0F, 8.0F, 0.5F}, {2.0F, 6.0F, 0.0F, 0.5F}};
  const auto run = [&](std::size_t rank) {
    skim::ReducerParts parts;
    parts.schedule = skim::constant_density(0.25);
    skim::Reducer reducer({.dense_below = 0}, std::move(parts), *group[rank]);
    reducer.set_layout(std::vector<skim::Bucket>{{0, {{"x", 0, 4}}}});
    reducer.reduce(0, std::span(grads[rank]));
    reducer.end_step(0.0);
  };
  std::jthread other(run, 1);
  run(0);
  other.join();
  const std::vector<float> expected = {0.0F, 3.0F, 4.0F, 0.0F};
  if (grads[0] != expected || grads[1] != expected) return 1;
  std::printf("skim " SKIM_VERSION " works from outside\n");
}
