#include "train/watchdog.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "src/numbers.hpp"

namespace skim::train {

bool Watchdog::add(double loss) {
  losses_.push_back(std::isfinite(loss) ? loss : std::numeric_limits<double>::infinity());
  if (losses_.size() > kRecent + kBefore) losses_.pop_front();
  if (losses_.size() < kRecent) return false;
  if (!std::isfinite(recent())) return true;
  return split() >= kFewest && recent() > factor_ * before();
}

void Watchdog::forget(std::size_t steps) {
  losses_.resize(losses_.size() - std::min(losses_.size(), steps));
}

double Watchdog::recent() const { return median_of(split(), losses_.size()); }
double Watchdog::before() const { return median_of(0, split()); }

std::size_t Watchdog::split() const {
  return losses_.size() - std::min(losses_.size(), kRecent);
}

double Watchdog::median_of(std::size_t first, std::size_t last) const {
  const auto begin = losses_.begin();
  std::vector<double> part(begin + static_cast<std::ptrdiff_t>(first),
                           begin + static_cast<std::ptrdiff_t>(last));
  return median(part);
}

}  // namespace skim::train
