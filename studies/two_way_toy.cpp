// Top-k on both links of a parameter server, on the toy problem of two_way_toy.hpp: the table of
// docs/results/both-links.md. Usage: study_two_way_toy
#include "studies/two_way_toy.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>

namespace {

struct Links {
  const char* name;
  double up, down;
};
constexpr Links kLinks[]{
    {"one way (up)", 0.01, 1.0}, {"both ways", 0.01, 0.01}, {"one way (down)", 1.0, 0.01}};
constexpr std::uint64_t kSeeds = 20;

void run() {
  std::printf("%-16s %10s %10s\n", "top-k", "F - F*", "deviation");
  for (const Links& links : kLinks) {
    double sum = 0.0, squares = 0.0;
    for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
      const double gap =
          skim::study::run_two_way_toy({.up = links.up, .down = links.down, .seed = seed});
      sum += gap;
      squares += gap * gap;
    }
    const double mean = sum / kSeeds;
    const double deviation = std::sqrt(std::max(0.0, squares / kSeeds - mean * mean));
    std::printf("%-16s %10.3f %10.3f\n", links.name, mean, deviation);
  }
}

}  // namespace

int main() {
  try {
    run();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "study_two_way_toy: %s\n", e.what());
    return 1;
  }
}
