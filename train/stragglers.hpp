// Which ranks keep the others waiting.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace skim::train {

// Sums up who was slower than the others. The ranks wait for the slowest one in every step. So in
// an interval of several steps, the median rank waits for at least as long as the slowest one
// computes longer.
class Stragglers {
 public:
  static constexpr double kSlow = 2.0;      // times the median: worth a warning
  static constexpr double kLasting = 60.0;  // seconds without a break, before the warning

  // servers: so many first ranks have no gradient, and nobody waits for their computing.
  explicit Stragglers(std::size_t servers = 0) : servers_(servers) {}

  // compute: the seconds that each rank spent on forward and backward in an interval. seconds: the
  // interval's length. Returns a warning of one line, once for each time that a rank becomes slow;
  // empty: none.
  std::string add(std::span<const double> compute, double seconds);

  // By rank: the seconds that the median of the others waited for it, at least. 0 of a server.
  const std::vector<double>& waited() const noexcept { return waited_; }
  // All intervals together.
  double seconds() const noexcept { return seconds_; }

 private:
  std::size_t servers_;
  std::vector<double> waited_;
  double seconds_ = 0.0;
  std::size_t slow_ = 0;    // the rank that was slow in the last interval
  double slow_for_ = 0.0;   // seconds without a break; 0: no rank was
  bool warned_ = false;     // of slow_
};

}  // namespace skim::train
