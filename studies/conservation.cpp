// How much gradient mass the three rules of gTop-k lose, how far what was delivered is behind the
// gradients, and how evenly the residual lies on the ranks: the table of docs/results/accuracy.md.
// Usage: study_conservation
//
// Every rank's gradient is a part that all share and a part of its own, whole numbers, so that sums
// are exact and what is missing was lost, not rounded.
#include <cmath>
#include <cstdio>
#include <exception>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "skim/reducer.hpp"

namespace {

constexpr std::size_t kEntries = 2000, kKept = 20;
constexpr int kSteps = 50;

std::vector<float> gradient(int rank, int step) {
  std::mt19937_64 shared(static_cast<std::uint64_t>(step) + 1);
  std::mt19937_64 own(static_cast<std::uint64_t>(step * 1000 + rank) + 77);
  // One distribution each: it keeps half of what it draws for the next call, from any engine.
  std::normal_distribution<double> of_all, of_rank;
  std::vector<float> g(kEntries);
  for (float& v : g) {
    const double common = of_all(shared), mine = of_rank(own);
    v = static_cast<float>(std::round(1000.0 * (0.7 * common + 0.7 * mine)));
  }
  return g;
}

struct Mass {
  double lost = 0.0;                       // |gradients - residuals - delivered|_1
  double delivered = 0.0;                  // |delivered|_1, over all steps
  double behind = 0.0;                     // |gradients - delivered|_2 / |gradients|_2, at the end
  double largest = 0.0, smallest = 1e300;  // |residual|_1 of a rank
};

Mass measure(int ranks, skim::ExchangeKind kind, skim::DropPolicy drop) {
  const auto group = skim::make_in_process_group(ranks);
  const auto P = static_cast<std::size_t>(ranks);
  std::vector<std::vector<double>> given(P, std::vector<double>(kEntries));
  std::vector<std::vector<float>> residual(P);
  std::vector<double> received(kEntries);
  Mass mass;
  {
    std::vector<std::jthread> threads;
    for (std::size_t r = 0; r < P; ++r) {
      threads.emplace_back([&, r] {
        skim::ReducerOptions options;
        options.exchange.kind = kind;
        options.exchange.drop = drop;
        options.dense_below = 0;
        skim::ReducerParts parts;
        parts.schedule =
            skim::constant_density(static_cast<double>(kKept) / static_cast<double>(kEntries));
        skim::Reducer reducer(options, std::move(parts), *group[r]);
        reducer.set_layout(
            std::vector<skim::Bucket>{{.slot = 0, .parameters = {{"x", 0, kEntries}}}});
        for (int step = 0; step < kSteps; ++step) {
          std::vector<float> g = gradient(static_cast<int>(r), step);
          for (std::size_t i = 0; i < kEntries; ++i) given[r][i] += double{g[i]};
          reducer.reduce(0, std::span(g));
          reducer.end_step(0.0);
          if (r != 0) continue;
          for (std::size_t i = 0; i < kEntries; ++i) {
            // The mean times P: whole again.
            const double sum = std::round(double{g[i]} * ranks);
            received[i] += sum;
            mass.delivered += std::abs(sum);
          }
        }
        const auto left = reducer.local().residual(0).span();
        residual[r].assign(left.begin(), left.end());
      });
    }
  }
  double behind2 = 0.0, all2 = 0.0;
  for (std::size_t i = 0; i < kEntries; ++i) {
    double all = 0.0, kept = 0.0;
    for (std::size_t r = 0; r < P; ++r) {
      all += given[r][i];
      kept += double{residual[r][i]};
    }
    mass.lost += std::abs(all - kept - received[i]);
    behind2 += (all - received[i]) * (all - received[i]);
    all2 += all * all;
  }
  mass.behind = std::sqrt(behind2 / all2);
  for (const auto& of_rank : residual) {
    double norm = 0.0;
    for (const float v : of_rank) norm += std::abs(double{v});
    mass.largest = std::max(mass.largest, norm);
    mass.smallest = std::min(mass.smallest, norm);
  }
  return mass;
}

}  // namespace

int main() {
  try {
    if (gradient(0, 0) == gradient(1, 0)) throw std::logic_error("ranks with one gradient");
    std::printf("n %zu, k %zu, %d steps, half of the gradient's energy shared by the ranks\n\n",
                kEntries, kKept, kSteps);
    std::printf(
        "| P | exchange | rule | lost / delivered | behind | largest / smallest residual of a rank "
        "|\n");
    std::printf("|---|---|---|---|---|---|\n");
    for (const int ranks : {2, 3, 4, 8}) {
      for (const auto kind : {skim::ExchangeKind::gtopk_tree, skim::ExchangeKind::gtopk}) {
        for (const std::string_view rule : skim::names_of<skim::DropPolicy>()) {
          const Mass m = measure(ranks, kind, skim::from_name<skim::DropPolicy>(rule, "rule"));
          std::printf("| %d | %s | %s | %.4f %% | %.3f | %.2f |\n", ranks,
                      std::string(skim::name_of(kind)).c_str(), std::string(rule).c_str(),
                      100.0 * m.lost / m.delivered, m.behind, m.largest / m.smallest);
        }
      }
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "study_conservation: %s\n", e.what());
    return 1;
  }
  return 0;
}
