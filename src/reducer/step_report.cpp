#include "reducer/step_report.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace skim {

void tell_group(StepReport& report, const SelectReport& chosen, double sent_norm2) {
  report.non_finite = chosen.non_finite;
  report.group.gradient_norm2 = chosen.gradient_norm2;
  report.group.accumulated_norm2 = chosen.total_norm2;
  report.group.sent_norm2 = sent_norm2;
  report.group.non_finite = static_cast<std::uint32_t>(
      std::min<std::uint64_t>(chosen.non_finite, std::numeric_limits<std::uint32_t>::max()));
}

void describe_sparse(StepReport& report, const SparsePath& path, LocalHalf& local,
                     const HeldMass* holder) {
  const auto& [keep, chosen, mine, sum, change] = path;
  report.k = keep.k;
  report.sent_entries = mine.nnz();
  report.sum_entries = sum.nnz();
  report.union_entries = holder != nullptr ? holder->union_entries() : 0;
  report.threshold = chosen.threshold;
  // The two norms are rounded differently, so their ratio may exceed 1.
  report.capture =
      chosen.total_norm2 > 0.0 ? std::min(1.0, chosen.kept_norm2 / chosen.total_norm2) : 1.0;
  const bool keeps = local.keeps_residual(report.id.slot);
  report.residual_norm = keeps ? std::sqrt(std::max(0.0, chosen.total_norm2 + change)) : 0.0;
}

void describe_dense(StepReport& report) {
  report.dense = true;
  report.k = report.sent_entries = report.sum_entries = report.n;
  report.capture = 1.0;
}

void count_traffic(StepReport& report, const Traffic& before, const Traffic& after) {
  report.sent_bytes = after.sent_bytes - before.sent_bytes;
  report.received_bytes = after.received_bytes - before.received_bytes;
  report.rounds = after.rounds - before.rounds;
}

}  // namespace skim
