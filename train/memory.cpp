#include "train/memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>

#include "skim/error.hpp"

namespace skim::train {

double exchange_memory(std::span<const ExchangeKind> exchanges, int ranks, std::size_t n,
                       std::size_t k) {
  const Load load{.ranks = ranks, .n = static_cast<double>(n), .k = static_cast<double>(k)};
  double most = 0.0;
  for (const ExchangeKind kind : exchanges) most = std::max(most, row_of(kind).memory(load));
  return ranks * most;
}

void expect_memory(double bytes, const std::string& who, const std::string& remedy) {
  const double room =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  if (bytes <= 0.8 * room) return;
  const auto gigabytes = [](double x) {
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), x < 1e21 ? "%.0f" : "%.1e", 1e-9 * x);
    return std::string(text.data());
  };
  throw InvalidArgument(who + " needs about " + gigabytes(bytes) + " GB, and this machine has " +
                        gigabytes(room) + ": " + remedy);
}

}  // namespace skim::train
