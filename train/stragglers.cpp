#include "train/stragglers.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdio>

#include "src/numbers.hpp"

namespace skim::train {

std::string Stragglers::add(std::span<const double> compute, double seconds) {
  seconds_ += seconds;
  waited_.resize(std::max(waited_.size(), compute.size()));
  const auto trained = compute.subspan(servers_);
  std::vector<double> others(trained.begin(), trained.end());
  if (others.size() < 2) return {};
  const auto slowest = std::ranges::max_element(others);
  const double longest = *slowest;
  const auto rank = servers_ + static_cast<std::size_t>(slowest - others.begin());
  others.erase(slowest);
  const double usual = median(others);
  waited_[rank] += longest - usual;

  if (!(longest >= kSlow * usual)) {
    slow_for_ = 0.0;
    return {};
  }
  const bool goes_on = slow_for_ > 0.0 && rank == slow_;
  slow_for_ = goes_on ? slow_for_ + seconds : seconds;
  warned_ = goes_on && warned_;
  slow_ = rank;
  if (warned_ || slow_for_ < kLasting) return {};
  warned_ = true;
  char text[160];
  std::snprintf(text, sizeof text,
                "rank %zu has been slow for %.0f s: it computes %.1f times as long as the median "
                "of the others",
                rank, slow_for_, longest / usual);
  return text;
}

}  // namespace skim::train
