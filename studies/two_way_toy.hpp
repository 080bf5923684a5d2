// The toy problem of the paper on top-k on both links (Zou, De Sterck and Liu, arXiv 2209.15203, as
// its authors released it): three ranks, f_p(x) = |x - a_p|^2 / 2 with a_p = 1, 5, 10 in each of
// 100 entries, one entry a step and link.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "skim/communicator.hpp"
#include "skim/reducer.hpp"

namespace skim::study {

struct TwoWayToy {
  static constexpr int kRanks = 3;
  static constexpr std::array<double, kRanks> kCentres{1.0, 5.0, 10.0};
  static constexpr std::size_t kEntries = 100;
  static constexpr double kRate = 0.01;

  double up = 0.01, down = 0.01;  // densities; down 1: one way, up 1: downlink only
  ServerPlacement server = ServerPlacement::rank0;
  int steps = 1000, last = 100;  // the mean is taken over the last so many
  std::uint64_t seed = 1;        // of x_0 = 20 + N(0, 1)
};

// F - F* of the mean F of the f_p; F* = 6100 / 9.
inline double toy_gap(std::span<const float> x) {
  double mean = 0.0, gap = 0.0;
  for (const double a : TwoWayToy::kCentres) mean += a / TwoWayToy::kRanks;
  for (const float v : x) gap += 0.5 * (double{v} - mean) * (double{v} - mean);
  return gap;
}

// F - F*, averaged over the last steps.
inline double run_two_way_toy(const TwoWayToy& toy) {
  constexpr auto kRate = static_cast<float>(TwoWayToy::kRate);
  std::vector<float> start;
  std::mt19937_64 random(toy.seed);
  std::normal_distribution<float> normal(20.0F, 1.0F);
  for (std::size_t i = 0; i < TwoWayToy::kEntries; ++i) start.push_back(normal(random));

  double gap = 0.0;  // of rank 0
  const auto train = [&](Communicator& comm) {
    ReducerParts parts;
    parts.schedule = constant_density(toy.up, toy.down);
    Reducer reducer(
        {.exchange = {.kind = ExchangeKind::param_server, .server = {.placement = toy.server}},
         .dense_below = 0},
        std::move(parts), comm);
    reducer.set_layout(std::vector<Bucket>{{0, {{"x", 0, TwoWayToy::kEntries}}}});
    const auto centre =
        static_cast<float>(TwoWayToy::kCentres[static_cast<std::size_t>(comm.rank())]);
    std::vector<float> x = start, gradient(x.size());
    for (int step = 0; step < toy.steps; ++step) {
      for (std::size_t i = 0; i < x.size(); ++i) gradient[i] = x[i] - centre;
      GradView view = std::span(gradient);
      view.scale = 1.0F / kRate;  // memories hold updates
      reducer.reduce(0, view);
      reducer.end_step(0.0);
      for (std::size_t i = 0; i < x.size(); ++i) x[i] -= kRate * gradient[i];
      if (comm.rank() == 0 && step >= toy.steps - toy.last) gap += toy_gap(x) / toy.last;
    }
  };
  auto group = make_in_process_group(TwoWayToy::kRanks);
  std::vector<std::jthread> threads;
  for (auto& comm : group) threads.emplace_back([&train, &comm] { train(*comm); });
  threads.clear();
  return gap;
}

}  // namespace skim::study
